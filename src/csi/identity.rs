//! `csi.v1.Identity`: the name of the driver, its capabilities, and whether it is ready.

use std::fmt;
use std::sync::Arc;

use tonic::{Request, Response, Status};

use crate::wire::proto::csi;
use crate::wire::proto::csi::identity_server::{Identity, IdentityServer};
use crate::wire::proto::csi::plugin_capability::{Service as ServiceCapability, Type, VolumeExpansion};

/// Limit of the bytes of one request, which has no fields.
const MAX_REQUEST: usize = 4096;

/// Function that returns whether the services on the same socket can work.
pub type Ready = Arc<dyn Fn() -> bool + Send + Sync>;

/// Identity service, which is the same on every socket.
#[derive(Clone)]
pub struct Service {
    driver: Arc<str>,
    /// True if volumes are not accessible from every node.
    topology: bool,
    ready: Ready,
}

impl fmt::Debug for Service {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Service").field("driver", &self.driver).finish_non_exhaustive()
    }
}

impl Service {
    /// Creates the service for the driver of this name.
    pub fn new(driver: &str, topology: bool, ready: Ready) -> Self {
        Self { driver: driver.into(), topology, ready }
    }

    /// Returns the service in the form that HTTP/2 serves.
    pub fn into_server(self) -> IdentityServer<Self> {
        IdentityServer::new(self).max_decoding_message_size(MAX_REQUEST)
    }
}

#[tonic::async_trait]
impl Identity for Service {
    async fn get_plugin_info(
        &self,
        _: Request<csi::GetPluginInfoRequest>,
    ) -> Result<Response<csi::GetPluginInfoResponse>, Status> {
        Ok(Response::new(csi::GetPluginInfoResponse {
            name: self.driver.to_string(),
            vendor_version: crate::VERSION.to_owned(),
            manifest: [("program".to_owned(), "guestlet".to_owned())].into(),
        }))
    }

    async fn get_plugin_capabilities(
        &self,
        _: Request<csi::GetPluginCapabilitiesRequest>,
    ) -> Result<Response<csi::GetPluginCapabilitiesResponse>, Status> {
        use csi::plugin_capability::{service, volume_expansion};

        let service = |kind: service::Type| Type::Service(ServiceCapability { r#type: kind.into() });
        let online = VolumeExpansion { r#type: volume_expansion::Type::Online.into() };
        let mut can = vec![service(service::Type::ControllerService), Type::VolumeExpansion(online)];
        if self.topology {
            can.push(service(service::Type::VolumeAccessibilityConstraints));
        }
        let capability = |kind| csi::PluginCapability { r#type: Some(kind) };
        let capabilities = can.into_iter().map(capability).collect();
        Ok(Response::new(csi::GetPluginCapabilitiesResponse { capabilities }))
    }

    async fn probe(&self, _: Request<csi::ProbeRequest>) -> Result<Response<csi::ProbeResponse>, Status> {
        Ok(Response::new(csi::ProbeResponse { ready: Some((self.ready)()) }))
    }
}
