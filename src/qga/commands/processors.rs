//! Commands for logical processors.

use serde::Serialize;

use crate::guest::processors::{self, Processor};
use crate::policy::Role;
use crate::qga::arguments::Members;
use crate::qga::call::Call;
use crate::qga::error::Error;
use crate::qga::reply::Reply;
use crate::qga::table::{Class, Command, Outcome, Pending, Run};
use crate::sys::proc_stat::Times;

/// Rows of the command table.
pub const COMMANDS: &[Command] = &[
    Command {
        name: "guest-get-cpustats",
        role: Some(Role::Metrics),
        since: "7.1",
        returns: "[{type (`linux`), cpu, user, nice, system, idle, iowait?, irq?, softirq?, steal?, guest?, guestnice?}]",
        summary: "What the processors have spent their time with since the boot, in milliseconds.",
        run: Run::Now(get_cpustats),
        ..Command::USUAL
    },
    Command {
        name: "guest-get-vcpus",
        role: Some(Role::Status),
        since: "1.5",
        returns: "[{logical-id, online, can-offline}]",
        summary: "The processors, and which are online.",
        differences: "They are in the order of their numbers.",
        run: Run::Later(get_vcpus),
        ..Command::USUAL
    },
    Command {
        name: "guest-set-vcpus",
        role: Some(Role::Power),
        since: "1.5",
        arguments: "vcpus[{logical-id, online, can-offline?}]",
        returns: "how many are as they should be, from the first one on; an error only if the first one fails",
        class: Class::Control,
        audited: true,
        summary: "Switches processors on and off.",
        differences: "Nothing is switched unless the whole list is understood.",
        run: Run::Later(set_vcpus),
        ..Command::USUAL
    },
];

/// Implements `guest-get-vcpus`.
pub fn get_vcpus<'a>(call: &'a Call<'a>) -> Pending<'a> {
    #[derive(Serialize)]
    #[serde(rename_all = "kebab-case")]
    struct Vcpu {
        logical_id: u64,
        online: bool,
        can_offline: bool,
    }
    Box::pin(async move {
        call.arguments.none()?;
        let list = processors::list(&call.context.guest).await?;
        let reply =
            |Processor { id: logical_id, online, can_offline }| Vcpu { logical_id, online, can_offline };
        Reply::value(&list.into_iter().map(reply).collect::<Vec<_>>())
    })
}

/// Implements `guest-set-vcpus`.
pub fn set_vcpus<'a>(call: &'a Call<'a>) -> Pending<'a> {
    Box::pin(async move {
        let list = call.arguments.read(|arguments| arguments.required::<Vec<Members<'_>>>("vcpus"))?;
        let wanted = switched(list, "vcpus", "logical-id")?;
        call.concerns(in_words(&wanted));
        Reply::value(&processors::set(&call.context.guest, wanted).await?)
    })
}

/// Parses a list of objects, in the form that the commands for reading return: the numbers, and whether each is to
/// be online.
pub(super) fn switched(list: Vec<Members<'_>>, name: &str, id: &str) -> Result<Vec<(u64, bool)>, Error> {
    let one = |(place, mut members): (usize, Members<'_>)| {
        let element = format!("{name}[{place}]");
        let mut read = || {
            let number = members.required::<i64>(id)?;
            let online = members.required::<bool>("online")?;
            // Accepted and ignored: clients send back the objects that the commands for reading have returned.
            members.optional::<bool>("can-offline")?;
            Ok::<_, Error>((number, online))
        };
        let (number, online) =
            read().map_err(|error| Error::generic(format!("{} in {element}", error.desc)))?;
        members.finish(&element)?;
        let number = u64::try_from(number)
            .map_err(|_| Error::argument(&format!("\"{element}.{id}\""), "must not be negative"))?;
        Ok((number, online))
    };
    list.into_iter().enumerate().map(one).collect()
}

/// Formats the request for the log; a long list is cut.
pub(super) fn in_words(wanted: &[(u64, bool)]) -> String {
    let one = |(id, online): &(u64, bool)| format!("{id} {}", if *online { "on" } else { "off" });
    wanted.iter().take(32).map(one).collect::<Vec<_>>().join(", ")
}

/// Implements `guest-get-cpustats`.
pub fn get_cpustats(call: &Call<'_>) -> Outcome {
    #[derive(Serialize)]
    struct Stats {
        r#type: &'static str,
        cpu: u64,
        user: u64,
        nice: u64,
        system: u64,
        idle: u64,
        #[serde(skip_serializing_if = "Option::is_none")]
        iowait: Option<u64>,
        #[serde(skip_serializing_if = "Option::is_none")]
        irq: Option<u64>,
        #[serde(skip_serializing_if = "Option::is_none")]
        softirq: Option<u64>,
        #[serde(skip_serializing_if = "Option::is_none")]
        steal: Option<u64>,
        #[serde(skip_serializing_if = "Option::is_none")]
        guest: Option<u64>,
        #[serde(skip_serializing_if = "Option::is_none")]
        guestnice: Option<u64>,
    }
    call.arguments.none()?;
    let reply = |times: Times| Stats {
        r#type: "linux",
        cpu: times.processor,
        user: times.user,
        nice: times.nice,
        system: times.system,
        idle: times.idle,
        iowait: times.waiting,
        irq: times.interrupts,
        softirq: times.soft_interrupts,
        steal: times.stolen,
        guest: times.guest,
        guestnice: times.guest_nice,
    };
    let times = processors::times(&call.context.guest.root)?;
    Reply::value(&times.into_iter().map(reply).collect::<Vec<_>>())
}
