//! How fast programs start in a guest, keys come back and bytes go through, of programs, copies and connections: `cargo bench
//! --bench programs`, or `-- pipes copies` and so on for some of it. For root, with socat; guestctl, guestlet-host and the agent are
//! on unix sockets of this machine.

#![allow(
    clippy::cast_precision_loss,
    clippy::disallowed_methods,
    clippy::print_stdout,
    clippy::print_stderr,
    clippy::unwrap_used
)]

#[allow(dead_code, reason = "shared with the tests of connections")]
#[path = "../tests/forward/forwarding.rs"]
mod forwarding;
#[allow(dead_code, reason = "shared with the tests of the host half")]
#[path = "../tests/host/lab.rs"]
mod host;
#[allow(dead_code, reason = "shared with the tests of programs")]
#[path = "../tests/exec/lab.rs"]
mod lab;
#[allow(dead_code, reason = "shared with the tests")]
#[path = "../tests/fixtures/launch.rs"]
mod launch;

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use guestlet::sys::terminal::{self, Size};

use forwarding::Forwarding;
use lab::{Lab, until};

const STARTS: usize = 200;
const KEYS: usize = 1000;
const BYTES: u64 = 1 << 30;
/// As many as one guest may have clients for root.
const SESSIONS: u64 = 48;
/// Bytes of what a connection is served in one write.
const PART: usize = 256 * 1024;

fn main() {
    let port = serve();
    let grants = format!(
        "[[grant]]\nhost = \"plain\"\nroles = [\"status\", \"exec\", \"files-write\", \"forward\"]\nforward = [\"{port}\"]\n"
    );
    let lab = Lab::with(&grants);
    let chosen: Vec<_> = std::env::args().skip(1).filter(|word| word != "--bench").collect();
    let is_chosen = |name: &str| chosen.is_empty() || chosen.iter().any(|one| one == name);
    let all: [(&str, &dyn Fn()); 6] = [
        ("starts", &|| starts(&lab)),
        ("keys", &|| keys(&lab)),
        ("pipes", &|| pipes(&lab)),
        ("copies", &|| copies(&lab)),
        ("forwards", &|| forwards(&lab, port)),
        ("sessions", &|| sessions(&lab)),
    ];
    for (name, measure) in all {
        if is_chosen(name) {
            measure();
        }
    }
}

/// Measures something so often: the median, and what all but one in a hundred are within.
fn shown(what: &str, mut times: Vec<Duration>) {
    times.sort();
    println!("{what}: p50 {:.1?}, p99 {:.1?}", times[times.len() / 2], times[times.len() * 99 / 100]);
}

fn timed(mut command: Command) -> Duration {
    command.stdin(Stdio::null()).stdout(Stdio::null());
    let begun = Instant::now();
    assert!(command.status().unwrap().success());
    begun.elapsed()
}

/// The program alone, guestctl alone, and the program through it, in turns.
fn starts(lab: &Lab) {
    let mut times: [Vec<Duration>; 3] = Default::default();
    for _ in 0..STARTS {
        times[0].push(timed(Command::new("true")));
        times[1].push(timed(lab.host.ctl_command(&["--version"])));
        times[2].push(timed(lab.command(&[], &["true"])));
    }
    let [program, ctl, both] = times;
    shown("true", program);
    shown("guestctl --version", ctl);
    shown("guestctl exec VM -- true", both);
}

/// From a key that is typed to what cat writes of it, without the echo of the terminal.
fn keys(lab: &Lab) {
    let (controller, terminal) = terminal::open(Size { rows: 24, columns: 80 }).unwrap();
    nix::fcntl::fcntl(&controller, nix::fcntl::FcntlArg::F_SETFL(nix::fcntl::OFlag::empty())).unwrap();
    let end = || Stdio::from(terminal.try_clone().unwrap());
    let mut command = lab.command(&["-it"], &["sh", "-c", "stty raw -echo; echo ready; exec cat"]);
    let mut child = command.stdin(end()).stdout(end()).stderr(end()).spawn().unwrap();
    let mut screen = File::from(controller);
    let mut seen = Vec::new();
    let mut part = [0; 256];
    while !seen.windows(5).any(|window| window == b"ready") {
        let length = screen.read(&mut part).unwrap();
        seen.extend_from_slice(&part[..length]);
    }
    // The end of that line.
    std::thread::sleep(Duration::from_millis(200));
    let mut times = Vec::new();
    for _ in 0..KEYS {
        let begun = Instant::now();
        screen.write_all(b"k").unwrap();
        loop {
            let length = screen.read(&mut part).unwrap();
            if part[..length].contains(&b'k') {
                break;
            }
        }
        times.push(begun.elapsed());
    }
    child.kill().unwrap();
    child.wait().unwrap();
    shown("a key there and back", times);
}

fn rate(bytes: u64, took: Duration) -> f64 {
    bytes as f64 / f64::from(1 << 20) / took.as_secs_f64()
}

/// Output and input of a program, beside a pipe of the shell.
fn pipes(lab: &Lab) {
    let make = format!("head -c {BYTES} /dev/zero");
    for _ in 0..3 {
        let mut shell = Command::new("sh");
        shell.args(["-c", &format!("{make} | cat > /dev/null")]);
        let plain = timed(shell);
        let output = timed(lab.command(&[], &["sh", "-c", &make]));
        let mut source = Command::new("head");
        let mut source =
            source.args(["-c", &BYTES.to_string(), "/dev/zero"]).stdout(Stdio::piped()).spawn().unwrap();
        let mut sink = lab.command(&["-i"], &["sh", "-c", "cat > /dev/null"]);
        sink.stdin(source.stdout.take().unwrap());
        let begun = Instant::now();
        assert!(sink.status().unwrap().success());
        let input = begun.elapsed();
        source.wait().unwrap();
        println!(
            "1 GiB: {:.0} MiB/s by a pipe of the shell, {:.0} MiB/s as output, {:.0} MiB/s as input",
            rate(BYTES, plain),
            rate(BYTES, output),
            rate(BYTES, input)
        );
    }
}

/// A file each way, from memory to memory, beside cp and what SHA-256 alone takes.
fn copies(lab: &Lab) {
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let place = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let (from, to) = (place("from"), place("to"));
    let mut make = Command::new("sh");
    // Bytes that are not zeros: those would be holes.
    make.args(["-c", &format!("head -c {PART} /dev/urandom > {from}.part")]);
    timed(make);
    let part = std::fs::read(format!("{from}.part")).unwrap();
    let mut file = File::create(&from).unwrap();
    for _ in 0..BYTES / PART as u64 {
        file.write_all(&part).unwrap();
    }
    drop(file);
    for _ in 0..3 {
        let tried = |mut command: Command, source: &Path| {
            drop(std::fs::remove_file(&to));
            command.arg(source).arg(&to);
            rate(BYTES, timed(command))
        };
        let plain = tried(Command::new("cp"), Path::new(&from));
        let guestctl = |source: String, target: String| {
            drop(std::fs::remove_file(&to));
            let mut command = lab.host.ctl_command(&["cp", &source, &target]);
            command.env("XDG_STATE_HOME", folder.path());
            rate(BYTES, timed(command))
        };
        let there = guestctl(from.clone(), format!("web:{to}"));
        let back = guestctl(format!("web:{from}"), to.clone());
        let mut sum = Command::new("sha256sum");
        sum.arg(&from);
        let sum = rate(BYTES, timed(sum));
        println!(
            "1 GiB: {plain:.0} MiB/s by cp, {there:.0} MiB/s to the guest, {back:.0} MiB/s from it; sha256sum {sum:.0} MiB/s"
        );
    }
}

/// Sends each client [`BYTES`], and ends.
fn serve() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        for client in listener.incoming() {
            let bytes = vec![7; PART];
            let mut client = client.unwrap();
            for _ in 0..BYTES / PART as u64 {
                client.write_all(&bytes).unwrap();
            }
        }
    });
    port
}

/// Reads all that is served there.
fn read(place: &str) -> f64 {
    let begun = Instant::now();
    let mut client = TcpStream::connect(place).unwrap();
    let (mut part, mut all) = (vec![0; PART], 0);
    loop {
        match client.read(&mut part).unwrap() {
            0 => break,
            length => all += length as u64,
        }
    }
    assert_eq!(all, BYTES);
    rate(BYTES, begun.elapsed())
}

/// A connection through the guest, beside two processes of socat with a unix socket between them.
fn forwards(lab: &Lab, port: u16) {
    let forwarding = Forwarding::of(lab, port);
    for _ in 0..3 {
        let socket = lab.file("socat");
        drop(std::fs::remove_file(&socket));
        let near = forwarding::free_port();
        let run = |from: String, to: String| {
            Command::new("socat").args(["-b", "65536", &from, &to]).spawn().unwrap()
        };
        let mut both = [
            run(format!("UNIX-LISTEN:{}", socket.display()), format!("TCP:127.0.0.1:{port}")),
            run(format!("TCP-LISTEN:{near},reuseaddr"), format!("UNIX-CONNECT:{}", socket.display())),
        ];
        until("socat listens", || {
            let listening = std::fs::read_to_string("/proc/net/tcp").unwrap();
            socket.exists() && listening.contains(&format!("0100007F:{near:04X} 00000000:0000 0A"))
                || listening.contains(&format!("00000000:{near:04X} 00000000:0000 0A"))
        });
        let socat = read(&format!("127.0.0.1:{near}"));
        for child in &mut both {
            child.wait().unwrap();
        }
        let guestctl = read(&forwarding.places[0]);
        println!("1 GiB: {socat:.0} MiB/s by two of socat, {guestctl:.0} MiB/s by guestctl forward");
    }
}

/// What the agent needs for programs that wait for input.
fn sessions(lab: &Lab) {
    let before = lab.agent_memory();
    let mut all: Vec<Child> = Vec::new();
    for count in 1..=SESSIONS {
        let mut command = lab.command(&["-i"], &["cat"]);
        all.push(command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap());
        let is_attached = |one: &&serde_json::Value| one["is_attached"] == true;
        until("it runs", || lab.programs().iter().filter(is_attached).count() as u64 >= count);
    }
    println!(
        "{SESSIONS} idle sessions: {} KiB of the agent each",
        lab.agent_memory().saturating_sub(before) / SESSIONS
    );
    for mut child in all {
        drop(child.stdin.take());
        child.wait().unwrap();
    }
}
