//! Follows what the host half reports of VMs and load balancers, by long polls. While it cannot be reached,
//! the last known state is kept.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;
use tonic::Status;

use crate::ccm::host::{Host, is_sensible};
use crate::ccm::instance::{Instances, clean};
use crate::kubernetes::standing::Teller;
use crate::wire::proto::v1;

/// Wait between two attempts, at first and at most.
const FIRST_WAIT: Duration = Duration::from_millis(200);
const LONGEST_WAIT: Duration = Duration::from_secs(15);
/// Duration below which an answer counts as immediate.
const QUICK: Duration = Duration::from_millis(100);
/// Immediate answers with changes in a row that are accepted.
const MOST_QUICK: u32 = 64;
/// Limit of the characters of a position.
const LONGEST_POSITION: usize = 256;
/// Limit of the load balancers that are kept.
const MOST: usize = 4096;

/// All load balancers that the host half has reported.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Balancers {
    /// Load balancers by the UIDs of their Services. Those without a UID matter to the reconciliation only.
    pub all: BTreeMap<String, Arc<v1::LoadBalancer>>,
    /// True once a complete list was received.
    pub is_complete: bool,
    /// Number of complete lists so far. A further one means that the host half was restarted, or no longer had
    /// all changes since the position that was asked for.
    pub begun: u64,
}

impl Balancers {
    fn take(&mut self, answer: v1::WatchLoadBalancersResponse) {
        if answer.complete {
            self.all.clear();
            self.is_complete = true;
            self.begun += 1;
        }
        for gone in answer.gone {
            self.all.remove(&gone.uid);
        }
        for balancer in answer.load_balancers.into_iter().filter(is_sensible) {
            let uid = balancer.service.as_ref().map(|service| service.uid.clone()).unwrap_or_default();
            if !uid.is_empty() && (self.all.len() < MOST || self.all.contains_key(&uid)) {
                self.all.insert(uid, Arc::new(balancer));
            }
        }
    }
}

/// Waits between answers that bring no progress.
struct Pace {
    failures: u32,
    begun: Instant,
    /// Immediate answers in a row.
    quick: u32,
}

impl Pace {
    fn new() -> Self {
        Self { failures: 0, begun: Instant::now(), quick: 0 }
    }

    fn begin(&mut self) {
        self.begun = Instant::now();
    }

    /// Waits before the next call if the last one failed, or was answered too soon without a change.
    async fn rest(&mut self, is_well: bool) {
        if is_well {
            self.failures = 0;
            return;
        }
        self.failures = self.failures.saturating_add(1);
        let longest = FIRST_WAIT.saturating_mul(1 << (self.failures - 1).min(16)).min(LONGEST_WAIT);
        tokio::time::sleep(longest.mul_f64(0.5 + fastrand::f64() / 2.0)).await;
    }

    /// Reports whether the next call may follow at once. Changes may arrive at once, but a host half that always
    /// answers at once, or answers at once without a change, is not called in a busy loop.
    fn gets_on(&mut self, is_news: bool) -> bool {
        self.quick = if self.begun.elapsed() >= QUICK { 0 } else { self.quick.saturating_add(1) };
        self.quick == 0 || is_news && self.quick <= MOST_QUICK
    }
}

/// Returns the position for the next call. One that is too long is replaced by the empty position, which
/// requests a complete list.
fn kept(position: &str) -> String {
    if position.len() <= LONGEST_POSITION { position.to_owned() } else { String::new() }
}

fn failed(teller: &Teller, status: &Status) {
    teller.failed(&clean(status.message()));
}

/// Follows the VMs, for ever.
pub async fn instances(host: Host, known: watch::Sender<Instances>, teller: Teller) {
    let (mut position, mut pace) = (String::new(), Pace::new());
    loop {
        pace.begin();
        let is_well = match host.watch_instances(&position).await {
            Ok(answer) => {
                teller.well();
                let is_news = answer.complete || !answer.instances.is_empty() || !answer.withdrawn.is_empty();
                position = kept(&answer.position);
                let mut wrong = Vec::new();
                if is_news {
                    known.send_modify(|known| wrong = known.take(answer));
                }
                for why in wrong {
                    tracing::warn!("a VM that the host half reports is ignored: {why}");
                }
                pace.gets_on(is_news)
            }
            Err(status) => {
                failed(&teller, &status);
                false
            }
        };
        pace.rest(is_well).await;
    }
}

/// Follows the load balancers, for ever.
pub async fn balancers(host: Host, known: watch::Sender<Balancers>, teller: Teller) {
    let (mut position, mut pace) = (String::new(), Pace::new());
    loop {
        pace.begin();
        let is_well = match host.watch_load_balancers(&position).await {
            Ok(answer) => {
                teller.well();
                let is_news = answer.complete || !answer.load_balancers.is_empty() || !answer.gone.is_empty();
                position = kept(&answer.position);
                if is_news {
                    known.send_modify(|known| known.take(answer));
                }
                pace.gets_on(is_news)
            }
            Err(status) => {
                failed(&teller, &status);
                false
            }
        };
        pace.rest(is_well).await;
    }
}
