//! What another program has plugged stays until its guest has let go of it, and counts until KubeVirt has.

use std::sync::Arc;
use std::time::Duration;

use guestlet::host::backends::disks::{DiskError, GuestSide, Known};
use guestlet::host::backends::kubevirt::volumes::Claims;
use guestlet::host::backends::volumes::{Holder, Place, VolumeError, Volumes as _};
use serde_json::{Value, json};

use super::{CLAIM, alias, harvester_has_plugged, id, is_held, own_serial, record, started, vm_object};
use crate::api::Api;
use crate::claims::{Guest, LET_GO, domains, place, plug, unwilling, willing};
use crate::lab::{Lab, wait};
use crate::model::objects::Kind;
use crate::model::pace::Step;
use crate::patience::until;

/// A VM that Harvester's driver has plugged the claim into, and to which guestlet has published it as it is.
async fn published_as_it_is() -> (Lab, Arc<Claims>, String, Place) {
    let (lab, volumes) = started(&["web"]).await;
    let (id, web) = (id(CLAIM), place(&lab, "web").await);
    harvester_has_plugged(&lab, "web").await;
    plug(&volumes, &id, &web).await.unwrap();
    (lab, volumes, id, web)
}

/// Its guest cannot be asked for it, and so keeps it as long as it runs.
#[test]
fn a_disk_that_its_guest_cannot_tell_stays_until_the_vm_is_off() {
    wait(async {
        let (lab, volumes, id, web) = published_as_it_is().await;
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
        let (lab, volumes, id, web) = published_as_it_is().await;
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
        let (lab, volumes, id, web) = published_as_it_is().await;
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
