//! VMs that start, stop and end, and hosts that do.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::{Value, json};
use tokio::sync::Notify;

use crate::lab::{HOSTS, Lab, SHARED, wait};
use crate::model::domain::{Disk, Domain, Nothing};
use crate::model::objects::{Kind, items, key, text, uid};
use crate::model::pace::Step;
use crate::patience::until;

async fn vm(lab: &Lab, name: &str) -> Option<Value> {
    lab.api.get(&Kind::Vm.path(&format!("default/{name}"))).await
}

#[test]
fn a_vm_starts_stops_and_goes() {
    wait(async {
        let lab = Lab::start().await;
        let instance = lab.running("web").await;
        let made = vm(&lab, "web").await.unwrap();
        assert_eq!(instance["metadata"]["ownerReferences"][0]["uid"], uid(&made));
        assert_eq!(instance["metadata"]["labels"]["app"], "web");
        let node = text(&instance["status"]["nodeName"]);
        assert!(HOSTS.contains(&node), "{instance}");
        assert_eq!(instance["metadata"]["labels"]["kubevirt.io/nodeName"], node);
        let uuid = &made["spec"]["template"]["spec"]["domain"]["firmware"]["uuid"];
        assert_eq!(instance["spec"]["domain"]["firmware"]["uuid"], *uuid);
        let pods = lab.api.list(&Kind::Pod.within("default")).await;
        assert_eq!(instance["status"]["activePods"], json!({ uid(&pods[0]): node }));

        lab.model.hold(Step::EndLauncher, "web");
        let stop = json!({ "spec": { "runStrategy": "Halted" } });
        lab.api.patch(&Kind::Vm.path("default/web"), &stop).await.unwrap();
        lab.model.reaches(Step::EndLauncher, "web").await;
        assert_eq!(lab.instance("web").await.unwrap()["status"]["phase"], "Succeeded");
        lab.model.release(Step::EndLauncher, "web");
        until("the instance is gone", async || lab.instance("web").await.is_none().then_some(())).await;
        until("the VM says so", async || {
            (vm(&lab, "web").await?["status"]["printableStatus"] == "Stopped").then_some(())
        })
        .await;
        let start = json!({ "spec": { "runStrategy": "Always" } });
        lab.api.patch(&Kind::Vm.path("default/web"), &start).await.unwrap();
        let again = lab.runs("web").await;
        assert_ne!(uid(&again), uid(&instance));
        assert_eq!(again["spec"]["domain"]["firmware"]["uuid"], *uuid);

        lab.api.delete(&Kind::Vm.path("default/web")).await;
        until("the VM is gone", async || vm(&lab, "web").await.is_none().then_some(())).await;
        assert!(lab.instance("web").await.is_none());
    });
}

#[test]
fn a_vm_whose_domain_ends_by_itself_is_started_again_with_its_volumes() {
    wait(async {
        let lab = Lab::start().await;
        let before = lab.running("web").await;
        lab.claim("data", 64).await;
        lab.plug("web", "data").await;
        lab.is_in("web", "data", "Ready").await;
        lab.model.lose_domain(uid(&before));
        lab.until_other("web", &before).await;
        lab.is_in("web", "data", "Ready").await;
        let journal = lab.model.journal();
        assert!(journal.conflicts().is_empty(), "{:?}", journal.conflicts());
        assert_eq!(journal.holders("default", "data"), ["default/web"]);
    });
}

#[test]
fn volumes_stay_attached_until_the_pods_of_a_stopped_vm_are_gone() {
    wait(async {
        let lab = Lab::start().await;
        lab.claim("data", 8).await;
        lab.running("web").await;
        lab.plug("web", "data").await;
        lab.is_in("web", "data", "Ready").await;
        lab.model.hold(Step::EndPod, "web");
        let stop = json!({ "spec": { "runStrategy": "Halted" } });
        lab.api.patch(&Kind::Vm.path("default/web"), &stop).await.unwrap();
        until("the instance is gone", async || lab.instance("web").await.is_none().then_some(())).await;
        assert!(lab.model.journal().holders("default", "data").is_empty());
        assert_eq!(lab.attachers().await.len(), 1);
        assert_eq!(lab.attached("data").await.len(), 1);
        lab.model.release(Step::EndPod, "web");
        until("the volume is detached", async || lab.attached("data").await.is_empty().then_some(())).await;
        // The VM still has the volume, which comes back with it.
        let start = json!({ "spec": { "runStrategy": "Always" } });
        lab.api.patch(&Kind::Vm.path("default/web"), &start).await.unwrap();
        lab.is_in("web", "data", "Ready").await;
    });
}

#[test]
fn an_instance_has_a_cid_where_the_gate_is_open() {
    wait(async {
        let lab = Lab::with("v1.8.4", &["VSOCK"], Arc::new(Nothing)).await;
        let with = |vm: &mut Value| {
            vm["spec"]["template"]["spec"]["domain"]["devices"]["autoattachVSOCK"] = json!(true);
        };
        lab.vm_with("one", with).await;
        lab.vm_with("two", with).await;
        let cid = async |vm| lab.runs(vm).await["status"]["VSOCKCID"].as_u64();
        let (one, two) = (cid("one").await.unwrap(), cid("two").await.unwrap());
        assert!(one >= 3 && two >= 3 && one != two, "{one} {two}");
        lab.running("without").await;
        assert!(cid("without").await.is_none());
    });
}

#[test]
fn the_vms_of_a_node_that_is_off_start_elsewhere_once_its_pods_are_taken_away() {
    wait(async {
        let lab = Lab::start().await;
        lab.claim("data", 8).await;
        let instance = lab.running("web").await;
        let node = text(&instance["status"]["nodeName"]).to_owned();
        lab.plug("web", "data").await;
        lab.is_in("web", "data", "Ready").await;
        lab.model.kill_node(&node).await;
        until("its domain has ended", async || {
            lab.model.journal().holders("default", "data").is_empty().then_some(())
        })
        .await;
        // The cluster does not know it.
        assert_eq!(lab.instance("web").await.unwrap()["status"]["phase"], "Running");
        let taint = json!({ "key": "node.kubernetes.io/out-of-service", "effect": "NoExecute" });
        lab.api.patch(&Kind::Node.path(&node), &json!({ "spec": { "taints": [taint] } })).await.unwrap();
        lab.model.evict_node(&node).await;
        let again = lab.until_other("web", &instance).await;
        assert_ne!(again["status"]["nodeName"], node);
        lab.is_in("web", "data", "Ready").await;
        until("the node has it no longer", async || {
            (lab.attached("data").await == [text(&again["status"]["nodeName"])]).then_some(())
        })
        .await;
        assert!(lab.model.journal().conflicts().is_empty());
    });
}

#[test]
fn a_node_that_is_only_cut_off_keeps_its_domains() {
    wait(async {
        let lab = Lab::start().await;
        lab.claim("data", 8).await;
        let instance = lab.running("web").await;
        let node = text(&instance["status"]["nodeName"]).to_owned();
        lab.plug("web", "data").await;
        lab.is_in("web", "data", "Ready").await;
        lab.model.cut_node(&node).await;
        lab.model.evict_node(&node).await;
        lab.until_other("web", &instance).await;
        lab.is_in("web", "data", "Ready").await;
        // Who takes the pods away without knowing has two domains with one volume, which the journal tells.
        assert_eq!(lab.model.journal().conflicts().len(), 1);
    });
}

#[test]
fn the_model_goes_on_after_the_api_server_was_killed() {
    wait(async {
        let mut lab = Lab::start().await;
        lab.claim("data", 8).await;
        lab.running("web").await;
        lab.model.hold(Step::Attach, "data");
        lab.plug("web", "data").await;
        lab.model.reaches(Step::Attach, "data").await;
        lab.turn.kill_api_server();
        lab.model.release(Step::Attach, "data");
        lab.turn.start_api_server();
        lab.is_in("web", "data", "Ready").await;
    });
}

#[test]
fn what_others_say_of_an_instance_stays() {
    wait(async {
        let lab = Lab::start().await;
        lab.running("web").await;
        lab.model.set_agent("default/web", true).await;
        let has = async |kind: &str, status: &str| {
            until(&format!("{kind} is {status}"), async || {
                let instance = lab.instance("web").await?;
                let mut conditions = items(&instance["status"]["conditions"]);
                conditions.any(|it| it["type"] == kind && it["status"] == status).then_some(())
            })
            .await;
        };
        has("AgentConnected", "True").await;
        lab.claim_of(SHARED, "local", 8, "ReadWriteOnce").await;
        lab.plug("web", "local").await;
        has("LiveMigratable", "False").await;
        has("AgentConnected", "True").await;
        lab.model.set_agent("default/web", false).await;
        has("AgentConnected", "False").await;
    });
}

#[test]
fn many_volumes_come_and_go_while_pods_vanish() {
    const VMS: [&str; 5] = ["vm-1", "vm-2", "vm-3", "vm-4", "vm-5"];
    wait(async {
        let lab = Lab::start().await;
        lab.model.speed(Duration::from_millis(1));
        lab.model.delay(Step::Attach, Duration::from_millis(50));
        for vm in VMS {
            lab.vm(vm).await;
        }
        let claims = |vm: &str| (0..4).map(|number| format!("{vm}-{number}")).collect::<Vec<_>>();
        for vm in VMS {
            lab.runs(vm).await;
            for claim in claims(vm) {
                lab.claim(&claim, 8).await;
                lab.plug(vm, &claim).await;
            }
            if let Some(pod) = lab.attachers().await.first() {
                lab.model.lose_pod(&key(pod)).await;
            }
        }
        for vm in VMS {
            for claim in claims(vm) {
                lab.is_in(vm, &claim, "Ready").await;
            }
        }
        assert_eq!(lab.model.journal().plugged().count(), 20);
        for vm in VMS {
            let claims = claims(vm);
            lab.unplug(vm, &claims.iter().map(String::as_str).collect::<Vec<_>>()).await;
        }
        until("nothing is attached", async || {
            let attachments = lab.api.list(&Kind::Attachment.all()).await;
            (attachments.is_empty() && lab.attachers().await.is_empty()).then_some(())
        })
        .await;
        let journal = lab.model.journal();
        assert_eq!((journal.plugged().count(), journal.held.len()), (0, 20));
        assert!(journal.conflicts().is_empty());
    });
}

/// A domain that takes a disk only when it is told to.
#[derive(Default)]
struct Slow {
    told: Notify,
    plugged: Mutex<Vec<String>>,
}

#[tonic::async_trait]
impl Domain for Slow {
    async fn plug(&self, disk: &Disk) -> Result<(), String> {
        if disk.claim == "slow" {
            self.told.notified().await;
        }
        self.plugged.lock().unwrap().push(disk.serial.clone());
        Ok(())
    }

    async fn unplug(&self, disk: &Disk) -> Result<(), String> {
        self.plugged.lock().unwrap().retain(|serial| *serial != disk.serial);
        if disk.claim == "slow" { Err("the guest does not let it go".to_owned()) } else { Ok(()) }
    }
}

#[test]
fn a_domain_of_the_tests_is_asked_and_waited_for() {
    wait(async {
        let domain = Arc::new(Slow::default());
        let lab = Lab::with("v1.9.0", &[], domain.clone()).await;
        for claim in ["slow", "data"] {
            lab.claim(claim, 8).await;
        }
        lab.running("web").await;
        lab.plug("web", "slow").await;
        lab.is_in("web", "slow", "MountedToPod").await;
        lab.plug("web", "data").await;
        lab.is_in("web", "data", "Ready").await;
        assert_eq!(*domain.plugged.lock().unwrap(), ["data"]);
        // It could be in the domain at any time from now on.
        assert_eq!(lab.model.journal().holders("default", "slow"), ["default/web"]);
        domain.told.notify_one();
        lab.is_in("web", "slow", "Ready").await;
        lab.unplug("web", &["slow", "data"]).await;
        // One pod has both, and is not deleted while the domain has one of them: so this one does not get further either.
        lab.is_in("web", "data", "UnMountedFromPod").await;
        assert_eq!(lab.told("web", "SyncFailed").await, "the guest does not let it go");
        assert_eq!(lab.model.journal().holders("default", "slow"), ["default/web"]);
        assert!(domain.plugged.lock().unwrap().is_empty());
    });
}
