//! `NodeGetInfo` and `NodeGetCapabilities`: the identity of this guest, and its capabilities.

use tonic::Status;

use super::Service;
use crate::wire::proto::csi;
use csi::node_service_capability::rpc::Type as Can;

impl Service {
    pub(super) fn info(&self) -> Result<csi::NodeGetInfoResponse, Status> {
        let known = self.0.known.borrow();
        let identity = known
            .as_ref()
            .ok_or_else(|| Status::unavailable("no host half has yet told this guest which VM it is"))?;
        let told = |key: &String| Some((key.clone(), identity.topology.get(key)?.clone()));
        let segments: std::collections::HashMap<_, _> = self.0.topology.iter().filter_map(told).collect();
        Ok(csi::NodeGetInfoResponse {
            node_id: identity.node_id.clone(),
            max_volumes_per_node: identity.max_volumes.into(),
            accessible_topology: (!segments.is_empty()).then_some(csi::Topology { segments }),
        })
    }
}

/// Returns the optional capabilities of the node service.
pub(super) fn capabilities() -> csi::NodeGetCapabilitiesResponse {
    use csi::node_service_capability::{Rpc, Type};

    let can = [
        Can::StageUnstageVolume,
        Can::GetVolumeStats,
        Can::ExpandVolume,
        Can::VolumeCondition,
        Can::SingleNodeMultiWriter,
        Can::VolumeMountGroup,
    ];
    let capability =
        |can: Can| csi::NodeServiceCapability { r#type: Some(Type::Rpc(Rpc { r#type: can.into() })) };
    csi::NodeGetCapabilitiesResponse { capabilities: can.into_iter().map(capability).collect() }
}
