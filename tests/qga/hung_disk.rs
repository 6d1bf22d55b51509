//! A file system that does not answer any more, in a mount namespace of its own: what waits for it, and what does not.

use std::path::Path;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};

use crate::agent::{Agent, Client, PATIENCE};
use crate::fuse::{CONTENTS, Hanging};
use crate::namespace::{is_outside, run};

/// Longer than a ping takes on a busy machine, and shorter than anything that waits for a disk here.
const AT_ONCE: Duration = Duration::from_secs(3);

fn request(command: &str, arguments: &Value) -> String {
    json!({"execute": command, "arguments": arguments, "id": command}).to_string()
}

fn send(client: &mut Client, command: &str, arguments: &Value) {
    client.send(request(command, arguments).as_bytes());
}

#[track_caller]
fn answers_at_once(client: &mut Client, after: &str) {
    let begun = Instant::now();
    assert_eq!(client.call("guest-ping"), json!({}), "{after}");
    assert!(client.call("guest-fsfreeze-status").is_string(), "{after}");
    assert!(begun.elapsed() < AT_ONCE, "{after}: {:?}", begun.elapsed());
}

fn wait_until(what: &str, mut found: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !found() {
        assert!(Instant::now() < deadline, "{what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn open(client: &mut Client, path: &Path, mode: &str) -> Value {
    let answer = client.ask(&request("guest-file-open", &json!({"path": path, "mode": mode})));
    answer.get("return").unwrap_or_else(|| panic!("{answer}")).clone()
}

/// The agent would not end before it was killed, two minutes later. What was under way is in the log.
#[test]
fn a_disk_that_hangs_holds_up_no_other_call_and_not_the_agents_end() {
    if is_outside() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let mut agent = Agent::start();
    // In the kernel, who looks into a folder of this kind waits for who did before, and cannot be killed: the program that
    // is to be run, a process of its own, gets another one.
    let programs = tempfile::tempdir().unwrap();
    let servers = [folder.path(), programs.path()].map(Hanging::mount);
    servers.iter().for_each(Hanging::hang);
    let (path, program) = (folder.path().join("file"), programs.path().join("program"));
    let mut stuck: Vec<_> = (0..3).map(|_| agent.client()).collect();
    send(&mut stuck[0], "guest-file-open", &json!({"path": path}));
    send(&mut stuck[1], "guest-exec", &json!({"path": program}));
    send(&mut stuck[2], "guest-file-open", &json!({"path": path, "mode": "w"}));
    let mut other = agent.client();
    answers_at_once(&mut other, "all");
    for command in ["guest-get-fsinfo", "guest-get-disks", "guest-get-osinfo"] {
        other.call(command);
    }
    // By guest-sync a client that hangs begins anew.
    for (id, client) in stuck.iter_mut().enumerate() {
        let begun = Instant::now();
        let sync = json!({"execute": "guest-sync", "arguments": {"id": id}}).to_string();
        assert_eq!(client.ask(&sync), json!({"return": id}));
        assert!(begun.elapsed() < AT_ONCE, "{:?}", begun.elapsed());
        answers_at_once(client, "guest-sync");
        client.call("guest-get-host-name");
    }
    let begun = Instant::now();
    kill(Pid::from_raw(agent.child.id().cast_signed()), Signal::SIGTERM).unwrap();
    while agent.child.try_wait().unwrap().is_none() {
        assert!(begun.elapsed() < PATIENCE, "the agent does not end");
        std::thread::sleep(Duration::from_millis(5));
    }
    drop(servers);
    let pid = std::process::id();
    for client in [
        format!(" (pid {pid}, uid 0): guest-file-open ({}): not known:", path.display()),
        format!(" (pid {pid}, uid 0): guest-exec ({}): not known:", program.display()),
    ] {
        assert!(
            agent.log().lines().any(|line| line.contains("audit: ") && line.contains(&client)),
            "{client}"
        );
    }
}

/// guest-file-read asked the file's file system for its kind on the event loop, and no client had an answer any more.
#[test]
fn every_command_may_hang_and_no_other_client_notices() {
    if is_outside() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let disk = Hanging::mount(folder.path());
    let place = folder.path();
    // What commands read of the system is on that disk, too.
    run(&format!(
        "for file in /etc/os-release /etc/localtime /etc/passwd /etc/adjtime /usr/sbin/chpasswd; do
             if [ -e $file ]; then mount --bind {}/x $(realpath $file); fi
         done",
        place.display()
    ));
    let agent = Agent::start();
    // Dropped first, whatever happens: then nothing hangs any more, and the agent can be ended.
    let disk = disk;
    let (mut opener, mut watcher) = (agent.client(), agent.client());
    let handles: Vec<_> = (0..8).map(|_| open(&mut opener, &place.join("file"), "r+")).collect();
    // It answers until now.
    let read = opener.ask(&request("guest-file-read", &json!({"handle": handles[0]})));
    assert_eq!(read["return"]["count"], CONTENTS.len(), "{read}");
    assert_eq!(opener.ask(&request("guest-get-osinfo", &json!({})))["return"]["name"], "hangs");
    disk.hang();

    let file = |place: usize, more: Value| {
        let mut arguments = json!({"handle": handles[place]});
        arguments.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        arguments
    };
    let key = json!({"username": "root", "keys": ["ssh-ed25519 AAAA"]});
    // Left out is what would change or end the machine that the test runs on, and set-time, which is told by adjtime.
    let by_arguments = [
        ("guest-file-read", file(0, json!({}))),
        ("guest-file-read", file(1, json!({"count": 1 << 20}))),
        ("guest-file-seek", file(2, json!({"offset": 0, "whence": "end"}))),
        ("guest-file-seek", file(3, json!({"offset": 1, "whence": "set"}))),
        ("guest-file-write", file(4, json!({"buf-b64": "eHh4"}))),
        ("guest-file-flush", file(5, json!({}))),
        ("guest-file-close", file(6, json!({}))),
        ("guest-file-open", json!({"path": place.join("file")})),
        ("guest-exec", json!({"path": place.join("program")})),
        ("guest-exec-status", json!({"pid": 1})),
        ("guest-set-user-password", json!({"username": "root", "password": "eA==", "crypted": true})),
        ("guest-ssh-get-authorized-keys", json!({"username": "root"})),
        ("guest-ssh-add-authorized-keys", key.clone()),
        ("guest-ssh-remove-authorized-keys", key),
    ];
    let plain = [
        "guest-fsfreeze-thaw",
        "guest-get-cpustats",
        "guest-get-disks",
        "guest-get-diskstats",
        "guest-get-fsinfo",
        "guest-get-host-name",
        "guest-get-load",
        "guest-get-memory-block-info",
        "guest-get-memory-blocks",
        "guest-get-osinfo",
        "guest-get-time",
        "guest-get-timezone",
        "guest-get-users",
        "guest-get-vcpus",
        "guest-info",
        "guest-network-get-interfaces",
        "guest-network-get-route",
    ];
    let all = by_arguments.into_iter().chain(plain.map(|name| (name, json!({}))));
    let mut clients = Vec::new();
    for (command, arguments) in all {
        let mut client = agent.client();
        send(&mut client, command, &arguments);
        // Time for it to begin.
        std::thread::sleep(Duration::from_millis(30));
        answers_at_once(&mut watcher, command);
        clients.push(client);
    }
    wait_until("nothing has asked the disk", || disk.unanswered() > 3);
    // The places of clients that have gone are free, whatever they have left behind.
    drop(clients);
    let more: Vec<_> = (0..60)
        .map(|_| {
            let mut client = agent.client();
            // It may be refused: the agent may not have noticed yet that the others have gone.
            client.try_send(request("guest-get-osinfo", &json!({})).as_bytes());
            client
        })
        .collect();
    drop(more);
    wait_until("no client is let in any more", || {
        let mut client = agent.client();
        client.try_send(b"{\"execute\":\"guest-ping\"}") && client.try_line().is_some()
    });
    answers_at_once(&mut watcher, "many that hang");
    drop(disk);
}

/// A host that comes again and again leaves only so many calls behind.
#[test]
fn what_hangs_is_bounded_however_often_a_client_comes_again() {
    if is_outside() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let disk = Hanging::mount(folder.path());
    let path = folder.path().join("file");
    let agent = Agent::start();
    let disk = disk;
    disk.hang();
    let mut client = agent.client();
    let mut refused = 0;
    let sync = |client: &mut Client, id: usize| {
        client.send(json!({"execute": "guest-sync", "arguments": {"id": id}}).to_string().as_bytes());
        loop {
            let answer = client.answer();
            if answer == json!({"return": id}) {
                return;
            }
            assert!(answer["error"]["desc"].as_str().unwrap().contains("given up"), "{answer}");
        }
    };
    // One client that gives up, and does not go away.
    for round in 0..12 {
        send(&mut client, "guest-file-open", &json!({"path": path}));
        if round >= 8 {
            let answer = client.answer();
            assert!(answer["error"]["desc"].as_str().unwrap().contains("were given up"), "{answer}");
            refused += 1;
        }
        sync(&mut client, round);
        answers_at_once(&mut client, "guest-sync");
    }
    assert_eq!(refused, 4);
    // Another kind of command is as before for everybody else.
    let mut other = agent.client();
    other.call("guest-get-osinfo");
    // The threads that wait for the disk.
    assert!(agent.status("Threads:") < 24, "{}", agent.status("Threads:"));
    drop(disk);
    wait_until("what hung has not ended", || {
        send(&mut client, "guest-file-open", &json!({"path": "/etc/hostname"}));
        client.answer()["return"].is_i64()
    });
}

/// Who starts a program waits until it is executed, which the event loop did.
#[test]
fn a_program_of_the_agents_own_on_a_disk_that_hangs_stops_nobody() {
    if is_outside() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let accounts = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(accounts.path(), "root:x:0:0::/root:/bin/sh\nsomebody:x:4242:4242::/:/bin/sh\n").unwrap();
    let disk = Hanging::mount(folder.path());
    run(&format!(
        "mount --bind {} /etc/passwd; mount --bind {}/x /usr/sbin/chpasswd",
        accounts.path().display(),
        folder.path().display()
    ));
    let agent = Agent::start();
    let disk = disk;
    let (mut client, mut other) = (agent.client(), agent.client());
    disk.hang();
    let arguments = json!({"username": "somebody", "password": "eA==", "crypted": false});
    send(&mut client, "guest-set-user-password", &arguments);
    wait_until("the program was not begun", || disk.unanswered() > 0);
    answers_at_once(&mut other, "guest-set-user-password");
    drop(disk);
    assert!(client.answer()["error"].is_object());
}
