//! Volumes come and go in random order while whatever may go wrong does: the program that asks for them ends at any moment,
//! the API server is away, VMs stop, start and migrate, steps hang and fail. What the model's domains had is the judge.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use guestlet::host::backends::kubevirt::volumes::Claims;
use guestlet::host::backends::volumes::{Holder, Place, VolumeError, Volumes as _};
use serde_json::{Value, json};
use tokio::sync::Mutex;
use tokio::task::JoinSet;

use crate::claims::{LET_GO, claim_of, domains, make, place, plug, published, volumes, willing};
use crate::lab::{HOSTS, Lab, NAMESPACE, wait};
use crate::model::objects::{Kind, text};
use crate::model::pace::Step;
use crate::patience::until;
use crate::random::{Random, seed};
use crate::soak::steps;

const VMS: [&str; 3] = ["one", "two", "three"];
const VOLUMES: usize = 5;

/// What a call for one volume is to come to: it is in this VM, or in none.
type Wanted = Option<Place>;

/// Has a volume be where it is wanted, as a sidecar does that repeats its calls; whether it is there.
async fn bring(volumes: &Claims, id: &str, wanted: &Wanted) -> Result<(), VolumeError> {
    let record = volumes.get(id).await?.ok_or_else(|| VolumeError::Unknown(id.to_owned()))?.published;
    // A command of a program that has ended may be carried out late. Who keeps volumes looks for that now and then.
    if let Holder::On(place) = volumes.holder(id).await?
        && record.as_ref().is_none_or(|record| record.uuid != place.uuid)
    {
        return volumes.take_back(id, &place, LET_GO, willing()).await;
    }
    match (record, wanted) {
        (None, None) => Ok(()),
        (None, Some(place)) => plug(volumes, id, place).await.map(drop),
        (Some(record), Some(place)) if record == published(place) => plug(volumes, id, place).await.map(drop),
        (Some(record), _) => match volumes.holder(id).await? {
            Holder::Off => volumes.forget(id).await,
            Holder::On(place) if place.uuid == record.uuid => {
                volumes.unplug(id, &place.vm, LET_GO, willing()).await
            }
            Holder::On(place) => volumes.take_back(id, &place, LET_GO, willing()).await,
            Holder::Unknown(why) => Err(VolumeError::Unavailable(why)),
        },
    }
}

/// The same until it is so, whatever goes wrong on the way.
async fn bring_at_last(lab: &Lab, volumes: &Claims, id: &str, wanted: &Wanted) {
    until(&format!("{id} is where it is wanted: {wanted:?}"), async || {
        // Shown if the test fails: what has kept it from that.
        bring(volumes, id, wanted).await.inspect_err(|error| eprintln!("{id}: {error}")).ok()?;
        let record = volumes.get(id).await.ok()??.published;
        (record == wanted.as_ref().map(published)).then_some(())
    })
    .await;
    let expected: Vec<_> = wanted.iter().map(|place| place.vm.clone()).collect();
    assert_eq!(domains(lab, id), expected, "{id}");
}

async fn run_strategy(lab: &Lab, vm: &str, strategy: &str) {
    let change = json!({ "spec": { "runStrategy": strategy } });
    lab.api.patch(&Kind::Vm.path(&format!("{NAMESPACE}/{vm}")), &change).await;
}

/// One of the things that go wrong, and go on being wrong until it is called again.
async fn disturb(lab: &mut Lab, random: &mut Random, volumes: &mut Arc<Claims>, calls: &mut JoinSet<()>) {
    let vm = VMS[random.below(3) as usize];
    let claim = claim_of(&format!("data-{}", random.below(u32::try_from(VOLUMES).unwrap())));
    match random.below(8) {
        0 | 1 => {
            // The program ends, and another one begins.
            calls.abort_all();
            while calls.join_next().await.is_some() {}
            *volumes = crate::claims::volumes(lab).await;
        }
        2 => {
            lab.turn.kill_api_server();
            tokio::time::sleep(Duration::from_millis(500)).await;
            lab.turn.start_api_server();
            until("the API server is ready", async || lab.api.is_ready().await.then_some(())).await;
        }
        3 => run_strategy(lab, vm, "Halted").await,
        4 => {
            // KubeVirt takes no second one of a VM at a time, and none to where the VM is.
            let node =
                lab.instance(vm).await.map(|instance| text(&instance["status"]["nodeName"]).to_owned());
            let host = HOSTS.into_iter().find(|host| node.as_deref().is_some_and(|node| node != *host));
            if let Some(host) = host.filter(|_| random.below(2) == 0)
                && migrations(lab).await.is_empty()
            {
                lab.model.migrate(NAMESPACE, vm, host).await;
            }
        }
        5 => lab.model.fail(Step::Attach, &claim, "it is told to fail"),
        6 => lab.model.hold(Step::Detach, &claim),
        _ => lab.model.hold(Step::Unplug, &claim),
    }
}

/// The migrations that go on.
async fn migrations(lab: &Lab) -> Vec<Value> {
    let mut all = lab.api.list(&Kind::Migration.within(NAMESPACE)).await;
    all.retain(|one| !matches!(text(&one["status"]["phase"]), "Succeeded" | "Failed"));
    all
}

async fn calm(lab: &Lab) {
    for number in 0..VOLUMES {
        let claim = claim_of(&format!("data-{number}"));
        lab.model.succeed(Step::Attach, &claim);
        lab.model.release(Step::Detach, &claim);
        lab.model.release(Step::Unplug, &claim);
    }
    for vm in VMS {
        run_strategy(lab, vm, "Always").await;
    }
    for vm in VMS {
        lab.runs(vm).await;
    }
    until("no VM is migrated", async || migrations(lab).await.is_empty().then_some(())).await;
}

#[test]
fn no_volume_is_in_two_vms_none_is_lost_and_nothing_is_stuck() {
    wait(async {
        let mut random = Random(seed());
        let mut lab = Lab::start().await;
        let mut places = Vec::new();
        for vm in VMS {
            lab.running(vm).await;
            places.push(place(&lab, vm).await);
        }
        let mut claims = volumes(&lab).await;
        let mut ids = Vec::new();
        for number in 0..VOLUMES {
            ids.push(make(&claims, &format!("data-{number}")).await.id);
        }
        let turns: BTreeMap<_, _> = ids.iter().map(|id| (id.clone(), Arc::new(Mutex::new(())))).collect();
        for _ in 0..steps(2, 40) {
            let mut calls = JoinSet::new();
            for _ in 0..steps(8, 12) {
                let id = ids[random.below(u32::try_from(VOLUMES).unwrap()) as usize].clone();
                let at = random.below(4) as usize;
                let (asked, wanted) = (Arc::clone(&claims), places.get(at).cloned());
                let turn = Arc::clone(&turns[&id]);
                calls.spawn(async move {
                    // One at a time works on a volume: whoever asks for volumes sees to that.
                    let Ok(_turn) = turn.try_lock() else { return };
                    // What comes of it is seen at the end.
                    drop(bring(&asked, &id, &wanted).await);
                });
                tokio::time::sleep(Duration::from_millis(random.below(700).into())).await;
                if random.below(2) == 0 {
                    disturb(&mut lab, &mut random, &mut claims, &mut calls).await;
                }
                let conflicts = lab.model.journal().conflicts().len();
                assert_eq!(conflicts, 0, "{:?}", lab.model.journal().conflicts());
            }
            calm(&lab).await;
            while calls.join_next().await.is_some() {}
            // Each is where somebody wants it in the end.
            for id in &ids {
                let wanted = places.get(random.below(4) as usize).cloned();
                bring_at_last(&lab, &claims, id, &wanted).await;
            }
            assert!(lab.model.journal().conflicts().is_empty());
        }
        for id in &ids {
            bring_at_last(&lab, &claims, id, &None).await;
            until(&format!("{id} is removed"), async || claims.remove(id).await.ok()).await;
        }
        until("nothing is listed", async || claims.list(None).await.unwrap().is_empty().then_some(())).await;
        assert!(lab.api.list(&Kind::Claim.within(NAMESPACE)).await.is_empty());
        assert!(lab.model.journal().conflicts().is_empty());
        until("no VolumeAttachment is left", async || {
            lab.api.list(&Kind::Attachment.all()).await.is_empty().then_some(())
        })
        .await;
    });
}
