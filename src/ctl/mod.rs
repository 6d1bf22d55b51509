//! What `guestctl` does, one file for each verb.
//!
//! A verb asks the daemon through [`client`], and hands values to [`mod@print`], the only place that writes;
//! [`words`] and [`json`] say how they look to people and to programs. To add a verb: its file, its arm in
//! [`run`], its words in the README.

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

/// What to do.
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
        /// Its name.
        name: String,
    },
    /// Show what happens.
    Watch(watch::Filter),
    /// Show the disks of one VM.
    Disks {
        /// Its name.
        name: String,
    },
    /// Show what all guests do now.
    Top(top::Wish),
    /// Say what works.
    Doctor,
    /// Measure round trips.
    Ping {
        /// The VM's name.
        name: String,
        /// How many.
        count: u32,
    },
    /// Plug disks into a running VM.
    Disk {
        /// The VM's name.
        name: String,
        /// What to do with which disk.
        action: disk::Action,
    },
    /// Ask the agent in a VM for something.
    Machine {
        /// The VM's name.
        name: String,
        /// For what.
        action: machine::Action,
    },
    /// Run programs in a VM, and look after them.
    Program {
        /// The VM's name.
        name: String,
        /// What to do.
        action: exec::Action,
    },
    /// Copy files from and to VMs.
    Copy(cp::Job),
    /// Reach what listens in a VM.
    Forward {
        /// The VM's name.
        name: String,
        /// From where to what.
        forward: forward::Forward,
    },
    /// Sit at the serial console of a VM.
    Console {
        /// Its name.
        name: String,
        /// Whoever has it is ended.
        force: bool,
    },
    /// Look after volumes of clusters.
    Volumes(volumes::Action),
    /// Look after load balancers of clusters, and their addresses.
    LoadBalancers(load_balancers::Action),
    /// Look after keys.
    Trust(trust::Action),
    /// Show who did what.
    Audit(audit::Query),
    /// Pass a connection on.
    Proxy,
}

/// Where the daemon is that a verb is about.
#[derive(Debug, Clone)]
pub enum Where {
    /// On this machine, at this socket.
    Here(PathBuf),
    /// In a cluster.
    Cluster(cluster::Access),
}

/// Why a verb failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No daemon.
    #[error("guestlet-host is not running (no socket at {0}); start it with: systemctl start guestlet-host")]
    NoSocket(PathBuf),
    /// A daemon ended without removing its socket.
    #[error(
        "guestlet-host is not running (nobody answers at {0}); start it with: systemctl start guestlet-host"
    )]
    NobodyAnswers(PathBuf),
    /// The socket is for root, as there are no rules of access.
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
    /// The daemon hangs.
    #[error("guestlet-host does not answer")]
    Silent,
    /// No such VM.
    #[error("guestlet-host knows no VM named {0:?}; guestctl ls lists the VMs")]
    UnknownVm(String),
    /// No VM of a list has one of the names.
    #[error("no VM matches {0:?}; guestctl ls without names lists all VMs")]
    NoneListed(String),
    /// A ping failed.
    #[error("{0}")]
    Ping(String),
    /// A guest takes longer than somebody wants to wait.
    #[error("no answer within {} s: it is not known whether the guest did it", .0.as_secs())]
    Late(Duration),
    /// Something did not come to be, although the guest was asked for it; all that is known.
    #[error("{0}")]
    Unmet(String),
    /// A program that was run has failed, and has said why itself; or a signal has ended this one.
    #[error("ended with exit code {0}")]
    Ended(u8),
    /// A program cannot be run.
    #[error("cannot run {0:?}")]
    Run(std::ffi::OsString, #[source] io::Error),
    /// A command of QGA failed; the answer has been printed.
    #[error("the guest answered: {0}")]
    Qga(String),
    /// Standard input, a file or a terminal cannot be read.
    #[error("cannot read {0}")]
    Read(String, #[source] io::Error),
    /// A program was not run, or not reached.
    #[error("{0}")]
    Program(String),
    /// A program was not run, and what a shell would exit with then.
    #[error("{0}")]
    NotRun(String, u8),
    /// The daemon's own words.
    #[error("{}", .0.message())]
    Call(Status),
    /// There are no records but those in the journal.
    #[error(
        "guestlet-host writes no audit file; set one in its settings and restart it: [audit] file = \
         \"/var/log/guestlet-host/audit.json\" (the records are in its journal as well: journalctl -u guestlet-host -g ^audit:)"
    )]
    NoAuditFile,
    /// A file of records cannot be read.
    #[error("cannot read the audit file {0}")]
    AuditFile(PathBuf, #[source] io::Error),
    /// What guestctl proxy was started with is no pipe.
    #[error("guestctl proxy is started by another guestctl, over pipes")]
    NoPipe(#[source] io::Error),
    /// A cluster cannot be asked.
    #[error(transparent)]
    Cluster(#[from] cluster::Error),
    /// A file's name cannot be sent.
    #[error("the file name {0:?} {1}")]
    File(PathBuf, &'static str),
    /// The doctor found something, and has said what.
    #[error("something is wrong")]
    Wrong,
    /// Standard output cannot be written.
    #[error("cannot write to standard output")]
    Print(#[from] io::Error),
}

impl Error {
    /// The exit code of the process: 3 without a daemon, 4 for an unknown VM, 5 if the doctor found something wrong, else
    /// 1. (2 is for wrong usage.)
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::NoSocket(_) | Self::NobodyAnswers(_) => 3,
            Self::UnknownVm(_) | Self::NoneListed(_) => 4,
            Self::Wrong => 5,
            Self::NotRun(_, code) | Self::Ended(code) => *code,
            Self::Run(_, error) if error.kind() == io::ErrorKind::NotFound => 127,
            Self::Run(..) => 126,
            Self::Cluster(error) => error.exit_code(),
            _ => 1,
        }
    }

    /// The reader of our output has gone: nothing to complain about.
    pub fn is_broken_pipe(&self) -> bool {
        matches!(self, Self::Print(error) if error.kind() == io::ErrorKind::BrokenPipe)
    }

    /// The connection with the daemon has ended, whatever was to be done over it.
    fn is_of_connection(&self) -> bool {
        matches!(self, Self::Closed) || matches!(self, Self::Cluster(error) if error.is_of_connection())
    }

    /// What a failed call about the VM `name` means.
    fn of_call(status: Status, name: &str) -> Self {
        if status.code() == Code::NotFound {
            return Self::UnknownVm(name.to_owned());
        }
        if std::error::Error::source(&status).is_some() { Self::Closed } else { Self::Call(status) }
    }
}

/// Does it, where it is meant.
///
/// # Errors
/// If it cannot be done; see [`Error::exit_code`].
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

/// Does it with the daemon behind this door, which some verbs pass more than once.
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

/// Does it with one daemon.
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
