//! Requests of clusters for load balancers. Each is decided here, and on the disk before it is answered.

use std::net::IpAddr;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tokio::time::Instant;

use super::super::meet::{Failure, Ground, check_change};
use super::super::record::{Record, Stage};
use super::super::view::event;
use super::super::wanted::{Announcing, Service, Wanted};
use super::super::{Asker, Problem};
use super::Desk;
use crate::host::cloud::health::MOST_CHECKS;
use crate::wire::proto::v1;

/// Time for which a released address goes to no other Service as long as another address is free.
const REST: Duration = Duration::from_secs(60);
/// Characters of identifiers.
const LETTERS: &[u8] = b"abcdefghijklmnopqrstuvwxyz234567";
/// Length of an identifier: 20 letters are a hundred random bits.
const LENGTH: usize = 20;

impl Desk {
    /// Checks that a VM may request load balancers and that this host provides any.
    pub(super) fn admit(&self, asker: &Asker) -> Result<(), Problem> {
        self.settings.check_asker(&asker.cluster, &asker.vm).map_err(Problem::Denied)?;
        if self.settings.pools.is_empty() && self.store.is_none() {
            let words = "the settings of this host have no load balancers; see [[address-pool]]";
            return Err(Problem::Nothing(words.to_owned()));
        }
        Ok(())
    }

    pub(super) async fn ensure(
        &mut self,
        asker: &Asker,
        service: Service,
        wanted: Wanted,
    ) -> Result<v1::LoadBalancer, Problem> {
        self.admit(asker)?;
        self.store().await?;
        let known = self.book.find(&asker.cluster, &service.uid).cloned();
        let known = match known {
            Some(known) => known,
            None => self.begin_new(asker, service.clone())?,
        };
        if let Some(met) = &known.met {
            check_change(met.ipam, &met.network, &wanted).map_err(Problem::Contradiction)?;
        }
        self.check_checks(&known, &wanted)?;
        // A Service cannot be renamed, but messages use the name from the newest request.
        let mut known = known;
        known.service = service;
        let answer = self.meet(known, wanted).await?;
        // Load balancers that are to share its address may have been waiting for it.
        let waits = |id: &String| {
            let record = self.book.get(id).filter(|record| record.cluster == asker.cluster)?;
            record.asked.as_ref()?.share.as_ref().map(|_| id.clone())
        };
        let waiting: Vec<_> =
            self.failures.keys().filter_map(waits).filter(|id| answer.name != format!("lb-{id}")).collect();
        self.try_these_again(waiting).await;
        Ok(answer)
    }

    fn begin_new(&self, asker: &Asker, service: Service) -> Result<Record, Problem> {
        let has = self.book.count(&asker.cluster);
        self.settings.check_count(&asker.cluster, has).map_err(Problem::Exhausted)?;
        let id = loop {
            let letter = |_| char::from(LETTERS[fastrand::usize(..LETTERS.len())]);
            let id: String = (0..LENGTH).map(letter).collect();
            if !self.book.has(&id) {
                break id;
            }
        };
        Ok(Record::new(id, asker.cluster.clone(), service))
    }

    /// Checks that agents would not have to make more than `MOST_CHECKS` checks.
    fn check_checks(&self, record: &Record, wanted: &Wanted) -> Result<(), Problem> {
        if wanted.check.is_none() {
            return Ok(());
        }
        let checks = |other: &&Record| {
            other.id != record.id && other.met.as_ref().is_some_and(|met| met.check.is_some())
        };
        if self.book.of_cluster(&record.cluster).filter(checks).count() < MOST_CHECKS {
            return Ok(());
        }
        Err(Problem::Exhausted(format!(
            "the cluster has {MOST_CHECKS} load balancers with health checks, which is the limit"
        )))
    }

    /// Gives a load balancer the requested configuration, or records why that is not possible.
    async fn meet(&mut self, known: Record, wanted: Wanted) -> Result<v1::LoadBalancer, Problem> {
        let (id, cluster) = (known.id.clone(), known.cluster.clone());
        let ground = Ground { book: &self.book, settings: &self.settings, now: Instant::now() };
        let before = known.clone();
        let met = ground.meet(&known, &wanted);
        let mut record = known;
        let failure = match met {
            Ok(addresses) => {
                (record.addresses, record.met, record.asked) = (addresses, Some(wanted), None);
                None
            }
            Err(failure) => {
                record.asked = Some(wanted);
                Some(failure)
            }
        };
        let is_new = self.book.get(&id).is_none();
        if is_new || record != before {
            let is_forwarded =
                |record: &Record| record.met.as_ref().is_some_and(|met| met.announcing == Announcing::Host);
            let freed = before.addresses != record.addresses;
            if is_forwarded(&record) && (record.met != before.met || freed) {
                self.awaited.insert(id.clone(), None);
            }
            self.keep(record.clone()).await?;
            let is_lost = |address: &IpAddr| !record.addresses.iter().any(|held| held.address == *address);
            let lost = before.addresses.iter().map(|held| held.address).filter(is_lost);
            let now = Instant::now();
            self.book.rest(&before, lost, now + REST, now);
            self.forget(&cluster).await;
            told_of(&before, &record, failure.as_ref());
            self.unsettle(&cluster);
        }
        match failure {
            Some(failure) => drop(self.failures.insert(id.clone(), failure)),
            None => drop(self.failures.remove(&id)),
        }
        self.show(&cluster, &id);
        let shown = self.cluster(&cluster).balancers.get(&id).cloned();
        shown.ok_or_else(|| Problem::Unavailable("the load balancer is being released".to_owned()))
    }

    /// Releases the load balancer of a Service. Succeeds also if it has none.
    pub(super) async fn release(&mut self, cluster: &str, uid: &str) -> Result<bool, Problem> {
        self.store().await?;
        let Some(record) = self.book.find(cluster, uid).cloned() else { return Ok(false) };
        let sharers: Vec<_> = self
            .book
            .sharers(&record)
            .map(|sharer| format!("{}/{}", sharer.service.namespace, sharer.service.name))
            .collect();
        if !sharers.is_empty() {
            let names = sharers.join(", ");
            return Err(Problem::Contradiction(format!("its address is shared by other Services: {names}")));
        }
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let mut gone = record.clone();
        (gone.stage, gone.met, gone.asked, gone.released) = (Stage::Released, None, None, Some(now));
        self.keep(gone).await?;
        let (lost, now) = (record.addresses.iter().map(|held| held.address), Instant::now());
        self.book.rest(&record, lost, now + REST, now);
        self.failures.remove(&record.id);
        self.awaited.remove(&record.id);
        let of = self.cluster(cluster);
        let event = event(cluster, of.balancers.get(&record.id), None);
        of.balancers.remove(&record.id);
        of.balancers.tell();
        self.events.extend(event);
        self.forget(cluster).await;
        told_of_release(&record);
        self.unsettle(cluster);
        if !record.addresses.is_empty() {
            self.try_again().await;
        }
        Ok(true)
    }

    /// Retries the requests that could not be satisfied.
    pub(super) async fn try_again(&mut self) {
        if self.failures.is_empty() || !matches!(self.store, Some(Ok(_))) {
            return;
        }
        let failed: Vec<_> = self.failures.keys().cloned().collect();
        self.try_these_again(failed).await;
    }

    async fn try_these_again(&mut self, failed: Vec<String>) {
        for id in failed {
            let Some(record) = self.book.get(&id).filter(|record| record.is_kept()).cloned() else {
                self.failures.remove(&id);
                continue;
            };
            let Some(asked) = record.asked.clone() else {
                self.failures.remove(&id);
                continue;
            };
            // Contradictions were refused on request; a failed write is retried with the next tick.
            if self.meet(record, asked).await.is_err() {
                return;
            }
        }
    }
}

/// Logs how a load balancer has changed.
fn told_of(before: &Record, now: &Record, failure: Option<&Failure>) {
    let named = |record: &Record| {
        record.addresses.iter().map(|held| held.address.to_string()).collect::<Vec<_>>().join(",")
    };
    let Service { namespace, name, .. } = &now.service;
    let cluster = &now.cluster;
    if before.addresses != now.addresses {
        let (was, is) = (named(before), named(now));
        tracing::info!(cluster, service = format!("{namespace}/{name}"), was, is, "load balancer");
    }
    if let Some(Failure { reason, message }) = failure {
        tracing::debug!(
            cluster,
            service = format!("{namespace}/{name}"),
            reason,
            message,
            "load balancer fails"
        );
    }
}

fn told_of_release(record: &Record) {
    let Service { namespace, name, .. } = &record.service;
    let cluster = &record.cluster;
    tracing::info!(cluster, service = format!("{namespace}/{name}"), "load balancer released");
}
