//! The way to a daemon in a pod: which pod that is, and a connection with it.

use tonic::Code;

use crate::ctl::client::{self, Daemon};
use crate::ctl::{Error, cluster};

use super::access::ApiServer;
use super::pods::{self, Place};
use super::{DEFAULT, exec, guests};
use crate::wire::guest_object::Guest;

/// To a pod, or to that of the node on which a guest runs whenever somebody goes there.
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

/// A connection with a daemon that has begun.
pub struct Line {
    running: exec::Running,
    ends: exec::Ends,
}

impl Way {
    /// To the node of the guest of this namespace and name.
    pub(super) fn to_guest(server: ApiServer, name: String) -> Self {
        Self { server, end: End::Guest(name) }
    }

    /// To this pod.
    pub(super) fn to_pod(server: ApiServer, place: Place) -> Self {
        Self { server, end: End::Pod(place) }
    }

    /// Connects.
    ///
    /// # Errors
    /// If there is no pod, who asks may not do so, or nobody answers there.
    pub async fn dial(&self) -> Result<Line, Error> {
        let place = match &self.end {
            End::Pod(place) => place.clone(),
            End::Guest(name) => {
                let guest = self.guest(name).await?;
                pods::of_node(&self.server, &guest.status.host, name).await?
            }
        };
        let (running, mut ends) = exec::start(&self.server, &place, &["proxy"]).await?;
        // The daemon speaks first, as every server of HTTP/2 may.
        let begun = tokio::time::timeout(client::ANSWER_DEADLINE, exec::begun(&mut ends)).await;
        if begun.map_err(|_| Error::Silent)?.map_err(|_| Error::Closed)? {
            return Ok(Line { running, ends });
        }
        Err(running.failure().await.map_or(Error::Closed, cluster::Error::into))
    }

    /// What a call has failed with at last, and why there is no session with the guest, if that is it.
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
    /// Does `work` over it.
    ///
    /// # Errors
    /// If the connection ends before, or `work` fails.
    pub async fn over<T>(self, work: impl AsyncFnOnce(Daemon) -> Result<T, Error>) -> Result<T, Error> {
        let Self { running, ends } = self;
        match client::over(ends, work).await {
            Err(Error::Closed) => Err(running.failure().await.map_or(Error::Closed, cluster::Error::into)),
            done => done,
        }
    }
}
