//! Has KubeVirt plug volumes into VMs and unplug them, one set of changes after the other in each VM.
//!
//! ```text
//!  Hotplug ──order──▶ queue of a VM ──reads──▶ VM, its run            (again whenever its run has changed, and now and then)
//!                       │    ▲                    │
//!                       │    └────── plan ◀───────┘
//!                       └──tells──▶ KubeVirt
//! ```
//!
//! A queue is a task that lives while something is wanted of its VM. It remembers who waits for what, and nothing else:
//! what was told to KubeVirt is in the API, and whoever comes after this program finds it there.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::{mpsc, oneshot};

use super::api::Cluster;
use crate::host::backends::volumes::VolumeError;
use crate::supervise::Scope;

pub mod patch;
pub mod plan;
mod queue;
mod refusal;
pub mod seen;

use patch::Disk;
use plan::Wish;
use queue::{Order, Queue};
use seen::Released;

/// Orders that may wait for a queue; more wait for their turn to be among them.
const ORDERS: usize = 64;

/// How long things may take.
#[derive(Debug, Clone, Copy)]
pub struct Patience {
    /// After an order further ones are waited for, so that one attachment pod carries them all.
    pub gather: Duration,
    /// A volume is overdue after that.
    pub settle: Duration,
    /// Objects are read again after that, though nothing was heard of them.
    pub look: Duration,
    /// How often something is read that nobody tells of, and that is waited for.
    pub poll: Duration,
    /// For how long it counts that a guest has released a disk that another program has plugged: programs of which its agent knows
    /// nothing may mount it again.
    pub released: Duration,
}

impl Default for Patience {
    fn default() -> Self {
        Self {
            gather: Duration::from_millis(250),
            settle: Duration::from_secs(90),
            look: Duration::from_secs(10),
            poll: Duration::from_secs(1),
            released: Duration::from_secs(10),
        }
    }
}

/// Which VM: its namespace and name.
type Place = (String, String);

/// Plugs and unplugs. A clone is the same one.
#[derive(Debug, Clone)]
pub struct Hotplug(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    cluster: Cluster,
    patience: Patience,
    queues: Mutex<BTreeMap<Place, mpsc::Sender<Order>>>,
    tasks: Scope,
}

impl Hotplug {
    /// Has the KubeVirt of this cluster do it.
    pub fn new(cluster: Cluster, patience: Patience) -> Self {
        Self(Arc::new(Inner { cluster, patience, queues: Mutex::default(), tasks: Scope::new() }))
    }

    /// Has the VM of this name and UID plug a disk; returns when the machine has it. Its guest may not have seen it.
    ///
    /// # Errors
    /// If it has not. What was told to KubeVirt is taken back then; the caller has to look whether that was so.
    pub async fn plug(&self, vm: &str, uid: &str, disk: Disk) -> Result<(), VolumeError> {
        self.order(vm, uid, disk, Wish::Plug, Released::default()).await
    }

    /// Has the VM of this name and UID let go of a disk; returns when neither its spec nor its run lists the volume. What
    /// its guest has to do with that is in `released`.
    ///
    /// # Errors
    /// If one of them does, or the VM has been started anew before KubeVirt was told, or is starting with a disk that another program
    /// has plugged.
    pub async fn unplug(
        &self,
        vm: &str,
        uid: &str,
        disk: Disk,
        released: Released,
    ) -> Result<(), VolumeError> {
        self.order(vm, uid, disk, Wish::Unplug, released).await
    }

    async fn order(
        &self,
        vm: &str,
        uid: &str,
        disk: Disk,
        wish: Wish,
        released: Released,
    ) -> Result<(), VolumeError> {
        let Some((namespace, name)) = vm.split_once('/') else {
            return Err(VolumeError::Refused(format!("{vm:?} is not a VM of a namespace")));
        };
        if namespace != disk.claim.namespace {
            return Err(VolumeError::Refused(format!(
                "the claim is in the namespace {}, but the VM {vm} is not: KubeVirt cannot plug a claim of another namespace",
                disk.claim.namespace
            )));
        }
        let place = (namespace.to_owned(), name.to_owned());
        let (answer, answered) = oneshot::channel();
        let mut order = Order { uid: uid.to_owned(), disk, wish, released, answer };
        loop {
            let queue = self.queue(&place);
            match queue.send(order).await {
                Ok(()) => break,
                // It had just ended; there is another one now.
                Err(mpsc::error::SendError(back)) => order = back,
            }
        }
        let stopped = |_| Err(VolumeError::Unavailable("guestlet-host is stopping".to_owned()));
        answered.await.unwrap_or_else(stopped)
    }

    /// The queue of a VM.
    fn queue(&self, place: &Place) -> mpsc::Sender<Order> {
        let mut queues = self.0.queues.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(queue) = queues.get(place).filter(|queue| !queue.is_closed()) {
            return queue.clone();
        }
        let (orders, waiting) = mpsc::channel(ORDERS);
        queues.insert(place.clone(), orders.clone());
        // Those that have ended.
        queues.retain(|_, queue| !queue.is_closed());
        let queue = Queue::new(self.0.cluster.clone(), place.clone(), self.0.patience);
        self.0.tasks.children().spawn(queue.run(waiting));
        orders
    }
}
