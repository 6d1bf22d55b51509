//! The whole dispatcher over a machine that is a folder and a fake: nothing that a client says makes it panic, or
//! keeps it from answering what comes next.

use std::collections::HashMap;
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use guestlet::guest::Guest;
use guestlet::pace::Complaints;
use guestlet::policy::{Audit, Bounds, Rules};
use guestlet::qga::owners::Owners;
use guestlet::qga::policy::Policy;
use guestlet::qga::room::Room;
use guestlet::qga::session::{self, End};
use guestlet::qga::table::COMMANDS;
use guestlet::qga::{Context, PROTOCOL_VERSION};
use guestlet::sys::calendar::Date;
use guestlet::sys::effects::{Effects, Trimmed};
use guestlet::sys::root::Root;
use serde_json::value::RawValue;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

/// What would leave the folder: programs, and files by the caller's own path.
const BLOCKED: [&str; 8] = [
    "guest-exec",
    "guest-exec-status",
    "guest-file-close",
    "guest-file-flush",
    "guest-file-open",
    "guest-file-read",
    "guest-file-seek",
    "guest-file-write",
];

/// What the machine has.
const FILES: [(&str, &str); 10] = [
    ("etc/passwd", "root:x:0:0::/root:/bin/sh\nme:x:1000:1000::/home/me:/bin/sh\n"),
    ("root/.ssh/authorized_keys", "# mine\nssh-rsa AAAA\n"),
    ("home/me/x", ""),
    ("proc/loadavg", "0.1 0.2 0.3 1/2 3\n"),
    ("proc/stat", "cpu 1 2 3 4\ncpu0 1 2 3 4 5 6 7 8 9 10\n"),
    ("proc/net/route", "title\neth0\t00000000\t010200C0\t0003\t0\t0\t0\t00000000\t0\t0\t0\n"),
    ("sys/devices/system/cpu/cpu0/uevent", ""),
    ("sys/devices/system/cpu/cpu1/online", "1\n"),
    ("sys/devices/system/memory/memory0/state", "online\n"),
    ("sys/power/state", "freeze mem disk\n"),
];

/// What is no file.
#[derive(Debug, Default)]
struct Machine(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    clock: Duration,
    hardware_clock: Option<Date>,
}

impl Effects for Machine {
    fn trim(&self, _: &Path, minimum: u64) -> io::Result<Trimmed> {
        Ok(Trimmed { bytes: 0, minimum })
    }

    fn set_clock(&self, time: Duration) -> io::Result<()> {
        self.0.lock().unwrap().clock = time;
        Ok(())
    }

    fn hardware_clock(&self, _: &Path) -> io::Result<Date> {
        self.0.lock().unwrap().hardware_clock.ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    fn set_hardware_clock(&self, _: &Path, date: Date) -> io::Result<()> {
        self.0.lock().unwrap().hardware_clock = Some(date);
        Ok(())
    }
}

/// What a client may say: the bytes as they are, and then each of their lines as a call, whose first word chooses the
/// command and whose rest is its arguments.
pub fn dispatch(bytes: &[u8]) {
    let folder = tempfile::tempdir().unwrap();
    for (path, text) in FILES {
        let path = folder.path().join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }
    let root = Root::at(folder.path());
    assert!(!root.is_the_machine());
    let effects = Arc::new(Machine::default());
    let bounds = Bounds { block: BLOCKED.map(str::to_owned).to_vec(), ..Bounds::default() };
    let context = Context {
        guest: Guest { root, effects, ..Guest::default() },
        policy: Policy::new(Rules { bounds, ..Rules::default() }),
        audit: Audit::default(),
        complaints: Complaints::default(),
        room: Room::default(),
        owners: Owners::default(),
        stopping: guestlet::qga::Stopping::new(),
        version: PROTOCOL_VERSION.to_owned(),
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        answers(&context, bytes).await;
        let calls: Vec<u8> = bytes.split(|byte| *byte == b'\n').flat_map(call).collect();
        answers(&context, &calls).await;
    });
}

/// A line as a call.
fn call(line: &[u8]) -> Vec<u8> {
    let (first, rest) = match line.iter().position(|byte| *byte == b' ') {
        Some(place) => (&line[..place], &line[place + 1..]),
        None => (line, &b"{}"[..]),
    };
    let sum = first.iter().fold(0_usize, |sum, byte| sum.wrapping_mul(31).wrapping_add(usize::from(*byte)));
    let named = COMMANDS.iter().find(|command| command.name.as_bytes() == first);
    let name = named.unwrap_or(&COMMANDS[sum % COMMANDS.len()]).name;
    [b"{\"execute\":\"", name.as_bytes(), b"\",\"arguments\":", rest, b"}\n"].concat()
}

/// Whatever was said before, guest-sync is answered.
async fn answers(context: &Context, bytes: &[u8]) {
    const SYNC: &[u8] = b"\n\xff{\"execute\":\"guest-sync\",\"arguments\":{\"id\":4823907551}}\n";
    let (mut near, far) = tokio::io::duplex(1 << 16);
    let talk = async {
        let (mut from, mut to) = tokio::io::split(&mut near);
        let mut said = Vec::new();
        let ask = async {
            to.write_all(bytes).await.unwrap();
            to.write_all(SYNC).await.unwrap();
            to.shutdown().await.unwrap();
        };
        tokio::join!(ask, async { from.read_to_end(&mut said).await.unwrap() });
        said
    };
    let serve = async { session::run(far, "fuzz", context, End::Said).await.finish().await.unwrap() };
    let (said, ()) = tokio::time::timeout(Duration::from_secs(60), async { tokio::join!(talk, serve) })
        .await
        .expect("the dispatcher does not end");
    let mut answered = false;
    for line in said.split(|byte| *byte == b'\n').filter(|line| !line.is_empty()) {
        let text = line.strip_prefix(b"\xff").unwrap_or(line);
        // An id comes back as it was, also a number that no type holds.
        let answer: HashMap<String, Box<RawValue>> =
            serde_json::from_slice(text).expect("every answer is JSON, on a line of its own");
        assert!(answer.contains_key("return") != answer.contains_key("error"));
        answered |= answer.get("return").is_some_and(|value| value.get() == "4823907551");
    }
    assert!(answered, "guest-sync was not answered");
}
