//! Becoming a daemon, daemon(7), the old way: for starters that wait for the process they started to end.

use std::fs::{File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::fd::AsFd as _;
use std::path::Path;

use nix::libc;
use nix::sys::stat::{Mode, umask};
use nix::sys::wait::waitpid;
use nix::unistd::{ForkResult, chdir, dup2_stderr, dup2_stdin, dup2_stdout, fork, pipe, setsid};

/// In which process the program goes on.
#[derive(Debug)]
pub enum Process {
    /// In the one that was started; it has to end, and whether the daemon is up.
    Starter {
        /// Whether the daemon said that it is ready.
        up: bool,
    },
    /// In the daemon.
    Daemon(Starting),
}

/// A daemon whose starter waits to hear that it is up. If it ends before that, the starter hears so.
#[derive(Debug)]
pub struct Starting(File);

/// Leaves the terminal and its session. Errors can still be written to standard error, until [`Starting::ready`].
///
/// Must be called before there is a thread: only the calling one goes on in the daemon.
///
/// # Errors
/// As pipe(2), fork(2), setsid(2) and chdir(2) give them.
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
    /// The daemon is up: leaves the three standard streams and tells the starter.
    ///
    /// # Errors
    /// If /dev/null cannot be opened.
    pub fn ready(mut self) -> io::Result<()> {
        let null = OpenOptions::new().read(true).write(true).open("/dev/null")?;
        dup2_stdin(null.as_fd())?;
        dup2_stdout(null.as_fd())?;
        dup2_stderr(null.as_fd())?;
        // A starter that was killed meanwhile hears nothing.
        let _ = self.0.write_all(b"1");
        Ok(())
    }
}
