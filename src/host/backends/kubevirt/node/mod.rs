//! Node role: the VMs of one node, as the API reports them, and the routes to their agents. It only reads, and
//! changes no VM.
//!
//! ```text
//!  API server ──VirtualMachineInstances, by labels──▶ follow ──▶ book ──Change──▶ fleet
//!             ├─the own Node────────────────────────▶ follow ──▶ place ──┘
//!             └─KubeVirt's settings─────────────────▶ follow ──▶ advice ──▶ guestctl doctor
//!  fleet's session ──dials──▶ launcher ──by a process of the pod──▶ the guest
//! ```
//!
//! Data from the API is parsed on a separate thread, so that a large number of VMs does not delay sessions.
//! While the API server does not answer, the last known state is kept: the absence of events says nothing about
//! a VM.

use std::pin::Pin;
use std::sync::Arc;

use futures_util::{Stream, StreamExt as _, stream};
use kube::Api;
use tokio::sync::{mpsc, watch};

use super::super::{Backend, Change, Problems};
use super::advice::Installed;
use super::objects::{KubeVirt, NODE_LABEL, TARGET_LABEL};
use super::seen::Seen;
use super::standing;
use crate::host::half::Half;
use crate::host::text;
use crate::kubernetes::follow::{Heard, follow};
use crate::kubernetes::lists::Selector;
use crate::supervise;
use crate::sys::root::Root;
use crate::wire::proto::v1::{Advice, Topology};

mod book;
pub mod elsewhere;
pub mod identity;
mod launcher;
mod no_vsock;
pub mod place;
mod processes;
pub mod profile;
mod roster;

pub use book::Options;
use book::{Book, Side};
use place::Labelled;
use processes::Processes;
pub use roster::{Instance, Roster};

/// Node, and access to its cluster.
#[derive(Debug, Clone)]
pub struct Site {
    /// API server and credentials.
    pub cluster: kube::Config,
    /// Name of the Node.
    pub node: String,
    /// Present settings.
    pub options: watch::Receiver<Options>,
    /// Receives the location of the node.
    pub topology: watch::Sender<Arc<Topology>>,
    /// Receives the problems of watches.
    pub problems: watch::Sender<Problems>,
    /// Receives advice for the administrator of the cluster.
    pub advice: watch::Sender<Vec<Advice>>,
    /// Receives the VirtualMachineInstances of the reported VMs.
    pub roster: Arc<Roster>,
}

/// Backend of a node.
#[derive(Debug)]
pub struct Node {
    site: Site,
    half: Arc<Half>,
}

/// Event to process.
enum News {
    Machine(Side, Heard<Seen>),
    Node(Heard<Labelled>),
    KubeVirt(Heard<KubeVirt>),
    Options,
}

impl Node {
    /// Creates a backend for the VMs of a node.
    pub fn new(site: Site, half: Arc<Half>) -> Self {
        Self { site, half }
    }

    /// Merges all watches and changes of settings into one stream.
    fn news(&self, client: &kube::Client) -> impl Stream<Item = News> + Send + use<> {
        let Site { node, problems, options, .. } = &self.site;
        let teller = |what| Some(standing::teller(what, problems.clone(), Arc::clone(&self.half)));
        let machines = |side, label: &str, what| {
            // Without this the API server would read all VMs of the cluster from its store for each node that starts.
            let labels = Some(format!("{label}={node}"));
            let selector = Selector { labels, may_be_old: true, ..Selector::default() };
            follow(Api::<Seen>::all(client.clone()), selector, teller(what))
                .map(move |heard| News::Machine(side, heard))
                .boxed()
        };
        let own = Selector { fields: Some(format!("metadata.name={node}")), ..Selector::default() };
        let place = follow(
            Api::<Labelled>::all(client.clone()),
            own,
            teller("the labels of this Node cannot be read"),
        );
        let installed = follow(
            Api::<KubeVirt>::all(client.clone()),
            Selector::default(),
            teller("cannot find out whether KubeVirt gives VMs vsock"),
        );
        let edits = stream::unfold(options.clone(), |mut options| async move {
            options.changed().await.ok()?;
            Some((News::Options, options))
        });
        stream::select_all([
            machines(
                Side::Runs,
                NODE_LABEL,
                "this node's VMs cannot be read; what is known of them may be stale",
            ),
            machines(Side::Comes, TARGET_LABEL, "the VMs that are migrated to this node cannot be read"),
            place.map(News::Node).boxed(),
            installed.map(News::KubeVirt).boxed(),
            edits.boxed(),
        ])
    }

    /// Reports changes until the receiver is dropped.
    async fn tell(self, changes: mpsc::Sender<Change>) -> Result<(), kube::Error> {
        let client = kube::Client::try_from(self.site.cluster.clone())?;
        let mut news = Box::pin(self.news(&client));
        let Self { site: Site { node, mut options, topology, advice, roster, .. }, .. } = self;
        let processes = Arc::new(Processes::new(Root::default()));
        let mut book = Book::new(node.clone(), options.borrow_and_update().clone(), processes);
        let mut installed = Installed::default();
        let mut labels = None;
        while let Some(news) = news.next().await {
            let may_advise = matches!(news, News::KubeVirt(_) | News::Options);
            let mut told = match news {
                News::Machine(side, heard) => {
                    let names = named(&heard);
                    let told = book.hear(side, heard);
                    // Changes that produce no event for sessions may matter to the users of the roster.
                    for (name, instance) in names.iter().filter_map(|name| Some((name, book.instance(name)?)))
                    {
                        roster.set(name, Some(instance));
                    }
                    told
                }
                News::KubeVirt(heard) => {
                    installed.hear(heard);
                    Vec::new()
                }
                News::Options => book.set(options.borrow_and_update().clone()),
                News::Node(heard) => {
                    labels = match heard {
                        Heard::All(nodes) => nodes.into_iter().next(),
                        Heard::There(node) => Some(node),
                        // The Node object was deleted, but the location of its guests has not changed.
                        Heard::Gone(_) => labels,
                    };
                    Vec::new()
                }
            };
            if may_advise {
                // The advice concerns vsock, and does not apply if agents are reached in another way.
                let by_vsock = options.borrow().sockets.is_none();
                advice.send_replace(if by_vsock { installed.advice() } else { Vec::new() });
            }
            if let Some(Labelled { metadata }) = &labels {
                let labels = metadata.labels.clone().unwrap_or_default();
                let place = Arc::new(place::topology(&node, &labels, &options.borrow().node_labels));
                topology.send_if_modified(|told| std::mem::replace(told, Arc::clone(&place)) != place);
                told.extend(book.place(&place));
            }
            for change in told {
                match &change {
                    Change::Present(vm) => roster.set(&vm.name, book.instance(&vm.name)),
                    Change::Removed { name } => roster.set(name, None),
                    _ => {}
                }
                if changes.send(change).await.is_err() {
                    return Ok(());
                }
            }
        }
        Ok(())
    }
}

/// Returns the names of the VMs that an event concerns.
fn named(heard: &Heard<Seen>) -> Vec<String> {
    let seen = match heard {
        Heard::All(seen) => seen.as_slice(),
        Heard::There(seen) | Heard::Gone(seen) => std::slice::from_ref(seen),
    };
    seen.iter().filter_map(|seen| Some(seen.facts.as_ref()?.name.clone())).collect()
}

impl Backend for Node {
    fn watch(self: Box<Self>, changes: mpsc::Sender<Change>) -> Pin<Box<dyn Future<Output = ()> + Send>> {
        let work = move || async move {
            if let Err(error) = self.tell(changes).await {
                tracing::error!("the cluster cannot be asked: {}", text::chain(&error));
            }
        };
        Box::pin(supervise::apart("cluster", work))
    }
}
