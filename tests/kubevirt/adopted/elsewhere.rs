//! Claims that Harvester's CSI driver has made, and that something else uses beside the VM that has them.

use std::time::Duration;

use guestlet::host::backends::disks::DiskError;
use guestlet::host::backends::kubevirt::hotplug::Patience;
use guestlet::host::backends::kubevirt::names::Claim;
use guestlet::host::backends::volumes::{VolumeError, Volumes as _};
use http::{Method, StatusCode};
use serde_json::{Value, json};

use super::{CLAIM, alias, harvester_has_plugged, id, record, started};
use crate::claims::{
    LET_GO, claim_of, domains, make, place, plug, published, quick, unwilling, volumes_with, willing,
};
use crate::client::{JSON, call};
use crate::lab::{HOSTS, Lab, NAMESPACE, wait};
use crate::model::objects::{Kind, text};
use crate::model::pace::Step;
use crate::patience::until;

/// The host on which a VM runs, and the other one.
async fn hosts(lab: &Lab, vm: &str) -> (String, &'static str) {
    let instance = lab.instance(vm).await.unwrap();
    let here = text(&instance["status"]["nodeName"]).to_owned();
    let other = HOSTS.into_iter().find(|host| *host != here).unwrap();
    (here, other)
}

#[track_caller]
fn is_in_use(outcome: Result<String, VolumeError>, words: &[&str]) {
    let error = outcome.unwrap_err();
    assert!(matches!(error, VolumeError::InUse(_)), "{error:?}");
    for words in words {
        assert!(error.to_string().contains(words), "{words}: {error}");
    }
}

#[test]
fn what_is_attached_where_the_vm_does_not_run_is_not_taken_over() {
    wait(async {
        let (lab, volumes) = started(&["web", "db"]).await;
        let web = place(&lab, "web").await;
        harvester_has_plugged(&lab, "web").await;
        let (here, other) = hosts(&lab, "web").await;
        let claim = lab.api.get(&Kind::Claim.path(&format!("{NAMESPACE}/{CLAIM}"))).await.unwrap();
        // A node that is dead, or another cluster's program, has it attached.
        let attachment = json!({
            "metadata": { "name": "forgotten" },
            "spec": {
                "attacher": "elsewhere.test",
                "nodeName": other,
                "source": { "persistentVolumeName": claim["spec"]["volumeName"] },
            },
        });
        lab.api.create(&Kind::Attachment.all(), &attachment).await;
        is_in_use(plug(&volumes, &id(CLAIM), &web).await, &["VolumeAttachment forgotten", other]);
        assert_eq!((record(&volumes).await, domains(&lab, &id(CLAIM)).len()), (None, 1));
        lab.api.delete(&Kind::Attachment.path("forgotten")).await;

        // A pod that plugs it into another VM, which lists it no more.
        let owner = json!({
            "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "name": "db", "uid": place(&lab, "db").await.uuid,
        });
        let pod = json!({
            "metadata": {
                "name": "hp-volume-left", "labels": { "kubevirt.io": "hotplug-disk" }, "ownerReferences": [owner],
            },
            "spec": {
                "nodeName": here,
                "containers": [{ "name": "x", "image": "registry.test/x" }],
                "volumes": [{ "name": "x", "persistentVolumeClaim": { "claimName": CLAIM } }],
            },
        });
        lab.api.create(&Kind::Pod.within(NAMESPACE), &pod).await;
        is_in_use(plug(&volumes, &id(CLAIM), &web).await, &["the pod hp-volume-left", &here]);
        assert_eq!((record(&volumes).await, domains(&lab, &id(CLAIM)).len()), (None, 1));
        lab.model.lose_pod(&format!("{NAMESPACE}/hp-volume-left")).await;
        until("it is web's alone", async || plug(&volumes, &id(CLAIM), &web).await.ok()).await;
        volumes.unplug(&id(CLAIM), &web.vm, LET_GO, willing()).await.unwrap();
    });
}

/// What belongs to the VM is where it comes from, where it goes, and in two generations of pods for a while.
#[test]
fn a_vm_that_migrates_keeps_what_is_plugged_as_it_is() {
    wait(async {
        let (lab, volumes) = started(&["web"]).await;
        let web = place(&lab, "web").await;
        harvester_has_plugged(&lab, "web").await;
        let (from, to) = hosts(&lab, "web").await;
        let is_taken = async || {
            assert_eq!(plug(&volumes, &id(CLAIM), &web).await.unwrap(), alias().text());
            assert_eq!(record(&volumes).await, Some(published(&web)));
        };
        // The next generation of its pods waits.
        lab.claim("more", 16).await;
        lab.model.hold(Step::RunPod, "web");
        lab.plug("web", "more").await;
        lab.model.reaches(Step::RunPod, "web").await;
        assert_eq!(lab.attachers().await.len(), 2);
        is_taken().await;
        lab.model.release(Step::RunPod, "web");
        lab.is_in("web", "more", "Ready").await;

        // It is brought to the target, and the instance does not say yet that it goes there.
        lab.model.hold(Step::RunPod, "web");
        lab.model.hold(Step::HandOver, "web");
        lab.model.migrate(NAMESPACE, "web", to).await;
        lab.model.reaches(Step::RunPod, "web").await;
        let instance = lab.instance("web").await.unwrap();
        assert!(instance["status"]["migrationState"]["targetNode"].is_null());
        assert_eq!(lab.attached(CLAIM).await.len(), 2);
        is_taken().await;
        lab.model.release(Step::RunPod, "web");
        lab.model.reaches(Step::HandOver, "web").await;
        is_taken().await;

        // The source is let go of late: until then it may be another VM's there.
        lab.model.hold(Step::Detach, CLAIM);
        lab.model.release(Step::HandOver, "web");
        lab.model.reaches(Step::Detach, CLAIM).await;
        let instance = lab.instance("web").await.unwrap();
        assert_eq!(instance["status"]["nodeName"], to);
        is_in_use(plug(&volumes, &id(CLAIM), &web).await, &["VolumeAttachment", &from]);
        assert_eq!(domains(&lab, &id(CLAIM)), [web.vm.as_str()]);
        lab.model.release(Step::Detach, CLAIM);
        until("only the target has it", async || plug(&volumes, &id(CLAIM), &web).await.ok()).await;
        assert!(lab.model.journal().conflicts().is_empty());
    });
}

/// Another volume is on its way meanwhile, so that KubeVirt is told late; the guest may have mounted the disk again until then.
#[test]
fn what_a_guest_has_released_long_ago_is_asked_for_again() {
    wait(async {
        let (lab, quick_ones) = started(&["web"]).await;
        let (id, web) = (id(CLAIM), place(&lab, "web").await);
        harvester_has_plugged(&lab, "web").await;
        plug(&quick_ones, &id, &web).await.unwrap();
        let patience =
            Patience { settle: Duration::from_secs(60), released: Duration::from_secs(2), ..quick() };
        let volumes = volumes_with(&lab, patience).await;
        lab.claim("more", 16).await;
        lab.model.hold(Step::RunPod, "web");
        lab.plug("web", "more").await;
        lab.model.reaches(Step::RunPod, "web").await;
        let unplugging = volumes.unplug(&id, &web.vm, LET_GO, willing());
        let meanwhile = async {
            tokio::time::sleep(Duration::from_secs(4)).await;
            lab.model.release(Step::RunPod, "web");
        };
        let (outcome, ()) = tokio::join!(unplugging, meanwhile);
        let error = outcome.unwrap_err();
        assert!(
            matches!(&error, VolumeError::Waiting { words, .. } if words.contains("too long ago")),
            "{error:?}"
        );
        lab.is_in("web", "more", "Ready").await;
        assert_eq!(domains(&lab, &id), [web.vm.as_str()]);
        volumes.unplug(&id, &web.vm, LET_GO, willing()).await.unwrap();
        assert!(domains(&lab, &id).is_empty());
    });
}

/// Plugs a claim into the run of a VM alone, or takes it away, as virtctl does without --persist.
async fn at_the_instance(lab: &Lab, vm: &str, verb: &str, options: &Value) {
    let path = format!(
        "/apis/subresources.kubevirt.io/v1/namespaces/{NAMESPACE}/virtualmachineinstances/{vm}/{verb}"
    );
    assert_eq!(
        call(&lab.api, Method::PUT, &path, JSON, Some(options)).await.unwrap().0,
        StatusCode::ACCEPTED
    );
}

#[test]
fn what_is_plugged_at_the_instance_holds_nothing_up_and_is_refused_by_name() {
    wait(async {
        let (lab, volumes) = started(&["web"]).await;
        lab.set_gates(&["HotplugVolumes"]).await;
        let (id, web) = (id(CLAIM), place(&lab, "web").await);
        let own = make(&volumes, "data").await;
        let options = |name: &str, claim: &str| {
            json!({
                "name": name,
                "disk": { "disk": { "bus": "scsi" }, "serial": claim },
                "volumeSource": { "persistentVolumeClaim": { "claimName": claim } },
            })
        };
        lab.claim("scratch", 16).await;
        at_the_instance(&lab, "web", "addvolume", &options("scratch", "scratch")).await;
        lab.is_in("web", "scratch", "Ready").await;
        plug(&volumes, &own.id, &web).await.unwrap();

        // A claim of guestlet's, under its own name and another one, and one that Harvester's driver has made.
        let claims = [claim_of("spare"), claim_of("other"), CLAIM.to_owned()];
        let ids = [make(&volumes, "spare").await.id, make(&volumes, "other").await.id, id.clone()];
        let names = [Claim::of_id(&ids[0]).unwrap().volume(), "x".to_owned(), CLAIM.to_owned()];
        for ((id, claim), name) in ids.iter().zip(&claims).zip(&names) {
            at_the_instance(&lab, "web", "addvolume", &options(name, claim)).await;
            lab.is_in("web", name, "Ready").await;
            let refused = plug(&volumes, id, &web).await.unwrap_err();
            let told = refused.to_string();
            assert!(matches!(refused, VolumeError::Refused(_)), "{refused:?}");
            assert!(told.contains(name) && told.contains("only while it runs"), "{told}");
            assert_eq!(domains(&lab, id), [web.vm.as_str()]);
        }
        let held = volumes.take_back(&id, &web, LET_GO, willing()).await.unwrap_err();
        assert!(held.to_string().contains("only while it runs"), "{held}");
        volumes.unplug(&own.id, &web.vm, LET_GO, willing()).await.unwrap();
        for (id, name) in ids.iter().zip(&names) {
            at_the_instance(&lab, "web", "removevolume", &json!({ "name": name })).await;
            lab.has_left("web", name).await;
            until("it is plugged", async || plug(&volumes, id, &web).await.ok()).await;
        }
        assert!(lab.model.journal().conflicts().is_empty());
    });
}

/// Whatever Harvester's driver, or an administrator, does in the same moment: two writers are seen, and guestlet's own goes.
#[test]
fn what_is_plugged_twice_at_once_is_unplugged_again_by_guestlet() {
    wait(async {
        let (lab, volumes) = started(&["web", "db"]).await;
        let (id, web) = (id(CLAIM), place(&lab, "web").await);
        let ours = Claim::of_id(&id).unwrap().volume();
        let free = async || {
            until("it is free", async || volumes.unplug(&id, &web.vm, LET_GO, willing()).await.ok()).await;
            assert_eq!((record(&volumes).await, domains(&lab, &id).len()), (None, 0));
        };
        let pod = json!({
            "metadata": { "name": "backup" },
            "spec": {
                "containers": [{ "name": "x", "image": "registry.test/x" }],
                "volumes": [{ "name": "x", "persistentVolumeClaim": { "claimName": CLAIM } }],
            },
        });
        lab.model.hold(Step::Plug, CLAIM);
        let meanwhile = async {
            lab.model.reaches(Step::Plug, CLAIM).await;
            lab.api.create(&Kind::Pod.within(NAMESPACE), &pod).await;
            lab.model.release(Step::Plug, CLAIM);
        };
        let (outcome, ()) = tokio::join!(plug(&volumes, &id, &web), meanwhile);
        let error = outcome.unwrap_err();
        assert!(matches!(&error, VolumeError::Contested(why) if why.contains("the pod backup")), "{error:?}");
        // Its guest has begun to use it, whoever has told it: the disk stays, and the guest is asked again.
        let kept = volumes.unplug(&id, &web.vm, Duration::ZERO, unwilling()).await.unwrap_err();
        assert!(matches!(kept, VolumeError::Disk(DiskError::NotReleased(_))), "{kept:?}");
        assert_eq!(record(&volumes).await, Some(published(&web)));
        let again = plug(&volumes, &id, &web).await.unwrap_err();
        assert!(matches!(again, VolumeError::Contested(_)), "{again:?}");
        let waits = volumes.unplug(&id, &web.vm, Duration::ZERO, willing()).await.unwrap_err();
        assert!(matches!(waits, VolumeError::Waiting { .. }), "{waits:?}");
        assert_eq!(domains(&lab, &id), Vec::<String>::new());
        lab.model.lose_pod(&format!("{NAMESPACE}/backup")).await;
        free().await;

        // What somebody else has is not plugged again where it is missing.
        plug(&volumes, &id, &web).await.unwrap();
        lab.unplug("web", &[&ours]).await;
        lab.has_left("web", &ours).await;
        harvester_has_plugged(&lab, "db").await;
        let vm = lab.api.get(&Kind::Vm.path(&web.vm)).await.unwrap();
        let refused = plug(&volumes, &id, &web).await.unwrap_err();
        assert!(matches!(refused, VolumeError::InUse(_)), "{refused:?}");
        let now = lab.api.get(&Kind::Vm.path(&web.vm)).await.unwrap();
        assert_eq!(now["spec"], vm["spec"], "KubeVirt was told nothing");
        assert_eq!(domains(&lab, &id), ["default/db"]);
        lab.unplug("db", &[CLAIM]).await;
        lab.has_left("db", CLAIM).await;
        free().await;
    });
}
