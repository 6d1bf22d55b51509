//! Claims that are plugged in a way which guestlet does not take over, or that something else uses: they are refused, and left.

use std::time::Duration;

use guestlet::host::backends::disks::{By, Known};
use guestlet::host::backends::kubevirt::names::Claim;
use guestlet::host::backends::volumes::{Holder, Place, VolumeError, Volumes as _};
use serde_json::json;

use super::{CLAIM, harvester_has_plugged, id, is_held, record, started, vm_object};
use crate::claims::{LET_GO, domains, place, plug, published, willing};
use crate::lab::{NAMESPACE, wait};
use crate::model::objects::{Kind, named};
use crate::patience::until;

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
            is_held(outcome, "as its volume backup; guestlet did not plug it, and leaves it alone");
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
            (json!({ "lun": { "bus": "scsi" } }), "it is not a plain disk"),
            (json!({ "disk": { "bus": "virtio" }, "serial": "x" }), "it is on the bus \"virtio\""),
            (json!({ "disk": { "bus": "scsi" }, "serial": "a".repeat(65) }), "has 65 bytes"),
            (
                json!({ "disk": { "bus": "scsi" }, "serial": "twin" }),
                "would identify the disk other by the same text",
            ),
            (json!({ "disk": { "bus": "scsi" } }), "would identify the disk alike by the same text"),
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
