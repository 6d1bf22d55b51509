//! One program, from its start until it is forgotten: [`Program`] is the handle for others, [`Attendance`] looks
//! after it.
//!
//! ```text
//!  rpc ──input, signals──▶ State ◀──outputs, status── Attendance ──▶ pipes, child
//!   ▲                        │ news                       ▲
//!   └────────────────────────┘                            └── work: space, input, a request to end
//! ```

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use nix::sys::signal::Signal;
use tokio::process::Child;
use tokio::sync::{OwnedSemaphorePermit, watch};
use tokio::time::sleep_until;

use super::OnEnd;
use super::members::Members;
use super::pipes::{Sink, Source, Terminal};
use super::state::{Away, Due, Ended, Fate, GRACE, News, Position, State};
use crate::sys::process_end;
use crate::sys::terminal::Size;

/// Maximum number of bytes read from a pipe at once.
const PART: usize = 64 * 1024;
/// Time for which the end of a program is remembered.
const KEPT_FOR: Duration = Duration::from_secs(600);

/// Description of a program, for lists.
#[derive(Debug, Clone)]
pub struct Standing {
    /// Identifier that the client has chosen.
    pub id: String,
    /// PID of the program's process.
    pub process_id: u32,
    /// Name of the user that the program runs as.
    pub user: String,
    /// Command line, for people.
    pub command: String,
    /// Time of the start.
    pub started: SystemTime,
    /// True if the program runs on a terminal.
    pub has_terminal: bool,
    /// True if a client is attached.
    pub is_attached: bool,
    /// End of the program; `None` while it runs.
    pub ended: Option<Ended>,
}

/// Returns the number of outputs of a program: a terminal merges output and errors into one.
pub(super) fn outputs(has_terminal: bool) -> usize {
    if has_terminal { 1 } else { 2 }
}

/// Consistent snapshot of the input of a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Input {
    /// Bytes that were given to the program.
    pub taken: u64,
    /// Bytes that have arrived, including those that were not given to the program yet.
    pub received: u64,
    /// True if the end of the input is known, so that no more is accepted.
    pub has_ended: bool,
    /// Number of the client that has sent the newest input.
    pub from: Option<u64>,
}

/// Properties of a program that do not change while it runs.
#[derive(Debug)]
pub(super) struct About {
    pub id: String,
    pub owner: String,
    pub process_id: u32,
    pub user: String,
    pub command: String,
    pub started: SystemTime,
    pub has_input: bool,
}

/// Program, as a handle for those who may use it.
#[derive(Debug)]
pub struct Program {
    pub(super) about: About,
    terminal: Option<Terminal>,
    members: Mutex<Members>,
    state: Mutex<State>,
    /// Notifies the attached client that there may be a new message.
    news: watch::Sender<()>,
    /// Notifies the `Attendance` that there may be work for it.
    work: watch::Sender<()>,
}

/// Attachment of a client to a program; dropping it detaches the client.
#[derive(Debug)]
pub struct Attached {
    program: Arc<Program>,
    number: u64,
    position: Position,
    news: watch::Receiver<()>,
}

impl Drop for Attached {
    fn drop(&mut self) {
        self.program.state().leave(self.number, Instant::now());
        self.program.work.send_replace(());
    }
}

impl Attached {
    /// Returns the program that the client is attached to.
    pub fn program(&self) -> &Arc<Program> {
        &self.program
    }

    /// Returns the number of this attachment, counted from 1 in the order of attaching.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// Returns the next message for the client, and waits until there is one.
    pub async fn next(&mut self) -> News {
        loop {
            self.news.borrow_and_update();
            let news = self.program.state().news(self.number, &mut self.position);
            if news != News::Nothing || self.news.changed().await.is_err() {
                return news;
            }
        }
    }

    /// Takes input from this client; see [`State::give`]. Returns `None`, and takes nothing, once another client is
    /// attached: that one was given the number of the next byte.
    pub fn give(&self, offset: u64, bytes: &[u8]) -> Option<bool> {
        let number = self.number;
        self.program.change(|state| state.is_attached_to(number).then(|| state.give(offset, bytes)))
    }

    /// Ends the input after this many bytes; see [`State::end_input`]. As with [`Self::give`], only the last client to
    /// attach can do so.
    pub fn end_input(&self, at: u64) -> Option<bool> {
        let number = self.number;
        self.program.change(|state| state.is_attached_to(number).then(|| state.end_input(at)))
    }

    /// Acknowledges the output bytes before these numbers.
    pub fn acknowledge(&self, before: [u64; 2]) {
        self.program.state().acknowledge(before);
        self.program.work.send_replace(());
    }
}

impl Program {
    pub(super) fn new(about: About, terminal: Option<Terminal>, members: Members, state: State) -> Self {
        let (news, work) = (watch::Sender::new(()), watch::Sender::new(()));
        Self { about, terminal, members: members.into(), state: state.into(), news, work }
    }

    /// Returns the identifier that the client has chosen.
    pub fn id(&self) -> &str {
        &self.about.id
    }

    /// Returns whether the program runs on a terminal.
    pub fn has_terminal(&self) -> bool {
        self.terminal.is_some()
    }

    /// Returns whether the program has an input that clients can write to.
    pub fn has_input(&self) -> bool {
        self.about.has_input
    }

    /// Returns the bytes of output that are kept; for a running program, the maximum that may be kept.
    pub(super) fn most_kept(&self) -> usize {
        self.state().most_kept(outputs(self.has_terminal()))
    }

    /// Returns whether the program has ended and no client is attached that is to be notified of it.
    pub(super) fn is_spent(&self) -> bool {
        let state = self.state();
        state.ended().is_some() && !state.is_attached()
    }

    /// Returns a consistent snapshot of the program's input.
    pub fn input(&self) -> Input {
        let state = self.state();
        Input {
            taken: state.input_taken(),
            received: state.input_received(),
            has_ended: state.input_has_ended(),
            from: state.input_from(),
        }
    }

    /// Returns the description of the program for lists.
    pub fn standing(&self) -> Standing {
        let state = self.state();
        let About { id, process_id, user, command, started, .. } = &self.about;
        Standing {
            id: id.clone(),
            process_id: *process_id,
            user: user.clone(),
            command: command.clone(),
            started: *started,
            has_terminal: self.has_terminal(),
            is_attached: state.is_attached(),
            ended: state.ended().cloned(),
        }
    }

    /// Attaches a client in place of the one before. Its outputs begin at the given byte numbers, or at the oldest
    /// bytes that are kept.
    pub fn attach(self: &Arc<Self>, from: [Option<u64>; 2]) -> Attached {
        let mut state = self.state();
        let number = state.attach();
        let [output, errors] = state.oldest();
        let outputs = [from[0].unwrap_or(output), from[1].unwrap_or(errors)];
        let position = Position { outputs, input: state.input_taken() };
        drop(state);
        let news = self.news.subscribe();
        self.news.send_replace(());
        // Let the attendance compute its deadlines again: the one for a program without a client no longer applies.
        self.work.send_replace(());
        Attached { program: Arc::clone(self), number, position, news }
    }

    /// Lets the program keep running without a client from now on.
    pub fn detach(&self) {
        self.change(|state| state.away = Away::GoesOn);
    }

    /// Marks the end of the program as delivered, so that it need not be kept. Ignored while the program runs.
    pub fn forget(&self) {
        self.change(|state| state.forgotten |= state.ended().is_some());
    }

    /// Changes the size of the program's terminal, if it has one.
    ///
    /// # Errors
    /// The errors of the kernel.
    pub fn resize(&self, size: Size) -> io::Result<()> {
        self.terminal.as_ref().map_or(Ok(()), |terminal| terminal.resize(size))
    }

    /// Sends a signal to the foreground process group; SIGKILL goes to all processes of the program. A program that
    /// has ended gets no signal but SIGKILL, for processes that it has left.
    ///
    /// # Errors
    /// The errors of kill(2).
    pub fn signal(&self, signal: Signal) -> io::Result<()> {
        let mut members = self.members();
        let is_there = self.is_there();
        if signal == Signal::SIGKILL {
            members.kill(is_there);
            drop(members);
            self.change(|state| state.fate = Fate::Killed);
            return Ok(());
        }
        if is_there {
            members.signal(self.terminal.as_ref(), signal)?;
        }
        Ok(())
    }

    /// Asks the program to end, and kills all of its processes if it does not. If it has ended already, kills its
    /// leftover processes at once.
    pub fn end(&self) {
        if self.state().ended().is_some() {
            self.members().kill(false);
        } else {
            self.ask(Signal::SIGTERM);
        }
    }

    fn ask(&self, signal: Signal) {
        let mut members = self.members();
        if self.is_there() {
            members.mark();
            if let Err(error) = members.signal(None, signal) {
                tracing::debug!("program {}: {error}", self.about.id);
            }
        }
        drop(members);
        self.change(|state| {
            if state.fate == Fate::Runs {
                state.fate = Fate::Asked(Instant::now());
            }
        });
    }

    /// Returns whether the process still exists, or has not been waited for: only then is its number certain to be its
    /// own.
    fn is_there(&self) -> bool {
        self.about.process_id != 0 && !self.state().was_waited_for
    }

    fn change<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        let changed = change(&mut self.state());
        self.work.send_replace(());
        changed
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // No step under the lock can leave the state half changed, so a poisoned lock is safe to use.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn members(&self) -> MutexGuard<'_, Members> {
        self.members.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Completes when the process has ended; never if there is none to watch.
async fn ended(exit: Option<&process_end::Process>) {
    match exit {
        Some(exit) => exit.ended().await,
        None => std::future::pending().await,
    }
}

/// Events that an attendance waits for.
struct Plan {
    /// Bytes that may be read from each output.
    room: [usize; 2],
    /// True if input is pending for the program.
    feed: bool,
    due: Option<(Instant, Due)>,
    /// True if the program was killed and no client needs its output.
    given_up: bool,
}

/// Task that looks after one program.
pub(super) struct Attendance {
    pub program: Arc<Program>,
    pub child: Child,
    /// Watch for the end of the process, where its members must be looked up before the process is waited for.
    pub exit: Option<process_end::Process>,
    pub outputs: [Option<Source>; 2],
    pub input: Option<Sink>,
    /// Time at which the program has to be ended.
    pub limit: Option<Instant>,
    /// Time for which the outputs are still read after the program has ended.
    pub patience: Duration,
    /// Slot of a running program, held until it has ended.
    pub place: OwnedSemaphorePermit,
    /// Callback that receives the end of the program.
    pub on_end: Option<OnEnd>,
}

impl Attendance {
    /// Looks after the program until it can be forgotten.
    pub async fn run(mut self) {
        let mut work = self.program.work.subscribe();
        let mut status = None;
        let mut patience = None;
        loop {
            let Plan { room, feed, due, given_up } = self.plan();
            let waits = (0..2).any(|which| self.outputs[which].is_some() && room[which] == 0);
            if status.is_some() {
                if self.outputs.iter().all(Option::is_none) || given_up || is_over(patience) {
                    break;
                }
                // As long as a full ring waits for a slow client, the time does not run:
                // what is in the pipes must not be lost.
                patience =
                    if waits { None } else { patience.or_else(|| Some(Instant::now() + self.patience)) };
            }
            let [output, errors] = &self.outputs;
            tokio::select! {
                () = Source::readable(output.as_ref()), if room[0] > 0 => self.take(0, room[0]),
                () = Source::readable(errors.as_ref()), if room[1] > 0 => self.take(1, room[1]),
                () = Sink::writable(self.input.as_ref()), if feed => self.feed(),
                () = ended(self.exit.as_ref()), if self.exit.is_some() => {
                    self.program.members().look();
                    self.exit = None;
                }
                ended = self.child.wait(), if status.is_none() && self.exit.is_none() => {
                    self.program.state().was_waited_for = true;
                    status = Some(ended.map_err(|error| error.to_string()));
                }
                _ = work.changed() => {}
                () = at(due.map(|(when, _)| when)) => {}
                () = at(patience) => {}
            }
            if due.is_some_and(|(when, _)| when <= Instant::now()) {
                // Check again: a client may have attached in the meantime.
                let due = self.program.state().due(self.limit);
                if let Some((when, due)) = due
                    && when <= Instant::now()
                {
                    self.act(due);
                }
            }
            tokio::task::consume_budget().await;
        }
        let cut_off = self.outputs.iter().any(Option::is_some);
        let status = status.unwrap_or_else(|| Err("it was not waited for".to_owned()));
        let ended = self.program.change(|state| {
            state.end(status, cut_off);
            state.ended().cloned()
        });
        self.program.news.send_replace(());
        if let Some((on_end, ended)) = self.on_end.take().zip(ended) {
            on_end(&ended);
        }
        drop((self.outputs, self.input, self.place));
        let forget = async { while !self.program.state().forgotten && work.changed().await.is_ok() {} };
        let _ = tokio::time::timeout(KEPT_FOR, forget).await;
        self.program.state().forgotten = true;
        self.program.news.send_replace(());
    }

    fn plan(&mut self) -> Plan {
        let mut state = self.program.state();
        if state.has_no_more_input()
            && let Some(input) = self.input.take()
        {
            input.end();
        }
        let mut feed = !state.waiting_input().is_empty();
        if feed && self.input.is_none() {
            state.refuse_input();
            self.program.news.send_replace(());
            feed = false;
        }
        Plan {
            room: [state.room(0), state.room(1)],
            feed,
            due: state.due(self.limit),
            given_up: state.fate == Fate::Killed && !state.is_attached(),
        }
    }

    fn take(&mut self, which: usize, room: usize) {
        let Some(source) = &self.outputs[which] else { return };
        let mut part = vec![0; room.min(PART)];
        match source.read(&mut part) {
            None => return,
            Some(Ok(0) | Err(_)) => self.outputs[which] = None,
            Some(Ok(length)) => self.program.state().written(which, &part[..length]),
        }
        self.program.news.send_replace(());
    }

    fn feed(&mut self) {
        let mut state = self.program.state();
        match self.input.as_ref().map(|input| input.write(state.waiting_input())) {
            Some(None) => return,
            Some(Some(Ok(length))) => state.take_input(length),
            // No error to report: a program need not read its input.
            Some(Some(Err(_))) | None => {
                state.refuse_input();
                self.input = None;
            }
        }
        drop(state);
        self.program.news.send_replace(());
    }

    fn act(&self, due: Due) {
        let program = &self.program;
        match due {
            Due::HangUp => {
                tracing::info!("terminating program {}: no client is attached any more", program.about.id);
                program.ask(Signal::SIGHUP);
            }
            Due::TimeOut => {
                program.state().timed_out = true;
                program.ask(Signal::SIGTERM);
            }
            Due::Kill => {
                tracing::info!(
                    "killing program {}: it has not ended within {} s",
                    program.about.id,
                    GRACE.as_secs()
                );
                let _ = program.signal(Signal::SIGKILL);
            }
        }
    }
}

fn is_over(time: Option<Instant>) -> bool {
    time.is_some_and(|time| time <= Instant::now())
}

async fn at(time: Option<Instant>) {
    match time {
        Some(time) => sleep_until(time.into()).await,
        None => std::future::pending().await,
    }
}
