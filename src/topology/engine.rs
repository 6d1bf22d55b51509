//! Carries out what [`plan`](super::plan) decides, for as long as a credential exists.

use std::convert::Infallible;
use std::hash::{BuildHasher as _, Hasher as _, RandomState};
use std::path::PathBuf;
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use futures_util::StreamExt as _;
use kube::api::{ListParams, Patch, PatchParams, PostParams, WatchEvent, WatchParams};
use kube::core::Request;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;

use super::client::client;
use super::credential::{Credential, Found, find};
use super::end::End;
use super::node::{List, Object};
use super::plan::{Event, Plan, Wanted, plan};
use crate::guest::topology::{Known, Node, Standing, ZoneChange};
use crate::guest::{Guest, identity};
use crate::sys::blocking;
use crate::sys::file_news::FileNews;

/// Time without changes after which files are read.
const QUIET: Duration = Duration::from_millis(100);
/// Timeout of a request; a watch may last longer.
const DEADLINE: Duration = Duration::from_secs(20);
/// Minimum duration of a watch, and the random time that is added at most, in seconds.
const WATCH: u32 = 300;
const WATCH_SPREAD: u32 = 240;
/// Time that the server may take to end a watch after its duration.
const OVERDUE: Duration = Duration::from_secs(30);
/// Minimum duration of a watch: after two shorter ones in a row, the next one is delayed.
const SHORTEST_WATCH: Duration = Duration::from_secs(60);
/// Delays after a failure: the first one, and the maximum.
const FIRST_WAIT: Duration = Duration::from_millis(250);
const LONGEST_WAIT: Duration = Duration::from_secs(30);
/// Delay after the server has refused access, or limited the rate of requests.
const REFUSED_WAIT: Duration = Duration::from_secs(60);
/// Number of attempts at a change that conflicts with those of other clients.
const TRIES: u32 = 8;

/// Settings for the labels of the Node.
#[derive(Debug, Clone, Default)]
pub struct Settings {
    /// Path of kubelet's kubeconfig, if it is not at a usual place.
    pub kubeconfig: Option<PathBuf>,
    /// Treatment of the zone and region labels when the guest runs somewhere else.
    pub zone_change: ZoneChange,
    /// True to change nothing and only report.
    pub report_only: bool,
    /// True to give the Node a provider ID if it has none.
    pub provider_id: bool,
    /// True if kubelet gets the host through CSI, and so sets the host label itself.
    pub kubelet_knows_host: bool,
}

/// Maintains the labels of the Node until `shutdown`.
///
/// # Errors
/// If files cannot be watched.
pub async fn run(guest: Guest, settings: Settings, shutdown: CancellationToken) -> anyhow::Result<()> {
    let system_uuid = identity::identity(&guest.root).dmi_uuid;
    let engine = Engine { guest, settings, system_uuid, again: Notify::new() };
    match shutdown.run_until_cancelled(engine.work()).await {
        Some(Err(error)) => Err(error.into()),
        _ => Ok(()),
    }
}

/// Desired state: the topology from the host half, and the labels that kubelet has from guestlet's files.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Desire {
    known: Option<Arc<Known>>,
    given: Vec<(String, String)>,
}

impl From<&Standing> for Desire {
    fn from(standing: &Standing) -> Self {
        Self { known: standing.known.clone(), given: standing.given.clone() }
    }
}

struct Engine {
    guest: Guest,
    settings: Settings,
    system_uuid: String,
    /// Notified when files have changed while the credential stayed the same.
    again: Notify,
}

impl Engine {
    async fn work(self) -> std::io::Result<Infallible> {
        let mut news = FileNews::begin(Vec::new());
        let mut failures = 0;
        loop {
            let credential = match self.look(&mut news).await {
                Some(Ok(credential)) => credential,
                found => {
                    let problem = found.and_then(Result::err);
                    if let Some(problem) = &problem {
                        tracing::warn!("no labels for the Node: {problem}");
                    }
                    self.tell(problem.map(|reason| Node { state: "failed", reason, ..Node::default() }));
                    settled(&mut news).await?;
                    continue;
                }
            };
            if let Some(untimely) = &credential.untimely {
                tracing::warn!("{untimely}");
            }
            let mut session = Session::new(&self, credential.clone());
            let end = {
                let mut following = pin!(session.follow(&mut failures));
                loop {
                    tokio::select! {
                        end = &mut following => break Some(end),
                        news = settled(&mut news) => news?,
                    }
                    match self.look(&mut news).await {
                        Some(Ok(now)) if now == credential => self.again.notify_one(),
                        _ => break None,
                    }
                }
            };
            let Some(Err(end)) = end else { continue };
            let wait = self.failed(&session, &end, &mut failures);
            let mut desires = self.guest.topology.changes();
            tokio::select! {
                () = sleep(wait) => {}
                news = settled(&mut news) => { news?; failures = 0; }
                // A new desired state may be requested at once.
                () = changed(&mut desires, &session.seen), if end.code().is_none() => {}
            }
        }
    }

    /// Searches for the credential, and watches its files from then on.
    async fn look(&self, news: &mut FileNews) -> Option<Result<Credential, String>> {
        let mut settled = false;
        loop {
            let (root, configured) = (self.guest.root.clone(), self.settings.kubeconfig.clone());
            let Found { credential, mut files } =
                blocking::run(move || find(&root, configured.as_deref())).await;
            if self.settings.provider_id {
                files.extend(self.guest.topology.identity_file());
            }
            news.follow(files);
            // The second look sees changes that were made before the directory was watched.
            if std::mem::replace(&mut settled, true) {
                return credential;
            }
        }
    }

    /// Reports a failure, and returns the time to wait.
    fn failed(&self, session: &Session<'_>, end: &End, failures: &mut u32) -> Duration {
        let reason = match &session.credential.untimely {
            Some(untimely) => format!("{untimely}; {}", end.words()),
            None => end.words(),
        };
        if *failures == 0 {
            tracing::warn!("cannot maintain the labels of the Node {}: {reason}", session.credential.node);
        }
        let node = match &session.object {
            Some(object) => object.told("failed", reason),
            None => {
                Node { name: session.credential.node.clone(), state: "failed", reason, ..Node::default() }
            }
        };
        self.tell(Some(node));
        let wait = match end.code() {
            Some(401 | 403 | 429) => REFUSED_WAIT,
            _ => (FIRST_WAIT * 2_u32.saturating_pow(*failures)).min(LONGEST_WAIT),
        };
        *failures += 1;
        spread(wait)
    }

    fn tell(&self, node: Option<Node>) {
        self.guest.topology.node(node, &self.guest.events);
    }
}

/// Returns a random time between half and all of `wait`, so that guests do not all connect at once.
fn spread(wait: Duration) -> Duration {
    wait.mul_f64(0.5 + f64::from(random() >> 1) / f64::from(u32::MAX))
}

fn random() -> u32 {
    // Every hasher starts with different random keys.
    u32::try_from(RandomState::new().build_hasher().finish() >> 32).unwrap_or_default()
}

/// Completes when the desired state differs from `seen`.
async fn changed(desires: &mut watch::Receiver<Standing>, seen: &Desire) {
    // Cannot fail, because the sender lives as long as the guest.
    drop(desires.wait_for(|standing| Desire::from(standing) != *seen).await);
}

/// Completes when files have changed, and have not changed again for a while.
async fn settled(news: &mut FileNews) -> std::io::Result<()> {
    news.changed().await?;
    while let Ok(changed) = timeout(QUIET, news.changed()).await {
        changed?;
    }
    Ok(())
}

/// Session with the API server of one credential.
struct Session<'a> {
    engine: &'a Engine,
    credential: Credential,
    client: kube::Client,
    desires: watch::Receiver<Standing>,
    /// Desired state at the time of the last plan.
    seen: Desire,
    /// Node as the server last reported it; absent if it does not exist.
    object: Option<Object>,
    /// Patch that the server refused, with the reason, so that it is not sent again and again.
    refused: Option<(Value, String)>,
}

impl<'a> Session<'a> {
    fn new(engine: &'a Engine, credential: Credential) -> Self {
        let client = client(&credential);
        let desires = engine.guest.topology.changes();
        let seen = Desire::from(&*desires.borrow());
        Self { engine, credential, client, desires, seen, object: None, refused: None }
    }

    /// Follows the Node until a request fails.
    async fn follow(&mut self, failures: &mut u32) -> Result<Infallible, End> {
        let mut short: u32 = 0;
        loop {
            let mut version = self.list().await?;
            *failures = 0;
            loop {
                self.refused = None;
                self.settle().await?;
                let begun = Instant::now();
                let watched = self.watch(&mut version).await?;
                short = if begun.elapsed() < SHORTEST_WATCH { short + 1 } else { 0 };
                // The first early end may be due to a restart of the server. After further ones the delay grows.
                if short > 1 {
                    let wait = Duration::from_secs(8 << (2 * (short - 2)).min(4));
                    self.rest(spread(wait)).await?;
                }
                if watched == Watched::Expired {
                    break;
                }
            }
        }
    }

    /// Pauses without requests, unless the desired state changes.
    async fn rest(&mut self, wait: Duration) -> Result<(), End> {
        let end = Instant::now() + wait;
        loop {
            match tokio::time::timeout_at(end, changed(&mut self.desires, &self.seen)).await {
                Err(_) => return Ok(()),
                Ok(()) => self.settle().await?,
            }
        }
    }

    fn selector(&self) -> String {
        format!("metadata.name={}", self.credential.node)
    }

    /// Reads the Node, and returns the version from which to watch.
    async fn list(&mut self) -> Result<String, End> {
        let list = ListParams::default().fields(&self.selector());
        let request = Request::new("/api/v1/nodes").list(&list).map_err(kube::Error::BuildRequest)?;
        let List { metadata, items } = self.ask(request).await?;
        self.object = items.into_iter().find(|object| object.metadata.name == self.credential.node);
        Ok(metadata.resource_version)
    }

    /// Makes a request and decodes the answer.
    async fn ask<T: DeserializeOwned>(&self, request: http::Request<Vec<u8>>) -> Result<T, End> {
        // Read as text, because kube logs the whole of an answer that it cannot decode.
        let text = timeout(DEADLINE, self.client.request_text(request)).await.map_err(|_| End::Silent)??;
        serde_json::from_str(&text).map_err(|error| End::Failed(error.to_string()))
    }

    async fn watch(&mut self, version: &mut String) -> Result<Watched, End> {
        let seconds = WATCH + random() % WATCH_SPREAD;
        let watch = WatchParams::default().fields(&self.selector()).timeout(seconds);
        let request =
            Request::new("/api/v1/nodes").watch(&watch, version).map_err(kube::Error::BuildRequest)?;
        let events = timeout(DEADLINE, self.client.request_events::<Object>(request)).await;
        let events = match events.map_err(|_| End::Silent)? {
            Err(kube::Error::Api(status)) if status.code == 410 => return Ok(Watched::Expired),
            events => events?,
        };
        let mut events = pin!(events);
        let overdue = Instant::now() + Duration::from_secs(seconds.into()) + OVERDUE;
        loop {
            let event = tokio::select! {
                event = events.next() => event,
                () = changed(&mut self.desires, &self.seen) => {
                    self.settle().await?;
                    continue;
                }
                () = self.engine.again.notified() => {
                    self.settle().await?;
                    continue;
                }
                () = tokio::time::sleep_until(overdue) => return Ok(Watched::Ended),
            };
            let object = match event {
                None => return Ok(Watched::Ended),
                Some(Err(kube::Error::Api(status))) if status.code == 410 => return Ok(Watched::Expired),
                Some(Err(error)) => return Err(error.into()),
                Some(Ok(WatchEvent::Error(status))) if status.code == 410 => return Ok(Watched::Expired),
                Some(Ok(WatchEvent::Error(status))) => return Err(End::Refused(status)),
                Some(Ok(WatchEvent::Bookmark(bookmark))) => {
                    *version = bookmark.metadata.resource_version;
                    continue;
                }
                Some(Ok(WatchEvent::Deleted(object))) => {
                    version.clone_from(&object.metadata.resource_version);
                    None
                }
                Some(Ok(WatchEvent::Added(object) | WatchEvent::Modified(object))) => {
                    version.clone_from(&object.metadata.resource_version);
                    Some(object)
                }
            };
            // Reports about other Nodes are ignored: only this one was requested.
            if object.as_ref().is_none_or(|object| object.metadata.name == self.credential.node) {
                self.object = object;
                self.settle().await?;
            }
        }
    }

    /// Plans and patches until nothing is left to do.
    async fn settle(&mut self) -> Result<(), End> {
        for attempt in 0..TRIES {
            let Some(object) = self.object.clone() else {
                self.engine.tell(Some(Node {
                    name: self.credential.node.clone(),
                    state: "waiting",
                    reason: "the Node is not registered yet".to_owned(),
                    ..Node::default()
                }));
                return Ok(());
            };
            let Plan { patch, state, reason, event } = self.plan(&object);
            let Some(patch) = patch else {
                self.engine.tell(Some(object.told(state, reason)));
                return Ok(());
            };
            if let Some((refused, why)) = &self.refused
                && *refused == body(&patch)
            {
                self.engine.tell(Some(object.told("failed", why.clone())));
                return Ok(());
            }
            match self.patch(&patch).await {
                Ok(after) => {
                    tracing::info!(
                        "the Node {} has the labels of where this guest runs",
                        object.metadata.name
                    );
                    self.object = Some(after);
                    if let Some(event) = event {
                        self.report(&object, &event).await;
                    }
                }
                Err(end) => match end.code() {
                    // Another client was faster: read the Node and plan again.
                    Some(409) => {
                        sleep(spread(Duration::from_millis(25) * 2_u32.pow(attempt))).await;
                        self.list().await?;
                    }
                    Some(404) => self.object = None,
                    Some(400 | 403 | 413 | 422) => {
                        tracing::warn!("the Node {}: {}", object.metadata.name, end.words());
                        self.refused = Some((body(&patch), end.words()));
                    }
                    _ => return Err(end),
                },
            }
        }
        Err(End::Crowded)
    }

    fn plan(&mut self, object: &Object) -> Plan {
        self.seen = Desire::from(&*self.desires.borrow_and_update());
        let Desire { known, given } = &self.seen;
        let provider_id =
            self.engine.settings.provider_id.then(|| self.engine.guest.topology.provider_id()).flatten();
        plan(
            &Wanted {
                topology: known.as_ref().map(|known| &known.topology),
                given,
                zone_change: self.engine.settings.zone_change,
                report_only: self.engine.settings.report_only,
                provider_id: provider_id.as_deref(),
                kubelet_knows_host: self.engine.settings.kubelet_knows_host,
                system_uuid: &self.engine.system_uuid,
            },
            object,
        )
    }

    async fn patch(&self, patch: &Value) -> Result<Object, End> {
        let parameters = PatchParams { field_manager: Some("guestlet".to_owned()), ..PatchParams::default() };
        let request = Request::new("/api/v1/nodes")
            .patch(&self.credential.node, &parameters, &Patch::Merge(patch))
            .map_err(kube::Error::BuildRequest)?;
        self.ask(request).await
    }

    /// Creates an event in the cluster. A failure is logged and has no other effect.
    async fn report(&self, object: &Object, event: &Event) {
        let now = SystemTime::now();
        let time = prost_types::Timestamp::from(now).to_string();
        let name = &object.metadata.name;
        let body = json!({
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": { "name": format!("{name}.guestlet{:08x}{:08x}", random(), random()), "namespace": "default" },
            "involvedObject": { "apiVersion": "v1", "kind": "Node", "name": name, "uid": object.metadata.uid },
            "reason": "TopologyChanged",
            "message": event.message,
            "type": if event.warning { "Warning" } else { "Normal" },
            "source": { "component": "guestlet", "host": name },
            "firstTimestamp": time,
            "lastTimestamp": time,
            "count": 1,
        });
        let told = async {
            let request = Request::new("/api/v1/namespaces/default/events")
                .create(&PostParams::default(), body.to_string().into_bytes())
                .map_err(kube::Error::BuildRequest)?;
            self.ask::<Value>(request).await.map(drop)
        };
        if let Err(end) = told.await {
            tracing::warn!("cannot report to the cluster that the Node {name} has moved: {}", end.words());
        }
    }
}

/// Returns a patch without the resource version that it applies to.
fn body(patch: &Value) -> Value {
    let mut body = patch.clone();
    body["metadata"]["resourceVersion"] = Value::Null;
    body
}

/// End of a watch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Watched {
    /// A new watch can continue from its version.
    Ended,
    /// The server no longer knows the changes since that version.
    Expired,
}
