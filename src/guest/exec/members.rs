//! Processes of a program: signals for its process group, and for everything that it has started.
//!
//! Where the agent can create a control group for the program, that contains all of them. Elsewhere they are the
//! processes of its session; one that has created a session of its own is not found.
//!
//! The process of a login is runuser, which waits for the login shell. logind moves both to the control group of a
//! session, which can be looked up only while runuser exists. Signals are sent to the processes that runuser waits
//! for, because runuser would take them as a request to end the session at once.

use nix::errno::Errno;
use nix::sys::signal::{Signal, kill, killpg};
use nix::unistd::{Pid, getpgid, getsid};

use super::pipes::Terminal;
use crate::sys::cgroup::{Cgroup, SessionScope};
use crate::sys::process::Process;
use crate::sys::root::Root;

/// Maximum number of scans for new processes of the session: processes may be starting others meanwhile.
const LOOKS: usize = 16;

/// Processes of one program.
#[derive(Debug)]
pub(super) struct Members {
    root: Root,
    /// Process of the program; its PID is also the number of the session and of its first process group.
    leader: Pid,
    /// Control group with all processes of the program; removed when this is dropped.
    group: Option<Cgroup>,
    /// Processes that were in the program's session when it was asked to end.
    marked: Vec<Process>,
    /// True if the leader is runuser.
    is_login: bool,
    /// Session scope with the processes of a login, where logind has created one.
    scope: Option<SessionScope>,
}

impl Members {
    /// Creates the members of the program with this process and, if there is one, this control group.
    pub fn new(root: Root, process_id: u32, group: Option<Cgroup>) -> Self {
        let leader = Pid::from_raw(process_id.cast_signed());
        Self { root, leader, group, marked: Vec::new(), is_login: false, scope: None }
    }

    /// Sets whether the program is a login, so that its process is runuser.
    #[must_use]
    pub fn with_login(self, is_login: bool) -> Self {
        Self { is_login, ..self }
    }

    /// Looks up the session scope of a login. Only possible before its process is waited for.
    pub fn look(&mut self) {
        if self.is_login && self.scope.is_none() {
            self.scope = SessionScope::of(&self.root, self.leader.as_raw().cast_unsigned());
        }
    }

    /// Sends a signal to the foreground process group of the terminal, or to the program's own. The caller makes sure
    /// that the program was not waited for yet, so that its number does not belong to another process.
    ///
    /// # Errors
    /// As returned by kill(2), except that a process that no longer exists is no error.
    pub fn signal(&self, terminal: Option<&Terminal>, signal: Signal) -> Result<(), Errno> {
        // A terminal also reports a foreground group that no longer exists, whose number may be in use by an unrelated
        // group.
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

    /// Returns the process group that the program was started in: an interactive shell creates one for itself.
    fn first_group(&self) -> Pid {
        let leader = self.leader.as_raw().cast_unsigned();
        let shell = self.is_login.then(|| {
            let mut numbers = Process::numbers(&self.root).unwrap_or_default().into_iter();
            numbers.find(|number| Process::parent(&self.root, *number) == Some(leader))
        });
        let group = shell.flatten().and_then(|shell| getpgid(Some(Pid::from_raw(shell.cast_signed()))).ok());
        group.unwrap_or(self.leader)
    }

    /// Sends the signal to every other process in the group of the leader. Returns whether any was reached.
    fn signal_all_but_leader(&self, signal: Signal) -> bool {
        let numbers = Process::numbers(&self.root).unwrap_or_default().into_iter();
        let others = numbers.map(|number| Pid::from_raw(number.cast_signed()));
        let others = others.filter(|other| *other != self.leader && getpgid(Some(*other)) == Ok(self.leader));
        // The number of a process group is not reused while a process is in it.
        others.filter(|other| kill(*other, signal).is_ok()).count() > 0
    }

    /// Remembers all processes of the session, and returns whether there was a new one. Only valid while the number of
    /// the session cannot belong to another one.
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

    /// Kills all processes. `is_there` means that the program was not waited for yet.
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
        // Needed without control groups, and for a login that is being moved from one group to the other.
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
