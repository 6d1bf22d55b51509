//! Requests of `guestctl` to the agent in a guest, one file for each subject. To add one: its file, its arm
//! in [`run`], and its verbs in the program.

pub mod accounts;
pub mod around;
pub mod file_systems;
pub mod freeze;
pub mod hardware;
pub mod journal;
mod metrics;
mod network;
pub mod power;
mod qga;
pub mod receipts;
pub mod restore;

use std::time::Duration;

use tonic::{Response, Status};

use super::Error;
use super::client::{self, Daemon};
use super::print::Printer;

/// Operation on a guest.
#[derive(Debug, Clone)]
pub enum Action {
    /// Freeze file systems.
    Freeze {
        /// Mount points to freeze; empty for all.
        mounts: Vec<String>,
        /// Deadline of the freeze.
        within: Duration,
    },
    /// Freeze file systems, run a program on this machine, thaw. This makes connections of its own: see
    /// [`around`].
    FreezeAround(around::Around),
    /// Show entries of the journal. This makes connections of its own: see [`journal`].
    Logs(journal::Wish),
    /// Show whether file systems are frozen.
    FreezeStatus,
    /// Thaw all file systems.
    Thaw {
        /// Mount points that must be frozen; empty for whatever is frozen.
        mounts: Vec<String>,
        /// Timeout of the operation.
        within: Duration,
    },
    /// Show and verify receipts of freezes.
    Receipts(receipts::Wish),
    /// Release unused blocks of file systems.
    Trim {
        /// Mount points to trim; empty for all.
        mounts: Vec<String>,
        /// Length of the shortest range in bytes.
        minimum: u64,
        /// Timeout of the operation.
        within: Duration,
    },
    /// Show the file systems on disks.
    FileSystems,
    /// Show the time.
    Time,
    /// Set the clock.
    SetTime(hardware::Clock),
    /// Show the guest's measurements, once or at this interval.
    Metrics(Option<Duration>),
    /// Show the processors.
    Processors,
    /// Switch processors on and off.
    SwitchProcessors(hardware::Switches),
    /// Show the memory blocks.
    Memory,
    /// Switch memory blocks on and off.
    SwitchMemory(hardware::Switches),
    /// Show the network interfaces.
    Interfaces,
    /// Show the routes.
    Routes,
    /// Show the logged-in users.
    Users,
    /// Set a password, which is read from the terminal or standard input.
    Password {
        /// Name of the user.
        user: String,
        /// True if the password is already hashed by crypt(5).
        crypted: bool,
    },
    /// Manage SSH keys.
    Keys {
        /// Name of the user.
        user: String,
        /// Operation on the user's keys.
        keys: accounts::Keys,
    },
    /// Shut down, restart or suspend.
    Power(power::Wish),
    /// Execute a QGA command.
    Qga {
        /// Command, or `-` to read it from standard input.
        command: String,
        /// Timeout of the operation.
        within: Duration,
    },
}

/// Timeout for a healthy guest.
const SOON: Duration = Duration::from_secs(60);

/// Carries out an action with the guest of the VM of this name.
///
/// # Errors
/// Fails if the guest cannot be reached, refuses, or standard output cannot be written.
pub async fn run(daemon: Daemon, printer: &mut Printer, name: String, action: Action) -> Result<(), Error> {
    match action {
        Action::Freeze { mounts, within } => freeze::freeze(&daemon, printer, name, mounts, within).await,
        Action::FreezeStatus => freeze::status(&daemon, printer, name).await,
        Action::Thaw { mounts, within } => freeze::thaw(&daemon, printer, name, mounts, within).await,
        Action::Receipts(wish) => receipts::run(&daemon, printer, name, wish).await,
        Action::Trim { mounts, minimum, within } => {
            file_systems::trim(&daemon, printer, name, (mounts, minimum), within).await
        }
        Action::FileSystems => file_systems::list(&daemon, printer, name).await,
        Action::Time => hardware::time(&daemon, printer, name).await,
        Action::SetTime(clock) => hardware::set_time(&daemon, printer, name, clock).await,
        Action::Metrics(every) => metrics::run(&daemon, printer, name, every).await,
        Action::Processors => hardware::processors(&daemon, printer, name).await,
        Action::SwitchProcessors(switches) => {
            hardware::switch_processors(&daemon, printer, name, switches).await
        }
        Action::Memory => hardware::memory(&daemon, printer, name).await,
        Action::SwitchMemory(switches) => hardware::switch_memory(&daemon, printer, name, switches).await,
        Action::Interfaces => network::interfaces(&daemon, printer, name).await,
        Action::Routes => network::routes(&daemon, printer, name).await,
        Action::Users => accounts::users(&daemon, printer, name).await,
        Action::Password { user, crypted } => accounts::password(&daemon, printer, name, user, crypted).await,
        Action::Keys { user, keys } => accounts::keys(&daemon, printer, name, user, keys).await,
        Action::Power(wish) => power::run(&daemon, printer, name, wish).await,
        Action::Qga { command, within } => qga::run(&daemon, printer, name, command, within).await,
        // These make their own connections, and are handled by the caller.
        Action::FreezeAround(_) | Action::Logs(_) => Ok(()),
    }
}

/// Waits for the answer to a call, with a timeout.
async fn answer<T>(
    call: impl Future<Output = Result<Response<T>, Status>>,
    name: &str,
    within: Duration,
) -> Result<T, Error> {
    client::answer_within(call, name, within).await.map_err(|error| match error {
        // The guest is too slow, and not the daemon.
        Error::Silent => Error::Late(within),
        error => error,
    })
}
