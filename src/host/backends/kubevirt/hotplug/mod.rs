//! Hot-plugs volumes into VMs and unplugs them through KubeVirt, one set of changes at a time in each VM.
//!
//! ```text
//!  Hotplug ──order──▶ queue of a VM ──reads──▶ VM, its run            (again at each change of the run, and periodically)
//!                       │    ▲                    │
//!                       │    └────── plan ◀───────┘
//!                       └──requests──▶ KubeVirt
//! ```
//!
//! A queue is a task that exists while there are orders for its VM. It remembers only the callers and their
//! orders: the requests that were sent to KubeVirt are in the API, where they are found again after a restart
//! of this program.

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

/// Capacity of a queue; further callers wait until it has space.
const ORDERS: usize = 64;

/// Timeouts and intervals.
#[derive(Debug, Clone, Copy)]
pub struct Patience {
    /// Time to wait for further orders after one has arrived, so that one attachment pod carries all of their
    /// volumes.
    pub gather: Duration,
    /// Time after which a volume that is still changing is overdue.
    pub settle: Duration,
    /// Interval at which objects are read again even without an event.
    pub look: Duration,
    /// Interval at which awaited state without events is polled.
    pub poll: Duration,
    /// Validity of a guest's release of a disk that another program has plugged, because programs unknown to its
    /// agent may mount the disk again.
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

/// Namespace and name of a VM.
type Place = (String, String);

/// Hot-plugs volumes through KubeVirt; clones share the queues.
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
    /// Creates the queues for the KubeVirt of this cluster.
    pub fn new(cluster: Cluster, patience: Patience) -> Self {
        Self(Arc::new(Inner { cluster, patience, queues: Mutex::default(), tasks: Scope::new() }))
    }

    /// Hot-plugs a disk into the VM with this name and UID. Returns once the domain has the disk; its guest may not
    /// have seen it yet.
    ///
    /// # Errors
    /// If the disk was not plugged. The request to KubeVirt is then withdrawn; the caller has to check whether that
    /// succeeded.
    pub async fn plug(&self, vm: &str, uid: &str, disk: Disk) -> Result<(), VolumeError> {
        self.order(vm, uid, disk, Wish::Plug, Released::default()).await
    }

    /// Unplugs a disk from the VM with this name and UID. Returns once neither its spec nor its run lists the
    /// volume. `released` contains what the guest has agreed to.
    ///
    /// # Errors
    /// If the spec or the run still lists it, if the VM was restarted before KubeVirt was asked, or if the VM is
    /// starting with a disk that another program has plugged.
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
                // The queue has just ended and another one exists by now.
                Err(mpsc::error::SendError(back)) => order = back,
            }
        }
        let stopped = |_| Err(VolumeError::Unavailable("guestlet-host is stopping".to_owned()));
        answered.await.unwrap_or_else(stopped)
    }

    /// Returns the queue of a VM, and starts it if necessary.
    fn queue(&self, place: &Place) -> mpsc::Sender<Order> {
        let mut queues = self.0.queues.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(queue) = queues.get(place).filter(|queue| !queue.is_closed()) {
            return queue.clone();
        }
        let (orders, waiting) = mpsc::channel(ORDERS);
        queues.insert(place.clone(), orders.clone());
        // Drop the queues that have ended.
        queues.retain(|_, queue| !queue.is_closed());
        let queue = Queue::new(self.0.cluster.clone(), place.clone(), self.0.patience);
        self.0.tasks.children().spawn(queue.run(waiting));
        orders
    }
}
