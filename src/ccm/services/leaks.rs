//! What the host half has for Services that are not there any more: it is given back. Only what the API server says now counts for
//! that, since what was heard of may be old.

use std::collections::BTreeSet;

use kube::Api;

use super::plan::has_finalizer;
use super::wanted::{Defaults, is_wanted};
use super::work::Hands;
use crate::ccm::events::News;
use crate::ccm::instance::clean;
use crate::ccm::objects::{Service, uid};
use crate::ccm::refused::Refused;
use crate::kubernetes::lists::{self, Failed};
use crate::kubernetes::words;
use crate::wire::proto::v1::ServiceReference;

/// Most that is given back in one go.
const MOST: usize = 256;

/// Whose load balancers the host half has.
pub struct Found {
    /// All of them.
    pub all: Vec<ServiceReference>,
    uids: BTreeSet<String>,
}

impl Found {
    /// Whether there is one of the Service with this UID.
    pub fn has(&self, uid: &str) -> bool {
        self.uids.contains(uid)
    }
}

/// What the host half has; none if it cannot say it.
pub async fn list(hands: Hands) -> Option<Found> {
    match hands.host.load_balancers().await {
        Ok(all) => {
            let all: Vec<_> = all.into_iter().filter_map(|balancer| balancer.service).collect();
            let uids = all.iter().map(|of| of.uid.clone()).collect();
            Some(Found { all, uids })
        }
        Err(status) => {
            tracing::debug!(
                "the host half does not say which load balancers it has: {}",
                clean(status.message())
            );
            None
        }
    }
}

/// Gives back what is there for these, of which no Service is known.
pub async fn release(hands: &Hands, defaults: &Defaults, orphans: Vec<ServiceReference>) {
    for of in orphans.into_iter().take(MOST) {
        let place = format!("{}/{}", clean(&of.namespace), clean(&of.name));
        match is_left(hands, defaults, &of).await {
            Ok(false) => continue,
            Ok(true) => {}
            Err(why) => {
                tracing::warn!(service = place, "it cannot be read whether there is a Service: {why}");
                continue;
            }
        }
        let released =
            hands.fence.change(async { Ok(hands.host.release(of.clone()).await?) }).await;
        match released {
            Ok(true) => {
                let words = "the host had an address for this Service, which does not exist any more; it is given back";
                hands.recorder.tell(&stand_in(&of), &News::normal("ReleasedLeakedLoadBalancer", words)).await;
            }
            Ok(false) => tracing::info!(
                service = place,
                "what the host has for a Service that is gone is being given back"
            ),
            Err(Refused::Other) => {}
            Err(why) => {
                tracing::warn!(service = place, "what is left of a Service is not given back: {why}");
            }
        }
    }
}

/// Whether the Service is gone, as the API server says now, or is none for this program.
async fn is_left(hands: &Hands, defaults: &Defaults, of: &ServiceReference) -> Result<bool, String> {
    // What cannot be the name of one has none.
    if of.namespace.is_empty()
        || of.name.is_empty()
        || [&of.namespace, &of.name].iter().any(|one| !is_name(one))
    {
        return Ok(true);
    }
    let api = Api::<Service>::namespaced(hands.client.clone(), &of.namespace);
    let found = lists::in_time(api.get_opt(&of.name)).await.map_err(|failed| match &failed {
        Failed::Answered(error) => words(error),
        Failed::Late => failed.to_string(),
    })?;
    Ok(found.is_none_or(|service| {
        let is_other = !of.uid.is_empty() && uid(&service.metadata) != of.uid;
        is_other || !(is_wanted(&service, defaults) || has_finalizer(&service))
    }))
}

/// Whether a text can be a part of a path in the API.
fn is_name(text: &str) -> bool {
    text.len() <= 253 && text.bytes().all(|one| one.is_ascii_alphanumeric() || one == b'-' || one == b'.')
}

/// The Service that was, for an event.
fn stand_in(of: &ServiceReference) -> Service {
    let mut service = Service::default();
    service.metadata.namespace = Some(of.namespace.clone());
    service.metadata.name = Some(of.name.clone());
    service.metadata.uid = Some(of.uid.clone()).filter(|uid| !uid.is_empty());
    service
}
