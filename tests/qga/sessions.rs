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

#[test]
fn what_is_always_answered_overtakes_and_the_rest_keeps_its_order() {
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
        // Sent at once with the slow one: both answers are waited for.
        sync(4),
        quick("guest-get-osinfo", 5),
        quick("guest-info", 6),
        quick("guest-fsfreeze-status", 7),
        quick("guest-nothing", 8),
    ];
    client.send(requests.concat().as_bytes());
    for id in [3, 4, 6, 7, 8] {
        assert_eq!(client.answer()["id"], id);
    }
    gate.has("begun", 1);
    // Later as well, and for others all of it.
    assert_eq!(client.ask(&quick("guest-ping", 9)), json!({"return": {}, "id": 9}));
    assert!(other.call("guest-get-host-name").is_object());
    gate.has("ended", 0);

    gate.open();
    assert_eq!(client.answer(), json!({"return": {}, "id": 1}));
    for id in [2, 5] {
        let answer = client.answer();
        assert_eq!(answer["id"], id);
        assert!(answer["return"].is_object(), "{answer}");
    }
    assert_eq!(client.finish(), b"");
}

#[test]
fn a_sync_after_a_second_gives_up_what_was_asked_before() {
    if is_outside() {
        return;
    }
    let mut gate = Gate::new();
    let agent = Agent::start();
    let mut client = agent.client();
    client.send([slow(1), quick("guest-get-host-name", 2)].concat().as_bytes());
    gate.has("begun", 1);
    std::thread::sleep(LONG);
    assert_eq!(client.ask(&sync(3)), json!({"return": 3, "id": 3}));
    // What is asked after it counts again.
    client.send(quick("guest-get-osinfo", 4).as_bytes());
    assert_eq!(client.ask(&quick("guest-ping", 5)), json!({"return": {}, "id": 5}));
    gate.has("ended", 0);

    gate.open();
    assert_eq!(client.answer()["id"], 4);
    gate.has("ended", 1);
    assert_eq!(client.ask(&quick("guest-ping", 6)), json!({"return": {}, "id": 6}));

    gate.open();
    assert_eq!(client.ask(&slow(7)), json!({"return": {}, "id": 7}));
    assert_eq!(client.finish(), b"");
    gate.has("ended", 2);
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
