//! The keeper: carries out one freeze from its beginning to its end. See the state machine of
//! [`crate::guest::freeze`].

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

/// Time after which requests for a thaw that hangs are answered.
const ANSWER: Duration = Duration::from_secs(20);
/// Time by which the guardian thaws later than the keeper.
const GUARDIAN: Duration = Duration::from_secs(10);

/// Limit on how long a freeze waits for a receipt that is being written to a disk.
const WRITING: Duration = Duration::from_secs(2);

/// Answer to a request for a freeze: the number of frozen file systems.
pub(super) type Answer = oneshot::Sender<Result<u64, Error>>;
/// Answer to a request for a thaw.
pub(super) type Waiting = oneshot::Sender<Result<Thawed, Error>>;

/// Message to the keeper.
pub(super) enum Message {
    /// Request for a thaw.
    Thaw(Waiting, By, Option<Cut>),
    HookEnded(Ended),
    /// Result of the search for applications.
    Found(Vec<Candidate>),
    /// Report of the application with this index.
    Application(usize, Report),
    Opened(Result<(Vec<Arc<Target>>, Inventory), Error>),
    /// Result of `FIFREEZE` for the target with this index.
    Froze(usize, io::Result<()>),
    /// The freezing thread has finished.
    AllTried,
}

/// Reasons to stop a freeze.
enum Stop {
    Asked,
    Deadline,
    Failed(Error),
}

/// Result of waiting for a message.
enum Next {
    Message(Message),
    /// An application has reported, which has been recorded.
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
    /// Requests for a thaw that are not answered yet.
    waiting: Vec<Waiting>,
    by: By,
    hooks: Vec<PathBuf>,
    /// Common deadline of all hooks.
    hooks_until: Instant,
    applications: Participants,
    /// Applications that another agent has notified of the freeze.
    left_applications: Vec<Told>,
    targets: Vec<Arc<Target>>,
    /// Indexes of the targets that this freeze has frozen.
    frozen: BTreeSet<usize>,
    /// Deadline of the thaw; set before the first file system is frozen.
    deadline: Option<Instant>,
    cancelled: Arc<AtomicBool>,
    /// True while the freezing thread is running.
    freezing: bool,
    /// True if everything was frozen at one time.
    complete: bool,
    /// True once the record of an earlier failed freeze no longer counts.
    anew: bool,
    /// False if it is not known which file systems were frozen.
    sure: bool,
    guardian: Option<Guardian>,
    /// Notifies that the marker, which is written by another thread, has been written.
    claimed: Option<Receiver<()>>,
    /// Problems after the thaw.
    problems: Vec<String>,
    /// Notes for the receipt.
    notes: Notes,
    /// True if the marker belongs to this freeze and is removed with it.
    undone: bool,
}

/// Aborts the process if the keeper panics, because nobody else in this process thaws. The guardian or the service
/// manager then does.
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

    /// Carries out a freeze from its beginning.
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
                // The client may have disconnected; then the deadline ends the freeze.
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
        // Wrong arguments are reported before anything is done.
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

    /// Opens the file systems on a thread, as the path may lead to a disk or server that does not respond.
    fn open(&mut self, which: Option<&[String]>) -> Result<(), Stop> {
        self.stage("opening");
        let (guest, outbox) = (self.guest.clone(), self.outbox.clone());
        let which = which.map(<[String]>::to_vec);
        thread("open", move || {
            // Load the program's code into memory: the thaw must not have to read it from a frozen disk.
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
                // Late end of a hook that was killed.
                Next::Message(_) | Next::Application => {}
                Next::Stop(stop) => return Err(stop),
            }
        }
    }

    /// Starts the guardian, which thaws if this process has ended. Without a guardian the service manager does. It
    /// watches this thread, which never waits for a file system.
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
                    // Too late. The keeper thaws it once more as well.
                    result = target.thaw(&*effects).map(drop);
                }
                let fatal = result.as_ref().is_err_and(|error| !is_ignored(error));
                // The keeper exists until this thread ends.
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

    /// Returns the step or mount point for which a freeze that has timed out was waiting.
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

    /// Records that everything is frozen, and reports it.
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

    /// Waits for a request or the deadline, and thaws.
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

    /// Waits for the next message, or for a reason to stop.
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
            // The keeper holds a sender itself, so the only possible error is the timeout.
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

/// Returns why a file system was left as it is, and whether somebody else holds it frozen.
fn why_passed_over(error: &io::Error) -> (&'static str, bool) {
    match error.raw_os_error().map(Errno::from_raw) {
        Some(Errno::EBUSY) => {
            ("it had been frozen by somebody else: it is not known whether it stayed frozen", true)
        }
        _ => ("its file system does not support freezing", false),
    }
}

/// Returns whether the file system does not support freezing, or has been frozen by somebody else.
fn is_ignored(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error().map(Errno::from_raw),
        Some(Errno::EOPNOTSUPP | Errno::EBUSY | Errno::ENOTTY)
    )
}
