//! The verbs of `guestctl` that ask the agent in a guest for something.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand, ValueEnum};
use guestlet::ctl::Verb;
use guestlet::ctl::machine::Action;
use guestlet::ctl::machine::accounts;
use guestlet::ctl::machine::around::{Around, Require};
use guestlet::ctl::machine::hardware::{Clock, Switches};
use guestlet::ctl::machine::journal::{self, parse_priority};
use guestlet::ctl::machine::power::{Goal, Wish};
use guestlet::ctl::machine::receipts;
use guestlet::ctl::machine::restore::{Image, Trial};
use guestlet::ctl::words::parse_span;
use guestlet::text::parse_size;

/// Where a guest is suspended to.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum To {
    /// Memory: the VM's processors are stopped
    Memory,
    /// A disk: the VM is off
    Disk,
    /// Memory, and a disk in case that memory is lost
    Both,
}

/// What a snapshot has to be worth.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum Level {
    /// File systems were frozen from before the command until after it
    Filesystem,
    /// So were applications, by their own procedures
    Application,
}

/// The verbs of `guestctl receipts`.
#[derive(Debug, Subcommand)]
pub enum Receipts {
    /// List the receipts of a guest, the newest last
    Ls {
        /// The name of the VM, as shown by ls
        name: String,
        /// Only this many of the newest ones
        #[arg(long, value_name = "NUMBER", default_value = "100", value_parser = clap::value_parser!(u32).range(1..=256))]
        last: u32,
    },
    /// Show one, and why its level is not higher
    Show {
        /// The name of the VM, as shown by ls
        name: String,
        /// The ID of the receipt
        id: String,
    },
    /// Verify that the guest has signed one; an error if not
    ///
    /// The key is the one that guestlet-host has pinned of this guest (guestctl trust show). Without keys nothing is proved.
    ///
    /// With --from it is a restore test: QEMU on this machine starts a clone of the guest from the snapshot, without a network;
    /// the agent in it asks its databases where they are, and that is compared with the receipt. The images are only read, and
    /// nothing is left of the clone.
    Verify {
        /// The name of the VM, as shown by ls
        name: String,
        /// The ID of the receipt
        id: String,
        /// Restore test from this image of a disk, raw=FILE or qcow2=FILE; once for each disk, that of the system first
        #[arg(long, value_name = "FORMAT=FILE")]
        from: Vec<Image>,
        /// QEMU for the clone; by default the one for guests of this machine's architecture
        #[arg(long, value_name = "PROGRAM", requires = "from")]
        qemu: Option<PathBuf>,
        /// QEMU's accelerator, such as tcg; by default KVM if available, otherwise emulation
        #[arg(long, value_name = "NAME", requires = "from")]
        accelerator: Option<String>,
        /// Memory of the clone, in MiB
        #[arg(long, value_name = "MIB", default_value = "1024", requires = "from")]
        memory: u32,
        /// One more argument for QEMU, such as -bios and then its file; may be repeated
        #[arg(
            long = "qemu-argument",
            value_name = "ARGUMENT",
            allow_hyphen_values = true,
            requires = "from"
        )]
        qemu_arguments: Vec<String>,
        /// How long the restore test may take
        #[arg(long, value_name = "SPAN", value_parser = parse_span, default_value = "10m", requires = "from")]
        timeout: Duration,
    },
}

/// QEMU for guests of this machine's kind.
const QEMU: &str = if cfg!(target_arch = "aarch64") { "qemu-system-aarch64" } else { "qemu-system-x86_64" };

/// What is to be switched.
#[derive(Debug, Args)]
pub struct Switched {
    /// Switch these on, by their numbers
    #[arg(long, value_name = "NUMBER", value_delimiter = ',')]
    online: Vec<u64>,
    /// Switch these off
    #[arg(long, value_name = "NUMBER", value_delimiter = ',')]
    offline: Vec<u64>,
}

impl Switched {
    fn some(self) -> Option<Switches> {
        let Self { online, offline } = self;
        Some(Switches { online, offline }).filter(|switches| !switches.is_empty())
    }
}

/// The verbs of `guestctl keys`.
#[derive(Debug, Subcommand)]
pub enum Keys {
    /// List the keys of a user
    Ls {
        /// The name of the VM, as shown by ls
        name: String,
        /// The user
        user: String,
    },
    /// Add keys; those that are already there are not added again
    #[command(after_help = "Example:\n  guestctl keys add web-1 root ~/.ssh/id_ed25519.pub")]
    Add {
        /// The name of the VM, as shown by ls
        name: String,
        /// The user
        user: String,
        /// A file with a key on each line; - reads them from standard input
        file: PathBuf,
        /// Remove all others
        #[arg(long)]
        reset: bool,
    },
    /// Remove keys; success if they are not there
    Rm {
        /// The name of the VM, as shown by ls
        name: String,
        /// The user
        user: String,
        /// A file with a key on each line; - reads them from standard input
        file: PathBuf,
    },
}

/// The verbs.
#[derive(Debug, Subcommand)]
pub enum Machine {
    /// Shut a guest down
    ///
    /// Without --wait, the command ends when the guest has accepted it. With --wait, only when the hypervisor reports that the
    /// VM is off: its QMP socket or, on KubeVirt, the phase of its instance. A session that is lost proves nothing.
    Shutdown {
        /// The name of the VM, as shown by ls
        name: String,
        /// Stop the system and leave the machine on
        #[arg(long)]
        halt: bool,
        /// Wait until the VM is off
        #[arg(long)]
        wait: bool,
        /// How long to wait at most, such as 90s or 5m
        #[arg(long, value_name = "SPAN", value_parser = parse_span, default_value = "5m")]
        timeout: Duration,
    },
    /// Restart a guest
    ///
    /// With --wait, the command ends only when the guest has begun a new session in a new boot.
    Reboot {
        /// The name of the VM, as shown by ls
        name: String,
        /// Wait until it has rebooted
        #[arg(long)]
        wait: bool,
        /// How long to wait at most, such as 90s or 5m
        #[arg(long, value_name = "SPAN", value_parser = parse_span, default_value = "5m")]
        timeout: Duration,
    },
    /// Suspend a guest
    Suspend {
        /// The name of the VM, as shown by ls
        name: String,
        /// Where to
        #[arg(long, value_enum, default_value = "memory")]
        to: To,
        /// Wait until the hypervisor reports that it is suspended
        #[arg(long)]
        wait: bool,
        /// How long to wait at most, such as 90s or 5m
        #[arg(long, value_name = "SPAN", value_parser = parse_span, default_value = "5m")]
        timeout: Duration,
    },
    /// Freeze the file systems of a guest, or run a command of this machine while they are frozen
    ///
    /// The guest thaws by itself after a deadline (qga.freeze.deadline in its settings), which is shown. With a command, the
    /// file systems are thawed when it has ended, however it ends; its exit code becomes that of guestctl, unless the freeze
    /// was over too soon: that is an error.
    #[command(
        after_help = "Examples:\n  guestctl freeze web-1 --mount /data\n  guestctl freeze web-1 -- lvcreate -s -n snap vg/web-1"
    )]
    Freeze {
        /// The name of the VM, as shown by ls
        name: String,
        /// Only the file system at this mount point; may be repeated
        #[arg(long = "mount", value_name = "PATH")]
        mounts: Vec<String>,
        /// Show whether file systems are frozen, and do nothing
        #[arg(long, conflicts_with_all = ["mounts", "command"])]
        status: bool,
        /// Time limit of the freeze, hooks included, such as 90s or 5m
        #[arg(long, value_name = "SPAN", value_parser = parse_span, default_value = "5m")]
        timeout: Duration,
        /// Fail if the receipt of the freeze proves less about the snapshot that the command makes
        #[arg(long, value_enum, value_name = "LEVEL", requires = "command")]
        require: Option<Level>,
        /// Name of the snapshot that the command makes, for the receipt
        #[arg(long, value_name = "NAME", requires = "command")]
        snapshot: Option<String>,
        /// Command of this machine to run meanwhile
        #[arg(last = true, value_name = "COMMAND")]
        command: Vec<OsString>,
    },
    /// Thaw the file systems of a guest; an error if their freeze was already over
    Thaw {
        /// The name of the VM, as shown by ls
        name: String,
        /// Only if exactly the file systems at these mount points are frozen; may be repeated
        #[arg(long = "mount", value_name = "PATH")]
        mounts: Vec<String>,
        /// Time limit, such as 90s or 5m
        #[arg(long, value_name = "SPAN", value_parser = parse_span, default_value = "60s")]
        timeout: Duration,
    },
    /// Show the receipts of a guest's freezes, which prove how consistent a snapshot is
    #[command(subcommand)]
    Receipts(Receipts),
    /// Trim the file systems of a guest: discard their unused blocks
    Trim {
        /// The name of the VM, as shown by ls
        name: String,
        /// Only the file system at this mount point; may be repeated
        #[arg(long = "mount", value_name = "PATH")]
        mounts: Vec<String>,
        /// Skip free ranges that are shorter, such as 1M
        #[arg(long, value_name = "SIZE", value_parser = parse_size)]
        minimum: Option<u64>,
        /// Time limit, such as 90s or 5m
        #[arg(long, value_name = "SPAN", value_parser = parse_span, default_value = "5m")]
        timeout: Duration,
    },
    /// Show the file systems of a guest that are on disks, and how full they are
    Fs {
        /// The name of the VM, as shown by ls
        name: String,
    },
    /// Show the time of a guest, or set it
    Time {
        /// The name of the VM, as shown by ls
        name: String,
        /// Set it to this machine's time (now), to what the guest's hardware clock shows (hardware), or to a time such as
        /// 2026-11-26T01:00:00Z
        #[arg(long, value_name = "TIME")]
        set: Option<Clock>,
    },
    /// Show the processors of a guest, or switch them on or off
    Cpus {
        /// The name of the VM, as shown by ls
        name: String,
        #[command(flatten)]
        switches: Switched,
    },
    /// Show the memory blocks of a guest, or switch them on or off
    Memory {
        /// The name of the VM, as shown by ls
        name: String,
        #[command(flatten)]
        switches: Switched,
    },
    /// Show the network interfaces of a guest
    Network {
        /// The name of the VM, as shown by ls
        name: String,
        /// Show its routes instead
        #[arg(long)]
        routes: bool,
    },
    /// Show the journal of a guest
    ///
    /// Without --lines or --since all of it is shown, the oldest entries first. With -f, new entries are shown as they are
    /// written, even after guestlet-host, the agent or the guest restarts.
    #[command(
        after_help = "Examples:\n  guestctl logs web-1 -u nginx -f\n  guestctl logs web-1 --since 1h -p err -o json"
    )]
    Logs {
        /// The name of the VM, as shown by ls
        name: String,
        /// Follow the journal: show new entries as they are written
        #[arg(short, long)]
        follow: bool,
        /// Only entries of this unit; may be repeated
        #[arg(short, long = "unit", value_name = "UNIT")]
        units: Vec<String>,
        /// Only entries of the last, such as 90s, 5m or 1h
        #[arg(long, value_name = "SPAN", value_parser = parse_span)]
        since: Option<Duration>,
        /// Only this many of the newest entries; 10 with --follow, unless --since is given
        #[arg(long, visible_alias = "tail", value_name = "NUMBER")]
        lines: Option<u32>,
        /// Only entries of this priority and more urgent ones: emerg, alert, crit, err, warning, notice, info, debug, or 0 to 7
        #[arg(short, long, value_name = "PRIORITY", value_parser = parse_priority)]
        priority: Option<u32>,
    },
    /// Show the metrics of a guest: processors, memory, pressure, file systems, disks, networks, units
    ///
    /// In the OpenMetrics format of Prometheus, or with -o json as a list of samples. docs/metrics.md explains each metric, and
    /// how Prometheus gets those of all guests from guestlet-host. With --every, the guest is asked repeatedly, and each list
    /// is one line; if it cannot be asked for a while, the reason goes to standard error.
    #[command(
        after_help = "Examples:\n  guestctl metrics web-1 --every 10s -o json\n  guestctl metrics web-1 -o json | jq '.[] | select(.name | endswith(\"memory_available_bytes\")) | .value'"
    )]
    Metrics {
        /// The name of the VM, as shown by ls
        name: String,
        /// Ask repeatedly at this interval, such as 10s; at least a second
        #[arg(long, value_name = "SPAN", value_parser = parse_span)]
        every: Option<Duration>,
    },
    /// Show who is logged in to a guest
    Users {
        /// The name of the VM, as shown by ls
        name: String,
    },
    /// Set the password of a user of a guest
    ///
    /// The password is read from the terminal without echo, or from the first line of standard input.
    #[command(after_help = "Example:\n  openssl passwd -6 | guestctl passwd web-1 root --crypted")]
    Passwd {
        /// The name of the VM, as shown by ls
        name: String,
        /// The user
        user: String,
        /// The password is already hashed, as by crypt(5)
        #[arg(long)]
        crypted: bool,
    },
    /// Manage the SSH keys with which a user of a guest can log in
    #[command(subcommand)]
    Keys(Keys),
    /// Run any command of the QEMU guest agent protocol in a guest, and print the answer
    ///
    /// The guest decides what is allowed: each command needs the role that docs/qga.md lists. The exit code is 1 if the answer
    /// is an error.
    #[command(after_help = "Examples:\n  guestctl qga web-1 '{\"execute\":\"guest-get-osinfo\"}'\n  \
                      guestctl qga web-1 '{\"execute\":\"guest-get-disks\"}' | jq .return")]
    Qga {
        /// The name of the VM, as shown by ls
        name: String,
        /// One command as JSON; - reads it from standard input
        command: String,
        /// Time limit, such as 90s or 5m; at most 10m
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
            Machine::Freeze { name, mounts, timeout, command, require, snapshot, .. } => {
                let snapshot = snapshot.unwrap_or_default();
                let require = require.map(|level| match level {
                    Level::Filesystem => Require::FileSystem,
                    Level::Application => Require::Application,
                });
                (name, Action::FreezeAround(Around { mounts, within: timeout, command, snapshot, require }))
            }
            Machine::Thaw { name, mounts, timeout } => (name, Action::Thaw { mounts, within: timeout }),
            Machine::Receipts(receipts) => {
                let (name, wish) = match receipts {
                    Receipts::Ls { name, last } => (name, receipts::Wish::List { last }),
                    Receipts::Show { name, id } => (name, receipts::Wish::Show(id)),
                    Receipts::Verify { name, id, from, .. } if from.is_empty() => {
                        (name, receipts::Wish::Verify(id))
                    }
                    Receipts::Verify {
                        name,
                        id,
                        from,
                        qemu,
                        accelerator,
                        memory,
                        qemu_arguments,
                        timeout,
                    } => {
                        let (arguments, qemu) = (qemu_arguments, qemu.unwrap_or_else(|| QEMU.into()));
                        let trial =
                            Trial { disks: from, qemu, accelerator, memory, arguments, within: timeout };
                        (name, receipts::Wish::Restore(id, trial))
                    }
                };
                (name, Action::Receipts(wish))
            }
            Machine::Trim { name, mounts, minimum, timeout } => {
                (name, Action::Trim { mounts, minimum: minimum.unwrap_or(0), within: timeout })
            }
            Machine::Fs { name } => (name, Action::FileSystems),
            Machine::Time { name, set } => (name, set.map_or(Action::Time, Action::SetTime)),
            Machine::Cpus { name, switches } => {
                (name, switches.some().map_or(Action::Processors, Action::SwitchProcessors))
            }
            Machine::Memory { name, switches } => {
                (name, switches.some().map_or(Action::Memory, Action::SwitchMemory))
            }
            Machine::Network { name, routes } => {
                (name, if routes { Action::Routes } else { Action::Interfaces })
            }
            Machine::Logs { name, follow, units, since, lines, priority } => {
                let usual = (follow && since.is_none()).then_some(10);
                let last = lines.or(usual);
                (name, Action::Logs(journal::Wish { units, since, last, priority, follow }))
            }
            Machine::Metrics { name, every } => {
                (name, Action::Metrics(every.map(|every| every.max(Duration::from_secs(1)))))
            }
            Machine::Users { name } => (name, Action::Users),
            Machine::Passwd { name, user, crypted } => (name, Action::Password { user, crypted }),
            Machine::Keys(keys) => {
                let (name, user, keys) = match keys {
                    Keys::Ls { name, user } => (name, user, accounts::Keys::List),
                    Keys::Add { name, user, file, reset } => {
                        (name, user, accounts::Keys::Add { file, reset })
                    }
                    Keys::Rm { name, user, file } => (name, user, accounts::Keys::Remove { file }),
                };
                (name, Action::Keys { user, keys })
            }
            Machine::Qga { name, command, timeout } => (name, Action::Qga { command, within: timeout }),
        };
        Self::Machine { name, action }
    }
}
