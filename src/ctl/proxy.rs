//! `guestctl proxy`: connects standard input and output with `guestlet-host`, for a guestctl elsewhere that
//! has started this one on the machine with the socket.

use std::io;
use std::os::fd::AsFd as _;
use std::path::PathBuf;

use tokio::io::{AsyncWriteExt as _, Interest, copy};
use tokio::net::unix::pipe;

use super::{Error, client};

/// Copies data in both directions until the daemon ends the connection, or the reader of the output closes
/// it.
///
/// # Errors
/// Fails if the daemon is not running, or standard input or output is not a pipe.
pub async fn run(socket: PathBuf) -> Result<(), Error> {
    let stream = client::dial(socket).await?;
    let (mut from_daemon, mut to_daemon) = stream.into_split();
    let own = || -> io::Result<_> {
        let input = pipe::Receiver::from_owned_fd(io::stdin().as_fd().try_clone_to_owned()?)?;
        let output = pipe::Sender::from_owned_fd(io::stdout().as_fd().try_clone_to_owned()?)?;
        Ok((input, output))
    };
    let (mut input, mut output) = own().map_err(Error::NoPipe)?;
    let sending = async {
        // Whatever ends the copy, the daemon then ends the connection.
        drop(copy(&mut input, &mut to_daemon).await);
        drop(to_daemon.shutdown().await);
        std::future::pending::<()>().await;
    };
    // While no data arrives, only this detects that the process at the other end has ended.
    let unread = io::stdout().as_fd().try_clone_to_owned().and_then(pipe::Sender::from_owned_fd);
    let unread = unread.map_err(Error::NoPipe)?;
    tokio::select! {
        _ = copy(&mut from_daemon, &mut output) => {}
        () = sending => {}
        _ = unread.ready(Interest::ERROR) => {}
    }
    Ok(())
}
