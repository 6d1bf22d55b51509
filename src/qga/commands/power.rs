//! Commands that end or restart the guest.

use serde::Deserialize;

use crate::guest::power::{self, Mode};
use crate::qga::Context;
use crate::qga::error::{Error, quoted};
use crate::qga::reply::Reply;
use crate::qga::request::Arguments;
use crate::qga::table::Pending;

/// guest-shutdown
pub fn shutdown<'a>(context: &'a Context, arguments: Arguments<'a>) -> Pending<'a> {
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Shutdown {
        mode: Option<String>,
    }
    Box::pin(async move {
        let mode = match arguments.parse::<Shutdown>()?.mode {
            None => Mode::Powerdown,
            Some(name) => name.parse().map_err(|()| {
                Error::generic(format!(
                    "invalid arguments: mode {} is none of powerdown, halt, reboot",
                    quoted(&name)
                ))
            })?,
        };
        tracing::info!("a QGA client asks for {mode}");
        power::shutdown(&context.guest, mode).await?;
        Ok(Reply::empty())
    })
}
