//! Runs a program in a process group of its own, from threads: for work that must go on whatever the event loop does,
//! as around a freeze.

use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::prctl;
use nix::sys::signal::{SigHandler, SigSet, Signal, killpg, signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::unistd::Pid;

use crate::sys::as_user;
use crate::sys::spawn_manner::Identity;

/// Bytes of output that are kept: the last ones.
const TAIL: usize = 2048;
/// These threads wait, and do little else.
const STACK: usize = 256 * 1024;

/// Result of a program that has ended.
#[derive(Debug)]
pub struct Ended {
    /// Exit status.
    pub status: io::Result<ExitStatus>,
    /// The end of what it wrote to its standard output and error.
    pub tail: String,
}

/// A program that runs. Dropping it leaves it running.
#[derive(Debug)]
pub struct Group(Pid);

impl Group {
    /// Starts `program` with `arguments` and a clean environment. When it has ended, `ended` is called on another
    /// thread, even if other processes still hold its output open. A program that is started as a user cannot
    /// change that user, and is killed when the calling thread ends.
    ///
    /// # Errors
    /// The errors of execve(2).
    #[allow(clippy::disallowed_methods, reason = "this is the boundary")]
    pub fn start(
        program: &Path,
        arguments: &[&str],
        identity: Option<&Identity>,
        ended: impl FnOnce(Ended) + Send + 'static,
    ) -> io::Result<Self> {
        let (output, writer) = io::pipe()?;
        let mut command = Command::new(program);
        command
            .args(arguments)
            .env_clear()
            .env("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
            .env("LC_ALL", "C")
            .current_dir("/")
            .process_group(0)
            .stdin(Stdio::null())
            .stdout(writer.try_clone()?)
            .stderr(writer);
        if let Some(identity) = identity {
            as_user::apply(&mut command, identity);
        }
        let child = command.spawn()?;
        // Closes this process's copy of the write end, so that only the program holds it.
        drop(command);
        let group = Self(Pid::from_raw(child.id().cast_signed()));
        let (stop, stopped) = io::pipe()?;
        let (send, tail) = channel();
        thread("output", move || read_tail(&output.into(), &stop.into(), &send))?;
        thread("program", move || ended(wait(child, stopped.into(), &tail)))?;
        Ok(group)
    }

    /// Ends it, and every process that it has started and that is still in its group.
    pub fn kill(&self) {
        // The process may have ended already.
        let _ = killpg(self.0, Signal::SIGKILL);
    }
}

/// Starts a thread with a small stack, for work that is mostly waiting.
///
/// # Errors
/// If the system cannot start another thread.
#[allow(clippy::disallowed_methods, reason = "this is the boundary")]
pub fn thread(name: &str, work: impl FnOnce() + Send + 'static) -> io::Result<()> {
    let stack = if cfg!(debug_assertions) { STACK * 8 } else { STACK };
    std::thread::Builder::new().name(name.to_owned()).stack_size(stack).spawn(work).map(drop)
}

fn wait(mut child: Child, stopped: OwnedFd, tail: &Receiver<String>) -> Ended {
    let status = child.wait();
    drop(stopped);
    Ended { status, tail: tail.recv().unwrap_or_default() }
}

/// Reads to the end of the output, or to what is there when `stop` is closed, and sends the last of it.
fn read_tail(output: &OwnedFd, stop: &OwnedFd, send: &Sender<String>) {
    let mut kept = Vec::new();
    let mut timeout = PollTimeout::NONE;
    loop {
        let mut files =
            [PollFd::new(output.as_fd(), PollFlags::POLLIN), PollFd::new(stop.as_fd(), PollFlags::POLLIN)];
        match poll(&mut files, timeout) {
            Ok(0) => break,
            Ok(_) | Err(Errno::EINTR) => {}
            Err(_) => break,
        }
        if files[0].any() == Some(true) {
            let mut part = [0; 1024];
            match nix::unistd::read(output, &mut part) {
                Ok(0) | Err(_) => break,
                Ok(length) => kept.extend_from_slice(part.get(..length).unwrap_or_default()),
            }
            let surplus = kept.len().saturating_sub(TAIL);
            kept.drain(..surplus);
        } else if files[1].any() == Some(true) {
            break;
        }
        if files[1].any() == Some(true) {
            timeout = PollTimeout::ZERO;
        }
    }
    let _ = send.send(String::from_utf8_lossy(&kept).trim().to_owned());
}

/// Signal that the kernel sends to a guardian when the thread that started it ends.
const ORPHANED: Signal = Signal::SIGUSR1;

/// Second process of this program, which acts when this process ends or takes too long.
///
/// The guardian detects the end of this process in two ways, because neither is sufficient. The pipe reports
/// end-of-file as soon as its other end is closed; but a killed process keeps its descriptors until its last
/// thread has ended, and a thread that writes to a frozen file system does not end before the thaw. (For the
/// same reason a pidfd reports nothing.) The parent-death signal of prctl(2) belongs to the single thread that
/// started the guardian, and is sent when that thread ends. Therefore a guardian is started by a thread that
/// never blocks on anything that could hang, and that lives as long as the guarded operation.
#[derive(Debug)]
pub struct Guardian {
    child: Child,
    line: Option<ChildStdin>,
}

impl Guardian {
    /// Starts this program again with `arguments`, to guard the calling thread. Its standard input is a pipe that
    /// only this process holds. Once this returns, the guardian detects the end of the thread.
    ///
    /// # Errors
    /// The errors of execve(2).
    #[allow(clippy::disallowed_methods, reason = "this is the boundary")]
    pub fn start(arguments: &[&std::ffi::OsStr]) -> io::Result<Self> {
        // As it was started, whatever is at its path by now.
        let mut command = Command::new("/proc/self/exe");
        // SAFETY: it makes two system calls, and neither allocates nor takes a lock.
        unsafe { command.pre_exec(hear_of_the_end) };
        let mut child = command
            .arg0("guestlet")
            .args(arguments)
            .env_remove("NOTIFY_SOCKET")
            .env_remove("LISTEN_FDS")
            .env_remove("LISTEN_PID")
            .current_dir("/")
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()?;
        let line = child.stdin.take();
        Ok(Self { child, line })
    }

    /// From now on it counts the time.
    pub fn alert(&mut self) {
        self.say(b'a');
    }

    /// From now on it does not.
    pub fn calm(&mut self) {
        self.say(b'c');
    }

    fn say(&mut self, word: u8) {
        if let Some(line) = &mut self.line {
            // The guardian may have ended, or have been killed.
            let _ = io::Write::write_all(line, &[word]);
        }
    }

    /// Dismisses the guardian, which is no longer needed.
    pub fn dismiss(mut self) {
        self.say(b'd');
        drop(self.line.take());
        // A guardian that waits for the disk of its program does not read the message, and has nothing left to do.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Prepares the new process before it becomes the guardian: requests the parent-death signal, and blocks it
/// until the guardian reads it, because its program has no handler at first.
fn hear_of_the_end() -> io::Result<()> {
    SigSet::from(ORPHANED).thread_block()?;
    Ok(prctl::set_pdeathsig(ORPHANED)?)
}

/// Message that a guardian receives about the guarded process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Word {
    /// Dismissal: the guardian is no longer needed.
    Dismissed,
    /// The thread that is guarded has ended without a word; others of its process may be about to.
    Ending,
    /// The process has ended without a word.
    Gone,
    /// Silence until the deadline.
    Silence,
}

/// Ignores, in a guardian, the signals that are meant for the process that it guards.
///
/// # Errors
/// The errors of sigaction(2).
pub fn stay() -> io::Result<()> {
    for name in [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP, Signal::SIGPIPE] {
        // SAFETY: to ignore a signal runs no code of ours.
        unsafe { signal(name, SigHandler::SigIgn) }?;
    }
    Ok(())
}

/// Waits, as the guardian of `process`, for a message on standard input or the end of the guarded thread;
/// after an alert, for at most `longest`.
///
/// # Errors
/// The errors of signalfd(2).
pub fn listen(process: u32, longest: Duration) -> io::Result<Word> {
    let input = io::stdin();
    let ends = SignalFd::with_flags(&SigSet::from(ORPHANED), SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK)?;
    let mut deadline: Option<Instant> = None;
    loop {
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        let timeout =
            left.map_or(PollTimeout::NONE, |left| PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX));
        let mut files =
            [PollFd::new(input.as_fd(), PollFlags::POLLIN), PollFd::new(ends.as_fd(), PollFlags::POLLIN)];
        match poll(&mut files, timeout) {
            Ok(0) if left == Some(Duration::ZERO) => return Ok(Word::Silence),
            Ok(0) | Err(Errno::EINTR) => continue,
            Err(_) => return Ok(Word::Gone),
            Ok(_) => {}
        }
        // First what was said before the end.
        if files[0].any() == Some(true) {
            let mut byte = [0];
            match nix::unistd::read(&input, &mut byte) {
                Ok(1) if byte == *b"a" => deadline = Some(Instant::now() + longest),
                Ok(1) if byte == *b"c" => deadline = None,
                Ok(1) => return Ok(Word::Dismissed),
                Err(Errno::EINTR) => {}
                _ => return Ok(Word::Gone),
            }
        } else if let Ok(Some(signal)) = ends.read_signal()
            && signal.ssi_pid == process
        {
            // Anybody else's says nothing.
            return Ok(Word::Ending);
        }
    }
}

/// Returns whether the guarded process has ended with all its threads, after waiting for at most `longest`.
pub fn has_ended_within(longest: Duration) -> bool {
    let input = io::stdin();
    let mut files = [PollFd::new(input.as_fd(), PollFlags::POLLIN)];
    let timeout = PollTimeout::try_from(longest).unwrap_or(PollTimeout::MAX);
    poll(&mut files, timeout).is_ok_and(|ready| ready > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(script: &str) -> (Group, Receiver<Ended>) {
        let (send, ended) = channel();
        let group = Group::start(Path::new("/bin/sh"), &["-c", script], None, move |end| {
            let _ = send.send(end);
        });
        (group.unwrap(), ended)
    }

    const PATIENCE: Duration = Duration::from_secs(30);

    #[test]
    fn the_end_of_what_it_says_is_kept() {
        let (_group, ended) = run("seq 100000; echo last >&2; exit 3");
        let ended = ended.recv_timeout(PATIENCE).unwrap();
        assert_eq!(ended.status.unwrap().code(), Some(3));
        assert!(ended.tail.ends_with("100000\nlast"), "{}", ended.tail);
        assert!(ended.tail.len() <= TAIL);
    }

    #[test]
    fn one_that_leaves_another_behind_has_ended_and_both_can_be_killed() {
        let begun = Instant::now();
        let (group, ended) = run("sleep 100 & echo done");
        let end = ended.recv_timeout(PATIENCE).unwrap();
        assert!(end.status.unwrap().success() && end.tail == "done", "{}", end.tail);
        group.kill();
        let (group, ended) = run("sleep 100 & sleep 100");
        group.kill();
        assert!(!ended.recv_timeout(PATIENCE).unwrap().status.unwrap().success());
        assert!(begun.elapsed() < PATIENCE);
    }
}
