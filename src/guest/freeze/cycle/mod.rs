//! The keeper: one freeze from its beginning to its end. See the state machine of [`crate::guest::freeze`].

mod applications;
mod ending;
mod hooks;
mod notes;
mod taking_over;

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use tokio::sync::oneshot;

use crate::guest::Guest;
use crate::guest::freeze::applications::discovery::Candidate;
use crate::guest::freeze::applications::{Participants, Report};
use crate::guest::freeze::error::{Error, denial_hint};
use crate::guest::freeze::marker::{Freeze, Marker, Told};
use crate::guest::freeze::receipts::inventory::{self, Inventory};
use crate::guest::freeze::receipts::now;
use crate::guest::freeze::targets::{OPEN_BOOLEAN, Target, mounts, open, selected};
use crate::guest::freeze::{By, Settings, Thawed, hook};
use crate::receipt::{Caller, Cut};
use crate::sys::process_group::{Ended, Guardian, thread};
use crate::sys::{error_chain, logging, memory};
use crate::wire::proto::v1::Frozen;
use notes::Notes;

/// How long those who asked wait for a thaw that hangs.
const ANSWER: Duration = Duration::from_secs(20);
/// How much later than the keeper the guardian thaws.
const GUARDIAN: Duration = Duration::from_secs(10);

/// For a receipt that is being written to a disk, how long the freeze waits.
const WRITING: Duration = Duration::from_secs(2);

/// For whoever asks for a freeze: how many file systems were frozen.
pub(super) type Answer = oneshot::Sender<Result<u64, Error>>;
/// For whoever asks for a thaw.
pub(super) type Waiting = oneshot::Sender<Result<Thawed, Error>>;

/// What the keeper is told.
pub(super) enum Message {
    /// Somebody asks for a thaw.
    Thaw(Waiting, By, Option<Cut>),
    HookEnded(Ended),
    /// The applications that were found.
    Found(Vec<Candidate>),
    /// What the application with this place says.
    Application(usize, Report),
    Opened(Result<(Vec<Arc<Target>>, Inventory), Error>),
    /// `FIFREEZE` of the target with this place has come back.
    Froze(usize, io::Result<()>),
    /// The thread that freezes does no more.
    AllTried,
}

/// Why a freeze does not go on.
enum Stop {
    Asked,
    Deadline,
    Failed(Error),
}

/// What brings the keeper to look.
enum Next {
    Message(Message),
    /// An application has said something, which is noted.
    Application,
    Stop(Stop),
}

#[allow(clippy::struct_excessive_bools, reason = "they are independent of each other")]
pub(super) struct Cycle {
    guest: Guest,
    settings: Settings,
    marker: Marker,
    marked: Freeze,
    inbox: Receiver<Message>,
    outbox: Sender<Message>,
    /// Those who asked for a thaw.
    waiting: Vec<Waiting>,
    by: By,
    hooks: Vec<PathBuf>,
    /// When all of them have to have ended.
    hooks_until: Instant,
    applications: Participants,
    /// Those that another agent has told of the freeze.
    left_applications: Vec<Told>,
    targets: Vec<Arc<Target>>,
    /// The places of those that this freeze has frozen.
    frozen: BTreeSet<usize>,
    /// Of what is frozen, once it may be.
    deadline: Option<Instant>,
    cancelled: Arc<AtomicBool>,
    /// The thread that freezes has not come to its end.
    freezing: bool,
    /// Everything was frozen at one time.
    complete: bool,
    /// What spoiled the freeze before this one counts no more.
    anew: bool,
    /// Which file systems were frozen is known.
    sure: bool,
    guardian: Option<Guardian>,
    /// The marker is being written beside this thread; says when it was.
    claimed: Option<Receiver<()>>,
    /// What is wrong after the thaw.
    problems: Vec<String>,
    /// For the receipt.
    notes: Notes,
    /// The marker is this freeze's own, and goes with it.
    undone: bool,
}

/// A keeper that panics leaves nobody who thaws: then the process ends at once, and others do.
struct EndOnPanic;

impl Drop for EndOnPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            std::process::abort();
        }
    }
}

impl Cycle {
    pub(super) fn new(guest: &Guest, caller: &Caller) -> (Self, Sender<Message>) {
        let settings = guest.freezer.0.settings.clone();
        let marker = Marker::new(&settings.folder, &guest.root);
        let (outbox, inbox) = channel();
        let cycle = Self {
            guest: guest.clone(),
            marked: marker.begin(&caller.name),
            hooks_until: Instant::now() + settings.hooks_deadline,
            settings,
            marker,
            inbox,
            outbox: outbox.clone(),
            waiting: Vec::new(),
            by: By::Client,
            hooks: Vec::new(),
            applications: Participants::default(),
            left_applications: Vec::new(),
            targets: Vec::new(),
            frozen: BTreeSet::new(),
            deadline: None,
            cancelled: Arc::default(),
            freezing: false,
            complete: false,
            anew: false,
            sure: true,
            guardian: None,
            claimed: None,
            problems: Vec::new(),
            notes: Notes::new(&guest.root, caller.clone()),
            undone: false,
        };
        (cycle, outbox)
    }

    /// A freeze from its beginning.
    pub(super) fn run(mut self, which: Option<&[String]>, answer: Answer) {
        let _end = EndOnPanic;
        if let Some(found) = self.marker.of_another(&self.marked) {
            return self.give_way(&found, answer);
        }
        match self.freeze(which) {
            Ok(()) if self.frozen.is_empty() => {
                self.undo(false);
                self.leave(None, false);
                let _ = answer.send(Ok(0));
            }
            Ok(()) => {
                self.settle();
                // Whoever asked may have gone; then the deadline ends it.
                let _ = answer.send(Ok(self.frozen.len() as u64));
                self.keep();
            }
            Err(stop) => {
                let asked = matches!(stop, Stop::Asked);
                let waiting = self.not_frozen_yet();
                let thawed = self.undo(asked);
                let failure = match stop {
                    Stop::Asked => Error::Cancelled,
                    Stop::Deadline => Error::TooLong { after: self.settings.deadline, waiting },
                    Stop::Failed(error) => error,
                };
                if self.anew {
                    let words = error_chain::words(&failure);
                    tracing::warn!("not frozen for {}: {words}", self.marked.holder);
                    self.notes.failure = Some(words);
                }
                self.leave(asked.then_some(thawed), false);
                let _ = answer.send(Err(failure));
            }
        }
    }

    fn freeze(&mut self, which: Option<&[String]>) -> Result<(), Stop> {
        // What is wrong with the arguments is said before anything is done.
        let failed = Stop::Failed;
        if which.is_some() {
            selected(&self.guest.root, which).map_err(failed)?;
        }
        self.anew = true;
        self.marker.forget_spoiled();
        self.guest.freezer.0.state().spoiled = None;
        self.hooks = hook::list(self.settings.hook.as_deref()).map_err(failed)?;
        self.tell_hooks()?;
        self.hold_applications()?;
        self.open(which)?;
        self.marked.file_systems = self.targets.iter().map(|target| target.marked()).collect();
        self.marked.receipt = Some(Box::new(self.notes.receipt.clone()));
        self.guard();
        self.mark()?;
        self.freeze_all()?;
        self.require_applications()
    }

    fn mark(&self) -> Result<(), Stop> {
        let failed = |source| Stop::Failed(Error::Marker { path: self.marker.path(), source });
        self.marker.write(&self.marked).map_err(failed)
    }

    /// Opens what is to be frozen, on a thread: the way there may lead over a disk or a server that does not answer.
    fn open(&mut self, which: Option<&[String]>) -> Result<(), Stop> {
        self.stage("opening");
        let (guest, outbox) = (self.guest.clone(), self.outbox.clone());
        let which = which.map(<[String]>::to_vec);
        thread("open", move || {
            // The thaw must not wait for the disk that the program is on.
            memory::bring_code();
            let opened = selected(&guest.root, which.as_deref())
                .and_then(|plan| open(&guest.root, &*guest.effects, &plan))
                .and_then(|targets| {
                    let (mounts, disks) = (mounts(&guest.root)?, guest.disks.all());
                    let inventory = inventory::of(&guest.root, &mounts, &disks, &targets, which.is_some());
                    Ok((targets, inventory))
                });
            let _ = outbox.send(Message::Opened(opened));
        })
        .map_err(|error| Stop::Failed(Error::Thread(error)))?;
        let until = Instant::now() + self.settings.deadline;
        loop {
            match self.next(Some(until)) {
                Next::Message(Message::Opened(opened)) => {
                    let (targets, inventory) = opened.map_err(Stop::Failed)?;
                    self.targets = targets;
                    self.notes.opened(inventory);
                    return Ok(());
                }
                // A hook that was killed and comes late.
                Next::Message(_) | Next::Application => {}
                Next::Stop(stop) => return Err(stop),
            }
        }
    }

    /// Starts the process that thaws if this one is gone. Without it the service manager does. It guards this thread,
    /// which never waits for a file system.
    fn guard(&mut self) {
        if !self.settings.guarded || self.guardian.is_some() {
            return;
        }
        let seconds = (self.settings.deadline + GUARDIAN).as_secs().to_string();
        let hook_seconds = self.settings.hook_deadline.as_secs().max(1).to_string();
        let process = self.marked.process.0.to_string();
        let words: [&OsStr; 6] = [
            "thaw".as_ref(),
            "--guard".as_ref(),
            process.as_ref(),
            self.settings.folder.as_os_str(),
            seconds.as_ref(),
            hook_seconds.as_ref(),
        ];
        match Guardian::start(&words) {
            Ok(guardian) => self.guardian = Some(guardian),
            Err(error) => tracing::warn!("no guardian watches this freeze: {error}"),
        }
    }

    fn freeze_all(&mut self) -> Result<(), Stop> {
        if let Some(clerk) = &self.guest.freezer.0.clerk {
            clerk.be_quiet(WRITING);
        }
        self.deadline = Some(Instant::now() + self.settings.deadline);
        self.guest.freezer.0.restricted.store(true, Ordering::SeqCst);
        if let Some(guardian) = &mut self.guardian {
            guardian.alert();
        }
        logging::pause();
        self.stage("freezing");
        let (targets, effects) = (self.targets.clone(), Arc::clone(&self.guest.effects));
        let (outbox, cancelled) = (self.outbox.clone(), Arc::clone(&self.cancelled));
        thread("fifreeze", move || {
            for (place, target) in targets.iter().enumerate() {
                if cancelled.load(Ordering::SeqCst) {
                    break;
                }
                let mut result = target.freeze(&*effects);
                if result.is_ok() && cancelled.load(Ordering::SeqCst) {
                    // Too late. The keeper looks at it once more, too.
                    result = target.thaw(&*effects).map(drop);
                }
                let fatal = result.as_ref().is_err_and(|error| !is_ignored(error));
                // The keeper waits for the end of this thread.
                let _ = outbox.send(Message::Froze(place, result));
                if fatal {
                    break;
                }
            }
            let _ = outbox.send(Message::AllTried);
        })
        .map_err(|error| Stop::Failed(Error::Thread(error)))?;
        self.freezing = true;
        let mut failure = None;
        loop {
            match self.next(self.deadline) {
                Next::Message(Message::Froze(place, result)) => {
                    failure = self.froze(place, result).or(failure);
                }
                Next::Message(Message::AllTried) => {
                    self.freezing = false;
                    return failure.map_or(Ok(()), |error| Err(Stop::Failed(error)));
                }
                Next::Message(_) | Next::Application => {}
                Next::Stop(stop) => return Err(stop),
            }
        }
    }

    fn froze(&mut self, place: usize, result: io::Result<()>) -> Option<Error> {
        match result {
            Ok(()) => {
                self.frozen.insert(place);
                let name = self.targets.get(place).map(|target| target.mount_point.clone());
                if let Some(running) = &mut self.guest.freezer.0.state().running {
                    running.file_systems.extend(name);
                }
                None
            }
            Err(error) if is_ignored(&error) => {
                if let Some(target) = self.targets.get(place) {
                    self.notes.passed_over.insert(target.device, why_passed_over(&error));
                }
                None
            }
            Err(source) => {
                let path =
                    self.targets.get(place).map(|target| target.mount_point.clone()).unwrap_or_default();
                let hint = denial_hint(&self.guest.root, &source, OPEN_BOOLEAN);
                Some(Error::FileSystem { verb: "freeze", path, error: source, hint })
            }
        }
    }

    /// What a freeze that takes too long waits for.
    fn not_frozen_yet(&self) -> String {
        if !self.freezing {
            return "opening the mount points".to_owned();
        }
        let first = (0..self.targets.len()).find(|place| !self.frozen.contains(place));
        first
            .and_then(|place| self.targets.get(place))
            .map(|target| target.mount_point.clone())
            .unwrap_or_default()
    }

    /// Everything is frozen.
    fn settle(&mut self) {
        self.complete = true;
        self.notes.receipt.times.frozen = Some(now());
        self.stage("frozen");
        let names: Vec<_> = self.targets_frozen().map(|target| target.mount_point.clone()).collect();
        if let Some(running) = &mut self.guest.freezer.0.state().running {
            running.file_systems.clone_from(&names);
        }
        self.guest.events.tell(Frozen {
            file_systems: u32::try_from(names.len()).unwrap_or(u32::MAX),
            holder: self.marked.holder.clone(),
            deadline_seconds: u32::try_from(self.settings.deadline.as_secs()).unwrap_or(u32::MAX),
        });
        tracing::info!("frozen for {}: {}", self.marked.holder, names.join(" "));
    }

    /// Waits for the end.
    fn keep(mut self) {
        let stop = loop {
            match self.next(self.deadline) {
                Next::Message(_) | Next::Application => {}
                Next::Stop(stop) => break stop,
            }
        };
        let by_itself = matches!(stop, Stop::Deadline);
        let thawed = self.undo(!by_itself);
        self.leave(Some(thawed), by_itself);
    }

    fn targets_frozen(&self) -> impl Iterator<Item = &Arc<Target>> {
        self.frozen.iter().filter_map(|place| self.targets.get(*place))
    }

    fn take_requests(&mut self) {
        while let Ok(message) = self.inbox.try_recv() {
            match message {
                Message::Thaw(answer, by, cut) => self.note(answer, by, cut),
                Message::AllTried => self.freezing = false,
                Message::Application(place, report) => self.applications.note(place, report),
                _ => {}
            }
        }
    }

    /// The next message, or why there is none.
    fn next(&mut self, until: Option<Instant>) -> Next {
        let received = match until {
            Some(until) => self.inbox.recv_timeout(until.saturating_duration_since(Instant::now())),
            None => self.inbox.recv().map_err(|_| RecvTimeoutError::Disconnected),
        };
        match received {
            Ok(Message::Thaw(answer, by, cut)) => {
                self.note(answer, by, cut);
                Next::Stop(Stop::Asked)
            }
            Ok(Message::Application(place, report)) => {
                self.applications.note(place, report);
                Next::Application
            }
            Ok(message) => Next::Message(message),
            // This keeper holds a sender itself, so there is no end but the time's.
            Err(_) => Next::Stop(Stop::Deadline),
        }
    }

    fn stage(&self, stage: &str) {
        if let Some(running) = &mut self.guest.freezer.0.state().running {
            stage.clone_into(&mut running.stage);
            running.until = self.deadline;
        }
    }
}

/// Why a file system was left as it is, and whether somebody else holds it.
fn why_passed_over(error: &io::Error) -> (&'static str, bool) {
    match error.raw_os_error().map(Errno::from_raw) {
        Some(Errno::EBUSY) => {
            ("it had been frozen by somebody else: it is not known whether it stayed frozen", true)
        }
        _ => ("its file system does not support freezing", false),
    }
}

/// A file system that cannot be frozen, or that somebody else has frozen.
fn is_ignored(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error().map(Errno::from_raw),
        Some(Errno::EOPNOTSUPP | Errno::EBUSY | Errno::ENOTTY)
    )
}
