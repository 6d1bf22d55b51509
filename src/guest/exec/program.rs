//! One program, from its start until it is forgotten: [`Program`] is what others hold of it, [`Attendance`] looks after it.
//!
//! ```text
//!  rpc ──input, signals──▶ State ◀──outputs, status── Attendance ──▶ pipes, child
//!   ▲                        │ news                       ▲
//!   └────────────────────────┘                            └── work: room, input, a wish to end
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

/// Bytes taken from a pipe at once.
const PART: usize = 64 * 1024;
/// How long it is kept how a program ended.
const KEPT_FOR: Duration = Duration::from_secs(600);

/// What is told of a program.
#[derive(Debug, Clone)]
pub struct Standing {
    /// Its identifier.
    pub id: String,
    /// Of its process.
    pub process_id: u32,
    /// The user that it runs as.
    pub user: String,
    /// The command line, for people.
    pub command: String,
    /// When it was started.
    pub started: SystemTime,
    /// It has a terminal.
    pub has_terminal: bool,
    /// Somebody is attached.
    pub is_attached: bool,
    /// How it ended, if it did.
    pub ended: Option<Ended>,
}

/// How many outputs a program has: on a terminal all is one.
pub(super) fn outputs(has_terminal: bool) -> usize {
    if has_terminal { 1 } else { 2 }
}

/// How the input of a program stands, all at one time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Input {
    /// Bytes that it was given.
    pub taken: u64,
    /// Bytes that have arrived, those included that it was not given yet.
    pub received: u64,
    /// No more are taken.
    pub has_ended: bool,
    /// The number of the one from whom the newest came.
    pub from: Option<u64>,
}

/// What does not change of a program.
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

/// A program, for those who may use it.
#[derive(Debug)]
pub struct Program {
    pub(super) about: About,
    terminal: Option<Terminal>,
    members: Mutex<Members>,
    state: Mutex<State>,
    /// There may be news for whoever is attached.
    news: watch::Sender<()>,
    /// There may be work for the attendance.
    work: watch::Sender<()>,
}

/// Somebody who is attached; gone when this is dropped.
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
    /// The program.
    pub fn program(&self) -> &Arc<Program> {
        &self.program
    }

    /// How many were attached before, and this one.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// What is to be told next; waits until there is something.
    pub async fn next(&mut self) -> News {
        loop {
            self.news.borrow_and_update();
            let news = self.program.state().news(self.number, &mut self.position);
            if news != News::Nothing || self.news.changed().await.is_err() {
                return news;
            }
        }
    }

    /// Takes input from this one; see [`State::give`]. Nothing is taken, and nothing told, once somebody else is attached: that one
    /// was told which byte comes next.
    pub fn give(&self, offset: u64, bytes: &[u8]) -> Option<bool> {
        let number = self.number;
        self.program.change(|state| state.is_attached_to(number).then(|| state.give(offset, bytes)))
    }

    /// No input comes after so many bytes; see [`State::end_input`]. As with [`Self::give`], only the last to attach says so.
    pub fn end_input(&self, at: u64) -> Option<bool> {
        let number = self.number;
        self.program.change(|state| state.is_attached_to(number).then(|| state.end_input(at)))
    }

    /// Bytes before these numbers have arrived.
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

    /// Its identifier.
    pub fn id(&self) -> &str {
        &self.about.id
    }

    /// Whether it has a terminal.
    pub fn has_terminal(&self) -> bool {
        self.terminal.is_some()
    }

    /// Whether it reads what it is sent.
    pub fn has_input(&self) -> bool {
        self.about.has_input
    }

    /// Bytes of its outputs that are kept, or of one that has not ended those that may be.
    pub(super) fn most_kept(&self) -> usize {
        self.state().most_kept(outputs(self.has_terminal()))
    }

    /// It has ended, and nobody is being told of it.
    pub(super) fn is_spent(&self) -> bool {
        let state = self.state();
        state.ended().is_some() && !state.is_attached()
    }

    /// How its input stands.
    pub fn input(&self) -> Input {
        let state = self.state();
        Input {
            taken: state.input_taken(),
            received: state.input_received(),
            has_ended: state.input_has_ended(),
            from: state.input_from(),
        }
    }

    /// What is told of it.
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

    /// Attaches somebody, in the place of whoever was; the first bytes wanted are these, or the oldest that there are.
    pub fn attach(self: &Arc<Self>, from: [Option<u64>; 2]) -> Attached {
        let mut state = self.state();
        let number = state.attach();
        let [output, errors] = state.oldest();
        let outputs = [from[0].unwrap_or(output), from[1].unwrap_or(errors)];
        let position = Position { outputs, input: state.input_taken() };
        drop(state);
        let news = self.news.subscribe();
        self.news.send_replace(());
        // What was due because nobody was attached is not any more.
        self.work.send_replace(());
        Attached { program: Arc::clone(self), number, position, news }
    }

    /// It needs nobody to be attached from now on.
    pub fn detach(&self) {
        self.change(|state| state.away = Away::GoesOn);
    }

    /// How it ended was told, and need not be kept.
    pub fn forget(&self) {
        self.change(|state| state.forgotten |= state.ended().is_some());
    }

    /// Gives its terminal another size, if it has one.
    ///
    /// # Errors
    /// As the kernel gives them.
    pub fn resize(&self, size: Size) -> io::Result<()> {
        self.terminal.as_ref().map_or(Ok(()), |terminal| terminal.resize(size))
    }

    /// Sends a signal to its foreground process group; SIGKILL goes to all that it has started. One that has ended has none.
    ///
    /// # Errors
    /// As kill(2) gives them.
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

    /// Asks it to end, and kills all of it if it does not; at once what is left of one that has ended by itself.
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

    /// Whether its process is there, or was not waited for.
    fn is_there(&self) -> bool {
        self.about.process_id != 0 && !self.state().was_waited_for
    }

    fn change<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        let changed = change(&mut self.state());
        self.work.send_replace(());
        changed
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Nothing that is done under the lock leaves it half changed.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn members(&self) -> MutexGuard<'_, Members> {
        self.members.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Completes when a process has ended that is there.
async fn ended(exit: Option<&process_end::Process>) {
    match exit {
        Some(exit) => exit.ended().await,
        None => std::future::pending().await,
    }
}

/// What an attendance waits for.
struct Plan {
    /// Bytes that may be taken of each output.
    room: [usize; 2],
    /// There is input for the program.
    feed: bool,
    due: Option<(Instant, Due)>,
    /// It was killed, and nobody wants what it has written.
    given_up: bool,
}

/// Looks after one program.
pub(super) struct Attendance {
    pub program: Arc<Program>,
    pub child: Child,
    /// Its end, where something has to be looked at before it is waited for.
    pub exit: Option<process_end::Process>,
    pub outputs: [Option<Source>; 2],
    pub input: Option<Sink>,
    /// When it has run for as long as it may.
    pub limit: Option<Instant>,
    /// How long its outputs are waited for after its end.
    pub patience: Duration,
    /// Held while it runs.
    pub place: OwnedSemaphorePermit,
    /// Is told how it ended.
    pub on_end: Option<OnEnd>,
}

impl Attendance {
    /// Until the program is to be forgotten.
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
                // What is in its pipes is not lost because somebody reads slowly.
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
                // Somebody may have attached meanwhile.
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
            // A program need not read what it is given.
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
