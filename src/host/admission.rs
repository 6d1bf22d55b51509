//! Whether a caller of the admin API may do what it asks for. Root and guestlet-host's own user may do everything, others
//! what the rules of the settings allow ([`crate::access`]).
//!
//! ```text
//!  request ──▶ who (peer) ──▶ what, to what (asked) ──▶ rules ──allowed──▶ Call ──▶ work ──▶ end
//!                                                         └──denied──▶ PERMISSION_DENIED
//! ```
//!
//! Each call that changes something, that reaches into a guest, or that is denied is recorded ([`super::audit`]).
//!
//! A denial says which rule would be needed, and nothing of whether there is such a VM.

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

/// Decides.
#[derive(Debug, Clone)]
pub struct Admission {
    /// The rules in force.
    pub rules: watch::Receiver<Arc<Rules>>,
    /// Knows the VMs' clusters.
    pub fleet: Handle,
    /// Knows the volumes' clusters, and which VMs have them.
    pub volumes: Keeper,
    /// Counts.
    pub half: Arc<Half>,
}

/// A call that was admitted.
#[derive(Debug)]
pub struct Call {
    /// On whose behalf it is.
    pub behalf: Behalf,
    /// What its caller may see.
    pub sight: Sight,
    /// Its record, if it has one.
    pub entry: Option<Entry>,
}

impl Call {
    /// It has ended so, which is the answer.
    ///
    /// # Errors
    /// The same.
    pub fn end<T>(self, outcome: Result<T, Status>) -> Result<Response<T>, Status> {
        if let Some(entry) = self.entry {
            entry.end(outcome.as_ref().err().map_or(Code::Ok, Status::code));
        }
        outcome.map(Response::new)
    }
}

/// What a caller may see of VMs and volumes, by the rules as they are each time.
#[derive(Debug, Clone)]
pub struct Sight {
    rules: watch::Receiver<Arc<Rules>>,
    /// None sees everything.
    person: Option<Person>,
    verb: &'static Verb,
}

impl Sight {
    /// Whether it is everything.
    pub fn is_full(&self) -> bool {
        self.person.is_none()
    }

    /// Completes when it is the VM of this name, of this cluster, no more.
    pub async fn lost(mut self, vm: &str, cluster: &str) {
        while self.has(vm, cluster) {
            if self.rules.changed().await.is_err() {
                // They stay as they are.
                std::future::pending::<()>().await;
            }
        }
    }

    /// Whether it is the VM of this name, or a volume that it has, of this cluster.
    pub fn has(&self, vm: &str, cluster: &str) -> bool {
        self.person.as_ref().is_none_or(|person| self.rules.borrow().allow(person, self.verb, vm, cluster))
    }
}

impl Admission {
    /// Admits a call, or not.
    ///
    /// # Errors
    /// `PERMISSION_DENIED` if the caller may not; another one if that cannot be told.
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
        // Who has no use for an answer causes no work.
        if !rules.admit(person, verb) {
            return Ok(false);
        }
        Ok(match object {
            Object::Seen => true,
            // Only a rule for all VMs fits a name that none has.
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

    /// The name of the VM that is named so, and its cluster, which is empty for one that is not known. What looks like a UUID
    /// stands for the VM that has it, and for no name that a pattern matches.
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

    /// The VM that has a volume, and the volume's cluster; both empty for one that is not known.
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

/// Whether a text is written as a UUID is.
fn is_uuid(text: &str) -> bool {
    text.len() == 36 && text.bytes().all(|one| one == b'-' || one.is_ascii_hexdigit())
}

/// What the record of a call says that it is about.
fn what(asked: &impl Asked) -> What {
    let vm = match asked.object() {
        Object::Machine(vm) | Object::VolumeTo { vm, .. } => vm.to_owned(),
        Object::Seen | Object::Host | Object::Cluster(_) | Object::Volume(_) => String::new(),
    };
    What { verb: asked.verb(), vm, subject: asked.subject() }
}

/// Why a call is denied: the rule that it would need. The words are the same whether or not there is such a VM or volume.
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
