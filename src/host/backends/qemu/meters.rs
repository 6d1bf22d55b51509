//! Reads the metrics of a VM from QEMU, on request, through the QMP connection of its monitor.
//!
//! ```text
//! query-status ──answered──▶ query-cpus-fast, query-memory-size-summary, query-balloon, query-blockstats ──▶ qom-get per disk
//!       └──────── late ────▶ no more queries: a QEMU that hangs has one unanswered query, and not many
//! ```
//!
//! Values that QEMU refuses are absent, such as the balloon of a VM that has none. An answer that cannot be
//! parsed makes the whole request fail.

use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::time::Duration;

use futures_util::future::try_join_all;
use serde::Deserialize;
use serde::de::{DeserializeOwned, IgnoredAny};
use serde_json::Value;
use tokio::sync::watch;
use tokio::time::timeout;

use super::super::meters::{Answer, Disk, Measured, Meters, Requests, Unmeasured};
use super::hotplug::{Vms, seen};
use super::link::{CallError, Link, Standing};
use super::power;

/// Maximum number of disks of a VM that are reported.
pub const MOST_DISKS: usize = 16;

/// Reads the metrics of the VMs of the list that have a QMP socket.
#[derive(Debug, Clone)]
pub struct Qmp(watch::Receiver<Vms>);

impl Qmp {
    /// Creates the meters of these VMs.
    pub fn new(vms: watch::Receiver<Vms>) -> Self {
        Self(vms)
    }

    fn link(&self, vm: &str) -> Option<Link> {
        self.0.borrow().get(vm)?.as_ref().map(|vm| vm.link.clone())
    }
}

impl Meters for Qmp {
    fn measures(&self, vm: &str) -> bool {
        self.link(vm).is_some()
    }

    fn measure(&self, vm: &str, patience: Duration) -> Answer {
        let link = self.link(vm);
        Box::pin(async move {
            let link = link.ok_or_else(|| Unmeasured::Failed("the VM has no QMP socket".to_owned()))?;
            // The timeout of a single query is shorter than that of the whole, so that it expires first and is counted.
            let asked = measure(link.within(patience * 3 / 4));
            timeout(patience, asked).await.unwrap_or(Err(Unmeasured::Late))
        })
    }
}

/// Result of `query-status`.
#[derive(Deserialize)]
struct Status {
    status: String,
}

/// Result of `query-memory-size-summary`.
#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Memory {
    base_memory: u64,
    #[serde(default)]
    plugged_memory: u64,
}

/// Result of `query-balloon`.
#[derive(Deserialize)]
struct Balloon {
    actual: u64,
}

/// Entry in the result of `query-blockstats`.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Block {
    qdev: Option<String>,
    /// Name of the block node; `None` for a drive without a medium.
    node_name: Option<String>,
    stats: Statistics,
}

#[derive(Debug, Deserialize)]
struct Statistics {
    rd_bytes: u64,
    wr_bytes: u64,
    rd_operations: u64,
    wr_operations: u64,
    rd_total_time_ns: u64,
    wr_total_time_ns: u64,
}

async fn measure(link: Link) -> Result<Measured, Unmeasured> {
    match link.standing().await {
        Standing::Connected => {}
        Standing::Absent | Standing::Untried => return Err(Unmeasured::Failed("the VM is off".to_owned())),
        Standing::Silent(words) => return Err(Unmeasured::Failed(words)),
    }
    let status: Option<Status> = ask(&link, "query-status").await?;
    let (processors, memory, balloon, blocks) = tokio::try_join!(
        ask::<Vec<IgnoredAny>>(&link, "query-cpus-fast"),
        ask::<Memory>(&link, "query-memory-size-summary"),
        ask::<Balloon>(&link, "query-balloon"),
        ask::<Vec<Block>>(&link, "query-blockstats"),
    )?;
    let (blocks, more_disks) = busiest(blocks.unwrap_or_default());
    let disks = try_join_all(blocks.into_iter().map(|(device, statistics)| disk(&link, device, statistics)));
    Ok(Measured {
        power: status.map(|status| power::of_status(&status.status)).unwrap_or_default(),
        processors: processors.map(|all| all.len() as u64),
        memory: memory.map(|memory| memory.base_memory.saturating_add(memory.plugged_memory)),
        balloon: balloon.map(|balloon| balloon.actual),
        disks: disks.await?,
        more_disks,
    })
}

/// Returns the result of a query; `None` if QEMU refuses.
async fn ask<T: DeserializeOwned>(link: &Link, command: &'static str) -> Result<Option<T>, Unmeasured> {
    let strange = || Unmeasured::Failed(format!("QEMU's answer to {command} is not understood"));
    match link.call(command, Value::Null).await {
        Ok(answer) => serde_json::from_value(answer).map(Some).map_err(|_| strange()),
        Err(CallError::Refused { .. }) => Ok(None),
        Err(CallError::Silent(_)) => Err(Unmeasured::Late),
        Err(error) => Err(Unmeasured::Failed(error.to_string())),
    }
}

/// Returns the devices with a medium, without duplicates and busiest first, and the number of those that were
/// left out.
fn busiest(blocks: Vec<Block>) -> (Vec<(String, Statistics)>, usize) {
    let mut known = BTreeSet::new();
    let with_medium = blocks.into_iter().filter(|block| block.node_name.is_some());
    let mut found: Vec<_> = with_medium
        .filter_map(|block| Some((block.qdev?, block.stats)))
        .filter(|(device, _)| known.insert(device.clone()))
        .collect();
    found.sort_by_cached_key(|(device, all)| {
        (Reverse(all.rd_bytes.saturating_add(all.wr_bytes)), device.clone())
    });
    let more = found.len().saturating_sub(MOST_DISKS);
    found.truncate(MOST_DISKS);
    (found, more)
}

async fn disk(link: &Link, device: String, all: Statistics) -> Result<Disk, Unmeasured> {
    let serial = seen::serial(link, &device).await;
    let serial = serial.map_err(|error| Unmeasured::Failed(error.to_string()))?;
    let requests = |count, bytes, nanoseconds| Requests { count, bytes, nanoseconds };
    Ok(Disk {
        name: seen::identifier(&device).to_owned(),
        serial: seen::visible(&device, &serial).to_owned(),
        reads: requests(all.rd_operations, all.rd_bytes, all.rd_total_time_ns),
        writes: requests(all.wr_operations, all.wr_bytes, all.wr_total_time_ns),
    })
}
