//! `guestctl lb`.

use clap::Subcommand;
use guestlet::ctl::Verb;
use guestlet::ctl::load_balancers::Action;

/// The verbs of `guestctl lb`.
#[derive(Debug, Subcommand)]
pub enum Lb {
    /// List load balancers with their Services, their addresses, and how many of their nodes receive traffic
    Ls {
        /// Only for this cluster
        #[arg(long)]
        cluster: Option<String>,
    },
    /// Release the load balancer of a Service whose cluster no longer does that
    ///
    /// A cluster that still wants it requests it again, and may get another address.
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
