//! Where a share is served by now: the host half is asked when a server does not answer.
//!
//! kubelet stages a volume once, and repeats what it was told when the volume was attached. So the agent itself makes the call
//! again by which that was done: for a share that is published already it changes nothing, and says where it is served. kubelet
//! asks now and then how full each volume is, and so a server that has moved is noticed without anybody who watches it.

use std::time::Duration;

use http::Uri;

use super::{Service, fields};
use crate::guest::pod_volumes::Error;
use crate::guest::pod_volumes::share::{self, Share, Usage};
use crate::transport::http2::ORIGIN;
use crate::wire::proto::csi::controller_client::ControllerClient;
use crate::wire::proto::csi::volume_capability::access_mode::Mode;
use crate::wire::proto::csi::volume_capability::{AccessMode, AccessType, MountVolume};
use crate::wire::proto::csi::{ControllerPublishVolumeRequest, VolumeCapability};

/// How long the host half may take: kubelet waits for it.
const PATIENCE: Duration = Duration::from_secs(30);

impl Service {
    /// Stages a share from where it was told to be, or from where it is.
    pub(super) async fn stage_share(&self, told: &Share, staging: &str, usage: &Usage) -> Result<(), Error> {
        let guest = self.guest();
        let staged = share::stage(&guest, told, staging, usage).await;
        if let Err(Error::NoServer { .. }) = &staged
            && let Some(now) = self.asked(&told.volume, usage.read_only).await
            && now.server != told.server
        {
            return share::stage(&guest, &now, staging, usage).await;
        }
        staged
    }

    /// Publishes a share, from where it is by now if its server does not answer.
    pub(super) async fn publish_share(
        &self,
        told: &Share,
        (staging, target): (&str, &str),
        usage: &Usage,
    ) -> Result<(), Error> {
        let guest = self.guest();
        let published = share::publish(&guest, told, (staging, target), usage).await;
        if let Err(Error::NoServer { .. }) = &published
            && self.find_again(&told.volume, staging).await?
        {
            return share::publish(&guest, told, (staging, target), usage).await;
        }
        published
    }

    /// Has what is wrong with a volume looked at, if it is a share whose server may have moved. Nobody waits for it.
    pub(super) fn look_after(&self, volume: &str, path: String) {
        let (service, volume) = (self.clone(), volume.to_owned());
        self.0.operations.children().spawn(async move {
            if let Err(error) = service.find_again(&volume, &path).await {
                tracing::debug!("volume {volume}: its server may have moved: {error}");
            }
        });
    }

    async fn find_again(&self, volume: &str, path: &str) -> Result<bool, Error> {
        let ask = |is_read_only| self.asked(volume, is_read_only);
        share::find_again(&self.guest(), volume, path, ask).await
    }

    /// Where the host half says that a share is served, if it says so.
    async fn asked(&self, volume: &str, is_read_only: bool) -> Option<Share> {
        let node_id = self.0.known.borrow().as_ref()?.node_id.clone();
        let mode = if is_read_only { Mode::MultiNodeReaderOnly } else { Mode::MultiNodeMultiWriter };
        let capability = VolumeCapability {
            access_mode: Some(AccessMode { mode: mode.into() }),
            access_type: Some(AccessType::Mount(MountVolume::default())),
        };
        let request = ControllerPublishVolumeRequest {
            volume_id: volume.to_owned(),
            node_id,
            volume_capability: Some(capability),
            ..ControllerPublishVolumeRequest::default()
        };
        let caller = (self.0.way)().ok()?;
        let mut host = ControllerClient::with_origin(caller, Uri::from_static(ORIGIN));
        let answer = tokio::time::timeout(PATIENCE, host.controller_publish_volume(request)).await.ok()?;
        let told = answer.and_then(|answer| fields::share(volume, &mut answer.into_inner().publish_context));
        told.unwrap_or_else(|status| {
            tracing::info!(
                "volume {volume}: the host half does not say where it is served: {}",
                status.message()
            );
            None
        })
    }
}

#[cfg(test)]
mod tests;
