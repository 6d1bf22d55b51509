//! Describes a load balancer in the host cluster's API for its guest cluster. Pure.

use std::collections::BTreeSet;

use super::super::wanted::{Announcing, Family, Ipam, Service, Wanted};
use super::balancers::{Balancers, Key};
use super::check::{Doubt, Ground};
use super::leaving::not_taken_up;
use super::object::{Address, Object};
use crate::host::text;
use crate::wire::proto::v1::{self, load_balancer::State};

/// Describes the load balancer with this key for its cluster; returns `None` if there is none. `networks` are
/// those that VMs of the cluster are attached to, if they are known.
pub fn message(
    balancers: &Balancers,
    networks: Option<&BTreeSet<String>>,
    key: &Key,
) -> Option<v1::LoadBalancer> {
    let ground = Ground { networks, pools: balancers.pools.as_ref() };
    let (cluster, uid) = key;
    let asked = balancers.asked.get(key);
    let own = match (balancers.keyed(key), asked) {
        (None, Some(asked)) => balancers.unclaimed(cluster, &asked.service),
        // This object is already reported as the load balancer of the Service whose request cannot be satisfied.
        (Some(own), _) if balancers.is_asked_for(own) => return None,
        (own, _) => own,
    };
    let of_other = balancers.shared(cluster, uid);
    // An object that is being deleted is reported, unless the Service shares another's address by now.
    let own = own.filter(|own| !own.is_going() || of_other.is_none());
    let mut told = match (own, of_other) {
        (Some(own), _) => object(ground, own, &own.service, own.wanted.as_ref(), own.announcing()),
        (None, Some((other, one))) => {
            let wanted = &one.wanted;
            let mut told = object(ground, other, &one.service, Some(wanted), wanted.announcing);
            told.shares_with = wanted.share.as_ref().map(Into::into);
            told
        }
        (None, None) => asked.map(|asked| bare(&asked.service, &asked.wanted))?,
    };
    if let Some(leaving) = balancers.leaving.get(key).filter(|_| asked.is_none()) {
        told.set_state(State::Releasing);
        let is_left = own.filter(|_| leaving.is_left);
        (told.reason, told.message) = match is_left {
            Some(own) => ("NotTakenUp".to_owned(), not_taken_up(own)),
            None => {
                ("Releasing".to_owned(), "it is released as soon as the host has processed it".to_owned())
            }
        };
    }
    if let Some(asked) = asked {
        told.set_state(State::Failed);
        told.service = Some((&asked.service).into());
        (told.reason, told.message) = (asked.failure.reason.to_owned(), asked.failure.message.clone());
    }
    Some(told)
}

/// Describes a load balancer for which there is no object yet.
fn bare(service: &Service, wanted: &Wanted) -> v1::LoadBalancer {
    let mut told = v1::LoadBalancer {
        service: Some(service.into()),
        network: wanted.network.clone(),
        shares_with: wanted.share.as_ref().map(Into::into),
        ..v1::LoadBalancer::default()
    };
    told.set_ipam(ipam(wanted.ipam));
    told.set_announcing(announcing(wanted.announcing));
    told
}

fn object(
    ground: Ground<'_>,
    object: &Object,
    service: &Service,
    wanted: Option<&Wanted>,
    announced: Announcing,
) -> v1::LoadBalancer {
    let (state, reason, message, addresses) = standing(ground, object, wanted);
    let mut told = v1::LoadBalancer {
        service: Some(service.into()),
        name: object.name().to_owned(),
        reason: reason.to_owned(),
        message,
        addresses,
        network: object.network().to_owned(),
        ..v1::LoadBalancer::default()
    };
    told.set_state(state);
    told.set_ipam(ipam(object.ipam()));
    told.set_announcing(announcing(announced));
    told
}

type Standing = (State, &'static str, String, Vec<v1::LoadBalancerAddress>);

/// Returns the state of an object, the reason for it, a message, and the addresses.
fn standing(ground: Ground<'_>, object: &Object, wanted: Option<&Wanted>) -> Standing {
    let address = object.address();
    let addresses = match &address {
        Address::None(_) => Vec::new(),
        Address::Dhcp => {
            vec![v1::LoadBalancerAddress { address: "0.0.0.0".to_owned(), pool: String::new() }]
        }
        Address::Has(address, pool) => {
            vec![v1::LoadBalancerAddress { address: address.to_string(), pool: pool.clone() }]
        }
    };
    if object.is_going() {
        return (State::Releasing, "Releasing", "it is being released".to_owned(), addresses);
    }
    match ground.check(object) {
        Ok(()) => {}
        Err(Doubt::Refused(failure)) => return (State::Failed, failure.reason, failure.message, Vec::new()),
        Err(Doubt::Unknown(what)) => {
            let words = format!("the host has given it an address, and does not know {what} yet");
            return (State::Pending, "Pending", words, Vec::new());
        }
    }
    let (state, reason, message) = match address {
        Address::None(None) => {
            (State::Pending, "Pending", "the host has not assigned an address yet".to_owned())
        }
        Address::None(Some(why)) => {
            let words = format!("the host has assigned no address: {}", text::clean_words(&why));
            (State::Failed, "AddressNotAllocated", words)
        }
        Address::Has(address, _) if wanted.is_some_and(|wanted| is_another(wanted, address)) => {
            let words = format!("the host has given it {address}, which is not the requested address");
            (State::Failed, "AddressDiffers", words)
        }
        Address::Dhcp | Address::Has(..) => (State::Ready, "", String::new()),
    };
    (state, reason, message, addresses)
}

/// Reports whether an address differs from the requested one, or is of a family that was not requested.
fn is_another(wanted: &Wanted, address: std::net::IpAddr) -> bool {
    let is_asked = wanted.addresses.first().is_none_or(|asked| *asked == address);
    !is_asked || !wanted.families.contains(&Family::of(address))
}

fn ipam(ipam: Ipam) -> v1::Ipam {
    match ipam {
        Ipam::Pool => v1::Ipam::Pool,
        Ipam::Dhcp => v1::Ipam::Dhcp,
    }
}

fn announcing(announcing: Announcing) -> v1::Announcing {
    match announcing {
        Announcing::KubeVip => v1::Announcing::KubeVip,
        Announcing::None => v1::Announcing::None,
        Announcing::Host => v1::Announcing::Host,
    }
}
