//! Claims that Harvester's CSI driver has made: guestlet uses them as they are, and takes nothing away that is not its own.

use std::sync::Arc;
use std::time::Duration;

use guestlet::host::backends::disks::{By, DiskError, Known};
use guestlet::host::backends::kubevirt::names::Claim;
use guestlet::host::backends::kubevirt::volumes::Claims;
use guestlet::host::backends::volumes::{Holder, Published, VolumeError, Volumes as _};
use serde_json::Value;

use crate::claims::{
    Guest, LET_GO, domains, place, plug, published, quick, unwilling, volumes, volumes_with, willing,
};
use crate::lab::{Lab, NAMESPACE, wait};
use crate::model::objects::{Kind, named};
use crate::model::pace::Step;
use crate::patience::until;

mod conceded;
mod elsewhere;
mod given;
mod kept;
mod refused;

const CLAIM: &str = "pvc-6f0c2a0e-0b7a-4b8e-9a55-0a1b2c3d4e5f";
const SIZE: u64 = 16 << 20;

fn id(claim: &str) -> String {
    format!("{NAMESPACE}.{claim}")
}

/// By what a guest knows the claim if nobody has given its disk a serial number.
fn alias() -> Known {
    Known { by: By::Alias(format!("drive-ua-{CLAIM}")), is_adopted: true }
}

/// What the guest knows it by if guestlet has plugged it.
fn own_serial() -> String {
    Claim::of_id(&id(CLAIM)).unwrap().serial()
}

/// A cluster with a claim of Harvester's that is given to guestlet, and these VMs.
async fn started(vms: &[&str]) -> (Lab, Arc<Claims>) {
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
async fn harvester_has_plugged(lab: &Lab, vm: &str) {
    lab.harvester_plugs(vm, CLAIM).await;
    lab.is_in(vm, CLAIM, "Ready").await;
}

async fn record(volumes: &Claims) -> Option<Published> {
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
        assert_eq!(volumes.list(None).await.unwrap(), [volume]);
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
