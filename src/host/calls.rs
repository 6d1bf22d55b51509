//! Calls to a guest on behalf of a caller, whose identity goes to the guest with each call. To add a call: its
//! method.
//!
//! An agent is called on its session, or through the program that has the session.

use std::fmt;
use std::sync::Arc;

use http::uri::PathAndQuery;
use tonic::{Request, Response, Status};

use super::caller::Behalf;
use super::conversation::Channel;
use super::handed_on::HandedOn;
use crate::wire::codec::Prost;
use crate::wire::proto::v1::{
    FindDiskRequest, FindDiskResponse, PingRequest, PingResponse, ReleaseDiskRequest, ReleaseDiskResponse,
    RotateKeyRequest, RotateKeyResponse,
};

/// Agent of a guest, which can be called.
#[derive(Debug, Clone)]
pub struct Agent(Way);

/// Calls to an agent on behalf of a caller.
#[derive(Debug, Clone)]
pub struct Calls {
    way: Way,
    behalf: Option<Behalf>,
}

#[derive(Debug, Clone)]
enum Way {
    Session(Box<Channel>),
    Elsewhere(Arc<dyn Elsewhere>),
}

/// Agent whose session another program has.
#[tonic::async_trait]
pub trait Elsewhere: fmt::Debug + Send + Sync {
    /// Asks the agent for a disk.
    async fn find_disk(&self, behalf: Option<&Behalf>, request: FindDiskRequest) -> Answer<FindDiskResponse>;

    /// Asks the agent to release a disk.
    async fn release_disk(
        &self,
        behalf: Option<&Behalf>,
        request: ReleaseDiskRequest,
    ) -> Answer<ReleaseDiskResponse>;
}

/// Response of an agent, or its error.
pub type Answer<T> = Result<Response<T>, Status>;

impl Agent {
    /// Creates an agent that is called over this channel of its session.
    pub fn new(channel: Box<Channel>) -> Self {
        Self(Way::Session(channel))
    }

    /// Creates an agent whose session another program has.
    pub fn elsewhere(agent: Arc<dyn Elsewhere>) -> Self {
        Self(Way::Elsewhere(agent))
    }

    /// Returns whether another program has the session. A failed call then says nothing about the guest.
    pub fn is_elsewhere(&self) -> bool {
        matches!(self.0, Way::Elsewhere(_))
    }

    /// Returns calls on behalf of a caller.
    pub fn on_behalf_of(self, behalf: Behalf) -> Calls {
        self.on_behalf_of_any(Some(behalf))
    }

    /// Returns calls on behalf of a caller, or of the host half itself if there is none.
    pub fn on_behalf_of_any(self, behalf: Option<Behalf>) -> Calls {
        Calls { way: self.0, behalf }
    }
}

/// Status for calls that only the program with the session can make.
fn only_there() -> Status {
    Status::unimplemented("this can be asked of a guest on its own host only")
}

impl Calls {
    /// Pings the agent.
    ///
    /// # Errors
    /// The agent's errors; also if the session ends.
    pub async fn ping(&self, request: PingRequest) -> Answer<PingResponse> {
        match &self.way {
            Way::Session(channel) => channel.guest().ping(state(self.behalf.as_ref(), request)).await,
            Way::Elsewhere(_) => Err(only_there()),
        }
    }

    /// Asks the agent for a disk.
    ///
    /// # Errors
    /// The agent's errors; also if the session ends.
    pub async fn find_disk(&self, request: FindDiskRequest) -> Answer<FindDiskResponse> {
        match &self.way {
            Way::Elsewhere(agent) => agent.find_disk(self.behalf.as_ref(), request).await,
            Way::Session(channel) => channel.guest().find_disk(state(self.behalf.as_ref(), request)).await,
        }
    }

    /// Rotates the key of the guest.
    ///
    /// # Errors
    /// The agent's errors; also if the session ends.
    pub async fn rotate_key(&self, request: RotateKeyRequest) -> Answer<RotateKeyResponse> {
        match &self.way {
            Way::Session(channel) => channel.guest().rotate_key(state(self.behalf.as_ref(), request)).await,
            Way::Elsewhere(_) => Err(only_there()),
        }
    }

    /// Forwards a request to the agent.
    ///
    /// # Errors
    /// The agent's errors; also if the session ends.
    pub async fn hand_on<R: HandedOn>(&self, request: R) -> Answer<R::Answer> {
        match &self.way {
            Way::Elsewhere(_) => Err(only_there()),
            Way::Session(channel) => {
                let mut client = channel.any();
                // The channel is always ready: calls wait for their turn elsewhere.
                client.ready().await.map_err(|error| Status::from_error(error.into()))?;
                let path = PathAndQuery::from_static(R::PATH);
                client.unary(state(self.behalf.as_ref(), request), path, Prost::default()).await
            }
        }
    }

    /// Asks the agent to release a disk.
    ///
    /// # Errors
    /// The agent's errors; also if the session ends.
    pub async fn release_disk(&self, request: ReleaseDiskRequest) -> Answer<ReleaseDiskResponse> {
        match &self.way {
            Way::Elsewhere(agent) => agent.release_disk(self.behalf.as_ref(), request).await,
            Way::Session(channel) => channel.guest().release_disk(state(self.behalf.as_ref(), request)).await,
        }
    }
}

/// Wraps a request to a guest, with metadata that names the caller.
fn state<T>(behalf: Option<&Behalf>, request: T) -> Request<T> {
    match behalf {
        Some(behalf) => behalf.state(request),
        None => Request::new(request),
    }
}
