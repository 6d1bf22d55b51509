//! The agent beside qemu-ga: both in one run, in turns, so that a machine that changes its pace is fair to
//! both. `QEMU_GA` names the program to compare with; `make bench` sets it.
//!
//! Only sockets and processes of this program's own are used.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::disallowed_methods, clippy::print_stdout)]
#![allow(clippy::cast_precision_loss, clippy::cast_possible_truncation, clippy::cast_sign_loss)]

#[allow(dead_code, reason = "shared with the tests")]
#[path = "../tests/fixtures/launch.rs"]
mod launch;

use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

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
        Self::start_by(Command::new(program), program, ours, Duration::from_secs(10))
    }

    /// Starts an agent in a namespace of its own, which `option` of unshare(1) makes and `script` prepares, in the
    /// agent's folder.
    fn start_in(program: &Path, ours: bool, option: &str, script: &str) -> Self {
        let mut command = Command::new("unshare");
        command.args([option, "sh", "-ec", &format!("( cd ${{0%/*}}; {script} ) > /dev/null; exec \"$@\"")]);
        Self::start_by(command, program, ours, Duration::from_secs(120)).0
    }

    fn start_by(mut command: Command, program: &Path, ours: bool, limit: Duration) -> (Self, Duration) {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("qga.sock");
        if command.get_program() != program {
            command.arg(&socket).arg(program);
        }
        command.args(["-m", "unix-listen", "-p"]).arg(&socket).arg("-t").arg(folder.path());
        if ours {
            let settings = folder.path().join("agent.toml");
            std::fs::write(&settings, launch::settings_in(folder.path())).unwrap();
            command.arg("--settings").arg(settings);
            let unit = include_str!("../systemd/guestlet.service").lines();
            command.envs(unit.filter_map(|line| line.strip_prefix("Environment=")?.split_once('=')));
        }
        let begun = Instant::now();
        let child = command.stderr(Stdio::null()).spawn().unwrap();
        let agent = Self { child, folder };
        let mut client = loop {
            if let Ok(stream) = UnixStream::connect(&socket) {
                break stream;
            }
            assert!(begun.elapsed() < limit, "{} does not start", program.display());
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
const DISKS: &[u8] = b"{\"execute\":\"guest-get-disks\"}\n";
const DISKSTATS: &[u8] = b"{\"execute\":\"guest-get-diskstats\"}\n";
const FSINFO: &[u8] = b"{\"execute\":\"guest-get-fsinfo\"}\n";
const OSINFO: &[u8] = b"{\"execute\":\"guest-get-osinfo\"}\n";

fn call(client: &mut UnixStream, request: &[u8]) {
    client.write_all(request).unwrap();
    skip_line(client, &mut [0; 8192]);
}

/// Reads to the end of an answer, and looks at no more of it.
fn skip_line(client: &mut UnixStream, buffer: &mut [u8]) -> usize {
    let mut all = 0;
    loop {
        let length = client.read(buffer).unwrap();
        assert!(length > 0, "the agent closed the stream");
        all += length;
        if buffer[length - 1] == b'\n' {
            return all;
        }
    }
}

/// What a command returns, as JSON.
fn ask(client: &mut UnixStream, command: &str, arguments: &Value) -> Value {
    let request = json!({"execute": command, "arguments": arguments});
    client.write_all(request.to_string().as_bytes()).unwrap();
    let mut line = Vec::new();
    while line.last() != Some(&b'\n') {
        let mut buffer = [0; 8192];
        let length = client.read(&mut buffer).unwrap();
        line.extend_from_slice(&buffer[..length]);
    }
    let mut answer: Value = serde_json::from_slice(&line).unwrap();
    assert!(answer.get("return").is_some(), "{command}: {answer}");
    answer["return"].take()
}

/// MiB/s of reading (or writing) a file in pieces of `size`, medians over the turns.
fn throughput(agents: [&Agent; 2], size: usize, writes: bool) -> [f64; 2] {
    const FILE: usize = 32 << 20;
    let mut turns = [vec![], vec![]];
    let mut buffer = vec![0; 256 << 10];
    for _ in 0..TURNS {
        for (agent, turns) in agents.iter().zip(&mut turns) {
            let path = agent.folder.path().join("file");
            std::fs::write(&path, vec![b'x'; FILE]).unwrap();
            let mut client = agent.client();
            let handle = ask(&mut client, "guest-file-open", &json!({"path": path, "mode": "r+"}));
            let request = if writes {
                let text = "eHh4".repeat(size / 3) + ["", "eA==", "eHg="][size % 3];
                json!({"execute": "guest-file-write", "arguments": {"handle": handle, "buf-b64": text}})
            } else {
                json!({"execute": "guest-file-read", "arguments": {"handle": handle, "count": size}})
            };
            let request = request.to_string().into_bytes();
            let rewind = json!({"handle": handle, "offset": 0, "whence": 0});
            let mut done = 0;
            let begun = Instant::now();
            while begun.elapsed() < Duration::from_millis(300) {
                ask(&mut client, "guest-file-seek", &rewind);
                for _ in 0..(FILE / size).min(4) {
                    client.write_all(&request).unwrap();
                    skip_line(&mut client, &mut buffer);
                    done += size;
                }
            }
            turns.push(done as f64 / f64::from(1 << 20) / begun.elapsed().as_secs_f64());
            ask(&mut client, "guest-file-close", &json!({"handle": handle}));
        }
    }
    turns.map(median)
}

/// KiB: at most during a read of 48 MiB, and grown by a second after it.
fn memory_of_a_large_read(agent: &Agent) -> [f64; 2] {
    let path = agent.folder.path().join("large");
    std::fs::write(&path, vec![b'x'; 48 << 20]).unwrap();
    let mut client = agent.client();
    let before = agent.number("status", "VmRSS:");
    let handle = ask(&mut client, "guest-file-open", &json!({"path": path}));
    let arguments = json!({"handle": handle, "count": 48 << 20});
    let request = json!({"execute": "guest-file-read", "arguments": arguments});
    client.write_all(request.to_string().as_bytes()).unwrap();
    assert!(skip_line(&mut client, &mut vec![0; 256 << 10]) > 64 << 20);
    let peak = agent.number("status", "VmHWM:");
    std::thread::sleep(Duration::from_secs(1));
    [peak as f64, agent.number("status", "VmRSS:") as f64 - before as f64]
}

/// Milliseconds from a guest-exec of /bin/true until guest-exec-status says that it has ended, medians of p50.
fn exec(agents: [&Agent; 2]) -> [f64; 2] {
    let request = json!({"path": "/bin/true"});
    let mut turns = [vec![], vec![]];
    for _ in 0..TURNS {
        for (agent, turns) in agents.iter().zip(&mut turns) {
            let mut client = agent.client();
            let mut times = Vec::new();
            for _ in 0..100 {
                let begun = Instant::now();
                let started = ask(&mut client, "guest-exec", &request);
                while ask(&mut client, "guest-exec-status", &started)["exited"] == false {}
                times.push(begun.elapsed().as_secs_f64() * 1e3);
            }
            turns.push(median(times));
        }
    }
    turns.map(median)
}
/// In a mount namespace.
const MANY_MOUNTS: &str = "mkdir mounts; mount -t tmpfs tmpfs mounts; cd mounts; truncate -s 8M disk; mkfs.ext4 -q disk; \
    mkdir origin; mount -o loop disk origin; for number in $(seq 999); do mkdir $number; \
    echo $PWD/origin $PWD/$number none bind 0 0; done > table; mount -a -T table";
/// In a network namespace.
const MANY_INTERFACES: &str = "for number in $(seq 1000); do echo link add one$number type veth peer name two$number; done | ip -batch -";

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

/// One call after the other, of everything that changes nothing, with mistakes among them.
fn mixed_calls(agent: &Agent, calls: std::ops::Range<usize>) {
    const QUESTIONS: [&str; 19] = [
        "guest-ping",
        "guest-info",
        "guest-get-time",
        "guest-get-host-name",
        "guest-get-osinfo",
        "guest-get-users",
        "guest-get-timezone",
        "guest-network-get-interfaces",
        "guest-network-get-route",
        "guest-get-fsinfo",
        "guest-get-disks",
        "guest-get-diskstats",
        "guest-get-cpustats",
        "guest-get-load",
        "guest-get-vcpus",
        "guest-get-memory-block-info",
        "guest-fsfreeze-status",
        "guest-nothing",
        "guest-file-read",
    ];
    // Each is answered somehow, and the end of the answers is known by this one.
    const LAST: &str = "\n\u{ff}{'execute':'guest-sync-delimited','arguments':{'id':471147114711}}\n";
    const MISTAKES: [&str; 8] = [
        "{]",
        "{'execute':",
        "{'execute':7}",
        "[1,2,{'a':[null,true,-1.5e3,'\\u0061']}]",
        "{'execute':'guest-ping','arguments':{'x':1},'id':{'a':[1,2,3]}}",
        "{'execute':'guest-file-close','arguments':{'handle':4711}}",
        "{'execute':'guest-exec-status','arguments':{'pid':-7}}",
        "{'execute':'guest-ssh-get-authorized-keys','arguments':{'username':'nobody-of-that-name'}}",
    ];
    let path = agent.folder.path().join("mixed");
    std::fs::write(&path, [b'x'; 10_000]).unwrap();
    let mut client = agent.client();
    for number in calls {
        if number % 1000 == 0 {
            // Clients come and go; what takes long is done now and then.
            client = agent.client();
            call(&mut client, b"{\"execute\":\"guest-get-memory-blocks\"}\n");
            let started =
                ask(&mut client, "guest-exec", &json!({"path": "/bin/true", "capture-output": true}));
            while ask(&mut client, "guest-exec-status", &started)["exited"] == false {}
        } else if number % 10 == 0 {
            let handle = ask(&mut client, "guest-file-open", &json!({"path": path}));
            ask(&mut client, "guest-file-read", &json!({"handle": handle, "count": number % 10_000}));
            ask(&mut client, "guest-file-close", &json!({"handle": handle}));
        } else if number % 10 == 5 {
            let mistake = MISTAKES[number / 10 % MISTAKES.len()];
            // U+00FF stands for the byte.
            let request: Vec<u8> = [mistake, LAST].concat().chars().map(|it| it as u8).collect();
            client.write_all(&request).unwrap();
            let mut answers = Vec::new();
            while !answers.ends_with(b"471147114711}\n") {
                let mut buffer = [0; 8192];
                let length = client.read(&mut buffer).unwrap();
                assert!(length > 0, "{mistake}: the agent closed the stream");
                answers.extend_from_slice(&buffer[..length]);
            }
        } else {
            let question = QUESTIONS[number % QUESTIONS.len()];
            call(&mut client, format!("{{\"execute\":\"{question}\",\"id\":{number}}}\n").as_bytes());
        }
    }
}

/// Resident memory after some calls and after many.
fn memory(agents: [&Agent; 2]) {
    let [ours, theirs] = agents.map(|agent| {
        let mut resident = Vec::new();
        for calls in [1..1_001, 1_001..10_001, 10_001..50_001, 50_001..100_001] {
            mixed_calls(agent, calls);
            resident.push(agent.number("status", "VmRSS:") as f64);
        }
        resident
    });
    for (place, calls) in ["1,000", "10,000", "50,000", "100,000"].iter().enumerate() {
        row(&format!("resident memory after {calls} mixed calls"), ours[place], theirs[place], "KiB");
    }
}

/// Machines with many mounts and many links.
fn many(programs: [(&Path, bool); 2]) {
    for (name, option, script, request, calls) in [
        ("guest-get-fsinfo, 1,000 mounts", "--mount", MANY_MOUNTS, FSINFO, 20),
        ("guest-network-get-interfaces, 2,000", "--net", MANY_INTERFACES, INTERFACES, 3),
    ] {
        let [ours, theirs] = programs.map(|(program, ours)| Agent::start_in(program, ours, option, script));
        let [[ours, _], [theirs, _]] = latencies([&ours, &theirs], request, calls);
        row(&format!("{name}, p50"), ours / 1e3, theirs / 1e3, "ms");
    }
}

/// How long it is from exec to the first answer, and what is resident then.
fn starts(programs: [(&Path, bool); 2]) {
    let [mut times, mut resident, mut own] = [(); 3].map(|()| [vec![], vec![]]);
    for _ in 0..40 {
        for (place, (program, ours)) in programs.into_iter().enumerate() {
            let (agent, took) = Agent::start(program, ours);
            times[place].push(took.as_secs_f64() * 1e3);
            resident[place].push(agent.number("status", "VmRSS:") as f64);
            own[place].push(agent.number("status", "RssAnon:") as f64);
        }
    }
    for (name, values, unit) in [
        ("exec to the first answer, median", times, "ms"),
        ("resident memory at the first answer, median", resident, "KiB"),
        ("its own data in that, median", own, "KiB"),
    ] {
        let [ours, theirs] = values.map(median);
        row(name, ours, theirs, unit);
    }
}

fn main() {
    let Some(qemu_ga) = std::env::var_os("QEMU_GA").map(PathBuf::from) else {
        println!("QEMU_GA must name Debian's qemu-ga to compare with; run `make bench`.");
        return;
    };
    let program = PathBuf::from(launch::AGENT);
    println!("{:<44} {:>10} {:>10} {:<8} {:>6}", "", "guestlet", "qemu-ga", "", "ratio");

    // `cargo bench --bench beside_qemu_ga -- files` measures that part only.
    let only = std::env::args().skip(1).find(|argument| !argument.starts_with('-'));
    let part = |name| only.as_deref().is_none_or(|only| only == name);
    if part("files") || part("exec") {
        let (our, _) = Agent::start(&program, true);
        let (their, _) = Agent::start(&qemu_ga, false);
        if part("files") {
            let [our_peak, our_grown] = memory_of_a_large_read(&our);
            let [their_peak, their_grown] = memory_of_a_large_read(&their);
            row("resident memory, most during a 48 MiB read", our_peak, their_peak, "KiB");
            row("resident memory, grown a second after it", our_grown, their_grown, "KiB");
            for (name, size) in [("4 KiB", 4 << 10), ("64 KiB", 64 << 10), ("1 MiB", 1 << 20)] {
                let [our, their] = throughput([&our, &their], size, false);
                row(&format!("guest-file-read by {name}"), our, their, "MiB/s");
            }
            for (name, size) in [("48 KiB", 48 << 10), ("1 MiB", 1 << 20)] {
                let [our, their] = throughput([&our, &their], size, true);
                row(&format!("guest-file-write by {name}"), our, their, "MiB/s");
            }
        }
        if part("exec") {
            let [our, their] = exec([&our, &their]);
            row("guest-exec of /bin/true until it is seen to end, p50", our, their, "ms");
        }
    }
    if part("memory") {
        memory([&Agent::start(&program, true).0, &Agent::start(&qemu_ga, false).0]);
    }
    if part("many") {
        many([(&program, true), (&qemu_ga, false)]);
    }
    if !part("calls") {
        return;
    }

    starts([(&program, true), (&qemu_ga, false)]);

    let (ours, _) = Agent::start(&program, true);
    let (theirs, _) = Agent::start(&qemu_ga, false);
    for (name, request, calls) in [
        ("guest-ping", PING, CALLS),
        ("guest-get-osinfo", OSINFO, CALLS / 5),
        ("guest-network-get-interfaces", INTERFACES, CALLS / 5),
        ("guest-get-fsinfo", FSINFO, CALLS / 5),
        ("guest-get-disks", DISKS, CALLS / 5),
        ("guest-get-diskstats", DISKSTATS, CALLS / 5),
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
