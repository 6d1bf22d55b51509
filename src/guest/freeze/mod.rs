//! Freezes the guest's file systems for a snapshot, and always thaws them.
//!
//! One thread, the keeper (`cycle`), lives for each freeze and owns its state. It touches no file system itself:
//! what can block (paths, `FIFREEZE`, `FITHAW`, hooks) runs on threads and in processes of its own, which report to it.
//! Neither the event loop nor a caller that goes away stops it.
//!
//! ```text
//!            freeze            each hook        all are open and in the marker
//! Thawed ───────────▶ Hooks ──────────▶ Opening ─────────────────────────────▶ Freezing ──all frozen──▶ Frozen
//!   ▲                   │                  │        only "always" commands        │                       │
//!   │                   │ a failure, or a thaw is asked for; or the deadline      │     thaw, or deadline │
//!   │                   ▼                  ▼                                      ▼                       │
//!   └────────────── hooks told ◀───────────────────────────────────────────── Thawing ◀───────────────────┘
//! ```
//!
//! What outlasts the agent is in the [`marker`]; who thaws when the agent is gone is in [`recover`]: a guardian process
//! at once, else the service manager, else the agent's next run, which starts frozen before it serves anybody.
//! How a freeze [ended](end) is told as an event, too, and each leaves a [receipt](receipts).
//!
//! Which file systems, and in which order, is the [`plan`]; the programs around it are the [`hook`]s. After these, and before
//! anything is opened, [`applications`] are held; after the thaw they are released.

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

/// How long the answer to a thaw waits until it is written down that it was given.
const TO_FORGET: Duration = Duration::from_secs(2);

/// What the settings say about freezes.
#[derive(Debug, Clone)]
pub struct Settings {
    /// A program, or a folder of programs, to tell before a freeze and after a thaw.
    pub hook: Option<PathBuf>,
    /// How long each hook may take.
    pub hook_deadline: Duration,
    /// How long all hooks may take together, as whoever asks for a freeze does not wait longer.
    pub hooks_deadline: Duration,
    /// Applications that take part.
    pub applications: applications::Settings,
    /// Where receipts are kept; nowhere if that is not known.
    pub receipts: Option<PathBuf>,
    /// How long file systems may be frozen; then they are thawed whatever happens.
    pub deadline: Duration,
    /// Where the marker is kept: in memory, and lost with the next boot.
    pub folder: PathBuf,
    /// A process of this program guards each freeze. Only for the agent's own program.
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
            // The journal's own watchdog ends it after 3 minutes.
            deadline: Duration::from_secs(120),
            folder: "/var/run".into(),
            guarded: false,
        }
    }
}

/// Who asks for a thaw.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum By {
    /// A client, as whoever froze.
    Client,
    /// A person in the guest. Whoever froze is told with the next thaw.
    Person,
}

/// What a thaw has come to.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Thawed {
    /// How many file systems were frozen.
    pub file_systems: u64,
    /// The receipt of their freeze; none if there was none.
    pub receipt: Option<Told>,
}

/// How things stand.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Status {
    /// Nothing is frozen.
    Thawed {
        /// Why the last freeze was none in the end, until somebody who asks for a thaw is told.
        spoiled: Option<String>,
    },
    /// A freeze is not over.
    Busy {
        /// Who asked for it.
        holder: String,
        /// Since when.
        since: SystemTime,
        /// What it does, such as `frozen`.
        stage: String,
        /// The file systems that are frozen.
        file_systems: Vec<String>,
        /// When they are thawed without being asked to; absent as long as nothing is frozen.
        left: Option<Duration>,
    },
}

/// The freezes of this machine; clones share them.
#[derive(Debug, Clone, Default)]
pub struct Freezer(Arc<Shared>);

type Later = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct Shared {
    settings: Settings,
    state: Mutex<State>,
    /// Keeps the receipts.
    clerk: Option<Clerk>,
    /// File systems are frozen, or about to be.
    restricted: AtomicBool,
    /// Counts up when a freeze is over.
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

/// The freeze that is not over.
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
        // Nothing that is done under the lock leaves the state half changed.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Freezer {
    /// Without a freeze.
    pub fn new(settings: Settings) -> Self {
        let clerk = settings.receipts.as_ref().map(|directory| Clerk::new(&settings.folder, directory));
        Self(Arc::new(Shared { settings, clerk, ..Shared::default() }))
    }

    /// Who keeps the receipts of freezes.
    pub fn clerk(&self) -> Option<&Clerk> {
        self.0.clerk.as_ref()
    }

    /// File systems are frozen, or about to be: only what writes nothing may be done.
    pub fn restricts(&self) -> bool {
        self.0.restricted.load(Ordering::SeqCst)
    }

    /// How things stand.
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

    /// Who holds the freeze, in words for an error; empty without one.
    pub fn held(&self) -> String {
        match self.status() {
            Status::Thawed { .. } => String::new(),
            Status::Busy { holder, since, stage, .. } => {
                let age = since.elapsed().unwrap_or_default().as_secs();
                format!("{holder} requested a freeze {age} s ago, which is still in progress ({stage})")
            }
        }
    }

    /// Does `work` now, or as soon as nothing is frozen any more: for what writes files.
    pub fn unfrozen(&self, work: impl FnOnce() + Send + 'static) {
        let mut state = self.0.state();
        if self.restricts() && state.running.is_some() {
            state.after_thaw.push(Box::new(work));
        } else {
            drop(state);
            work();
        }
    }

    /// No freeze begins any more. Completes when none is left; whoever waits for less can thaw meanwhile.
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

    /// How long it can take until nothing is frozen, whatever happens.
    pub fn longest(&self) -> Duration {
        self.0.settings.deadline + self.0.settings.hooks_deadline * 2 + applications::RELEASE
    }
}

/// Begins where an earlier run of the agent has ended: frozen, if it left file systems so. To be called before anybody
/// is served: until then nobody can tell whether something is frozen, or why it is not any more.
///
/// # Errors
/// If what was left frozen cannot be looked after.
pub fn begin(guest: &Guest) -> Result<(), Error> {
    let marker = Marker::new(&guest.freezer.0.settings.folder, &guest.root);
    // In this order: whoever thaws in place of an agent first writes down why, and then removes the marker.
    let left = adopt(guest)?;
    if let Some(clerk) = guest.freezer.clerk().filter(|_| !left) {
        // Those that an earlier run, or whoever thawed in its place, has left.
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

/// Takes charge of a freeze that an agent that is gone has left; false if there is none.
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

/// Freezes the file systems at the mount points of `which`, or all. Says how many it froze. `caller` asks for it.
///
/// # Errors
/// If another freeze is not over, or one cannot be frozen; nothing is frozen then.
pub async fn freeze(guest: &Guest, which: Option<Vec<String>>, caller: &Caller) -> Result<u64, Error> {
    let (answer, answered) = oneshot::channel();
    start(guest, caller, false, move |cycle| cycle.run(which.as_deref(), answer))?;
    answered.await.unwrap_or(Err(Error::Cancelled))
}

/// Starts a keeper. `frozen` says that there is something frozen already.
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

/// Thaws everything, whoever froze it, and says how many file systems were frozen. A freeze that is under way ends.
///
/// # Errors
/// Once, if the freeze has ended by itself before; if a file system cannot be thawed, or a hook fails.
pub async fn thaw(guest: &Guest, by: By) -> Result<u64, Error> {
    Ok(thaw_after(guest, by, None).await?.file_systems)
}

/// The same for somebody who says that a snapshot was taken while everything was frozen; tells of the receipt, too.
///
/// # Errors
/// As [`thaw`].
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
        // It may be on a disk that somebody else has frozen. Whoever is told once more is not misled.
        let forget = blocking::attempt(move || marker.forget_spoiled());
        drop(tokio::time::timeout(TO_FORGET, forget).await);
        return Err(Error::Spoiled(spoiled.reason));
    }
    // Of an agent that is gone by now, with hooks that are to be told.
    let left = guest.clone();
    if blocking::attempt(move || adopt(&left)).await.unwrap_or(Err(Error::Cancelled))?
        && let Some(outcome) = ask_keeper(guest, by, cut).await
    {
        return outcome;
    }
    Ok(Thawed { file_systems: sweep(guest).await?, receipt: None })
}

/// What the keeper of the freeze that is not over says to a thaw; nothing if there is none.
async fn ask_keeper(guest: &Guest, by: By, cut: Option<Cut>) -> Option<Result<Thawed, Error>> {
    let (answer, answered) = oneshot::channel();
    if let Some(running) = &guest.freezer.0.state().running {
        // The keeper looks into its inbox once more before it goes.
        let _ = running.keeper.send(Message::Thaw(answer, by, cut));
    } else {
        return None;
    }
    answered.await.ok()
}

/// Thaws what others froze.
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
