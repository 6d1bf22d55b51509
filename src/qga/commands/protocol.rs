//! Commands about the protocol itself.

use serde::{Deserialize, Serialize};

use crate::qga::reply::Reply;
use crate::qga::request::{Arguments, integer};
use crate::qga::table::{COMMANDS, Outcome};
use crate::qga::{Context, PROTOCOL_VERSION};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Sync {
    #[serde(deserialize_with = "integer")]
    id: i64,
}

/// guest-sync
pub fn sync(_: &Context, arguments: Arguments<'_>) -> Outcome {
    Reply::value(&arguments.parse::<Sync>()?.id)
}

/// guest-sync-delimited
pub fn sync_delimited(_: &Context, arguments: Arguments<'_>) -> Outcome {
    Reply::delimited(&arguments.parse::<Sync>()?.id)
}

/// guest-ping
pub fn ping(_: &Context, arguments: Arguments<'_>) -> Outcome {
    arguments.none()?;
    Ok(Reply::empty())
}

/// guest-info
pub fn info(context: &Context, arguments: Arguments<'_>) -> Outcome {
    #[derive(Serialize)]
    struct Info {
        version: &'static str,
        supported_commands: Vec<Supported>,
    }
    #[derive(Serialize)]
    #[serde(rename_all = "kebab-case")]
    struct Supported {
        name: &'static str,
        enabled: bool,
        success_response: bool,
    }
    arguments.none()?;
    let supported = |(place, command): (usize, &crate::qga::table::Command)| Supported {
        name: command.name,
        enabled: context.policy.allows(place),
        success_response: command.success_response,
    };
    Reply::value(&Info {
        version: PROTOCOL_VERSION,
        supported_commands: COMMANDS.iter().enumerate().map(supported).collect(),
    })
}
