//! `pluginregistration.Registration`: tells kubelet the name of the driver, and its socket.

use std::path::Path;
use std::sync::Arc;

use tonic::{Request, Response, Status};

use crate::wire::proto::registration as proto;
use crate::wire::proto::registration::registration_server::{Registration, RegistrationServer};

/// Version of CSI in the complete form that kubelet requires.
const VERSIONS: [&str; 1] = ["1.0.0"];
/// Limit of the bytes of one request, which contains an error of kubelet at most.
const MAX_REQUEST: usize = 64 * 1024;
/// Limit of the characters of kubelet's message that are logged.
const LONGEST: usize = 500;

/// Registration service.
#[derive(Debug, Clone)]
pub struct Service {
    driver: Arc<str>,
    endpoint: Arc<Path>,
}

impl Service {
    /// Creates a service that registers the driver `driver` with the socket `endpoint`.
    pub fn new(driver: &str, endpoint: &Path) -> Self {
        Self { driver: driver.into(), endpoint: endpoint.into() }
    }

    /// Returns the service in the form that HTTP/2 serves.
    pub fn into_server(self) -> RegistrationServer<Self> {
        RegistrationServer::new(self).max_decoding_message_size(MAX_REQUEST)
    }
}

#[tonic::async_trait]
impl Registration for Service {
    async fn get_info(&self, _: Request<proto::InfoRequest>) -> Result<Response<proto::PluginInfo>, Status> {
        Ok(Response::new(proto::PluginInfo {
            r#type: "CSIPlugin".to_owned(),
            name: self.driver.to_string(),
            endpoint: self.endpoint.to_string_lossy().into_owned(),
            supported_versions: VERSIONS.map(str::to_owned).to_vec(),
        }))
    }

    async fn notify_registration_status(
        &self,
        request: Request<proto::RegistrationStatus>,
    ) -> Result<Response<proto::RegistrationStatusResponse>, Status> {
        let proto::RegistrationStatus { plugin_registered, error } = request.into_inner();
        let driver = &self.driver;
        if plugin_registered {
            tracing::info!("kubelet has registered the driver {driver}");
        } else {
            let why: String = error.chars().filter(|c| !c.is_control()).take(LONGEST).collect();
            tracing::error!("kubelet has not registered the driver {driver}: {why}");
        }
        Ok(Response::new(proto::RegistrationStatusResponse {}))
    }
}
