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

/// What is added to the number of an error of a step, so that it is told from one of execve(2): of leaving for the directory, of
/// becoming the user, of the terminal, of the cgroup.
const STEP: i32 = 10_000;

/// Who a program is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity {
    /// The user.
    pub uid: u32,
    /// Its own group.
    pub gid: u32,
    /// All its groups.
    pub groups: Vec<u32>,
}

/// How a program is started.
#[derive(Debug)]
pub struct Manner {
    identity: Identity,
    directory: PathBuf,
    /// Where the directory cannot be entered, it starts in `/`.
    or_root: bool,
    has_terminal: bool,
    cgroup: Option<OwnedFd>,
}

/// The step before execve(2) that failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// The cgroup.procs could not be written.
    Cgroup,
    /// There is no session, or no terminal for it.
    Session,
    /// It cannot be the user.
    Identity,
    /// The directory cannot be entered by the user.
    Directory,
}

const STEPS: [Step; 4] = [Step::Cgroup, Step::Session, Step::Identity, Step::Directory];

/// Which step an error of a start is about, and what it is; none if it is of execve(2), or came before.
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

    /// In `/` where the user cannot enter the directory.
    #[must_use]
    pub fn or_in_root(self, or_root: bool) -> Self {
        Self { or_root, ..self }
    }

    /// In the cgroup whose cgroup.procs this is, open for writing.
    #[must_use]
    pub fn in_cgroup(self, procs: Option<OwnedFd>) -> Self {
        Self { cgroup: procs, ..self }
    }

    /// Where it starts.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Has `command` start so.
    ///
    /// # Errors
    /// If the directory has a NUL byte, or there are no descriptors.
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
/// As fchown(2) gives them.
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
