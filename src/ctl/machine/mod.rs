//! What `guestctl` asks of the agent in a guest: one file for each subject. To add one: its file, its arm in [`run`], and its
//! verbs in the program.

pub mod around;
pub mod file_systems;
pub mod freeze;
pub mod power;
mod qga;

use std::time::Duration;

use tonic::{Response, Status};

use super::Error;
use super::client::Daemon;
use super::print::Printer;

/// What to ask for.
#[derive(Debug, Clone)]
pub enum Action {
    /// Freeze file systems.
    Freeze {
        /// Those mounted there; none: all.
        mounts: Vec<String>,
        /// How long it may take.
        within: Duration,
    },
    /// Freeze file systems, run a program of this machine, thaw. It has connections of its own: see [`around`].
    FreezeAround(around::Around),
    /// Show whether they are frozen.
    FreezeStatus,
    /// Thaw.
    Thaw {
        /// Only if these are frozen; none: whatever is.
        mounts: Vec<String>,
        /// How long it may take.
        within: Duration,
    },
    /// Give unused blocks back.
    Trim {
        /// Of those mounted there; none: of all.
        mounts: Vec<String>,
        /// Bytes of the shortest range.
        minimum: u64,
        /// How long it may take.
        within: Duration,
    },
    /// Show the file systems on disks.
    FileSystems,
    /// Shut down, restart or suspend.
    Power(power::Wish),
    /// A command of QGA.
    Qga {
        /// The command, or `-` for what standard input has.
        command: String,
        /// How long it may take.
        within: Duration,
    },
}

/// How long a guest that is well may take.
const SOON: Duration = Duration::from_secs(60);

/// Asks the guest of the VM of this name.
///
/// # Errors
/// If it cannot be asked, does not do it, or standard output cannot be written.
pub async fn run(daemon: Daemon, printer: &mut Printer, name: String, action: Action) -> Result<(), Error> {
    match action {
        Action::Freeze { mounts, within } => freeze::freeze(&daemon, printer, name, mounts, within).await,
        Action::FreezeStatus => freeze::status(&daemon, printer, name).await,
        Action::Thaw { mounts, within } => freeze::thaw(&daemon, printer, name, mounts, within).await,
        Action::Trim { mounts, minimum, within } => {
            file_systems::trim(&daemon, printer, name, (mounts, minimum), within).await
        }
        Action::FileSystems => file_systems::list(&daemon, printer, name).await,
        Action::Power(wish) => power::run(&daemon, printer, name, wish).await,
        Action::Qga { command, within } => qga::run(&daemon, printer, name, command, within).await,
        // Done where connections are made.
        Action::FreezeAround(_) => Ok(()),
    }
}

/// Waits for the answer to a call for so long.
async fn answer<T>(
    call: impl Future<Output = Result<Response<T>, Status>>,
    name: &str,
    within: Duration,
) -> Result<T, Error> {
    match tokio::time::timeout(within, call).await {
        Ok(Ok(response)) => Ok(response.into_inner()),
        Ok(Err(status)) => Err(Error::of_call(status, name)),
        Err(_) => Err(Error::Late(within)),
    }
}
