//! Task that has rules applied. After every change of rules or disks it looks at the whole state, decides, and
//! starts the necessary work: one operation at a time for each disk and each mount point.
//!
//! ```text
//! rules, disks, requests, finished work ─▶ look ─▶ plan ─▶ start what is not yet running ─▶ publish
//! ```
//! No work is started while file systems are frozen. The plan is then made again after the thaw, from the state at
//! that time.
//!
//! A failed rule is tried again when its disk, the contents of the disk, or the rules have changed. If the cause
//! was a device or mount point in use, it is also tried again by the agent's ticks (`patience`). While nothing
//! waits, nothing is retried by the clock.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::convert::Infallible;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tokio::sync::{oneshot, watch};
use tokio::task::JoinSet;

use crate::guest::Guest;
use crate::guest::disk_rules::apply::{self, Applied, Error};
use crate::guest::disk_rules::find::{Device, Label};
use crate::guest::disk_rules::made::{self, Kept, Made, Memory, Place};
use crate::guest::disk_rules::patience::Patience;
use crate::guest::disk_rules::plan::{Finding, Plan, Seen, View, plan};
use crate::guest::disk_rules::rule::Rule;
use crate::guest::disk_rules::view::view;
use crate::guest::disk_rules::{Request, Rules, Told};
use crate::guest::disks::identity::{self, KnownDisk};
use crate::guest::disks::room::Touches;
use crate::guest::volumes::contents::{Contents, contents, signed};
use crate::sys::{block, blocking, error_chain};

mod outcomes;
mod standings;

/// Applies rules until the future is dropped. The record of what they have mounted is kept in the directory
/// `folder`.
///
/// # Errors
/// If another engine runs already.
pub async fn run(
    guest: Guest,
    mut rules: watch::Receiver<Rules>,
    folder: PathBuf,
) -> Result<Infallible, Error> {
    let Some(mut inbox) = guest.disk_rules.take_inbox() else { return Err(Error::Ending) };
    let mut disks = guest.disks.changes();
    let mut touches = guest.disks.touches();
    let events = Arc::clone(&guest.events);
    let memory = Arc::new(blocking::run(move || Memory::open(&folder)).await);
    let mut engine = Engine {
        guest,
        memory,
        rules: rules.borrow_and_update().clone(),
        turn: 0,
        tasks: JoinSet::new(),
        doing: HashMap::new(),
        tried: HashMap::new(),
        stuck: HashMap::new(),
        labels: BTreeMap::new(),
        touches: Touches::default(),
        patience: Patience::default(),
        releases: Vec::new(),
        thaw: None,
        anew: false,
        next: 0,
    };
    loop {
        disks.mark_unchanged();
        engine.pass().await;
        tokio::select! {
            changed = rules.changed() => match changed {
                Ok(()) => engine.read_anew(rules.borrow_and_update().clone()),
                // The sender was dropped: the present rules stay in force.
                Err(_) => std::future::pending().await,
            },
            // The sender lives as long as the guest.
            _ = disks.changed() => engine.turn += 1,
            Some(done) = engine.tasks.join_next() => engine.done(done),
            Some(request) = inbox.recv() => engine.asked(request),
            // The sender lives as long as the guest.
            _ = touches.changed() => engine.touches = touches.borrow_and_update().clone(),
            () = events.next_tick(), if !engine.patience.is_empty() => engine.tick(),
            () = thawed(&mut engine.thaw) => engine.thaw = None,
        }
    }
}

/// Waits for the thaw if one is awaited, else forever.
async fn thawed(wait: &mut Option<oneshot::Receiver<Infallible>>) {
    match wait {
        Some(thaw) => drop(thaw.await),
        None => std::future::pending().await,
    }
}

/// Outcome of a finished task.
enum Done {
    Applied(Arc<Rule>, Device, Result<Applied, Error>, Look),
    Undone(PathBuf, Result<bool, Error>),
    Released(Release, Result<(), Error>),
    Looked(Device, u64, Label),
    LookedAgain(PathBuf, Look),
}

/// Contents of a device, with the number of [`Touches`] of its disk when it was read.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Look {
    touch: u64,
    found: Result<Contents, String>,
}

/// Mount point and disk that a running task occupies.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Doing {
    /// Mount point that the task works on.
    point: Option<PathBuf>,
    /// Generation of the disk that the task works on.
    disk: Option<u64>,
}

/// Request to release a disk.
struct Release {
    disk: Place,
    answer: oneshot::Sender<Result<(), Error>>,
}

/// Last attempt to apply a rule, with its outcome.
struct Tried {
    rule: Arc<Rule>,
    device: Device,
    outcome: Result<Applied, String>,
    /// Contents of the device at that time.
    look: Look,
}

/// Reads the present contents of a device.
async fn look(guest: &Guest, device: &Device, touch: u64) -> Look {
    let found = contents(guest, Path::new(&device.file)).await;
    Look { touch, found: found.map_err(|error| error_chain::words(&error)) }
}

/// Label of each disk or partition, with the state of the disk that it was read from and the number of changes
/// seen by then.
type Labels = BTreeMap<(u64, Option<u32>), (Arc<KnownDisk>, u64, Label)>;

struct Engine {
    guest: Guest,
    memory: Arc<Memory>,
    rules: Rules,
    /// Number of changes of rules and disks so far.
    turn: u64,
    tasks: JoinSet<(u64, Done)>,
    doing: HashMap<u64, Doing>,
    tried: HashMap<PathBuf, Tried>,
    /// Mount points that could not be unmounted, with the turn of the attempt and the reason.
    stuck: HashMap<PathBuf, (u64, String)>,
    /// Labels, each with the state of the disk that it was read from.
    labels: Labels,
    /// Number of changes seen so far on each disk.
    touches: Touches,
    /// Mount points to try again later, as something was in use.
    patience: Patience,
    releases: Vec<Release>,
    /// Closed at the end of the freeze, if file systems are frozen and work waits for the thaw.
    thaw: Option<oneshot::Receiver<Infallible>>,
    /// True if rules have been read since the last pass.
    anew: bool,
    next: u64,
}

impl Engine {
    /// Takes over rules that have been read: all of them get another attempt, and mounts that were unmounted by
    /// hand are made again.
    fn read_anew(&mut self, rules: Rules) {
        self.turn += 1;
        if rules.problem.is_none() {
            self.tried.clear();
            self.labels.clear();
            self.patience = Patience::default();
            self.anew = true;
        }
        self.rules = rules;
    }

    /// Makes those mount points eligible for another attempt whose waiting time has passed.
    fn tick(&mut self) {
        for point in self.patience.tick() {
            self.tried.remove(&point);
            self.stuck.remove(&point);
        }
    }

    fn touch(&self, generation: u64) -> u64 {
        self.touches.get(&generation).copied().unwrap_or_default()
    }

    fn remember(&self, change: impl FnOnce(&mut Kept)) {
        if let Err(error) = self.memory.change(change) {
            tracing::warn!("the record of what rules have mounted cannot be written: {error}");
        }
    }

    fn asked(&mut self, request: Request) {
        match request {
            Request::Keep { disk } => {
                self.remember(|kept| kept.released.retain(|known| known.generation != disk.generation));
            }
            Request::Release { disk, answer } => {
                let noted = disk.clone();
                self.remember(move |kept| {
                    if !kept.released.contains(&noted) {
                        kept.released.push(noted);
                    }
                });
                self.releases.push(Release { disk, answer });
            }
        }
    }

    fn start(&mut self, doing: Doing, work: impl Future<Output = Done> + Send + 'static) {
        let id = self.next;
        self.next += 1;
        self.doing.insert(id, doing);
        self.tasks.spawn(async move { (id, work.await) });
    }

    /// Returns whether file systems are frozen. Work on disks would then block, and would hold what the freeze
    /// needs, so none is started. The engine is woken after the thaw.
    fn is_frozen(&mut self) -> bool {
        if self.thaw.is_none() {
            let (thawed, wait) = oneshot::channel();
            self.guest.freezer.unfrozen(move || drop(thawed));
            self.thaw = Some(wait);
        }
        let ended = |wait: &mut oneshot::Receiver<Infallible>| {
            matches!(wait.try_recv(), Err(oneshot::error::TryRecvError::Closed))
        };
        self.thaw.take_if(ended).is_none()
    }

    fn is_busy(&self, point: Option<&Path>, disk: Option<u64>) -> bool {
        self.doing.values().any(|doing| {
            point.is_some_and(|point| doing.point.as_deref() == Some(point))
                || disk.is_some() && doing.disk == disk
        })
    }

    /// Looks at the whole state, starts the necessary work, and publishes the state of each rule.
    async fn pass(&mut self) {
        let kept = self.memory.kept();
        let rules = self.rules.list.clone();
        let nothing = rules.as_ref().is_none_or(|rules| rules.is_empty());
        if nothing && kept.made.is_empty() && kept.released.is_empty() && self.releases.is_empty() {
            return self.tell(Told { rules: Vec::new(), problem: self.rules.problem.clone() });
        }
        let (root, disks) = (self.guest.root.clone(), self.guest.disks.all());
        let looked = blocking::run(move || view(&root, &disks, kept)).await;
        let mut view = match looked {
            Ok(view) => view,
            Err(error) => return tracing::warn!("rules for disks cannot be applied: {error}"),
        };
        // While frozen the plan is only published, not carried out: it is made again after the thaw.
        let starts = !self.is_frozen();
        if starts {
            self.start_releases();
        }
        self.forget_what_is_gone(&mut view);
        let Some(rules) = rules else {
            return self.tell(Told { rules: Vec::new(), problem: self.rules.problem.clone() });
        };
        if starts && rules.iter().any(|rule| rule.matcher.label.is_some()) {
            self.look_for_labels(&view);
        }
        let labels = self.labels.iter().map(|(key, (_, _, label))| (*key, label.clone()));
        view.labels = labels.collect();
        view.foreign = self.foreign();
        let plan = plan(&rules, &view);
        if starts {
            self.look_again();
            self.start_undoing(&plan, &view);
            self.start_applying(&rules, &plan);
        }
        let told = Told { rules: self.standings(&rules, &plan, &view), problem: self.rules.problem.clone() };
        self.tell(told);
    }

    /// Starts the release of those disks on which no task is working.
    fn start_releases(&mut self) {
        for release in std::mem::take(&mut self.releases) {
            let generation = release.disk.generation;
            if self.is_busy(None, Some(generation)) {
                self.releases.push(release);
                continue;
            }
            let (guest, memory) = (self.guest.clone(), Arc::clone(&self.memory));
            self.start(Doing { point: None, disk: Some(generation) }, async move {
                let of_disk = |made: &Made| made.disk.generation == generation;
                let mut points: Vec<_> = memory.kept().made.into_iter().filter(of_disk).collect();
                // Mounts inside other mounts come first.
                points.sort_by(|one, other| other.how.mount_point.cmp(&one.how.mount_point));
                let mut outcome = Ok(());
                for made in points {
                    let undone = apply::undo(&guest, &memory, &made.how.mount_point).await;
                    outcome = outcome.and(undone.map(|_| ()));
                }
                Done::Released(release, outcome)
            });
        }
    }

    /// Deletes outdated records: released disks that have disappeared may be mounted when they come back, and
    /// mounts that were unmounted by hand may be mounted again once the rules have been read anew.
    fn forget_what_is_gone(&mut self, view: &mut View) {
        if std::mem::take(&mut self.anew) {
            let gone = |seen: &Seen| seen.standing == made::Standing::Unmounted;
            let points: Vec<_> = view.made.extract_if(.., |seen| gone(seen)).collect();
            for Seen { made, .. } in points {
                // A record is kept if a task is about to make the mount.
                if !self.is_busy(Some(&made.how.mount_point), None) {
                    self.remember(|kept| kept.forget(&made.how.mount_point));
                }
            }
        }
        let root = &self.guest.root;
        let is_there = |disk: &Place| block::generation(root, &disk.place) == Some(disk.generation);
        if !view.released.is_empty() {
            self.remember(|kept| kept.released.retain(is_there));
        }
        let generations: Vec<_> = view.disks.iter().map(|disk| disk.generation).collect();
        self.labels.retain(|(generation, _), _| generations.contains(generation));
        self.tried.retain(|_, tried| generations.contains(&tried.device.disk.generation));
        let (tried, stuck, doing) = (&self.tried, &self.stuck, &self.doing);
        self.patience.retain(|point| {
            let is_done = doing.values().any(|doing| doing.point.as_deref() == Some(point));
            is_done || tried.contains_key(point) || stuck.contains_key(point)
        });
    }

    /// Starts reading the labels of disks whose labels are not known or outdated.
    fn look_for_labels(&mut self, view: &View) {
        for device in view.disks.iter().flat_map(Device::all) {
            let generation = device.disk.generation;
            let key = (generation, device.partition);
            let touch = self.touch(generation);
            let is_new =
                |(disk, then, _): &(Arc<KnownDisk>, u64, Label)| (disk, *then) == (&device.disk, touch);
            let known = self.labels.get(&key).is_some_and(is_new);
            if known || view.system.contains(&generation) || self.is_busy(None, Some(generation)) {
                continue;
            }
            let guest = self.guest.clone();
            self.start(Doing { point: None, disk: Some(generation) }, async move {
                let found = signed(&guest, Path::new(&device.file)).await;
                let label = match found {
                    // The label was read by device name, and a new disk may have got that name.
                    _ if !identity::is_still_there(&guest.root, &device.disk) => {
                        Err("it was removed".to_owned())
                    }
                    Ok(Some(Contents::Known(signature))) => Ok(signature.label),
                    Ok(_) => Ok(None),
                    Err(error) => Err(error_chain::words(&error)),
                };
                Done::Looked(device, touch, label)
            });
        }
    }

    /// Reads the contents of disks again to which a rule could not be applied and which have changed since: a file
    /// system may have been made there. The failed attempt is itself a change, but the rule is tried again only if
    /// the contents differ.
    fn look_again(&mut self) {
        let failed: Vec<_> = self.tried.iter().filter(|(_, tried)| tried.outcome.is_err()).collect();
        let devices: Vec<_> = failed
            .iter()
            .map(|(point, tried)| ((*point).clone(), tried.device.clone(), tried.look.touch))
            .collect();
        for (point, device, before) in devices {
            let generation = device.disk.generation;
            let touch = self.touch(generation);
            if touch == before || self.is_busy(Some(&point), Some(generation)) {
                continue;
            }
            let guest = self.guest.clone();
            self.start(Doing { point: None, disk: Some(generation) }, async move {
                let look = look(&guest, &device, touch).await;
                Done::LookedAgain(point, look)
            });
        }
    }

    /// Returns the mount points where somebody else has mounted the device that a rule wants there.
    fn foreign(&self) -> BTreeSet<PathBuf> {
        let is_foreign = |tried: &&Tried| matches!(&tried.outcome, Ok(applied) if applied.foreign);
        self.tried.values().filter(is_foreign).map(|tried| tried.rule.how.mount_point.clone()).collect()
    }

    fn start_undoing(&mut self, plan: &Plan, view: &View) {
        self.stuck.retain(|point, _| plan.undo.contains(point));
        for point in &plan.undo {
            let disk = view.made.iter().find(|seen| seen.made.how.mount_point == *point);
            let disk = disk.map(|seen| seen.made.disk.generation);
            let stuck = self.stuck.get(point).is_some_and(|(turn, _)| *turn == self.turn);
            // Mounts below this one are undone first.
            let covered = self.doing.values().any(|doing| {
                doing.point.as_ref().is_some_and(|other| other != point && other.starts_with(point))
            });
            if stuck || covered || self.is_busy(Some(point), disk) {
                continue;
            }
            let (guest, memory, point) = (self.guest.clone(), Arc::clone(&self.memory), point.clone());
            self.start(Doing { point: Some(point.clone()), disk }, async move {
                let outcome = apply::undo(&guest, &memory, &point).await;
                Done::Undone(point, outcome)
            });
        }
    }

    fn start_applying(&mut self, rules: &[Rule], plan: &Plan) {
        for (rule, finding) in rules.iter().zip(&plan.findings) {
            let Finding::Apply(device) = finding else { continue };
            let (point, generation) = (&rule.how.mount_point, device.disk.generation);
            let same = |tried: &Tried| tried.device == *device && *tried.rule == *rule;
            if self.tried.get(point).is_some_and(same) || self.is_busy(Some(point), Some(generation)) {
                continue;
            }
            let (guest, memory) = (self.guest.clone(), Arc::clone(&self.memory));
            let (rule, device) = (Arc::new(rule.clone()), device.clone());
            let touch = self.touch(generation);
            self.start(Doing { point: Some(point.clone()), disk: Some(generation) }, async move {
                let outcome = apply::apply(&guest, &memory, &rule, &device).await;
                let look = match outcome {
                    Err(ref error) if !error.may_end() => look(&guest, &device, touch).await,
                    // Contents are not compared then: the rule has succeeded, or it is retried by the timer.
                    _ => Look { touch, found: Err(String::new()) },
                };
                Done::Applied(rule, device, outcome, look)
            });
        }
    }
}
