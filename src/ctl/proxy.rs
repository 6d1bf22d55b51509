//! `guestctl proxy`: standard input and output are a connection with `guestlet-host`, for a guestctl elsewhere that has started
//! this one where the socket is.

use std::io;
use std::os::fd::AsFd as _;
use std::path::PathBuf;

use tokio::io::{AsyncWriteExt as _, Interest, copy};
use tokio::net::unix::pipe;

use super::{Error, client};

/// Passes on what comes from each side, until the daemon ends the connection, or nobody reads any more.
///
/// # Errors
/// If there is no daemon, or standard input or output is no pipe.
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
        // Whatever ends it, the daemon ends the connection then.
        drop(copy(&mut input, &mut to_daemon).await);
        drop(to_daemon.shutdown().await);
        std::future::pending::<()>().await;
    };
    // While nothing comes, only this tells that whoever has started this has gone.
    let unread = io::stdout().as_fd().try_clone_to_owned().and_then(pipe::Sender::from_owned_fd);
    let unread = unread.map_err(Error::NoPipe)?;
    tokio::select! {
        _ = copy(&mut from_daemon, &mut output) => {}
        () = sending => {}
        _ = unread.ready(Interest::ERROR) => {}
    }
    Ok(())
}
