//! Commands that end or restart the guest.

use std::borrow::Cow;

use serde_json::value::RawValue;

use crate::guest::power::{self, Mode};
use crate::qga::arguments::{Refused, Value};
use crate::qga::call::Call;
use crate::qga::reply::Reply;
use crate::qga::table::{Class, Command, Pending, Run};

/// The rows of the command table.
pub const COMMANDS: &[Command] = &[Command {
    name: "guest-shutdown",
    since: "0.15",
    arguments: "mode? (`powerdown`, `halt` or `reboot`; default `powerdown`)",
    success_response: false,
    class: Class::Control,
    audited: true,
    summary: "Shuts the guest down.",
    differences: "logind is asked over D-Bus; only where that fails is a command run.",
    run: Run::Later(shutdown),
    ..Command::USUAL
}];

/// guest-shutdown
pub fn shutdown<'a>(call: &'a Call<'a>) -> Pending<'a> {
    Box::pin(async move {
        let mode = call.arguments.read(|arguments| arguments.optional("mode"))?.unwrap_or(Mode::Powerdown);
        call.concerns(mode.to_string());
        power::shutdown(&call.context.guest, mode).await?;
        Ok(Reply::empty())
    })
}

impl Value<'_> for Mode {
    fn read(value: &RawValue) -> Result<Self, Refused> {
        let name = <Cow<'_, str>>::read(value)?;
        name.parse().map_err(|()| Refused::expected("one of powerdown, halt, reboot"))
    }
}
