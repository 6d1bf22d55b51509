//! Work in the network namespace of another process.
//!
//! A thread that has entered one is used once and ends in it: no other work ever runs on it. Sockets stay in the
//! namespace in which they were made, wherever they are used later.

use std::fs::File;
use std::io;

use nix::errno::Errno;
use nix::sched::{CloneFlags, setns};
use tokio::sync::oneshot;

use super::process::Process;
use super::root::Root;

/// The stack of such a thread, in bytes.
const STACK: usize = 128 * 1024;

/// Runs `work` in the network namespace of `process`, and returns its result.
///
/// # Errors
/// `ESRCH` if the process ended before or during the work, so that its number may belong to another process;
/// the errors of `setns(2)`, which needs `CAP_SYS_ADMIN`, and of opening the namespace, which needs
/// `CAP_SYS_PTRACE`.
pub async fn inside<T: Send + 'static>(
    root: Root,
    process: Process,
    work: impl FnOnce() -> T + Send + 'static,
) -> io::Result<T> {
    let (send, done) = oneshot::channel();
    let enter = move || {
        // The caller may no longer wait.
        drop(send.send(enter(&root, process, work)));
    };
    drop(std::thread::Builder::new().name("namespace".to_owned()).stack_size(STACK).spawn(enter)?);
    done.await.unwrap_or_else(|_| Err(io::Error::other("the thread in the namespace ended")))
}

fn enter<T>(root: &Root, process: Process, work: impl FnOnce() -> T) -> io::Result<T> {
    let namespace = File::open(root.path(&format!("/proc/{}/ns/net", process.number)))?;
    // The number may have become another's before the namespace was opened, but not without this being seen.
    still(root, process)?;
    setns(namespace, CloneFlags::CLONE_NEWNET)?;
    let done = work();
    still(root, process)?;
    Ok(done)
}

fn still(root: &Root, process: Process) -> io::Result<()> {
    if Process::with_number(root, process.number).as_ref() == Some(&process) {
        return Ok(());
    }
    Err(Errno::ESRCH.into())
}

#[cfg(test)]
#[allow(clippy::disallowed_methods, reason = "the test needs a process in another namespace")]
mod tests {
    use std::os::linux::net::SocketAddrExt as _;
    use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
    use std::process::{Child, Command};

    use super::*;

    /// A process in a network namespace of its own; none where this one may not make any.
    fn elsewhere() -> Option<Child> {
        let mut child = Command::new("unshare").args(["--net", "sleep", "1000"]).spawn().unwrap();
        let root = Root::default();
        let own = link(&root, std::process::id());
        // The child first runs unshare(1), still in the old namespace, and then executes sleep(1) in the new one.
        while link(&root, child.id()) == own {
            if child.try_wait().unwrap().is_some() {
                return None;
            }
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        Some(child)
    }

    fn link(root: &Root, number: u32) -> Option<std::path::PathBuf> {
        std::fs::read_link(root.path(&format!("/proc/{number}/ns/net"))).ok()
    }

    fn thread_link() -> Option<std::path::PathBuf> {
        std::fs::read_link("/proc/thread-self/ns/net").ok()
    }

    fn address() -> SocketAddr {
        SocketAddr::from_abstract_name(format!("guestlet-test-{}", std::process::id())).unwrap()
    }

    #[tokio::test]
    async fn work_is_done_in_there_and_its_sockets_stay_in_there() {
        if !nix::unistd::geteuid().is_root() {
            return;
        }
        let Some(mut child) = elsewhere() else { return };
        let root = Root::default();
        let process = Process::with_number(&root, child.id()).unwrap();
        // Abstract unix sockets belong to a network namespace each, as vsock's contexts do that are local.
        let listen = || (thread_link(), UnixListener::bind_addr(&address()));
        let (inside, listener) = inside(root.clone(), process, listen).await.unwrap();
        let listener = listener.unwrap();
        assert_eq!(inside, link(&root, child.id()));
        assert_ne!(inside, thread_link());
        assert!(UnixStream::connect_addr(&address()).is_err(), "it is not in this namespace");
        let reached =
            super::inside(root.clone(), process, || UnixStream::connect_addr(&address())).await.unwrap();
        drop(reached.unwrap());
        drop(listener);
        child.kill().unwrap();
        child.wait().unwrap();
        let error = super::inside(root, process, || ()).await.unwrap_err();
        assert!(matches!(error.raw_os_error(), Some(nix::libc::ENOENT | nix::libc::ESRCH)), "{error}");
    }

    #[tokio::test]
    async fn a_number_that_is_given_again_is_not_entered() {
        let root = Root::default();
        let own = Process::with_number(&root, std::process::id()).unwrap();
        let before = Process { started: own.started + 1, ..own };
        let error = inside(root, before, || panic!("it went on")).await.unwrap_err();
        assert_eq!(error.raw_os_error(), Some(nix::libc::ESRCH));
    }
}
