//! Commands that end, restart or suspend the guest.

use std::borrow::Cow;

use serde_json::value::RawValue;

use crate::guest::power;
use crate::guest::suspend::{self, Mode};
use crate::policy::Role;
use crate::qga::arguments::{Refused, Value};
use crate::qga::call::Call;
use crate::qga::reply::Reply;
use crate::qga::table::{Class, Command, Pending, Run};

/// Rows of the command table.
pub const COMMANDS: &[Command] = &[
    Command {
        name: "guest-shutdown",
        role: Some(Role::Power),
        since: "0.15",
        arguments: "mode? (`powerdown`, `halt` or `reboot`; default `powerdown`)",
        success_response: false,
        class: Class::Control,
        audited: true,
        summary: "Shuts the guest down.",
        differences: "logind is asked over D-Bus, with inhibitors overridden; only where that fails is a command run.",
        run: Run::Later(shutdown),
        ..Command::USUAL
    },
    Command {
        name: "guest-suspend-disk",
        role: Some(Role::Power),
        summary: "Suspends the guest to a disk.",
        run: Run::Later(|call| suspend(call, Mode::Disk)),
        ..SUSPEND
    },
    Command {
        name: "guest-suspend-hybrid",
        role: Some(Role::Power),
        summary: "Suspends the guest to memory, and to a disk in case that memory is lost.",
        run: Run::Later(|call| suspend(call, Mode::Hybrid)),
        ..SUSPEND
    },
    Command {
        name: "guest-suspend-ram",
        role: Some(Role::Power),
        summary: "Suspends the guest to memory.",
        run: Run::Later(|call| suspend(call, Mode::Ram)),
        ..SUSPEND
    },
];

const SUSPEND: Command = Command {
    since: "1.1",
    success_response: false,
    class: Class::Control,
    audited: true,
    differences: "logind is asked over D-Bus, with inhibitors overridden; only where there is none, the kernel.",
    ..Command::USUAL
};

/// Implements `guest-suspend-disk`, `guest-suspend-ram` and `guest-suspend-hybrid`.
pub fn suspend<'a>(call: &'a Call<'a>, mode: Mode) -> Pending<'a> {
    Box::pin(async move {
        call.arguments.none()?;
        suspend::suspend(&call.context.guest, mode).await?;
        Ok(Reply::empty())
    })
}

/// Implements `guest-shutdown`.
pub fn shutdown<'a>(call: &'a Call<'a>) -> Pending<'a> {
    Box::pin(async move {
        let mode =
            call.arguments.read(|arguments| arguments.optional("mode"))?.unwrap_or(power::Mode::Powerdown);
        call.concerns(mode.to_string());
        power::shutdown(&call.context.guest, mode).await?;
        Ok(Reply::empty())
    })
}

impl Value<'_> for power::Mode {
    fn read(value: &RawValue) -> Result<Self, Refused> {
        let name = <Cow<'_, str>>::read(value)?;
        name.parse().map_err(|()| Refused::expected("one of powerdown, halt, reboot"))
    }
}
