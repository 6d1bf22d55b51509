//! Commands that list disks and their statistics.

use serde::{Serialize, Serializer};

use crate::guest::Guest;
use crate::guest::block_devices::list::{Listed, list};
use crate::guest::block_devices::{self, Disk, Wait, statistics};
use crate::guest::disks::location::{Channel, Pci};
use crate::policy::Role;
use crate::qga::call::Call;
use crate::qga::error::Error;
use crate::qga::reply::Reply;
use crate::qga::table::{Command, Outcome, Pending, Run};
use crate::sys::blocking;
use crate::sys::diskstats::Statistics;
use crate::sys::nvme::Health;

/// Rows of the command table.
pub const COMMANDS: &[Command] = &[
    Command {
        name: "guest-get-disks",
        role: Some(Role::Status),
        since: "5.2",
        returns: "[{name, partition, dependencies?, address? (as of guest-get-fsinfo), alias?, smart? (of NVMe disks)}]",
        summary: "Disks and their partitions, what they are made of, and where they are.",
        differences: "As guest-get-fsinfo. The name that device-mapper has for a disk is reported even \
                      without udev. Partitions of the same disk are in the order of their numbers, the last \
                      one first.",
        run: Run::Later(get_disks),
        ..Command::USUAL
    },
    Command {
        name: "guest-get-diskstats",
        role: Some(Role::Metrics),
        since: "7.1",
        returns: "[{name, major, minor, stats{read-sectors, read-ios, write-sectors, write-ios, read-merges?, read-ticks?, \
                  write-merges?, write-ticks?, ios-pgr?, total-ticks?, weight-ticks?, discard-sectors?, discard-ios?, \
                  discard-merges?, discard-ticks?, flush-ios?, flush-ticks?}}]",
        summary: "What every disk and partition has read and written; times in milliseconds.",
        run: Run::Now(get_diskstats),
        ..Command::USUAL
    },
];

/// Runs blocking work on a thread of its own, and waits for it.
pub(super) async fn away<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T, Error> {
    let failed = |error: tokio::task::JoinError| Error::generic(format!("the work was not done: {error}"));
    blocking::attempt(work).await.map_err(failed)
}

/// Does work that may have to wait for disks: first at once without waiting, and on a blocking thread only if it
/// has to wait. Moving to a thread costs more than the work itself takes when it need not wait.
async fn at_once_or_away<T: Send + 'static>(
    guest: &Guest,
    work: fn(&Guest, Wait) -> Result<T, block_devices::Error>,
) -> Result<T, Error> {
    match work(guest, Wait::Cannot) {
        Err(block_devices::Error::MustWait) => {
            let guest = guest.clone();
            Ok(away(move || work(&guest, Wait::Can)).await??)
        }
        outcome => Ok(outcome?),
    }
}

/// Implements `guest-get-disks`.
pub fn get_disks<'a>(call: &'a Call<'a>) -> Pending<'a> {
    Box::pin(async move {
        call.arguments.none()?;
        let disks = at_once_or_away(&call.context.guest, list).await?;
        Reply::value(&disks.iter().map(disk).collect::<Vec<_>>())
    })
}

/// Implements `guest-get-diskstats`.
pub fn get_diskstats(call: &Call<'_>) -> Outcome {
    call.arguments.none()?;
    let statistics = statistics(&call.context.guest.root)?;
    Reply::value(&statistics.iter().map(counters).collect::<Vec<_>>())
}

#[derive(Serialize)]
struct DiskReply<'a> {
    name: &'a str,
    partition: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    dependencies: Option<&'a [String]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    address: Option<AddressReply<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    alias: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    smart: Option<SmartReply>,
}

fn disk(disk: &Listed) -> DiskReply<'_> {
    DiskReply {
        name: &disk.file,
        partition: disk.partition,
        dependencies: disk.parts.as_deref(),
        address: disk.disk.as_ref().map(address),
        alias: disk.alias.as_deref(),
        smart: disk.health.as_ref().map(smart),
    }
}

/// Location of a disk, in the form of QGA's `GuestDiskAddress`.
#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct AddressReply<'a> {
    pci_controller: PciReply,
    bus_type: &'static str,
    bus: u32,
    target: u32,
    unit: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    serial: Option<&'a str>,
    dev: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    ccw_address: Option<ChannelReply>,
}

struct PciReply(Option<Pci>);

impl Serialize for PciReply {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        #[derive(Serialize)]
        struct Numbers {
            domain: i64,
            bus: i64,
            slot: i64,
            function: i64,
        }
        let unknown = Numbers { domain: -1, bus: -1, slot: -1, function: -1 };
        let numbers = self.0.map_or(unknown, |pci| Numbers {
            domain: pci.domain.into(),
            bus: pci.bus.into(),
            slot: pci.slot.into(),
            function: pci.function.into(),
        });
        numbers.serialize(serializer)
    }
}

#[derive(Serialize)]
struct ChannelReply {
    cssid: u32,
    ssid: u32,
    subchno: u32,
    devno: u32,
}

pub(super) fn address(disk: &Disk) -> AddressReply<'_> {
    let location = &disk.location;
    let channel = |channel: Channel| ChannelReply {
        cssid: channel.subsystem,
        ssid: channel.set,
        subchno: channel.subchannel,
        devno: channel.device,
    };
    AddressReply {
        pci_controller: PciReply(location.pci),
        bus_type: location.kind.word(),
        bus: location.bus,
        target: location.target,
        unit: location.unit,
        serial: disk.serial.as_deref(),
        dev: &disk.file,
        ccw_address: location.channel.map(channel),
    }
}

#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct SmartReply {
    r#type: &'static str,
    critical_warning: u8,
    temperature: u16,
    available_spare: u8,
    available_spare_threshold: u8,
    percentage_used: u8,
    data_units_read_lo: u64,
    data_units_read_hi: u64,
    data_units_written_lo: u64,
    data_units_written_hi: u64,
    host_read_commands_lo: u64,
    host_read_commands_hi: u64,
    host_write_commands_lo: u64,
    host_write_commands_hi: u64,
    controller_busy_time_lo: u64,
    controller_busy_time_hi: u64,
    power_cycles_lo: u64,
    power_cycles_hi: u64,
    power_on_hours_lo: u64,
    power_on_hours_hi: u64,
    unsafe_shutdowns_lo: u64,
    unsafe_shutdowns_hi: u64,
    media_errors_lo: u64,
    media_errors_hi: u64,
    number_of_error_log_entries_lo: u64,
    number_of_error_log_entries_hi: u64,
}

fn smart(health: &Health) -> SmartReply {
    SmartReply {
        r#type: "nvme",
        critical_warning: health.critical_warning,
        temperature: health.temperature,
        available_spare: health.available_spare,
        available_spare_threshold: health.available_spare_threshold,
        percentage_used: health.percentage_used,
        data_units_read_lo: health.data_units_read[0],
        data_units_read_hi: health.data_units_read[1],
        data_units_written_lo: health.data_units_written[0],
        data_units_written_hi: health.data_units_written[1],
        host_read_commands_lo: health.host_read_commands[0],
        host_read_commands_hi: health.host_read_commands[1],
        host_write_commands_lo: health.host_write_commands[0],
        host_write_commands_hi: health.host_write_commands[1],
        controller_busy_time_lo: health.controller_busy_time[0],
        controller_busy_time_hi: health.controller_busy_time[1],
        power_cycles_lo: health.power_cycles[0],
        power_cycles_hi: health.power_cycles[1],
        power_on_hours_lo: health.power_on_hours[0],
        power_on_hours_hi: health.power_on_hours[1],
        unsafe_shutdowns_lo: health.unsafe_shutdowns[0],
        unsafe_shutdowns_hi: health.unsafe_shutdowns[1],
        media_errors_lo: health.media_errors[0],
        media_errors_hi: health.media_errors[1],
        number_of_error_log_entries_lo: health.error_log_entries[0],
        number_of_error_log_entries_hi: health.error_log_entries[1],
    }
}

#[derive(Serialize)]
struct CountersReply<'a> {
    name: &'a str,
    major: u64,
    minor: u64,
    stats: StatsReply,
}

#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct StatsReply {
    read_sectors: u64,
    read_ios: u64,
    write_sectors: u64,
    write_ios: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    read_merges: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    read_ticks: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    write_merges: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    write_ticks: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    ios_pgr: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    total_ticks: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    weight_ticks: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    discard_sectors: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    discard_ios: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    discard_merges: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    discard_ticks: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    flush_ios: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    flush_ticks: Option<u64>,
}

fn counters(disk: &Statistics) -> CountersReply<'_> {
    let Statistics { number: (major, minor), name, reads, writes, activity, discards, flushes } = disk;
    let stats = StatsReply {
        read_sectors: reads.sectors,
        read_ios: reads.count,
        write_sectors: writes.sectors,
        write_ios: writes.count,
        read_merges: reads.merged,
        read_ticks: reads.milliseconds,
        write_merges: writes.merged,
        write_ticks: writes.milliseconds,
        ios_pgr: activity.map(|activity| activity.in_progress),
        total_ticks: activity.map(|activity| activity.milliseconds),
        weight_ticks: activity.map(|activity| activity.weighted_milliseconds),
        discard_sectors: discards.map(|discards| discards.sectors),
        discard_ios: discards.map(|discards| discards.count),
        discard_merges: discards.and_then(|discards| discards.merged),
        discard_ticks: discards.and_then(|discards| discards.milliseconds),
        flush_ios: flushes.map(|flushes| flushes.count),
        flush_ticks: flushes.map(|flushes| flushes.milliseconds),
    };
    CountersReply { name, major: *major, minor: *minor, stats }
}
