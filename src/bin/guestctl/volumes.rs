//! `guestctl volumes`.

use clap::Subcommand;
use guestlet::ctl::Verb;
use guestlet::ctl::volumes::Action;
use guestlet::text::parse_size;

/// The verbs of `guestctl volumes`.
#[derive(Debug, Subcommand)]
pub enum Volumes {
    /// List volumes, and which VM and pod uses each
    Ls {
        /// Only for this cluster
        #[arg(long)]
        cluster: Option<String>,
    },
    /// Create a volume; success if the cluster has one of this name and size
    Create {
        /// Its name, unique in the cluster
        name: String,
        /// The cluster that it belongs to
        #[arg(long)]
        cluster: String,
        /// Its size, such as 10G
        #[arg(long, value_parser = parse_size)]
        size: u64,
        /// The storage class, which is the name of a pool
        #[arg(long)]
        class: Option<String>,
    },
    /// Plug a volume into a VM of its cluster; success if it is already plugged
    Attach {
        /// The volume's ID, as ls shows it
        volume: String,
        /// The VM's name
        vm: String,
        /// The guest cannot write
        #[arg(long)]
        read_only: bool,
    },
    /// Unplug a volume from its VM, once the guest has released it; success if no VM has it
    Detach {
        /// The volume's ID
        volume: String,
        /// Unplug it even if the guest uses it, as if its cable were pulled: file systems on it fail, and what the guest has
        /// not written yet is lost. If the VM cannot be asked, remove the record that it has the volume: you must be sure that
        /// its QEMU has ended
        #[arg(long)]
        force: bool,
    },
    /// Expand a volume, even while a guest uses it
    Expand {
        /// The volume's ID
        volume: String,
        /// The new size, such as 20G
        #[arg(long, value_parser = parse_size)]
        size: u64,
    },
    /// Remove a volume that no VM has, with its contents; success if there is none
    Rm {
        /// The volume's ID
        volume: String,
    },
}

impl Volumes {
    /// Returns what is to be done.
    pub fn verb(self, wide: bool) -> Verb {
        Verb::Volumes(match self {
            Self::Ls { cluster } => Action::List { cluster, wide },
            Self::Create { name, cluster, size, class } => Action::Create { cluster, name, size, class },
            Self::Attach { volume, vm, read_only } => Action::Attach { volume, vm, read_only },
            Self::Detach { volume, force } => Action::Detach { volume, force },
            Self::Expand { volume, size } => Action::Expand { volume, size },
            Self::Rm { volume } => Action::Remove { volume },
        })
    }
}
