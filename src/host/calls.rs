//! Calls of a guest that somebody has asked for. They can be made only with the word on whose behalf, which goes to the guest
//! with each of them. To add a call: its method.
//!
//! An agent is called on its session, or by way of the program that has that.

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

/// The agent of a guest that can be called.
#[derive(Debug, Clone)]
pub struct Agent(Way);

/// Calls of it on somebody's behalf.
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

/// An agent whose session another program has.
#[tonic::async_trait]
pub trait Elsewhere: fmt::Debug + Send + Sync {
    /// Asks it for a disk.
    async fn find_disk(&self, behalf: Option<&Behalf>, request: FindDiskRequest) -> Answer<FindDiskResponse>;

    /// Has it let go of a disk.
    async fn release_disk(
        &self,
        behalf: Option<&Behalf>,
        request: ReleaseDiskRequest,
    ) -> Answer<ReleaseDiskResponse>;
}

/// What an agent answers.
pub type Answer<T> = Result<Response<T>, Status>;

impl Agent {
    /// The one that is called so.
    pub fn new(channel: Box<Channel>) -> Self {
        Self(Way::Session(channel))
    }

    /// One whose session another program has.
    pub fn elsewhere(agent: Arc<dyn Elsewhere>) -> Self {
        Self(Way::Elsewhere(agent))
    }

    /// Whether another program has its session: then not to be answered says nothing of the guest.
    pub fn is_elsewhere(&self) -> bool {
        matches!(self.0, Way::Elsewhere(_))
    }

    /// On behalf of somebody.
    pub fn on_behalf_of(self, behalf: Behalf) -> Calls {
        self.on_behalf_of_any(Some(behalf))
    }

    /// On behalf of somebody, or of the host half itself, if nobody has asked for it.
    pub fn on_behalf_of_any(self, behalf: Option<Behalf>) -> Calls {
        Calls { way: self.0, behalf }
    }
}

/// What only the program can do that has the session.
fn only_there() -> Status {
    Status::unimplemented("this can be asked of a guest on its own host only")
}

impl Calls {
    /// Has it answer.
    ///
    /// # Errors
    /// As the agent, or when the session ends.
    pub async fn ping(&self, request: PingRequest) -> Answer<PingResponse> {
        match &self.way {
            Way::Session(channel) => channel.guest().ping(state(self.behalf.as_ref(), request)).await,
            Way::Elsewhere(_) => Err(only_there()),
        }
    }

    /// Asks it for a disk.
    ///
    /// # Errors
    /// As the agent, or when the session ends.
    pub async fn find_disk(&self, request: FindDiskRequest) -> Answer<FindDiskResponse> {
        match &self.way {
            Way::Elsewhere(agent) => agent.find_disk(self.behalf.as_ref(), request).await,
            Way::Session(channel) => channel.guest().find_disk(state(self.behalf.as_ref(), request)).await,
        }
    }

    /// Gives the guest another key.
    ///
    /// # Errors
    /// As the agent, or when the session ends.
    pub async fn rotate_key(&self, request: RotateKeyRequest) -> Answer<RotateKeyResponse> {
        match &self.way {
            Way::Session(channel) => channel.guest().rotate_key(state(self.behalf.as_ref(), request)).await,
            Way::Elsewhere(_) => Err(only_there()),
        }
    }

    /// Hands a request on to it.
    ///
    /// # Errors
    /// As the agent, or when the session ends.
    pub async fn hand_on<R: HandedOn>(&self, request: R) -> Answer<R::Answer> {
        match &self.way {
            Way::Elsewhere(_) => Err(only_there()),
            Way::Session(channel) => {
                let mut client = channel.any();
                // It always is: calls wait for their turns by themselves.
                client.ready().await.map_err(|error| Status::from_error(error.into()))?;
                let path = PathAndQuery::from_static(R::PATH);
                client.unary(state(self.behalf.as_ref(), request), path, Prost::default()).await
            }
        }
    }

    /// Has it let go of a disk.
    ///
    /// # Errors
    /// As the agent, or when the session ends.
    pub async fn release_disk(&self, request: ReleaseDiskRequest) -> Answer<ReleaseDiskResponse> {
        match &self.way {
            Way::Elsewhere(agent) => agent.release_disk(self.behalf.as_ref(), request).await,
            Way::Session(channel) => channel.guest().release_disk(state(self.behalf.as_ref(), request)).await,
        }
    }
}

/// The request to a guest, with what it is told of who asks.
fn state<T>(behalf: Option<&Behalf>, request: T) -> Request<T> {
    match behalf {
        Some(behalf) => behalf.state(request),
        None => Request::new(request),
    }
}
