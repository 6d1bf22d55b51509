//! Makes a new process run as a user irrevocably: with that user's groups, without capabilities, unable to
//! gain any through set-user-ID programs, and killed when the thread that started it ends.

use std::io;
use std::os::unix::process::CommandExt as _;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use nix::errno::Errno;
use nix::libc;
use nix::sys::prctl;
use nix::sys::signal::Signal;

use crate::sys::spawn_manner::Identity;

/// Makes `command` start as the user `identity`.
pub(super) fn apply(command: &mut Command, identity: &Identity) {
    let Identity { uid, gid, groups } = identity.clone();
    let enter = move || -> io::Result<()> {
        // SAFETY: system calls on what lives in this closure, in a process with one thread.
        unsafe {
            Errno::result(libc::setgroups(groups.len(), groups.as_ptr()))?;
            Errno::result(libc::setresgid(gid, gid, gid))?;
            // When a process changes from root to another user, the kernel clears all of its capabilities.
            Errno::result(libc::setresuid(uid, uid, uid))?;
        }
        prctl::set_no_new_privs()?;
        // Last, because a change of the user takes it back.
        Ok(prctl::set_pdeathsig(Signal::SIGKILL)?)
    };
    // SAFETY: the closure makes system calls, and neither allocates nor takes a lock.
    unsafe { command.pre_exec(enter) };
}

/// Second process of this program that runs as a user and is talked to over its standard input and output. It
/// is killed when this value is dropped.
#[derive(Debug)]
pub struct Companion(Child);

impl Companion {
    /// Starts this program again with `arguments`, with its standard input and output.
    ///
    /// # Errors
    /// As setgroups(2), setresuid(2) and execve(2) give them.
    #[allow(clippy::disallowed_methods, reason = "this is the boundary")]
    pub fn start(arguments: &[&str], identity: &Identity) -> io::Result<(Self, ChildStdin, ChildStdout)> {
        // As it was started, whatever is at its path by now.
        let mut command = Command::new("/proc/self/exe");
        command
            .arg0("guestlet")
            .args(arguments)
            .env_clear()
            .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
            .env("LC_ALL", "C")
            .current_dir("/")
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null());
        apply(&mut command, identity);
        let mut child = command.spawn()?;
        let (input, output) = (child.stdin.take(), child.stdout.take());
        let companion = Self(child);
        let (Some(input), Some(output)) = (input, output) else {
            return Err(io::Error::other("it has no pipes"));
        };
        Ok((companion, input, output))
    }
}

impl Drop for Companion {
    fn drop(&mut self) {
        // The process may have ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[cfg(test)]
#[allow(clippy::disallowed_methods, reason = "the test needs a process")]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_a_user_without_capabilities() {
        if !nix::unistd::Uid::effective().is_root() {
            return;
        }
        let mut command = Command::new("/bin/cat");
        command.arg("/proc/self/status");
        apply(&mut command, &Identity { uid: 65534, gid: 65534, groups: vec![65533, 65534] });
        let output = command.output().unwrap();
        let status = String::from_utf8(output.stdout).unwrap();
        let value = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
            line.split_whitespace().collect::<Vec<_>>().join(" ")
        };
        assert_eq!((&*value("Uid:"), &*value("Gid:")), (&*["65534"; 4].join(" "), &*["65534"; 4].join(" ")));
        assert_eq!((&*value("Groups:"), &*value("NoNewPrivs:")), ("65533 65534", "1"));
        for set in ["CapInh:", "CapPrm:", "CapEff:", "CapAmb:"] {
            assert_eq!(value(set).trim_matches('0'), "", "{set} {status}");
        }
    }
}
