//! A load balancer as it is reported to its cluster and to people. Pure.

use super::book::Book;
use super::health::Nodes;
use super::meet::Failure;
use super::record::Record;
use super::settings::Settings;
use super::wanted::{Announcing, Family, Ipam, Wanted};
use crate::wire::proto::v1;
use crate::wire::proto::v1::load_balancer::State;

/// Input of a report on one load balancer.
#[derive(Debug, Clone, Copy)]
pub struct Told<'t> {
    /// Index of all load balancers, for the one whose address this one may share.
    pub book: &'t Book,
    /// Settings of the pools, for the network of its address.
    pub settings: &'t Settings,
    /// Record of the load balancer.
    pub record: &'t Record,
    /// Nodes that take its traffic, and those that fail.
    pub nodes: &'t Nodes,
    /// Reason why it does not have what was requested, if so.
    pub failure: Option<&'t Failure>,
    /// True while its rules are not in force yet.
    pub is_awaited: bool,
}

/// Returns the event for people if the state, the reason or the addresses of a load balancer have changed. Changes
/// of its nodes are not reported.
pub fn event(
    cluster: &str,
    before: Option<&v1::LoadBalancer>,
    now: Option<&v1::LoadBalancer>,
) -> Option<v1::LoadBalancerChanged> {
    let shown = now.or(before)?;
    let of = |one: &v1::LoadBalancer| (one.state(), one.reason.clone(), one.addresses.clone());
    if before.map(of) == now.map(of) {
        return None;
    }
    let state = match now.map(v1::LoadBalancer::state) {
        None => "gone",
        Some(State::Ready) => "ready",
        Some(State::Failed) => "failed",
        Some(_) => "pending",
    };
    let service = shown.service.clone().unwrap_or_default();
    Some(v1::LoadBalancerChanged {
        cluster: cluster.to_owned(),
        namespace: service.namespace,
        service: service.name,
        state: state.to_owned(),
        addresses: shown.addresses.iter().map(|held| held.address.clone()).collect(),
        reason: shown.reason.clone(),
        message: shown.message.clone(),
    })
}

/// Returns the families of the addresses that a load balancer has.
pub fn families(book: &Book, record: &Record) -> Vec<Family> {
    let of = book.shared_by(record).unwrap_or(record);
    let held = |family: &Family| of.addresses.iter().any(|held| Family::of(held.address) == *family);
    match &record.met {
        None => Vec::new(),
        Some(met) if met.ipam == Ipam::Dhcp => met.families.clone(),
        Some(met) => met.families.iter().copied().filter(held).collect(),
    }
}

impl Told<'_> {
    /// Builds the description that is sent to its cluster.
    pub fn message(self) -> v1::LoadBalancer {
        let Record { id, service, met, asked, .. } = self.record;
        let shown: Option<&Wanted> = met.as_ref().or(asked.as_ref());
        let state = match self.failure {
            Some(_) => State::Failed,
            None if self.is_awaited || met.is_none() => State::Pending,
            None => State::Ready,
        };
        let (reason, message) = match (self.failure, state) {
            (Some(failure), _) => (failure.reason, failure.message.clone()),
            (None, State::Pending) => ("Pending", "the host does not forward its traffic yet".to_owned()),
            (None, _) => ("", String::new()),
        };
        let mut told = v1::LoadBalancer {
            service: Some(service.into()),
            name: format!("lb-{id}"),
            state: state.into(),
            reason: reason.to_owned(),
            message,
            addresses: self.addresses(),
            network: self.network(shown),
            shares_with: met.as_ref().and_then(|met| met.share.as_ref()).map(Into::into),
            failing: self.nodes.failing.clone(),
            healthy: self.nodes.healthy,
            ..v1::LoadBalancer::default()
        };
        if let Some(shown) = shown {
            told.set_ipam(match shown.ipam {
                Ipam::Pool => v1::Ipam::Pool,
                Ipam::Dhcp => v1::Ipam::Dhcp,
            });
            told.set_announcing(match shown.announcing {
                Announcing::KubeVip => v1::Announcing::KubeVip,
                Announcing::None => v1::Announcing::None,
                Announcing::Host => v1::Announcing::Host,
            });
        }
        told
    }

    /// Returns the requested network or, if none is requested, that of its pool.
    fn network(self, shown: Option<&Wanted>) -> String {
        let asked = shown.map(|wanted| wanted.network.clone()).unwrap_or_default();
        let of = self.book.shared_by(self.record).unwrap_or(self.record);
        let pool = of.addresses.first().and_then(|held| self.settings.pool(&held.pool));
        match pool.and_then(|pool| pool.network.clone()) {
            Some(network) if asked.is_empty() => network,
            _ => asked,
        }
    }

    /// Returns its addresses, in its preferred order of families. An address by DHCP is reported as `0.0.0.0` or `::`.
    fn addresses(self) -> Vec<v1::LoadBalancerAddress> {
        let Some(met) = &self.record.met else { return Vec::new() };
        let of = self.book.shared_by(self.record).unwrap_or(self.record);
        let address = |family: Family| {
            if met.ipam == Ipam::Dhcp {
                let any = if family.is_ipv4() { "0.0.0.0" } else { "::" };
                return Some(v1::LoadBalancerAddress { address: any.to_owned(), pool: String::new() });
            }
            let held = of.addresses.iter().find(|held| Family::of(held.address) == family)?;
            Some(v1::LoadBalancerAddress { address: held.address.to_string(), pool: held.pool.clone() })
        };
        families(self.book, self.record).into_iter().filter_map(address).collect()
    }
}
