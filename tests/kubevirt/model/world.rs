//! The model's one task: it sees all objects by watches, looks at each in turns, and takes the steps that are due.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use http::{Method, StatusCode};
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use super::Shared;
use super::domain::Domain;
use super::handler::Plug;
use super::objects::{Kind, Objects, is_deleted, key, name, namespace, text, uid};
use super::pace::{Step, Turn};
use crate::api::Api;
use crate::client::{JSON, MERGE, Watch, call, list};

/// How soon what could not be done is tried again.
const AGAIN: Duration = Duration::from_millis(50);

/// Why a step was not taken.
#[derive(Debug)]
pub enum Miss {
    /// The object has changed, or the server does not answer: to be looked at again.
    Later,
    /// The server refuses what the model does: a fault of the model.
    Fault(String),
}

pub type Done<T = ()> = Result<T, Miss>;

/// What a watch has seen.
enum Seen {
    All(Kind, Vec<Value>),
    There(Kind, Value),
    Gone(Kind, Value),
}

pub struct World {
    pub(super) api: Api,
    pub(super) shared: Arc<Shared>,
    pub(super) domain: Arc<dyn Domain>,
    pub(super) objects: Objects,
    /// The disks of running domains, by the instance's UID and the volume's name.
    pub(super) plugs: BTreeMap<(String, String), Plug>,
    /// The UIDs of shares that nothing attaches any more.
    pub(super) untied: BTreeSet<String>,
    told: BTreeSet<(String, String, String)>,
    has_written: bool,
    again: Option<Instant>,
    seen: mpsc::Receiver<Seen>,
    _watches: JoinSet<()>,
}

impl World {
    pub(super) async fn new(api: Api, shared: Arc<Shared>, domain: Arc<dyn Domain>) -> Self {
        let (see, mut seen) = mpsc::channel(64);
        let mut watches = JoinSet::new();
        for kind in Kind::ALL {
            watches.spawn(watch(api.clone(), kind, see.clone()));
        }
        let (mut objects, mut listed) = (Objects::default(), BTreeSet::new());
        while listed.len() < Kind::ALL.len() {
            let seen = seen.recv().await.expect("the watches go on");
            if let Seen::All(kind, _) = seen {
                listed.insert(kind);
            }
            take_in(&mut objects, seen);
        }
        Self {
            api,
            shared,
            domain,
            objects,
            plugs: BTreeMap::new(),
            untied: BTreeSet::new(),
            told: BTreeSet::new(),
            has_written: false,
            again: None,
            seen,
            _watches: watches,
        }
    }

    /// Works until it is dropped.
    pub(super) async fn run(mut self) {
        loop {
            while let Ok(seen) = self.seen.try_recv() {
                take_in(&mut self.objects, seen);
            }
            self.has_written = false;
            self.again = None;
            self.pass().await;
            if self.has_written {
                continue;
            }
            let next = [self.again, self.shared.pace().take_next()].into_iter().flatten().min();
            let shared = self.shared.clone();
            tokio::select! {
                seen = self.seen.recv() => take_in(&mut self.objects, seen.expect("the watches go on")),
                () = shared.changed.notified() => {}
                () = tokio::time::sleep_until(next.unwrap_or_else(Instant::now).into()), if next.is_some() => {}
            }
        }
    }

    /// Looks at everything once.
    async fn pass(&mut self) {
        for node in self.shared.off() {
            self.lose(&node);
        }
        for key in self.objects.keys(Kind::Claim) {
            let done = self.claim(&key).await;
            self.note(done);
        }
        for key in self.objects.keys(Kind::Volume) {
            let done = self.volume(&key).await;
            self.note(done);
        }
        for key in self.objects.keys(Kind::Share) {
            let done = self.share(&key).await;
            self.note(done);
        }
        for key in self.objects.keys(Kind::Vm) {
            let done = self.vm(&key).await;
            self.note(done);
        }
        for key in self.objects.keys(Kind::Vmi) {
            let done = self.instance(&key).await;
            self.note(done);
        }
        for key in self.objects.keys(Kind::Migration) {
            let done = self.migration(&key).await;
            self.note(done);
        }
        let done = self.attach().await;
        self.note(done);
        for key in self.objects.keys(Kind::Attachment) {
            let done = self.attachment(&key).await;
            self.note(done);
        }
        for key in self.objects.keys(Kind::Pod) {
            let done = self.pod(&key).await;
            self.note(done);
        }
    }

    fn note(&mut self, done: Done) {
        match done {
            Ok(()) => return,
            Err(Miss::Later) => {}
            Err(Miss::Fault(fault)) => {
                let mut journal = self.shared.journal();
                if !journal.faults.contains(&fault) {
                    eprintln!("the model is refused: {fault}");
                    journal.faults.push(fault);
                }
            }
        }
        self.again = Some(Instant::now() + AGAIN);
    }

    pub(super) fn turn(&self, step: Step, name: &str, id: &str) -> Turn {
        self.shared.pace().turn(step, name, id)
    }

    /// Whether a step may be taken that cannot fail.
    pub(super) fn may(&self, step: Step, name: &str, id: &str) -> bool {
        self.turn(step, name, id) == Turn::Go
    }

    async fn write(&mut self, method: Method, path: &str, kind: &str, body: &Value) -> Done<Value> {
        let Ok((status, answer)) = call(&self.api, method, path, kind, Some(body)).await else {
            return Err(Miss::Later);
        };
        match status {
            _ if status.is_success() => {
                self.has_written = true;
                Ok(answer)
            }
            // Right after it has started, the server does not know yet who may do what.
            StatusCode::CONFLICT | StatusCode::NOT_FOUND | StatusCode::FORBIDDEN => Err(Miss::Later),
            _ if status.is_server_error() || status == StatusCode::TOO_MANY_REQUESTS => Err(Miss::Later),
            _ => Err(Miss::Fault(format!("{path}: {status}: {body}: {answer}"))),
        }
    }

    pub(super) async fn create(&mut self, kind: Kind, object: &Value) -> Done<Value> {
        let made = self.write(Method::POST, &kind.within(namespace(object)), JSON, object).await?;
        self.objects.put(kind, made.clone());
        Ok(made)
    }

    /// Changes an object that is still as it was seen.
    pub(super) async fn patch(&mut self, kind: Kind, object: &Value, change: &Value) -> Done<Value> {
        self.patch_at(kind, object, change, "").await
    }

    /// The same, where its status is a resource of its own.
    pub(super) async fn patch_status(&mut self, kind: Kind, object: &Value, status: &Value) -> Done<Value> {
        let at = if kind == Kind::Vmi { "" } else { "/status" };
        self.patch_at(kind, object, &json!({ "status": status }), at).await
    }

    async fn patch_at(&mut self, kind: Kind, object: &Value, change: &Value, at: &str) -> Done<Value> {
        let mut change = change.clone();
        change["metadata"]["resourceVersion"] = object["metadata"]["resourceVersion"].clone();
        let path = kind.path(&key(object)) + at;
        let changed = self.write(Method::PATCH, &path, MERGE, &change).await?;
        self.objects.put(kind, changed.clone());
        Ok(changed)
    }

    /// Deletes an object; `is_now` leaves a pod no time.
    pub(super) async fn delete(&mut self, kind: Kind, object: &Value, is_now: bool) -> Done {
        let mut how = json!({ "preconditions": { "uid": uid(object) }, "propagationPolicy": "Background" });
        if is_now {
            how["gracePeriodSeconds"] = json!(0);
        }
        let answer = self.write(Method::DELETE, &kind.path(&key(object)), JSON, &how).await?;
        let stays = is_deleted(&answer) && !is_now || answer["metadata"]["finalizers"].is_array();
        if stays {
            self.objects.put(kind, answer);
        } else {
            self.objects.remove(kind, object);
        }
        Ok(())
    }

    /// Binds a pod to a node, as the scheduler does.
    pub(super) async fn bind(&mut self, pod: &Value, node: &str) -> Done {
        let binding = json!({
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": { "name": name(pod) },
            "target": { "kind": "Node", "name": node },
        });
        let path = format!("{}/binding", Kind::Pod.path(&key(pod)));
        self.write(Method::POST, &path, JSON, &binding).await?;
        // The answer says nothing of the pod.
        match call(&self.api, Method::GET, &Kind::Pod.path(&key(pod)), JSON, None).await {
            Ok((StatusCode::OK, pod)) => drop(self.objects.put(Kind::Pod, pod)),
            _ => return Err(Miss::Later),
        }
        Ok(())
    }

    /// Tells of an object what `kubectl describe` shows; once.
    pub(super) async fn tell(&mut self, kind: Kind, object: &Value, reason: &str, message: &str) -> Done {
        let what = (uid(object).to_owned(), reason.to_owned(), message.to_owned());
        if self.told.contains(&what) {
            return Ok(());
        }
        let ((named, version), namespace) = (kind.named(), namespace(object));
        let is_warning = reason.starts_with("Failed") || reason.ends_with("Failed");
        let now = now();
        let event = json!({
            "metadata": { "generateName": format!("{}.", name(object)), "namespace": namespace },
            "involvedObject": {
                "apiVersion": version,
                "kind": named,
                "namespace": namespace,
                "name": name(object),
                "uid": uid(object),
                "resourceVersion": object["metadata"]["resourceVersion"],
            },
            "type": if is_warning { "Warning" } else { "Normal" },
            "reason": reason,
            "message": message,
            "count": 1,
            "firstTimestamp": now,
            "lastTimestamp": now,
            "source": { "component": "model" },
        });
        self.write(Method::POST, &format!("/api/v1/namespaces/{namespace}/events"), JSON, &event).await?;
        self.told.insert(what);
        Ok(())
    }

    /// The objects of a kind for which something holds, as they are now.
    pub(super) fn find(&self, kind: Kind, is_meant: impl Fn(&Value) -> bool) -> Vec<Value> {
        self.objects.of(kind).filter(|object| is_meant(object)).cloned().collect()
    }

    pub(super) fn get(&self, kind: Kind, key: &str) -> Option<Value> {
        self.objects.get(kind, key).cloned()
    }

    /// A claim of an object's namespace.
    pub(super) fn claim_beside(&self, object: &Value, claim: &str) -> Option<&Value> {
        self.objects.get(Kind::Claim, &format!("{}/{claim}", namespace(object)))
    }
}

/// The time as objects have it.
pub fn now() -> String {
    let now = k8s_openapi::jiff::Timestamp::now();
    now.strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}

fn take_in(objects: &mut Objects, seen: Seen) {
    match seen {
        Seen::All(kind, list) => objects.replace(kind, list),
        Seen::There(kind, object) => drop(objects.put(kind, object)),
        Seen::Gone(kind, object) => objects.remove(kind, &object),
    }
}

/// Lists a kind and says what changes, again and again, until nobody listens.
async fn watch(api: Api, kind: Kind, see: mpsc::Sender<Seen>) {
    while !see.is_closed() {
        let _ = watch_once(&api, kind, &see).await;
        tokio::time::sleep(AGAIN).await;
    }
}

async fn watch_once(api: &Api, kind: Kind, see: &mpsc::Sender<Seen>) -> std::io::Result<()> {
    let closed = |_| std::io::Error::other("nobody listens");
    let (objects, version) = list(api, &kind.all()).await?;
    see.send(Seen::All(kind, objects)).await.map_err(closed)?;
    let mut watch = Watch::open(api, &kind.all(), &version).await?;
    while let Some(mut change) = watch.next().await? {
        let object = change["object"].take();
        let seen = match text(&change["type"]) {
            "ADDED" | "MODIFIED" => Seen::There(kind, object),
            "DELETED" => Seen::Gone(kind, object),
            _ => return Ok(()),
        };
        see.send(seen).await.map_err(closed)?;
    }
    Ok(())
}
