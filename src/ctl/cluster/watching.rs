//! `guestctl watch` in a cluster: the events of several nodes in one stream, which continues when the
//! connection with one of them ends.
//!
//! ```text
//!  station of each node ── place ──▶ connect ──▶ events ──┐
//!                            ▲          │ ended           ├──▶ shown
//!                            └─ wait ───┴── lost ─────────┘
//! ```

use std::convert::Infallible;
use std::time::Duration;

use futures_util::future::try_join_all;
use tokio::sync::mpsc;

use super::access::ApiServer;
use super::nodes::is_in;
use super::{Error, guests, pods, with};
use crate::ctl::Error as Failure;
use crate::ctl::client::Daemon;
use crate::ctl::print::Printer;
use crate::ctl::watch::{self, Filter};
use crate::wire::proto::v1::VirtualMachineEvent;

/// Wait before a station is connected again, at first and at most.
const FIRST_WAIT: Duration = Duration::from_secs(1);
const LONGEST_WAIT: Duration = Duration::from_secs(10);
/// Events that may wait to be shown.
const WAITING: usize = 64;

/// Source of events.
#[derive(Debug, Clone)]
enum Station {
    /// All VMs of this node.
    Node(String),
    /// The VM of this namespace and name, on whichever node it is.
    Guest(String, String),
}

/// Message of a station.
enum News {
    Event(Box<VirtualMachineEvent>),
    /// The connection was lost, and the station is trying to reconnect.
    Lost(String),
}

/// Shows events until standard output is closed by its reader.
///
/// # Errors
/// Fails if a named VM cannot be reached at first, the user lacks a permission, or standard output cannot be
/// written.
pub async fn run(
    server: &ApiServer,
    printer: &mut Printer,
    filter: Filter,
    scope: Option<&str>,
) -> Result<(), Failure> {
    let named = filter.name.as_deref().and_then(|name| name.split_once('/'));
    let stations: Vec<_> = if let Some((namespace, name)) = named {
        vec![Station::Guest(namespace.to_owned(), name.to_owned())]
    } else {
        pods::of_nodes(server).await?.into_iter().map(|(node, _)| Station::Node(node)).collect()
    };
    let (sender, mut news) = mpsc::channel(WAITING);
    let following = stations.iter().map(|station| follow(server, station, filter.clone(), sender.clone()));
    let mut following = std::pin::pin!(try_join_all(following));
    let mut unread = std::pin::pin!(Printer::unread());
    loop {
        let one = tokio::select! {
            // Earlier events are shown before the message that no more will come.
            biased;
            Some(one) = news.recv() => one,
            failed = &mut following => return failed.map(drop),
            () = &mut unread => return Ok(()),
        };
        match one {
            News::Event(event) if is_in(&event.name, scope) => watch::show(printer, &filter, &event)?,
            News::Event(_) => {}
            News::Lost(words) => printer.warn(&words),
        }
    }
}

/// Follows the events of a station, for ever.
async fn follow(
    server: &ApiServer,
    station: &Station,
    mut filter: Filter,
    news: mpsc::Sender<News>,
) -> Result<Infallible, Failure> {
    let (mut wait, mut was_connected) = (FIRST_WAIT, false);
    loop {
        let mut is_connected = false;
        let error = match once(server, station, &filter, &news, &mut is_connected).await {
            Ok(never) => match never {},
            Err(error) => error,
        };
        if is_connected {
            // The past events have been shown.
            (wait, was_connected, filter.since) = (FIRST_WAIT, true, None);
        }
        if is_final(&error) || (!was_connected && matches!(station, Station::Guest(..))) {
            return Err(error);
        }
        let whose = match station {
            Station::Node(node) => format!("node {node}"),
            Station::Guest(namespace, name) => format!("{namespace}/{name}"),
        };
        let words = format!("{whose}: {error}; events may be missing until it can be reached again");
        if news.send(News::Lost(words)).await.is_err() {
            return Err(error);
        }
        tokio::time::sleep(wait).await;
        wait = (wait * 2).min(LONGEST_WAIT);
    }
}

/// Returns whether a retry would fail in the same way.
fn is_final(error: &Failure) -> bool {
    matches!(
        error,
        Failure::Cluster(Error::Forbidden { .. } | Error::Unauthorized(_) | Error::UnknownGuest { .. })
    )
}

/// Follows the events of a station until its connection ends.
async fn once(
    server: &ApiServer,
    station: &Station,
    filter: &Filter,
    news: &mpsc::Sender<News>,
    is_connected: &mut bool,
) -> Result<Infallible, Failure> {
    let place = match station {
        Station::Node(node) => pods::of_node(server, node, "").await?,
        Station::Guest(namespace, name) => {
            let guest = guests::find(server, namespace, name).await?;
            pods::of_node(server, &guest.status.host, &format!("{namespace}/{name}")).await?
        }
    };
    let name = filter.name.clone().unwrap_or_default();
    let work = async |daemon: Daemon| {
        let mut events = watch::open(daemon.admin(), filter).await?;
        *is_connected = true;
        loop {
            let event = events.message().await.map_err(|status| Failure::of_call(status, &name))?;
            let event = event.ok_or(Failure::Closed)?;
            if news.send(News::Event(Box::new(event))).await.is_err() {
                return Err(Failure::Closed);
            }
        }
    };
    with(server, &place, work).await
}
