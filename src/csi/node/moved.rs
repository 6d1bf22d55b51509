//! Where a share is served by now: the host half is asked when a server does not answer.
//!
//! kubelet stages a volume once, and repeats what it was told when the volume was attached. So the agent itself asks, by the call by
//! which a volume is attached, marked as a question ([`WHERE`]): the answer is where the share is served, if this node has it.
//! Nothing is attached by it, so that a node from which the share was taken away does not take it back. kubelet asks now and then how
//! full each volume is, and so a server that has moved is noticed without anybody who watches it.

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

/// The key, of what is said of a volume, by which the host half knows the question.
const WHERE: &str = "guestlet.io/where";
/// How long the host half may take: kubelet waits for it.
const PATIENCE: Duration = Duration::from_secs(30);
/// Shares that are looked after at a time while nobody waits for it.
const AT_ONCE: usize = 2;
/// The same share is not looked after again before that.
const AGAIN: Duration = Duration::from_secs(120);

/// Which shares have been looked after, and when.
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
    /// Whether it is time to look after a share. Then it is not for a while.
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

/// Whether another server may do what this one did not.
fn may_be_elsewhere(error: &Error) -> bool {
    // What is at an address that was given to another server refuses in whatever way it likes.
    matches!(error, Error::NoServer { .. } | Error::Silent { .. } | Error::System { .. })
}

impl Service {
    /// Stages a share from where it was told to be, or from where it is.
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

    /// Has a share looked after whose server may have moved. Nobody waits for it.
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

    /// Where the host half says that a share is served, if it says so.
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
