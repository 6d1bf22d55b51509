//! Release of what the host half still has for Services that no longer exist. Only the current answer of the
//! API server counts for this, because the state known from watches may be stale.
//!
//! A load balancer that Harvester's cloud provider created for a Service, and that was not taken over,
//! carries no UID. It counts as left behind by an earlier Service of the same name if the present one has
//! addresses of its own, and none of the old addresses is announced for it.

use std::collections::BTreeSet;
use std::net::IpAddr;

use kube::Api;

use super::plan::{VIP_ADDRESSES, has_finalizer};
use super::wanted::{Defaults, is_wanted};
use super::work::Hands;
use crate::ccm::events::News;
use crate::ccm::instance::clean;
use crate::ccm::objects::{Service, annotation, uid};
use crate::ccm::refused::Refused;
use crate::kubernetes::lists::{self, Failed};
use crate::kubernetes::words;
use crate::wire::proto::v1::{LoadBalancer, ServiceReference};

/// Load balancers that are released in one round, at most.
const MOST: usize = 256;

/// Load balancers that the host half has.
pub struct Found {
    /// Load balancers of all Services.
    pub all: Vec<Had>,
    uids: BTreeSet<String>,
}

/// Load balancer of the host half.
#[derive(Debug, Clone)]
pub struct Had {
    /// Service that it was made for.
    pub of: ServiceReference,
    /// Addresses of the load balancer.
    pub addresses: BTreeSet<String>,
}

/// Load balancer that is to be released.
#[derive(Debug)]
pub struct Orphan {
    /// Service that it belonged to.
    pub of: ServiceReference,
    /// UID of the Service that has its name now, and the addresses that must not be announced for that one;
    /// `None` if there must be none.
    pub successor: Option<(String, BTreeSet<String>)>,
}

impl Found {
    /// Returns whether there is a load balancer of the Service with this UID.
    pub fn has(&self, uid: &str) -> bool {
        self.uids.contains(uid)
    }

    /// Returns the addresses of all load balancers without a UID for a Service of this name. They are released by
    /// that name.
    pub fn nameless(&self, namespace: &str, name: &str) -> BTreeSet<String> {
        let is_its =
            |had: &&Had| had.of.uid.is_empty() && (&*had.of.namespace, &*had.of.name) == (namespace, name);
        self.all.iter().filter(is_its).flat_map(|had| had.addresses.iter().cloned()).collect()
    }
}

/// Lists what the host half has; `None` if the call fails.
pub async fn list(hands: Hands) -> Option<Found> {
    match hands.host.load_balancers().await {
        Ok(all) => {
            let had = |balancer: LoadBalancer| {
                // The host half reports the unspecified address where something else obtains one by DHCP.
                let addresses = balancer.addresses.into_iter().map(|one| one.address);
                let addresses = addresses.filter(|address| !is_any(address)).collect();
                Some(Had { of: balancer.service?, addresses })
            };
            let all: Vec<_> = all.into_iter().filter_map(had).collect();
            let uids = all.iter().map(|had| had.of.uid.clone()).collect();
            Some(Found { all, uids })
        }
        Err(status) => {
            tracing::debug!("the host half does not report its load balancers: {}", clean(status.message()));
            None
        }
    }
}

fn is_any(address: &str) -> bool {
    address.parse::<IpAddr>().is_ok_and(|address| address.is_unspecified())
}

/// Releases these load balancers, of which no Service is known.
pub async fn release(hands: &Hands, defaults: &Defaults, orphans: Vec<Orphan>) {
    for orphan in orphans.into_iter().take(MOST) {
        let of = orphan.of.clone();
        let place = format!("{}/{}", clean(&of.namespace), clean(&of.name));
        match is_left(hands, defaults, &orphan).await {
            Ok(false) => continue,
            Ok(true) => {}
            Err(why) => {
                tracing::warn!(service = place, "cannot find out whether a Service exists: {why}");
                continue;
            }
        }
        let released = hands.fence.change(async { Ok(hands.host.release(of.clone()).await?) }).await;
        match released {
            Ok(true) => {
                let words = match &orphan.successor {
                    None => {
                        "the host had an address for this Service, which no longer exists; it is released"
                    }
                    Some(_) => "the host had an address for an earlier Service of this name; it is released",
                };
                hands.recorder.tell(&stand_in(&of), &News::normal("ReleasedLeakedLoadBalancer", words)).await;
            }
            Ok(false) => tracing::info!(service = place, "releasing what the host has for a deleted Service"),
            Err(Refused::Other) => {}
            Err(why) => {
                tracing::warn!(service = place, "cannot release what is left of a Service: {why}");
            }
        }
    }
}

/// Asks the API server whether the Service no longer exists, is not one for this program, or is a new one
/// that uses none of the old addresses.
async fn is_left(hands: &Hands, defaults: &Defaults, orphan: &Orphan) -> Result<bool, String> {
    let of = &orphan.of;
    // A reference without a valid name cannot belong to any Service.
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
    if let Some((successor, addresses)) = &orphan.successor {
        return Ok(found.is_some_and(|service| {
            uid(&service.metadata) == successor && addresses.is_disjoint(&announced(&service))
        }));
    }
    Ok(found.is_none_or(|service| {
        let is_other = !of.uid.is_empty() && uid(&service.metadata) != of.uid;
        is_other || !(is_wanted(&service, defaults) || has_finalizer(&service))
    }))
}

/// Returns the addresses that are announced for a Service, or are to be.
fn announced(service: &Service) -> BTreeSet<String> {
    let wanted = annotation(&service.metadata, VIP_ADDRESSES).unwrap_or_default();
    let wanted = wanted.split(',').map(|one| one.trim().to_owned());
    wanted.chain(service.status.load_balancer.ingress.iter().map(|one| one.ip.clone())).collect()
}

/// Returns whether a text can be a component of a path in the API.
fn is_name(text: &str) -> bool {
    text.len() <= 253 && text.bytes().all(|one| one.is_ascii_alphanumeric() || one == b'-' || one == b'.')
}

/// Returns a stand-in for the former Service, for an event.
fn stand_in(of: &ServiceReference) -> Service {
    let mut service = Service::default();
    service.metadata.namespace = Some(of.namespace.clone());
    service.metadata.name = Some(of.name.clone());
    service.metadata.uid = Some(of.uid.clone()).filter(|uid| !uid.is_empty());
    service
}
