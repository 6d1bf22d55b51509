//! Volumes that are on their way for ever: requests that nobody carries out, and VMs that do not start for want of a volume.

use std::sync::Arc;

use guestlet::host::backends::disks::DiskError;
use guestlet::host::backends::kubevirt::hotplug::Patience;
use guestlet::host::backends::kubevirt::volumes::Claims;
use guestlet::host::backends::volumes::{Holder, Place, VolumeError, Volumes as _};
use serde_json::Value;

use crate::claims::{LET_GO, claim_of, domains, make, place, plug, quick, volumes, volumes_with, willing};
use crate::lab::{Lab, NAMESPACE, wait};
use crate::model::objects::{Kind, items, text};
use crate::model::pace::Step;
use crate::patience::until;

async fn vm(lab: &Lab, name: &str) -> Value {
    lab.api.get(&Kind::Vm.path(&format!("{NAMESPACE}/{name}"))).await.unwrap()
}

/// The claims that the spec of a VM lists.
async fn listed(lab: &Lab, name: &str) -> Vec<String> {
    let vm = vm(lab, name).await;
    let volumes = items(&vm["spec"]["template"]["spec"]["volumes"]);
    volumes.map(|volume| text(&volume["persistentVolumeClaim"]["claimName"]).to_owned()).collect()
}

/// Ends the run of a VM; it is started again.
async fn end_run(lab: &Lab, name: &str) {
    lab.api.delete(&Kind::Vmi.path(&format!("{NAMESPACE}/{name}"))).await;
}

async fn unplug(volumes: &Claims, id: &str, from: &Place) -> Result<(), VolumeError> {
    volumes.unplug(id, &from.vm, LET_GO, willing()).await
}

/// What has been accepted (202) is carried out at some time, whoever still waits for it.
#[test]
fn a_volume_that_kubevirt_was_asked_for_is_given_to_nobody_else() {
    wait(async {
        let lab = Lab::start().await;
        lab.set_gates(&["HotplugVolumes"]).await;
        for name in ["web", "db"] {
            lab.running(name).await;
        }
        let before = volumes(&lab).await;
        let (web, db) = (place(&lab, "web").await, place(&lab, "db").await);
        let made = make(&before, "data").await;
        lab.model.hold(Step::Copy, "web");
        let first = tokio::spawn({
            let (before, id, web) = (Arc::clone(&before), made.id.clone(), web.clone());
            async move { plug(&before, &id, &web).await }
        });
        until("KubeVirt was asked", async || {
            (!vm(&lab, "web").await["status"]["volumeRequests"].is_null()).then_some(())
        })
        .await;
        // As a controller that is killed in between, and one that somebody has made forget it by force.
        first.abort();
        let after = volumes(&lab).await;
        assert_eq!(after.holder(&made.id).await.unwrap(), Holder::On(web.clone()));
        after.forget(&made.id).await.unwrap();
        let refused = plug(&after, &made.id, &db).await.unwrap_err();
        assert!(matches!(refused, VolumeError::InUse(_)), "{refused}");
        assert!(matches!(after.remove(&made.id).await, Err(VolumeError::InUse(_))));
        assert!(after.plugged(&web.vm).await.unwrap().contains(&made.id));
        // It is waited for, and not asked for once more.
        let late = plug(&after, &made.id, &web).await.unwrap_err();
        assert!(matches!(late, VolumeError::Waiting { .. }), "{late}");
        assert_eq!(lab.model.journal().requests.len(), 1);

        lab.model.release(Step::Copy, "web");
        until("it is carried out", async || (!domains(&lab, &made.id).is_empty()).then_some(())).await;
        assert_eq!(domains(&lab, &made.id), [web.vm.as_str()]);
        until("it is taken away", async || unplug(&after, &made.id, &web).await.ok()).await;
        plug(&after, &made.id, &db).await.unwrap();
        assert_eq!(domains(&lab, &made.id), [db.vm.as_str()]);
        assert!(lab.model.journal().conflicts().is_empty());
    });
}

#[test]
fn a_volume_whose_end_kubevirt_was_asked_for_is_waited_for_and_not_for_ever() {
    wait(async {
        let lab = Lab::start().await;
        lab.set_gates(&["HotplugVolumes"]).await;
        lab.running("web").await;
        let (volumes, web) = (volumes(&lab).await, place(&lab, "web").await);
        let made = make(&volumes, "data").await;
        plug(&volumes, &made.id, &web).await.unwrap();
        lab.model.hold(Step::Copy, "web");
        let late = unplug(&volumes, &made.id, &web).await.unwrap_err();
        assert!(late.to_string().contains("KubeVirt was asked to"), "{late}");
        let late = unplug(&volumes, &made.id, &web).await.unwrap_err();
        assert!(matches!(late, VolumeError::Waiting { .. }), "{late}");
        assert_eq!(lab.model.journal().requests.len(), 2);
        assert_eq!(domains(&lab, &made.id), [web.vm.as_str()]);
        lab.model.release(Step::Copy, "web");
        until("it is gone", async || unplug(&volumes, &made.id, &web).await.ok()).await;
        assert_eq!(domains(&lab, &made.id), [""; 0]);
    });
}

/// A VM starts with all volumes of its spec or not at all, and `KubeVirt` changes nothing before it has started.
#[test]
fn a_volume_that_keeps_a_vm_from_starting_is_taken_out_and_people_are_told_what_to_do() {
    for gate in ["DeclarativeHotplugVolumes", "HotplugVolumes"] {
        wait(async {
            let lab = Lab::start().await;
            lab.set_gates(&[gate]).await;
            lab.running("web").await;
            // Long enough that nothing is overdue where it is not waited for.
            let patient =
                volumes_with(&lab, Patience { settle: std::time::Duration::from_secs(20), ..quick() }).await;
            let web = place(&lab, "web").await;
            let (good, bad) = (make(&patient, "good").await, make(&patient, "bad").await);
            for volume in [&good, &bad] {
                plug(&patient, &volume.id, &web).await.unwrap();
            }
            lab.model.fail(Step::Attach, &claim_of("bad"), "no replica is left");
            end_run(&lab, "web").await;
            until("it is scheduled again, and waits", async || {
                let instance = lab.instance("web").await?;
                let stuck =
                    items(&instance["status"]["volumeStatus"]).any(|one| one["phase"] == "AttachedToNode");
                (instance["status"]["phase"] == "Scheduled" && stuck).then_some(())
            })
            .await;

            let stays = unplug(&patient, &bad.id, &web).await.unwrap_err();
            assert!(matches!(stays, VolumeError::Waiting { .. }), "{stays}");
            let words = stays.to_string();
            assert!(
                words.contains("the VM has not started (its VirtualMachineInstance is Scheduled)"),
                "{words}"
            );
            let way_out = format!("kubectl --namespace {NAMESPACE} delete virtualmachineinstance web");
            assert!(words.contains(&way_out), "{words}");
            // Its VirtualMachineInstance has it still.
            assert!(matches!(patient.holder(&bad.id).await.unwrap(), Holder::On(_)));
            if gate == "DeclarativeHotplugVolumes" {
                assert!(!listed(&lab, "web").await.contains(&claim_of("bad")));
            }

            end_run(&lab, "web").await;
            if gate == "HotplugVolumes" {
                // Its request is carried out while the VM has no run; where the next one came first, the VM is stopped for it.
                until("the request is carried out", async || {
                    if listed(&lab, "web").await.contains(&claim_of("bad")) {
                        end_run(&lab, "web").await;
                        return None;
                    }
                    Some(())
                })
                .await;
                end_run(&lab, "web").await;
            }
            lab.runs("web").await;
            until("it is off", async || match unplug(&patient, &bad.id, &web).await {
                Ok(()) => Some(()),
                Err(VolumeError::Disk(DiskError::Busy(_)) | VolumeError::Waiting { .. }) => None,
                Err(error) => panic!("{error}"),
            })
            .await;
            assert_eq!(patient.holder(&bad.id).await.unwrap(), Holder::Off);
            until("the good one is there", async || (!domains(&lab, &good.id).is_empty()).then_some(()))
                .await;
            assert_eq!(domains(&lab, &bad.id), [""; 0]);
        });
    }
}
