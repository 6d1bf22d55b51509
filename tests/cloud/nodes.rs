//! Nodes: initialised, kept up, stopped, renamed, deleted; and left alone where nothing is certain.

use guestlet::wire::proto::v1::instance::Power;
use serde_json::{Value, json};

use crate::host::{Fault, instance};
use crate::lab::{Lab, NODES, annotation, has_taint, quiet, text, uid, wait};
use crate::patience::until;

const SHUTDOWN: &str = "node.cloudprovider.kubernetes.io/shutdown";

fn addresses(node: &Value) -> Vec<&str> {
    let all = node["status"]["addresses"].as_array().map(Vec::as_slice).unwrap_or_default();
    all.iter().filter(|one| one["type"] == "InternalIP").map(|one| text(&one["address"])).collect()
}

#[test]
fn a_node_is_initialised_when_its_vm_says_that_it_is_it_and_is_kept_up() {
    wait(async {
        let lab = Lab::start().await;
        let _replica = lab.replica("a");
        lab.join("n1", "uuid-1").await;
        let early = lab.told("n1", "VmNotFound").await;
        assert!(early.contains("no VM of this cluster"), "{early}");
        // The VM is called otherwise than its Node.
        lab.host.set(instance("1", "n1", "192.0.2.11"));
        let node = lab.initialised("n1").await;
        assert_eq!(node["spec"]["providerID"], "guestlet://1");
        assert_eq!(addresses(&node), ["192.0.2.11"], "it has its addresses before the taint goes");
        let labels = &node["metadata"]["labels"];
        for (key, value) in [
            ("topology.kubernetes.io/region", "r1"),
            ("topology.kubernetes.io/zone", "z1"),
            ("node.kubernetes.io/instance-type", "4c-8g"),
            ("example.com/rack", "7"),
            ("kubernetes.io/hostname", "n1"),
        ] {
            assert_eq!(labels[key], value, "{labels}");
        }
        assert!(lab.told("n1", "Initialized").await.contains("vm-1"));
        // It moves to another host, and gets another address.
        lab.host.change("1", |vm| {
            let topology = vm.topology.as_mut().unwrap();
            topology.zone = "z2".to_owned();
            topology.labels.clear();
            vm.interfaces[0].addresses = vec!["192.0.2.99/24".to_owned()];
        });
        let moved = lab.node_is("n1", "follows", |node| addresses(node) == ["192.0.2.99"]).await;
        let moved = if moved["metadata"]["labels"]["topology.kubernetes.io/zone"] == "z2" {
            moved
        } else {
            lab.node_is("n1", "is in the other zone", |node| {
                node["metadata"]["labels"]["topology.kubernetes.io/zone"] == "z2"
            })
            .await
        };
        assert!(moved["metadata"]["labels"]["example.com/rack"].is_null(), "the host has it no longer");
        assert!(lab.told("n1", "TopologyChanged").await.contains("z1 to z2"));
        // Then nothing is left to do.
        let version = text(&moved["metadata"]["resourceVersion"]).to_owned();
        quiet(3).await;
        assert_eq!(text(&lab.node("n1").await.unwrap()["metadata"]["resourceVersion"]), version);
    });
}

#[test]
fn a_vm_that_stops_taints_its_node_and_only_one_that_is_gone_for_certain_takes_it_along() {
    wait(async {
        let lab = Lab::start().await;
        let _replica = lab.replica("a");
        for number in ["1", "2", "3"] {
            lab.host.set(instance(number, &format!("n{number}"), &format!("192.0.2.1{number}")));
            lab.join(&format!("n{number}"), &format!("uuid-{number}")).await;
            lab.initialised(&format!("n{number}")).await;
        }
        lab.host.change("1", |vm| vm.power = Power::Stopped.into());
        quiet(1).await;
        assert!(!has_taint(&lab.node("n1").await.unwrap(), SHUTDOWN), "its kubelet says that it is well");
        lab.report("n1", false, "uuid-1").await;
        lab.node_is("n1", "is tainted", |node| has_taint(node, SHUTDOWN)).await;
        lab.host.change("1", |vm| vm.power = Power::Running.into());
        lab.report("n1", true, "uuid-1").await;
        lab.node_is("n1", "is not tainted any more", |node| !has_taint(node, SHUTDOWN)).await;
        // Gone from what is told, and nobody can say more.
        lab.host.withdraw("2", false);
        lab.report("n2", false, "uuid-2").await;
        assert!(lab.told("n2", "VmUnknown").await.contains("another host"));
        // Gone, and its kubelet was the last to hear of it.
        lab.host.withdraw("3", true);
        quiet(3).await;
        assert!(lab.node("n3").await.is_some(), "a Node that is ready is nobody's to delete");
        lab.report("n3", false, "uuid-3").await;
        until("n3 is deleted", async || lab.node("n3").await.is_none().then_some(())).await;
        assert!(lab.told("n3", "DeletingNode").await.contains('3'));
        assert!(lab.node("n2").await.is_some(), "what is not known is not gone");
        assert!(lab.host.calls("GetInstance") >= 3, "it was asked twice before");
    });
}

#[test]
fn while_the_host_cannot_be_asked_no_node_is_deleted() {
    wait(async {
        let mut lab = Lab::start().await;
        let mut replica = lab.replica("a");
        lab.host.set(instance("1", "n1", "192.0.2.11"));
        lab.join("n1", "uuid-1").await;
        lab.initialised("n1").await;
        // Its VM is gone, but nobody can be asked: one way after the other.
        lab.host.withdraw("1", true);
        quiet(1).await;
        lab.host.fault(Fault::Away);
        lab.report("n1", false, "uuid-1").await;
        until("it is asked for", async || (lab.host.calls("GetInstance") > 1).then_some(())).await;
        quiet(6).await;
        assert!(lab.node("n1").await.is_some(), "the host half knows nothing");
        lab.host.fault(Fault::Garbage);
        quiet(6).await;
        assert!(lab.node("n1").await.is_some(), "the host half talks nonsense");
        lab.serving = None;
        let _ = std::fs::remove_file(lab.host.socket());
        quiet(6).await;
        assert!(lab.node("n1").await.is_some(), "the agent is gone");
        assert!(replica.runs());
        lab.host.fault(Fault::None);
        lab.serving = Some(lab.host.serve());
        until("n1 is deleted in the end", async || lab.node("n1").await.is_none().then_some(())).await;
    });
}

#[test]
fn a_node_that_joins_under_another_name_is_the_same_vm() {
    wait(async {
        let lab = Lab::start().await;
        let _replica = lab.replica("a");
        lab.host.set(instance("1", "old", "192.0.2.11"));
        lab.join("old", "uuid-1").await;
        lab.initialised("old").await;
        lab.host.change("1", |vm| vm.node_name = "new".to_owned());
        lab.join("new", "uuid-1").await;
        // As long as both seem to live, it cannot be said which one it is.
        assert!(lab.told("new", "VmUnclear").await.contains("already is the Node old"));
        lab.report("old", false, "uuid-1").await;
        let new = lab.initialised("new").await;
        assert_eq!(new["spec"]["providerID"], "guestlet://1");
        quiet(4).await;
        assert!(lab.node("old").await.is_some(), "its VM exists");
    });
}

#[test]
fn who_may_be_more_than_one_is_nobody_and_a_guest_that_lies_gains_nothing() {
    wait(async {
        let lab = Lab::start().await;
        let _replica = lab.replica("a");
        // A copy of the other's disk and firmware.
        lab.host.set(instance("1", "twin", "192.0.2.11"));
        let mut copy = instance("2", "twin", "192.0.2.12");
        copy.system_uuid = "uuid-1".to_owned();
        lab.host.set(copy);
        lab.join("twin", "uuid-1").await;
        assert!(lab.told("twin", "VmUnclear").await.contains("more than one VM"));
        // One that says it is the Node of another.
        lab.host.set(instance("3", "n3", "192.0.2.13"));
        lab.host.set(instance("4", "n3", "192.0.2.14"));
        lab.join("n3", "uuid-3").await;
        assert_eq!(lab.initialised("n3").await["spec"]["providerID"], "guestlet://3");
        // And one that is somebody else's.
        let foreign = json!({ "metadata": { "name": "bare" }, "spec": { "providerID": "metal://1" } });
        let foreign = lab.api.create(NODES, &foreign).await;
        lab.report("bare", false, "uuid-1").await;
        quiet(3).await;
        let now = lab.node("bare").await.unwrap();
        assert_eq!((uid(&now), annotation(&now, "guestlet.io/cloud-provider")), (uid(&foreign), ""));
        assert!(has_taint(
            &lab.node("twin").await.unwrap(),
            "node.cloudprovider.kubernetes.io/uninitialized"
        ));
    });
}

#[test]
fn nodes_of_harvesters_cloud_provider_are_taken_over_as_they_are() {
    wait(async {
        let lab = Lab::start().await;
        let _replica = lab.replica("a");
        lab.host.set(instance("ab-1", "n1", "192.0.2.11"));
        let node = json!({ "metadata": { "name": "n1" }, "spec": { "providerID": "harvester://AB-1" } });
        lab.api.create(NODES, &node).await;
        lab.report("n1", true, "uuid-ab-1").await;
        let node = lab
            .node_is("n1", "is seen to", |node| {
                annotation(node, "guestlet.io/cloud-provider") == "guestlet-ccm"
            })
            .await;
        assert_eq!(node["spec"]["providerID"], "harvester://AB-1");
        assert_eq!(node["metadata"]["labels"]["topology.kubernetes.io/zone"], "z1");
    });
}
