//! What is read before something is asked of `KubeVirt` may be old by then: requests that take their time.

use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use guestlet::host::backends::Problems;
use guestlet::host::backends::disks::{DiskError, GuestSide, Known};
use guestlet::host::backends::kubevirt::hotplug::Patience;
use guestlet::host::backends::kubevirt::names::Claim;
use guestlet::host::backends::kubevirt::volumes::Claims;
use guestlet::host::backends::volumes::{Place, VolumeError, Volumes as _};
use http::{Request, Response};
use kube::client::Body;
use serde_json::Value;
use tokio::sync::watch;
use tower_service::Service;

use crate::api::Api;
use crate::claims::{LET_GO, claim_of, domains, make, place, plug, quick, volumes_by, willing};
use crate::lab::{Lab, NAMESPACE, wait};
use crate::model::objects::Kind;
use crate::model::pace::Step;
use crate::patience::until;
use crate::role;

/// Holds back the next request whose path ends so, once it is told to.
#[derive(Clone, Default)]
struct Gate(Arc<Mutex<Held>>);

#[derive(Default)]
struct Held {
    /// The paths of all requests.
    asked: Vec<String>,
    end: Option<&'static str>,
    came: bool,
    may_go: Arc<tokio::sync::Notify>,
}

impl Gate {
    fn held(&self) -> std::sync::MutexGuard<'_, Held> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn hold(&self, end: &'static str) {
        self.held().end = Some(end);
    }

    /// What a request to this path has to wait for.
    fn stops(&self, path: &str) -> Option<Arc<tokio::sync::Notify>> {
        let mut held = self.held();
        held.asked.push(path.to_owned());
        held.end.take_if(|end| path.ends_with(*end))?;
        held.came = true;
        Some(Arc::clone(&held.may_go))
    }

    /// How many requests there were whose path ends so.
    fn count(&self, end: &str) -> usize {
        self.held().asked.iter().filter(|path| path.ends_with(end)).count()
    }

    async fn reached(&self) {
        until("the request that is held back has come", async || self.held().came.then_some(())).await;
    }

    fn release(&self) {
        self.held().may_go.notify_one();
    }
}

/// Asks the API server through the gate.
#[derive(Clone)]
struct Gated {
    client: kube::Client,
    gate: Gate,
}

impl Service<Request<Body>> for Gated {
    type Response = Response<Body>;
    type Error = kube::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Self::Error>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let stop = self.gate.stops(request.uri().path());
        let client = self.client.clone();
        Box::pin(async move {
            if let Some(stop) = stop {
                stop.notified().await;
            }
            client.send(request).await
        })
    }
}

/// A guest that releases everything; from then on the next request of this path is held back.
struct Arming(Gate, &'static str);

#[tonic::async_trait]
impl GuestSide for Arming {
    async fn release(&self, _: &Known) -> Result<(), DiskError> {
        self.0.hold(self.1);
        Ok(())
    }

    async fn stays(&self, _: &Known) {}
}

const CLAIMS: [&str; 2] = ["pvc-one", "pvc-two"];

fn id(claim: &str) -> String {
    format!("{NAMESPACE}.{claim}")
}

/// A controller's volumes that ask through the gate.
async fn gated(lab: &Lab) -> (Gate, Arc<Claims>) {
    gated_with(lab, quick()).await
}

async fn gated_with(lab: &Lab, patience: Patience) -> (Gate, Arc<Claims>) {
    role::install(&lab.api).await;
    let gate = Gate::default();
    let client = kube::Client::try_from(role::config(lab.turn.plane()).await).unwrap();
    let client = kube::Client::new(Gated { client, gate: gate.clone() }, NAMESPACE);
    let patience = Patience { gather: Duration::from_secs(1), settle: Duration::from_secs(20), ..patience };
    let volumes = volumes_by(client, patience, watch::Sender::new(Problems::new())).await;
    (gate, volumes)
}

/// A cluster with requests by subresource, where Harvester's driver has plugged both claims into a VM, which has them.
async fn started() -> (Lab, Gate, Arc<Claims>, Place) {
    let lab = Lab::start().await;
    lab.set_gates(&["HotplugVolumes"]).await;
    lab.running("web").await;
    let (gate, volumes) = gated(&lab).await;
    let web = place(&lab, "web").await;
    for claim in CLAIMS {
        lab.harvester_claim(claim, 16, "shop").await;
        lab.give(claim).await;
        let options = serde_json::json!({
            "name": claim,
            "disk": { "disk": { "bus": "scsi" } },
            "volumeSource": { "persistentVolumeClaim": { "claimName": claim } },
        });
        assert!(lab.call("web", "addvolume", &options).await.0.is_success());
        lab.is_in("web", claim, "Ready").await;
        plug(&volumes, &id(claim), &web).await.unwrap();
    }
    (lab, gate, volumes, web)
}

/// Ends a run of a VM, and waits until the next one has its volumes.
async fn restart(api: &Api, lab: &Lab) {
    let path = Kind::Vmi.path(&format!("{NAMESPACE}/web"));
    let before: Value = api.get(&path).await.unwrap();
    api.delete(&path).await;
    lab.until_other("web", &before).await;
    for claim in CLAIMS {
        lab.is_in("web", claim, "Ready").await;
    }
}

#[track_caller]
fn was_not_asked(outcome: Result<(), VolumeError>) {
    let error = outcome.unwrap_err();
    assert!(error.to_string().contains("was started after its guest was asked"), "{error}");
}

/// It is read last how the VM is.
#[test]
fn a_vm_that_is_started_anew_while_kubevirt_is_asked_how_it_plugs_keeps_its_volume() {
    wait(async {
        let (lab, gate, volumes, web) = started().await;
        let id = id(CLAIMS[0]);
        let side = Box::new(Arming(gate.clone(), "/kubevirts"));
        let unplugging = volumes.unplug(&id, &web.vm, LET_GO, side);
        let meanwhile = async {
            gate.reached().await;
            restart(&lab.api, &lab).await;
            gate.release();
        };
        let (outcome, ()) = tokio::join!(unplugging, meanwhile);
        was_not_asked(outcome);
        assert_eq!(domains(&lab, &id), [web.vm.as_str()]);
        volumes.unplug(&id, &web.vm, LET_GO, willing()).await.unwrap();
    });
}

/// One request was made, and the other one is not any more.
#[test]
fn a_vm_that_is_started_anew_between_two_requests_keeps_what_its_guest_was_not_asked_for() {
    wait(async {
        let (lab, gate, volumes, web) = started().await;
        let [one, two] = CLAIMS.map(id);
        let first = Box::new(Arming(gate.clone(), "/removevolume"));
        let meanwhile = async {
            gate.reached().await;
            restart(&lab.api, &lab).await;
            gate.release();
        };
        let (_, outcome, ()) = tokio::join!(
            volumes.unplug(&one, &web.vm, LET_GO, first),
            volumes.unplug(&two, &web.vm, LET_GO, willing()),
            meanwhile,
        );
        was_not_asked(outcome);
        assert_eq!(domains(&lab, &two), [web.vm.as_str()]);
        volumes.unplug(&two, &web.vm, LET_GO, willing()).await.unwrap();
        assert!(domains(&lab, &two).is_empty());
    });
}

/// Harvester's driver plugs it into the same VM after it was seen to be there, and before anybody is told so.
#[test]
fn what_another_program_plugs_into_the_same_vm_meanwhile_is_seen_by_the_same_call() {
    wait(async {
        let lab = Lab::start().await;
        lab.running("web").await;
        let (gate, volumes) = gated(&lab).await;
        let (claim, web) = (CLAIMS[0], place(&lab, "web").await);
        lab.harvester_claim(claim, 16, "shop").await;
        lab.give(claim).await;
        let id = id(claim);
        let ours = Claim::of_id(&id).unwrap().volume();
        lab.model.hold(Step::Plug, claim);
        let meanwhile = async {
            lab.model.reaches(Step::Plug, claim).await;
            gate.hold("/volumeattachments");
            lab.model.release(Step::Plug, claim);
            gate.reached().await;
            lab.is_in("web", &ours, "Ready").await;
            lab.harvester_plugs("web", claim).await;
            gate.release();
        };
        let (outcome, ()) = tokio::join!(plug(&volumes, &id, &web), meanwhile);
        let error = outcome.unwrap_err();
        assert!(
            matches!(&error, VolumeError::InUse(why) if why.contains("twice, as its volumes")),
            "{error:?}"
        );
        // What guestlet has plugged is taken away again by whoever gives up; the other disk is its program's.
        lab.is_in("web", claim, "Ready").await;
        let waits = volumes.unplug(&id, &web.vm, Duration::ZERO, willing()).await.unwrap_err();
        assert!(waits.to_string().contains("the VM default/web lists it"), "{waits}");
        lab.has_left("web", &ours).await;
        assert!(lab.entry("web", claim).await.is_some());
    });
}

/// How `KubeVirt` is told depends on its settings: they are read when it is to be told something, and not with each look.
#[test]
fn kubevirts_settings_are_not_read_while_a_volume_is_waited_for() {
    wait(async {
        let lab = Lab::start().await;
        lab.running("web").await;
        let patience = Patience { look: Duration::from_millis(200), ..quick() };
        let (gate, volumes) = gated_with(&lab, patience).await;
        let web = place(&lab, "web").await;
        let made = make(&volumes, "data").await;
        let claim = claim_of("data");
        lab.model.hold(Step::Plug, &claim);
        let waiting = async {
            lab.model.reaches(Step::Plug, &claim).await;
            let looks = || gate.count("/virtualmachines/web");
            let enough = looks() + 10;
            until("it has looked ten times", async || (looks() >= enough).then_some(())).await;
            lab.model.release(Step::Plug, &claim);
        };
        let (plugged, ()) = tokio::join!(plug(&volumes, &made.id, &web), waiting);
        plugged.unwrap();
        assert_eq!(gate.count("/kubevirts"), 1, "to tell it");
    });
}
