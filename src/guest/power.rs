//! Shuts down or restarts this machine, through logind or, where it is missing, the system's own commands.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use crate::guest::Guest;
use crate::guest::logind::{self, Logind};
use crate::sys::program;
use crate::sys::root::Root;
use crate::wire::proto::v1::ShutdownRequested;

/// Timeout for a command to accept a shutdown.
const DEADLINE: Duration = Duration::from_secs(20);

/// Kind of shutdown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Stop the system and switch the machine off.
    Powerdown,
    /// Stop the system and leave the machine on.
    Halt,
    /// Stop the system and start it again.
    Reboot,
}

impl fmt::Display for Mode {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Powerdown => "powerdown",
            Self::Halt => "halt",
            Self::Reboot => "reboot",
        })
    }
}

impl FromStr for Mode {
    type Err = ();

    fn from_str(name: &str) -> Result<Self, ()> {
        match name {
            "powerdown" => Ok(Self::Powerdown),
            "halt" => Ok(Self::Halt),
            "reboot" => Ok(Self::Reboot),
            _ => Err(()),
        }
    }
}

/// Reasons why the shutdown was not accepted.
#[derive(Debug, thiserror::Error)]
#[error("cannot shut down: logind: {logind}; {command}: {failure}")]
pub struct Error {
    logind: String,
    command: &'static str,
    failure: program::Error,
}

/// Shuts down. Returns when the init system has accepted the request, which stops the agent soon after.
///
/// # Errors
/// If neither logind nor the system's commands accept it.
pub async fn shutdown(guest: &Guest, mode: Mode) -> Result<(), Error> {
    if let Err(logind) = ask_logind(&guest.root, mode).await {
        tracing::info!("logind cannot shut down ({logind}); using the system's command");
        run_command(&guest.root, mode, logind.to_string()).await?;
    }
    guest.events.tell(ShutdownRequested { mode: mode.to_string() });
    Ok(())
}

async fn ask_logind(root: &Root, mode: Mode) -> Result<(), logind::Error> {
    let method = match mode {
        Mode::Powerdown => "PowerOff",
        Mode::Halt => "Halt",
        Mode::Reboot => "Reboot",
    };
    Logind::find(root).await?.overriding_inhibitors(method).await
}

/// Runs shutdown(8) as sysvinit and systemd provide it, or the commands of `BusyBox`.
async fn run_command(root: &Root, mode: Mode, logind: String) -> Result<(), Error> {
    let (arguments, alone) = match mode {
        Mode::Powerdown => (["-P", "+0"], "/sbin/poweroff"),
        Mode::Halt => (["-H", "+0"], "/sbin/halt"),
        Mode::Reboot => (["-r", "+0"], "/sbin/reboot"),
    };
    let command = "/sbin/shutdown";
    match program::run(&root.path(command).to_string_lossy(), &arguments, DEADLINE).await {
        Ok(_) => return Ok(()),
        Err(program::Error::Start { .. }) => {}
        Err(failure) => return Err(Error { logind, command, failure }),
    }
    match program::run(&root.path(alone).to_string_lossy(), &[], DEADLINE).await {
        Ok(_) => Ok(()),
        Err(failure) => Err(Error { logind, command: alone, failure }),
    }
}
