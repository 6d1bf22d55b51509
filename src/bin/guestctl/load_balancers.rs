//! `guestctl lb`.

use clap::Subcommand;
use guestlet::ctl::Verb;
use guestlet::ctl::load_balancers::Action;

/// The verbs of `guestctl lb`.
#[derive(Debug, Subcommand)]
pub enum Lb {
    /// List load balancers: whose they are, which addresses they have, and how many of their nodes take traffic
    Ls {
        /// Of this cluster only
        #[arg(long)]
        cluster: Option<String>,
    },
    /// Give back what a Service has, where its cluster does not do that any more
    ///
    /// A cluster that wants it asks for it anew, and may get another address.
    Rm {
        /// The UID of the Service, as ls -o wide shows it
        uid: String,
        /// The cluster that has it
        #[arg(long)]
        cluster: String,
    },
}

impl Lb {
    /// Returns what is to be done.
    pub fn verb(self, wide: bool) -> Verb {
        Verb::LoadBalancers(match self {
            Self::Ls { cluster } => Action::List { cluster, wide },
            Self::Rm { uid, cluster } => Action::Remove { cluster, uid },
        })
    }
}
