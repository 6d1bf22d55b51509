//! Orders for the volumes of one VM, until each has been fulfilled or has failed.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::pin::Pin;

use futures_util::{FutureExt as _, Stream, StreamExt as _};
use kube::api::Api;
use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;

use super::super::api::{Cluster, Written};
use super::super::gates::Way;
use super::super::seen;
use super::patch::{self, Disk};
use super::plan::{Step, Wish, plan};
use super::refusal::refusal;
use super::seen::{Released, Seen, Stage};
use super::{Patience, Place};
use crate::host::backends::volumes::VolumeError;
use crate::kubernetes::follow::follow;
use crate::kubernetes::lists::Selector;

/// Maximum number of times that the queue waits for more orders, so that the first ones are not delayed
/// indefinitely.
const MOST_GATHERED: usize = 8;

/// Requested change of a volume, with the caller that waits for it.
#[derive(Debug)]
pub struct Order {
    /// UID of the VM, because another VM may have the same name.
    pub uid: String,
    /// Disk to plug or unplug.
    pub disk: Disk,
    /// Requested change.
    pub wish: Wish,
    /// For an unplug: state of the guest when it released the disk.
    pub released: Released,
    /// Receives the result.
    pub answer: oneshot::Sender<Result<(), VolumeError>>,
}

/// Order that has not been answered.
#[derive(Debug)]
struct Open {
    order: Order,
    /// Time when it was accepted, or reversed.
    since: Instant,
    /// Set if the disk was not plugged in time and is being removed again; the text is the reason.
    withdrawn: Option<String>,
}

/// Outcome of one evaluation of the VM's state.
enum Done {
    /// The next action was taken; true if the state is to be evaluated again immediately.
    Yes(bool),
    /// The interface through which KubeVirt hot-plugs has to be determined first.
    NeedsWay,
}

/// Queue of one VM.
#[derive(Debug)]
pub struct Queue {
    cluster: Cluster,
    place: Place,
    patience: Patience,
    /// Orders by the names of their volumes.
    open: BTreeMap<String, Open>,
    /// Time since which each volume has been changing, whichever program requested the change.
    since: BTreeMap<String, Instant>,
    /// True after KubeVirt has refused a set: volumes are then submitted one by one, so that only the offending
    /// ones fail.
    is_careful: bool,
}

/// Stream of hints that the VM may have changed.
type Changes = Pin<Box<dyn Stream<Item = ()> + Send>>;

impl Queue {
    /// Creates the queue of the VM with this namespace and name.
    pub fn new(cluster: Cluster, place: Place, patience: Patience) -> Self {
        let (open, since) = (BTreeMap::new(), BTreeMap::new());
        Self { cluster, place, patience, open, since, is_careful: false }
    }

    /// Processes orders until none are left.
    pub async fn run(mut self, mut orders: mpsc::Receiver<Order>) {
        let mut first = orders.recv().await;
        while let Some(order) = first {
            self.take(order);
            self.work(&mut orders).await;
            first = last(&mut orders).await;
        }
    }

    /// Works until all accepted orders are answered.
    async fn work(&mut self, orders: &mut mpsc::Receiver<Order>) {
        let mut changes = self.changes();
        loop {
            self.gather(orders).await;
            // One evaluation covers all changes that have arrived so far.
            while changes.next().now_or_never().flatten().is_some() {}
            let goes_on = self.step().await;
            if self.open.is_empty() {
                return;
            }
            if goes_on {
                continue;
            }
            tokio::select! {
                Some(order) = orders.recv() => self.take(order),
                Some(()) = changes.next() => {}
                () = tokio::time::sleep(self.patience.look) => {}
            }
        }
    }

    /// Accepts the orders that arrive in quick succession.
    async fn gather(&mut self, orders: &mut mpsc::Receiver<Order>) {
        for _ in 0..MOST_GATHERED {
            tokio::time::sleep(self.patience.gather).await;
            let before = self.open.len();
            while let Ok(order) = orders.try_recv() {
                self.take(order);
            }
            if self.open.len() == before {
                return;
            }
        }
    }

    /// Returns a stream with one item per change of the VM's run. Lost events are covered by the periodic reads, so
    /// a failing watch is not reported.
    fn changes(&self) -> Changes {
        let (namespace, name) = &self.place;
        let of_name = Selector { fields: Some(format!("metadata.name={name}")), ..Selector::default() };
        let runs = Api::<seen::Seen>::namespaced(self.cluster.client(), namespace);
        Box::pin(follow(runs, of_name, None).map(drop))
    }

    fn take(&mut self, order: Order) {
        let name = order.disk.volume();
        let open = Open { order, since: Instant::now(), withdrawn: None };
        if let Some(before) = self.open.insert(name, open) {
            // Only one operation at a time works on a volume, so the earlier caller no longer waits.
            let words = "another request for this volume has replaced this one".to_owned();
            drop(before.order.answer.send(Err(VolumeError::Unavailable(words))));
        }
    }

    fn answer(&mut self, name: &str, outcome: Result<(), VolumeError>) {
        if let Some(open) = self.open.remove(name) {
            let outcome = match (outcome, open.withdrawn) {
                (Ok(()), Some(why)) => Err(stuck(&why, "it was removed from the VM again")),
                (outcome, _) => outcome,
            };
            // The caller may no longer be waiting.
            drop(open.order.answer.send(outcome));
        }
    }

    /// Evaluates the VM's state and takes the next action; returns whether to evaluate it again immediately.
    async fn step(&mut self) -> bool {
        match self.attempt(None).await {
            Done::Yes(goes_on) => goes_on,
            Done::NeedsWay => {
                let way = self.cluster.way().await;
                matches!(self.attempt(Some(way)).await, Done::Yes(true))
            }
        }
    }

    /// Takes one step. The interface of KubeVirt is needed only for sending a request, and if the run has volumes
    /// that its VM lacks. It is determined before the VM is read, so that the decision is based on the most recent
    /// state.
    async fn attempt(&mut self, way: Option<Result<Way, VolumeError>>) -> Done {
        let known = way.as_ref().and_then(|way| way.as_ref().ok().copied());
        let seen = match self.cluster.seen(&self.place.0, &self.place.1).await {
            Ok(Some(seen)) => Seen { way: known, ..seen },
            Ok(None) => return Done::Yes(self.vm_is_gone()),
            Err(error) => return Done::Yes(self.cannot_ask(&error.to_string())),
        };
        if way.is_none() && seen.has_what_its_vm_lacks() {
            return Done::NeedsWay;
        }
        self.keep_what_has_come(&seen);
        self.refuse_what_cannot_be(&seen);
        self.note_times(&seen);
        self.withdraw_what_is_overdue(&seen).await;
        let wishes = self.open.iter().map(|(name, open)| (name.clone(), open.order.wish)).collect();
        let overdue: BTreeSet<_> = self
            .since
            .iter()
            .filter(|(_, since)| self.is_over(**since))
            .map(|(name, _)| name.clone())
            .collect();
        let plan = plan(&seen, &wishes, &overdue);
        for name in &plan.fulfilled {
            self.answer(name, Ok(()));
        }
        let (wish, names) = match plan.step {
            Step::Rest => return Done::Yes(false),
            Step::Wait(others) => {
                self.give_up_waiting(&seen, &others);
                return Done::Yes(false);
            }
            Step::Plug(names) => (Wish::Plug, names),
            Step::Unplug(names) => (Wish::Unplug, names),
        };
        match way {
            _ if names.is_empty() => Done::Yes(false),
            Some(way) => Done::Yes(self.tell(&seen, way, wish, names).await),
            None => Done::NeedsWay,
        }
    }

    fn is_over(&self, since: Instant) -> bool {
        since.elapsed() >= self.patience.settle
    }

    /// Answers all orders for a VM that does not exist: it has no volumes, and cannot get any.
    fn vm_is_gone(&mut self) -> bool {
        let wishes: Vec<_> = self.open.iter().map(|(name, open)| (name.clone(), open.order.wish)).collect();
        for (name, wish) in wishes {
            let outcome = match wish {
                Wish::Unplug => Ok(()),
                Wish::Plug => {
                    Err(VolumeError::Refused(format!("there is no VM {}/{}", self.place.0, self.place.1)))
                }
            };
            self.answer(&name, outcome);
        }
        false
    }

    /// Gives up the orders that have waited too long while the API server does not answer.
    fn cannot_ask(&mut self, why: &str) -> bool {
        for name in self.overdue_orders() {
            self.answer(&name, Err(VolumeError::Unavailable(why.to_owned())));
        }
        false
    }

    /// Returns the orders that have taken too long, counted from the request to KubeVirt, if there was one.
    fn overdue_orders(&self) -> Vec<String> {
        let begun =
            |name: &str, open: &Open| self.since.get(name).map_or(open.since, |told| open.since.max(*told));
        let late = self.open.iter().filter(|(name, open)| self.is_over(begun(name, open)));
        late.map(|(name, _)| name.clone()).collect()
    }

    /// Refuses the orders that KubeVirt cannot fulfil in the present state.
    fn refuse_what_cannot_be(&mut self, seen: &Seen) {
        let mut refused = Vec::new();
        for (name, Open { order, .. }) in &self.open {
            if let Some(error) = refusal(seen, order, self.patience.released) {
                refused.push((name.clone(), error));
            }
        }
        for (name, error) in refused {
            self.answer(&name, error);
        }
    }

    fn note_times(&mut self, seen: &Seen) {
        let now = Instant::now();
        let before = std::mem::take(&mut self.since);
        self.since = seen
            .on_their_way()
            .into_iter()
            .map(|(name, _)| {
                let since = before.get(&name).copied().unwrap_or(now);
                (name, since)
            })
            .collect();
    }

    /// Keeps a volume that was to be removed again because it was late, but has arrived in the VM after all: its
    /// guest may be using it by now.
    fn keep_what_has_come(&mut self, seen: &Seen) {
        for (name, open) in &mut self.open {
            if open.withdrawn.is_some() && seen.stage(name) == Stage::Ready {
                (open.order.wish, open.withdrawn) = (Wish::Plug, None);
            }
        }
    }

    /// Removes a volume of guestlet's that does not arrive in the VM, because it blocks all others.
    async fn withdraw_what_is_overdue(&mut self, seen: &Seen) {
        for name in self.overdue_orders() {
            let Some(open) = self.open.get(&name) else { continue };
            let stage = seen.stage(&name);
            let is_stuck = open.order.wish == Wish::Plug && matches!(stage, Stage::Handed | Stage::Coming(_));
            if !is_stuck {
                continue;
            }
            let why = self.why(seen, &name, &stage).await;
            tracing::warn!(
                vm = format!("{}/{}", self.place.0, self.place.1),
                volume = name,
                why,
                "a volume cannot be plugged into a VM, and is removed again"
            );
            if let Some(open) = self.open.get_mut(&name) {
                open.order.wish = Wish::Unplug;
                open.order.released = Released { run: seen.run(), at: None, by_force: false };
                open.since = Instant::now();
                open.withdrawn = Some(why);
            }
        }
    }

    /// Explains why a volume makes no progress, as far as the API says.
    async fn why(&self, seen: &Seen, name: &str, stage: &Stage) -> String {
        let namespace = &self.place.0;
        let warning = match seen.attachment_pod(name) {
            Some(pod) => {
                self.cluster.warning(namespace, "Pod", pod).await.map(|text| format!("pod {pod}: {text}"))
            }
            None => None,
        };
        match warning {
            Some(warning) => format!("it {}; {warning}", stage.words()),
            None => format!("it {}", stage.words()),
        }
    }

    /// Gives up the orders that have waited too long for other volumes; their errors name those volumes.
    fn give_up_waiting(&mut self, seen: &Seen, others: &[(String, Stage)]) {
        for name in self.overdue_orders() {
            let of_others = others.iter().filter(|(other, _)| *other != name);
            let blockers: Vec<_> =
                of_others.map(|(other, stage)| format!("the volume {other} {}", stage.words())).collect();
            let own = others.iter().find(|(other, _)| *other == name).map(|(_, stage)| stage.words());
            let mut why = own.map_or_else(String::new, |words| format!("it {words}; "));
            if let Some(phase) = seen.waits_to_start() {
                let (namespace, name) = &self.place;
                let _ = write!(
                    why,
                    "the VM has not started (its VirtualMachineInstance is {phase}), and KubeVirt changes \
                     none of its volumes before that; if it does not start, a missing volume may be the cause: \
                     kubectl --namespace {namespace} delete virtualmachineinstance {name} starts it with the volumes that its spec \
                     lists now"
                );
            } else if blockers.is_empty() {
                why.push_str("KubeVirt makes no progress with it");
            } else {
                why.push_str("KubeVirt processes one set of volumes at a time, and ");
            }
            why.push_str(&blockers.join(", and "));
            let before = self.open.get(&name).and_then(|open| open.withdrawn.clone());
            let outcome = match before {
                Some(before) => stuck(&before, &format!("it could not be removed again: {why}")),
                None => stuck(&why, "repeat the call to try again"),
            };
            self.answer(&name, Err(outcome));
        }
    }

    /// Sends the request to KubeVirt; returns whether to evaluate the state again immediately.
    async fn tell(
        &mut self,
        seen: &Seen,
        way: Result<Way, VolumeError>,
        wish: Wish,
        mut names: Vec<String>,
    ) -> bool {
        if self.is_careful {
            names.truncate(1);
        }
        let told = match way {
            Ok(way) => self.change(seen, way, wish, &names).await,
            Err(error) => Err(error),
        };
        match told {
            // The effect becomes visible with the next change of the run.
            Ok(Written::Yes) => {
                self.is_careful = false;
                tracing::debug!(vm = self.place.1, ?wish, ?names, "KubeVirt was told");
                false
            }
            Ok(Written::Conflict | Written::Gone) => true,
            Err(VolumeError::Refused(_)) if names.len() > 1 => {
                self.is_careful = true;
                true
            }
            Err(VolumeError::Refused(words)) => {
                for name in &names {
                    self.answer(name, Err(VolumeError::Refused(words.clone())));
                }
                self.is_careful = false;
                true
            }
            Err(error) => self.cannot_ask(&error.to_string()),
        }
    }

    async fn change(
        &self,
        seen: &Seen,
        way: Way,
        wish: Wish,
        names: &[String],
    ) -> Result<Written, VolumeError> {
        match (way, wish) {
            (Way::Declarative, Wish::Plug) => {
                let open = names.iter().filter_map(|name| self.open.get(name));
                let disks: Vec<_> = open.map(|open| open.order.disk.clone()).collect();
                self.cluster.change(&seen.vm, patch::plug(&seen.vm, &disks)).await
            }
            (Way::Declarative, Wish::Unplug) => {
                self.cluster.change(&seen.vm, patch::unplug(&seen.vm, names)).await
            }
            (Way::Subresource, _) => self.request(way, wish, names).await,
        }
    }

    /// Requests the changes one by one, and checks before each that it is still due: a subresource request cannot
    /// be tied to a version of the VM or to a run.
    async fn request(&self, way: Way, wish: Wish, names: &[String]) -> Result<Written, VolumeError> {
        for (name, open) in names.iter().filter_map(|name| self.open.get_key_value(name)) {
            let Some(now) = self.cluster.seen(&self.place.0, &self.place.1).await? else {
                return Ok(Written::Gone);
            };
            let now = Seen { way: Some(way), ..now };
            let is_due = match wish {
                Wish::Plug => now.stage(name) == Stage::Absent,
                Wish::Unplug => now.can_be_taken_out(name),
            };
            if !is_due || refusal(&now, &open.order, self.patience.released).is_some() {
                return Ok(Written::Conflict);
            }
            let written = match wish {
                Wish::Plug => self.cluster.add_volume(&now.vm, &open.order.disk).await?,
                Wish::Unplug => self.cluster.remove_volume(&now.vm, name).await?,
            };
            if written != Written::Yes {
                return Ok(written);
            }
        }
        Ok(Written::Yes)
    }
}

/// Closes the queue, and returns an order that arrived before that, if there was one. No order is lost: later
/// callers cannot send to a closed queue, and get a new one.
async fn last(orders: &mut mpsc::Receiver<Order>) -> Option<Order> {
    orders.close();
    orders.recv().await
}

fn stuck(why: &str, then: &str) -> VolumeError {
    let words = "the host cluster has not plugged or unplugged the volume in time".to_owned();
    VolumeError::Waiting { words, detail: format!("{why}; {then}") }
}
