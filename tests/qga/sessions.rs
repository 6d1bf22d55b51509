//! What happens around a command that takes its time: guest-set-user-password, whose chpasswd(8) is one that waits,
//! in a mount namespace of the test's own.

use std::fs::File;
use std::io::{BufRead as _, BufReader, Write as _};
use std::time::{Duration, Instant};

use nix::sys::stat::Mode;
use nix::unistd::mkfifo;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::agent::{Agent, PATIENCE};
use crate::channels::line_at;
use crate::namespace::{is_outside, run};

/// Longer than a client waits that has sent two requests at once.
const LONG: Duration = Duration::from_millis(1100);

fn slow(id: u32) -> String {
    let arguments = json!({"username": "somebody", "password": "eA==", "crypted": false});
    json!({"execute": "guest-set-user-password", "arguments": arguments, "id": id}).to_string()
}

fn quick(command: &str, id: u32) -> String {
    json!({"execute": command, "id": id}).to_string()
}

fn sync(id: u32) -> String {
    json!({"execute": "guest-sync", "arguments": {"id": id}, "id": id}).to_string()
}

/// A chpasswd that waits for each run to be let go on.
struct Gate {
    folder: TempDir,
    fifo: File,
}

impl Gate {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let at = folder.path().display();
        std::fs::write(
            folder.path().join("chpasswd"),
            format!("#!/bin/sh\nread password\necho begun >> {at}/told\nread word < {at}/gate\necho ended >> {at}/told\n"),
        )
        .unwrap();
        // The machine itself has no such user, should its own program be run after all.
        std::fs::write(
            folder.path().join("passwd"),
            "root:x:0:0::/root:/bin/sh\nsomebody:x:4242:4242::/:/bin/sh\n",
        )
        .unwrap();
        run(&format!(
            "cd {at}; chmod 755 chpasswd; touch told
             mount --bind passwd /etc/passwd; mount --bind chpasswd /usr/sbin/chpasswd"
        ));
        mkfifo(&folder.path().join("gate"), Mode::S_IRWXU).unwrap();
        // Open in both directions it neither waits nor breaks.
        let fifo = File::options().read(true).write(true).open(folder.path().join("gate")).unwrap();
        Self { folder, fifo }
    }

    /// Waits until so many runs have begun, or have ended.
    fn has(&self, word: &str, times: usize) {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let told = std::fs::read_to_string(self.folder.path().join("told")).unwrap();
            if told.lines().filter(|line| *line == word).count() == times {
                return;
            }
            assert!(Instant::now() < deadline, "{word} {times} times: {told}");
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Lets one run go on.
    fn open(&mut self) {
        self.fifo.write_all(b"\n").unwrap();
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        // A test that failed leaves nobody waiting.
        let _ = self.fifo.write_all(b"\n\n\n\n");
    }
}

/// A ping overtook a slow command, and a client without ids took it for the answer to that.
#[test]
fn answers_come_in_the_order_of_the_commands() {
    if is_outside() {
        return;
    }
    let mut gate = Gate::new();
    let agent = Agent::start();
    let (mut client, mut other) = (agent.client(), agent.client());
    let requests = [
        slow(1),
        quick("guest-get-host-name", 2),
        quick("guest-ping", 3),
        "}".to_owned(),
        quick("guest-get-osinfo", 5),
        quick("guest-info", 6),
        quick("guest-fsfreeze-status", 7),
        quick("guest-nothing", 8),
    ];
    client.send(requests.concat().as_bytes());
    gate.has("begun", 1);
    // For others nothing waits.
    assert!(other.call("guest-get-host-name").is_object());
    assert_eq!(other.call("guest-ping"), json!({}));
    std::thread::sleep(LONG);
    gate.has("ended", 0);

    gate.open();
    assert_eq!(client.answer(), json!({"return": {}, "id": 1}));
    for id in [2, 3, 4, 5, 6, 7, 8] {
        let answer = client.answer();
        match id {
            // What is no message has no id.
            4 => assert!(answer["error"].is_object() && answer.get("id").is_none(), "{answer}"),
            _ => assert_eq!(answer["id"], id, "{answer}"),
        }
    }
    assert_eq!(client.finish(), b"");
}

#[test]
fn a_sync_drops_what_was_asked_before_it() {
    if is_outside() {
        return;
    }
    let mut gate = Gate::new();
    let agent = Agent::start_with(&["-v"]);
    let mut client = agent.client();
    client.send([slow(1), quick("guest-get-host-name", 2), slow(3)].concat().as_bytes());
    gate.has("begun", 1);
    std::thread::sleep(LONG);
    let begun = Instant::now();
    assert_eq!(client.ask(&sync(4)), json!({"return": 4, "id": 4}));
    assert!(begun.elapsed() < LONG, "{:?}", begun.elapsed());
    // What is asked after it is carried out at once, and in order.
    client.send([quick("guest-get-osinfo", 5), quick("guest-ping", 6)].concat().as_bytes());
    assert_eq!((client.answer()["id"].clone(), client.answer()["id"].clone()), (json!(5), json!(6)));
    gate.has("ended", 0);
    gate.open();
    gate.has("ended", 1);
    assert_eq!(client.ask(&quick("guest-ping", 7)), json!({"return": {}, "id": 7}));
    // What had not begun never does.
    gate.has("begun", 1);
    assert!(!agent.log().contains("guest-get-host-name: done"), "{}", agent.log());

    // Sent at once with what it would drop it waits a moment, but not for longer.
    client.send([slow(8), slow(9), sync(10)].concat().as_bytes());
    let begun = Instant::now();
    assert_eq!(client.answer(), json!({"return": 10, "id": 10}));
    assert!(begun.elapsed() < LONG * 3, "{:?}", begun.elapsed());
    gate.has("begun", 2);
    client.send([quick("guest-get-osinfo", 11), sync(12)].concat().as_bytes());
    assert_eq!((client.answer()["id"].clone(), client.answer()["id"].clone()), (json!(11), json!(12)));
    gate.open();
    gate.has("ended", 2);
    assert_eq!(client.finish(), b"");
}

/// 64 requests behind one that hangs, and the stream was deaf.
#[test]
fn behind_a_command_that_hangs_everything_is_answered_in_the_end() {
    if is_outside() {
        return;
    }
    let mut gate = Gate::new();
    let agent = Agent::start();
    let mut client = agent.client();
    client.send([slow(0), quick("guest-fsfreeze-status", 1)].concat().as_bytes());
    let begun = Instant::now();
    let hangs = client.answer();
    assert!(begun.elapsed() >= Duration::from_secs(4), "{:?}", begun.elapsed());
    let words = hangs["error"]["desc"].as_str().unwrap();
    assert!(hangs["id"] == 0 && words.contains("continues; its outcome is not known"), "{hangs}");
    assert_eq!(client.answer(), json!({"return": "thawed", "id": 1}));
    // More than are queued.
    client.send(slow(0).as_bytes());
    client.send((1..200).map(|id| quick("guest-get-host-name", id)).collect::<String>().as_bytes());
    assert!(client.answer()["error"].is_object());
    for id in 1..200 {
        assert_eq!(client.answer()["id"], id);
    }
    gate.open();
    gate.open();
    gate.has("ended", 2);
    assert_eq!(client.finish(), b"");
}

#[test]
fn a_client_that_goes_away_leaves_its_work_and_nothing_to_the_next() {
    if is_outside() {
        return;
    }
    let mut gate = Gate::new();
    let agent = Agent::start();
    let mut client = agent.client();
    client.send([slow(1), quick("guest-get-host-name", 2)].concat().as_bytes());
    gate.has("begun", 1);
    drop(client);
    let mut next = agent.client();
    assert!(next.ask(&quick("guest-get-osinfo", 3))["return"].is_object());
    gate.has("ended", 0);

    gate.open();
    gate.has("ended", 1);
    assert_eq!(next.ask(&quick("guest-ping", 4)), json!({"return": {}, "id": 4}));
    gate.open();
    assert_eq!(next.ask(&slow(5)), json!({"return": {}, "id": 5}));
    assert_eq!(next.finish(), b"");
}

/// The next answer on a serial line.
fn answer(line: &mut BufReader<File>) -> Value {
    let mut bytes = Vec::new();
    line.read_until(b'\n', &mut bytes).unwrap();
    let text = bytes.strip_prefix(b"\xff").unwrap_or(&bytes);
    serde_json::from_slice(text).unwrap_or_else(|error| panic!("{error}: {bytes:?}"))
}

/// Where all clients share one stream.
#[test]
fn after_a_serial_line_was_hung_up_the_next_client_gets_only_its_own_answers() {
    if is_outside() {
        return;
    }
    let mut gate = Gate::new();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("line");
    let first = line_at(&path);
    let agent = Agent::start_with(&["-m", "isa-serial", "-p", path.to_str().unwrap()]);
    opened(&agent, 1);
    (&first.host).write_all([slow(1), quick("guest-get-host-name", 2)].concat().as_bytes()).unwrap();
    gate.has("begun", 1);
    let next = line_at(&path);
    drop(first);
    opened(&agent, 2);
    let mut line = BufReader::new(next.host.try_clone().unwrap());
    (&next.host).write_all(quick("guest-get-osinfo", 3).as_bytes()).unwrap();
    assert_eq!(answer(&mut line)["id"], 3, "it is not kept waiting");
    gate.has("ended", 0);

    gate.open();
    gate.has("ended", 1);
    for id in 4..10 {
        (&next.host).write_all(quick("guest-get-host-name", id).as_bytes()).unwrap();
        assert_eq!(answer(&mut line)["id"], id);
    }
}

/// Waits until the agent has opened its line so many times; what was sent before it did is lost.
fn opened(agent: &Agent, times: usize) {
    let deadline = Instant::now() + PATIENCE;
    while agent.log().matches("line: open\n").count() < times {
        assert!(Instant::now() < deadline, "{}", agent.log());
        std::thread::sleep(Duration::from_millis(5));
    }
}
