//! One `guestlet-host` and thousands of simulated guests: what each costs the host half, how fast all come
//! back, and what a flooding guest does to the others.
//!
//! The guests are the agent's own service on unix sockets, all in this process; the host half is the real
//! program. `GUESTS` says how many there are. Prints figures, and fails when a guest is lost.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::disallowed_methods, clippy::print_stdout)]
#![allow(clippy::cast_precision_loss, clippy::cast_possible_truncation, clippy::cast_sign_loss)]

use std::collections::HashMap;
use std::fmt::Write as _;
use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use guestlet::ctl::client::{self, Client};
use guestlet::guest::Guest;
use guestlet::guest::events::{Event, Hub, TICK};
use guestlet::rpc::callback::Surroundings;
use guestlet::rpc::guest::Service;
use guestlet::rpc::holder::Holder;
use guestlet::rpc::keys::Keys;
use guestlet::sys::root::Root;
use guestlet::transport::http2;
use guestlet::trust::keyring::Keyring;
use guestlet::wire::proto::v1::virtual_machine_event::Kind;
use guestlet::wire::proto::v1::{
    PingVirtualMachineRequest, WatchVirtualMachinesRequest, event, pong::Outcome,
};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use tokio::net::UnixListener;
use tokio::sync::watch;
use tokio_stream::{StreamExt as _, StreamMap};
use tokio_util::sync::CancellationToken;

/// Guests whose round trips are measured, and pings of each in one round.
const PINGED: usize = 40;
const PINGS: u32 = 50;
/// Rounds of pings without a flood, and as many beside one, in turns: what else the machine does hits both.
const ROUNDS: usize = 9;
/// Events whose way is measured.
const EVENTS: i64 = 500;
const DEADLINE: Duration = Duration::from_secs(120);

/// The host half's process.
struct Host {
    child: Child,
    folder: PathBuf,
}

impl Drop for Host {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

impl Host {
    fn start(folder: &Path) -> Self {
        let settings = folder.join("host.toml");
        std::fs::write(
            &settings,
            format!(
                "socket = '{0}/api.sock'\nvolumes-dir = '{0}/volumes'\ntrust.state-dir = '{0}/trust'\n",
                folder.display()
            ),
        )
        .unwrap();
        let log = std::fs::File::create(folder.join("log")).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_guestlet-host"));
        let child = command.arg("--config").arg(settings).stderr(log).stdin(Stdio::null()).spawn().unwrap();
        let host = Self { child, folder: folder.to_owned() };
        until("the host half answers", || UnixStream::connect(folder.join("metrics.sock")).is_ok());
        host
    }

    /// Names `guests` in the settings, on a host in this zone, which it has to notice.
    fn list(&self, guests: usize, zone: &str) {
        let socket = self.folder.join("api.sock");
        let mut text = format!("socket = '{}'\ntopology.zone = '{zone}'\n", socket.display());
        for number in 0..guests {
            let at = self.folder.display();
            write!(
                text,
                "[[vm]]\nname = '{}'\nuuid = '00000000-0000-4000-8000-{number:012}'\ndmi-uuid = 'none'\n\
                 unix-socket = '{at}/{number}'\n",
                name(number)
            )
            .unwrap();
        }
        std::fs::write(self.folder.join("new"), text).unwrap();
        std::fs::rename(self.folder.join("new"), self.folder.join("host.toml")).unwrap();
    }

    /// One value of its metrics.
    fn metrics(&self) -> HashMap<String, f64> {
        let mut stream = UnixStream::connect(self.folder.join("metrics.sock")).unwrap();
        write!(stream, "GET /metrics HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n").unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        let lines = text.lines().filter_map(|line| line.strip_prefix("guestlet_host_")?.rsplit_once(' '));
        lines.map(|(name, value)| (name.to_owned(), value.parse().unwrap())).collect()
    }

    /// Waits until all are connected, in `sessions` sessions so far, and ask who they are.
    fn until_all(&self, guests: usize, sessions: usize) {
        until("all guests are connected", || {
            let metrics = self.metrics();
            metrics["virtual_machines{session=\"connected\"}"] as usize == guests
                && metrics["callbacks_open"] as usize == guests
                && metrics["sessions_total"] as usize >= sessions
        });
    }

    /// Kilobytes of memory that are its own.
    fn memory(&self) -> f64 {
        let text = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let line = text.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
        line.trim().trim_end_matches(" kB").parse().unwrap()
    }

    fn descriptors(&self) -> usize {
        std::fs::read_dir(format!("/proc/{}/fd", self.child.id())).unwrap().count()
    }

    /// Seconds of processor time.
    fn processor(&self) -> f64 {
        let text = std::fs::read_to_string(format!("/proc/{}/stat", self.child.id())).unwrap();
        let fields: Vec<_> = text.rsplit(')').next().unwrap().split_whitespace().collect();
        (fields[11].parse::<f64>().unwrap() + fields[12].parse::<f64>().unwrap()) / 100.0
    }
}

fn name(number: usize) -> String {
    format!("vm-{number:05}")
}

fn until(what: &str, mut wanted: impl FnMut() -> bool) {
    let end = Instant::now() + DEADLINE;
    while !wanted() {
        assert!(Instant::now() < end, "never: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Guests on a thread of their own, until it is dropped.
struct Guests {
    hubs: Vec<Arc<Hub>>,
    /// Another number closes every stream.
    epoch: watch::Sender<u64>,
    _stop: std::sync::mpsc::Sender<()>,
}

impl Guests {
    fn start(folder: &Path, numbers: std::ops::Range<usize>) -> Self {
        let (epoch, epochs) = watch::channel(0);
        let guests: Vec<_> = numbers
            .map(|number| {
                let hub = Arc::new(Hub::new(format!("run-{number}")));
                let root = Root::at(folder.join("root"));
                (Guest { root, events: hub, ..Guest::default() }, folder.join(number.to_string()))
            })
            .collect();
        let hubs = guests.iter().map(|(guest, _)| Arc::clone(&guest.events)).collect();
        let (stop, stopped) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.spawn(async move {
                for (guest, socket) in guests {
                    tokio::spawn(be_held(guest, socket, epochs.clone()));
                }
            });
            runtime.block_on(async {
                while matches!(stopped.try_recv(), Err(std::sync::mpsc::TryRecvError::Empty)) {
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
            });
        });
        Self { hubs, epoch, _stop: stop }
    }
}

/// Waits until all know that they are in this zone.
fn until_zone(guests: [&Guests; 2], zone: &str) {
    let mut left: Vec<_> = guests.iter().flat_map(|guests| &guests.hubs).collect();
    until("all guests know their zone", || {
        let knows = |hub: &Hub| hub.state().1.topology.is_some_and(|known| known.topology.zone == zone);
        left.retain(|hub| !knows(hub));
        left.is_empty()
    });
}

/// Serves sessions of the host half.
async fn be_held(guest: Guest, socket: PathBuf, epochs: watch::Receiver<u64>) {
    let listener = UnixListener::bind(socket).unwrap();
    let capabilities = ["events", "topology", "callback"].map(str::to_owned).to_vec();
    // No disk ever changes.
    let (_changes, changes) = watch::channel(0);
    let surroundings = Surroundings { changes, known: Arc::new(|_| {}) };
    let service = {
        let keys = Keys::new(Keyring::empty(), || Ok(None));
        Service::new(guest.clone(), capabilities, Holder::default(), surroundings, keys)
    };
    let mut ticks = tokio::time::interval(TICK);
    loop {
        let mut epoch = epochs.clone();
        epoch.mark_unchanged();
        tokio::select! {
            _ = ticks.tick() => guest.events.tick(),
            stream = listener.accept() => {
                let (stream, service) = (stream.unwrap().0, service.clone());
                tokio::spawn(async move {
                    tokio::select! {
                        _ = http2::serve(stream, service.into_server(), CancellationToken::new()) => {}
                        _ = epoch.changed() => {}
                    }
                });
            }
        }
    }
}

/// The value below which this part of all is.
fn percentile(values: &mut [f64], part: f64) -> f64 {
    values.sort_by(f64::total_cmp);
    values[((values.len() - 1) as f64 * part) as usize]
}

/// Milliseconds of all round trips to some guests.
async fn pings(client: &Client, guests: usize) -> Vec<f64> {
    let mut streams = StreamMap::new();
    for number in 0..PINGED.min(guests) {
        let name = name(number * guests / PINGED.min(guests));
        let request = PingVirtualMachineRequest { name, count: PINGS, interval_milliseconds: 20 };
        let pongs = client.clone().ping_virtual_machine(request).await.unwrap().into_inner();
        streams.insert(number, pongs);
    }
    let mut all = Vec::new();
    while let Some((_, pong)) = streams.next().await {
        match pong.unwrap().outcome.unwrap() {
            Outcome::Nanoseconds(nanoseconds) => all.push(nanoseconds as f64 / 1e6),
            Outcome::Failure(failure) => panic!("{failure}"),
        }
    }
    all
}

/// Milliseconds from an event in a guest to who watches.
async fn ways(client: &mut Client, hubs: &[Arc<Hub>]) -> Vec<f64> {
    let request = WatchVirtualMachinesRequest::default();
    let mut events = client.watch_virtual_machines(request).await.unwrap().into_inner();
    let mut all = Vec::new();
    for number in 0..EVENTS {
        tokio::time::sleep(Duration::from_millis(4)).await;
        let begun = Instant::now();
        hubs[number as usize % hubs.len()].tell(Event::ClockJumped { milliseconds: number });
        loop {
            let happened = events.message().await.unwrap().unwrap();
            let Some(Kind::GuestEvent(event)) = happened.kind else { continue };
            if matches!(&event.kind, Some(event::Kind::ClockJumped(jump)) if jump.milliseconds == number) {
                break;
            }
        }
        all.push(begun.elapsed().as_secs_f64() * 1e3);
    }
    all
}

/// Tells more events than the host half allows, until `stopped`.
fn flood(hub: &Hub, stopped: &AtomicBool) {
    while !stopped.load(Ordering::Relaxed) {
        for milliseconds in 0..32 {
            hub.tell(Event::ClockJumped { milliseconds });
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// The p50 and the p99 of each round of pings.
#[derive(Default)]
struct Rounds {
    p50: Vec<f64>,
    p99: Vec<f64>,
}

impl Rounds {
    fn add(&mut self, mut milliseconds: Vec<f64>) {
        self.p50.push(percentile(&mut milliseconds, 0.5));
        self.p99.push(percentile(&mut milliseconds, 0.99));
    }

    /// Prints their medians, and how far the p99 are apart, which says how much the machine had to do; returns the
    /// median of the p99.
    fn print(mut self, what: &str) -> f64 {
        let (p50, p99) = (percentile(&mut self.p50, 0.5), percentile(&mut self.p99, 0.5));
        println!("ping, {what}, p50           {p50:>8.3} ms");
        let (least, most) = (self.p99[0], self.p99[self.p99.len() - 1]);
        println!("ping, {what}, p99           {p99:>8.3} ms, of rounds from {least:.3} to {most:.3}");
        p99
    }
}

fn main() {
    // `cargo bench` passes --bench.
    let guests: usize = std::env::var("GUESTS").map_or(2000, |text| text.parse().unwrap());
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    setrlimit(Resource::RLIMIT_NOFILE, hard, hard).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    std::fs::create_dir(folder.join("root")).unwrap();
    // The last ones are those that flood, on a thread of their own: each in its round, until it is refused.
    let decent = guests - ROUNDS;
    let simulated = Guests::start(folder, 0..decent);
    let flooding = Guests::start(folder, decent..guests);

    let host = Host::start(folder);
    let empty = host.memory();
    let begun = Instant::now();
    host.list(guests, "a");
    host.until_all(guests, guests);
    println!("{guests} guests connected after       {:>8.2} s", begun.elapsed().as_secs_f64());
    std::thread::sleep(Duration::from_secs(2));
    println!("memory of the host half, per guest  {:>8.1} KB", (host.memory() - empty) / guests as f64);
    println!("descriptors of the host half        {:>8}", host.descriptors());

    let before = host.processor();
    std::thread::sleep(Duration::from_secs(20));
    println!("processor while idle                {:>8.2} %", (host.processor() - before) / 20.0 * 100.0);

    let begun = Instant::now();
    for guests in [&simulated, &flooding] {
        guests.epoch.send_modify(|epoch| *epoch += 1);
    }
    host.until_all(guests, guests * 2);
    println!("all lost, and all back after        {:>8.2} s", begun.elapsed().as_secs_f64());
    std::thread::sleep(Duration::from_secs(2));
    println!("memory per guest after that         {:>8.1} KB", (host.memory() - empty) / guests as f64);

    until_zone([&simulated, &flooding], "a");
    let (begun, before) = (Instant::now(), host.processor());
    host.list(guests, "b");
    until_zone([&simulated, &flooding], "b");
    println!("an edit of the zone reaches all in  {:>8.2} s", begun.elapsed().as_secs_f64());
    println!("processor of the host half for that {:>8.2} s", host.processor() - before);

    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let measuring = client::with(folder.join("api.sock"), async |mut client| {
        let mut ways = ways(&mut client, &simulated.hubs).await;
        println!("event to watch, p50                 {:>8.3} ms", percentile(&mut ways, 0.5));
        println!("event to watch, p99                 {:>8.3} ms", percentile(&mut ways, 0.99));
        let (mut quiet, mut beside) = (Rounds::default(), Rounds::default());
        for hub in &flooding.hubs {
            quiet.add(pings(&client, decent).await);
            let (hub, stop) = (Arc::clone(hub), Arc::new(AtomicBool::new(false)));
            let stopped = Arc::clone(&stop);
            let flooder = std::thread::spawn(move || flood(&hub, &stopped));
            beside.add(pings(&client, decent).await);
            stop.store(true, Ordering::Relaxed);
            flooder.join().unwrap();
        }
        let quiet = quiet.print("quiet         ");
        let beside = beside.print("beside a flood");
        println!("what a flood adds to the p99        {:>8.3} ms", beside - quiet);
        Ok(())
    });
    runtime.block_on(measuring).unwrap();
    let metrics = host.metrics();
    println!("refused                             {:>8}", metrics["refusals_total"]);
    let connected = metrics["virtual_machines{session=\"connected\"}"] as usize;
    assert!(connected >= decent, "{connected} of {guests} guests are left");
}
