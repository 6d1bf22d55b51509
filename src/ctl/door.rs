//! Where guestlet-host is reached, as often as it has to be: at its socket on this machine, or in the pod of the node on which a guest
//! runs at the time.

use std::path::PathBuf;
use std::time::Duration;

use tokio::net::UnixStream;

use super::client::{self, Daemon};
use super::{Error, cluster};

/// The way to the host half of one guest.
#[derive(Clone)]
pub enum Door {
    /// Its socket here.
    Socket(PathBuf),
    /// Through the API server of a cluster.
    Pod(cluster::Way),
}

/// A connection that nothing was said over yet.
pub enum Line {
    /// With the socket.
    Socket(UnixStream),
    /// With a program in a pod.
    Pod(Box<cluster::Line>),
}

impl Door {
    /// Connects.
    ///
    /// # Errors
    /// If nobody is there, or may not be asked.
    pub async fn dial(&self) -> Result<Line, Error> {
        Ok(match self {
            Self::Socket(socket) => Line::Socket(client::dial(socket.clone()).await?),
            Self::Pod(way) => Line::Pod(Box::new(way.dial().await?)),
        })
    }

    /// Whether it leads to where a guest is by now: a daemon that does not know it is one that it has left.
    pub fn follows(&self) -> bool {
        matches!(self, Self::Pod(_))
    }

    /// How long to wait between two attempts.
    pub fn pause(&self) -> Duration {
        match self {
            Self::Socket(_) => Duration::from_millis(100),
            // Each asks the API server for three things.
            Self::Pod(_) => Duration::from_secs(1),
        }
    }

    /// Connects and does `work`.
    ///
    /// # Errors
    /// If nobody is there, the connection ends before, or `work` fails.
    pub async fn with<T>(&self, work: impl AsyncFnOnce(Daemon) -> Result<T, Error>) -> Result<T, Error> {
        self.dial().await?.over(work).await
    }
}

impl Line {
    /// Does `work` over it.
    ///
    /// # Errors
    /// If the connection ends before, or `work` fails.
    pub async fn over<T>(self, work: impl AsyncFnOnce(Daemon) -> Result<T, Error>) -> Result<T, Error> {
        match self {
            Self::Socket(stream) => client::over(stream, work).await,
            Self::Pod(line) => line.over(work).await,
        }
    }
}
