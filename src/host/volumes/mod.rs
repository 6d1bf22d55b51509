//! Volumes of clusters: their owners, who may attach them, and the operations on them. Knows neither CSI nor QEMU.
//!
//! ```text
//!  csi (a guest asks) ──┐                  ┌──▶ backends::volumes   keeps them, and plugs them
//!                       ├──▶ Keeper ───────┤
//!  api (people ask) ────┘      ▲           └──▶ fleet               which VMs there are, and how
//!                              │
//!                           repair          what differs from the records
//! ```
//!
//! Only operations under way are kept in memory: the backend stores the records of volumes, and reports who holds
//! them. A VM that is off, or in no list, proves nothing about a volume; `protocol` decides the next step. An
//! operation that has begun runs to its end in a task of its own, even if nobody waits for it; only one at a time
//! works on a volume (`turns`). Shares, which many VMs have at a time and which are not plugged, are handled by
//! `share`. The connection of a guest tells its VM and cluster ([`Asker`]), and so what it may do. The names in
//! its requests are looked up among the volumes and VMs of that cluster only; for the guest, no others exist.

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

/// Longest name in bytes, as CSI limits it.
const LONGEST_NAME: usize = 128;
/// VMs of a host cluster that are looked at concurrently.
const LOOKS: usize = 8;
/// Time that a guest's kernel gets to let go of a disk after its agent has released it.
const PATIENCE: Duration = Duration::from_secs(30);
/// Time that a hypervisor gets to report how many volumes a VM can have.
const TO_COUNT: Duration = Duration::from_secs(1);
/// Time after which an unreachable hypervisor is asked again.
const UNREACHABLE: Duration = Duration::from_millis(100);

/// Party on whose behalf an operation is carried out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Asker {
    /// A guest. Its VM and cluster come from the connection to that VM.
    Guest {
        /// Name of its VM.
        vm: String,
        /// Cluster that the VM belongs to.
        cluster: String,
        /// Call that the operation is a part of.
        behalf: Behalf,
    },
    /// A person whom the admin API has admitted.
    Person(Behalf),
    /// The host half itself.
    Host,
}

impl Asker {
    /// Returns on whose behalf guests are called; `None` for the host half's own operations.
    fn behalf(&self) -> Option<&Behalf> {
        match self {
            Self::Guest { behalf, .. } | Self::Person(behalf) => Some(behalf),
            Self::Host => None,
        }
    }
}

/// Request for a new volume.
#[derive(Debug, Clone)]
pub struct Wanted {
    /// Name that is unique in its cluster.
    pub name: String,
    /// Storage class; `None` chooses the default.
    pub class: Option<String>,
    /// Acceptable sizes.
    pub range: Range,
    /// Claim that the volume is for; see [`Volume::claim`].
    pub claim: String,
    /// True if many nodes are to have it at a time.
    pub is_share: bool,
}

/// Carries out operations on volumes. Clones share their state.
#[derive(Debug, Clone)]
pub struct Keeper(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    volumes: Arc<dyn Volumes>,
    fleet: Handle,
    policies: watch::Receiver<Policies>,
    half: Arc<Half>,
    turns: Turns,
    /// Space reserved in quotas. Locked while a request is checked against a quota.
    reserved: Mutex<Reserved>,
    /// Volumes that are being plugged, with the UUID of the VM. Locked while it is decided whether a VM may have one
    /// more.
    arriving: Mutex<BTreeSet<(String, String)>>,
    /// Number of volume slots that each hypervisor last reported, by the UUID of its VM.
    places: Momentary<BTreeMap<String, u32>>,
    /// Problems that `repair` has logged.
    complaints: Complaints,
    tasks: Scope,
    /// Limits how many VMs of a cluster `repair` looks at concurrently, since all these looks ask the same API server.
    looks: Semaphore,
}

impl Keeper {
    /// Creates a keeper of these volumes and VMs within these policies. Its operations are counted in the metrics of
    /// `half`.
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

    /// Runs an operation, which continues even if its caller stops waiting for it.
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

    /// Reports whether the volumes can be attached only to VMs of one host.
    pub fn are_of_one_host(&self) -> bool {
        self.0.volumes.are_of_one_host()
    }

    /// Returns the identifier of the volume that a cluster knows by this handle.
    pub fn id(&self, cluster: &str, handle: &str) -> String {
        self.0.volumes.id(cluster, handle)
    }

    /// Returns the handle by which its cluster knows the volume with this identifier.
    pub fn handle(&self, id: &str) -> String {
        self.0.volumes.handle(id)
    }

    fn policy(&self, cluster: &str) -> Policy {
        self.0.policies.borrow().get(cluster).cloned().unwrap_or_default()
    }

    /// Checks that the caller may operate on volumes at all.
    ///
    /// # Errors
    /// The reason, as a message for people, if it may not.
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

    /// Returns a volume if it exists and the caller may see it.
    async fn find(&self, asker: &Asker, id: &str) -> Result<Option<Volume>, Problem> {
        // A guest must not learn whether other clusters have such a volume.
        if let Asker::Guest { cluster, .. } = asker
            && !self.0.volumes.may_be_of(id, cluster)
        {
            return Err(Problem::no_volume(id));
        }
        let found = match (asker, self.0.volumes.get(id).await) {
            // Volumes of other clusters do not exist for a guest. One without a cluster may be intended for its own.
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

    /// Returns one volume.
    ///
    /// # Errors
    /// If it does not exist for the caller, or cannot be read.
    pub async fn get(&self, asker: &Asker, id: &str) -> Result<Volume, Problem> {
        self.authorise(asker)?;
        self.find(asker, id).await?.ok_or_else(|| Problem::no_volume(id))
    }

    /// Returns one page of the volumes that the caller may see, and the token of the next page.
    ///
    /// # Errors
    /// If the token is invalid, or the volumes cannot be read.
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

    /// Returns how many volumes a VM can have at a time: the smaller of the limit in its settings and the slots of its
    /// hypervisor, and at least one slot, since 0 means no limit. If a hypervisor does not answer in time, its last
    /// answer counts; without one, only the settings do. Whenever this number changes, kubelet is without the driver
    /// for a moment.
    pub async fn most(&self, vm: &Vm) -> u32 {
        let places = async {
            loop {
                match self.0.volumes.places(&vm.name).await {
                    // The connection to it may be about to be established.
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

    /// Returns the space that a cluster has in a class, limited by its quota.
    ///
    /// # Errors
    /// If the cluster may not use the class, or the space cannot be determined.
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

    /// Creates a volume of a cluster. Succeeds if a suitable one of this name exists.
    ///
    /// # Errors
    /// If an unsuitable one of this name exists, or none can be created.
    pub async fn create(&self, asker: &Asker, cluster: &str, wanted: Wanted) -> Result<Volume, Problem> {
        check_name(&wanted.name)?;
        let (by, cluster) = (asker.clone(), cluster.to_owned());
        self.begin(Operation::Create, asker, move |keeper| async move {
            let _turn =
                keeper.0.turns.take(Thing::Name { cluster: cluster.clone(), name: wanted.name.clone() })?;
            match keeper.0.volumes.named(&cluster, &wanted.name).await? {
                Some(volume) => {
                    // Another operation may be about to remove it.
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
        let volume = made.map_err(|error| self.logged(by, "create a volume", &key.1, error))?;
        // It may have been created before and not have been listed yet.
        let volume = will_do(volume, &wanted)?;
        self.tell(VolumeAction::Created, &volume, by, None).await;
        Ok(volume)
    }

    /// Reserves space in the cluster's quota for a volume, by its cluster and name, that is to have `size` bytes,
    /// `more` than now.
    async fn reserve(
        &self,
        policy: &Policy,
        key: &(String, String),
        class: &str,
        size: u64,
        more: Usage,
    ) -> Result<(), Problem> {
        // The pool is asked only where its size is the limit.
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

/// Returns an existing volume if it satisfies a request for a new one of its name.
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
