//! Logical processors: which exist, which are online, and how they have spent their time.

use std::io;

use nix::unistd::{SysconfVar, sysconf};

use crate::guest::Guest;
use crate::sys::proc_stat::{self, Times};
use crate::sys::root::Root;
use crate::sys::{blocking, sysfs};

const FOLDER: &str = "/sys/devices/system/cpu";

/// Logical processor (CPU).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Processor {
    /// Number of the processor in the kernel.
    pub id: u64,
    /// True if the processor runs programs.
    pub online: bool,
    /// True if the processor can be switched off.
    pub can_offline: bool,
}

/// Reason why a processor was not switched on or off.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No processor has this number.
    #[error("there is no processor {0}")]
    Unknown(u64),
    /// The processor cannot be switched off, as is usual for the first one.
    #[error("processor {0} cannot be switched off")]
    AlwaysOn(u64),
    /// The kernel refused the change.
    #[error("processor {id} cannot be switched {to}")]
    Refused {
        /// Number of the processor.
        id: u64,
        /// Requested state: on or off.
        to: &'static str,
        /// Error of the kernel.
        source: io::Error,
    },
}

/// Returns all processors, in the order of their numbers.
///
/// # Errors
/// If /sys cannot be read.
pub async fn list(guest: &Guest) -> io::Result<Vec<Processor>> {
    let root = guest.root.clone();
    blocking::run(move || {
        sysfs::numbers(&root, FOLDER, "cpu")?.into_iter().map(|id| processor(&root, id)).collect()
    })
    .await
}

fn processor(root: &Root, id: u64) -> io::Result<Processor> {
    match root.read(&switch(id)) {
        Ok(state) => Ok(Processor { id, online: state.first() != Some(&b'0'), can_offline: true }),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            Ok(Processor { id, online: true, can_offline: false })
        }
        Err(error) => Err(error),
    }
}

fn switch(id: u64) -> String {
    format!("{FOLDER}/cpu{id}/online")
}

/// Switches processors on (true) and off, one after another, until one fails. Returns how many are in the
/// requested state before that.
///
/// # Errors
/// If the first one fails.
pub async fn set(guest: &Guest, wanted: Vec<(u64, bool)>) -> Result<usize, Error> {
    let root = guest.root.clone();
    blocking::run(move || {
        for (place, (id, online)) in wanted.iter().enumerate() {
            match set_one(&root, *id, *online) {
                Err(error) if place == 0 => return Err(error),
                Err(error) => {
                    tracing::info!("{}", crate::sys::error_chain::words(&error));
                    return Ok(place);
                }
                Ok(()) => {}
            }
        }
        Ok(wanted.len())
    })
    .await
}

fn set_one(root: &Root, id: u64, online: bool) -> Result<(), Error> {
    let refused = |source| Error::Refused { id, to: if online { "on" } else { "off" }, source };
    if !root.path(&format!("{FOLDER}/cpu{id}")).is_dir() {
        return Err(Error::Unknown(id));
    }
    let now = processor(root, id).map_err(refused)?;
    if now.online == online {
        return Ok(());
    }
    if !now.can_offline {
        return Err(Error::AlwaysOn(id));
    }
    sysfs::write(root, &switch(id), if online { "1" } else { "0" }).map_err(refused)
}

/// Returns how each online processor has spent its time since boot, in milliseconds.
///
/// # Errors
/// If /proc/stat cannot be read.
pub fn times(root: &Root) -> io::Result<Vec<Times>> {
    let file = root.read("/proc/stat")?;
    let ticks = sysconf(SysconfVar::CLK_TCK).ok().flatten().and_then(|ticks| u64::try_from(ticks).ok());
    let ticks = ticks.filter(|ticks| *ticks > 0).unwrap_or(100);
    let milliseconds = |count: u64| count.saturating_mul(1000) / ticks;
    let in_milliseconds = |times: Times| Times {
        processor: times.processor,
        user: milliseconds(times.user),
        nice: milliseconds(times.nice),
        system: milliseconds(times.system),
        idle: milliseconds(times.idle),
        waiting: times.waiting.map(milliseconds),
        interrupts: times.interrupts.map(milliseconds),
        soft_interrupts: times.soft_interrupts.map(milliseconds),
        stolen: times.stolen.map(milliseconds),
        guest: times.guest.map(milliseconds),
        guest_nice: times.guest_nice.map(milliseconds),
    };
    let text = String::from_utf8_lossy(&file);
    Ok(proc_stat::processors(&text).into_iter().map(in_milliseconds).collect())
}
