//! What metrics cost, all in one run: a collection of the agent beside a scrape of Debian's `node_exporter`, in turns, on a machine with 100
//! processes more and 20 units; a scrape of a host half with 1,000 simulated guests; and what is kept of their last minutes.
//! `make bench BENCH=metrics`; for root, with the directory of `node_exporter` in `PROMETHEUS`. `ROUNDS` and `GUESTS` say how many.
//!
//! The units are files of a tmpfs where the agent sees control groups: what the kernel needs to make such files is not measured.

#![allow(
    clippy::cast_precision_loss,
    clippy::disallowed_methods,
    clippy::print_stdout,
    clippy::print_stderr,
    clippy::unwrap_used
)]

#[allow(dead_code, reason = "shared with the tests of metrics")]
#[path = "../tests/metrics/crowd.rs"]
mod crowd;
#[allow(dead_code, reason = "shared with the tests of the host half")]
#[path = "../tests/host/lab.rs"]
mod host;
#[allow(dead_code, unused_imports, reason = "shared with the tests of metrics")]
#[path = "../tests/metrics/lab.rs"]
mod lab;
#[allow(dead_code, reason = "shared with the tests")]
#[path = "../tests/fixtures/launch.rs"]
mod launch;
#[allow(dead_code, reason = "shared with the tests of metrics")]
#[path = "../tests/metrics/samples.rs"]
mod samples;

use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use guestlet::ctl::client;
use guestlet::metrics::recent::{Recent, STEP};
use guestlet::wire::proto::v1::{CollectMetricsRequest, CollectMetricsResponse};

use crowd::{Crowd, Manner};
use lab::Lab;

const PROCESSES: usize = 100;
const UNITS: usize = 20;
/// Turns of each of both.
const TURNS: usize = 10;
/// Steps of the history that are taken: more than are kept.
const STEPS: u32 = 100;

/// Ends with this.
struct Started(Child);

impl Started {
    fn new(command: &mut Command) -> Self {
        Self(command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap())
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

fn main() {
    let number = |name: &str, usual| std::env::var(name).map_or(usual, |text| text.parse().unwrap());
    beside_node_exporter(number("ROUNDS", 1000));
    let guests = number("GUESTS", 1000);
    page(guests);
    history(guests);
}

/// Seconds of processor time of a process so far.
fn processor(id: u32) -> f64 {
    let text = std::fs::read_to_string(format!("/proc/{id}/stat")).unwrap();
    let fields: Vec<_> = text.rsplit(')').next().unwrap().split_whitespace().collect();
    (fields[11].parse::<f64>().unwrap() + fields[12].parse::<f64>().unwrap()) / 100.0
}

/// KiB of memory of a process: by this line of its status.
fn memory(id: u32, line: &str) -> f64 {
    let text = std::fs::read_to_string(format!("/proc/{id}/status")).unwrap();
    let found = text.lines().find_map(|found| found.strip_prefix(line)?.strip_prefix(':')).unwrap();
    found.trim().trim_end_matches(" kB").parse().unwrap()
}

fn print(what: &str, value: f64, unit: &str) {
    println!("{what:<64} {value:>10.3} {unit}");
}

fn print_memory(what: &str, id: u32) {
    print(&format!("{what}: resident"), memory(id, "VmRSS"), "KiB");
    print(&format!("{what}: its own data"), memory(id, "RssAnon"), "KiB");
}

/// The answer to a request by HTTP/1.0, whose end is the end of the connection.
fn read(mut stream: impl std::io::Read + std::io::Write, path: &str) -> String {
    write!(stream, "GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert!(answer.contains(" 200 "), "{answer}");
    answer
}

/// Writes what control groups of version 2 have.
fn lay_out_units(directory: &Path) {
    let pressure = "some avg10=0.00 avg60=0.00 avg300=0.00 total=1500\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=900\n";
    for number in 0..UNITS {
        let unit = directory.join(format!("system.slice/unit-{number}.service"));
        std::fs::create_dir_all(&unit).unwrap();
        for (name, text) in [
            ("memory.current", format!("{}\n", (number + 1) << 20)),
            ("memory.events", "low 0\nhigh 0\nmax 0\noom 0\noom_kill 0\noom_group_kill 0\n".to_owned()),
            ("cpu.stat", format!("usage_usec {number}000\nuser_usec {number}000\nsystem_usec 0\n")),
            ("cpu.pressure", pressure.to_owned()),
            ("memory.pressure", pressure.to_owned()),
            ("io.pressure", pressure.to_owned()),
        ] {
            std::fs::write(unit.join(name), text).unwrap();
        }
    }
    std::fs::write(directory.join("cgroup.controllers"), "cpu io memory pids\n").unwrap();
}

/// Collections of the agent, one after the other; the last answer.
fn collect(lab: &Lab, rounds: usize) -> CollectMetricsResponse {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let asking = client::with(lab.host.socket(), async |daemon| {
        let mut answer = CollectMetricsResponse::default();
        for _ in 0..rounds {
            let request = CollectMetricsRequest { name: "web".to_owned(), max_samples: 0 };
            answer = daemon.metrics().collect_metrics(request).await.unwrap().into_inner();
        }
        Ok(answer)
    });
    runtime.block_on(asking).unwrap()
}

fn series(answer: &CollectMetricsResponse) -> usize {
    answer.families.iter().map(|family| family.samples.len()).sum()
}

fn beside_node_exporter(rounds: usize) {
    let _processes: Vec<_> =
        (0..PROCESSES).map(|_| Started::new(Command::new("sleep").arg("infinity"))).collect();
    let host = host::Lab::new();
    lay_out_units(&host.path("units"));
    let mounts = "mount -t tmpfs units /sys/fs/cgroup; cp -r @/units/. /sys/fs/cgroup";
    let lab = Lab::made("", mounts, host);
    let agent = lab.agent_id("web");
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let directory = std::env::var_os("PROMETHEUS").map(PathBuf::from).unwrap();
    let mut command = Command::new(directory.join("prometheus-node-exporter"));
    let exporter = Started::new(command.arg(format!("--web.listen-address=127.0.0.1:{port}")));
    let scrape = || read(TcpStream::connect(("127.0.0.1", port)).unwrap(), "/metrics");
    lab.host.until("the exporter answers", || TcpStream::connect(("127.0.0.1", port)).is_ok());

    print_memory("agent, before its first collection", agent);
    let first = collect(&lab, 1);
    print_memory("agent, after its first collection", agent);
    let names: Vec<_> = first.families.iter().map(|family| family.name.as_str()).collect();
    assert!(names.contains(&"unit_cpu_seconds"), "{names:?}");
    let systemd = if names.contains(&"units_failed") { "is" } else { "is not" };
    println!("{} series of the agent; systemd {systemd} there to be asked for failed units", series(&first));
    let theirs = scrape().lines().filter(|line| line.starts_with("node_")).count();
    println!("{theirs} series of node_exporter");

    let (mut ours, mut others) = (0.0, 0.0);
    let each = rounds.div_ceil(TURNS);
    for _ in 0..TURNS {
        let before = processor(agent);
        collect(&lab, each);
        ours += processor(agent) - before;
        let before = processor(exporter.0.id());
        for _ in 0..each {
            scrape();
        }
        others += processor(exporter.0.id()) - before;
    }
    let all = (each * TURNS) as f64;
    print("agent: processor time of a collection", ours / all * 1e3, "ms");
    print("node_exporter: processor time of a scrape", others / all * 1e3, "ms");
    print("agent to node_exporter", ours / others, "");
    print_memory("agent, after all", agent);
    print_memory("node_exporter, after all", exporter.0.id());
}

fn page(guests: usize) {
    let lab = host::Lab::new();
    let directory = lab.path("");
    let _crowd = Crowd::start(&directory, vec![Manner::Good; guests]);
    let lab = lab.set(&crowd::listed(&directory, guests)).start();
    let socket = lab.path("run/metrics.sock");
    let page = |path: &str| read(UnixStream::connect(&socket).unwrap(), path);
    let connected = format!("guestlet_host_virtual_machines{{session=\"connected\"}} {guests}\n");
    lab.until("all are connected", || page("/host/metrics").contains(&connected));
    print_memory("host half, before the first scrape", lab.id());
    let mut times = Vec::new();
    let begun = processor(lab.id());
    for _ in 0..TURNS {
        let asked = Instant::now();
        let text = page("/metrics");
        times.push(asked.elapsed().as_secs_f64() * 1e3);
        let up = text
            .lines()
            .filter(|line| line.starts_with("guestlet_guest_up{") && line.ends_with(" 1"))
            .count();
        let series = text.lines().filter(|line| line.starts_with("guestlet_guest_")).count();
        println!("{up} guests up, {series} series, {} bytes", text.len());
        // An answer is good for a second.
        std::thread::sleep(Duration::from_millis(1500));
    }
    times.sort_by(f64::total_cmp);
    print(&format!("a scrape of {guests} guests, the median"), times[TURNS / 2], "ms");
    print("the same, the longest", times[TURNS - 1], "ms");
    print("host half: processor time of a scrape", (processor(lab.id()) - begun) / TURNS as f64 * 1e3, "ms");
    print_memory("host half, after the last scrape", lab.id());
}

/// Memory of this process that the last minutes of guests take, of which more than is kept has gone by.
fn history(guests: usize) {
    let answers: Vec<_> = (1..=STEPS).map(|step| crowd::answer(step as usize)).collect();
    let mut all: Vec<Recent> = Vec::with_capacity(guests);
    let (id, begun) = (std::process::id(), Instant::now());
    let before = memory(id, "RssAnon");
    all.resize_with(guests, Recent::default);
    for (step, answer) in (1..).zip(&answers) {
        for recent in &mut all {
            recent.take(begun + STEP * step, answer);
        }
    }
    let points = all[0].message(begun + STEP * STEPS).map_or(0, |told| told.points.len());
    let bytes = (memory(id, "RssAnon") - before) * 1024.0 / guests as f64;
    print(&format!("history of a guest, {points} steps"), bytes, "bytes");
}
