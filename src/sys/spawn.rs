//! Starts programs that callers name, in the way a service manager starts them: no state of the agent is
//! inherited.
//!
//! A program gets its own process group, `/` as its working directory, the usual umask, no blocked or ignored
//! signals, no descriptors except the three standard streams, the usual limit of descriptors, and none of the
//! protection from the OOM killer that the agent may have. It is started without a copy of the agent's memory
//! (`posix_spawn(3)`).

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use nix::errno::Errno;
use nix::sched::{CloneFlags, unshare};
use nix::sys::signal::SigSet;
use nix::sys::stat::{Mode, umask};
use nix::unistd::{AccessFlags, access};
use tokio::process::{Child, Command};
use tokio::runtime::Handle;
use tokio::sync::oneshot;

use crate::sys::descriptor;
use crate::sys::root::Root;
use crate::sys::spawn_manner::Manner;

/// Search path for programs if `PATH` is not set.
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
/// Interpreter for scripts that have no `#!` line.
const SHELL: &str = "/bin/sh";
/// Variables that the service manager sets for the agent only.
const OURS: &[&str] = &[
    "GLIBC_TUNABLES",
    "INVOCATION_ID",
    "JOURNAL_STREAM",
    "LISTEN_FDNAMES",
    "LISTEN_FDS",
    "LISTEN_PID",
    "NOTIFY_SOCKET",
    "SYSTEMD_EXEC_PID",
    "WATCHDOG_PID",
    "WATCHDOG_USEC",
];
/// The stack of the thread that starts a program, in bytes.
const STACK: usize = 128 * 1024;

/// Program to start.
#[derive(Debug)]
pub struct Start {
    /// The name of the program; looked for in `PATH` if it has no `/`. Its own name for itself, too.
    pub program: OsString,
    /// Arguments after the program's name.
    pub arguments: Vec<OsString>,
    /// Complete environment; the agent's if absent.
    pub environment: Option<Vec<(OsString, OsString)>>,
    /// Standard input, output and error; /dev/null where absent.
    pub streams: [Option<OwnedFd>; 3],
    /// As whom and where it runs, if not as the agent in `/`.
    pub manner: Option<Manner>,
}

/// Starts a program. `may` is called with the path that remains after every link is followed, and exactly that
/// path is executed. Runs on its own thread, because a disk may hang. With a manner, errors of [`Manner`] are
/// reported as such.
///
/// # Errors
/// If `may` refuses; the errors of execve(2).
pub async fn start<E>(
    root: Root,
    start: Start,
    may: Option<impl Fn(&Path) -> Result<(), E> + Send + 'static>,
) -> Result<Child, E>
where
    E: From<io::Error> + Send + 'static,
{
    let runtime = Handle::current();
    let (started, child) = oneshot::channel();
    let begin = move || {
        let _runtime = runtime.enter();
        let folder = start.manner.as_ref().map(Manner::directory);
        let child = locate(&start.program, folder).map_err(E::from).and_then(|found| {
            let found = match may {
                None => found,
                Some(may) => {
                    let whole = std::fs::canonicalize(found)?;
                    may(&whole)?;
                    whole
                }
            };
            Ok(spawn(&root, &start, &found)?)
        });
        // If no task waits for it, it is reaped nevertheless.
        drop(started.send(child));
    };
    // A thread that is used once: what it changes of itself ends with it.
    drop(std::thread::Builder::new().name("start".to_owned()).stack_size(STACK).spawn(begin)?);
    child.await.unwrap_or_else(|_| Err(io::Error::other("the starting thread ended").into()))
}

/// Returns the path of a program, as a shell would find it whose working directory is `folder`, or the
/// agent's.
fn locate(program: &OsStr, folder: Option<&Path>) -> io::Result<PathBuf> {
    if program.is_empty() {
        return Err(Errno::ENOENT.into());
    }
    if program.as_bytes().contains(&b'/') {
        // Made whole, because the program itself gets another working directory.
        return folder.map_or_else(|| std::path::absolute(program), |folder| Ok(folder.join(program)));
    }
    let mut refusal = Errno::ENOENT;
    let path = std::env::var_os("PATH").unwrap_or_else(|| PATH.into());
    for folder in std::env::split_paths(&path).filter(|folder| folder.is_absolute()) {
        let candidate = folder.join(program);
        match access(&candidate, AccessFlags::X_OK) {
            Ok(()) if candidate.is_file() => return Ok(candidate),
            Ok(()) | Err(Errno::EACCES) => refusal = Errno::EACCES,
            Err(_) => {}
        }
    }
    Err(refusal.into())
}

fn spawn(root: &Root, start: &Start, found: &Path) -> io::Result<Child> {
    // With a file-system context of its own the thread's umask is not the agent's.
    if unshare(CloneFlags::CLONE_FS).is_ok() {
        umask(Mode::S_IWGRP | Mode::S_IWOTH);
    }
    SigSet::empty().thread_set_mask()?;
    let mut begun = command(start, found.as_ref(), &start.program, None)?.spawn();
    if begun.as_ref().is_err_and(|error| error.raw_os_error() == Some(Errno::ENOEXEC as i32)) {
        // A script that does not say what runs it: as with execvp(3) the shell does.
        begun = command(start, SHELL.as_ref(), SHELL.as_ref(), Some(found))?.spawn();
    }
    let child = begun?;
    unprotect(root, &child);
    if let Some(pid) = child.id() {
        descriptor::limit_as_before(pid);
    }
    Ok(child)
}

#[allow(clippy::disallowed_methods, reason = "this is the boundary")]
fn command(start: &Start, program: &OsStr, name: &OsStr, script: Option<&Path>) -> io::Result<Command> {
    let mut command = std::process::Command::new(program);
    command.arg0(name).args(script).args(&start.arguments);
    match &start.manner {
        None => {
            command.current_dir("/").process_group(0);
        }
        Some(manner) => manner.apply(&mut command)?,
    }
    match &start.environment {
        Some(environment) => {
            // If a variable occurs twice, programs see the first one. `envs` would keep the last one, hence the reversed
            // order.
            command.env_clear().envs(environment.iter().rev().map(|(name, value)| (name, value)));
        }
        None => {
            for name in OURS {
                command.env_remove(name);
            }
        }
    }
    let [input, output, errors] = &start.streams;
    let stream = |descriptor: &Option<OwnedFd>| match descriptor {
        Some(descriptor) => descriptor.try_clone().map(Stdio::from),
        None => Ok(Stdio::null()),
    };
    command.stdin(stream(input)?).stdout(stream(output)?).stderr(stream(errors)?);
    Ok(command.into())
}

/// The kernel may kill it for its memory, even if the agent is protected from that.
#[allow(clippy::disallowed_methods, reason = "this is the boundary")]
fn unprotect(root: &Root, child: &Child) {
    let (own, Some(pid)) = (root.line("/proc/self/oom_score_adj"), child.id()) else { return };
    if own.starts_with('-')
        && let Err(error) = std::fs::write(root.path(&format!("/proc/{pid}/oom_score_adj")), "0")
    {
        tracing::debug!("cannot unprotect process {pid}: {error}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_are_found_as_a_shell_finds_them() {
        let locate = |program: &str| locate(program.as_ref(), Some(Path::new("/here")));
        let found = locate("sh").unwrap();
        assert!(found.ends_with("sh") && found.is_absolute(), "{}", found.display());
        assert_eq!(locate("/no/such").unwrap(), Path::new("/no/such"));
        assert_eq!(locate("usr/bin/env").unwrap(), Path::new("/here/usr/bin/env"));
        assert_eq!(locate("./env").unwrap(), Path::new("/here/./env"));
        for missing in ["", "no-such-program-anywhere"] {
            assert_eq!(locate(missing).unwrap_err().kind(), io::ErrorKind::NotFound, "{missing}");
        }
    }
}
