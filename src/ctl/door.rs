//! Connection to guestlet-host that can be made repeatedly: to its socket on this machine, or into the pod of
//! the node on which a guest runs at the time.

use std::path::PathBuf;
use std::time::Duration;

use tokio::net::UnixStream;

use super::client::{self, Daemon};
use super::{Error, cluster};

/// Connection path to the host half of one guest.
#[derive(Clone)]
pub enum Door {
    /// Socket on this machine.
    Socket(PathBuf),
    /// Connection through the API server of a cluster.
    Pod(cluster::Way),
}

/// Connection before its first message.
pub enum Line {
    /// Connection to the socket.
    Socket(UnixStream),
    /// Connection to a program in a pod.
    Pod(Box<cluster::Line>),
}

impl Door {
    /// Connects to the daemon.
    ///
    /// # Errors
    /// Fails if the daemon is not running, or access is denied.
    pub async fn dial(&self) -> Result<Line, Error> {
        Ok(match self {
            Self::Socket(socket) => Line::Socket(client::dial(socket.clone()).await?),
            Self::Pod(way) => Line::Pod(Box::new(way.dial().await?)),
        })
    }

    /// Returns whether a new connection finds the guest wherever it runs by then. If so, a daemon that does not
    /// know the guest is one that the guest has left.
    pub fn follows(&self) -> bool {
        matches!(self, Self::Pod(_))
    }

    /// Returns the pause between two attempts.
    pub fn pause(&self) -> Duration {
        match self {
            Self::Socket(_) => Duration::from_millis(100),
            // Each attempt sends three requests to the API server.
            Self::Pod(_) => Duration::from_secs(1),
        }
    }

    /// Connects and runs `work`.
    ///
    /// # Errors
    /// Fails if the daemon is not running, the connection ends before, or `work` fails.
    pub async fn with<T>(&self, work: impl AsyncFnOnce(Daemon) -> Result<T, Error>) -> Result<T, Error> {
        self.dial().await?.over(work).await
    }
}

impl Line {
    /// Runs `work` over this connection.
    ///
    /// # Errors
    /// Fails if the connection ends before, or `work` fails.
    pub async fn over<T>(self, work: impl AsyncFnOnce(Daemon) -> Result<T, Error>) -> Result<T, Error> {
        match self {
            Self::Socket(stream) => client::over(stream, work).await,
            Self::Pod(line) => line.over(work).await,
        }
    }
}
