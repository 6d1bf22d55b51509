//! The processes of a program: signals for its process group, and for all that it has started.
//!
//! Where the agent can make a control group for it, that has all of them. Elsewhere they are the processes of its session: one
//! that has made itself a session of its own is not found.
//!
//! Of a login the program's process is runuser, which waits for the login shell. logind moves them to the group of a session, which is
//! looked for as long as runuser is there: afterwards nothing says which one it was. Signals are for what runuser waits for, as it would
//! take them for the wish to end the session at once.

use nix::errno::Errno;
use nix::sys::signal::{Signal, kill, killpg};
use nix::unistd::{Pid, getpgid, getsid};

use super::pipes::Terminal;
use crate::sys::cgroup::{Cgroup, SessionScope};
use crate::sys::process::Process;
use crate::sys::root::Root;

/// Looks at all processes until no new one of the session is found: some may be starting others.
const LOOKS: usize = 16;

/// The processes of one program.
#[derive(Debug)]
pub(super) struct Members {
    root: Root,
    /// The program itself, and the number of its session and of its first process group.
    leader: Pid,
    /// Has all of them, and is removed with this.
    group: Option<Cgroup>,
    /// Those that were in its session when it was to end.
    marked: Vec<Process>,
    /// The leader is runuser.
    is_login: bool,
    /// Has those of a login, where logind has made it.
    scope: Option<SessionScope>,
}

impl Members {
    /// Of the program whose process this is, in this group.
    pub fn new(root: Root, process_id: u32, group: Option<Cgroup>) -> Self {
        let leader = Pid::from_raw(process_id.cast_signed());
        Self { root, leader, group, marked: Vec::new(), is_login: false, scope: None }
    }

    /// The same, whose process is runuser if it is a login.
    #[must_use]
    pub fn with_login(self, is_login: bool) -> Self {
        Self { is_login, ..self }
    }

    /// Finds out where a login is, as long as its process was not waited for.
    pub fn look(&mut self) {
        if self.is_login && self.scope.is_none() {
            self.scope = SessionScope::of(&self.root, self.leader.as_raw().cast_unsigned());
        }
    }

    /// Sends a signal to the foreground process group of the terminal, or to the program's own. The caller knows that the
    /// program was not waited for yet, so that its number is not somebody else's.
    ///
    /// # Errors
    /// As kill(2) gives them; that there is no such process is none.
    pub fn signal(&self, terminal: Option<&Terminal>, signal: Signal) -> Result<(), Errno> {
        // A terminal tells the number of its foreground group also when that is gone, and the number may be another one's by now.
        let is_its = |group: &Pid| getsid(Some(*group)) == Ok(self.leader);
        let foreground = terminal.and_then(Terminal::foreground).filter(is_its);
        let group = foreground.unwrap_or_else(|| self.first_group());
        if self.is_login && group == self.leader && self.signal_all_but_leader(signal) {
            return Ok(());
        }
        match killpg(group, signal) {
            Err(Errno::ESRCH) => Ok(()),
            done => done,
        }
    }

    /// The process group that the program was started in: an interactive shell makes itself one.
    fn first_group(&self) -> Pid {
        let leader = self.leader.as_raw().cast_unsigned();
        let shell = self.is_login.then(|| {
            let mut numbers = Process::numbers(&self.root).unwrap_or_default().into_iter();
            numbers.find(|number| Process::parent(&self.root, *number) == Some(leader))
        });
        let group = shell.flatten().and_then(|shell| getpgid(Some(Pid::from_raw(shell.cast_signed()))).ok());
        group.unwrap_or(self.leader)
    }

    /// Whether there is any other process in the group of the leader; all of them get the signal.
    fn signal_all_but_leader(&self, signal: Signal) -> bool {
        let numbers = Process::numbers(&self.root).unwrap_or_default().into_iter();
        let others = numbers.map(|number| Pid::from_raw(number.cast_signed()));
        let others = others.filter(|other| *other != self.leader && getpgid(Some(*other)) == Ok(self.leader));
        // The number of a group is not given again as long as a process is in it.
        others.filter(|other| kill(*other, signal).is_ok()).count() > 0
    }

    /// Remembers all of its session, as long as its number is not somebody else's: whether there is one that was not known.
    pub fn mark(&mut self) -> bool {
        if self.group.is_some() && !self.is_login {
            return false;
        }
        let numbers = Process::numbers(&self.root).unwrap_or_default();
        let of_session = |number: &u32| getsid(Some(Pid::from_raw(number.cast_signed()))) == Ok(self.leader);
        let found = numbers.into_iter().filter(of_session);
        let found = found.filter_map(|number| Process::with_number(&self.root, number));
        let new: Vec<_> = found.filter(|process| !self.marked.contains(process)).collect();
        let any = !new.is_empty();
        self.marked.extend(new);
        any
    }

    /// Kills all of them. `is_there`: the program was not waited for yet.
    pub fn kill(&mut self, is_there: bool) {
        if let Some(group) = &self.group {
            group.kill();
            if !self.is_login {
                return;
            }
        }
        if is_there {
            self.look();
        }
        if let Some(scope) = &self.scope {
            scope.kill();
        }
        // Without groups; and a login that was on its way from one to the other.
        self.kill_marked();
        for _ in 0..LOOKS {
            if !is_there || !self.mark() {
                break;
            }
            self.kill_marked();
        }
    }

    fn kill_marked(&self) {
        for process in &self.marked {
            if Process::with_number(&self.root, process.number) == Some(*process) {
                let _ = kill(Pid::from_raw(process.number.cast_signed()), Signal::SIGKILL);
            }
        }
    }
}
