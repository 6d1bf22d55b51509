//! One `guestlet-host` and thousands of simulated guests: what each costs the host half, how fast all come
//! back, and what a flooding guest does to the others. All of it twice, side by side: with guests without keys,
//! and with guests that each have a key of their own.
//!
//! The guests are the agent's own service on unix sockets, all in this process; the host half is the real
//! program, or that in `HOST_HALF`. `GUESTS` says how many there are. Prints figures, and fails when a guest is lost. With the
//! argument `memory` it ends after the storm.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::disallowed_methods, clippy::print_stdout)]
#![allow(clippy::cast_precision_loss, clippy::cast_possible_truncation, clippy::cast_sign_loss)]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use guestlet::ctl::client::{self, Client};
use guestlet::guest::events::Hub;
use guestlet::trust::key::Key;
use guestlet::wire::proto::v1::ClockJumped;
use guestlet::wire::proto::v1::virtual_machine_event::Kind;
use guestlet::wire::proto::v1::{
    PingVirtualMachineRequest, WatchVirtualMachinesRequest, event, pong::Outcome,
};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use tempfile::TempDir;
use tokio_stream::{StreamExt as _, StreamMap};

#[allow(dead_code, reason = "shared with the measurements of nodes")]
mod guests;
mod handshakes;
mod host;

use guests::{Guests, until_zone};
use host::{Host, name};

/// Guests whose round trips are measured, and pings of each in one round.
const PINGED: usize = 40;
const PINGS: u32 = 50;
/// Rounds of pings without a flood, and as many beside one, in turns: what else the machine does hits both.
const ROUNDS: usize = 9;
/// Events whose way is measured.
const EVENTS: i64 = 500;

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
        hubs[number as usize % hubs.len()].tell(ClockJumped { milliseconds: number });
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
            hub.tell(ClockJumped { milliseconds });
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
        println!("ping, {what:<24} p50      {p50:>8.3} ms");
        let (least, most) = (self.p99[0], self.p99[self.p99.len() - 1]);
        println!("ping, {what:<24} p99      {p99:>8.3} ms, of rounds from {least:.3} to {most:.3}");
        p99
    }
}

/// A host half and its guests.
struct Lab {
    what: &'static str,
    host: Host,
    guests: usize,
    /// All but the last ones, which flood, on a thread of their own: each in its round, until it is refused.
    simulated: Guests,
    flooding: Guests,
    /// Kilobytes of the host half without guests.
    empty: f64,
    quiet: Rounds,
    beside: Rounds,
    _folder: TempDir,
}

impl Lab {
    fn start(guests: usize, keyed: bool) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let folder = directory.path();
        std::fs::create_dir(folder.join("root")).unwrap();
        let host = Host::start(folder);
        host::until("the host half has a key", || Key::load(&host.key()).is_ok_and(|key| key.is_some()));
        let key = keyed.then(|| Key::load(&host.key()).unwrap().expect("a host half makes its key").public());
        let decent = guests - ROUNDS;
        let simulated = Guests::start(folder, 0..decent, key);
        let flooding = Guests::start(folder, decent..guests, key);
        let empty = host.memory();
        let what = if keyed { "keyed" } else { "plain" };
        let (quiet, beside) = (Rounds::default(), Rounds::default());
        Self { what, host, guests, simulated, flooding, empty, quiet, beside, _folder: directory }
    }

    fn print(&self, what: &str, value: f64, unit: &str) {
        println!("{}: {what:<36} {value:>9.2} {unit}", self.what);
    }

    /// Kilobytes of the host half for each guest.
    fn memory(&self) -> f64 {
        std::thread::sleep(Duration::from_secs(2));
        (self.host.memory() - self.empty) / self.guests as f64
    }

    fn connect(&self) {
        let begun = Instant::now();
        self.host.list(self.guests, "a");
        self.host.until_all(self.guests, self.guests);
        self.print("all connected after", begun.elapsed().as_secs_f64(), "s");
        self.print("memory of the host half, per guest", self.memory(), "KB");
        self.print("descriptors of the host half", self.host.descriptors() as f64, "");
    }

    fn idle(&self) {
        let before = self.host.processor();
        std::thread::sleep(Duration::from_secs(20));
        self.print("processor while idle", (self.host.processor() - before) / 20.0 * 100.0, "%");
    }

    fn storm(&self) {
        let (begun, before) = (Instant::now(), self.host.processor());
        for guests in [&self.simulated, &self.flooding] {
            guests.epoch.send_modify(|epoch| *epoch += 1);
        }
        self.host.until_all(self.guests, self.guests * 2);
        self.print("all lost, and all back after", begun.elapsed().as_secs_f64(), "s");
        self.print("processor of the host half for that", self.host.processor() - before, "s");
        self.print("memory per guest after that", self.memory(), "KB");
    }

    fn edit(&self) {
        until_zone([&self.simulated, &self.flooding], "a");
        let (begun, before) = (Instant::now(), self.host.processor());
        self.host.list(self.guests, "b");
        until_zone([&self.simulated, &self.flooding], "b");
        self.print("an edit of the zone reaches all in", begun.elapsed().as_secs_f64(), "s");
        self.print("processor of the host half for that", self.host.processor() - before, "s");
    }

    fn events(&self) {
        let mut ways = self.with_client(async |mut client| ways(&mut client, &self.simulated.hubs).await);
        self.print("event to watch, p50", percentile(&mut ways, 0.5), "ms");
        self.print("event to watch, p99", percentile(&mut ways, 0.99), "ms");
    }

    /// One round of pings, and one beside the flood of another guest.
    fn ping(&mut self, round: usize) {
        let decent = self.simulated.hubs.len();
        self.quiet.add(self.with_client(async |client| pings(&client, decent).await));
        let (hub, stop) = (Arc::clone(&self.flooding.hubs[round]), Arc::new(AtomicBool::new(false)));
        let stopped = Arc::clone(&stop);
        let flooder = std::thread::spawn(move || flood(&hub, &stopped));
        self.beside.add(self.with_client(async |client| pings(&client, decent).await));
        stop.store(true, Ordering::Relaxed);
        flooder.join().unwrap();
    }

    /// Prints what came of the pings; returns the p50 of the quiet rounds. Panics if a guest is lost.
    fn end(self) -> Vec<f64> {
        let p50 = self.quiet.p50.clone();
        let quiet = self.quiet.print(&format!("{}, quiet", self.what));
        let beside = self.beside.print(&format!("{}, beside a flood", self.what));
        println!("{}: what a flood adds to the p99        {:>9.3} ms", self.what, beside - quiet);
        let metrics = self.host.metrics();
        println!("{}: refused                             {:>9}", self.what, metrics["refusals_total"]);
        let connected = metrics["virtual_machines{session=\"connected\"}"] as usize;
        assert!(connected >= self.simulated.hubs.len(), "{connected} of {} guests are left", self.guests);
        p50
    }

    fn with_client<T>(&self, measure: impl AsyncFnOnce(Client) -> T) -> T {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let measuring = client::with(self.host.socket(), async |daemon| Ok(measure(daemon.admin()).await));
        runtime.block_on(measuring).unwrap()
    }
}

fn main() {
    // `cargo bench` passes --bench.
    let guests: usize = std::env::var("GUESTS").map_or(2000, |text| text.parse().unwrap());
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    setrlimit(Resource::RLIMIT_NOFILE, hard, hard).unwrap();
    println!("{guests} guests");
    let mut labs = [false, true].map(|keyed| Lab::start(guests, keyed));
    let is_short = std::env::args().any(|argument| argument == "memory");
    let steps: &[fn(&Lab)] = if is_short {
        &[Lab::connect, Lab::storm]
    } else {
        &[Lab::connect, Lab::idle, Lab::storm, Lab::edit, Lab::events]
    };
    for step in steps {
        labs.iter().for_each(step);
    }
    if is_short {
        return;
    }
    for round in 0..ROUNDS {
        for lab in &mut labs {
            lab.ping(round);
        }
    }
    handshakes::measure(&labs[1].host.key());
    let [plain, keyed] = labs.map(Lab::end);
    // Of a pair of rounds, which came one after the other.
    let mut ratios: Vec<_> = keyed.iter().zip(&plain).map(|(keyed, plain)| keyed / plain).collect();
    println!("ping, p50, keyed to plain           {:>9.2}", percentile(&mut ratios, 0.5));
}
