//! What `guestctl` asks of the agent in a guest: one file for each subject. To add one: its file, its arm in [`run`], and its
//! verbs in the program.

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
    /// Show entries of the journal. It has connections of its own: see [`journal`].
    Logs(journal::Wish),
    /// Show whether they are frozen.
    FreezeStatus,
    /// Thaw.
    Thaw {
        /// Only if these are frozen; none: whatever is.
        mounts: Vec<String>,
        /// How long it may take.
        within: Duration,
    },
    /// Look at receipts of freezes.
    Receipts(receipts::Wish),
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
    /// Show the time.
    Time,
    /// Set it.
    SetTime(hardware::Clock),
    /// Show what the guest measures: once, or so often.
    Metrics(Option<Duration>),
    /// Show the processors.
    Processors,
    /// Switch some.
    SwitchProcessors(hardware::Switches),
    /// Show the blocks of memory.
    Memory,
    /// Switch some.
    SwitchMemory(hardware::Switches),
    /// Show the network interfaces.
    Interfaces,
    /// Show the routes.
    Routes,
    /// Show who is logged in.
    Users,
    /// Set a password, which is read.
    Password {
        /// Whose.
        user: String,
        /// It is one already as crypt(5) makes it.
        crypted: bool,
    },
    /// Look after SSH keys.
    Keys {
        /// Whose.
        user: String,
        /// What to do.
        keys: accounts::Keys,
    },
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
        // Done where connections are made.
        Action::FreezeAround(_) | Action::Logs(_) => Ok(()),
    }
}

/// Waits for the answer to a call for so long.
async fn answer<T>(
    call: impl Future<Output = Result<Response<T>, Status>>,
    name: &str,
    within: Duration,
) -> Result<T, Error> {
    client::answer_within(call, name, within).await.map_err(|error| match error {
        // It is the guest that is waited for.
        Error::Silent => Error::Late(within),
        error => error,
    })
}
