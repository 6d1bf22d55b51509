//! Verbs of `guestctl`, one file for each.
//!
//! A verb calls the daemon through [`client`], and passes values to [`mod@print`], the only place that writes
//! output. [`words`] and [`json`] define the output for people and for programs. To add a verb: its file, its
//! arm in [`run`], its words in the README.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use tonic::{Code, Status};

pub mod audit;
pub mod client;
pub mod cluster;
pub mod console;
pub mod cp;
pub mod disk;
pub mod disks;
pub mod doctor;
mod door;
pub mod exec;
pub mod forward;
pub mod freezes;
pub mod info;
mod io_errors;
pub mod json;
pub mod kinds;
pub mod load_balancers;
pub mod ls;
pub mod machine;
pub mod manifests;
pub mod names;
pub mod nodes;
mod outage;
pub mod ping;
pub mod places;
pub mod print;
pub mod proxy;
mod recent;
mod signals;
mod standard;
pub mod top;
pub mod topology;
pub mod trust;
pub mod volumes;
pub mod watch;
pub mod words;

use client::Daemon;
use door::Door;
use print::{Format, Printer};

/// Verb of the command line.
#[derive(Debug, Clone)]
pub enum Verb {
    /// List VMs.
    Ls(ls::List),
    /// Show where the VMs run, and whether their guests know.
    Topology,
    /// Show the Kubernetes Nodes of the guests.
    Nodes,
    /// Show one VM.
    Info {
        /// Name of the VM.
        name: String,
    },
    /// Show events.
    Watch(watch::Filter),
    /// Show the disks of one VM.
    Disks {
        /// Name of the VM.
        name: String,
    },
    /// Show the present load of all guests.
    Top(top::Wish),
    /// Diagnose the installation.
    Doctor,
    /// Measure round trips.
    Ping {
        /// Name of the VM.
        name: String,
        /// Number of pings.
        count: u32,
    },
    /// Attach disks to a running VM, and manage them.
    Disk {
        /// Name of the VM.
        name: String,
        /// Operation, and the disk.
        action: disk::Action,
    },
    /// Send a request to the agent in a VM.
    Machine {
        /// Name of the VM.
        name: String,
        /// Operation on the VM.
        action: machine::Action,
    },
    /// Run programs in a VM, and manage them.
    Program {
        /// Name of the VM.
        name: String,
        /// Operation on programs.
        action: exec::Action,
    },
    /// Copy files from and to VMs.
    Copy(cp::Job),
    /// Forward connections to servers in a VM.
    Forward {
        /// Name of the VM.
        name: String,
        /// Addresses to listen at, and their targets.
        forward: forward::Forward,
    },
    /// Connect to the serial console of a VM.
    Console {
        /// Name of the VM.
        name: String,
        /// True to disconnect another client of the console.
        force: bool,
    },
    /// Manage volumes of clusters.
    Volumes(volumes::Action),
    /// Manage load balancers of clusters, and their addresses.
    LoadBalancers(load_balancers::Action),
    /// Manage keys.
    Trust(trust::Action),
    /// Show who did what.
    Audit(audit::Query),
    /// Relay a connection to the daemon over standard input and output.
    Proxy,
}

/// Location of the daemon that a verb addresses.
#[derive(Debug, Clone)]
pub enum Where {
    /// Daemon on this machine, at this socket.
    Here(PathBuf),
    /// Daemons of a cluster.
    Cluster(cluster::Access),
}

/// Reasons why a verb failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The daemon is not running.
    #[error("guestlet-host is not running (no socket at {0}); start it with: systemctl start guestlet-host")]
    NoSocket(PathBuf),
    /// The daemon has ended without removing its socket.
    #[error(
        "guestlet-host is not running (nobody answers at {0}); start it with: systemctl start guestlet-host"
    )]
    NobodyAnswers(PathBuf),
    /// Only root may use the socket, because no access rules are set.
    #[error(
        "permission denied on {0}; run guestctl as root, or have root add an [[access]] table for you to \
         the settings of guestlet-host"
    )]
    Forbidden(PathBuf),
    /// The socket cannot be opened for another reason.
    #[error("cannot open {0}")]
    Open(PathBuf, #[source] io::Error),
    /// The daemon ended, or had too many clients.
    #[error("guestlet-host closed the connection")]
    Closed,
    /// The daemon does not answer in time.
    #[error("guestlet-host does not answer")]
    Silent,
    /// The VM is unknown.
    #[error("guestlet-host knows no VM named {0:?}; guestctl ls lists the VMs")]
    UnknownVm(String),
    /// A name in the list matches no VM.
    #[error("no VM matches {0:?}; guestctl ls without names lists all VMs")]
    NoneListed(String),
    /// A name in the list matches none of the VMs that are selected by their labels.
    #[error("no VM with the labels {1} matches {0:?}; guestctl ls --show-labels shows the labels of all VMs")]
    NoneSelected(String, String),
    /// A ping failed.
    #[error("{0}")]
    Ping(String),
    /// The guest did not answer within the time that the user has set.
    #[error("no answer within {} s: it is not known whether the guest did it", .0.as_secs())]
    Late(Duration),
    /// A request to the guest had no effect; the message is all that is known.
    #[error("{0}")]
    Unmet(String),
    /// A program has failed and has reported why itself, or a signal has ended this process.
    #[error("ended with exit code {0}")]
    Ended(u8),
    /// A program cannot be executed.
    #[error("cannot run {0:?}")]
    Run(std::ffi::OsString, #[source] io::Error),
    /// A QGA command failed; the answer has been printed.
    #[error("the guest answered: {0}")]
    Qga(String),
    /// Standard input, a file or a terminal cannot be read.
    #[error("cannot read {0}")]
    Read(String, #[source] io::Error),
    /// A program was not run, or could not be reached.
    #[error("{0}")]
    Program(String),
    /// A program was not run; the second value is the exit code that a shell would return.
    #[error("{0}")]
    NotRun(String, u8),
    /// The daemon refused the call, with this status.
    #[error("{}", .0.message())]
    Call(Status),
    /// Records exist in the journal only.
    #[error(
        "guestlet-host writes no audit file; set one in its settings and restart it: [audit] file = \
         \"/var/log/guestlet-host/audit.json\" (the records are in its journal as well: journalctl -u guestlet-host -g ^audit:)"
    )]
    NoAuditFile,
    /// A file of records cannot be read.
    #[error("cannot read the audit file {0}")]
    AuditFile(PathBuf, #[source] io::Error),
    /// Standard input or output of guestctl proxy is not a pipe.
    #[error("guestctl proxy is started by another guestctl, over pipes")]
    NoPipe(#[source] io::Error),
    /// A request to a cluster failed.
    #[error(transparent)]
    Cluster(#[from] cluster::Error),
    /// The name of a file cannot be sent.
    #[error("the file name {0:?} {1}")]
    File(PathBuf, &'static str),
    /// The doctor has reported a problem.
    #[error("something is wrong")]
    Wrong,
    /// Standard output cannot be written.
    #[error("cannot write to standard output")]
    Print(#[from] io::Error),
}

impl Error {
    /// Returns the exit code of the process: 3 if the daemon is not running, 4 for an unknown VM, 5 if the doctor
    /// found a problem, otherwise 1. (2 means wrong usage.)
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::NoSocket(_) | Self::NobodyAnswers(_) => 3,
            Self::UnknownVm(_) | Self::NoneListed(_) | Self::NoneSelected(..) => 4,
            Self::Wrong => 5,
            Self::NotRun(_, code) | Self::Ended(code) => *code,
            Self::Run(_, error) if error.kind() == io::ErrorKind::NotFound => 127,
            Self::Run(..) => 126,
            Self::Cluster(error) => error.exit_code(),
            _ => 1,
        }
    }

    /// Returns whether the reader of standard output has closed it, which is not worth a message.
    pub fn is_broken_pipe(&self) -> bool {
        matches!(self, Self::Print(error) if error.kind() == io::ErrorKind::BrokenPipe)
    }

    /// Returns whether the error means that the connection to the daemon has ended, whatever it was used for.
    fn is_of_connection(&self) -> bool {
        matches!(self, Self::Closed) || matches!(self, Self::Cluster(error) if error.is_of_connection())
    }

    /// Converts the status of a failed call about the VM `name`.
    fn of_call(status: Status, name: &str) -> Self {
        if status.code() == Code::NotFound {
            return Self::UnknownVm(name.to_owned());
        }
        if std::error::Error::source(&status).is_some() { Self::Closed } else { Self::Call(status) }
    }
}

/// Carries out a verb, at its location.
///
/// # Errors
/// Fails if the verb fails; see [`Error::exit_code`].
pub async fn run(place: Where, format: Format, verb: Verb) -> Result<(), Error> {
    let socket = match place {
        Where::Here(socket) => socket,
        Where::Cluster(access) => return Box::pin(cluster::run(access, format, verb)).await,
    };
    let mut printer = Printer::new(format);
    match verb {
        Verb::Doctor => doctor::run(socket, &mut printer).await,
        Verb::Proxy => proxy::run(socket).await,
        Verb::Copy(job) => cp::run(&|_| Door::Socket(socket.clone()), &mut printer, &job).await,
        verb => at(&Door::Socket(socket), &mut printer, verb).await,
    }
}

/// Carries out a verb with the daemon behind this door. Some verbs connect more than once.
async fn at(door: &Door, printer: &mut Printer, verb: Verb) -> Result<(), Error> {
    match verb {
        Verb::Program { name, action } => exec::run(door, printer, name, action).await,
        Verb::Forward { name, forward } => forward::run(door, printer, name, forward).await,
        Verb::Console { name, force } => console::run(door, name, force).await,
        Verb::Machine { name, action: machine::Action::FreezeAround(around) } => {
            let ask = async |step| {
                door.with(async |daemon| machine::freeze::step(&daemon, &name, &step).await).await
            };
            machine::around::run(printer, &name, &around, ask).await
        }
        Verb::Machine { name, action: machine::Action::Logs(wish) } => {
            let ask = async |request| {
                door.with(async |daemon| machine::journal::read(&daemon, &name, request).await).await
            };
            machine::journal::run(printer, &name, &wish, ask).await
        }
        verb => door.with(async |daemon| one(daemon, printer, verb).await).await,
    }
}

/// Carries out a verb over one connection to a daemon.
async fn one(daemon: Daemon, printer: &mut Printer, verb: Verb) -> Result<(), Error> {
    let client = daemon.admin();
    match verb {
        Verb::Ls(list) => ls::run(client, printer, &list).await,
        Verb::Topology => topology::run(client, printer).await,
        Verb::Nodes => nodes::run(client, printer).await,
        Verb::Info { name } => info::run(client, printer, name).await,
        Verb::Watch(filter) => watch::run(client, printer, filter).await,
        Verb::Disks { name } => disks::run(client, printer, name).await,
        Verb::Top(wish) => top::run(daemon, printer, wish).await,
        Verb::Ping { name, count } => ping::run(client, printer, name, count).await,
        Verb::Disk { name, action } => disk::run(client, printer, name, action).await,
        Verb::Volumes(action) => volumes::run(client, printer, action).await,
        Verb::LoadBalancers(action) => load_balancers::run(client, printer, action).await,
        Verb::Trust(action) => trust::run(client, printer, action).await,
        Verb::Audit(query) => audit::run(client, printer, query).await,
        Verb::Machine { name, action } => machine::run(daemon, printer, name, action).await,
        Verb::Doctor
        | Verb::Proxy
        | Verb::Program { .. }
        | Verb::Copy(_)
        | Verb::Forward { .. }
        | Verb::Console { .. } => Ok(()),
    }
}
