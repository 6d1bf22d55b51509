//! Claims that Harvester's CSI driver has made: guestlet uses them as they are, and takes nothing away that is not its own.

use std::sync::Arc;
use std::time::Duration;

use guestlet::host::backends::disks::{By, DiskError, GuestSide, Known};
use guestlet::host::backends::kubevirt::hotplug::Patience;
use guestlet::host::backends::kubevirt::names::Claim;
use guestlet::host::backends::kubevirt::volumes::Claims;
use guestlet::host::backends::volumes::{Holder, Place, Published, VolumeError, Volumes as _};
use serde_json::{Value, json};

use crate::api::Api;
use crate::claims::{
    Guest, LET_GO, domains, place, plug, published, quick, unwilling, volumes, volumes_with, willing,
};
use crate::lab::{Lab, NAMESPACE, wait};
use crate::model::objects::{Kind, named};
use crate::model::pace::Step;
use crate::patience::until;

pub const CLAIM: &str = "pvc-6f0c2a0e-0b7a-4b8e-9a55-0a1b2c3d4e5f";
const SIZE: u64 = 16 << 20;

pub fn id(claim: &str) -> String {
    format!("{NAMESPACE}.{claim}")
}

/// By what a guest knows the claim if nobody has given its disk a serial number.
pub fn alias() -> Known {
    Known { by: By::Alias(format!("drive-ua-{CLAIM}")), is_adopted: true }
}

/// What the guest knows it by if guestlet has plugged it.
fn own_serial() -> String {
    Claim::of_id(&id(CLAIM)).unwrap().serial()
}

/// A cluster with a claim of Harvester's that is given to guestlet, and these VMs.
pub async fn started(vms: &[&str]) -> (Lab, Arc<Claims>) {
    let lab = Lab::start().await;
    lab.harvester_claim(CLAIM, SIZE >> 20, "shop").await;
    lab.give(CLAIM).await;
    for vm in vms {
        lab.running(vm).await;
    }
    let volumes = volumes(&lab).await;
    (lab, volumes)
}

/// Has Harvester's driver plug it, and waits until the VM has it.
pub async fn harvester_has_plugged(lab: &Lab, vm: &str) {
    lab.harvester_plugs(vm, CLAIM).await;
    lab.is_in(vm, CLAIM, "Ready").await;
}

pub async fn record(volumes: &Claims) -> Option<Published> {
    volumes.get(&id(CLAIM)).await.unwrap().unwrap().published
}

async fn vm_object(lab: &Lab, vm: &str) -> Value {
    lab.api.get(&Kind::Vm.path(&format!("{NAMESPACE}/{vm}"))).await.unwrap()
}

fn is_held(outcome: Result<(), VolumeError>, words: &str) {
    let error = outcome.unwrap_err();
    assert!(matches!(error, VolumeError::Disk(DiskError::Held(_))), "{error:?}");
    assert!(error.to_string().contains(words), "{error}");
}

#[test]
fn a_volume_that_harvesters_driver_has_plugged_is_used_as_it_is_and_then_taken_away() {
    wait(async {
        let (lab, volumes) = started(&["web"]).await;
        let (id, web) = (id(CLAIM), place(&lab, "web").await);
        harvester_has_plugged(&lab, "web").await;
        let volume = volumes.get(&id).await.unwrap().unwrap();
        assert_eq!(
            (volume.cluster.as_str(), volume.name.as_str(), volume.size),
            ("default/shop", CLAIM, SIZE)
        );
        assert_eq!(volumes.list().await.unwrap(), [volume]);
        assert_eq!((volumes.handle(&id).as_str(), volumes.id("default/shop", CLAIM)), (CLAIM, id.clone()));
        // It is there and not guestlet's: nothing is to be put right about it.
        assert!(volumes.plugged(&web.vm).await.unwrap().is_empty());

        let before = vm_object(&lab, "web").await;
        let plugged = volumes.plug(&id, published(&web), &web.vm).await.unwrap();
        assert_eq!(plugged.disk, alias());
        assert_eq!(lab.model.journal().plugged().next().unwrap().device_id(), alias().text());
        assert_eq!(record(&volumes).await, Some(published(&web)));
        assert_eq!(volumes.plug(&id, published(&web), &web.vm).await.unwrap(), plugged, "once more");
        assert_eq!(vm_object(&lab, "web").await, before, "KubeVirt was told nothing");
        until("it is known to be there", async || {
            (volumes.plugged(&web.vm).await.unwrap() == [id.clone()].into()).then_some(())
        })
        .await;
        assert_eq!(volumes.grow(&id, 2 * SIZE, Some(&web.vm)).await.unwrap(), 2 * SIZE);
        assert!(matches!(volumes.remove(&id).await, Err(VolumeError::InUse(_))));

        let refused = volumes.unplug(&id, &web.vm, LET_GO, unwilling()).await.unwrap_err();
        assert!(matches!(refused, VolumeError::Disk(DiskError::NotReleased(_))), "{refused}");
        assert_eq!((record(&volumes).await, domains(&lab, &id).len()), (Some(published(&web)), 1));

        let guest = Guest { is_willing: true, ..Guest::default() };
        let asked = Arc::clone(&guest.asked);
        lab.model.hold(Step::Detach, CLAIM);
        let late = volumes.unplug(&id, &web.vm, Duration::from_secs(3), Box::new(guest)).await.unwrap_err();
        assert!(late.to_string().contains("VolumeAttachment"), "{late}");
        assert_eq!(*asked.lock().unwrap(), [alias()]);
        assert!(record(&volumes).await.unwrap().leaving);
        lab.model.release(Step::Detach, CLAIM);
        volumes.unplug(&id, &web.vm, LET_GO, willing()).await.unwrap();
        assert_eq!((record(&volumes).await, volumes.holder(&id).await.unwrap()), (None, Holder::Off));
        assert!(domains(&lab, &id).is_empty() && lab.attached(CLAIM).await.is_empty());
        let vm = vm_object(&lab, "web").await;
        let spec = &vm["spec"]["template"]["spec"];
        for list in [&spec["volumes"], &spec["domain"]["devices"]["disks"]] {
            assert!(named(list, CLAIM).is_none() && named(list, "root").is_some(), "{list}");
        }

        // From now on guestlet plugs it in its own way.
        assert_eq!(plug(&volumes, &id, &web).await.unwrap(), own_serial());
        assert_eq!(lab.model.journal().plugged().next().unwrap().serial, own_serial());
        volumes.unplug(&id, &web.vm, LET_GO, willing()).await.unwrap();
        volumes.remove(&id).await.unwrap();
        assert_eq!(volumes.get(&id).await.unwrap(), None);
        assert!(lab.model.journal().conflicts().is_empty());
    });
}

#[test]
fn only_what_is_given_and_labelled_with_its_cluster_is_a_volume_of_that_cluster() {
    wait(async {
        let lab = Lab::start().await;
        lab.running("web").await;
        let (volumes, web) = (volumes(&lab).await, place(&lab, "web").await);
        lab.harvester_claim("given-to-nobody", 16, "shop").await;
        lab.claim("missed", 16).await;
        lab.claim("of-nobody", 16).await;
        lab.give("of-nobody").await;
        lab.harvester_claim("was-ours", 16, "shop").await;
        let published = json!({ "metadata": { "annotations": { "guestlet.io/published": "{}" } } });
        lab.api.patch(&Kind::Claim.path("default/was-ours"), &published).await.unwrap();
        let files = json!({
            "metadata": { "name": "files", "labels": {
                "guestcluster.harvesterhci.io/name": "shop", "app.kubernetes.io/managed-by": "guestlet",
            } },
            "spec": {
                "accessModes": ["ReadWriteMany"], "volumeMode": "Filesystem",
                "resources": { "requests": { "storage": "16Mi" } },
            },
        });
        lab.api.create(&Kind::Claim.within(NAMESPACE), &files).await;
        for (claim, owner, words) in [
            (
                "given-to-nobody",
                "default/shop",
                "label persistentvolumeclaim given-to-nobody app.kubernetes.io/managed-by=",
            ),
            ("of-nobody", "", "lacks the label guestcluster.harvesterhci.io/name"),
            (
                "missed",
                "",
                "label persistentvolumeclaim missed app.kubernetes.io/managed-by=guestlet guestcluster.",
            ),
            ("was-ours", "default/shop", "has not been given to guestlet"),
            ("files", "default/shop", "a share that Harvester's driver has made"),
        ] {
            let id = id(claim);
            let answers = [
                volumes.get(&id).await.map(drop),
                volumes.holder(&id).await.map(drop),
                plug(&volumes, &id, &web).await.map(drop),
                volumes.unplug(&id, &web.vm, LET_GO, willing()).await,
                volumes.grow(&id, 2 * SIZE, None).await.map(drop),
                volumes.remove(&id).await,
            ];
            for answer in answers {
                match answer {
                    Err(VolumeError::NotGiven { cluster, words: told }) => {
                        assert_eq!(cluster, owner, "{claim}");
                        assert!(told.contains(words), "{told}");
                    }
                    other => panic!("{claim}: {other:?}"),
                }
            }
            assert!(lab.api.get(&Kind::Claim.path(&format!("default/{claim}"))).await.is_some());
        }
        assert_eq!(volumes.list().await.unwrap(), []);
        for (id, is_possible) in
            [("default.x", true), ("other.x", false), ("shop.x", false), ("no claim", true)]
        {
            assert_eq!(volumes.may_be_of(id, "default/shop"), is_possible, "{id}");
        }
    });
}

/// Who makes a claim of the same name while the one before is going does not lose it.
#[test]
fn a_claim_that_comes_after_one_that_is_removed_stays() {
    wait(async {
        let (lab, volumes) = started(&[]).await;
        let (id, path) = (id(CLAIM), Kind::Claim.path(&format!("{NAMESPACE}/{CLAIM}")));
        let before = lab.api.get(&path).await.unwrap();
        let held = json!({ "metadata": { "finalizers": ["example.com/held"] } });
        lab.api.patch(&path, &held).await.unwrap();
        // Between two looks of who removes it.
        let patience = Patience { poll: Duration::from_secs(3), ..quick() };
        let slow = volumes_with(&lab, patience).await;
        let successor = async {
            until("it is deleted", async || {
                let claim = lab.api.get(&path).await.unwrap();
                (!claim["metadata"]["deletionTimestamp"].is_null()).then_some(())
            })
            .await;
            lab.api.patch(&path, &json!({ "metadata": { "finalizers": null } })).await;
            until("it is gone", async || lab.api.get(&path).await.is_none().then_some(())).await;
            lab.harvester_claim(CLAIM, SIZE >> 20, "shop").await;
            lab.give(CLAIM).await;
        };
        let (removed, ()) = tokio::join!(slow.remove(&id), successor);
        removed.unwrap();
        let now = lab.api.get(&path).await.unwrap();
        assert_ne!(now["metadata"]["uid"], before["metadata"]["uid"]);
        assert!(now["metadata"]["deletionTimestamp"].is_null());
        drop(volumes);
    });
}

/// A name of any length that a claim may have; the identifier of one is too long for CSI, and not for people.
#[test]
fn a_claim_with_the_longest_name_is_plugged_in_guestlets_own_way() {
    wait(async {
        let (lab, volumes) = started(&["web"]).await;
        let web = place(&lab, "web").await;
        let name = format!("{}.{}", "a".repeat(63), ["b"; 95].join("."));
        assert_eq!(name.len(), 253);
        lab.harvester_claim(&name, 16, "shop").await;
        lab.give(&name).await;
        let long = id(&name);
        assert_eq!(volumes.handle(&long), long, "without its namespace it would be read as another one's");
        let serial = plug(&volumes, &long, &web).await.unwrap();
        assert_eq!(serial.len(), 36);
        assert_eq!(domains(&lab, &long), [web.vm.as_str()]);
        volumes.unplug(&long, &web.vm, LET_GO, willing()).await.unwrap();
        volumes.remove(&long).await.unwrap();
    });
}

#[test]
fn what_an_administrator_has_plugged_elsewhere_is_neither_taken_away_nor_said_to_be_gone() {
    wait(async {
        let (lab, volumes) = started(&["web", "db"]).await;
        let (id, web, db) = (id(CLAIM), place(&lab, "web").await, place(&lab, "db").await);
        let left_alone = async |vm: &Place| {
            assert_eq!(domains(&lab, &id), [vm.vm.as_str()]);
            assert!(!matches!(volumes.holder(&id).await, Ok(Holder::Off)));
        };
        // Nobody has published it.
        harvester_has_plugged(&lab, "db").await;
        is_held(volumes.take_back(&id, &db, LET_GO, willing()).await, "which has to unplug it");
        assert_eq!(record(&volumes).await, None);
        let refused = plug(&volumes, &id, &web).await.unwrap_err();
        assert!(
            matches!(&refused, VolumeError::InUse(why) if why.contains("the VM default/db has it")),
            "{refused}"
        );
        assert_eq!(record(&volumes).await, None);
        left_alone(&db).await;
        lab.unplug("db", &[CLAIM]).await;
        until("it is free", async || matches!(volumes.holder(&id).await, Ok(Holder::Off)).then_some(()))
            .await;

        // It is published to web, and comes to be under another name there, and then in db.
        plug(&volumes, &id, &web).await.unwrap();
        let ours = Claim::of_id(&id).unwrap().volume();
        lab.unplug("web", &[&ours]).await;
        lab.has_left("web", &ours).await;
        lab.plug_as("web", "backup", CLAIM, json!({ "disk": { "bus": "scsi" } })).await;
        lab.is_in("web", "backup", "Ready").await;
        for outcome in [
            volumes.unplug(&id, &web.vm, LET_GO, willing()).await,
            volumes.take_back(&id, &web, LET_GO, willing()).await,
        ] {
            is_held(outcome, "as its volume backup; guestlet has not plugged it so, and leaves it");
        }
        assert_eq!(record(&volumes).await, Some(published(&web)));
        left_alone(&web).await;
        assert!(matches!(plug(&volumes, &id, &web).await, Err(VolumeError::Refused(_))));
        lab.unplug("web", &["backup"]).await;
        lab.has_left("web", "backup").await;
        harvester_has_plugged(&lab, "db").await;
        is_held(volumes.take_back(&id, &db, LET_GO, willing()).await, "which has to unplug it");
        let waits = volumes.unplug(&id, &web.vm, Duration::from_secs(1), willing()).await.unwrap_err();
        assert!(waits.to_string().contains("the VM default/db lists it"), "{waits}");
        left_alone(&db).await;
    });
}

#[test]
fn what_virtctl_has_plugged_is_known_by_its_serial_number_or_refused() {
    wait(async {
        let (lab, volumes) = started(&["web"]).await;
        let (id, web) = (id(CLAIM), place(&lab, "web").await);
        lab.plug("web", CLAIM).await;
        lab.is_in("web", CLAIM, "Ready").await;
        let plugged = volumes.plug(&id, published(&web), &web.vm).await.unwrap();
        assert_eq!(plugged.disk, Known { by: By::Serial(CLAIM.to_owned()), is_adopted: true });
        volumes.unplug(&id, &web.vm, LET_GO, willing()).await.unwrap();

        lab.claim("other", 16).await;
        lab.plug_as("web", "other", "other", json!({ "disk": { "bus": "scsi" }, "serial": "twin" })).await;
        let by_alias = format!("drive-ua-{CLAIM}");
        lab.claim("alike", 16).await;
        lab.plug_as("web", "alike", "alike", json!({ "disk": { "bus": "scsi" }, "serial": by_alias })).await;
        for other in ["other", "alike"] {
            lab.is_in("web", other, "Ready").await;
        }
        for (disk, words) in [
            (json!({ "lun": { "bus": "scsi" } }), "it is no plain disk"),
            (json!({ "disk": { "bus": "virtio" }, "serial": "x" }), "it is on the bus \"virtio\""),
            (json!({ "disk": { "bus": "scsi" }, "serial": "a".repeat(65) }), "has 65 bytes"),
            (
                json!({ "disk": { "bus": "scsi" }, "serial": "twin" }),
                "would know the disk other by the same text",
            ),
            (json!({ "disk": { "bus": "scsi" } }), "would know the disk alike by the same text"),
            (json!({ "disk": { "bus": "scsi", "readonly": true }, "serial": "x" }), "it is read-only"),
        ] {
            lab.plug_as("web", CLAIM, CLAIM, disk).await;
            lab.is_in("web", CLAIM, "Ready").await;
            let refused = plug(&volumes, &id, &web).await.unwrap_err();
            assert!(matches!(refused, VolumeError::Refused(_)), "{refused:?}");
            assert!(refused.to_string().contains(words), "{refused}");
            assert_eq!((record(&volumes).await, domains(&lab, &id).len()), (None, 1), "{words}");
            lab.unplug("web", &[CLAIM]).await;
            lab.has_left("web", CLAIM).await;
            until("it is free", async || matches!(volumes.holder(&id).await, Ok(Holder::Off)).then_some(()))
                .await;
        }
    });
}

/// Its guest cannot be asked for it, and so keeps it as long as it runs.
#[test]
fn a_disk_that_its_guest_cannot_tell_stays_until_the_vm_is_off() {
    wait(async {
        let (lab, volumes) = started(&["web"]).await;
        let (id, web) = (id(CLAIM), place(&lab, "web").await);
        harvester_has_plugged(&lab, "web").await;
        plug(&volumes, &id, &web).await.unwrap();
        lab.unplug("web", &[CLAIM]).await;
        lab.has_left("web", CLAIM).await;
        lab.plug_as("web", CLAIM, CLAIM, json!({ "disk": { "bus": "virtio" } })).await;
        lab.is_in("web", CLAIM, "Ready").await;
        is_held(volumes.unplug(&id, &web.vm, LET_GO, willing()).await, "it is on the bus \"virtio\"");
        assert_eq!(domains(&lab, &id), [web.vm.as_str()]);
        // Whoever plugged it unplugs it: then that is waited for.
        lab.model.hold(Step::Unplug, CLAIM);
        lab.unplug("web", &[CLAIM]).await;
        lab.model.reaches(Step::Unplug, CLAIM).await;
        let late = volumes.unplug(&id, &web.vm, Duration::from_secs(1), unwilling()).await.unwrap_err();
        assert!(matches!(late, VolumeError::Waiting { .. }), "{late}");
        lab.model.release(Step::Unplug, CLAIM);
        volumes.unplug(&id, &web.vm, LET_GO, unwilling()).await.unwrap();

        harvester_has_plugged(&lab, "web").await;
        plug(&volumes, &id, &web).await.unwrap();
        lab.unplug("web", &[CLAIM]).await;
        lab.has_left("web", CLAIM).await;
        lab.plug_as("web", CLAIM, CLAIM, json!({ "disk": { "bus": "virtio" } })).await;
        lab.is_in("web", CLAIM, "Ready").await;
        let halted = json!({ "spec": { "runStrategy": "Halted" } });
        lab.api.patch(&Kind::Vm.path("default/web"), &halted).await.unwrap();
        until("it is off", async || lab.instance("web").await.is_none().then_some(())).await;
        volumes.unplug(&id, &web.vm, LET_GO, unwilling()).await.unwrap();
        assert_eq!((record(&volumes).await, volumes.holder(&id).await.unwrap()), (None, Holder::Off));
    });
}

/// KubeVirt carries requests out when it likes: whoever has given one up must not believe that it never comes.
#[test]
fn a_request_that_was_given_up_counts_until_it_is_carried_out() {
    wait(async {
        let (lab, volumes) = started(&["web", "db"]).await;
        lab.set_gates(&["HotplugVolumes"]).await;
        let (id, web, db) = (id(CLAIM), place(&lab, "web").await, place(&lab, "db").await);
        let options = json!({
            "name": CLAIM,
            "disk": { "disk": { "bus": "scsi" } },
            "volumeSource": { "persistentVolumeClaim": { "claimName": CLAIM } },
        });
        // Harvester's driver has asked for it, and has not got it.
        lab.model.hold(Step::Copy, "web");
        assert!(lab.call("web", "addvolume", &options).await.0.is_success());
        let refused = plug(&volumes, &id, &db).await.unwrap_err();
        assert!(matches!(refused, VolumeError::InUse(_)), "{refused}");
        let waits = plug(&volumes, &id, &web).await.unwrap_err();
        assert!(matches!(waits, VolumeError::Waiting { .. }), "{waits}");
        assert_eq!(record(&volumes).await, None);
        lab.model.release(Step::Copy, "web");
        lab.is_in("web", CLAIM, "Ready").await;
        assert_eq!(plug(&volumes, &id, &web).await.unwrap(), alias().text());

        lab.model.hold(Step::Copy, "web");
        let late = volumes.unplug(&id, &web.vm, Duration::from_secs(1), willing()).await.unwrap_err();
        assert!(matches!(late, VolumeError::Waiting { .. }), "{late}");
        assert_eq!(domains(&lab, &id), [web.vm.as_str()]);
        assert!(record(&volumes).await.unwrap().leaving);
        assert!(matches!(plug(&volumes, &id, &db).await, Err(VolumeError::Disk(DiskError::Busy(_)))));
        assert_eq!(volumes.holder(&id).await.unwrap(), Holder::On(web.clone()));
        lab.model.release(Step::Copy, "web");
        volumes.unplug(&id, &web.vm, LET_GO, unwilling()).await.unwrap();
        assert_eq!(plug(&volumes, &id, &db).await.unwrap(), own_serial());
        assert_eq!(domains(&lab, &id), [db.vm.as_str()]);
        assert!(lab.model.journal().conflicts().is_empty());
    });
}

/// The VM is started anew while its guest is asked, which another guest then was not.
#[test]
fn a_guest_that_was_not_asked_keeps_what_is_plugged_as_it_is() {
    struct Restarting(Api);
    #[tonic::async_trait]
    impl GuestSide for Restarting {
        async fn release(&self, _: &Known) -> Result<(), DiskError> {
            let path = Kind::Vmi.path("default/web");
            let before = self.0.get(&path).await.unwrap();
            self.0.delete(&path).await;
            loop {
                let run = self.0.get(&path).await.unwrap_or_default();
                if run["status"]["phase"] == "Running" && run["metadata"]["uid"] != before["metadata"]["uid"]
                {
                    break;
                }
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
            Ok(())
        }

        async fn stays(&self, _: &Known) {}
    }
    wait(async {
        let (lab, volumes) = started(&["web"]).await;
        let (id, web) = (id(CLAIM), place(&lab, "web").await);
        harvester_has_plugged(&lab, "web").await;
        plug(&volumes, &id, &web).await.unwrap();
        let side = Restarting(lab.api.clone());
        let refused = volumes.unplug(&id, &web.vm, LET_GO, Box::new(side)).await.unwrap_err();
        assert!(refused.to_string().contains("was started after its guest was asked"), "{refused}");
        assert_eq!(domains(&lab, &id), [web.vm.as_str()]);
        volumes.unplug(&id, &web.vm, LET_GO, willing()).await.unwrap();
    });
}

/// Its guest has no agent yet, and may mount the disk before it has one.
#[test]
fn a_vm_that_starts_keeps_what_is_plugged_as_it_is_until_its_guest_can_be_asked() {
    wait(async {
        let (lab, volumes) = started(&["web"]).await;
        let (id, web) = (id(CLAIM), place(&lab, "web").await);
        harvester_has_plugged(&lab, "web").await;
        plug(&volumes, &id, &web).await.unwrap();
        lab.model.hold(Step::Boot, "web");
        lab.api.delete(&Kind::Vmi.path("default/web")).await;
        lab.model.reaches(Step::Boot, "web").await;
        let vm = vm_object(&lab, "web").await;
        let guest = Guest { is_willing: true, ..Guest::default() };
        let asked = Arc::clone(&guest.asked);
        let waits = volumes.unplug(&id, &web.vm, LET_GO, Box::new(guest)).await.unwrap_err();
        assert!(
            matches!(&waits, VolumeError::Waiting { words, .. } if words.contains("the VM is starting")),
            "{waits:?}"
        );
        let spec = |vm: &Value| vm["spec"]["template"]["spec"].clone();
        assert_eq!(spec(&vm_object(&lab, "web").await), spec(&vm), "KubeVirt was told nothing");
        assert!(asked.lock().unwrap().is_empty() && record(&volumes).await.unwrap().leaving);
        lab.model.release(Step::Boot, "web");
        lab.is_in("web", CLAIM, "Ready").await;
        volumes.unplug(&id, &web.vm, LET_GO, willing()).await.unwrap();
        assert!(domains(&lab, &id).is_empty());
    });
}

#[test]
fn a_claim_that_anything_else_uses_is_not_taken_over() {
    wait(async {
        let (lab, volumes) = started(&["web"]).await;
        let (id, web) = (id(CLAIM), place(&lab, "web").await);
        let pod = json!({
            "metadata": { "name": "backup" },
            "spec": {
                "containers": [{ "name": "x", "image": "registry.test/x" }],
                "volumes": [{ "name": "x", "persistentVolumeClaim": { "claimName": CLAIM } }],
            },
        });
        // With the VM, and without it.
        harvester_has_plugged(&lab, "web").await;
        for has_vm in [true, false] {
            lab.api.create(&Kind::Pod.within(NAMESPACE), &pod).await;
            let refused = plug(&volumes, &id, &web).await.unwrap_err();
            assert!(
                matches!(&refused, VolumeError::InUse(why) if why.contains("the pod backup")),
                "{refused}"
            );
            assert_eq!((record(&volumes).await, domains(&lab, &id).len()), (None, usize::from(has_vm)));
            lab.api.delete(&Kind::Pod.path("default/backup")).await;
            if has_vm {
                lab.unplug("web", &[CLAIM]).await;
                lab.has_left("web", CLAIM).await;
                // The VolumeAttachment outlives the VM's entry.
                until("it is free", async || {
                    matches!(volumes.holder(&id).await, Ok(Holder::Off)).then_some(())
                })
                .await;
            }
        }

        // A VM's own disk, whatever its name.
        let fixed = json!({ "name": CLAIM, "persistentVolumeClaim": { "claimName": CLAIM } });
        lab.vm_with("own", |vm| {
            let spec = &mut vm["spec"]["template"]["spec"];
            spec["volumes"].as_array_mut().unwrap().push(fixed);
            let disk = json!({ "name": CLAIM, "disk": { "bus": "scsi" } });
            spec["domain"]["devices"]["disks"].as_array_mut().unwrap().push(disk);
        })
        .await;
        lab.runs("own").await;
        let own = place(&lab, "own").await;
        let refused = plug(&volumes, &id, &own).await.unwrap_err();
        assert!(refused.to_string().contains("as a fixed part of it"), "{refused}");
        assert_eq!(record(&volumes).await, None);
        is_held(volumes.take_back(&id, &own, LET_GO, willing()).await, "as a fixed part of it");
        let vm = vm_object(&lab, "own").await;
        assert!(named(&vm["spec"]["template"]["spec"]["volumes"], CLAIM).is_some());
    });
}

#[test]
fn of_two_guests_that_want_it_at_once_one_gets_it() {
    wait(async {
        let (lab, volumes) = started(&["web", "db"]).await;
        let (id, web, db) = (id(CLAIM), place(&lab, "web").await, place(&lab, "db").await);
        let second = volumes_with(&lab, quick()).await;
        let (one, other) = tokio::join!(plug(&volumes, &id, &web), plug(&second, &id, &db));
        let (winner, loser) = match (one, other) {
            (Ok(_), Err(error)) => (&web, error),
            (Err(error), Ok(_)) => (&db, error),
            both => panic!("{both:?}"),
        };
        assert!(matches!(loser, VolumeError::Disk(DiskError::Busy(_)) | VolumeError::InUse(_)), "{loser}");
        assert_eq!(domains(&lab, &id), [winner.vm.as_str()]);
        assert!(lab.model.journal().conflicts().is_empty());
    });
}

/// It looks at nothing that guestlet writes: what it does at the same moment is seen before anybody is told of success.
#[test]
fn harvesters_driver_may_run_and_act_at_the_same_time() {
    wait(async {
        let (lab, volumes) = started(&["web", "db"]).await;
        let (id, web) = (id(CLAIM), place(&lab, "web").await);
        lab.model.hold(Step::Plug, CLAIM);
        let plugging = plug(&volumes, &id, &web);
        let meanwhile = async {
            lab.model.reaches(Step::Plug, CLAIM).await;
            lab.harvester_plugs("db", CLAIM).await;
            lab.model.release(Step::Plug, CLAIM);
        };
        let (outcome, ()) = tokio::join!(plugging, meanwhile);
        let error = outcome.unwrap_err();
        assert!(
            matches!(error, VolumeError::Contested(_)) && error.to_string().contains("both the VM"),
            "{error}"
        );
        assert_eq!(record(&volumes).await, Some(published(&web)), "what is there is remembered");
        // Whoever is told so has it unplugged: of the two, guestlet's is the one that nobody has begun to use.
        let waits = volumes.unplug(&id, &web.vm, Duration::ZERO, willing()).await.unwrap_err();
        assert!(waits.to_string().contains("the VM default/db lists it"), "{waits}");
        lab.is_in("db", CLAIM, "Ready").await;
        assert_eq!(domains(&lab, &id), ["default/db"]);
        lab.unplug("db", &[CLAIM]).await;
        lab.has_left("db", CLAIM).await;
        until("nobody has it", async || volumes.unplug(&id, &web.vm, LET_GO, willing()).await.ok()).await;
        assert_eq!(record(&volumes).await, None);

        // It unplugs what was published as it is: the volume comes back in guestlet's own way.
        harvester_has_plugged(&lab, "web").await;
        assert_eq!(plug(&volumes, &id, &web).await.unwrap(), alias().text());
        lab.unplug("web", &[CLAIM]).await;
        lab.has_left("web", CLAIM).await;
        assert!(volumes.plugged(&web.vm).await.unwrap().is_empty());
        until("it is back", async || plug(&volumes, &id, &web).await.ok()).await;
        assert_eq!(plug(&volumes, &id, &web).await.unwrap(), own_serial());
        assert_eq!(domains(&lab, &id), [web.vm.as_str()]);
    });
}
