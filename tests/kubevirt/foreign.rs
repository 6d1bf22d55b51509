//! Claims that guestlet has made, and that others lay hands on: an administrator, or a backup. The VM that guestlet has plugged one into can
//! be left, and what another program has plugged stays as it is.

use std::time::Duration;

use guestlet::host::backends::disks::DiskError;
use guestlet::host::backends::volumes::{Holder, VolumeError, Volumes as _};
use serde_json::{Value, json};

use crate::claims::{LET_GO, claim_of, domains, make, place, plug, published, volumes, willing};
use crate::lab::{Lab, NAMESPACE, wait};
use crate::model::objects::{Kind, text};
use crate::model::pace::Step;
use crate::patience::until;

const BACKUP: &str = "backup";

async fn is_plugged_as_backup(lab: &Lab, vm: &str, claim: &str) {
    lab.plug_as(vm, BACKUP, claim, json!({ "disk": { "bus": "scsi" } })).await;
    lab.is_in(vm, BACKUP, "Ready").await;
}

async fn spec(lab: &Lab, vm: &str) -> Value {
    lab.api.get(&Kind::Vm.path(&format!("{NAMESPACE}/{vm}"))).await.unwrap()["spec"].clone()
}

#[track_caller]
fn is_held(error: &VolumeError) {
    assert!(matches!(error, VolumeError::Disk(DiskError::Held(_))), "{error:?}");
    assert!(error.to_string().contains("as its volume backup"), "{error}");
}

#[test]
fn a_vm_is_left_although_another_program_has_plugged_the_claim_into_another_one() {
    wait(async {
        let lab = Lab::start().await;
        lab.running("web").await;
        lab.running("db").await;
        let volumes = volumes(&lab).await;
        let (web, db) = (place(&lab, "web").await, place(&lab, "db").await);
        let id = make(&volumes, "data").await.id;
        let claim = claim_of("data");
        let record = async || volumes.get(&id).await.unwrap().unwrap().published;
        plug(&volumes, &id, &web).await.unwrap();
        is_plugged_as_backup(&lab, "db", &claim).await;
        let theirs = spec(&lab, "db").await;
        // Both have it: it is taken from the one that is remembered, and only that is taken away.
        assert_eq!(volumes.holder(&id).await.unwrap(), Holder::On(web.clone()));
        assert_eq!(volumes.concede(&id).await.unwrap(), None);
        assert!(plug(&volumes, &id, &db).await.is_err());
        let waits = volumes.unplug(&id, &web.vm, LET_GO, willing()).await.unwrap_err();
        assert!(waits.to_string().contains("the VM default/db lists it"), "{waits}");
        assert_eq!(domains(&lab, &id), [db.vm.as_str()]);
        assert!(record().await.unwrap().leaving);

        // Not before nothing of it is left where the first VM had it.
        let object = lab.api.get(&Kind::Claim.path(&format!("{NAMESPACE}/{claim}"))).await.unwrap();
        let attachment = json!({
            "metadata": { "name": "late" },
            "spec": {
                "attacher": "late.test",
                "nodeName": "elsewhere",
                "source": { "persistentVolumeName": text(&object["spec"]["volumeName"]) },
            },
        });
        lab.api.create(&Kind::Attachment.all(), &attachment).await;
        until("the host cluster has let go of the rest", async || {
            let waits = volumes.concede(&id).await.unwrap_err();
            assert!(matches!(waits, VolumeError::Waiting { .. }), "{waits:?}");
            waits.to_string().contains("VolumeAttachment late").then_some(())
        })
        .await;
        assert!(record().await.unwrap().leaving);
        lab.api.delete(&Kind::Attachment.path("late")).await;
        assert_eq!(volumes.concede(&id).await.unwrap(), Some(db.clone()));
        assert_eq!((record().await, domains(&lab, &id)), (None, vec![db.vm.clone()]));
        assert_eq!(volumes.concede(&id).await.unwrap(), Some(db.clone()), "once more says the same");

        // It is the other program's, and stays that.
        is_held(&volumes.take_back(&id, &db, LET_GO, willing()).await.unwrap_err());
        let refused = plug(&volumes, &id, &db).await.unwrap_err();
        assert!(
            matches!(&refused, VolumeError::Refused(why) if why.contains("as its volume backup")),
            "{refused}"
        );
        assert!(matches!(plug(&volumes, &id, &web).await, Err(VolumeError::InUse(_))));
        assert!(matches!(volumes.remove(&id).await, Err(VolumeError::InUse(_))));
        assert_eq!((record().await, spec(&lab, "db").await), (None, theirs));
        lab.unplug("db", &[BACKUP]).await;
        lab.has_left("db", BACKUP).await;
        until("it is free", async || plug(&volumes, &id, &web).await.ok()).await;
        assert_eq!((record().await, domains(&lab, &id)), (Some(published(&web)), vec![web.vm.clone()]));
    });
}

/// Of two disks of one volume in one guest, guestlet's is the one that it takes away.
#[test]
fn what_the_same_vm_has_as_well_is_left_to_whoever_has_plugged_it() {
    wait(async {
        let lab = Lab::start().await;
        lab.running("web").await;
        let (volumes, web) = (volumes(&lab).await, place(&lab, "web").await);
        let id = make(&volumes, "data").await.id;
        let claim = claim_of("data");
        lab.model.hold(Step::Plug, &claim);
        let meanwhile = async {
            lab.model.reaches(Step::Plug, &claim).await;
            lab.plug_as("web", BACKUP, &claim, json!({ "disk": { "bus": "scsi" } })).await;
            lab.model.release(Step::Plug, &claim);
        };
        let (outcome, ()) = tokio::join!(plug(&volumes, &id, &web), meanwhile);
        let error = outcome.unwrap_err();
        assert!(error.to_string().contains("as a volume backup that guestlet has not plugged"), "{error}");
        lab.is_in("web", BACKUP, "Ready").await;
        let again = plug(&volumes, &id, &web).await.unwrap_err();
        assert!(again.to_string().contains("twice, as its volumes backup and guestlet-disk-"), "{again}");
        let waits = volumes.unplug(&id, &web.vm, Duration::ZERO, willing()).await.unwrap_err();
        assert!(waits.to_string().contains("the VM default/web lists it"), "{waits}");
        let volumes_left = spec(&lab, "web").await["template"]["spec"]["volumes"].clone();
        let names: Vec<_> = volumes_left.as_array().unwrap().iter().map(|one| text(&one["name"])).collect();
        assert_eq!(names, ["root", BACKUP]);
        lab.unplug("web", &[BACKUP]).await;
        lab.has_left("web", BACKUP).await;
        until("nobody has it", async || volumes.unplug(&id, &web.vm, LET_GO, willing()).await.ok()).await;
        assert_eq!(volumes.holder(&id).await.unwrap(), Holder::Off);
    });
}

/// The host cluster keeps the claim for as long as a pod uses it, and then it is gone.
#[test]
fn a_claim_that_somebody_deletes_stays_until_its_vm_is_left() {
    wait(async {
        let lab = Lab::start().await;
        lab.running("web").await;
        let (volumes, web) = (volumes(&lab).await, place(&lab, "web").await);
        let id = make(&volumes, "data").await.id;
        let claim = claim_of("data");
        plug(&volumes, &id, &web).await.unwrap();
        let path = Kind::Claim.path(&format!("{NAMESPACE}/{claim}"));
        lab.api.delete(&path).await;
        let object = lab.api.get(&path).await.unwrap();
        assert!(object["metadata"]["deletionTimestamp"].is_string(), "{object}");
        let told = plug(&volumes, &id, &web).await.unwrap_err();
        assert!(told.to_string().contains("its claim is being deleted in the host cluster"), "{told}");
        assert_eq!(domains(&lab, &id), [web.vm.as_str()]);
        assert_eq!(volumes.holder(&id).await.unwrap(), Holder::On(web.clone()));
        volumes.unplug(&id, &web.vm, LET_GO, willing()).await.unwrap();
        let attached = lab.api.list(&Kind::Attachment.all()).await;
        let is_its =
            |one: &Value| one["spec"]["source"]["persistentVolumeName"] == object["spec"]["volumeName"];
        assert!(domains(&lab, &id).is_empty() && !attached.iter().any(is_its), "{attached:?}");
        until("the claim is gone", async || lab.api.get(&path).await.is_none().then_some(())).await;
        assert_eq!(volumes.get(&id).await.unwrap(), None);
        volumes.unplug(&id, &web.vm, LET_GO, willing()).await.unwrap_err();
        volumes.remove(&id).await.unwrap();
    });
}
