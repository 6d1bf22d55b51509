//! In-memory index of all load balancers and of the free addresses. Pure: records are stored on the disk by
//! `store`.
//!
//! An address is taken by the load balancer that holds it, or by a damaged record. As long as even the addresses
//! of some record cannot be read, no address is known to be free, and none is allocated.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use tokio::time::Instant;

use super::record::{Damaged, Held, Record, Stage};
use super::settings::Pool;
use super::wanted::{Family, Service};
use crate::addresses::{Range, number, with_number};

/// Released load balancers of one cluster whose addresses are remembered at most.
const MOST_REMEMBERED: usize = 256;

/// Index of all load balancers by identifier, Service and address.
#[derive(Debug, Default)]
pub struct Book {
    /// Records by identifier, including those of released load balancers.
    records: BTreeMap<String, Record>,
    /// Identifiers of the kept load balancers, by cluster and UID.
    services: BTreeMap<String, BTreeMap<String, String>>,
    /// Identifier of the load balancer that holds each address.
    held: BTreeMap<IpAddr, String>,
    /// Identifier of the released load balancer that last held each address that nobody holds now.
    remembered: BTreeMap<IpAddr, String>,
    /// Records that cannot be used, by their file names.
    damaged: BTreeMap<String, Damaged>,
    /// Addresses that the damaged records hold.
    reserved: BTreeSet<IpAddr>,
    /// Addresses of records of which it is unknown whether they were written, by their identifiers.
    doubtful: BTreeMap<String, Vec<IpAddr>>,
    /// Addresses that have been lost a moment ago, with the end of their rest and the Service that had them: cluster,
    /// namespace and name.
    resting: BTreeMap<IpAddr, (Instant, (String, String, String))>,
    /// Last allocated address of each pool and family.
    last: BTreeMap<(String, Family), IpAddr>,
}

/// Reason why no address is available.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lack {
    /// All addresses are taken.
    Exhausted,
    /// A record cannot be read, and its addresses are unknown.
    Blind,
}

impl Book {
    /// Builds the index from the records on the disk. Of two records with the same address or the same Service, the
    /// second counts as damaged.
    pub fn new(records: Vec<Record>, mut damaged: BTreeMap<String, Damaged>) -> Self {
        let mut book = Self::default();
        for record in records {
            let addresses: Vec<_> = record.addresses.iter().map(|held| held.address).collect();
            let other = addresses.iter().find_map(|address| Some((address, book.held.get(address)?)));
            let twin = book.find(&record.cluster, &record.service.uid).map(|twin| &twin.id);
            let problem = match (record.is_kept(), other, twin) {
                (true, Some((address, other)), _) => format!("{address} is also in the record {other}"),
                (true, None, Some(twin)) => format!("the record {twin} is for the same Service"),
                _ => {
                    book.put(record);
                    continue;
                }
            };
            damaged.insert(record.id, Damaged { problem, addresses: Some(addresses) });
        }
        book.reserved = damaged.values().flat_map(|one| one.addresses.clone().unwrap_or_default()).collect();
        book.damaged = damaged;
        book
    }

    /// Adds a record, or replaces the one with the same identifier.
    pub fn put(&mut self, record: Record) {
        self.remove(&record.id);
        self.doubtful.remove(&record.id);
        let addresses = record.addresses.iter().map(|held| held.address);
        match record.stage {
            Stage::Kept => {
                for held in &record.addresses {
                    self.held.insert(held.address, record.id.clone());
                    self.last.insert((held.pool.clone(), Family::of(held.address)), held.address);
                }
                let services = self.services.entry(record.cluster.clone()).or_default();
                services.insert(record.service.uid.clone(), record.id.clone());
            }
            Stage::Released => {
                for address in addresses {
                    let last = self.had(address).and_then(|other| other.released);
                    if last <= record.released {
                        self.remembered.insert(address, record.id.clone());
                    }
                }
            }
        }
        self.records.insert(record.id.clone(), record);
    }

    /// Reserves the addresses of a record of which it is unknown whether it was written, until it has been written.
    pub fn doubt(&mut self, record: &Record) {
        let addresses = record.addresses.iter().map(|held| held.address).collect();
        self.doubtful.insert(record.id.clone(), addresses);
    }

    /// Removes a record.
    pub fn remove(&mut self, id: &str) {
        let Some(record) = self.records.remove(id) else { return };
        let of = if record.is_kept() { &mut self.held } else { &mut self.remembered };
        for held in &record.addresses {
            if of.get(&held.address).is_some_and(|holder| holder == id) {
                of.remove(&held.address);
            }
        }
        if record.is_kept()
            && let Some(services) = self.services.get_mut(&record.cluster)
            && services.get(&record.service.uid).is_some_and(|found| found == id)
        {
            services.remove(&record.service.uid);
            if services.is_empty() {
                self.services.remove(&record.cluster);
            }
        }
    }

    /// Reports whether a record, usable or damaged, has this identifier.
    pub fn has(&self, id: &str) -> bool {
        self.records.contains_key(id) || self.damaged.contains_key(id)
    }

    /// Returns the record with this identifier.
    pub fn get(&self, id: &str) -> Option<&Record> {
        self.records.get(id)
    }

    /// Returns the load balancer of a Service.
    pub fn find(&self, cluster: &str, uid: &str) -> Option<&Record> {
        self.records.get(self.services.get(cluster)?.get(uid)?)
    }

    /// Returns all load balancers of a cluster, ordered by the UIDs of their Services.
    pub fn of_cluster(&self, cluster: &str) -> impl Iterator<Item = &Record> {
        let ids = self.services.get(cluster).into_iter().flat_map(BTreeMap::values);
        ids.filter_map(|id| self.records.get(id))
    }

    /// Counts the load balancers of a cluster, without the released ones.
    pub fn count(&self, cluster: &str) -> usize {
        self.services.get(cluster).map_or(0, BTreeMap::len)
    }

    /// Returns the clusters that have load balancers.
    pub fn clusters(&self) -> impl Iterator<Item = &String> {
        self.services.keys()
    }

    /// Returns the load balancers that share the address of this one, ordered by the UIDs of their Services.
    pub fn sharers<'b>(&'b self, of: &'b Record) -> impl Iterator<Item = &'b Record> {
        let shares = |record: &&Record| {
            let share = record.met.as_ref().and_then(|met| met.share.as_ref());
            share.is_some_and(|share| share.uid == of.service.uid)
        };
        self.of_cluster(&of.cluster).filter(shares)
    }

    /// Returns the load balancer whose address this one shares, if any.
    pub fn shared_by(&self, record: &Record) -> Option<&Record> {
        let share = record.met.as_ref()?.share.as_ref()?;
        self.find(&record.cluster, &share.uid)
    }

    /// Returns the records that cannot be used, by their file names.
    pub fn damaged(&self) -> &BTreeMap<String, Damaged> {
        &self.damaged
    }

    /// Returns the identifier of the load balancer that holds an address, if any.
    pub fn holder(&self, address: IpAddr) -> Option<&str> {
        self.held.get(&address).map(String::as_str)
    }

    /// Reports whether an address can be allocated.
    pub fn is_free(&self, address: IpAddr) -> bool {
        !self.is_blind()
            && !self.held.contains_key(&address)
            && !self.reserved.contains(&address)
            && !self.doubtful.values().any(|addresses| addresses.contains(&address))
    }

    /// Marks addresses that a load balancer loses as resting until `until`: other Services get them only as a last
    /// resort, since it takes a moment until nobody announces them and no cache has them any longer.
    pub fn rest(&mut self, of: &Record, lost: impl Iterator<Item = IpAddr>, until: Instant, now: Instant) {
        self.resting.retain(|_, (until, _)| *until > now);
        let service = (of.cluster.clone(), of.service.namespace.clone(), of.service.name.clone());
        self.resting.extend(lost.map(|address| (address, (until, service.clone()))));
    }

    /// Reports whether an address rests for this Service. It never rests for the Service that last had it.
    pub fn rests(&self, address: IpAddr, cluster: &str, service: &Service, now: Instant) -> bool {
        self.resting.get(&address).is_some_and(|(until, (of, namespace, name))| {
            *until > now && (of.as_str(), namespace, name) != (cluster, &service.namespace, &service.name)
        })
    }

    /// Reports whether the addresses of some damaged record are unknown, so that no address is known to be free.
    pub fn is_blind(&self) -> bool {
        self.damaged.values().any(|damaged| damaged.addresses.is_none())
    }

    /// Counts the addresses of one family in a pool that are taken.
    pub fn taken(&self, pool: &Pool, family: Family) -> usize {
        let of = |range: &&Range| range.is_ipv4() == family.is_ipv4();
        let count = |range: &Range| {
            let bounds = range.first()..=range.last();
            self.held.range(bounds.clone()).count() + self.reserved.range(bounds).count()
        };
        pool.ranges.iter().filter(of).map(count).sum()
    }

    /// Returns the released load balancer that last held an address, unless somebody holds the address now.
    pub fn had(&self, address: IpAddr) -> Option<&Record> {
        self.records.get(self.remembered.get(&address)?)
    }

    /// Picks a free address of a pool. In order of preference: the address that the Service of this name had before;
    /// the next one after the last allocation that nobody has had; the one that was released first. Addresses that
    /// [rest](Self::rest) come last.
    ///
    /// # Errors
    /// If no address of the pool is free.
    pub fn pick(
        &self,
        pool: &Pool,
        family: Family,
        cluster: &str,
        service: &Service,
        now: Instant,
    ) -> Result<Held, Lack> {
        let rests = |address: IpAddr| self.rests(address, cluster, service, now);
        if self.is_blind() {
            return Err(Lack::Blind);
        }
        let held = |address| Held { address, pool: pool.name.clone() };
        let inside = |range: &Range| self.remembered.range(range.first()..=range.last());
        let ranges = || pool.ranges.iter().filter(|range| range.is_ipv4() == family.is_ipv4());
        let before = || ranges().flat_map(inside).filter(|(address, _)| self.is_free(**address));
        let is_same = |id: &String| {
            self.records.get(id).is_some_and(|record| {
                record.cluster == cluster
                    && (&record.service.namespace, &record.service.name)
                        == (&service.namespace, &service.name)
            })
        };
        let given_back = |id: &String| self.records.get(id).and_then(|record| record.released);
        let same = before().filter(|(_, id)| is_same(id)).max_by_key(|(_, id)| given_back(id));
        if let Some((address, _)) = same {
            return Ok(held(*address));
        }
        let last = self.last.get(&(pool.name.clone(), family)).map(|last| number(*last));
        let after = |range: &Range| {
            let last = last.filter(|last| *last >= number(range.first()))?;
            self.next_new(range, last.checked_add(1)?, rests)
        };
        // Start after the last allocation in its range, continue with the ranges behind it, and then start from the
        // beginning.
        let at = last.and_then(|last| {
            ranges().position(|range| (number(range.first())..=number(range.last())).contains(&last))
        });
        let behind = at.and_then(|at| {
            let mut left = ranges().skip(at);
            left.next()
                .and_then(after)
                .or_else(|| left.find_map(|range| self.next_new(range, number(range.first()), rests)))
        });
        let new =
            behind.or_else(|| ranges().find_map(|range| self.next_new(range, number(range.first()), rests)));
        if let Some(address) = new {
            return Ok(held(address));
        }
        let oldest = before().min_by_key(|(address, id)| (rests(**address), given_back(id), **address));
        if let Some((address, _)) = oldest.filter(|(address, _)| !rests(**address)) {
            return Ok(held(*address));
        }
        // Only resting addresses are left. Prefer one that no released load balancer remembers.
        let never = |_| false;
        let resting = ranges().find_map(|range| self.next_new(range, number(range.first()), never));
        resting.or(oldest.map(|(address, _)| *address)).map(held).ok_or(Lack::Exhausted)
    }

    /// Returns the first address of a range, from a number on, that nobody has or has had. Skips taken addresses one
    /// by one.
    fn next_new(&self, range: &Range, from: u128, rests: impl Fn(IpAddr) -> bool) -> Option<IpAddr> {
        let (mut at, last) = (from, number(range.last()));
        while at <= last {
            let address = with_number(range.first(), at)?;
            if self.is_free(address) && !self.remembered.contains_key(&address) && !rests(address) {
                return Some(address);
            }
            at = at.checked_add(1)?;
        }
        None
    }

    /// Returns the identifiers of released records that can be deleted: all their addresses are held by others now, or
    /// the cluster has more than `MOST_REMEMBERED` of them and these are the oldest.
    pub fn forgettable(&self, cluster: &str) -> Vec<String> {
        let released = self.records.values().filter(|record| !record.is_kept() && record.cluster == cluster);
        let mut kept: Vec<&Record> = Vec::new();
        let mut forgettable = Vec::new();
        for record in released {
            let is_gone = |held: &Held| self.held.contains_key(&held.address);
            if record.addresses.iter().all(is_gone) {
                forgettable.push(record.id.clone());
            } else {
                kept.push(record);
            }
        }
        kept.sort_by_key(|record| (record.released, record.id.clone()));
        let over = kept.len().saturating_sub(MOST_REMEMBERED);
        forgettable.extend(kept.iter().take(over).map(|record| record.id.clone()));
        forgettable
    }
}

#[cfg(test)]
mod tests;
