//! What guest clusters are told by the controller, with the roles that it is installed with: they suffice, and no verb of that for
//! load balancers is there for nothing.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use guestlet::host::backends::kubevirt::api::Cluster;
use guestlet::host::backends::kubevirt::controller::listing::Listing;
use guestlet::host::backends::kubevirt::controller::{Options, Roster, Site};
use guestlet::host::backends::kubevirt::seen::Facts;
use guestlet::host::backends::{Backend as _, Problems};
use guestlet::host::cloud::Handle;
use guestlet::host::cloud::remote::{Parts, Registry};
use guestlet::host::cloud::settings::Settings;
use guestlet::host::controller::Nodes;
use guestlet::host::fleet::Remote;
use guestlet::host::for_guests::{Asking, Cloud as _};
use guestlet::host::half::Half;
use guestlet::supervise::Scope;
use guestlet::wire::proto::v1::cloud_client::CloudClient;
use guestlet::wire::proto::v1::load_balancer::State;
use guestlet::wire::proto::v1::{
    Announcing, EnsureLoadBalancerRequest, IpFamily, ListLoadBalancersRequest, ReleaseLoadBalancerRequest,
    ServicePort, ServiceReference,
};
use http::{Request, Response};
use serde_json::Value;
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;
use tonic::body::Body;

use crate::harvester::{BALANCERS, Harvester, pool};
use crate::lab::{Lab, wait};
use crate::patience::until;
use crate::pool::add_kind;
use crate::role;

const ROLE: &str =
    include_str!("../../packaging/kubernetes/host/overlays/harvester/controller-balancers-role.yaml");
const ROLES: &str = "/apis/rbac.authorization.k8s.io/v1/clusterroles";
const BINDINGS: &str = "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings";
const NAME: &str = "guestlet-controller-balancers";

/// The controller's part of it.
pub struct Clusters {
    handle: Handle,
    half: Arc<Half>,
    problems: watch::Receiver<Problems>,
    options: watch::Sender<Options>,
    _settings: watch::Sender<Arc<Settings>>,
    _tasks: Scope,
}

impl Clusters {
    /// One that follows what the account may follow now; what it cannot is told there.
    pub async fn with(lab: &Lab, problems: watch::Sender<Problems>) -> Self {
        let options = Options { max_volumes: 64, limits: Arc::default(), node_labels: Vec::new() };
        let (set_options, options) = watch::channel(options);
        let (set_settings, settings) = watch::channel(Arc::<Settings>::default());
        let half = Arc::new(Half::new("controller".into()));
        let config = role::config(lab.turn.plane()).await;
        let client = kube::Client::try_from(config.clone()).unwrap();
        let told = problems.subscribe();
        let cluster = Cluster::new(client, problems.clone(), Arc::clone(&half));
        let (heard, facts) = mpsc::channel(64);
        let site = Site {
            cluster: config,
            options: options.clone(),
            problems,
            listing: Listing::default(),
            heard: Some(heard),
        };
        let roster = Box::new(Roster::new(site, Arc::clone(&half)));
        // Nobody watches.
        let (_, _, fleet) = Remote::new(Arc::new(Nodes::default()));
        let parts = Parts { half: Arc::clone(&half), cluster, settings, options, facts, fleet };
        let (registry, handle) = Registry::new(parts);
        let tasks = Scope::new();
        let (news, mut listener) = mpsc::channel(64);
        tasks.children().spawn(async move { while listener.recv().await.is_some() {} });
        tasks.children().spawn(roster.watch(news));
        tasks.children().spawn(registry.run(CancellationToken::new()));
        Self { handle, half, problems: told, options: set_options, _settings: set_settings, _tasks: tasks }
    }

    /// Asks as a VM of the cluster `default/dev`.
    fn client(&self) -> CloudClient<Door> {
        let facts = Facts {
            name: "default/web".into(),
            lasting: "asker".into(),
            cluster: "default/dev".into(),
            ..Facts::default()
        };
        let vm = self.options.borrow().vm(&facts);
        let (_, place) = watch::channel(None);
        let guest = Asking { vm, place, audit: self.half.audit.clone() };
        CloudClient::with_origin(
            Door { handle: self.handle.clone(), guest },
            http::Uri::from_static("http://localhost"),
        )
    }
}

/// What a guest's calls come to.
#[derive(Clone)]
struct Door {
    handle: Handle,
    guest: Asking,
}

impl tower_service::Service<Request<Body>> for Door {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, call: Request<Body>) -> Self::Future {
        let answer = self.handle.answer(self.guest.clone(), call);
        Box::pin(async move { Ok(answer.await) })
    }
}

/// All that the role is for, once; what did not work.
async fn all(lab: &Lab, clusters: &Clusters, round: usize) -> Result<(), String> {
    let mut client = clusters.client();
    let said = |what: &str, status: &tonic::Status| format!("{what}: {status}");
    let service = ServiceReference { namespace: "shop".into(), name: "web".into(), uid: format!("u{round}") };
    let port = ServicePort { protocol: "TCP".into(), port: 80, node_port: 30080, ..ServicePort::default() };
    let request = EnsureLoadBalancerRequest {
        service: Some(service.clone()),
        families: vec![IpFamily::Ipv4.into()],
        addresses: vec!["192.0.2.11".into()],
        ports: vec![port],
        announcing: Announcing::KubeVip.into(),
        ..EnsureLoadBalancerRequest::default()
    };
    loop {
        let ensured = client.ensure_load_balancer(request.clone()).await;
        let told = ensured.map_err(|status| said("ensure", &status));
        match told.map(|told| told.into_inner().load_balancer.unwrap()) {
            Ok(one) if one.state() == State::Ready => break,
            Err(words) if !words.contains("been read yet") => return Err(words),
            _ => tokio::time::sleep(Duration::from_millis(50)).await,
        }
    }
    // Its address is written where people look for it.
    until("the status is patched", async || {
        let all = lab.api.list(BALANCERS).await;
        all.iter().any(|one| one["status"]["address"] == "192.0.2.11").then_some(())
    })
    .await;
    let listed = client.list_load_balancers(ListLoadBalancersRequest {}).await;
    listed.map_err(|status| said("list", &status))?;
    loop {
        let request = ReleaseLoadBalancerRequest { service: Some(service.clone()) };
        let released =
            client.release_load_balancer(request).await.map_err(|status| said("release", &status))?;
        if released.into_inner().released {
            return Ok(());
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[test]
fn no_verb_of_the_role_for_load_balancers_is_there_for_nothing() {
    wait(async {
        let lab = Lab::start().await;
        add_kind(&lab.api, role::GUESTS).await;
        role::install(&lab.api).await;
        let documents: Vec<Value> = serde_saphyr::from_multiple(ROLE).unwrap();
        let whole = documents.iter().find(|one| one["kind"] == "ClusterRole").unwrap();
        lab.api.ensure(ROLES, whole).await;
        let binding = documents.iter().find(|one| one["kind"] == "ClusterRoleBinding").unwrap();
        lab.api.ensure(BINDINGS, binding).await;
        pool(&lab.api, "one", "", "dev", ("192.0.2.11", "192.0.2.11")).await;
        let _harvester = Harvester::start(&lab.api);
        let told = || watch::Sender::new(Problems::new());
        until("the whole role suffices", async || {
            let clusters = Clusters::with(&lab, told()).await;
            let done = tokio::time::timeout(Duration::from_secs(20), all(&lab, &clusters, 0)).await;
            done.ok()?.ok()
        })
        .await;
        let verbs = role::verbs(whole);
        assert_eq!(verbs.len(), 7, "{whole}");
        for (round, verb) in (1..).zip(verbs) {
            let (left, name) = role::without(whole, verb);
            role::set_of(&lab.api, ROLES, NAME, &left).await;
            // It is known a moment later.
            until(&format!("{name} is missed"), async || {
                let clusters = Clusters::with(&lab, told()).await;
                let done = tokio::time::timeout(Duration::from_secs(8), all(&lab, &clusters, round)).await;
                // Without watches, changes are seen late, and people are told.
                let is_told = clusters.problems.borrow().keys().any(|what| {
                    what.contains("load balancers of guest clusters") || what.contains("pools of addresses")
                });
                (done.is_err() || done.is_ok_and(|done| done.is_err()) || is_told).then_some(())
            })
            .await;
            role::set_of(&lab.api, ROLES, NAME, whole).await;
            for left in lab.api.list(BALANCERS).await {
                lab.api.delete(&crate::harvester::path(&left)).await;
            }
            // Its address is to be had again.
            until("nothing is left", async || lab.api.list(BALANCERS).await.is_empty().then_some(())).await;
        }
    });
}
