//! A listener whose kind was chosen by the settings.

use std::io;

use crate::transport::{BoxStream, unix, vsock};

/// Where streams come from.
#[derive(Debug)]
pub enum Listener {
    /// A vsock port.
    Vsock(vsock::Listener),
    /// A unix socket.
    Unix(unix::Listener),
    /// Nowhere: nobody ever comes.
    Nothing,
}

impl Listener {
    /// The next peer: its name for the log, and its stream or why it is not let in.
    ///
    /// # Errors
    /// As accept(2) gives them.
    pub async fn accept(&self) -> io::Result<(String, Result<BoxStream, String>)> {
        match self {
            Self::Vsock(listener) => {
                let (peer, stream) = listener.accept().await?;
                Ok((peer, stream.map(|stream| Box::new(stream) as BoxStream)))
            }
            Self::Unix(listener) => {
                let stream = listener.accept().await?;
                Ok((listener.path().display().to_string(), Ok(Box::new(stream))))
            }
            Self::Nothing => std::future::pending().await,
        }
    }
}
