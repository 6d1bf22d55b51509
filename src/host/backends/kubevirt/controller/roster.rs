//! VMs of the whole cluster, as the API reports them. This backend only reads; the nodes know how to reach the
//! VMs.
//!
//! It runs on a thread of its own, so that parsing the objects of very many VMs delays no other task. While the
//! API server does not answer, the last known state is kept.

use std::pin::Pin;
use std::sync::Arc;

use futures_util::{Stream, StreamExt as _, stream};
use kube::Api;
use tokio::sync::{mpsc, watch};

use super::super::super::{Backend, Change, Problems};
use super::super::seen::{Facts, Seen};
use super::super::standing;
use super::book::{Book, Kind, Options, slim};
use super::listing::Listing;
use super::wanted::Wanted;
use crate::host::half::Half;
use crate::host::text;
use crate::kubernetes::follow::{Heard, follow};
use crate::kubernetes::lists::Selector;
use crate::supervise;

/// Host cluster and the channels for what is learned about it.
#[derive(Debug, Clone)]
pub struct Site {
    /// API server and credentials.
    pub cluster: kube::Config,
    /// Present settings.
    pub options: watch::Receiver<Options>,
    /// Receives the problems of watches.
    pub problems: watch::Sender<Problems>,
    /// Receives which VMs list volumes of guestlet's.
    pub listing: Listing,
    /// Receives all events about VMs, if a consumer needs more details than a [`Change`] contains.
    pub heard: Option<mpsc::Sender<Fact>>,
}

/// Event about VirtualMachines or VirtualMachineInstances.
pub type Fact = (Kind, Heard<Arc<Facts>>);

/// Backend of the controller.
#[derive(Debug)]
pub struct Roster {
    site: Site,
    half: Arc<Half>,
}

/// Event to process.
enum News {
    Vm(Kind, Heard<Arc<Facts>>),
    Options,
}

impl Roster {
    /// Creates a backend for all VMs of a cluster.
    pub fn new(site: Site, half: Arc<Half>) -> Self {
        Self { site, half }
    }

    /// Merges all watches and changes of settings into one stream.
    fn news(&self, client: &kube::Client) -> impl Stream<Item = News> + Send + use<> {
        let Site { problems, options, .. } = &self.site;
        let teller = |what| Some(standing::teller(what, problems.clone(), Arc::clone(&self.half)));
        let all = Selector::default;
        let wanted = follow(
            Api::<Wanted>::all(client.clone()),
            all(),
            teller("the VirtualMachines of the cluster cannot be read; what is known of them may be stale"),
        );
        let runs = follow(
            Api::<Seen>::all(client.clone()),
            all(),
            teller(
                "the VirtualMachineInstances of the cluster cannot be read; what is known of them may be stale",
            ),
        );
        let vm = |kind| move |heard: Option<_>| std::future::ready(heard.map(|heard| News::Vm(kind, heard)));
        let edits = stream::unfold(options.clone(), |mut options| async move {
            options.changed().await.ok()?;
            Some((News::Options, options))
        });
        stream::select_all([
            wanted.map(|heard| heard.map(|one| one.facts.map(slim))).filter_map(vm(Kind::Wanted)).boxed(),
            runs.map(|heard| heard.map(|one| one.facts.map(slim))).filter_map(vm(Kind::Runs)).boxed(),
            edits.boxed(),
        ])
    }

    /// Reports changes until the receiver is dropped.
    async fn tell(self, changes: mpsc::Sender<Change>) -> Result<(), kube::Error> {
        let client = kube::Client::try_from(self.site.cluster.clone())?;
        let mut news = Box::pin(self.news(&client));
        let mut options = self.site.options;
        let mut book = Book::new(options.borrow_and_update().clone(), self.site.listing);
        while let Some(news) = news.next().await {
            let told = match news {
                News::Vm(kind, heard) => {
                    if let Some(told) = &self.site.heard
                        && told.send((kind, heard.clone())).await.is_err()
                    {
                        return Ok(());
                    }
                    book.hear(kind, heard)
                }
                News::Options => book.set(options.borrow_and_update().clone()),
            };
            for change in told {
                if changes.send(change).await.is_err() {
                    return Ok(());
                }
            }
        }
        Ok(())
    }
}

impl Backend for Roster {
    fn watch(self: Box<Self>, changes: mpsc::Sender<Change>) -> Pin<Box<dyn Future<Output = ()> + Send>> {
        let work = move || async move {
            if let Err(error) = self.tell(changes).await {
                tracing::error!("the cluster cannot be asked: {}", text::chain(&error));
            }
        };
        Box::pin(supervise::apart("cluster", work))
    }
}
