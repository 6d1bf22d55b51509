//! `guestctl disk`.

use std::path::PathBuf;

use clap::{ArgGroup, Subcommand, value_parser};
use guestlet::ctl::Verb;
use guestlet::ctl::disk::{Action, Bus, Format, New};
use guestlet::text::parse_size;

/// The verbs of `guestctl disk`.
#[derive(Debug, Subcommand)]
pub enum Disk {
    /// List the disks of a VM, as the hypervisor sees them
    Ls {
        /// The VM's name
        name: String,
    },
    /// Attach a disk; success if it is attached already
    #[command(group = ArgGroup::new("source").required(true).args(["file", "size"]))]
    Attach {
        /// The VM's name
        name: String,
        /// An image file, or a block device of the host
        #[arg(long)]
        file: Option<PathBuf>,
        /// The VM's volume with this serial number; created with this size, such as 10G, if it does not exist
        #[arg(long, value_parser = parse_size)]
        size: Option<u64>,
        /// The serial number by which the guest identifies the disk: up to 64 characters on scsi, 20 on virtio
        #[arg(long)]
        serial: String,
        /// The bus on which the guest sees it
        #[arg(long, value_enum, default_value = "scsi")]
        bus: Bus,
        /// The format of the file; by default, from the end of its name, and raw for volumes
        #[arg(long, value_enum)]
        format: Option<Format>,
        /// The guest cannot write
        #[arg(long)]
        read_only: bool,
    },
    /// Detach a disk; success if there is none. The image or device behind it stays
    ///
    /// The agent in the guest is first asked to release the disk. If the guest is using it, or cannot be asked because there is
    /// no session with an agent, the disk stays attached and the command fails.
    Detach {
        /// The VM's name
        name: String,
        /// The disk's serial number
        #[arg(long)]
        serial: String,
        /// How many seconds the guest may take to release it
        #[arg(long, value_name = "SECONDS", default_value_t = 30, value_parser = value_parser!(u32).range(1..=600))]
        wait: u32,
        /// Detach the disk even if the guest uses it or cannot be asked, as if its cable were pulled: file systems on it fail,
        /// and what the guest has not written yet is lost
        #[arg(long)]
        force: bool,
    },
    /// List the volumes that attach created, including those that are not attached
    Volumes {
        /// Only for this VM
        name: Option<String>,
    },
    /// Remove a volume that attach created, with its contents; success if there is none
    ///
    /// It is removed only if nothing uses it: not while it is attached or open in any program, and not while its VM may have it
    /// and cannot be asked.
    Rm {
        /// The name of the VM for which it was created
        name: String,
        /// The disk's serial number
        #[arg(long)]
        serial: String,
    },
    /// Expand a disk while the guest uses it
    Resize {
        /// The VM's name
        name: String,
        /// The disk's serial number
        #[arg(long)]
        serial: String,
        /// The new size, such as 20G
        #[arg(long, value_parser = parse_size)]
        size: u64,
    },
}

impl From<Disk> for Verb {
    fn from(disk: Disk) -> Self {
        match disk {
            Disk::Ls { name } => Self::Disk { name, action: Action::List },
            Disk::Attach { name, file, size, serial, bus, format, read_only } => {
                let new = New { serial, file, size: size.unwrap_or(0), bus, format, read_only };
                Self::Disk { name, action: Action::Attach(new) }
            }
            Disk::Detach { name, serial, wait, force } => {
                Self::Disk { name, action: Action::Detach { serial, wait, force } }
            }
            Disk::Volumes { name } => Self::Disk { name: name.unwrap_or_default(), action: Action::Volumes },
            Disk::Rm { name, serial } => Self::Disk { name, action: Action::Remove { serial } },
            Disk::Resize { name, serial, size } => {
                Self::Disk { name, action: Action::Resize { serial, size } }
            }
        }
    }
}
