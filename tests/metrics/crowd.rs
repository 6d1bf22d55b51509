//! Simulated guests: the agent's own service on unix sockets, all on one thread, each with an answer of its own to who asks for metrics.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use guestlet::guest::Guest;
use guestlet::guest::events::{Hub, TICK};
use guestlet::metrics::{MOST_OF_GUEST, table};
use guestlet::rpc;
use guestlet::rpc::callback::Surroundings;
use guestlet::rpc::guest::Service;
use guestlet::rpc::holder::Holder;
use guestlet::sys::root::Root;
use guestlet::transport::{Both, http2};
use guestlet::trust::keyring::Keyring;
use guestlet::wire::proto::v1::metrics_server::{Metrics, MetricsServer};
use guestlet::wire::proto::v1::{CollectMetricsRequest, CollectMetricsResponse, MetricFamily, MetricSample};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{oneshot, watch};
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};

/// How a guest answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Manner {
    Good,
    /// With what it may not say, before what it may.
    Lying,
    /// Later than anybody waits.
    Slow,
    /// Never.
    Silent,
}

/// Guests until this is dropped.
pub struct Crowd {
    stop: Option<oneshot::Sender<()>>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Crowd {
    /// Guests with these manners, whose sockets are in a directory of the test's, named by their numbers.
    pub fn start(directory: &Path, manners: Vec<Manner>) -> Self {
        // Each has a connection at both ends; the host half is started with the same limit.
        let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
        setrlimit(Resource::RLIMIT_NOFILE, hard, hard).unwrap();
        let directory = directory.to_owned();
        let (stop, stopped) = oneshot::channel();
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                for (number, manner) in manners.into_iter().enumerate() {
                    let hub = Arc::new(Hub::new(format!("run-{number}")));
                    let root = Root::at(directory.join("root"));
                    let guest = Guest { root, events: hub, ..Guest::default() };
                    let answer = if manner == Manner::Lying { lies(number) } else { answer(number) };
                    let teller = Teller { manner, answer: Arc::new(answer) };
                    tokio::spawn(serve_all(guest, directory.join(number.to_string()), teller));
                }
                drop(stopped.await);
            });
        });
        Self { stop: Some(stop), thread: Some(thread) }
    }
}

impl Drop for Crowd {
    fn drop(&mut self) {
        drop(self.stop.take());
        drop(self.thread.take().map(std::thread::JoinHandle::join));
    }
}

/// The name of the VM with this number.
pub fn name(number: usize) -> String {
    format!("vm-{number:04}")
}

/// So many VMs in the settings of a host half.
pub fn listed(directory: &Path, count: usize) -> String {
    let mut text = String::new();
    for number in 0..count {
        let (name, at) = (name(number), directory.display());
        writeln!(
            text,
            "[[vm]]\nname = '{name}'\nuuid = '00000000-0000-4000-8000-{number:012}'\ndmi-uuid = 'none'\n\
             unix-socket = '{at}/{number}'"
        )
        .unwrap();
    }
    text
}

/// As many series as a guest may have, some of each metric. All guests have different values.
pub fn answer(number: usize) -> CollectMetricsResponse {
    let families = table::FAMILIES.iter().filter(|family| family.is_of_guest());
    let family = |name: &str| MetricFamily { name: name.to_owned(), samples: Vec::new() };
    let mut all: Vec<_> = families.map(|one| (one.labels, family(one.name))).collect();
    let mut left = MOST_OF_GUEST;
    for round in 0..MOST_OF_GUEST {
        for (labels, family) in &mut all {
            if left > 0 && (round == 0 || !labels.is_empty()) {
                let labels = labels.iter().map(|label| format!("{label}-{round}")).collect();
                let value = f64::from(u32::try_from(number + round).unwrap());
                family.samples.push(MetricSample { labels, value });
                left -= 1;
            }
        }
    }
    CollectMetricsResponse { families: all.into_iter().map(|(_, family)| family).collect() }
}

/// What a guest would say that wants the series of others to be wrong, or the page to be.
fn lies(number: usize) -> CollectMetricsResponse {
    let sample = |labels: &[&str], value| MetricSample {
        labels: labels.iter().map(|&label| label.to_owned()).collect(),
        value,
    };
    let family = |name: &str, samples| MetricFamily { name: name.to_owned(), samples };
    let other = name(0);
    let injected =
        format!("x\"}} 1\nguestlet_guest_up{{vm=\"{other}\"}} 0\nguestlet_guest_load1{{vm=\"{other}");
    let mut families = vec![
        family("up", vec![sample(&[], 0.0)]),
        family(&format!("load1{{vm=\"{other}\"}} 7\n"), vec![sample(&[], 7.0)]),
        family("load1", vec![sample(&[&other], 7.0), sample(&[], f64::NAN)]),
        family("unit_failed", vec![sample(&[&injected], 1.0)]),
        family("disk_reads", (0..1000).map(|disk| sample(&[&format!("d{disk}\\")], -1.0)).collect()),
        family("disk_writes", (0..1000).map(|disk| sample(&[&format!("d{disk}\\")], 1.0)).collect()),
    ];
    families.extend(answer(number).families);
    CollectMetricsResponse { families }
}

#[derive(Debug, Clone)]
struct Teller {
    manner: Manner,
    answer: Arc<CollectMetricsResponse>,
}

#[tonic::async_trait]
impl Metrics for Teller {
    async fn collect_metrics(
        &self,
        _: Request<CollectMetricsRequest>,
    ) -> Result<Response<CollectMetricsResponse>, Status> {
        match self.manner {
            Manner::Good | Manner::Lying => {}
            Manner::Slow => tokio::time::sleep(Duration::from_secs(6)).await,
            Manner::Silent => std::future::pending().await,
        }
        Ok(Response::new((*self.answer).clone()))
    }
}

/// Serves sessions of the host half.
async fn serve_all(guest: Guest, socket: PathBuf, teller: Teller) {
    let listener = UnixListener::bind(socket).unwrap();
    let capabilities = ["events", "topology", "callback", "metrics"].map(str::to_owned).to_vec();
    // No disk ever changes.
    let (_changes, changes) = watch::channel(0);
    let surroundings = Surroundings { changes, known: Arc::new(|_| {}) };
    let keys = rpc::keys::Keys::new(Keyring::empty(), || Ok(None));
    let service = Service::new(guest.clone(), capabilities, Holder::default(), surroundings, keys);
    let mut ticks = tokio::time::interval(TICK);
    loop {
        tokio::select! {
            _ = ticks.tick() => guest.events.tick(),
            stream = listener.accept() => {
                let services = Both(MetricsServer::new(teller.clone()), service.clone().into_server());
                tokio::spawn(serve(stream.unwrap().0, services));
            }
        }
    }
}

async fn serve<S: http2::Service>(stream: UnixStream, services: S) {
    drop(http2::serve(stream, services, CancellationToken::new()).await);
}
