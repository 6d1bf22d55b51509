//! The task that has rules applied: with every change of rules or disks it looks at everything, decides, and starts what
//! is to be done, one thing at a time for each disk and each mount point.
//!
//! ```text
//! rules, disks, requests, what is done ─▶ look ─▶ plan ─▶ start what is not being done ─▶ tell people
//! ```
//! While file systems are frozen nothing is started; what there is to do then is decided after the thaw, by what is there then.
//!
//! What failed is tried again when its disk, what is on it, or the rules have changed; and where somebody was in the way,
//! with the agent's own ticks (`patience`). While nothing waits, nothing is tried by the clock.

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

/// Applies rules until it is dropped. What they have mounted is remembered in `folder`.
///
/// # Errors
/// If another one runs already.
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
                // They stay as they are.
                Err(_) => std::future::pending().await,
            },
            // The sender lives as long as the guest.
            _ = disks.changed() => engine.turn += 1,
            Some(done) = engine.tasks.join_next() => engine.done(done),
            Some(request) = inbox.recv() => engine.asked(request),
            // As above.
            _ = touches.changed() => engine.touches = touches.borrow_and_update().clone(),
            () = events.next_tick(), if !engine.patience.is_empty() => engine.tick(),
            () = thawed(&mut engine.thaw) => engine.thaw = None,
        }
    }
}

/// Waits until what is frozen is thawed, if that is waited for.
async fn thawed(wait: &mut Option<oneshot::Receiver<Infallible>>) {
    match wait {
        Some(thaw) => drop(thaw.await),
        None => std::future::pending().await,
    }
}

/// What a task did.
enum Done {
    Applied(Arc<Rule>, Device, Result<Applied, Error>, Look),
    Undone(PathBuf, Result<bool, Error>),
    Released(Release, Result<(), Error>),
    Looked(Device, u64, Label),
    LookedAgain(PathBuf, Look),
}

/// What was on a device, after how many [`Touches`] of it.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Look {
    touch: u64,
    found: Result<Contents, String>,
}

/// What a task does.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Doing {
    /// To this mount point.
    point: Option<PathBuf>,
    /// To the disk of this generation.
    disk: Option<u64>,
}

/// A disk that is to be let go of.
struct Release {
    disk: Place,
    answer: oneshot::Sender<Result<(), Error>>,
}

/// How applying a rule ended the last time.
struct Tried {
    rule: Arc<Rule>,
    device: Device,
    outcome: Result<Applied, String>,
    /// What was on the device then.
    look: Look,
}

/// What is on a device now.
async fn look(guest: &Guest, device: &Device, touch: u64) -> Look {
    let found = contents(guest, Path::new(&device.file)).await;
    Look { touch, found: found.map_err(|error| error_chain::words(&error)) }
}

/// The label of each disk or partition, with the disk that it was read from and how often something had happened to that.
type Labels = BTreeMap<(u64, Option<u32>), (Arc<KnownDisk>, u64, Label)>;

struct Engine {
    guest: Guest,
    memory: Arc<Memory>,
    rules: Rules,
    /// Counts up with every change of rules and disks.
    turn: u64,
    tasks: JoinSet<(u64, Done)>,
    doing: HashMap<u64, Doing>,
    tried: HashMap<PathBuf, Tried>,
    /// What could not be unmounted, at which turn, and why.
    stuck: HashMap<PathBuf, (u64, String)>,
    /// The labels, of which state of a disk.
    labels: Labels,
    /// How often something happened to each disk.
    touches: Touches,
    /// Where somebody was in the way.
    patience: Patience,
    releases: Vec<Release>,
    /// Ends with the freeze, if there is one and something waits for its end.
    thaw: Option<oneshot::Receiver<Infallible>>,
    /// Rules have been read since the last pass.
    anew: bool,
    next: u64,
}

impl Engine {
    /// Rules were read: all of them get another try, and what somebody has unmounted is mounted again.
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

    /// What somebody was in the way of is tried again when its time has come.
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

    /// Whether file systems are frozen: then nothing is done to disks, as it would wait there and hold what it needs. The
    /// engine is woken after the thaw.
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

    /// Looks at everything, starts what is to be done, and says how things are.
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
        // What is decided now is not what is to be done after a thaw.
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

    /// Lets go of disks that nothing is being done to.
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
                // What is mounted on another comes first.
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

    /// Disks that were told to go and are gone may come back; what somebody has unmounted may be mounted again once
    /// the rules were written again.
    fn forget_what_is_gone(&mut self, view: &mut View) {
        if std::mem::take(&mut self.anew) {
            let gone = |seen: &Seen| seen.standing == made::Standing::Unmounted;
            let points: Vec<_> = view.made.extract_if(.., |seen| gone(seen)).collect();
            for Seen { made, .. } in points {
                // Nobody is about to mount it.
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

    /// Has those disks looked at whose labels are not known.
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
                    // It was read by its name.
                    _ if !identity::is_still_there(&guest.root, &device.disk) => Err("it is gone".to_owned()),
                    Ok(Some(Contents::Known(signature))) => Ok(signature.label),
                    Ok(_) => Ok(None),
                    Err(error) => Err(error_chain::words(&error)),
                };
                Done::Looked(device, touch, label)
            });
        }
    }

    /// Has those disks looked at that a rule could not be applied to, and that something happened to since: somebody may
    /// have made a file system there. What is done in vain is itself something that happens, but it is only once that
    /// something else is there.
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

    /// Where somebody else has mounted what a rule wants there.
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
            // What is mounted on it goes first.
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
                    // Nothing is compared with it, or it is tried again without.
                    _ => Look { touch, found: Err(String::new()) },
                };
                Done::Applied(rule, device, outcome, look)
            });
        }
    }
}
