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
//! Nothing is remembered here but what is being done: the backend remembers volumes, and says who holds them ([`Holder`]).
//! That a VM is off, or in no list, says nothing about a volume. An operation that was begun runs
//! to its end in a task of its own, whoever waits for it; one at a time works on a volume (`turns`). What a guest may
//! is decided by its connection, which says of which VM and cluster it is ([`Asker`]); what it names is looked for
//! among that cluster's volumes and VMs only, and another's does not exist for it.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Mutex, oneshot, watch};

use super::backends::volumes::{Capacity, Holder, NewVolume, Place, Plugged, Published, Volume, Volumes};
use super::disks::release::{self, Agent};
use super::fleet::Handle;
use crate::supervise::Scope;
use crate::wire::proto::v1::{PowerState, VirtualMachine, VolumeAction};

mod page;
mod people;
pub mod policy;
pub mod problem;
mod repair;
pub mod size;
mod tell;
mod turns;

use policy::{Policies, Policy, Reserved, Usage};
use problem::{Kind, Problem};
use size::Range;
use turns::Turns;

/// Bytes of the longest name, as CSI has it.
const LONGEST_NAME: usize = 128;
/// How long a guest's kernel may take to let go of a disk that its agent has released.
const PATIENCE: Duration = Duration::from_secs(30);

/// On whose behalf something is done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Asker {
    /// A guest. Both are those of the VM that was dialled.
    Guest {
        /// Its VM.
        vm: String,
        /// Of the VM.
        cluster: String,
    },
    /// Whoever may do everything on this host.
    Host,
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
}

/// Does what is asked of volumes.
#[derive(Debug, Clone)]
pub struct Keeper(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    volumes: Arc<dyn Volumes>,
    fleet: Handle,
    policies: watch::Receiver<Policies>,
    turns: Turns,
    /// Held while it is decided whether there is room in a quota.
    reserved: Mutex<Reserved>,
    tasks: Scope,
}

impl Keeper {
    /// Does it with these volumes, for these VMs, within these policies.
    pub fn new(volumes: Arc<dyn Volumes>, fleet: Handle, policies: watch::Receiver<Policies>) -> Self {
        let (turns, reserved, tasks) = (Turns::default(), Mutex::default(), Scope::new());
        Self(Arc::new(Inner { volumes, fleet, policies, turns, reserved, tasks }))
    }

    /// Runs an operation that goes on when nobody waits for it any more.
    async fn begin<T: Send + 'static, F>(
        &self,
        asker: &Asker,
        operation: impl FnOnce(Self) -> F,
    ) -> Result<T, Problem>
    where
        F: Future<Output = Result<T, Problem>> + Send + 'static,
    {
        self.authorise(asker)?;
        let place = match asker {
            Asker::Guest { vm, .. } => Some(self.0.turns.enter(vm)?),
            Asker::Host => None,
        };
        let (answer, answered) = oneshot::channel();
        let operation = operation(self.clone());
        self.0.tasks.children().spawn(async move {
            let outcome = operation.await;
            drop(place);
            // Who asked may have gone.
            drop(answer.send(outcome));
        });
        let ended = |_| Err(Problem::new(Kind::Unavailable, "guestlet-host is stopping; repeat the call"));
        answered.await.unwrap_or_else(ended)
    }

    fn policy(&self, cluster: &str) -> Policy {
        self.0.policies.borrow().get(cluster).cloned().unwrap_or_default()
    }

    /// Whether this one may ask for anything.
    ///
    /// # Errors
    /// If not, in words.
    pub fn authorise(&self, asker: &Asker) -> Result<(), Problem> {
        let Asker::Guest { vm, cluster } = asker else { return Ok(()) };
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
        let found = self.0.volumes.get(id).await?;
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
        let mut volumes = self.0.volumes.list().await?;
        if let Asker::Guest { cluster, .. } = asker {
            volumes.retain(|volume| volume.cluster == *cluster);
        }
        page::page(volumes, token, most)
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
        let Capacity { free, largest } = self.0.volumes.capacity(&class).await?;
        let reserved = self.0.reserved.lock().await;
        let has = policy::usage(&self.0.volumes.list().await?, &reserved, cluster, "");
        let left = if has.volumes >= policy.most_volumes() {
            0
        } else {
            policy.bytes.map_or(u64::MAX, |most| most.saturating_sub(has.bytes))
        };
        Ok(Capacity { free: free.min(left), largest: largest.min(left) })
    }

    /// Makes a volume of a cluster; success if there is one of this name that will do.
    ///
    /// # Errors
    /// If there is one that will not do, or none can be made.
    pub async fn create(&self, asker: &Asker, cluster: &str, wanted: Wanted) -> Result<Volume, Problem> {
        check_name(&wanted.name)?;
        let (by, cluster) = (asker.clone(), cluster.to_owned());
        self.begin(asker, move |keeper| async move {
            let _turn = keeper.0.turns.take(&format!("name {cluster} {}", wanted.name))?;
            match keeper.named(&cluster, &wanted.name).await? {
                Some(volume) => {
                    // It may be about to be removed.
                    let _turn = keeper.0.turns.take(&volume.id)?;
                    keeper.get(&Asker::Host, &volume.id).await.and_then(|volume| will_do(volume, &wanted))
                }
                None => keeper.make(&by, cluster, wanted).await,
            }
        })
        .await
    }

    async fn named(&self, cluster: &str, name: &str) -> Result<Option<Volume>, Problem> {
        let volumes = self.0.volumes.list().await?;
        Ok(volumes.into_iter().find(|volume| volume.cluster == cluster && volume.name == name))
    }

    async fn make(&self, by: &Asker, cluster: String, wanted: Wanted) -> Result<Volume, Problem> {
        let policy = self.policy(&cluster);
        let class = policy.class(&self.0.volumes.classes(), wanted.class.as_deref())?;
        let size = wanted.range.choose()?;
        self.reserve(&policy, &cluster, &wanted.name, size, Usage { volumes: 1, bytes: size }).await?;
        let Wanted { name, claim, .. } = wanted;
        let key = (cluster.clone(), name.clone());
        let made = self.0.volumes.create(NewVolume { name, cluster, class, size, claim }).await;
        self.0.reserved.lock().await.remove(&key);
        let volume = made.map_err(|error| logged("make a volume", &key.1, error))?;
        self.tell(VolumeAction::Created, &volume, by, None).await;
        Ok(volume)
    }

    /// Sets room in the cluster's quota aside for a volume that is to have `size` bytes, `more` than now.
    async fn reserve(
        &self,
        policy: &Policy,
        cluster: &str,
        name: &str,
        size: u64,
        more: Usage,
    ) -> Result<(), Problem> {
        let mut reserved = self.0.reserved.lock().await;
        let has = policy::usage(&self.0.volumes.list().await?, &reserved, cluster, "");
        policy.admit(cluster, has, more)?;
        reserved.insert((cluster.to_owned(), name.to_owned()), size);
        Ok(())
    }

    /// Removes a volume that no VM has; success if there is none.
    ///
    /// # Errors
    /// If a VM has it, or it is another cluster's.
    pub async fn remove(&self, asker: &Asker, id: &str) -> Result<(), Problem> {
        let (by, id) = (asker.clone(), id.to_owned());
        self.begin(asker, move |keeper| async move {
            let _turn = keeper.0.turns.take(&id)?;
            let Some(volume) = keeper.find(&by, &id).await? else { return Ok(()) };
            if let Some(published) = &volume.published {
                let is_off = keeper.ask(&volume).await?.is_none();
                if !is_off || keeper.is_listed(published).await? {
                    return Err(Problem::new(
                        Kind::Precondition,
                        format!(
                            "the volume {id} is published to the node {}; unpublish it first",
                            published.node
                        ),
                    ));
                }
                keeper.0.volumes.forget(&id).await?;
            }
            keeper.0.volumes.remove(&id).await.map_err(|error| logged("remove a volume", &id, error))?;
            keeper.tell(VolumeAction::Removed, &volume, &by, None).await;
            Ok(())
        })
        .await
    }

    /// Where a volume is that somebody is remembered to have; none if it is proved that nobody has it.
    ///
    /// # Errors
    /// If that cannot be told: then the volume must be taken for held.
    async fn ask(&self, volume: &Volume) -> Result<Option<Place>, Problem> {
        match self.0.volumes.holder(&volume.id).await? {
            Holder::On(place) => Ok(Some(place)),
            Holder::Off => Ok(None),
            Holder::Unknown(why) => {
                let words =
                    "it cannot be told whether the node that had the volume still has it; repeat the call";
                let advice =
                    "where it is known that the VM has ended, guestctl volumes detach --force forgets it";
                let detail = format!("{why}; the volume is taken for held ({advice})");
                Err(Problem::with_detail(Kind::Unavailable, words, detail))
            }
        }
    }

    /// Whether the VM that is remembered to have a volume is in the settings.
    async fn is_listed(&self, published: &Published) -> Result<bool, Problem> {
        let vms = self.0.fleet.list(false).await?;
        Ok(vms.iter().any(|vm| vm.uuid == published.uuid))
    }

    /// Plugs a volume into a VM of its cluster.
    ///
    /// # Errors
    /// If another VM has it, or it cannot be plugged.
    pub async fn publish(
        &self,
        asker: &Asker,
        id: &str,
        node: &str,
        read_only: bool,
    ) -> Result<Plugged, Problem> {
        let (by, id, node) = (asker.clone(), id.to_owned(), node.to_owned());
        self.begin(asker, move |keeper| async move {
            let _turn = keeper.0.turns.take(&id)?;
            let volume = keeper.get(&by, &id).await?;
            let vms = keeper.0.fleet.list(false).await?;
            let vm = node_of(&vms, &volume.cluster, &node).ok_or_else(|| Problem::no_node(&node))?;
            keeper.is_free(&volume, &vms, vm, read_only).await?;
            if vm.power() == PowerState::Off {
                return Err(Problem::new(Kind::Unavailable, format!("the node {node} is off")));
            }
            let published =
                Published { uuid: vm.uuid.clone(), vm: vm.name.clone(), node, read_only, leaving: false };
            let new = volume.published.as_ref() != Some(&published);
            let plugged = keeper.0.volumes.plug(&id, published, &vm.name).await;
            let plugged = plugged.map_err(|error| logged("plug a volume", &id, error))?;
            if new {
                keeper.tell(VolumeAction::Attached, &volume, &by, Some(&vm.name)).await;
            }
            Ok(plugged)
        })
        .await
    }

    /// Sees to it that no other VM has the volume, nor this one otherwise than wanted.
    async fn is_free(
        &self,
        volume: &Volume,
        vms: &[VirtualMachine],
        vm: &VirtualMachine,
        read_only: bool,
    ) -> Result<(), Problem> {
        let Some(published) = &volume.published else { return Ok(()) };
        if published.uuid == vm.uuid {
            if published.leaving && self.0.volumes.plugged(&vm.name).await?.contains(&volume.id) {
                let problem = "the volume is being taken away from this node; unpublish it first";
                return Err(Problem::new(Kind::Aborted, problem));
            }
            if published.read_only != read_only {
                let how = if published.read_only { "read-only" } else { "writable" };
                let problem =
                    format!("the volume is published to this node already, {how}; unpublish it first");
                return Err(Problem::new(Kind::Exists, problem));
            }
            return Ok(());
        }
        let Some(place) = self.ask(volume).await? else {
            tracing::info!(volume = volume.id, vm = published.vm, "the VM that had a volume has it no more");
            return Ok(self.0.volumes.forget(&volume.id).await?);
        };
        let holder = vms.iter().find(|vm| vm.uuid == place.uuid);
        let words = if holder.is_some_and(|holder| holder.cluster == volume.cluster) {
            format!("the volume is published to the node {}", published.node)
        } else {
            "the volume is published to another node".to_owned()
        };
        Err(Problem::new(Kind::Precondition, words + "; it can be on one at a time"))
    }

    /// Takes a volume away from the VM that has it, or only if it is that `node`; success if it has none.
    ///
    /// # Errors
    /// If its guest uses it, unless that is `forced`, or it is another cluster's volume.
    pub async fn unpublish(
        &self,
        asker: &Asker,
        id: &str,
        node: Option<&str>,
        forced: bool,
    ) -> Result<(), Problem> {
        let (by, id, node) = (asker.clone(), id.to_owned(), node.map(str::to_owned));
        self.begin(asker, move |keeper| async move {
            let _turn = keeper.0.turns.take(&id)?;
            let Some(volume) = keeper.find(&by, &id).await? else { return Ok(()) };
            let Some(published) = &volume.published else { return Ok(()) };
            let vms = keeper.0.fleet.list(false).await?;
            if let Some(node) = &node {
                let named = node_of(&vms, &volume.cluster, node).is_some_and(|vm| vm.uuid == published.uuid);
                let same = |one: &str| one.eq_ignore_ascii_case(node);
                if !named && !same(&published.uuid) && published.node != *node && published.vm != *node {
                    return Ok(());
                }
            }
            let place = match keeper.ask(&volume).await {
                Err(problem) if forced && problem.kind == Kind::Unavailable => {
                    let why = problem.words_for_host();
                    tracing::warn!(volume = id, vm = published.vm, by = ?by, why, "a volume is forgotten by force");
                    None
                }
                place => place?,
            };
            if let Some(place) = place {
                let is_off = vms.iter().any(|vm| vm.uuid == place.uuid && vm.power() == PowerState::Off);
                let serial = keeper.0.volumes.serial(&id).unwrap_or_default();
                let agent = Agent::new(&keeper.0.fleet, &place.vm, &serial);
                let side = match (is_off, forced) {
                    (true, _) => release::nobody(),
                    (false, true) => release::side(agent, true).0,
                    (false, false) => release::bounded(agent),
                };
                let (volumes, known) = (&keeper.0.volumes, place.uuid == published.uuid);
                let unplugged = if known {
                    volumes.unplug(&id, &place.vm, PATIENCE, side).await
                } else {
                    volumes.take_back(&id, &place, PATIENCE, side).await
                };
                unplugged.map_err(|error| logged("unplug a volume", &id, error))?;
            }
            keeper.0.volumes.forget(&id).await?;
            keeper.tell(VolumeAction::Detached, &volume, &by, Some(&published.vm)).await;
            Ok(())
        })
        .await
    }

    /// Makes a volume larger, also while a guest uses it; success if it is large enough. Returns its size.
    ///
    /// # Errors
    /// If no volume has such a size, or there is no room.
    pub async fn expand(&self, asker: &Asker, id: &str, range: Range) -> Result<u64, Problem> {
        let (by, id) = (asker.clone(), id.to_owned());
        self.begin(asker, move |keeper| async move {
            let _turn = keeper.0.turns.take(&id)?;
            let volume = keeper.get(&by, &id).await?;
            let size = range.grow(volume.size)?;
            let vm = match &volume.published {
                Some(_) => keeper.ask(&volume).await?.map(|place| place.vm),
                None => None,
            };
            let policy = keeper.policy(&volume.cluster);
            let more = size - volume.size;
            if more > 0 {
                let usage = Usage { volumes: 0, bytes: more };
                keeper.reserve(&policy, &volume.cluster, &volume.name, size, usage).await?;
            }
            let grown = keeper.0.volumes.grow(&id, size, vm.as_deref()).await;
            keeper.0.reserved.lock().await.remove(&(volume.cluster.clone(), volume.name.clone()));
            let size = grown.map_err(|error| logged("make a volume larger", &id, error))?;
            if more > 0 {
                let volume = Volume { size, ..volume };
                keeper.tell(VolumeAction::Expanded, &volume, &by, vm.as_deref()).await;
            }
            Ok(size)
        })
        .await
    }
}

/// The VM of a cluster that a node's identifier means: its UUID, or its name.
fn node_of<'v>(vms: &'v [VirtualMachine], cluster: &str, node: &str) -> Option<&'v VirtualMachine> {
    let ours = || vms.iter().filter(|vm| vm.cluster == cluster);
    ours().find(|vm| vm.uuid.eq_ignore_ascii_case(node)).or_else(|| ours().find(|vm| vm.name == node))
}

/// Whether a volume that is there is what somebody wants.
fn will_do(volume: Volume, wanted: &Wanted) -> Result<Volume, Problem> {
    let Volume { size, class, .. } = &volume;
    if !wanted.range.has(*size) {
        return Err(Problem::new(
            Kind::Exists,
            format!("there is a volume of this name already, with {size} bytes"),
        ));
    }
    if wanted.class.as_ref().is_some_and(|wanted| wanted != class) {
        return Err(Problem::new(
            Kind::Exists,
            format!("there is a volume of this name already, of the storage class {class}"),
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

/// Logs what the guest is not told.
fn logged(what: &str, about: &str, error: impl Into<Problem>) -> Problem {
    let problem = error.into();
    let words = problem.words_for_host();
    tracing::warn!(about = super::text::clean(about), "cannot {what}: {words}");
    problem
}
