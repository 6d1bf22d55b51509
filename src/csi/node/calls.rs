//! Calls that operate on volumes: from a request to an operation, and from its result to an answer.

use tonic::Status;

use super::{Service, fields};
use crate::guest::pod_volumes::expand::{Expand, expand};
use crate::guest::pod_volumes::publish::{Publish, publish};
use crate::guest::pod_volumes::remove::{unpublish, unstage};
use crate::guest::pod_volumes::stage::{Stage, stage};
use crate::guest::pod_volumes::stats::{Fill, stats};
use crate::wire::proto::csi;
use csi::volume_usage::Unit;

impl Service {
    pub(super) async fn stage(
        &self,
        mut request: csi::NodeStageVolumeRequest,
    ) -> Result<csi::NodeStageVolumeResponse, Status> {
        let volume = fields::volume(&request.volume_id)?;
        let staging = fields::path("staging_target_path", request.staging_target_path)?;
        if let Some(share) = fields::share(&volume, &mut request.publish_context)? {
            let (service, usage) = (self.clone(), fields::share_usage(request.volume_capability)?);
            let work = async move { service.stage_share(&share, &staging, &usage).await };
            self.run(("stage", request.volume_id), work).await?;
            return Ok(csi::NodeStageVolumeResponse {});
        }
        let usage = fields::usage(request.volume_capability)?;
        let disk = fields::disk(volume, &mut request.publish_context)?;
        let wanted = Stage { disk, staging, access: usage.access, read_only: usage.read_only, again: false };
        let guest = self.guest();
        self.run(("stage", request.volume_id), async move { stage(&guest, &wanted).await }).await?;
        Ok(csi::NodeStageVolumeResponse {})
    }

    pub(super) async fn unstage(
        &self,
        request: csi::NodeUnstageVolumeRequest,
    ) -> Result<csi::NodeUnstageVolumeResponse, Status> {
        let volume = fields::volume(&request.volume_id)?;
        let staging = fields::path("staging_target_path", request.staging_target_path)?;
        let guest = self.guest();
        self.run(("unstage", request.volume_id), async move { unstage(&guest, &volume, &staging).await })
            .await?;
        Ok(csi::NodeUnstageVolumeResponse {})
    }

    pub(super) async fn publish(
        &self,
        mut request: csi::NodePublishVolumeRequest,
    ) -> Result<csi::NodePublishVolumeResponse, Status> {
        let volume = fields::volume(&request.volume_id)?;
        let target = fields::path("target_path", request.target_path)?;
        // CSI requires this code of drivers that stage.
        if request.staging_target_path.is_empty() {
            return Err(Status::failed_precondition("staging_target_path is missing"));
        }
        if let Some(share) = fields::share(&volume, &mut request.publish_context)? {
            let (service, mut usage) = (self.clone(), fields::share_usage(request.volume_capability)?);
            usage.read_only |= request.readonly;
            let staging = request.staging_target_path;
            let work = async move { service.publish_share(&share, (&staging, &target), &usage).await };
            self.run(("publish", request.volume_id), work).await?;
            return Ok(csi::NodePublishVolumeResponse {});
        }
        let usage = fields::usage(request.volume_capability)?;
        let disk = fields::disk(volume, &mut request.publish_context)?;
        let wanted = Publish {
            disk,
            staging: request.staging_target_path,
            target,
            access: usage.access,
            staged_read_only: usage.read_only,
            read_only: usage.read_only || request.readonly,
            single: usage.single,
        };
        let guest = self.guest();
        self.run(("publish", request.volume_id), async move { publish(&guest, &wanted).await }).await?;
        Ok(csi::NodePublishVolumeResponse {})
    }

    pub(super) async fn unpublish(
        &self,
        request: csi::NodeUnpublishVolumeRequest,
    ) -> Result<csi::NodeUnpublishVolumeResponse, Status> {
        let volume = fields::volume(&request.volume_id)?;
        let target = fields::path("target_path", request.target_path)?;
        let guest = self.guest();
        self.run(("unpublish", request.volume_id), async move { unpublish(&guest, &volume, &target).await })
            .await?;
        Ok(csi::NodeUnpublishVolumeResponse {})
    }

    pub(super) async fn expand(
        &self,
        request: csi::NodeExpandVolumeRequest,
    ) -> Result<csi::NodeExpandVolumeResponse, Status> {
        let volume = fields::volume(&request.volume_id)?;
        let path = fields::path("volume_path", request.volume_path)?;
        let (required, limit) = fields::range(request.capacity_range)?;
        let wanted = Expand { volume, path, required, limit };
        let guest = self.guest();
        let bytes =
            self.run(("expand", request.volume_id), async move { expand(&guest, &wanted).await }).await?;
        Ok(csi::NodeExpandVolumeResponse { capacity_bytes: signed(bytes) })
    }

    pub(super) async fn stats(
        &self,
        request: csi::NodeGetVolumeStatsRequest,
    ) -> Result<csi::NodeGetVolumeStatsResponse, Status> {
        fields::volume(&request.volume_id)?;
        let path = fields::path("volume_path", request.volume_path)?;
        let (guest, place) = (self.guest(), path.clone());
        let volume = request.volume_id.clone();
        let told = self.run(("ask", request.volume_id), async move { stats(&guest, &path).await }).await?;
        if told.is_share && told.problem.is_some() {
            self.look_after(&volume, place);
        }
        let usage = match told.fill {
            Fill::Files(usage) => {
                let bytes = csi::VolumeUsage {
                    available: signed(usage.available),
                    total: signed(usage.total_privileged),
                    used: signed(usage.used),
                    unit: Unit::Bytes.into(),
                };
                let inodes = csi::VolumeUsage {
                    available: signed(usage.inodes_free),
                    total: signed(usage.inodes),
                    used: signed(usage.inodes.saturating_sub(usage.inodes_free)),
                    unit: Unit::Inodes.into(),
                };
                // Some file systems allocate inodes as needed.
                if usage.inodes == 0 { vec![bytes] } else { vec![bytes, inodes] }
            }
            Fill::Device(bytes) => vec![csi::VolumeUsage {
                total: signed(bytes),
                unit: Unit::Bytes.into(),
                ..csi::VolumeUsage::default()
            }],
            // Without any usage kubelet ignores the condition.
            Fill::Unknown => vec![csi::VolumeUsage::default()],
        };
        let condition = csi::VolumeCondition {
            abnormal: told.problem.is_some(),
            message: told.problem.unwrap_or_else(|| "the volume answers".to_owned()),
        };
        Ok(csi::NodeGetVolumeStatsResponse { usage, volume_condition: Some(condition) })
    }
}

fn signed(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}
