//! What a cluster is told of its VMs, and the load balancers of its Services (`guestlet.v1.Cloud`).
//!
//! ```text
//!  callback (a guest asks) ──▶ service ──Request──▶ desk ──▶ store          records, one file each
//!  api (people ask) ─────────────────────────────────┤  ├──▶ forward        rules of the kernel
//!  fleet (a VM has changed) ─────────────────────────┤  ├──▶ endpoints      who has endpoints (local traffic)
//!  neighbours (who is at which address) ─────────────┤  │
//!  health_checks (an agent's results) ───────────────┘  └──▶ Checks         what agents are to check
//!
//!  pure: settings, wanted, record, book, meet, instance, health, reach, journal, forward::{plan, rules}, view
//! ```
//!
//! One task, the `desk`, owns all of it; it is asked by messages, and never waits for a guest. Which VM asks is known from the
//! connection, and with it the cluster: nothing of another one is looked at for it. An address is given away when the
//! record that says so is on the disk, and free again when a record that does not say so is. Calls cost what they are
//! about: a cluster's things are kept together, and what waits for news waits for a number to change ([`journal`]).
//!
//! That is so where the VMs are this machine's. Those of a whole cluster, with load balancers that are in its API, are told of by
//! `remote`, which answers the same requests.
//!
//! To add a setting of a load balancer: a field of [`wanted::Wanted`] with a default, its check there, and its use in `meet`
//! (whether it can be had), `health` (who takes its traffic), `reach` (where) or `forward` (how it gets there).

use std::sync::Arc;

use tokio::sync::{mpsc, oneshot, watch};

use super::for_guests::Checks;
use crate::wire::proto::v1;

pub mod book;
mod desk;
pub mod endpoints;
pub mod forward;
pub mod health;
pub mod instance;
pub mod journal;
pub mod meet;
pub mod neighbours;
pub mod people;
pub mod reach;
pub mod record;
#[cfg(feature = "kubevirt")]
pub mod remote;
mod service;
pub mod settings;
pub mod store;
mod view;
pub mod wanted;

pub use desk::{Desk, Parts};
use journal::News;
use wanted::{Service, Wanted};

/// Messages that wait for the desk.
const INBOX: usize = 256;

/// Why the desk does not do what it is asked.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Problem {
    /// The outcome is unknown, or cannot be had now.
    #[error("{0}")]
    Unavailable(String),
    /// It contradicts what there is.
    #[error("{0}")]
    Contradiction(String),
    /// The cluster has as many as it may.
    #[error("{0}")]
    Exhausted(String),
    /// There are no load balancers to be had here, and what to do about it.
    #[error("{0}")]
    Nothing(String),
    /// The VM may not ask for it.
    #[error("{0}")]
    Denied(String),
    /// There is no such thing.
    #[error("{0}")]
    NotFound(String),
}

type Reply<T> = oneshot::Sender<T>;

/// What the desk is asked.
#[derive(Debug)]
enum Request {
    Ensure(Asker, Service, Box<Wanted>, Reply<Result<v1::LoadBalancer, Problem>>),
    Release(Asker, Service, Reply<Result<bool, Problem>>),
    List(Asker, Reply<Result<Vec<v1::LoadBalancer>, Problem>>),
    Balancers(Asker, String, Reply<Result<Poll<v1::LoadBalancer>, Problem>>),
    Instances(Asker, String, Reply<Result<Poll<v1::Instance>, Problem>>),
    Instance(Asker, String, Reply<Result<Found, Problem>>),
    Checks(String, Reply<watch::Receiver<Arc<Checks>>>),
    Reported(Asker, u64, Vec<v1::HealthCheckResult>),
    Checked(Asker, u64, Vec<v1::HealthCheckResult>),
    Endpoint(endpoints::Key, health::Outcome),
    AllBalancers(Reply<Vec<v1::ClusterLoadBalancer>>),
    AllPools(Reply<v1::ListAddressPoolsResponse>),
    Remove(String, String, Reply<Result<(), Problem>>),
}

/// Who asks: both are those of the VM that was dialled.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Asker {
    vm: String,
    uid: String,
    cluster: String,
}

/// Answer about a VM that is asked about by its identifier.
#[derive(Debug)]
enum Found {
    /// There is one.
    There(Box<v1::Instance>),
    /// It is proved that there is none any more.
    #[cfg(feature = "kubevirt")]
    Gone,
    /// It cannot be said, and why.
    Unknown(String),
}

/// What a long poll gets: news, or where it hears of some.
#[derive(Debug)]
enum Poll<V> {
    News(News<V>),
    Wait(watch::Receiver<u64>),
}

/// Asks the desk.
#[derive(Debug, Clone)]
pub struct Handle {
    requests: mpsc::Sender<Request>,
    /// Long polls that are under way.
    polls: service::Polls,
}

impl Handle {
    /// Asks whoever answers these requests.
    fn new(requests: mpsc::Sender<Request>) -> Self {
        Self { requests, polls: service::Polls::default() }
    }

    async fn ask<T>(&self, request: impl FnOnce(Reply<T>) -> Request) -> Result<T, Problem> {
        let stopping = || Problem::Unavailable("guestlet-host is stopping".to_owned());
        let (reply, answer) = oneshot::channel();
        self.requests.send(request(reply)).await.map_err(|_| stopping())?;
        answer.await.map_err(|_| stopping())
    }
}
