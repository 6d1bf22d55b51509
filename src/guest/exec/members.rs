//! The processes of a program: signals for its process group, and for all that it has started.
//!
//! Where the agent can make a control group for it, that has all of them. Elsewhere they are the processes of its session: one
//! that has made itself a session of its own is not found.

use nix::errno::Errno;
use nix::sys::signal::{Signal, kill, killpg};
use nix::unistd::{Pid, getsid};

use super::pipes::Terminal;
use crate::sys::cgroup::Cgroup;
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
}

impl Members {
    /// Of the program whose process this is, in this group.
    pub fn new(root: Root, process_id: u32, group: Option<Cgroup>) -> Self {
        Self { root, leader: Pid::from_raw(process_id.cast_signed()), group, marked: Vec::new() }
    }

    /// Sends a signal to the foreground process group of the terminal, or to the program's own. The caller knows that the
    /// program was not waited for yet, so that its number is not somebody else's.
    ///
    /// # Errors
    /// As kill(2) gives them; that there is no such process is none.
    pub fn signal(&self, terminal: Option<&Terminal>, signal: Signal) -> Result<(), Errno> {
        // A terminal tells the number of its foreground group also when that is gone, and the number may be another one's by now.
        let is_its = |group: &Pid| getsid(Some(*group)) == Ok(self.leader);
        let group = terminal.and_then(Terminal::foreground).filter(is_its).unwrap_or(self.leader);
        match killpg(group, signal) {
            Err(Errno::ESRCH) => Ok(()),
            done => done,
        }
    }

    /// Remembers all of its session, as long as its number is not somebody else's: whether there is one that was not known.
    pub fn mark(&mut self) -> bool {
        if self.group.is_some() {
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
            return;
        }
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
