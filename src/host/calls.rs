//! Calls of a guest that somebody has asked for. They can be made only with the word on whose behalf, which goes to the guest
//! with each of them. To add a call: its method.

use tonic::{Request, Response, Status};

use super::caller::Behalf;
use super::conversation::Caller;
use crate::wire::proto::v1::{
    FindDiskRequest, FindDiskResponse, PingRequest, PingResponse, ReleaseDiskRequest, ReleaseDiskResponse,
    RotateKeyRequest, RotateKeyResponse,
};

/// The agent of a guest with which there is a session.
#[derive(Debug, Clone)]
pub struct Agent(Box<Caller>);

/// Calls of it on somebody's behalf.
#[derive(Debug, Clone)]
pub struct Calls {
    client: Box<Caller>,
    behalf: Option<Behalf>,
}

impl Agent {
    /// The one that is called so.
    pub fn new(client: Box<Caller>) -> Self {
        Self(client)
    }

    /// On behalf of somebody.
    pub fn on_behalf_of(self, behalf: Behalf) -> Calls {
        Calls { client: self.0, behalf: Some(behalf) }
    }

    /// On behalf of somebody, or of the host half itself, if nobody has asked for it.
    pub fn on_behalf_of_any(self, behalf: Option<Behalf>) -> Calls {
        Calls { client: self.0, behalf }
    }
}

impl Calls {
    fn state<T>(&self, request: T) -> Request<T> {
        match &self.behalf {
            Some(behalf) => behalf.state(request),
            None => Request::new(request),
        }
    }

    /// Has it answer.
    ///
    /// # Errors
    /// As the agent, or when the session ends.
    pub async fn ping(&mut self, request: PingRequest) -> Result<Response<PingResponse>, Status> {
        let request = self.state(request);
        self.client.ping(request).await
    }

    /// Asks it for a disk.
    ///
    /// # Errors
    /// As the agent, or when the session ends.
    pub async fn find_disk(
        &mut self,
        request: FindDiskRequest,
    ) -> Result<Response<FindDiskResponse>, Status> {
        let request = self.state(request);
        self.client.find_disk(request).await
    }

    /// Gives the guest another key.
    ///
    /// # Errors
    /// As the agent, or when the session ends.
    pub async fn rotate_key(
        &mut self,
        request: RotateKeyRequest,
    ) -> Result<Response<RotateKeyResponse>, Status> {
        let request = self.state(request);
        self.client.rotate_key(request).await
    }

    /// Has it let go of a disk.
    ///
    /// # Errors
    /// As the agent, or when the session ends.
    pub async fn release_disk(
        &mut self,
        request: ReleaseDiskRequest,
    ) -> Result<Response<ReleaseDiskResponse>, Status> {
        let request = self.state(request);
        self.client.release_disk(request).await
    }
}
