//! The verbs of `guestctl` that ask the agent in a guest for something.

use std::ffi::OsString;
use std::time::Duration;

use clap::{Subcommand, ValueEnum};
use guestlet::ctl::Verb;
use guestlet::ctl::machine::Action;
use guestlet::ctl::machine::around::Around;
use guestlet::ctl::machine::power::{Goal, Wish};
use guestlet::ctl::words::parse_span;
use guestlet::text::parse_size;

/// Where a guest is suspended to.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum To {
    /// Memory: the VM's processors stand still
    Memory,
    /// A disk: the VM is off
    Disk,
    /// Memory, and a disk in case that memory is lost
    Both,
}

/// The verbs.
#[derive(Debug, Subcommand)]
pub enum Machine {
    /// Shut a guest down
    ///
    /// Without --wait this is done when the guest has accepted it. With it, only when the hypervisor says that the VM is off:
    /// its QMP socket or, on KubeVirt, the phase of its instance. A session that is lost proves nothing.
    Shutdown {
        /// The VM's name, as ls shows it
        name: String,
        /// Stop the system and leave the machine on
        #[arg(long)]
        halt: bool,
        /// Wait until the VM is off
        #[arg(long)]
        wait: bool,
        /// For how long at most, such as 90s or 5m
        #[arg(long, value_name = "SPAN", value_parser = parse_span, default_value = "5m")]
        timeout: Duration,
    },
    /// Restart a guest
    ///
    /// With --wait this is done only when the guest has begun a new session in another boot than before.
    Reboot {
        /// The VM's name, as ls shows it
        name: String,
        /// Wait until it has booted anew
        #[arg(long)]
        wait: bool,
        /// For how long at most, such as 90s or 5m
        #[arg(long, value_name = "SPAN", value_parser = parse_span, default_value = "5m")]
        timeout: Duration,
    },
    /// Suspend a guest
    Suspend {
        /// The VM's name, as ls shows it
        name: String,
        /// Where to
        #[arg(long, value_enum, default_value = "memory")]
        to: To,
        /// Wait until the hypervisor says that it is
        #[arg(long)]
        wait: bool,
        /// For how long at most, such as 90s or 5m
        #[arg(long, value_name = "SPAN", value_parser = parse_span, default_value = "5m")]
        timeout: Duration,
    },
    /// Freeze the file systems of a guest, or run a command of this machine while they are frozen
    ///
    /// The guest thaws by itself after a deadline (qga.freeze.deadline in its settings), which is shown. With a command, the
    /// file systems are thawed when it has ended, however it ends; its exit code is this one's, unless the freeze was over too
    /// soon: that is an error.
    #[command(
        after_help = "Examples:\n  guestctl freeze web-1 --mount /data\n  guestctl freeze web-1 -- lvcreate -s -n snap vg/web-1"
    )]
    Freeze {
        /// The VM's name, as ls shows it
        name: String,
        /// Only what is mounted there; may be repeated
        #[arg(long = "mount", value_name = "PATH")]
        mounts: Vec<String>,
        /// Show whether file systems are frozen, and do nothing
        #[arg(long, conflicts_with_all = ["mounts", "command"])]
        status: bool,
        /// How long the freeze may take, hooks included, such as 90s or 5m
        #[arg(long, value_name = "SPAN", value_parser = parse_span, default_value = "5m")]
        timeout: Duration,
        /// What to run meanwhile
        #[arg(last = true, value_name = "COMMAND")]
        command: Vec<OsString>,
    },
    /// Thaw the file systems of a guest; an error if their freeze was over before
    Thaw {
        /// The VM's name, as ls shows it
        name: String,
        /// Only if exactly what is mounted there is frozen; may be repeated
        #[arg(long = "mount", value_name = "PATH")]
        mounts: Vec<String>,
        /// How long it may take, such as 90s or 5m
        #[arg(long, value_name = "SPAN", value_parser = parse_span, default_value = "60s")]
        timeout: Duration,
    },
    /// Give unused blocks of the file systems of a guest back
    Trim {
        /// The VM's name, as ls shows it
        name: String,
        /// Only what is mounted there; may be repeated
        #[arg(long = "mount", value_name = "PATH")]
        mounts: Vec<String>,
        /// Leave ranges that are shorter, such as 1M
        #[arg(long, value_name = "SIZE", value_parser = parse_size)]
        minimum: Option<u64>,
        /// How long it may take, such as 90s or 5m
        #[arg(long, value_name = "SPAN", value_parser = parse_span, default_value = "5m")]
        timeout: Duration,
    },
    /// Show the file systems of a guest that are on disks, and how full they are
    Fs {
        /// The VM's name, as ls shows it
        name: String,
    },
    /// Have a guest carry out any command of the QEMU guest agent protocol, and print the answer
    ///
    /// What may be asked for is up to the guest: each command needs the role that docs/qga.md says. The exit code is 1 if the
    /// answer is an error.
    #[command(after_help = "Examples:\n  guestctl qga web-1 '{\"execute\":\"guest-get-osinfo\"}'\n  \
                      guestctl qga web-1 '{\"execute\":\"guest-get-disks\"}' | jq .return")]
    Qga {
        /// The VM's name, as ls shows it
        name: String,
        /// One command as JSON; - reads it from standard input
        command: String,
        /// How long it may take, such as 90s or 5m; at most 10m
        #[arg(long, value_name = "SPAN", value_parser = parse_span, default_value = "60s")]
        timeout: Duration,
    },
}

impl From<Machine> for Verb {
    fn from(machine: Machine) -> Self {
        let power = |goal, wait, within| Action::Power(Wish { goal, wait, within });
        let (name, action) = match machine {
            Machine::Shutdown { name, halt, wait, timeout } => {
                (name, power(if halt { Goal::Halted } else { Goal::Off }, wait, timeout))
            }
            Machine::Reboot { name, wait, timeout } => (name, power(Goal::Rebooted, wait, timeout)),
            Machine::Suspend { name, to, wait, timeout } => {
                let goal = match to {
                    To::Memory => Goal::Suspended,
                    To::Disk => Goal::SuspendedToDisk,
                    To::Both => Goal::SuspendedToBoth,
                };
                (name, power(goal, wait, timeout))
            }
            Machine::Freeze { name, status: true, .. } => (name, Action::FreezeStatus),
            Machine::Freeze { name, mounts, timeout, command, .. } if command.is_empty() => {
                (name, Action::Freeze { mounts, within: timeout })
            }
            Machine::Freeze { name, mounts, timeout, command, .. } => {
                (name, Action::FreezeAround(Around { mounts, within: timeout, command }))
            }
            Machine::Thaw { name, mounts, timeout } => (name, Action::Thaw { mounts, within: timeout }),
            Machine::Trim { name, mounts, minimum, timeout } => {
                (name, Action::Trim { mounts, minimum: minimum.unwrap_or(0), within: timeout })
            }
            Machine::Fs { name } => (name, Action::FileSystems),
            Machine::Qga { name, command, timeout } => (name, Action::Qga { command, within: timeout }),
        };
        Self::Machine { name, action }
    }
}
