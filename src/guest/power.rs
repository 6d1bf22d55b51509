//! Ends or restarts this machine, through logind or, where there is none, the system's own commands.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use crate::guest::Guest;
use crate::guest::events::Event;
use crate::sys::program;

/// How long logind, or a command, may take to accept a shutdown.
const DEADLINE: Duration = Duration::from_secs(20);

/// What kind of shutdown.
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

/// Why nothing was shut down.
#[derive(Debug, thiserror::Error)]
#[error("cannot shut down: logind: {logind}; {command}: {failure}")]
pub struct Error {
    logind: String,
    command: &'static str,
    failure: program::Error,
}

/// Shuts down. Returns when the init system has accepted it; the agent is told to end soon after.
///
/// # Errors
/// If neither logind nor the system's commands accept it.
pub async fn shutdown(guest: &Guest, mode: Mode) -> Result<(), Error> {
    if let Err(logind) = ask_logind(mode).await {
        tracing::info!("logind cannot shut down ({logind}), using the system's command");
        run_command(mode, logind).await?;
    }
    guest.events.tell(Event::ShutdownRequested(mode));
    Ok(())
}

/// org.freedesktop.login1(5). The argument is "interactive": no question is asked.
async fn ask_logind(mode: Mode) -> Result<(), String> {
    let method = match mode {
        Mode::Powerdown => "PowerOff",
        Mode::Halt => "Halt",
        Mode::Reboot => "Reboot",
    };
    let call = async {
        zbus::Connection::system()
            .await?
            .call_method(
                Some("org.freedesktop.login1"),
                "/org/freedesktop/login1",
                Some("org.freedesktop.login1.Manager"),
                method,
                &(false,),
            )
            .await
    };
    match tokio::time::timeout(DEADLINE, call).await {
        Ok(Ok(_)) => Ok(()),
        Ok(Err(error)) => Err(error.to_string()),
        Err(_) => Err(format!("no answer within {} s", DEADLINE.as_secs())),
    }
}

/// shutdown(8) as sysvinit and systemd have it, or what `BusyBox` has.
async fn run_command(mode: Mode, logind: String) -> Result<(), Error> {
    let (arguments, alone) = match mode {
        Mode::Powerdown => (["-P", "+0"], "/sbin/poweroff"),
        Mode::Halt => (["-H", "+0"], "/sbin/halt"),
        Mode::Reboot => (["-r", "+0"], "/sbin/reboot"),
    };
    let command = "/sbin/shutdown";
    match program::run(command, &arguments, DEADLINE).await {
        Ok(_) => return Ok(()),
        Err(program::Error::Start { .. }) => {}
        Err(failure) => return Err(Error { logind, command, failure }),
    }
    match program::run(alone, &[], DEADLINE).await {
        Ok(_) => Ok(()),
        Err(failure) => Err(Error { logind, command: alone, failure }),
    }
}
