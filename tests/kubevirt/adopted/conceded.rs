//! A claim that is to be in one VM, and that another program has plugged into another one meanwhile: the first can be left, and what
//! the second has stays.

use std::sync::Arc;

use guestlet::host::backends::kubevirt::names::Claim;
use guestlet::host::backends::kubevirt::volumes::Claims;
use guestlet::host::backends::volumes::{Holder, VolumeError, Volumes as _};
use serde_json::json;

use super::{CLAIM, alias, harvester_has_plugged, id, record, started};
use crate::claims::{LET_GO, domains, place, plug, published, willing};
use crate::lab::{Lab, wait};
use crate::model::pace::Step;

/// Runs a test with the VMs `web` and `db`.
fn wait_for<F: Future<Output = ()>>(test: impl FnOnce(Lab, Arc<Claims>) -> F) {
    wait(async {
        let (lab, volumes) = started(&["web", "db"]).await;
        test(lab, volumes).await;
    });
}

#[test]
fn a_vm_that_has_lost_its_volume_to_another_one_is_forgotten() {
    wait_for(async |lab, volumes| {
        let (id, web, db) = (id(CLAIM), place(&lab, "web").await, place(&lab, "db").await);
        harvester_has_plugged(&lab, "web").await;
        plug(&volumes, &id, &web).await.unwrap();
        assert_eq!(volumes.concede(&id).await.unwrap(), None, "it has it");
        lab.model.hold(Step::Unplug, CLAIM);
        lab.unplug("web", &[CLAIM]).await;
        lab.model.reaches(Step::Unplug, CLAIM).await;
        harvester_has_plugged(&lab, "db").await;
        // Both are said to have it.
        assert_eq!(volumes.concede(&id).await.unwrap(), None);
        assert_eq!(
            volumes.holder(&id).await.unwrap(),
            Holder::On(web.clone()),
            "it is to be taken from there"
        );
        assert_eq!(record(&volumes).await, Some(published(&web)));
        lab.model.release(Step::Unplug, CLAIM);
        lab.has_left("web", CLAIM).await;

        let refused = plug(&volumes, &id, &db).await.unwrap_err();
        assert!(matches!(refused, VolumeError::Disk(_)), "{refused}");
        let waits = volumes.unplug(&id, &web.vm, LET_GO / 20, willing()).await.unwrap_err();
        assert!(matches!(waits, VolumeError::Waiting { .. }), "{waits}");
        assert!(record(&volumes).await.unwrap().leaving);
        assert_eq!(volumes.concede(&id).await.unwrap(), Some(db.clone()));
        assert_eq!((record(&volumes).await, domains(&lab, &id)), (None, vec![db.vm.clone()]));
        assert_eq!(
            volumes.concede(&id).await.unwrap(),
            Some(db.clone()),
            "whoever asks again hears the same"
        );
        lab.is_attached_for(CLAIM, "db").await;
        assert_eq!(plug(&volumes, &id, &db).await.unwrap(), alias().text());
        assert_eq!(volumes.concede(&id).await.unwrap(), None, "it is meant to have it");
        volumes.unplug(&id, &db.vm, LET_GO, willing()).await.unwrap();
    });
}

/// What is guestlet's own is taken back, and what nobody has is free: neither is left where it is.
#[test]
fn only_what_another_program_has_plugged_is_left_to_another_vm() {
    wait_for(async |lab, volumes| {
        let (id, web, db) = (id(CLAIM), place(&lab, "web").await, place(&lab, "db").await);
        assert_eq!(volumes.concede(&id).await.unwrap(), None);
        plug(&volumes, &id, &web).await.unwrap();
        let ours = Claim::of_id(&id).unwrap();
        lab.unplug("web", &[&ours.volume()]).await;
        lab.has_left("web", &ours.volume()).await;
        assert_eq!(volumes.concede(&id).await.unwrap(), None, "nobody has it");
        // As guestlet plugs it, it is guestlet's wherever it is.
        let device = json!({ "disk": { "bus": "scsi" }, "serial": ours.serial() });
        lab.plug_as("db", &ours.volume(), CLAIM, device).await;
        lab.is_in("db", &ours.volume(), "Ready").await;
        assert_eq!(volumes.concede(&id).await.unwrap(), None);
        volumes.take_back(&id, &db, LET_GO, willing()).await.unwrap();
        lab.has_left("db", &ours.volume()).await;
        // However else another program has it there: that VM cannot have it by guestlet, and the first one has it no more.
        lab.plug_as("db", "backup", CLAIM, json!({ "disk": { "bus": "scsi" } })).await;
        lab.is_in("db", "backup", "Ready").await;
        assert_eq!(record(&volumes).await, Some(published(&web)));
        assert_eq!(volumes.concede(&id).await.unwrap(), Some(db.clone()));
        assert!(matches!(plug(&volumes, &id, &db).await, Err(VolumeError::Refused(_))));
        assert_eq!((record(&volumes).await, domains(&lab, &id)), (None, vec![db.vm]));
    });
}
