//! Connection path to a daemon in a pod: the selection of the pod, and a connection to it.

use tonic::Code;

use crate::ctl::client::{self, Daemon};
use crate::ctl::{Error, cluster};

use super::access::ApiServer;
use super::pods::{self, Place};
use super::{DEFAULT, exec, guests};
use crate::wire::guest_object::Guest;

/// Path to a pod, or to that of the node on which a guest runs at the time of each connection.
#[derive(Clone)]
pub struct Way {
    server: ApiServer,
    end: End,
}

#[derive(Clone)]
enum End {
    Guest(String),
    Pod(Place),
}

/// Connection to a daemon that has answered.
pub struct Line {
    running: exec::Running,
    ends: exec::Ends,
}

impl Way {
    /// Returns the path to the node of the guest of this namespace and name.
    pub(super) fn to_guest(server: ApiServer, name: String) -> Self {
        Self { server, end: End::Guest(name) }
    }

    /// Returns the connection path to this pod.
    pub(super) fn to_pod(server: ApiServer, place: Place) -> Self {
        Self { server, end: End::Pod(place) }
    }

    /// Connects to the daemon.
    ///
    /// # Errors
    /// Fails if there is no pod, the user lacks a permission, or the daemon does not answer.
    pub async fn dial(&self) -> Result<Line, Error> {
        let place = match &self.end {
            End::Pod(place) => place.clone(),
            End::Guest(name) => {
                let guest = self.guest(name).await?;
                pods::of_node(&self.server, &guest.status.host, name).await?
            }
        };
        let (running, mut ends) = exec::start(&self.server, &place, &["proxy"]).await?;
        // The daemon sends the first bytes, as every HTTP/2 server may.
        let begun = tokio::time::timeout(client::ANSWER_DEADLINE, exec::begun(&mut ends)).await;
        if begun.map_err(|_| Error::Silent)?.map_err(|_| Error::Closed)? {
            return Ok(Line { running, ends });
        }
        Err(running.failure().await.map_or(Error::Closed, cluster::Error::into))
    }

    /// Adds to the final failure of a call why there is no session with the guest, if that is the cause.
    pub(super) async fn explained(&self, error: Error) -> Error {
        let End::Guest(name) = &self.end else { return error };
        if !matches!(&error, Error::Call(status) if status.code() == Code::FailedPrecondition) {
            return error;
        }
        match self.guest(name).await {
            Ok(guest) => guests::explained(error, &guest),
            Err(_) => error,
        }
    }

    async fn guest(&self, name: &str) -> Result<Guest, cluster::Error> {
        let (namespace, short) = name.split_once('/').unwrap_or((DEFAULT, name));
        guests::find(&self.server, namespace, short).await
    }
}

impl Line {
    /// Runs `work` over this connection.
    ///
    /// # Errors
    /// Fails if the connection ends before, or `work` fails.
    pub async fn over<T>(self, work: impl AsyncFnOnce(Daemon) -> Result<T, Error>) -> Result<T, Error> {
        let Self { running, ends } = self;
        match client::over(ends, work).await {
            Err(Error::Closed) => Err(running.failure().await.map_or(Error::Closed, cluster::Error::into)),
            done => done,
        }
    }
}
