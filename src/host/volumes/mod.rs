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
//! Nothing is remembered here but what is being done: the backend remembers volumes. An operation that was begun runs
//! to its end in a task of its own, whoever waits for it; one at a time works on a volume (`turns`). What a guest may
//! is decided by its connection, which says of which VM and cluster it is ([`Asker`]); what it names is looked for
//! among that cluster's volumes and VMs only, and another's does not exist for it.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Mutex, oneshot, watch};

use super::backends::Vm;
use super::backends::volumes::{Capacity, NewVolume, Plugged, Published, Volume, Volumes};
use super::disks::release::{self, Agent};
use super::fleet::{Handle, Identity, Machine};
use crate::supervise::Scope;
use crate::wire::proto::v1::{PowerState, VolumeAction};

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
        let volume = made.map_err(|error| self.logged(by, "make a volume", &key.1, error))?;
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
                if keeper.holder(published).await?.is_some() {
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
            let removed = keeper.0.volumes.remove(&id).await;
            removed.map_err(|error| keeper.logged(&by, "remove a volume", &id, error))?;
            keeper.tell(VolumeAction::Removed, &volume, &by, None).await;
            Ok(())
        })
        .await
    }

    /// The VM that has a volume, if it is on this host.
    async fn holder(&self, published: &Published) -> Result<Option<Machine>, Problem> {
        Ok(self.0.fleet.find(Identity::Uuid(published.uuid.clone())).await?)
    }

    /// The VM of a cluster that a node's identifier means.
    async fn node(&self, cluster: &str, node: &str) -> Result<Option<Machine>, Problem> {
        let identity = Identity::Node { cluster: cluster.to_owned(), node: node.to_owned() };
        Ok(self.0.fleet.find(identity).await?)
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
            let found = keeper.node(&volume.cluster, &node).await?;
            let Machine { vm, power } = found.ok_or_else(|| Problem::no_node(&node))?;
            keeper.is_free(&volume, &vm, read_only).await?;
            if power == PowerState::Off {
                return Err(Problem::new(Kind::Unavailable, format!("the node {node} is off")));
            }
            let published =
                Published { uuid: vm.uuid.clone(), vm: vm.name.clone(), node, read_only, leaving: false };
            let new = volume.published.as_ref() != Some(&published);
            let plugged = keeper.0.volumes.plug(&id, published, &vm.name).await;
            let plugged = plugged.map_err(|error| keeper.logged(&by, "plug a volume", &id, error))?;
            if new {
                keeper.tell(VolumeAction::Attached, &volume, &by, Some(&vm.name)).await;
            }
            Ok(plugged)
        })
        .await
    }

    /// Sees to it that no other VM has the volume, nor this one otherwise than wanted.
    async fn is_free(&self, volume: &Volume, vm: &Vm, read_only: bool) -> Result<(), Problem> {
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
        match self.holder(published).await? {
            Some(holder) if holder.power != PowerState::Off => {
                let words = if holder.vm.cluster == volume.cluster {
                    format!("the volume is published to the node {}", published.node)
                } else {
                    "the volume is published to another node".to_owned()
                };
                Err(Problem::new(Kind::Precondition, words + "; it can be on one at a time"))
            }
            _ => {
                tracing::info!(volume = volume.id, vm = published.vm, "the VM that had a volume is gone");
                Ok(self.0.volumes.forget(&volume.id).await?)
            }
        }
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
            if let Some(node) = &node {
                let named = keeper.node(&volume.cluster, node).await?;
                let named = named.is_some_and(|named| named.vm.uuid == published.uuid);
                let same = |one: &str| one.eq_ignore_ascii_case(node);
                if !named && !same(&published.uuid) && published.node != *node && published.vm != *node {
                    return Ok(());
                }
            }
            match keeper.holder(published).await? {
                Some(Machine { vm, power }) if power != PowerState::Off => {
                    let serial = keeper.0.volumes.serial(&id).unwrap_or_default();
                    let agent = Agent::new(&keeper.0.fleet, &vm.name, &serial);
                    let side = if forced { release::side(agent, true).0 } else { release::bounded(agent) };
                    let unplugged = keeper.0.volumes.unplug(&id, &vm.name, PATIENCE, side).await;
                    unplugged.map_err(|error| keeper.logged(&by, "unplug a volume", &id, error))?;
                }
                _ => keeper.0.volumes.forget(&id).await?,
            }
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
            let policy = keeper.policy(&volume.cluster);
            let more = size - volume.size;
            if more > 0 {
                let usage = Usage { volumes: 0, bytes: more };
                keeper.reserve(&policy, &volume.cluster, &volume.name, size, usage).await?;
            }
            let holder = match &volume.published {
                Some(published) => keeper.holder(published).await?,
                None => None,
            };
            let vm = holder.filter(|found| found.power != PowerState::Off).map(|found| found.vm.name.clone());
            let grown = keeper.0.volumes.grow(&id, size, vm.as_deref()).await;
            keeper.0.reserved.lock().await.remove(&(volume.cluster.clone(), volume.name.clone()));
            let size = grown.map_err(|error| keeper.logged(&by, "make a volume larger", &id, error))?;
            if more > 0 {
                let volume = Volume { size, ..volume };
                keeper.tell(VolumeAction::Expanded, &volume, &by, vm.as_deref()).await;
            }
            Ok(size)
        })
        .await
    }
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
