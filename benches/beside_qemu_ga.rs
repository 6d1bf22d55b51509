//! The agent beside qemu-ga: both in one run, in turns, so that a machine that changes its pace is fair to
//! both. `QEMU_GA` names the program to compare with; `make bench` sets it.
//!
//! Only sockets and processes of this program's own are used.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::disallowed_methods, clippy::print_stdout)]
#![allow(clippy::cast_precision_loss, clippy::cast_possible_truncation, clippy::cast_sign_loss)]

use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Turns that each program gets.
const TURNS: usize = 9;
/// Calls of one turn.
const CALLS: usize = 5_000;
/// How long idle processes are watched.
const IDLE: Duration = Duration::from_secs(30);

struct Agent {
    child: Child,
    folder: tempfile::TempDir,
}

impl Agent {
    /// Starts an agent and says how long it was from exec to the first answer.
    fn start(program: &Path, ours: bool) -> (Self, Duration) {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("qga.sock");
        let mut command = Command::new(program);
        command.args(["-m", "unix-listen", "-p"]).arg(&socket).arg("-t").arg(folder.path());
        if ours {
            let settings = folder.path().join("agent.toml");
            let at = folder.path().display();
            let text = format!(
                "runtime-dir = \"{at}\"\n[control]\nlisten = \"unix:{at}/control.sock\"\n\
                 [callback]\nlisten = \"unix:{at}/callback.sock\"\n"
            );
            std::fs::write(&settings, text).unwrap();
            command.arg("--settings").arg(settings);
        }
        let begun = Instant::now();
        let child = command.stderr(Stdio::null()).spawn().unwrap();
        let agent = Self { child, folder };
        let mut client = loop {
            if let Ok(stream) = UnixStream::connect(&socket) {
                break stream;
            }
            assert!(begun.elapsed() < Duration::from_secs(10), "{} does not start", program.display());
            std::thread::yield_now();
        };
        call(&mut client, PING);
        (agent, begun.elapsed())
    }

    fn client(&self) -> UnixStream {
        UnixStream::connect(self.folder.path().join("qga.sock")).unwrap()
    }

    /// A number from /proc/PID/`file`, in KiB or switches.
    fn number(&self, file: &str, key: &str) -> u64 {
        let text = std::fs::read_to_string(format!("/proc/{}/{file}", self.child.id())).unwrap();
        let value = text.lines().find_map(|line| line.strip_prefix(key)).unwrap();
        value.trim().trim_end_matches(" kB").parse().unwrap()
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

const PING: &[u8] = b"{\"execute\":\"guest-ping\"}\n";
const INTERFACES: &[u8] = b"{\"execute\":\"guest-network-get-interfaces\"}\n";
const OSINFO: &[u8] = b"{\"execute\":\"guest-get-osinfo\"}\n";

fn call(client: &mut UnixStream, request: &[u8]) {
    client.write_all(request).unwrap();
    let mut buffer = [0; 8192];
    let mut last = 0;
    while last != b'\n' {
        let length = client.read(&mut buffer).unwrap();
        assert!(length > 0, "the agent closed the stream");
        last = buffer[length - 1];
    }
}

fn percentile(sorted: &[Duration], percent: usize) -> f64 {
    sorted[(sorted.len() - 1) * percent / 100].as_secs_f64() * 1e6
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Medians over the turns of p50 and p99 in µs, for both programs.
fn latencies(agents: [&Agent; 2], request: &[u8], calls: usize) -> [[f64; 2]; 2] {
    let mut turns = [[vec![], vec![]], [vec![], vec![]]];
    for _ in 0..TURNS {
        for (agent, turns) in agents.iter().zip(&mut turns) {
            let mut client = agent.client();
            let mut times: Vec<_> = (0..calls)
                .map(|_| {
                    let begun = Instant::now();
                    call(&mut client, request);
                    begun.elapsed()
                })
                .collect();
            times.sort();
            turns[0].push(percentile(&times, 50));
            turns[1].push(percentile(&times, 99));
        }
    }
    turns.map(|percentiles| percentiles.map(median))
}

fn row(name: &str, ours: f64, theirs: f64, unit: &str) {
    println!("{name:<44} {ours:>10.1} {theirs:>10.1} {unit:<8} {:>6.2}", ours / theirs);
}

fn main() {
    let Some(qemu_ga) = std::env::var_os("QEMU_GA").map(PathBuf::from) else {
        println!("QEMU_GA must name Debian's qemu-ga to compare with; run `make bench`.");
        return;
    };
    let ours = PathBuf::from(env!("CARGO_BIN_EXE_guestlet"));
    println!("{:<44} {:>10} {:>10} {:<8} {:>6}", "", "guestlet", "qemu-ga", "", "ratio");

    let mut starts = [vec![], vec![]];
    for _ in 0..40 {
        starts[0].push(Agent::start(&ours, true).1.as_secs_f64() * 1e3);
        starts[1].push(Agent::start(&qemu_ga, false).1.as_secs_f64() * 1e3);
    }
    let [our_start, their_start] = starts.map(median);
    row("exec to the first answer, median", our_start, their_start, "ms");

    let (ours, _) = Agent::start(&ours, true);
    let (theirs, _) = Agent::start(&qemu_ga, false);
    for (name, request, calls) in [
        ("guest-ping", PING, CALLS),
        ("guest-get-osinfo", OSINFO, CALLS / 5),
        ("guest-network-get-interfaces", INTERFACES, CALLS / 5),
    ] {
        let [[our_p50, our_p99], [their_p50, their_p99]] = latencies([&ours, &theirs], request, calls);
        row(&format!("{name} p50"), our_p50, their_p50, "µs");
        row(&format!("{name} p99"), our_p99, their_p99, "µs");
    }
    let kib = |agent: &Agent, key| agent.number("status", key) as f64;
    row("resident memory after that", kib(&ours, "VmRSS:"), kib(&theirs, "VmRSS:"), "KiB");
    let pss = |agent: &Agent| agent.number("smaps_rollup", "Pss:") as f64;
    row("proportional memory after that", pss(&ours), pss(&theirs), "KiB");
    let switches = |agent: &Agent| agent.number("status", "voluntary_ctxt_switches:");
    let before = [switches(&ours), switches(&theirs)];
    std::thread::sleep(IDLE);
    let [our_wakeups, their_wakeups] = [switches(&ours) - before[0], switches(&theirs) - before[1]];
    println!(
        "{:<44} {our_wakeups:>10} {their_wakeups:>10}",
        format!("wakeups in {} idle seconds", IDLE.as_secs())
    );
}
