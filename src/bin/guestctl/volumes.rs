//! `guestctl volumes`.

use clap::Subcommand;
use guestlet::ctl::Verb;
use guestlet::ctl::volumes::Action;
use guestlet::text::parse_size;

/// The verbs of `guestctl volumes`.
#[derive(Debug, Subcommand)]
pub enum Volumes {
    /// List volumes, and which VM and pod has each
    Ls {
        /// Of this cluster only
        #[arg(long)]
        cluster: Option<String>,
    },
    /// Make a volume; success if the cluster has one of this name that is as large
    Create {
        /// Its name, unique in the cluster
        name: String,
        /// The cluster whose it is to be
        #[arg(long)]
        cluster: String,
        /// How large it is to be, such as 10G
        #[arg(long, value_parser = parse_size)]
        size: u64,
        /// The storage class, which is the name of a pool
        #[arg(long)]
        class: Option<String>,
    },
    /// Plug a volume into a VM of its cluster; success if it is
    Attach {
        /// The volume's ID, as ls shows it
        volume: String,
        /// The VM's name
        vm: String,
        /// The guest cannot write
        #[arg(long)]
        read_only: bool,
    },
    /// Take a volume away from its VM, once the guest has let go of it; success if none has it
    Detach {
        /// The volume's ID
        volume: String,
        /// Take it away although the guest uses it, as if its cable were cut: what is mounted from it fails, and what the
        /// guest has not written yet is lost. Where the VM cannot be asked, forget that it has the volume: you answer for it
        /// that its QEMU has ended
        #[arg(long)]
        force: bool,
    },
    /// Make a volume larger, also while a guest uses it
    Expand {
        /// The volume's ID
        volume: String,
        /// The size that it is to have, such as 20G
        #[arg(long, value_parser = parse_size)]
        size: u64,
    },
    /// Remove a volume that no VM has, with all that is in it; success if there is none
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
