//! Command that returns the load averages.

use serde::Serialize;

use crate::guest::load;
use crate::policy::Role;
use crate::qga::call::Call;
use crate::qga::reply::Reply;
use crate::qga::table::{Command, Outcome, Run};

/// Rows of the command table.
pub const COMMANDS: &[Command] = &[Command {
    name: "guest-get-load",
    role: Some(Role::Metrics),
    since: "10.0",
    returns: "load1m, load5m, load15m",
    summary: "How many processes ran or wanted to, on average over 1, 5 and 15 minutes.",
    run: Run::Now(get_load),
    ..Command::USUAL
}];

/// Implements `guest-get-load`.
pub fn get_load(call: &Call<'_>) -> Outcome {
    #[derive(Serialize)]
    struct Load {
        #[serde(rename = "load1m")]
        one: f64,
        #[serde(rename = "load5m")]
        five: f64,
        #[serde(rename = "load15m")]
        fifteen: f64,
    }
    call.arguments.none()?;
    let [one, five, fifteen] = load::load(&call.context.guest.root)?;
    Reply::value(&Load { one, five, fifteen })
}
