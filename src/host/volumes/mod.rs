//! Volumes of clusters: whose each is, who may have it, and what is done to it. Knows neither CSI nor QEMU.
//!
//! ```text
//!  csi (a guest asks) ──┐                  ┌──▶ backends::volumes   keeps them, and plugs them
//!                       ├──▶ Keeper ───────┤
//!  api (people ask) ────┘      ▲           └──▶ fleet               which VMs there are, and how
//!                              │
//!                           repair          what is not as it is remembered
//! ```
//!
//! Nothing is remembered here but what is being done: the backend remembers volumes, and says who holds them. That a VM is
//! off, or in no list, says nothing about a volume; what is done next is decided in `protocol`.
//! An operation that was begun runs
//! to its end in a task of its own, whoever waits for it; one at a time works on a volume (`turns`). Shares, which many VMs
//! have at a time and nothing plugs, go their own way (`share`). What a guest may
//! is decided by its connection, which says of which VM and cluster it is ([`Asker`]); what it names is looked for
//! among that cluster's volumes and VMs only, and another's does not exist for it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex as Momentary, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::{Mutex, Semaphore, watch};

use super::backends::Vm;
use super::backends::disks::DiskError;
use super::backends::volumes::{Capacity, NewVolume, Usage, Volume, VolumeError, Volumes};
use super::caller::Behalf;
use super::fleet::Handle;
use super::half::Half;
use super::metrics::operations::Operation;
use crate::supervise::Scope;
use crate::wire::proto::v1::VolumeAction;

mod complaints;
mod contest;
mod hold;
#[cfg(test)]
mod model;
mod page;
mod people;
pub mod policy;
pub mod problem;
mod protocol;
mod repair;
mod share;
pub mod size;
mod tell;
#[cfg(test)]
mod tests;
mod turns;

use complaints::Complaints;
pub use hold::Given;
use page::Page;
use policy::{Bound, Policies, Policy, Reserved};
use problem::{Kind, Problem};
use size::Range;
use turns::{Thing, Turns};

/// Bytes of the longest name, as CSI has it.
const LONGEST_NAME: usize = 128;
/// VMs of a cluster that are looked at at a time.
const LOOKS: usize = 8;
/// How long a guest's kernel may take to let go of a disk that its agent has released.
const PATIENCE: Duration = Duration::from_secs(30);
/// How long a hypervisor may take to say how many volumes a VM can have.
const TO_COUNT: Duration = Duration::from_secs(1);
/// When one that could not be reached is asked again.
const UNREACHABLE: Duration = Duration::from_millis(100);

/// On whose behalf something is done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Asker {
    /// A guest. Both are those of the VM that was dialled.
    Guest {
        /// Its VM.
        vm: String,
        /// Of the VM.
        cluster: String,
        /// As part of which call.
        behalf: Behalf,
    },
    /// A person, who was admitted by the admin API.
    Person(Behalf),
    /// The host half itself.
    Host,
}

impl Asker {
    /// On whose behalf guests are called; none for the host half's own.
    fn behalf(&self) -> Option<&Behalf> {
        match self {
            Self::Guest { behalf, .. } | Self::Person(behalf) => Some(behalf),
            Self::Host => None,
        }
    }
}

/// A volume that somebody wants.
#[derive(Debug, Clone)]
pub struct Wanted {
    /// Unique in its cluster.
    pub name: String,
    /// Of which class, if that is said.
    pub class: Option<String>,
    /// How large.
    pub range: Range,
    /// See [`Volume::claim`].
    pub claim: String,
    /// Many nodes are to have it at a time.
    pub is_share: bool,
}

/// Does what is asked of volumes.
#[derive(Debug, Clone)]
pub struct Keeper(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    volumes: Arc<dyn Volumes>,
    fleet: Handle,
    policies: watch::Receiver<Policies>,
    half: Arc<Half>,
    turns: Turns,
    /// Held while it is decided whether there is room in a quota.
    reserved: Mutex<Reserved>,
    /// Volumes that are being plugged, by the UUID of the VM. Held while it is decided whether it may have one more.
    arriving: Mutex<BTreeSet<(String, String)>>,
    /// How many places for volumes a hypervisor has had when it last said so, by the UUID of its VM.
    places: Momentary<BTreeMap<String, u32>>,
    /// What `repair` has said.
    complaints: Complaints,
    tasks: Scope,
    /// Of a cluster's VMs, how many more `repair` may look at: all of them ask the same API server.
    looks: Semaphore,
}

impl Keeper {
    /// Does it with these volumes, for these VMs, within these policies; what it does is counted by `half`.
    pub fn new(
        volumes: Arc<dyn Volumes>,
        fleet: Handle,
        policies: watch::Receiver<Policies>,
        half: Arc<Half>,
    ) -> Self {
        let (turns, reserved, arriving) = (Turns::default(), Mutex::default(), Mutex::default());
        let (places, complaints, tasks) = (Momentary::default(), Complaints::default(), Scope::new());
        Self(Arc::new(Inner {
            volumes,
            fleet,
            policies,
            half,
            turns,
            reserved,
            arriving,
            places,
            complaints,
            tasks,
            looks: Semaphore::new(LOOKS),
        }))
    }

    /// Runs an operation that goes on when nobody waits for it any more.
    async fn begin<T: Send + 'static, F>(
        &self,
        what: Operation,
        asker: &Asker,
        operation: impl FnOnce(Self) -> F,
    ) -> Result<T, Problem>
    where
        F: Future<Output = Result<T, Problem>> + Send + 'static,
    {
        self.authorise(asker)?;
        if let Some(words) = self.0.volumes.out_of_turn() {
            return Err(Problem::new(Kind::Unavailable, words));
        }
        let place = match asker {
            Asker::Guest { vm, .. } => Some(self.0.turns.enter(vm)?),
            Asker::Person(_) | Asker::Host => None,
        };
        let operation = operation(self.clone());
        let half = Arc::clone(&self.0.half);
        let outcome = self.0.tasks.children().run_to_end(async move {
            let begun = Instant::now();
            let outcome = operation.await;
            let code = outcome.as_ref().err().map_or(tonic::Code::Ok, Problem::code);
            half.metrics.volumes.ended(what, code, begun.elapsed());
            drop(place);
            outcome
        });
        let ended = || Err(Problem::new(Kind::Unavailable, "guestlet-host is stopping; repeat the call"));
        outcome.await.unwrap_or_else(ended)
    }

    /// Whether only VMs of one host can have the volumes.
    pub fn are_of_one_host(&self) -> bool {
        self.0.volumes.are_of_one_host()
    }

    /// The identifier of the volume that a cluster may call so.
    pub fn id(&self, cluster: &str, handle: &str) -> String {
        self.0.volumes.id(cluster, handle)
    }

    /// What its cluster calls a volume of this identifier.
    pub fn handle(&self, id: &str) -> String {
        self.0.volumes.handle(id)
    }

    fn policy(&self, cluster: &str) -> Policy {
        self.0.policies.borrow().get(cluster).cloned().unwrap_or_default()
    }

    /// Whether this one may ask for anything.
    ///
    /// # Errors
    /// If not, in words.
    pub fn authorise(&self, asker: &Asker) -> Result<(), Problem> {
        let Asker::Guest { vm, cluster, .. } = asker else { return Ok(()) };
        if cluster.is_empty() {
            return Err(Problem::new(
                Kind::Denied,
                "this VM belongs to no cluster, and so has no volumes; set cluster in the settings of guestlet-host",
            ));
        }
        if self.policy(cluster).has_controller(vm) {
            return Ok(());
        }
        Err(Problem::new(
            Kind::Denied,
            format!(
                "the VM {vm} may not act for the cluster {cluster}; see controllers in the settings of guestlet-host"
            ),
        ))
    }

    /// The volume, if it is there for who asks.
    async fn find(&self, asker: &Asker, id: &str) -> Result<Option<Volume>, Problem> {
        // Whether there is one elsewhere is not told.
        if let Asker::Guest { cluster, .. } = asker
            && !self.0.volumes.may_be_of(id, cluster)
        {
            return Err(Problem::no_volume(id));
        }
        let found = match (asker, self.0.volumes.get(id).await) {
            // What is not its own does not exist for it. What is nobody's may be meant to be its own.
            (Asker::Guest { cluster: own, .. }, Err(VolumeError::NotGiven { cluster, .. }))
                if cluster != *own && !cluster.is_empty() =>
            {
                return Err(Problem::no_volume(id));
            }
            (_, found) => found?,
        };
        match (asker, &found) {
            (Asker::Guest { cluster, .. }, Some(volume)) if volume.cluster != *cluster => {
                Err(Problem::no_volume(id))
            }
            _ => Ok(found),
        }
    }

    /// One volume.
    ///
    /// # Errors
    /// If there is none for who asks, or it cannot be looked at.
    pub async fn get(&self, asker: &Asker, id: &str) -> Result<Volume, Problem> {
        self.authorise(asker)?;
        self.find(asker, id).await?.ok_or_else(|| Problem::no_volume(id))
    }

    /// A part of the volumes that are there for who asks, and the token of the next part.
    ///
    /// # Errors
    /// If the token is none, or they cannot be looked at.
    pub async fn list(
        &self,
        asker: &Asker,
        token: &str,
        most: usize,
    ) -> Result<(Vec<Volume>, String), Problem> {
        self.authorise(asker)?;
        let page = Page::new(token, most)?;
        let cluster = match asker {
            Asker::Guest { cluster, .. } => Some(cluster.as_str()),
            Asker::Person(_) | Asker::Host => None,
        };
        let found = self.0.volumes.part(cluster, page.after(), page.wanted()).await?;
        Ok(page.cut(found))
    }

    /// How many volumes a VM can have at a time: as many as its settings allow and its hypervisor has places for, and
    /// at least one, since 0 is no limit. A hypervisor that does not say it in time has as many as it had; one that never
    /// has said it bounds nothing. kubelet does without the driver for a moment whenever this number changes.
    pub async fn most(&self, vm: &Vm) -> u32 {
        let places = async {
            loop {
                match self.0.volumes.places(&vm.name).await {
                    // It may just be about to be connected.
                    Err(VolumeError::Disk(DiskError::Unreachable(_))) => {
                        tokio::time::sleep(UNREACHABLE).await;
                    }
                    told => return told,
                }
            }
        };
        let said = tokio::time::timeout(TO_COUNT, places).await;
        let mut known = self.0.places.lock().unwrap_or_else(PoisonError::into_inner);
        let places = match said {
            Ok(Ok(Some(places))) => {
                let places = u32::try_from(places).unwrap_or(u32::MAX).max(1);
                known.insert(vm.ids.lasting.clone(), places);
                Some(places)
            }
            Ok(Ok(None)) => None,
            Ok(Err(_)) | Err(_) => known.get(&vm.ids.lasting).copied(),
        };
        match places {
            Some(places) if vm.max_volumes == 0 => places,
            Some(places) => places.min(vm.max_volumes),
            None => vm.max_volumes,
        }
    }

    /// How much room a cluster has in a class, its quota included.
    ///
    /// # Errors
    /// If it may not use the class, or that cannot be looked at.
    pub async fn capacity(
        &self,
        asker: &Asker,
        cluster: &str,
        class: Option<&str>,
    ) -> Result<Capacity, Problem> {
        self.authorise(asker)?;
        let policy = self.policy(cluster);
        let class = policy.class(&self.0.volumes.classes(), class)?;
        let Capacity { size, free, largest } = self.0.volumes.capacity(&class).await?;
        let reserved = self.0.reserved.lock().await;
        let has = self.0.volumes.usage(cluster, &class, &reserved.of(cluster)).await?;
        let left = policy.left(has.all, Bound { has: has.in_class.bytes, size });
        Ok(Capacity { size, free: free.min(left), largest: largest.min(left) })
    }

    /// Makes a volume of a cluster; success if there is one of this name that will do.
    ///
    /// # Errors
    /// If there is one that will not do, or none can be made.
    pub async fn create(&self, asker: &Asker, cluster: &str, wanted: Wanted) -> Result<Volume, Problem> {
        check_name(&wanted.name)?;
        let (by, cluster) = (asker.clone(), cluster.to_owned());
        self.begin(Operation::Create, asker, move |keeper| async move {
            let _turn =
                keeper.0.turns.take(Thing::Name { cluster: cluster.clone(), name: wanted.name.clone() })?;
            match keeper.0.volumes.named(&cluster, &wanted.name).await? {
                Some(volume) => {
                    // It may be about to be removed.
                    let _turn = keeper.0.turns.take(Thing::volume(&volume.id))?;
                    keeper.get(&Asker::Host, &volume.id).await.and_then(|volume| will_do(volume, &wanted))
                }
                None => keeper.make(&by, cluster, wanted).await,
            }
        })
        .await
    }

    async fn make(&self, by: &Asker, cluster: String, wanted: Wanted) -> Result<Volume, Problem> {
        let policy = self.policy(&cluster);
        let class = policy.class(&self.0.volumes.classes(), wanted.class.as_deref())?;
        let size = wanted.range.choose()?;
        let Wanted { name, claim, is_share, .. } = wanted.clone();
        if is_share {
            self.shares()?.check().await?;
        }
        let key = (cluster.clone(), name.clone());
        self.reserve(&policy, &key, &class, size, Usage { volumes: 1, bytes: size }).await?;
        let made = self.0.volumes.create(NewVolume { name, cluster, class, size, claim, is_share }).await;
        self.0.reserved.lock().await.remove(&key);
        let volume = made.map_err(|error| self.logged(by, "make a volume", &key.1, error))?;
        // It may be one that was made before, and is not listed yet.
        let volume = will_do(volume, &wanted)?;
        self.tell(VolumeAction::Created, &volume, by, None).await;
        Ok(volume)
    }

    /// Sets room in the cluster's quota aside for a volume, by its cluster and name, that is to have `size` bytes, `more`
    /// than now.
    async fn reserve(
        &self,
        policy: &Policy,
        key: &(String, String),
        class: &str,
        size: u64,
        more: Usage,
    ) -> Result<(), Problem> {
        // It is asked of the pool only where it counts.
        let there_is = match policy.bytes {
            Some(_) => 0,
            None => self.0.volumes.capacity(class).await?.size,
        };
        let cluster = key.0.as_str();
        let mut reserved = self.0.reserved.lock().await;
        let has = self.0.volumes.usage(cluster, class, &reserved.of(cluster)).await?;
        let in_class = Bound { has: has.in_class.bytes, size: there_is };
        policy.admit(cluster, has.all, in_class, more)?;
        reserved.insert(key.clone(), class.to_owned(), size);
        Ok(())
    }
}

/// Whether a volume that is there is what somebody wants.
fn will_do(volume: Volume, wanted: &Wanted) -> Result<Volume, Problem> {
    let Volume { size, class, problem, .. } = &volume;
    if let Some(problem) = problem {
        let words = "a volume of this name already exists, but cannot be used now";
        return Err(Problem::with_detail(Kind::Unavailable, words, format!("{words}: {problem}")));
    }
    if volume.sharers.is_some() != wanted.is_share {
        let what =
            if wanted.is_share { "a disk, for one node at a time" } else { "for many nodes at a time" };
        return Err(Problem::new(Kind::Exists, format!("a volume of this name already exists, {what}")));
    }
    if !wanted.range.has(*size) {
        return Err(Problem::new(
            Kind::Exists,
            format!("a volume of this name already exists, with {size} bytes"),
        ));
    }
    if wanted.class.as_ref().is_some_and(|wanted| wanted != class) {
        return Err(Problem::new(
            Kind::Exists,
            format!("a volume of this name already exists, of the storage class {class}"),
        ));
    }
    Ok(volume)
}

fn check_name(name: &str) -> Result<(), Problem> {
    let problem = if name.is_empty() {
        "is missing".to_owned()
    } else if name.len() > LONGEST_NAME {
        format!("has {} bytes; at most {LONGEST_NAME} are allowed", name.len())
    } else if name.chars().any(char::is_control) {
        "has control characters".to_owned()
    } else {
        return Ok(());
    };
    Err(Problem::new(Kind::Invalid, format!("name {problem}")))
}
