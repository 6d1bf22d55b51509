//! Decides whether a caller of the admin API may make a call. Root and guestlet-host's own user may do everything;
//! all others may do what the rules of the settings allow ([`crate::access`]).
//!
//! ```text
//!  request ──▶ caller (peer) ──▶ verb, object (asked) ──▶ rules ──allowed──▶ Call ──▶ work ──▶ end
//!                                                           └──denied──▶ PERMISSION_DENIED
//! ```
//!
//! Each call that changes something, that reaches into a guest, or that is denied is recorded ([`super::audit`]).
//!
//! A denial names the rule that would be needed, but does not reveal whether the VM or volume exists.

use std::fmt::Write as _;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use tokio::sync::watch;
use tonic::{Code, Request, Response, Status};

use super::asked::{Asked, Object};
use super::audit::{Entry, What};
use super::caller::Behalf;
use super::fleet::{Handle, Identity};
use super::half::Half;
use super::peer::{Known, Peer};
use super::text;
use super::volumes::problem::{Kind, Problem};
use super::volumes::{Asker, Keeper};
use crate::access::{Person, Rules, Verb};

/// Admission check in front of every call of the admin API.
#[derive(Debug, Clone)]
pub struct Admission {
    /// The rules in force.
    pub rules: watch::Receiver<Arc<Rules>>,
    /// Fleet, which knows the clusters of VMs.
    pub fleet: Handle,
    /// Keeper of volumes, which knows their clusters and the VMs that have them.
    pub volumes: Keeper,
    /// Holds the audit log and the counter of denied calls.
    pub half: Arc<Half>,
}

/// A call that was admitted.
#[derive(Debug)]
pub struct Call {
    /// Caller on whose behalf the call is made.
    pub behalf: Behalf,
    /// VMs and volumes that the caller may see.
    pub sight: Sight,
    /// Audit record of the call; `None` for verbs that are not recorded.
    pub entry: Option<Entry>,
}

impl Call {
    /// Ends the call: completes its audit record with the status code, and returns the outcome as the response.
    ///
    /// # Errors
    /// The error of `outcome`, unchanged.
    pub fn end<T>(self, outcome: Result<T, Status>) -> Result<Response<T>, Status> {
        if let Some(entry) = self.entry {
            entry.end(outcome.as_ref().err().map_or(Code::Ok, Status::code));
        }
        outcome.map(Response::new)
    }
}

/// VMs and volumes that a caller may see. Each check uses the rules that are in force at that moment.
#[derive(Debug, Clone)]
pub struct Sight {
    rules: watch::Receiver<Arc<Rules>>,
    /// Caller whose rules apply; `None` for root and guestlet-host's own user, who see everything.
    person: Option<Person>,
    verb: &'static Verb,
}

impl Sight {
    /// Returns whether the caller may see everything.
    pub fn is_full(&self) -> bool {
        self.person.is_none()
    }

    /// Completes when a change of the rules takes this VM of this cluster out of the caller's sight.
    pub async fn lost(mut self, vm: &str, cluster: &str) {
        while self.has(vm, cluster) {
            if self.rules.changed().await.is_err() {
                // The rules no longer change, so the VM stays in sight.
                std::future::pending::<()>().await;
            }
        }
    }

    /// Returns whether the caller may see the VM with this name in this cluster, or a volume attached to it.
    pub fn has(&self, vm: &str, cluster: &str) -> bool {
        self.person.as_ref().is_none_or(|person| self.rules.borrow().allow(person, self.verb, vm, cluster))
    }
}

impl Admission {
    /// Admits a call, or denies it and records the denial.
    ///
    /// # Errors
    /// `PERMISSION_DENIED` if the caller may not make the call; another status if that cannot be determined.
    pub async fn admit<T: Asked>(&self, request: Request<T>) -> Result<(Call, T), Status> {
        let peer = request.extensions().get::<Arc<Peer>>().cloned();
        let peer = peer.ok_or_else(|| Status::internal("the caller is not known"))?;
        let asked = request.into_inner();
        let rules = Arc::clone(&self.rules.borrow());
        let known = peer.known(&rules).await;
        let (behalf, verb) = (Behalf::of(known.caller()), asked.verb());
        if !peer.is_trusted() && !self.is_allowed(&rules, &known.person, verb, asked.object()).await? {
            return Err(self.denied(&behalf, &known, &asked));
        }
        let person = Some(known.person).filter(|_| !peer.is_trusted());
        let sight = Sight { rules: self.rules.clone(), person, verb };
        let entry = verb.is_recorded.then(|| self.half.audit.begin(&behalf, what(&asked)));
        Ok((Call { behalf, sight, entry }, asked))
    }

    async fn is_allowed(
        &self,
        rules: &Rules,
        person: &Person,
        verb: &Verb,
        object: Object<'_>,
    ) -> Result<bool, Status> {
        let allow = |vm: &str, cluster: &str| rules.allow(person, verb, vm, cluster);
        // Without a rule for this user and verb the object does not matter, so it is not looked up.
        if !rules.admit(person, verb) {
            return Ok(false);
        }
        Ok(match object {
            Object::Seen => true,
            // The empty name matches only a rule for all VMs.
            Object::Host => allow("", ""),
            Object::Machine(vm) => {
                let (vm, cluster) = self.machine(vm).await?;
                allow(&vm, &cluster)
            }
            Object::Cluster(cluster) => allow("", cluster),
            Object::Volume(volume) => {
                let (vm, cluster) = self.place(volume).await?;
                allow(&vm, &cluster)
            }
            Object::VolumeTo { volume, vm } => {
                let (holder, cluster) = self.place(volume).await?;
                let node = Identity::Node { cluster: cluster.clone(), node: vm.to_owned() };
                let found = self.fleet.find(node).await?.map(|found| found.vm.name.clone());
                allow(&holder, &cluster) && allow(found.as_deref().unwrap_or(vm), &cluster)
            }
        })
    }

    /// Returns the name and the cluster of the VM with this name or UUID; the cluster is empty if the VM is not known.
    /// A text that looks like a UUID of an unknown VM gives an empty name, so that it matches no pattern for names.
    async fn machine(&self, vm: &str) -> Result<(String, String), Status> {
        let mut found = self.fleet.find(Identity::Name(vm.to_owned())).await?;
        let is_name = found.is_some() || !is_uuid(vm);
        if found.is_none() {
            found = self.fleet.find(Identity::Uuid(vm.to_lowercase())).await?;
        }
        Ok(match found {
            Some(found) => (found.vm.name.clone(), found.vm.cluster.clone()),
            None => (if is_name { vm.to_owned() } else { String::new() }, String::new()),
        })
    }

    /// Returns the VM that has a volume, and the volume's cluster; both are empty if the volume is not known.
    async fn place(&self, volume: &str) -> Result<(String, String), Status> {
        match self.volumes.get(&Asker::Host, volume).await {
            Ok(volume) => {
                Ok((volume.published.map(|published| published.vm).unwrap_or_default(), volume.cluster))
            }
            Err(Problem { kind: Kind::NotFound | Kind::Invalid, .. }) => Ok(Default::default()),
            Err(problem) => Err(problem.for_host()),
        }
    }

    fn denied(&self, behalf: &Behalf, known: &Known, asked: &impl Asked) -> Status {
        self.half.metrics.denied_calls.fetch_add(1, Ordering::Relaxed);
        self.half.audit.denied(behalf, &what(asked));
        Status::permission_denied(denial(behalf, known, asked))
    }
}

/// Returns whether a text looks like a UUID: 36 characters, all of them hexadecimal digits or hyphens.
fn is_uuid(text: &str) -> bool {
    text.len() == 36 && text.bytes().all(|one| one == b'-' || one.is_ascii_hexdigit())
}

/// Returns the part of an audit record that describes the request: verb, VM and subject.
fn what(asked: &impl Asked) -> What {
    let vm = match asked.object() {
        Object::Machine(vm) | Object::VolumeTo { vm, .. } => vm.to_owned(),
        Object::Seen | Object::Host | Object::Cluster(_) | Object::Volume(_) => String::new(),
    };
    What { verb: asked.verb(), vm, subject: asked.subject() }
}

/// Builds the message for a denied call, with the rule that would allow it. The message is the same whether or not
/// the VM or volume exists.
fn denial(behalf: &Behalf, known: &Known, asked: &impl Asked) -> String {
    let verb = asked.verb().words;
    let user = known.person.name.clone().unwrap_or_else(|| known.person.uid.to_string());
    let rule = format!("users = [{user:?}], verbs = [{verb:?}]");
    let caller = behalf.caller();
    let (object, rule) = match asked.object() {
        Object::Seen => (String::new(), rule),
        Object::Host => {
            (" with the host half itself".to_owned(), format!("{rule}, without vms and clusters"))
        }
        Object::Machine(vm) => (format!(" with the VM {vm:?}"), format!("{rule}, vms = [{vm:?}]")),
        Object::Cluster(cluster) => {
            (format!(" with the cluster {cluster:?}"), format!("{rule}, clusters = [{cluster:?}]"))
        }
        Object::Volume(volume) => (
            format!(" with the volume {volume:?}"),
            format!("{rule} that covers its cluster and the VM that has it"),
        ),
        Object::VolumeTo { volume, vm } => (
            format!(" with the volume {volume:?} and the VM {vm:?}"),
            format!("{rule} that covers the volume's cluster, and that VM"),
        ),
    };
    let mut words = format!(
        "{caller} may not do {verb:?}{object}: no [[access]] table in the settings of guestlet-host allows it; one like this \
         would: {rule}"
    );
    if known.is_incomplete {
        let _ = write!(words, " (the name service did not look up this user in time: try again)");
    }
    text::clean_words(&words)
}
