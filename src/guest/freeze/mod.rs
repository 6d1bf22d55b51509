//! Freezes the guest's file systems for a snapshot, and always thaws them.
//!
//! One thread, the keeper (`cycle`), exists for each freeze and owns its state. It touches no file system itself:
//! what can block (paths, `FIFREEZE`, `FITHAW`, hooks) runs on threads and in processes of its own, which report
//! to it. Neither a blocked event loop nor a caller that disconnects stops it.
//!
//! ```text
//!            freeze            each hook        all are open and in the marker
//! Thawed ───────────▶ Hooks ──────────▶ Opening ─────────────────────────────▶ Freezing ──all frozen──▶ Frozen
//!   ▲                   │                  │        only "always" commands        │                       │
//!   │                   │ a failure, a request for a thaw, or the deadline        │     thaw, or deadline │
//!   │                   ▼                  ▼                                      ▼                       │
//!   └────────────── thaw hooks ◀───────────────────────────────────────────── Thawing ◀───────────────────┘
//! ```
//!
//! The [`marker`] is what outlasts the agent. [`recover`] thaws if the agent has ended: a guardian process does so
//! at once, else the service manager, else the agent's next run, which starts in the frozen state before it serves
//! clients. The [end] of a freeze is also reported as an event, and each freeze leaves a [receipt](receipts).
//!
//! The [`plan`] decides which file systems are frozen, and in which order; the [`hook`]s are programs that run
//! around the freeze. After the hooks, and before anything is opened, [`applications`] are held; after the thaw
//! they are released.

pub mod applications;
mod cycle;
pub mod end;
pub mod error;
pub mod hook;
pub mod marker;
pub mod plan;
pub mod receipts;
pub mod recover;
pub mod targets;

#[cfg(test)]
mod tests;

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use tokio::sync::{oneshot, watch};

use crate::guest::Guest;
use crate::receipt::{Caller, Cut, Level};
use crate::sys::blocking;
use crate::sys::process_group::thread;
use crate::wire::proto::v1;
use cycle::{Cycle, Message};
use end::{End, Spoiled};
pub use error::Error;
use marker::{Found, Marker};
use receipts::Told;
use receipts::clerk::Clerk;

/// Limit on how long the answer to a thaw waits for the deletion of the recorded reason.
const TO_FORGET: Duration = Duration::from_secs(2);

/// Settings of freezes.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Program, or directory of programs, to run before a freeze and after a thaw.
    pub hook: Option<PathBuf>,
    /// Time limit for each hook.
    pub hook_deadline: Duration,
    /// Time limit for all hooks together, as the client that requests a freeze does not wait longer.
    pub hooks_deadline: Duration,
    /// Settings of the applications that take part.
    pub applications: applications::Settings,
    /// Directory where receipts are kept; absent if none is known.
    pub receipts: Option<PathBuf>,
    /// Longest time that file systems stay frozen; they are then thawed whatever happens.
    pub deadline: Duration,
    /// Directory of the marker: in memory, so that it is lost at the next boot.
    pub folder: PathBuf,
    /// True if a process of this program guards each freeze. Only for the agent's own program.
    pub guarded: bool,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            hook: None,
            hook_deadline: Duration::from_secs(60),
            hooks_deadline: Duration::from_secs(60),
            applications: applications::Settings::default(),
            receipts: None,
            // The watchdog of systemd-journald kills it after 3 minutes.
            deadline: Duration::from_secs(120),
            folder: "/var/run".into(),
            guarded: false,
        }
    }
}

/// Origin of a request for a thaw.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum By {
    /// A client, like the one that froze.
    Client,
    /// A person in the guest. The client that froze is told at its next request for a thaw.
    Person,
}

/// Result of a thaw.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Thawed {
    /// Number of file systems that were frozen.
    pub file_systems: u64,
    /// Receipt of the freeze; none if there was no freeze.
    pub receipt: Option<Told>,
}

/// Status of the freezer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Status {
    /// No freeze is in progress.
    Thawed {
        /// Reason why the last freeze failed in the end, until a client that requests a thaw has been told.
        spoiled: Option<String>,
    },
    /// A freeze has not ended.
    Busy {
        /// Client that requested it.
        holder: String,
        /// Time of the request.
        since: SystemTime,
        /// Current step, such as `frozen`.
        stage: String,
        /// Mount points of the frozen file systems.
        file_systems: Vec<String>,
        /// Time until they are thawed without a request; absent as long as nothing is frozen.
        left: Option<Duration>,
    },
}

/// Freezes of this machine; clones share the state.
#[derive(Debug, Clone, Default)]
pub struct Freezer(Arc<Shared>);

type Later = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct Shared {
    settings: Settings,
    state: Mutex<State>,
    /// Keeper of the receipts.
    clerk: Option<Clerk>,
    /// True if file systems are frozen, or about to be.
    restricted: AtomicBool,
    /// Number of freezes that have ended.
    over: watch::Sender<u64>,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Freezer").field("settings", &self.settings).finish_non_exhaustive()
    }
}

#[derive(Default)]
struct State {
    running: Option<Running>,
    spoiled: Option<Spoiled>,
    stopping: bool,
    after_thaw: Vec<Later>,
}

/// Freeze that has not ended.
struct Running {
    keeper: Sender<Message>,
    holder: String,
    since: SystemTime,
    stage: String,
    file_systems: Vec<String>,
    until: Option<Instant>,
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        // No operation under the lock leaves the state inconsistent if it panics.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Freezer {
    /// Creates the state without a freeze.
    pub fn new(settings: Settings) -> Self {
        let clerk = settings.receipts.as_ref().map(|directory| Clerk::new(&settings.folder, directory));
        Self(Arc::new(Shared { settings, clerk, ..Shared::default() }))
    }

    /// Returns the clerk, which keeps the receipts of freezes.
    pub fn clerk(&self) -> Option<&Clerk> {
        self.0.clerk.as_ref()
    }

    /// Returns whether file systems are frozen, or about to be: only operations that write nothing are then
    /// allowed.
    pub fn restricts(&self) -> bool {
        self.0.restricted.load(Ordering::SeqCst)
    }

    /// Returns the current status.
    pub fn status(&self) -> Status {
        let state = self.0.state();
        match &state.running {
            None => {
                let spoiled = state.spoiled.as_ref().map(|spoiled| spoiled.reason.clone());
                Status::Thawed { spoiled }
            }
            Some(running) => Status::Busy {
                holder: running.holder.clone(),
                since: running.since,
                stage: running.stage.clone(),
                file_systems: running.file_systems.clone(),
                left: running.until.map(|until| until.saturating_duration_since(Instant::now())),
            },
        }
    }

    /// Describes the freeze in progress and its holder, for an error; empty without a freeze.
    pub fn held(&self) -> String {
        match self.status() {
            Status::Thawed { .. } => String::new(),
            Status::Busy { holder, since, stage, .. } => {
                let age = since.elapsed().unwrap_or_default().as_secs();
                format!("{holder} requested a freeze {age} s ago, which is still in progress ({stage})")
            }
        }
    }

    /// Runs `work` now, or as soon as nothing is frozen: for work that writes files.
    pub fn unfrozen(&self, work: impl FnOnce() + Send + 'static) {
        let mut state = self.0.state();
        if self.restricts() && state.running.is_some() {
            state.after_thaw.push(Box::new(work));
        } else {
            drop(state);
            work();
        }
    }

    /// Refuses further freezes, and completes when none is left. A caller that cannot wait may request a thaw
    /// meanwhile.
    pub async fn stop(&self) {
        let mut over = self.0.over.subscribe();
        self.0.state().stopping = true;
        while self.0.state().running.is_some() {
            over.mark_unchanged();
            if self.0.state().running.is_none() || over.changed().await.is_err() {
                return;
            }
        }
    }

    /// Returns the longest time until nothing is frozen, whatever happens.
    pub fn longest(&self) -> Duration {
        self.0.settings.deadline + self.0.settings.hooks_deadline * 2 + applications::RELEASE
    }
}

/// Takes over the state that an earlier run of the agent has left: frozen, if it left file systems frozen. Has to
/// be called before clients are served: until then it is unknown whether something is frozen, or why it no longer
/// is.
///
/// # Errors
/// If the keeper of what was left frozen cannot be started.
pub fn begin(guest: &Guest) -> Result<(), Error> {
    let marker = Marker::new(&guest.freezer.0.settings.folder, &guest.root);
    // In this order: a process that thaws in place of an agent first records the reason, and then removes the
    // marker.
    let left = adopt(guest)?;
    if let Some(clerk) = guest.freezer.clerk().filter(|_| !left) {
        // Files the receipts that an earlier run, or a process that thawed in its place, has left.
        clerk.work();
    }
    let Some(mut spoiled) = marker.spoiled().filter(|_| !left) else { return Ok(()) };
    tracing::warn!("{}; the next request for a thaw reports it", spoiled.reason);
    if !spoiled.told {
        spoiled.told = true;
        guest.events.tell(v1::Thawed {
            by_itself: spoiled.end == End::Deadline,
            holder: spoiled.holder.clone(),
            end: spoiled.end.word().to_owned(),
            problem: spoiled.reason.clone(),
            receipt: spoiled.receipt.clone(),
            level: if spoiled.receipt.is_empty() { "" } else { Level::Crash.word() }.to_owned(),
        });
        marker.spoil(&spoiled);
    }
    guest.freezer.0.state().spoiled = Some(spoiled);
    Ok(())
}

/// Takes charge of a freeze that an agent which has ended left behind. Returns false if there is none.
fn adopt(guest: &Guest) -> Result<bool, Error> {
    let shared = &guest.freezer.0;
    let marker = Marker::new(&shared.settings.folder, &guest.root);
    let found = marker.find();
    match &found {
        Found::Nothing => return Ok(false),
        Found::Freeze(freeze) if marker.is_alive(freeze) => {
            tracing::warn!("{} belongs to a running agent, and is left alone", marker.path().display());
            return Ok(false);
        }
        Found::Freeze(_) | Found::Unknown => {}
    }
    let holder = found.holder().to_owned();
    let caller = Caller { name: holder, over: String::new() };
    start(guest, &caller, true, move |cycle| cycle.resume(&found))?;
    Ok(true)
}

/// Freezes the file systems at the mount points in `which`, or all. Returns how many were frozen. `caller` is the
/// client that requests it.
///
/// # Errors
/// If another freeze has not ended, or a file system cannot be frozen; nothing is frozen then.
pub async fn freeze(guest: &Guest, which: Option<Vec<String>>, caller: &Caller) -> Result<u64, Error> {
    let (answer, answered) = oneshot::channel();
    start(guest, caller, false, move |cycle| cycle.run(which.as_deref(), answer))?;
    answered.await.unwrap_or(Err(Error::Cancelled))
}

/// Starts a keeper. `frozen` says that file systems are frozen already.
fn start(
    guest: &Guest,
    caller: &Caller,
    frozen: bool,
    work: impl FnOnce(Cycle) + Send + 'static,
) -> Result<(), Error> {
    let freezer = &guest.freezer;
    let held = freezer.held();
    let mut state = freezer.0.state();
    if state.running.is_some() {
        return Err(Error::Busy(held));
    }
    if state.stopping {
        return Err(Error::Stopping);
    }
    let (cycle, keeper) = Cycle::new(guest, caller);
    thread("freeze", move || work(cycle)).map_err(Error::Thread)?;
    if frozen {
        freezer.0.restricted.store(true, Ordering::SeqCst);
    }
    state.running = Some(Running {
        keeper,
        holder: caller.name.clone(),
        since: SystemTime::now(),
        stage: "beginning".to_owned(),
        file_systems: Vec::new(),
        until: None,
    });
    Ok(())
}

/// Thaws everything, whoever froze it, and returns how many file systems were frozen. A freeze in progress ends.
///
/// # Errors
/// Once, if the freeze has ended by itself before; if a file system cannot be thawed, or a hook fails.
pub async fn thaw(guest: &Guest, by: By) -> Result<u64, Error> {
    Ok(thaw_after(guest, by, None).await?.file_systems)
}

/// Thaws everything as `thaw` does, for a caller that may state when its snapshot was taken. Also returns the
/// receipt.
///
/// # Errors
/// The errors of [`thaw`].
pub async fn thaw_after(guest: &Guest, by: By, cut: Option<Cut>) -> Result<Thawed, Error> {
    if let Some(outcome) = ask_keeper(guest, by, cut.clone()).await {
        return outcome;
    }
    let spoiled = {
        let mut state = guest.freezer.0.state();
        if by == By::Client { state.spoiled.take() } else { None }
    };
    if let Some(spoiled) = spoiled {
        let marker = Marker::new(&guest.freezer.0.settings.folder, &guest.root);
        // The file may be on a disk that somebody else has frozen. Reporting the reason a second time does no harm.
        let forget = blocking::attempt(move || marker.forget_spoiled());
        drop(tokio::time::timeout(TO_FORGET, forget).await);
        return Err(Error::Spoiled(spoiled.reason));
    }
    // A freeze of an agent that has ended since, with hooks that have to be run.
    let left = guest.clone();
    if blocking::attempt(move || adopt(&left)).await.unwrap_or(Err(Error::Cancelled))?
        && let Some(outcome) = ask_keeper(guest, by, cut).await
    {
        return outcome;
    }
    Ok(Thawed { file_systems: sweep(guest).await?, receipt: None })
}

/// Requests the thaw from the keeper of the freeze in progress, and returns its answer. Returns none if there is
/// no such freeze.
async fn ask_keeper(guest: &Guest, by: By, cut: Option<Cut>) -> Option<Result<Thawed, Error>> {
    let (answer, answered) = oneshot::channel();
    if let Some(running) = &guest.freezer.0.state().running {
        // The keeper reads its inbox once more before it ends.
        let _ = running.keeper.send(Message::Thaw(answer, by, cut));
    } else {
        return None;
    }
    answered.await.ok()
}

/// Thaws what others have frozen. Returns how many file systems were frozen.
async fn sweep(guest: &Guest) -> Result<u64, Error> {
    let guest = guest.clone();
    let swept = blocking::attempt(move || {
        let mut thawed = 0;
        for file_system in targets::selected(&guest.root, None)?.iter().rev() {
            let opened = targets::open(&guest.root, &*guest.effects, std::slice::from_ref(file_system));
            for target in opened.into_iter().flatten() {
                match target.thaw(&*guest.effects) {
                    Ok(times) => thawed += u64::from(times > 0),
                    Err(error) => tracing::warn!("cannot thaw {}: {error}", target.mount_point),
                }
            }
        }
        Ok(thawed)
    });
    swept.await.unwrap_or(Err(Error::Cancelled))
}
