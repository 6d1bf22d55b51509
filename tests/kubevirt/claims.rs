//! Volumes as the host half keeps them, on KubeVirt: what the API and the domains have of them, at every step.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use guestlet::host::backends::Problems;
use guestlet::host::backends::disks::{DiskError, GuestSide, Known};
use guestlet::host::backends::kubevirt::api::Cluster;
use guestlet::host::backends::kubevirt::hotplug::Patience;
use guestlet::host::backends::kubevirt::names::Claim;
use guestlet::host::backends::kubevirt::volumes::Claims;
use guestlet::host::backends::volumes::{Holder, NewVolume, Place, Published, Volume, VolumeError, Volumes};
use guestlet::host::half::Half;
use serde_json::json;
use tokio::sync::watch;

use crate::lab::{Lab, NAMESPACE, NEVER, SHARED, wait};
use crate::model::objects::{Kind, text, uid};
use crate::model::pace::Step;
use crate::patience::until;
use crate::role;

const SIZE: u64 = 16 << 20;
/// How long a guest may take to let go, and the host cluster with it.
pub const LET_GO: Duration = Duration::from_secs(20);

/// A guest that releases everything, or nothing; it remembers what it was asked for.
#[derive(Default)]
pub struct Guest {
    pub is_willing: bool,
    pub asked: Arc<Mutex<Vec<Known>>>,
}

#[tonic::async_trait]
impl GuestSide for Guest {
    async fn release(&self, disk: &Known) -> Result<(), DiskError> {
        self.asked.lock().unwrap().push(disk.clone());
        if self.is_willing { Ok(()) } else { Err(DiskError::NotReleased("it is in use".to_owned())) }
    }

    async fn stays(&self, _: &Known) {}
}

pub fn willing() -> Box<dyn GuestSide> {
    Box::new(Guest { is_willing: true, ..Guest::default() })
}

pub fn unwilling() -> Box<dyn GuestSide> {
    Box::new(Guest::default())
}

pub fn quick() -> Patience {
    Patience {
        gather: Duration::from_millis(200),
        settle: Duration::from_secs(6),
        look: Duration::from_secs(2),
        poll: Duration::from_millis(200),
        ..Patience::default()
    }
}

/// The host half's volumes, as a controller has them that has just been started.
pub async fn volumes(lab: &Lab) -> Arc<Claims> {
    volumes_with(lab, quick()).await
}

/// The same with another patience.
pub async fn volumes_with(lab: &Lab, patience: Patience) -> Arc<Claims> {
    role::install(&lab.api).await;
    volumes_that_tell(lab, patience, watch::Sender::new(Problems::new())).await
}

/// The same, as far as the account may do it now; what cannot be followed is told there.
pub async fn volumes_that_tell(
    lab: &Lab,
    patience: Patience,
    problems: watch::Sender<Problems>,
) -> Arc<Claims> {
    let client = kube::Client::try_from(role::config(lab.turn.plane()).await).unwrap();
    volumes_by(client, patience, problems).await
}

/// The same, which ask by this client.
pub async fn volumes_by(
    client: kube::Client,
    patience: Patience,
    problems: watch::Sender<Problems>,
) -> Arc<Claims> {
    let half = Arc::new(Half::new("controller".to_owned()));
    Arc::new(Claims::new(Cluster::new(client, problems, half), patience, "ReadWriteMany".to_owned()).await)
}

pub fn new(class: &str, name: &str) -> NewVolume {
    NewVolume {
        name: name.to_owned(),
        cluster: format!("{NAMESPACE}/shop"),
        class: class.to_owned(),
        size: SIZE,
        claim: "shop/data".to_owned(),
        is_share: false,
    }
}

pub async fn make_in(volumes: &Claims, class: &str, name: &str) -> Volume {
    volumes.create(new(class, name)).await.unwrap()
}

pub async fn make(volumes: &Claims, name: &str) -> Volume {
    make_in(volumes, SHARED, name).await
}

/// The VM of an instance that runs.
pub async fn place(lab: &Lab, vm: &str) -> Place {
    let object = lab.api.get(&Kind::Vm.path(&format!("{NAMESPACE}/{vm}"))).await.unwrap();
    Place { uuid: uid(&object).to_owned(), vm: format!("{NAMESPACE}/{vm}") }
}

pub fn published(place: &Place) -> Published {
    let Place { uuid, vm } = place.clone();
    Published { node: vm.clone(), uuid, vm, read_only: false, leaving: false }
}

pub async fn plug(volumes: &Claims, id: &str, place: &Place) -> Result<String, VolumeError> {
    volumes.plug(id, published(place), &place.vm).await.map(|plugged| plugged.disk.text().to_owned())
}

/// The name of the claim of a volume of this identifier.
fn claim_name(id: &str) -> String {
    Claim::of_id(id).unwrap().name
}

/// The name of the claim for a volume that the cluster of [`new`] calls so.
pub fn claim_of(name: &str) -> String {
    Claim::of_name(&new(SHARED, name).cluster, name).name
}

/// The VMs whose domains have a volume.
pub fn domains(lab: &Lab, id: &str) -> Vec<String> {
    lab.model.journal().holders(NAMESPACE, &claim_name(id)).into_iter().map(str::to_owned).collect()
}

/// harvester/harvester#7765: of claims without the name of their cluster nobody knew whose they were once that was gone.
#[test]
fn a_volume_is_made_plugged_unplugged_and_removed() {
    wait(async {
        let lab = Lab::start().await;
        lab.running("web").await;
        let (volumes, web) = (volumes(&lab).await, place(&lab, "web").await);
        let made = make(&volumes, "pvc-6f0c2a0e-0b7a-4b8e-9a55-0a1b2c3d4e5f").await;
        let claim = claim_of(&made.name);
        assert_eq!(made.id, format!("{NAMESPACE}.{claim}"));
        assert_eq!(make(&volumes, &made.name).await, made, "once more is the same");
        assert_eq!(volumes.list(None).await.unwrap(), std::slice::from_ref(&made));
        let object = lab.api.get(&Kind::Claim.path(&format!("{NAMESPACE}/{claim}"))).await.unwrap();
        let labels = json!({
            "app.kubernetes.io/managed-by": "guestlet",
            "guestcluster.harvesterhci.io/name": "shop",
            "guestlet.io/claim-namespace": "shop",
            "guestlet.io/claim-name": "data",
        });
        assert_eq!(object["metadata"]["labels"], labels, "by these people find it");
        assert_eq!(object["metadata"]["finalizers"], json!(["kubernetes.io/pvc-protection"]), "none of ours");

        let serial = plug(&volumes, &made.id, &web).await.unwrap();
        assert_eq!(claim, format!("guestlet-{serial}"));
        assert_eq!(domains(&lab, &made.id), [web.vm.as_str()]);
        let instance = lab.instance("web").await.unwrap();
        let disks = instance["spec"]["domain"]["devices"]["disks"].as_array().unwrap();
        assert!(
            disks.iter().any(|disk| disk["serial"] == serial && disk["disk"]["bus"] == "scsi"),
            "{disks:?}"
        );
        assert_eq!(plug(&volumes, &made.id, &web).await.unwrap(), serial, "once more changes nothing");
        assert_eq!(lab.model.journal().generations(&web.vm), 1);
        assert_eq!(volumes.holder(&made.id).await.unwrap(), Holder::On(web.clone()));
        assert_eq!(volumes.plugged(&web.vm).await.unwrap(), [made.id.clone()].into());
        assert!(matches!(volumes.remove(&made.id).await, Err(VolumeError::InUse(_))));

        let refused = volumes.unplug(&made.id, &web.vm, LET_GO, unwilling()).await.unwrap_err();
        assert!(matches!(refused, VolumeError::Disk(DiskError::NotReleased(_))), "{refused}");
        let kept = volumes.get(&made.id).await.unwrap().unwrap();
        assert_eq!((kept.published, domains(&lab, &made.id)), (Some(published(&web)), vec![web.vm.clone()]));

        volumes.unplug(&made.id, &web.vm, LET_GO, willing()).await.unwrap();
        assert!(domains(&lab, &made.id).is_empty());
        assert!(lab.attached(&claim).await.is_empty(), "its VolumeAttachment is gone");
        let free = volumes.get(&made.id).await.unwrap().unwrap();
        assert_eq!((free.published, volumes.holder(&made.id).await.unwrap()), (None, Holder::Off));
        volumes.remove(&made.id).await.unwrap();
        assert_eq!(volumes.get(&made.id).await.unwrap(), None);
        volumes.remove(&made.id).await.unwrap();
    });
}

#[test]
fn ten_volumes_at_once_are_carried_by_two_pods_at_most() {
    wait(async {
        let lab = Lab::start().await;
        lab.running("web").await;
        let patience = Patience { settle: Duration::from_secs(60), ..quick() };
        let volumes = volumes_with(&lab, patience).await;
        let web = place(&lab, "web").await;
        let mut all = Vec::new();
        for number in 0..10 {
            all.push(make(&volumes, &format!("data-{number}")).await.id);
        }
        let mut plugging = tokio::task::JoinSet::new();
        for id in all {
            let (volumes, web) = (Arc::clone(&volumes), web.clone());
            plugging.spawn(async move { (plug(&volumes, &id, &web).await, id) });
        }
        let mut ids = Vec::new();
        while let Some(plugged) = plugging.join_next().await {
            let (outcome, id) = plugged.unwrap();
            outcome.unwrap();
            assert_eq!(domains(&lab, &id), [web.vm.as_str()]);
            ids.push(id);
        }
        let generations = lab.model.journal().generations(&web.vm);
        assert!(generations <= 2, "{generations} attachment pods");
        let mut unplugging = tokio::task::JoinSet::new();
        for id in ids {
            let (volumes, web) = (Arc::clone(&volumes), web.clone());
            unplugging.spawn(async move { volumes.unplug(&id, &web.vm, LET_GO, willing()).await });
        }
        while let Some(unplugged) = unplugging.join_next().await {
            unplugged.unwrap().unwrap();
        }
        let instance = lab.instance("web").await.unwrap();
        assert!(
            instance["status"]["volumeStatus"]
                .as_array()
                .unwrap()
                .iter()
                .all(|one| one["hotplugVolume"].is_null())
        );
        assert!(lab.model.journal().conflicts().is_empty());
    });
}

/// harvester/harvester#10588, #9761: one volume that cannot be attached must not keep all others out.
#[test]
fn a_volume_that_is_stuck_is_taken_out_again_and_says_why() {
    wait(async {
        let lab = Lab::start().await;
        lab.running("web").await;
        let (volumes, web) = (volumes(&lab).await, place(&lab, "web").await);
        let (stuck, later) = (make(&volumes, "stuck").await, make(&volumes, "later").await);
        lab.model.fail(Step::Attach, &claim_of("stuck"), "no replica is left");
        let first = plug(&volumes, &stuck.id, &web);
        let second = async {
            until("the first one is on its way", async || {
                let vm = lab.api.get(&Kind::Vm.path(&format!("{NAMESPACE}/web"))).await?;
                (vm["spec"]["template"]["spec"]["volumes"].as_array()?.len() > 1).then_some(())
            })
            .await;
            // As a sidecar does, until it is there.
            until("the later one is plugged", async || plug(&volumes, &later.id, &web).await.ok()).await;
        };
        let (first, ()) = tokio::join!(first, second);
        let error = first.unwrap_err();
        assert!(matches!(error, VolumeError::Waiting { .. }), "{error}");
        let words = error.to_string();
        assert!(words.contains("FailedAttachVolume") && words.contains("no replica is left"), "{words}");
        assert_eq!(domains(&lab, &later.id), [web.vm.as_str()]);
        let vm = lab.api.get(&Kind::Vm.path(&format!("{NAMESPACE}/web"))).await.unwrap();
        let listed = vm["spec"]["template"]["spec"]["volumes"].as_array().unwrap().clone();
        let has =
            |name: &str| listed.iter().any(|one| one["persistentVolumeClaim"]["claimName"] == claim_of(name));
        assert!(has("later") && !has("stuck"), "{listed:?}");
        until("nothing holds the one that was stuck", async || {
            matches!(volumes.holder(&stuck.id).await, Ok(Holder::Off)).then_some(())
        })
        .await;
    });
}

#[test]
fn a_claim_that_is_never_bound_is_told_of_and_never_handed_to_kubevirt() {
    wait(async {
        let lab = Lab::start().await;
        lab.running("web").await;
        let (volumes, web) = (volumes(&lab).await, place(&lab, "web").await);
        let never = make_in(&volumes, NEVER, "never").await;
        let error = plug(&volumes, &never.id, &web).await.unwrap_err();
        assert!(matches!(error, VolumeError::Waiting { .. }), "{error}");
        assert!(error.to_string().contains("has not bound the volume's claim"), "{error}");
        assert_eq!(volumes.get(&never.id).await.unwrap().unwrap().published, None);
        assert_eq!(lab.model.journal().generations(&web.vm), 0);
        volumes.remove(&never.id).await.unwrap();
    });
}

/// harvester/harvester#10217: a volume whose VM is gone from its spec is attached to the node for a while.
#[test]
fn a_volume_is_free_when_its_node_has_let_go_and_not_before() {
    wait(async {
        let lab = Lab::start().await;
        for vm in ["one", "two"] {
            lab.running(vm).await;
        }
        let volumes = volumes(&lab).await;
        let (one, two) = (place(&lab, "one").await, place(&lab, "two").await);
        let made = make(&volumes, "data").await;
        plug(&volumes, &made.id, &one).await.unwrap();
        let refused = plug(&volumes, &made.id, &two).await.unwrap_err();
        assert!(matches!(refused, VolumeError::Disk(DiskError::Busy(_))), "{refused}");

        lab.model.hold(Step::Detach, &claim_of("data"));
        let late = volumes.unplug(&made.id, &one.vm, Duration::from_secs(3), willing()).await.unwrap_err();
        assert!(matches!(late, VolumeError::Waiting { .. }), "{late}");
        assert!(late.to_string().contains("VolumeAttachment"), "{late}");
        assert!(domains(&lab, &made.id).is_empty(), "the domain has let go");
        let held = volumes.holder(&made.id).await.unwrap();
        assert!(matches!(&held, Holder::Unknown(why) if why.contains("attached to the node")), "{held:?}");
        assert!(volumes.get(&made.id).await.unwrap().unwrap().published.unwrap().leaving);
        assert!(matches!(volumes.remove(&made.id).await, Err(VolumeError::InUse(_))));

        lab.model.release(Step::Detach, &claim_of("data"));
        volumes.unplug(&made.id, &one.vm, LET_GO, willing()).await.unwrap();
        plug(&volumes, &made.id, &two).await.unwrap();
        assert_eq!(domains(&lab, &made.id), [two.vm.as_str()]);
        assert!(lab.model.journal().conflicts().is_empty());
    });
}

#[test]
fn whoever_comes_after_one_that_ended_finds_what_it_was_at() {
    wait(async {
        let lab = Lab::start().await;
        lab.running("web").await;
        let web = place(&lab, "web").await;
        let first = volumes(&lab).await;
        let made = make(&first, "data").await;
        let claim = claim_of("data");
        lab.model.hold(Step::Plug, &claim);
        {
            // It ends while KubeVirt is at it.
            let plugging = plug(&first, &made.id, &web);
            tokio::select! {
                outcome = plugging => panic!("{outcome:?}"),
                () = lab.model.reaches(Step::Plug, &claim) => {}
            }
        }
        drop(first);
        let second = volumes(&lab).await;
        assert_eq!(second.list(None).await.unwrap()[0].published, Some(published(&web)));
        assert_eq!(second.holder(&made.id).await.unwrap(), Holder::On(web.clone()));
        lab.model.release(Step::Plug, &claim_of("data"));
        plug(&second, &made.id, &web).await.unwrap();
        assert_eq!(lab.model.journal().generations(&web.vm), 1);

        lab.model.hold(Step::Unplug, &claim_of("data"));
        {
            let unplugging = second.unplug(&made.id, &web.vm, LET_GO, willing());
            tokio::select! {
                outcome = unplugging => panic!("{outcome:?}"),
                () = lab.model.reaches(Step::Unplug, &claim) => {}
            }
        }
        drop(second);
        let third = volumes(&lab).await;
        assert!(third.list(None).await.unwrap()[0].published.as_ref().unwrap().leaving);
        lab.model.release(Step::Unplug, &claim_of("data"));
        third.unplug(&made.id, &web.vm, LET_GO, willing()).await.unwrap();
        assert_eq!(third.get(&made.id).await.unwrap().unwrap().published, None);
        third.remove(&made.id).await.unwrap();
        assert!(lab.model.journal().conflicts().is_empty());
    });
}

#[test]
fn a_vm_that_is_deleted_leaves_its_volume_when_nothing_of_it_runs_any_more() {
    wait(async {
        let lab = Lab::start().await;
        lab.running("web").await;
        let (volumes, web) = (volumes(&lab).await, place(&lab, "web").await);
        let made = make(&volumes, "data").await;
        plug(&volumes, &made.id, &web).await.unwrap();
        lab.model.hold(Step::ShutDown, "web");
        lab.api.delete(&Kind::Vm.path(&format!("{NAMESPACE}/web"))).await;
        lab.model.reaches(Step::ShutDown, "web").await;
        let held = volumes.holder(&made.id).await.unwrap();
        assert!(!matches!(held, Holder::Off), "{held:?}");
        assert_eq!(domains(&lab, &made.id), [web.vm.as_str()], "it still writes");
        lab.model.release(Step::ShutDown, "web");
        until("it is free", async || matches!(volumes.holder(&made.id).await, Ok(Holder::Off)).then_some(()))
            .await;
        assert!(domains(&lab, &made.id).is_empty());
        volumes.forget(&made.id).await.unwrap();
        volumes.remove(&made.id).await.unwrap();
    });
}

#[test]
fn where_only_requests_count_volumes_come_and_go_by_requests() {
    wait(async {
        let lab = Lab::start().await;
        lab.set_gates(&["HotplugVolumes"]).await;
        lab.running("web").await;
        let (volumes, web) = (volumes(&lab).await, place(&lab, "web").await);
        let made = make(&volumes, "data").await;
        plug(&volumes, &made.id, &web).await.unwrap();
        assert_eq!(domains(&lab, &made.id), [web.vm.as_str()]);
        volumes.unplug(&made.id, &web.vm, LET_GO, willing()).await.unwrap();
        assert!(domains(&lab, &made.id).is_empty());

        lab.set_gates(&[]).await;
        let error = plug(&volumes, &made.id, &web).await.unwrap_err();
        assert!(matches!(error, VolumeError::Refused(_)), "{error}");
        assert!(error.to_string().contains("featureGates of the KubeVirt object"), "{error}");
        assert_eq!(volumes.get(&made.id).await.unwrap().unwrap().published, None);
    });
}

#[test]
fn a_vm_whose_volumes_are_to_be_migrated_is_refused_in_words() {
    wait(async {
        let lab = Lab::start().await;
        lab.vm_with("web", |vm| vm["spec"]["updateVolumesStrategy"] = json!("Migration")).await;
        lab.runs("web").await;
        let (volumes, web) = (volumes(&lab).await, place(&lab, "web").await);
        let made = make(&volumes, "data").await;
        let error = plug(&volumes, &made.id, &web).await.unwrap_err();
        assert!(error.to_string().contains("updateVolumesStrategy is Migration"), "{error}");
        assert_eq!(volumes.get(&made.id).await.unwrap().unwrap().published, None);
    });
}

#[test]
fn what_belongs_to_others_is_left_alone() {
    wait(async {
        let lab = Lab::start().await;
        lab.running("web").await;
        let (volumes, web) = (volumes(&lab).await, place(&lab, "web").await);
        lab.claim("foreign", 16).await;
        let foreign = format!("{NAMESPACE}.foreign");
        assert!(matches!(volumes.get(&foreign).await, Err(VolumeError::NotGiven { .. })));
        assert!(volumes.list(None).await.unwrap().is_empty());
        assert!(matches!(plug(&volumes, &foreign, &web).await, Err(VolumeError::NotGiven { .. })));
        // It is not gone either.
        assert!(matches!(volumes.remove(&foreign).await, Err(VolumeError::NotGiven { .. })));
        let named_alike = make(&volumes, "foreign").await;
        assert_ne!(named_alike.id, foreign, "a guest does not choose names of claims");
        volumes.remove(&named_alike.id).await.unwrap();
        let claim = lab.api.get(&Kind::Claim.path(&format!("{NAMESPACE}/foreign"))).await.unwrap();
        assert!(claim["metadata"]["deletionTimestamp"].is_null() && claim["metadata"]["labels"].is_null());

        // One of ours, which somebody has plugged himself.
        let made = make(&volumes, "data").await;
        lab.plug("web", &claim_of("data")).await;
        lab.is_in("web", &claim_of("data"), "Ready").await;
        let error = plug(&volumes, &made.id, &web).await.unwrap_err();
        assert!(
            matches!(&error, VolumeError::Refused(why) if why.contains("by a program other than guestlet")),
            "{error}"
        );
        assert_eq!(domains(&lab, &made.id), [web.vm.as_str()]);
        assert_eq!(
            volumes.get(&made.id).await.unwrap().unwrap().published,
            None,
            "it is not remembered as guestlet's"
        );
    });
}

#[test]
fn a_volume_grows_while_a_vm_has_it_and_while_none_does() {
    wait(async {
        let lab = Lab::start().await;
        lab.running("web").await;
        let (volumes, web) = (volumes(&lab).await, place(&lab, "web").await);
        let made = make(&volumes, "data").await;
        plug(&volumes, &made.id, &web).await.unwrap();
        assert_eq!(volumes.grow(&made.id, 2 * SIZE, Some(&web.vm)).await.unwrap(), 2 * SIZE);
        volumes.unplug(&made.id, &web.vm, LET_GO, willing()).await.unwrap();
        assert_eq!(volumes.grow(&made.id, 3 * SIZE, None).await.unwrap(), 3 * SIZE);
        let claim = Kind::Claim.path(&format!("{NAMESPACE}/{}", claim_of("data")));
        let claim = lab.api.get(&claim).await.unwrap();
        assert_eq!(text(&claim["status"]["phase"]), "Bound");
        assert_eq!(volumes.get(&made.id).await.unwrap().unwrap().size, 3 * SIZE);
    });
}
