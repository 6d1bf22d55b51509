//! Volumes that are plugged into running VMs by changes of their specs.

use serde_json::{Value, json};

use crate::client::{Watch, list};
use crate::lab::{Lab, NEVER, volumes_of, wait};
use crate::model::objects::{Kind, name, named, text};
use crate::model::pace::Step;
use crate::patience::until;

/// The phases in which a watch sees a volume until it is in this one, or has left.
async fn phases(watch: &mut Watch, volume: &str, last: &str) -> Vec<String> {
    let mut phases: Vec<String> = Vec::new();
    while let Some(change) = watch.next().await.unwrap() {
        let entry = named(&change["object"]["status"]["volumeStatus"], volume);
        let phase = entry.map_or("", |entry| text(&entry["phase"]));
        if phases.last().map_or("", String::as_str) != phase {
            phases.push(phase.to_owned());
        }
        if phases.last().is_some_and(|phase| phase == last) {
            break;
        }
    }
    phases
}

#[test]
fn a_volume_goes_through_its_phases() {
    wait(async {
        let lab = Lab::start().await;
        lab.running("web").await;
        let (_, version) = list(&lab.api, &Kind::Vmi.all()).await.unwrap();
        let mut watch = Watch::open(&lab.api, &Kind::Vmi.all(), &version).await.unwrap();

        lab.model.hold(Step::MakePod, "web");
        lab.plug("web", "data").await;
        let entry = lab.is_in("web", "data", "Pending").await;
        assert_eq!(entry["reason"], "FailedPvcNotFound");
        lab.claim("data", 8).await;
        assert_eq!(lab.is_in("web", "data", "Bound").await["reason"], "PVCNotReady");
        lab.model.release(Step::MakePod, "web");
        let seen = phases(&mut watch, "data", "Ready").await;
        assert_eq!(seen, ["Pending", "Bound", "AttachedToNode", "MountedToPod", "Ready"]);
        let entry = lab.entry("web", "data").await.unwrap();
        assert_eq!((&entry["target"], &entry["size"]), (&json!("sda"), &json!(8 << 20)));
        let pod = &lab.attachers().await[0];
        assert_eq!(entry["hotplugVolume"]["attachPodName"], name(pod));
        assert_eq!(lab.model.journal().holders("default", "data"), ["default/web"]);

        lab.unplug("web", &["data"]).await;
        let seen = phases(&mut watch, "data", "").await;
        assert_eq!(seen, ["Ready", "UnMountedFromPod", "Detaching", ""]);
        assert!(lab.model.journal().holders("default", "data").is_empty());
    });
}

#[test]
fn one_pod_has_all_volumes_and_each_change_makes_another() {
    wait(async {
        let lab = Lab::start().await;
        lab.running("web").await;
        for (number, claim) in ["one", "two", "three"].into_iter().enumerate() {
            lab.claim(claim, 8).await;
            lab.plug("web", claim).await;
            lab.is_in("web", claim, "Ready").await;
            assert_eq!(lab.model.journal().generations("default/web"), number + 1);
        }
        lab.unplug("web", &["two"]).await;
        lab.has_left("web", "two").await;
        let pods = until("there is one attachment pod", async || {
            let pods = lab.attachers().await;
            (pods.len() == 1).then_some(pods)
        })
        .await;
        assert_eq!(volumes_of(&pods[0]), ["one", "three"]);
        assert_eq!(lab.model.journal().generations("default/web"), 4);
        // What stays was not unplugged meanwhile.
        assert_eq!(lab.model.journal().held.len(), 3);
    });
}

#[test]
fn changes_made_at_once_share_a_pod() {
    wait(async {
        let lab = Lab::start().await;
        lab.running("web").await;
        lab.model.hold(Step::Copy, "web");
        for claim in ["one", "two", "three"] {
            lab.claim(claim, 8).await;
            lab.plug("web", claim).await;
        }
        until("all are bound", async || {
            let claims = lab.api.list(&Kind::Claim.within("default")).await;
            claims.iter().all(|claim| claim["status"]["phase"] == "Bound").then_some(())
        })
        .await;
        lab.model.release(Step::Copy, "web");
        for claim in ["one", "two", "three"] {
            lab.is_in("web", claim, "Ready").await;
        }
        assert_eq!(lab.model.journal().generations("default/web"), 1);
    });
}

#[test]
fn a_volume_that_cannot_be_attached_blocks_the_next_until_it_is_taken_out() {
    wait(async {
        let lab = Lab::start().await;
        for claim in ["first", "stuck", "later"] {
            lab.claim(claim, 8).await;
        }
        lab.running("web").await;
        lab.plug("web", "first").await;
        lab.is_in("web", "first", "Ready").await;

        lab.model.fail(Step::Attach, "stuck", "no replica is left");
        lab.plug("web", "stuck").await;
        let entry = lab.is_in("web", "stuck", "AttachedToNode").await;
        let pod = text(&entry["hotplugVolume"]["attachPodName"]).to_owned();
        let told = lab.told(&pod, "FailedAttachVolume").await;
        assert!(told.contains("no replica is left"), "{told}");
        lab.plug("web", "later").await;
        lab.is_in("web", "later", "Bound").await;
        // The second pod waits for ever; no third is made.
        assert_eq!(lab.model.journal().generations("default/web"), 2);
        assert_eq!(lab.entry("web", "first").await.unwrap()["phase"], "Ready");

        lab.unplug("web", &["stuck"]).await;
        lab.is_in("web", "later", "Ready").await;
        lab.has_left("web", "stuck").await;
        let journal = lab.model.journal();
        let last = journal.generations["default/web"].last().unwrap();
        assert_eq!(last.volumes, ["first", "later"]);
    });
}

#[test]
fn a_claim_that_is_not_bound_is_left_out_and_blocks_nobody() {
    wait(async {
        let lab = Lab::start().await;
        lab.claim_of(NEVER, "never", 8, "ReadWriteMany").await;
        lab.claim("data", 8).await;
        lab.running("web").await;
        lab.plug("web", "never").await;
        lab.plug("web", "data").await;
        lab.is_in("web", "data", "Ready").await;
        assert_eq!(lab.entry("web", "never").await.unwrap()["phase"], "Pending");
        assert_eq!(lab.entry("web", "never").await.unwrap()["reason"], "PVCNotReady");
        let journal = lab.model.journal();
        let in_pods = journal.generations["default/web"].iter().flat_map(|pod| &pod.volumes);
        assert!(in_pods.into_iter().all(|volume| volume == "data"));
    });
}

#[test]
fn the_status_outlives_the_spec_and_a_name_that_is_used_again_waits() {
    wait(async {
        let lab = Lab::start().await;
        lab.claim("data", 8).await;
        lab.running("web").await;
        lab.plug("web", "data").await;
        lab.is_in("web", "data", "Ready").await;

        lab.model.hold(Step::EndPod, "web");
        lab.unplug("web", &["data"]).await;
        lab.is_in("web", "data", "Detaching").await;
        let instance = lab.instance("web").await.unwrap();
        assert!(named(&instance["spec"]["volumes"], "data").is_none());
        lab.plug("web", "data").await;
        // The VM's spec has it, and the model has looked at that more than once before this claim is bound.
        lab.claim("other", 8).await;
        until("the other claim is bound", async || {
            let claim = lab.api.get(&Kind::Claim.path("default/other")).await?;
            (claim["status"]["phase"] == "Bound").then_some(())
        })
        .await;
        let instance = lab.instance("web").await.unwrap();
        assert!(named(&instance["spec"]["volumes"], "data").is_none());
        assert_eq!(lab.attached("data").await, [text(&instance["status"]["nodeName"])]);

        lab.model.release(Step::EndPod, "web");
        lab.is_in("web", "data", "Ready").await;
        assert_eq!(lab.model.journal().held.len(), 2);
        assert!(lab.model.journal().conflicts().is_empty());
    });
}

#[test]
fn nothing_is_copied_while_volumes_are_to_be_migrated() {
    wait(async {
        let lab = Lab::start().await;
        for claim in ["data", "other"] {
            lab.claim(claim, 8).await;
        }
        lab.vm_with("web", |vm| vm["spec"]["updateVolumesStrategy"] = json!("Migration")).await;
        lab.runs("web").await;
        lab.running("beside").await;
        lab.plug("web", "data").await;
        lab.plug("beside", "other").await;
        lab.is_in("beside", "other", "Ready").await;
        let instance = lab.instance("web").await.unwrap();
        assert!(named(&instance["spec"]["volumes"], "data").is_none());

        let change = json!({ "spec": { "updateVolumesStrategy": null } });
        lab.api.patch(&Kind::Vm.path("default/web"), &change).await.unwrap();
        lab.is_in("web", "data", "Ready").await;
    });
}

#[test]
fn nothing_is_copied_where_only_requests_count() {
    wait(async {
        let lab = Lab::start().await;
        lab.set_gates(&["HotplugVolumes", "DeclarativeHotplugVolumes"]).await;
        for claim in ["data", "other"] {
            lab.claim(claim, 8).await;
        }
        lab.running("web").await;
        lab.plug("web", "data").await;
        let options = json!({
            "name": "other",
            "disk": { "disk": { "bus": "scsi" } },
            "volumeSource": { "persistentVolumeClaim": { "claimName": "other" } },
        });
        assert_eq!(lab.call("web", "addvolume", &options).await.0, 202);
        lab.is_in("web", "other", "Ready").await;
        assert!(lab.entry("web", "data").await.is_none());
    });
}

#[test]
fn a_pod_that_vanishes_is_made_again_and_the_domain_keeps_its_disk() {
    wait(async {
        let lab = Lab::start().await;
        lab.claim("data", 8).await;
        lab.running("web").await;
        lab.plug("web", "data").await;
        lab.is_in("web", "data", "Ready").await;
        let pod = name(&lab.attachers().await[0]).to_owned();
        lab.model.lose_pod(&format!("default/{pod}")).await;
        until("another pod runs", async || {
            let pods = lab.attachers().await;
            let runs = |it: &Value| name(it) != pod && it["status"]["phase"] == "Running";
            pods.iter().any(runs).then_some(())
        })
        .await;
        assert_eq!(lab.entry("web", "data").await.unwrap()["phase"], "Ready");
        assert_eq!(lab.model.journal().held.len(), 1);
    });
}

#[test]
fn a_pod_that_fails_is_made_again() {
    wait(async {
        let lab = Lab::start().await;
        lab.claim("data", 8).await;
        lab.running("web").await;
        lab.model.fail(Step::RunPod, "web", "the container cannot be started");
        lab.plug("web", "data").await;
        until("a second pod is made", async || {
            (lab.model.journal().generations("default/web") > 1).then_some(())
        })
        .await;
        let journal = lab.model.journal();
        lab.told(&journal.generations["default/web"][0].pod, "Failed").await;
        lab.model.succeed(Step::RunPod, "web");
        lab.is_in("web", "data", "Ready").await;
    });
}

#[test]
fn a_node_that_is_full_is_told_of_the_pod() {
    wait(async {
        let lab = Lab::start().await;
        lab.claim("data", 8).await;
        lab.running("web").await;
        lab.model.fail(Step::Schedule, "web", "0/2 nodes are available: 1 node(s) exceed max volume count");
        lab.plug("web", "data").await;
        let entry = lab.is_in("web", "data", "AttachedToNode").await;
        let pod = text(&entry["hotplugVolume"]["attachPodName"]).to_owned();
        assert!(lab.told(&pod, "FailedScheduling").await.contains("exceed max volume count"));
        assert_eq!(entry["hotplugVolume"]["attachPodUID"], "");
        assert!(lab.attached("data").await.is_empty());
        lab.model.succeed(Step::Schedule, "web");
        lab.is_in("web", "data", "Ready").await;
    });
}

#[test]
fn a_domain_that_does_not_take_a_disk_or_let_it_go_is_told_of() {
    wait(async {
        let lab = Lab::start().await;
        lab.claim("data", 8).await;
        lab.running("web").await;
        lab.model.fail(Step::Plug, "data", "no more slots");
        lab.plug("web", "data").await;
        lab.is_in("web", "data", "MountedToPod").await;
        assert_eq!(lab.told("web", "SyncFailed").await, "no more slots");
        assert!(lab.model.journal().held.is_empty());
        lab.model.succeed(Step::Plug, "data");
        lab.is_in("web", "data", "Ready").await;

        lab.model.hold(Step::Unplug, "data");
        lab.unplug("web", &["data"]).await;
        lab.model.reaches(Step::Unplug, "data").await;
        assert_eq!(lab.entry("web", "data").await.unwrap()["phase"], "Ready");
        assert_eq!(lab.model.journal().holders("default", "data"), ["default/web"]);
        lab.model.release(Step::Unplug, "data");
        lab.has_left("web", "data").await;
    });
}

#[test]
fn a_claim_in_two_vms_is_in_the_journal() {
    wait(async {
        let lab = Lab::start().await;
        lab.claim("data", 8).await;
        for vm in ["one", "two"] {
            lab.running(vm).await;
            lab.plug(vm, "data").await;
            lab.is_in(vm, "data", "Ready").await;
        }
        let journal = lab.model.journal();
        assert_eq!(journal.holders("default", "data"), ["default/one", "default/two"]);
        assert_eq!(journal.conflicts().len(), 1);
    });
}
