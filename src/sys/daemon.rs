//! Becoming a daemon, daemon(7), the old way: for starters that wait for the process they started to end.

use std::fs::{File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::fd::AsFd as _;
use std::path::Path;

use nix::libc;
use nix::sys::stat::{Mode, umask};
use nix::sys::wait::waitpid;
use nix::unistd::{ForkResult, chdir, dup2_stderr, dup2_stdin, dup2_stdout, fork, pipe, setsid};

/// Process in which the program continues after the fork.
#[derive(Debug)]
pub enum Process {
    /// Process that was started by the user; it has to exit now.
    Starter {
        /// True if the daemon reported that it is ready.
        up: bool,
    },
    /// Daemon process.
    Daemon(Starting),
}

/// Daemon whose starter waits for it to be ready. If the daemon ends before that, the starter is notified as
/// well.
#[derive(Debug)]
pub struct Starting(File);

/// Detaches from the terminal and its session. Errors can still be written to standard error, until
/// [`Starting::ready`].
///
/// Must be called before any thread is started: only the calling thread continues in the daemon.
///
/// # Errors
/// The errors of pipe(2), fork(2), setsid(2) and chdir(2).
pub fn start() -> io::Result<Process> {
    let (heard, said) = pipe()?;
    let (mut heard, said) = (File::from(heard), File::from(said));
    // SAFETY: there is no other thread, so the child finds every lock free.
    if let ForkResult::Parent { child } = unsafe { fork() }? {
        drop(said);
        let _ = waitpid(child, None);
        let up = heard.read(&mut [0]).is_ok_and(|length| length == 1);
        return Ok(Process::Starter { up });
    }
    drop(heard);
    setsid()?;
    // The daemon leads no session, so no terminal that it opens becomes its own.
    // SAFETY: as above.
    if let ForkResult::Parent { .. } = unsafe { fork() }? {
        // SAFETY: ends this process and nothing else; what the program has set up is the daemon's now.
        unsafe { libc::_exit(0) };
    }
    nix::fcntl::fcntl(&said, nix::fcntl::FcntlArg::F_SETFD(nix::fcntl::FdFlag::FD_CLOEXEC))?;
    umask(Mode::S_IRWXG | Mode::S_IRWXO);
    chdir(Path::new("/"))?;
    Ok(Process::Daemon(Starting(said)))
}

impl Starting {
    /// Closes the three standard streams and notifies the starter that the daemon is up.
    ///
    /// # Errors
    /// If /dev/null cannot be opened.
    pub fn ready(mut self) -> io::Result<()> {
        let null = OpenOptions::new().read(true).write(true).open("/dev/null")?;
        dup2_stdin(null.as_fd())?;
        dup2_stdout(null.as_fd())?;
        dup2_stderr(null.as_fd())?;
        // The starter may have been killed meanwhile.
        let _ = self.0.write_all(b"1");
        Ok(())
    }
}
