//! What the cluster sees of guests: objects, and events.

use guestlet::wire::proto::v1::event::Kind;
use guestlet::wire::proto::v1::{Node, NodeChanged};
use serde_json::{Value, json};

use crate::bench::{Bench, GUESTS, INSTANCES, NODE, guest, guest_that_reads};
use crate::client::Watch;
use crate::cluster::wait;
use crate::patience::until;

async fn until_guest(bench: &Bench, name: &str, wanted: impl Fn(&Value) -> bool) -> Value {
    until(&format!("the Guest {name} is as wanted"), async || {
        bench.api.get(&format!("{GUESTS}/{name}")).await.filter(|guest| wanted(guest))
    })
    .await
}

#[test]
fn a_guest_has_an_object_that_is_written_when_something_changes() {
    wait(async {
        let bench = Bench::start().await;
        let web = bench.instance("web", NODE).await;
        let lab = bench.host().start();
        let guest = guest(&lab, &web);
        let seen = until_guest(&bench, "web", |guest| guest["status"]["session"] == "Connected").await;
        let owner = json!([{
            "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance", "name": "web", "uid": web["metadata"]["uid"],
        }]);
        assert_eq!(seen["metadata"]["ownerReferences"], owner);
        let status = &seen["status"];
        assert_eq!((&status["host"], &status["agentVersion"]), (&json!(NODE), &json!("0.1.0")));
        assert_eq!(
            (&status["cluster"], &status["hostName"]),
            (&json!("default/dev"), &json!("web-1.example"))
        );
        let ready =
            until_guest(&bench, "web", |guest| guest["status"]["conditions"][0]["status"] == "True").await;
        assert_eq!(ready["status"]["conditions"][0]["type"], "Ready");

        // Its heart beats, and nothing is written.
        let mut heard = lab.info("default/web")["last_heard"].clone();
        for _ in 0..5 {
            let now = lab.until_vm("default/web", |vm| vm["last_heard"] != heard);
            heard = now["last_heard"].clone();
        }
        let same = bench.api.get(&format!("{GUESTS}/web")).await.unwrap();
        assert_eq!(same["metadata"]["resourceVersion"], ready["metadata"]["resourceVersion"]);

        let node =
            Node { name: "web-1".into(), ready: "True".into(), state: "current".into(), ..Node::default() };
        guest.happen(Kind::NodeChanged(NodeChanged { node: Some(node) }));
        let changed = until_guest(&bench, "web", |guest| guest["status"]["nodeName"] == "web-1").await;
        assert_eq!(changed["status"]["nodeReady"], "True");
        let since = |guest: &Value| guest["status"]["conditions"][0]["lastTransitionTime"].clone();
        assert_eq!(since(&changed), since(&ready));

        drop(guest);
        let lost = until_guest(&bench, "web", |guest| guest["status"]["session"] == "Connecting").await;
        assert_eq!(lost["status"]["conditions"][0]["status"], "False");
        assert_eq!(lost["status"]["nodeName"], "web-1", "what was known stays");
    });
}

/// A restart wrote all objects of a node twice, and let each condition begin anew.
#[test]
fn a_restart_writes_nothing_and_keeps_since_when_a_guest_is_ready() {
    wait(async {
        let bench = Bench::start().await;
        let web = bench.instance("web", NODE).await;
        let mut lab = bench.host().start();
        let guest = guest(&lab, &web);
        let node = |ready: &str| {
            let node = Node { name: "web-1".into(), ready: ready.into(), ..Node::default() };
            Kind::NodeChanged(NodeChanged { node: Some(node) })
        };
        let is_ready = |guest: &Value| guest["status"]["conditions"][0]["status"] == "True";
        until_guest(&bench, "web", is_ready).await;
        guest.happen(node("True"));
        let before = until_guest(&bench, "web", |guest| guest["status"]["nodeReady"] == "True").await;

        lab.kill();
        let version = before["metadata"]["resourceVersion"].as_str().unwrap();
        let mut watch = Watch::open(&bench.api, GUESTS, version).await.unwrap();
        lab.again();
        lab.until_session("default/web", "connected");
        guest.happen(node("Unknown"));
        // The first change that is written is that of the guest.
        let change = watch.next().await.unwrap().unwrap();
        let mut wanted = before["status"].clone();
        wanted["nodeReady"] = json!("Unknown");
        assert_eq!((&change["type"], &change["object"]["status"]), (&json!("MODIFIED"), &wanted));
    });
}

#[test]
fn plugged_volumes_are_counted_without_a_session_and_written_when_their_number_changes() {
    wait(async {
        let bench = Bench::start().await;
        bench.instance("web", NODE).await;
        let _lab = bench.host().start();
        until_guest(&bench, "web", |guest| guest["status"]["volumes"] == 0).await;
        let path = format!("{INSTANCES}/web");
        let set = async |phases: &[&str]| {
            let volume = |(number, phase): (usize, &&str)| json!({ "name": format!("guestlet-disk-{number}"), "target": "", "phase": phase, "hotplugVolume": {} });
            let mut all: Vec<_> = phases.iter().enumerate().map(volume).collect();
            all.push(json!({ "name": "of-others", "target": "sda", "phase": "Ready", "hotplugVolume": {} }));
            bench.api.patch(&path, &json!({ "status": { "volumeStatus": all } })).await.unwrap();
        };
        set(&["Ready", "AttachedToNode"]).await;
        let one = until_guest(&bench, "web", |guest| guest["status"]["volumes"] == 1).await;
        // A phase that changes nothing of it is not written. What is written next says so.
        set(&["Ready", "MountedToPod"]).await;
        set(&["Ready", "Ready"]).await;
        let two = until_guest(&bench, "web", |guest| guest["status"]["volumes"] == 2).await;
        let generation = |guest: &Value| guest["metadata"]["resourceVersion"].clone();
        assert_ne!(generation(&one), generation(&two));
        set(&[]).await;
        until_guest(&bench, "web", |guest| guest["status"]["volumes"] == 0).await;
    });
}

#[test]
fn the_object_of_a_vm_that_was_made_again_is_of_the_new_one() {
    wait(async {
        let bench = Bench::start().await;
        bench.instance("web", NODE).await;
        let lab = bench.host().start();
        until_guest(&bench, "web", |guest| guest["status"]["session"] == "Connecting").await;
        bench.delete("web").await;
        let again = bench.instance("web", NODE).await;
        let _guest = guest(&lab, &again);
        let uid = &again["metadata"]["uid"];
        let seen = until_guest(&bench, "web", |guest| {
            guest["metadata"]["ownerReferences"][0]["uid"] == *uid
                && guest["status"]["session"] == "Connected"
        })
        .await;
        assert_eq!(seen["metadata"]["ownerReferences"].as_array().unwrap().len(), 1);
    });
}

#[test]
fn a_guest_that_is_refused_is_told_of_by_an_event() {
    wait(async {
        let bench = Bench::start().await;
        let web = bench.instance("web", NODE).await;
        let lab = bench.host().start();
        let _guest = guest_that_reads(&lab, &web, "77777777-5c0f-4a8e-9d1b-0d7a2f3b4c5d");
        let refused = until_guest(&bench, "web", |guest| guest["status"]["session"] == "Refused").await;
        let reason = refused["status"]["reason"].as_str().unwrap();
        assert!(reason.contains("77777777"), "{reason}");
        let events = until("there is an event", async || {
            let events = bench.api.list("/api/v1/namespaces/default/events").await;
            let of_web = |event: &Value| event["involvedObject"]["uid"] == web["metadata"]["uid"];
            let events: Vec<_> = events.into_iter().filter(of_web).collect();
            (!events.is_empty()).then_some(events)
        })
        .await;
        assert_eq!(events.len(), 1);
        let event = &events[0];
        assert_eq!((&event["type"], &event["reason"]), (&json!("Warning"), &json!("GuestRefused")));
        assert_eq!(event["involvedObject"]["kind"], "VirtualMachineInstance");
        assert!(event["message"].as_str().unwrap().contains(reason), "{event}");
    });
}
