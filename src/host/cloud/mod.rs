//! The service `guestlet.v1.Cloud`: reports to a cluster about its VMs, and the load balancers of its Services.
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
//! One task, the `desk`, owns the state. Others send it requests, and it never waits for a guest. The connection
//! tells which VM sends a request, and with it the cluster, so a request never sees anything of another cluster.
//! An address is allocated once the record that has it is on the disk, and free again once a record without it is.
//! The cost of a call depends only on its own cluster: the state is kept by cluster, and a waiting poll only waits
//! for a number to change ([`journal`]).
//!
//! This holds for the VMs of this machine. For the VMs of a whole host cluster, with load balancers that are
//! objects in its API, `remote` answers the same requests.
//!
//! To add a setting of a load balancer: add a field of [`wanted::Wanted`] with a default, check it there, and use
//! it in `meet` (whether it is possible), `health` (who takes its traffic), `reach` (where) or `forward` (how it
//! gets there).

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

/// Requests that wait for the desk at most.
const INBOX: usize = 256;

/// Reason why the desk refuses a request.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Problem {
    /// The outcome is unknown, or the request is not possible now.
    #[error("{0}")]
    Unavailable(String),
    /// The request contradicts the existing load balancer.
    #[error("{0}")]
    Contradiction(String),
    /// The cluster has reached its limit.
    #[error("{0}")]
    Exhausted(String),
    /// Load balancers are not available on this host; the message says what to do about it.
    #[error("{0}")]
    Nothing(String),
    /// The VM has no permission.
    #[error("{0}")]
    Denied(String),
    /// The named object does not exist.
    #[error("{0}")]
    NotFound(String),
}

type Reply<T> = oneshot::Sender<T>;

/// Request to the desk, with the channel for its reply.
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

/// Guest that sends a request. Its name and cluster come from the connection to its VM, not from the request.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Asker {
    vm: String,
    uid: String,
    cluster: String,
}

/// Answer to the question whether a VM exists.
#[derive(Debug)]
enum Found {
    /// The VM exists.
    There(Box<v1::Instance>),
    /// The VM is proved not to exist any longer.
    #[cfg(feature = "kubevirt")]
    Gone,
    /// It cannot be determined whether the VM exists, for this reason.
    Unknown(String),
}

/// Answer to a long poll: news, or a channel that reports when there is some.
#[derive(Debug)]
enum Poll<V> {
    News(News<V>),
    Wait(watch::Receiver<u64>),
}

/// Sends requests to the desk, or to the registry in `remote`.
#[derive(Debug, Clone)]
pub struct Handle {
    requests: mpsc::Sender<Request>,
    /// Long polls that are under way, which are limited for each VM.
    polls: service::Polls,
}

impl Handle {
    /// Creates a handle that sends to the receiver of these requests.
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
