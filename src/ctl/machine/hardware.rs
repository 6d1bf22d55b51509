//! `guestctl time`, `guestctl cpus` and `guestctl memory`.

use std::time::{Duration, SystemTime};

use prost_types::Timestamp;
use serde::Serialize;

use super::{SOON, answer};
use crate::ctl::Error;
use crate::ctl::client::Daemon;
use crate::ctl::json::rfc3339;
use crate::ctl::print::Printer;
use crate::text;
use crate::wire::proto::v1::{
    self, GetTimeRequest, ListMemoryBlocksRequest, ListProcessorsRequest, MemoryBlock, Processor,
    SetMemoryBlocksRequest, SetProcessorsRequest, SetTimeRequest, Switch,
};

/// Source of the time for a guest's clock.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Clock {
    /// Clock of this machine.
    Now,
    /// Hardware clock of the guest.
    Hardware,
    /// This time.
    At(Timestamp),
}

impl std::str::FromStr for Clock {
    type Err = String;

    /// Parses `now`, `hardware`, or a time in the format of RFC 3339.
    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "now" => Ok(Self::Now),
            "hardware" => Ok(Self::Hardware),
            time => time
                .parse()
                .map(Self::At)
                .map_err(|_| "give now, hardware, or a time such as 2026-11-26T01:00:00Z".to_owned()),
        }
    }
}

/// Processors or memory blocks to be switched on and off, by their numbers.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Switches {
    /// Numbers to be switched on.
    pub online: Vec<u64>,
    /// Numbers to be switched off.
    pub offline: Vec<u64>,
}

impl Switches {
    /// Returns whether nothing is to be switched.
    pub fn is_empty(&self) -> bool {
        self.online.is_empty() && self.offline.is_empty()
    }

    fn all(self) -> Vec<Switch> {
        let switch = |online| move |id| Switch { id, online };
        let on = self.online.into_iter().map(switch(true));
        on.chain(self.offline.into_iter().map(switch(false))).collect()
    }
}

/// Time of the guest, for programs.
#[derive(Debug, Serialize)]
struct TimeOfDay {
    time: Option<String>,
    zone: String,
    offset_seconds: i64,
    /// Milliseconds that the guest's clock is ahead of this machine's, as accurately as the round trip permits.
    ahead_milliseconds: Option<i64>,
}

/// Processor or memory block, for programs.
#[derive(Debug, Serialize)]
struct Part {
    id: u64,
    online: bool,
    can_offline: bool,
}

/// Clock that was set, for programs.
#[derive(Debug, Serialize)]
struct Set {
    /// Time that was set; absent if the source was the hardware clock.
    set: Option<String>,
}

/// Result of switching processors, for programs.
#[derive(Debug, Serialize)]
struct Switched {
    /// Number of processors that were switched, in the order in which they were sent: those to be switched on
    /// come first.
    done: u32,
    of: usize,
}

/// Result of switching one memory block, for programs.
#[derive(Debug, Serialize)]
struct SwitchedBlock {
    id: u64,
    /// Reason why it was not switched.
    problem: Option<String>,
}

/// Memory of the guest, for programs.
#[derive(Debug, Serialize)]
struct Memory {
    block_bytes: u64,
    blocks: Vec<Part>,
}

/// Shows the time of a guest.
///
/// # Errors
/// Fails if the guest cannot be reached.
pub async fn time(daemon: &Daemon, printer: &mut Printer, name: String) -> Result<(), Error> {
    let request = GetTimeRequest { name: name.clone() };
    let now = answer(daemon.machine().get_time(request), &name, SOON).await?;
    let ahead = now.time.and_then(|time| ahead(&time, SystemTime::now()));
    let value = TimeOfDay {
        time: now.time.map(rfc3339),
        zone: now.zone,
        offset_seconds: now.offset_seconds,
        ahead_milliseconds: ahead,
    };
    Ok(printer.value(&value, || {
        let time = value.time.as_deref().unwrap_or("-");
        let ahead = value.ahead_milliseconds.map_or("-".to_owned(), |ahead| format!("{ahead:+} ms"));
        format!("Time:    {time}\nZone:    {} ({:+} s)\nAhead:   {ahead}\n", value.zone, value.offset_seconds)
    })?)
}

/// Sets the time of a guest.
///
/// # Errors
/// Fails if the guest cannot be reached, or does not set it.
pub async fn set_time(
    daemon: &Daemon,
    printer: &mut Printer,
    name: String,
    clock: Clock,
) -> Result<(), Error> {
    let time = match clock {
        Clock::Now => Some(SystemTime::now().into()),
        Clock::Hardware => None,
        Clock::At(time) => Some(time),
    };
    let request = SetTimeRequest { name: name.clone(), time };
    answer(daemon.machine().set_time(request), &name, SOON).await?;
    let value = Set { set: time.map(rfc3339) };
    Ok(printer.value(&value, || {
        let to = value.set.as_deref().unwrap_or("what the hardware clock shows");
        format!("the clock of {name} is set to {to}\n")
    })?)
}

fn ahead(time: &Timestamp, now: SystemTime) -> Option<i64> {
    let time = SystemTime::try_from(*time).ok()?;
    let milliseconds = |span: Duration| i64::try_from(span.as_millis()).ok();
    match time.duration_since(now) {
        Ok(ahead) => milliseconds(ahead),
        Err(behind) => milliseconds(behind.duration()).map(|behind| -behind),
    }
}

/// Shows the processors of a guest.
///
/// # Errors
/// Fails if the guest cannot be reached.
pub async fn processors(daemon: &Daemon, printer: &mut Printer, name: String) -> Result<(), Error> {
    let request = ListProcessorsRequest { name: name.clone() };
    let found = answer(daemon.machine().list_processors(request), &name, SOON).await?.processors;
    let part = |one: Processor| Part { id: one.id, online: one.online, can_offline: one.can_offline };
    let parts: Vec<_> = found.into_iter().map(part).collect();
    Ok(printer.value(&parts, || rows("CPU", &parts))?)
}

/// Switches processors of a guest on and off.
///
/// # Errors
/// Fails if the guest cannot be reached, or some are not in the requested state.
pub async fn switch_processors(
    daemon: &Daemon,
    printer: &mut Printer,
    name: String,
    switches: Switches,
) -> Result<(), Error> {
    let processors = switches.all();
    let request = SetProcessorsRequest { name: name.clone(), processors: processors.clone() };
    let done = answer(daemon.machine().set_processors(request), &name, SOON).await?.done;
    let of = processors.len();
    printer.value(&Switched { done, of }, || {
        format!("{done} of {of} processors are in the requested state\n")
    })?;
    let left = processors.get(usize::try_from(done).unwrap_or(usize::MAX)..).unwrap_or_default();
    left.first().map_or(Ok(()), |first| {
        Err(Error::Unmet(format!("processor {} was not switched, nor were those after it", first.id)))
    })
}

/// Shows the memory blocks of a guest.
///
/// # Errors
/// Fails if the guest cannot be reached.
pub async fn memory(daemon: &Daemon, printer: &mut Printer, name: String) -> Result<(), Error> {
    let request = ListMemoryBlocksRequest { name: name.clone() };
    let found = answer(daemon.machine().list_memory_blocks(request), &name, SOON).await?;
    let part = |one: MemoryBlock| Part { id: one.id, online: one.online, can_offline: one.can_offline };
    let blocks = found.blocks.into_iter().map(part).collect();
    let memory = Memory { block_bytes: found.block_bytes, blocks };
    Ok(printer.value(&memory, || {
        if memory.blocks.is_empty() {
            return "the guest's memory cannot be switched in blocks\n".to_owned();
        }
        format!("Blocks of {}\n{}", text::size(memory.block_bytes), rows("BLOCK", &memory.blocks))
    })?)
}

/// Switches memory blocks of a guest on and off.
///
/// # Errors
/// Fails if the guest cannot be reached, or some are not in the requested state.
pub async fn switch_memory(
    daemon: &Daemon,
    printer: &mut Printer,
    name: String,
    switches: Switches,
) -> Result<(), Error> {
    let request = SetMemoryBlocksRequest { name: name.clone(), blocks: switches.all() };
    let became = answer(daemon.machine().set_memory_blocks(request), &name, SOON).await?.blocks;
    let block = |one: v1::SwitchedBlock| SwitchedBlock {
        id: one.id,
        problem: Some(one.problem).filter(|words| !words.is_empty()),
    };
    let blocks: Vec<_> = became.into_iter().map(block).collect();
    printer.value(&blocks, || {
        let line = |one: &SwitchedBlock| match &one.problem {
            None => format!("block {} is in the requested state\n", one.id),
            Some(problem) => format!("block {}: {problem}\n", one.id),
        };
        blocks.iter().map(line).collect()
    })?;
    let failed = blocks.iter().filter(|block| block.problem.is_some()).count();
    match failed {
        0 => Ok(()),
        failed => Err(Error::Unmet(format!("{failed} of {} blocks were not switched", blocks.len()))),
    }
}

fn rows(head: &str, parts: &[Part]) -> String {
    let mut rows = vec![[head, "STATE", "CAN BE SWITCHED OFF"].map(str::to_owned)];
    for one in parts {
        let state = if one.online { "on" } else { "off" };
        let can = if one.can_offline { "yes" } else { "no" };
        rows.push([one.id.to_string(), state.to_owned(), can.to_owned()]);
    }
    text::table(&rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_to_set() {
        assert_eq!("now".parse(), Ok(Clock::Now));
        assert_eq!("hardware".parse(), Ok(Clock::Hardware));
        let time = Timestamp { seconds: 1_700_000_000, nanos: 0 };
        assert_eq!("2023-11-14T22:13:20Z".parse(), Ok(Clock::At(time)));
        assert!("yesterday".parse::<Clock>().unwrap_err().contains("2026-"));
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_010);
        assert_eq!(ahead(&time, now), Some(-10_000));
    }
}
