//! What the host half has for Services that are not there any more: it is given back. Only what the API server says now counts for
//! that, since what was heard of may be old.
//!
//! What Harvester's cloud provider has made for a Service and was not taken over says no UID. It is left of a Service that had the same
//! name if the one that has it now has addresses by itself, and none of these are announced for it.

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

/// Most that is given back in one go.
const MOST: usize = 256;

/// What the host half has.
pub struct Found {
    /// All of it.
    pub all: Vec<Had>,
    uids: BTreeSet<String>,
}

/// A load balancer that the host half has.
#[derive(Debug, Clone)]
pub struct Had {
    /// Whose it is.
    pub of: ServiceReference,
    /// Its addresses.
    pub addresses: BTreeSet<String>,
}

/// What is to be given back.
#[derive(Debug)]
pub struct Orphan {
    /// Whose it was.
    pub of: ServiceReference,
    /// The UID of the Service that has its name now, and what must not be announced for that; none if there is to be none.
    pub successor: Option<(String, BTreeSet<String>)>,
}

impl Found {
    /// Whether there is one of the Service with this UID.
    pub fn has(&self, uid: &str) -> bool {
        self.uids.contains(uid)
    }

    /// The addresses of all that says no UID for a Service of this name. The host half is asked to give it back by that name.
    pub fn nameless(&self, namespace: &str, name: &str) -> BTreeSet<String> {
        let is_its =
            |had: &&Had| had.of.uid.is_empty() && (&*had.of.namespace, &*had.of.name) == (namespace, name);
        self.all.iter().filter(is_its).flat_map(|had| had.addresses.iter().cloned()).collect()
    }
}

/// What the host half has; none if it cannot say it.
pub async fn list(hands: Hands) -> Option<Found> {
    match hands.host.load_balancers().await {
        Ok(all) => {
            let had = |balancer: LoadBalancer| {
                // Where somebody else gets one by DHCP the host half names none.
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

/// Gives back what is there for these, of which no Service is known.
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

/// Whether the Service is gone, as the API server says now, or is none for this program; or is another one, that uses nothing of it.
async fn is_left(hands: &Hands, defaults: &Defaults, orphan: &Orphan) -> Result<bool, String> {
    let of = &orphan.of;
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

/// The addresses that are announced for a Service, or are to be.
fn announced(service: &Service) -> BTreeSet<String> {
    let wanted = annotation(&service.metadata, VIP_ADDRESSES).unwrap_or_default();
    let wanted = wanted.split(',').map(|one| one.trim().to_owned());
    wanted.chain(service.status.load_balancer.ingress.iter().map(|one| one.ip.clone())).collect()
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
