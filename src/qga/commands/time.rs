//! Commands about the clock and the time zone.

use std::time::Duration;

use serde::Serialize;
use serde_json::value::RawValue;

use crate::guest::clock;
use crate::policy::Role;
use crate::qga::arguments::{Refused, Value};
use crate::qga::call::Call;
use crate::qga::reply::Reply;
use crate::qga::table::{Class, Command, Outcome, Pending, Run};
use crate::sys::blocking;

/// Rows of the command table.
pub const COMMANDS: &[Command] = &[
    Command {
        name: "guest-get-time",
        role: Some(Role::Status),
        since: "1.5",
        returns: "nanoseconds since 1970-01-01 in UTC",
        summary: "The time of day.",
        run: Run::Now(get_time),
        ..Command::USUAL
    },
    Command {
        name: "guest-get-timezone",
        role: Some(Role::Status),
        since: "2.10",
        returns: "zone?, offset (seconds east of UTC)",
        summary: "The time zone: its abbreviation, and how far it is from UTC now.",
        run: Run::Later(get_timezone),
        ..Command::USUAL
    },
    Command {
        name: "guest-set-time",
        role: Some(Role::Power),
        since: "1.5",
        arguments: "time? (nanoseconds since 1970-01-01 in UTC, before 2070)",
        class: Class::Control,
        audited: true,
        summary: "Sets the system's clock and the hardware clock; without `time`, the system's clock from the hardware clock.",
        differences: "The hardware clock is asked and set by the kernel, without the program hwclock, and in UTC or \
                      local time as /etc/adjtime says. A guest without one is set all the same.",
        run: Run::Later(set_time),
        ..Command::USUAL
    },
];

/// Implements `guest-get-time`.
pub fn get_time(call: &Call<'_>) -> Outcome {
    call.arguments.none()?;
    Reply::value(&clock::now())
}

/// Implements `guest-get-timezone`.
pub fn get_timezone<'a>(call: &'a Call<'a>) -> Pending<'a> {
    #[derive(Serialize)]
    struct Zone {
        #[serde(skip_serializing_if = "String::is_empty")]
        zone: String,
        offset: i64,
    }
    Box::pin(async move {
        call.arguments.none()?;
        // /etc/localtime may be on a disk that hangs.
        let zone = blocking::run(clock::zone).await?;
        Reply::value(&Zone { zone: zone.abbreviation, offset: zone.offset })
    })
}

/// Implements `guest-set-time`.
pub fn set_time<'a>(call: &'a Call<'a>) -> Pending<'a> {
    Box::pin(async move {
        let guest = &call.context.guest;
        let time = call.arguments.read(|arguments| arguments.optional::<Moment>("time"))?;
        if let Some(Moment(time)) = time {
            call.concerns(format!("{}.{:09} s", time.as_secs(), time.subsec_nanos()));
            clock::set(guest, time).await?;
        } else {
            call.concerns("from the hardware clock");
            clock::set_from_hardware(guest).await?;
        }
        Ok(Reply::empty())
    })
}

/// Time since the epoch that hardware clocks can hold.
struct Moment(Duration);

impl Value<'_> for Moment {
    fn read(value: &RawValue) -> Result<Self, Refused> {
        let nanoseconds = u64::try_from(i64::read(value)?).ok().map(Duration::from_nanos);
        let within = nanoseconds.filter(|time| *time < clock::END);
        within.map(Self).ok_or_else(|| Refused::expected("nanoseconds within the years 1970 to 2069"))
    }
}
