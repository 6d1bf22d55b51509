//! As whom, where and in what a program is started, beyond what every program gets: a user with its groups, a directory, a
//! session of its own with or without a terminal, and a cgroup.
//!
//! All of it is done in the new process, between fork(2) and execve(2), where nothing may allocate or take a lock.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use nix::errno::Errno;
use nix::libc;

/// Distance between the error numbers of two steps. A failed step reports its number, from 1, times this
/// value, plus the errno, which distinguishes it from an error of execve(2). The steps are the cgroup, the
/// session with its terminal, the user, and the directory.
const STEP: i32 = 10_000;

/// User and groups that a program runs as.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity {
    /// User ID.
    pub uid: u32,
    /// Primary group ID.
    pub gid: u32,
    /// Supplementary group IDs, for setgroups(2).
    pub groups: Vec<u32>,
}

/// Settings with which a program is started.
#[derive(Debug)]
pub struct Manner {
    identity: Identity,
    directory: PathBuf,
    /// True if the program starts in `/` when the directory cannot be entered.
    or_root: bool,
    has_terminal: bool,
    cgroup: Option<OwnedFd>,
}

/// The step before execve(2) that failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// The cgroup.procs could not be written.
    Cgroup,
    /// Session, or its terminal, which could not be created.
    Session,
    /// User that the process could not become.
    Identity,
    /// The directory cannot be entered by the user.
    Directory,
}

const STEPS: [Step; 4] = [Step::Cgroup, Step::Session, Step::Identity, Step::Directory];

/// Returns the step that an error of a start belongs to, and the error itself; `None` if it is an error of
/// execve(2), or occurred earlier.
pub fn step(error: &io::Error) -> Option<(Step, io::Error)> {
    let number = error.raw_os_error()?;
    let step = STEPS.get(usize::try_from(number / STEP).ok()?.checked_sub(1)?)?;
    Some((*step, io::Error::from_raw_os_error(number % STEP)))
}

fn failed(step: Step) -> impl Fn(Errno) -> io::Error {
    move |errno| io::Error::from_raw_os_error((step as i32 + 1) * STEP + errno as i32)
}

fn done(result: libc::c_int, step: Step) -> io::Result<()> {
    Errno::result(result).map(drop).map_err(failed(step))
}

impl Manner {
    /// As this user, in this directory, in a session of its own, whose terminal is its standard input if it has one.
    pub fn new(identity: Identity, directory: PathBuf, has_terminal: bool) -> Self {
        Self { identity, directory, or_root: false, has_terminal, cgroup: None }
    }

    /// Sets whether the program starts in `/` if the user cannot enter the directory.
    #[must_use]
    pub fn or_in_root(self, or_root: bool) -> Self {
        Self { or_root, ..self }
    }

    /// Sets the cgroup to start in: its cgroup.procs, open for writing.
    #[must_use]
    pub fn in_cgroup(self, procs: Option<OwnedFd>) -> Self {
        Self { cgroup: procs, ..self }
    }

    /// Returns the working directory.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Sets up `command` so that it starts in this way.
    ///
    /// # Errors
    /// If the directory contains a NUL byte, or no descriptor is available.
    pub(super) fn apply(&self, command: &mut Command) -> io::Result<()> {
        let directory = CString::new(self.directory.as_os_str().as_bytes())?;
        let Identity { uid, gid, groups } = self.identity.clone();
        let (has_terminal, or_root) = (self.has_terminal, self.or_root);
        let cgroup = self.cgroup.as_ref().map(OwnedFd::try_clone).transpose()?;
        let enter = move || {
            if let Some(procs) = &cgroup {
                nix::unistd::write(procs, b"0").map_err(failed(Step::Cgroup))?;
            }
            // SAFETY: system calls on what lives in this closure, in a process with one thread.
            unsafe {
                done(libc::setsid(), Step::Session)?;
                if has_terminal {
                    done(libc::ioctl(libc::STDIN_FILENO, libc::TIOCSCTTY, 0), Step::Session)?;
                    libc::tcsetpgrp(libc::STDIN_FILENO, libc::getpid());
                }
                done(libc::setgroups(groups.len(), groups.as_ptr()), Step::Identity)?;
                done(libc::setresgid(gid, gid, gid), Step::Identity)?;
                done(libc::setresuid(uid, uid, uid), Step::Identity)?;
                if or_root && libc::chdir(directory.as_ptr()) != 0 {
                    return done(libc::chdir(c"/".as_ptr()), Step::Directory);
                }
                done(libc::chdir(directory.as_ptr()), Step::Directory)
            }
        };
        // SAFETY: the closure makes system calls, and neither allocates nor takes a lock.
        unsafe { command.pre_exec(enter) };
        Ok(())
    }
}

/// Gives the program's end of a terminal to its user, as login(1) does.
///
/// # Errors
/// The errors of fchown(2).
pub fn give_terminal(terminal: &OwnedFd, identity: &Identity) -> io::Result<()> {
    // SAFETY: system calls on a descriptor that lives.
    unsafe {
        Errno::result(libc::fchown(terminal.as_raw_fd(), identity.uid, libc::gid_t::MAX))?;
        Errno::result(libc::fchmod(terminal.as_raw_fd(), 0o620))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_of_steps_are_told_from_those_of_execve() {
        for (place, wanted) in STEPS.into_iter().enumerate() {
            assert_eq!(wanted as usize, place);
            let (step, error) = step(&failed(wanted)(Errno::EACCES)).unwrap();
            assert_eq!((step, error.raw_os_error()), (wanted, Some(Errno::EACCES as i32)));
        }
        assert!(step(&Errno::ENOENT.into()).is_none());
        assert!(step(&io::Error::other("x")).is_none());
    }

    #[test]
    #[allow(clippy::disallowed_methods, reason = "the test needs a process")]
    fn a_program_has_a_session_and_the_directory() {
        let root = Identity { uid: 0, gid: 0, groups: vec![0] };
        let mut command = Command::new("/bin/sh");
        command.args(["-c", "pwd; ps -o sid= -p $$; echo $$"]);
        Manner::new(root.clone(), "/usr".into(), false).apply(&mut command).unwrap();
        if !nix::unistd::Uid::effective().is_root() {
            return;
        }
        let output = command.output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        let mut lines = text.lines().map(str::trim);
        assert_eq!(lines.next(), Some("/usr"));
        assert_eq!(lines.next(), lines.next(), "{text}");

        let mut command = Command::new("/bin/true");
        Manner::new(root, "/no/such".into(), false).apply(&mut command).unwrap();
        let (step, error) = step(&command.spawn().unwrap_err()).unwrap();
        assert_eq!((step, error.kind()), (Step::Directory, io::ErrorKind::NotFound));
    }
}
