//! Shares whose servers have moved: the host half is asked for the present address when a server does not
//! answer.
//!
//! kubelet stages a volume once, and repeats the context from the time when the volume was attached.
//! Therefore the agent itself asks, by the call that attaches a volume, marked as a query ([`WHERE`]). The
//! answer has the address of the share if this node has it. The query attaches nothing, so a node whose share
//! was detached does not get it back. kubelet regularly asks how full each volume is, so a server that has
//! moved is noticed without a watch.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use http::Uri;
use tokio::sync::Semaphore;

use super::{Service, fields};
use crate::guest::pod_volumes::Error;
use crate::guest::pod_volumes::share::{self, Share, Usage};
use crate::transport::http2::ORIGIN;
use crate::wire::proto::csi::ControllerPublishVolumeRequest;
use crate::wire::proto::csi::controller_client::ControllerClient;

/// Key in the volume context by which the host half recognises the query.
const WHERE: &str = "guestlet.io/where";
/// Timeout for the host half, while kubelet waits.
const PATIENCE: Duration = Duration::from_secs(30);
/// Shares that are checked in the background at the same time.
const AT_ONCE: usize = 2;
/// Minimum interval between two checks of the same share.
const AGAIN: Duration = Duration::from_secs(120);

/// Record of the shares whose servers were checked, and when.
#[derive(Debug)]
pub(super) struct Lookouts {
    last: Mutex<BTreeMap<String, Instant>>,
    places: Arc<Semaphore>,
}

impl Default for Lookouts {
    fn default() -> Self {
        Self { last: Mutex::default(), places: Arc::new(Semaphore::new(AT_ONCE)) }
    }
}

impl Lookouts {
    /// Reports whether the server of a share is to be checked now. If so, it is not due again for some time.
    fn is_due(&self, volume: &str) -> bool {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        last.retain(|_, at| at.elapsed() < AGAIN);
        let is_due = !last.contains_key(volume);
        if is_due {
            last.insert(volume.to_owned(), Instant::now());
        }
        is_due
    }
}

/// Returns whether another server may succeed where this one failed.
fn may_be_elsewhere(error: &Error) -> bool {
    // If the address was given to another server, that one may refuse with any error.
    matches!(error, Error::NoServer { .. } | Error::Silent { .. } | Error::System { .. })
}

impl Service {
    /// Stages a share from the address in the request or, if that fails, from its present address.
    pub(super) async fn stage_share(&self, told: &Share, staging: &str, usage: &Usage) -> Result<(), Error> {
        let guest = self.guest();
        let staged = share::stage(&guest, told, staging, usage).await;
        if staged.as_ref().is_err_and(may_be_elsewhere)
            && let Some(now) = self.asked(&told.volume).await
            && now.server != told.server
        {
            return share::stage(&guest, &now, staging, usage).await;
        }
        staged
    }

    /// Publishes a share, from its present address if its server does not answer.
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

    /// Starts a check of a share whose server may have moved, without waiting for it.
    pub(super) fn look_after(&self, volume: &str, path: String) {
        let (service, volume) = (self.clone(), volume.to_owned());
        let Ok(place) = Arc::clone(&self.0.lookouts.places).try_acquire_owned() else { return };
        if !self.0.lookouts.is_due(&volume) {
            return;
        }
        self.0.operations.children().spawn(async move {
            if let Err(error) = service.find_again(&volume, &path).await {
                tracing::debug!("volume {volume}: its server may have moved: {error}");
            }
            drop(place);
        });
    }

    async fn find_again(&self, volume: &str, path: &str) -> Result<bool, Error> {
        share::find_again(&self.guest(), path, || self.asked(volume)).await
    }

    /// Asks the host half for the present address of a share; `None` without a usable answer.
    async fn asked(&self, volume: &str) -> Option<Share> {
        let node_id = self.0.known.borrow().as_ref()?.node_id.clone();
        let request = ControllerPublishVolumeRequest {
            volume_id: volume.to_owned(),
            node_id,
            volume_context: [(WHERE.to_owned(), "1".to_owned())].into(),
            ..ControllerPublishVolumeRequest::default()
        };
        let caller = (self.0.way)().ok()?;
        let mut host = ControllerClient::with_origin(caller, Uri::from_static(ORIGIN));
        let answer = tokio::time::timeout(PATIENCE, host.controller_publish_volume(request)).await.ok()?;
        let told = answer.and_then(|answer| fields::share(volume, &mut answer.into_inner().publish_context));
        told.unwrap_or_else(|status| {
            tracing::info!(
                "volume {volume}: the host half does not report where it is served: {}",
                status.message()
            );
            None
        })
    }
}

#[cfg(test)]
mod tests;
