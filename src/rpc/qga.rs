//! `guestlet.v1.Qga`: the commands of QGA, for the host half. What carries them out is given by the agent, as the protocols do
//! not know each other.

use std::pin::Pin;
use std::sync::Arc;

use tonic::{Request, Response, Status};

use crate::policy::Asker;
use crate::wire::proto::v1::qga_server::{self, QgaServer};
use crate::wire::proto::v1::{ExecuteQgaRequest, ExecuteQgaResponse};

/// Bytes of one request.
const MAX_REQUEST: usize = (1 << 20) + 1024;

/// Carries out one command, and gives the line that answers it.
pub type Engine = Arc<dyn Fn(Vec<u8>, Asker) -> Pin<Box<dyn Future<Output = Vec<u8>> + Send>> + Send + Sync>;

/// Implementation of the gRPC service.
#[derive(Clone)]
pub struct Service(Engine);

impl Service {
    /// A service whose commands this carries out.
    pub fn new(engine: Engine) -> Self {
        Self(engine)
    }

    /// The service as HTTP/2 serves it.
    pub fn into_server(self) -> QgaServer<Self> {
        QgaServer::new(self).max_decoding_message_size(MAX_REQUEST)
    }
}

#[tonic::async_trait]
impl qga_server::Qga for Service {
    async fn execute_qga(
        &self,
        request: Request<ExecuteQgaRequest>,
    ) -> Result<Response<ExecuteQgaResponse>, Status> {
        let asker = request.extensions().get::<Asker>().cloned();
        let asker = asker.ok_or_else(|| Status::internal("the caller is not known"))?;
        let answer = self.0(request.into_inner().command, asker).await;
        Ok(Response::new(ExecuteQgaResponse { answer }))
    }
}
