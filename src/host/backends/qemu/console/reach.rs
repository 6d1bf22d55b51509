//! Connects to the consoles that QEMU has named, and verifies that they belong to QEMU.

use std::io;
use std::path::Path;
use std::time::Duration;

use tokio::net::UnixStream;

use super::super::super::consoles::ConsoleError;
use super::found::taken;
use crate::sys::pseudo_terminal;
use crate::transport::BoxStream;
use crate::transport::serial::Line;

/// Timeout of a connection attempt.
const SOON: Duration = Duration::from_secs(5);

/// Connects to this socket, if the process that listens there has the PID `qemu`.
pub async fn socket(path: &Path, qemu: Option<i32>) -> Result<BoxStream, ConsoleError> {
    let connected = tokio::time::timeout(SOON, UnixStream::connect(path)).await;
    let connected = connected.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()));
    let stream = connected.map_err(|error| match error.kind() {
        // Its backlog is full.
        io::ErrorKind::WouldBlock => taken(),
        _ => {
            ConsoleError::Unreachable(format!("cannot connect to the console at {}: {error}", path.display()))
        }
    })?;
    let peer = stream.peer_cred().ok().and_then(|peer| peer.pid());
    // The kernel reports 0 for a process in another PID namespace.
    if peer == qemu && peer.is_some_and(|process| process > 0) {
        return Ok(Box::new(stream));
    }
    let who = |process: Option<i32>| match process {
        Some(process) if process > 0 => format!("the process {process}"),
        _ => "an unknown process".to_owned(),
    };
    Err(ConsoleError::Foreign(format!(
        "the socket of the console, {}, was made by {}, and the QMP socket by {}: it is not this VM's, or a manager such as \
         libvirt made one of them; a console of type pty is reached in a domain of libvirt",
        path.display(),
        who(peer),
        who(qemu)
    )))
}

/// Opens the pseudo-terminal at this path, if it belongs to the user that QEMU runs as. More cannot be checked
/// without inspecting QEMU's process. Without this check, a QEMU that its guest has taken over could name the
/// terminal of another user.
pub fn terminal(path: &Path, owner: u32) -> Result<BoxStream, ConsoleError> {
    let opened = pseudo_terminal::open_of(path, owner).and_then(Line::of);
    let line = opened.map_err(|error| {
        let words = format!("cannot open the console at {}: {error}", path.display());
        match error.kind() {
            io::ErrorKind::PermissionDenied | io::ErrorKind::InvalidInput => ConsoleError::Foreign(words),
            _ => ConsoleError::Unreachable(words),
        }
    })?;
    Ok(Box::new(line))
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;

    #[tokio::test]
    async fn a_socket_of_another_process_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("console");
        let listener = tokio::net::UnixListener::bind(&path).unwrap();
        let own = i32::try_from(std::process::id()).ok();
        let mut stream = socket(&path, own).await.unwrap();
        let (mut seen, _) = listener.accept().await.unwrap();
        seen.write_all(b"x").await.unwrap();
        assert_eq!(stream.read_u8().await.unwrap(), b'x');
        for other in [Some(1), None, Some(0)] {
            let error = socket(&path, other).await.err().unwrap();
            assert!(matches!(error, ConsoleError::Foreign(_)), "{other:?} {error}");
        }
        let gone = socket(&folder.path().join("none"), own).await.err().unwrap();
        assert!(matches!(gone, ConsoleError::Unreachable(_)), "{gone}");
    }

    #[tokio::test]
    async fn a_terminal_of_another_user_is_refused() {
        let pair = nix::pty::openpty(None, None).unwrap();
        let path = nix::unistd::ttyname(&pair.slave).unwrap();
        let own = nix::unistd::geteuid().as_raw();
        let mut line = terminal(&path, own).unwrap();
        nix::unistd::write(&pair.master, b"x").unwrap();
        assert_eq!(line.read_u8().await.unwrap(), b'x');
        for (path, uid) in
            [(path.as_path(), own + 1), (Path::new("/dev/null"), own), (Path::new("/dev/pts/../null"), own)]
        {
            let error = terminal(path, uid).err().unwrap();
            assert!(matches!(error, ConsoleError::Foreign(_)), "{error}");
        }
    }
}
