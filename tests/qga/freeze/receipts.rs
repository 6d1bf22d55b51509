//! What freezes leave behind: receipts that say what a snapshot is worth, and nothing better than that.

use super::guestctl::{Host, ctl, fails, said, until};
use super::*;

/// Where the agent keeps them unless it is told otherwise.
const KEPT: &str = "/var/lib/guestlet/receipts";

/// What `guestlet receipts` says, as JSON.
fn receipts(words: &[&str]) -> Value {
    let (_, said) = guestlet(&[&["receipts"], words, &["-o", "json"]].concat());
    serde_json::from_str(&said).unwrap_or_else(|error| panic!("{error}: {said}"))
}

/// The newest receipt, once there are so many.
pub fn newest(count: usize) -> Value {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let list = receipts(&["ls"]);
        let list = list.as_array().unwrap();
        if list.len() == count && std::fs::read_dir(KEPT).is_ok_and(|files| files.count() == count) {
            // Two of one second have no order.
            let shown =
                list.iter().map(|one| receipts(&["show", one["id"].as_str().unwrap()])["receipt"].clone());
            let time = |receipt: &Value| receipt["times"]["asked"]["boottime_ms"].as_u64();
            return shown.max_by_key(time).unwrap();
        }
        assert!(Instant::now() < deadline, "{count} receipts: {list:?} {}", Agent::log());
        std::thread::sleep(Duration::from_millis(20));
    }
}

pub fn milliseconds(receipt: &Value, name: &str) -> u64 {
    receipt["times"][name]["boottime_ms"].as_u64().unwrap_or_else(|| panic!("{name}: {receipt:#}"))
}

fn reasons(receipt: &Value) -> String {
    receipt["reasons"].to_string()
}

#[test]
fn each_end_of_a_freeze_leaves_a_receipt_that_tells_it() {
    if is_outside() {
        return;
    }
    std::fs::write("/bin/hook", "#!/bin/sh\n[ ! -e /run/fail ] || exit 3\n").unwrap();
    inside("busybox chmod 755 /bin/hook");
    let agent = Agent::start("fsfreeze-hook = '/bin/hook'");
    let mut client = agent.client();
    // Nobody has frozen anything: there is nothing to tell.
    assert_eq!(client.call("guest-fsfreeze-thaw"), 0);
    assert_eq!(receipts(&["ls"]), json!([]));

    client.call("guest-fsfreeze-freeze");
    assert!(Writer::to("/a").is_blocked());
    client.call("guest-fsfreeze-thaw");
    let good = newest(1);
    assert_eq!((&good["level"], &good["end"]["how"]), (&"filesystem".into(), &"asked".into()), "{good:#}");
    assert!(reasons(&good).contains("a hook was run, but nothing proves"), "{good:#}");
    assert_eq!((&good["caller"]["over"], &good["hooks"]), (&"qga".into(), &json!(["/bin/hook"])));
    let order = ["asked", "hooks_begun", "hooks_ended", "frozen", "thaw_asked", "thawed"];
    let times = order.map(|name| milliseconds(&good, name));
    assert!(times.is_sorted(), "{times:?}");
    let volumes = good["volumes"].as_array().unwrap();
    let volume = |place: &str| {
        volumes.iter().find(|one| one["mount_point"] == place).unwrap_or_else(|| panic!("{good:#}"))
    };
    assert_eq!(volumes.len() as u64, FILE_SYSTEMS);
    assert_eq!((&volume("/b")["kind"], &volume("/b")["level"]), (&"xfs".into(), &"filesystem".into()));
    assert!(volume("/inner")["device"].as_str().unwrap().starts_with("7:"), "{good:#}");
    let shown = guestlet(&["receipts", "show", good["id"].as_str().unwrap()]).1;
    assert!(shown.contains("Snapshot:      window ") && shown.contains("unsigned"), "{shown}");

    // Some of them: the others are told, with the reason.
    let some =
        json!({"execute": "guest-fsfreeze-freeze-list", "arguments": {"mountpoints": ["/b"]}}).to_string();
    assert_eq!(client.ask(&some), json!({"return": 1}));
    client.call("guest-fsfreeze-thaw");
    let some = newest(2);
    assert_eq!(some["volumes"].as_array().unwrap().len(), 1, "{some:#}");
    let others = some["not_frozen"].as_array().unwrap();
    assert!(
        others.iter().any(|one| one["mount_point"] == "/a" && one["reason"] == "not requested"),
        "{some:#}"
    );

    // A person; a hook that fails; a thaw that comes while nothing is frozen yet is none.
    client.call("guest-fsfreeze-freeze");
    assert!(guestlet(&["thaw"]).0);
    let person = newest(3);
    assert_eq!((&person["level"], &person["end"]["how"]), (&"crash".into(), &"person".into()), "{person:#}");
    assert!(description(&client.ask(THAW)).contains("by a person"));
    std::fs::write("/run/fail", "").unwrap();
    assert!(description(&client.ask(FREEZE)).contains("exit status: 3"));
    let failed = newest(4);
    assert_eq!((&failed["level"], &failed["end"]["how"]), (&"crash".into(), &"failed".into()), "{failed:#}");
    assert!(reasons(&failed).contains("the hook /bin/hook failed"), "{failed:#}");
    let is_told =
        |line: &str| line.contains("WARN not frozen for /run/qga.sock") && line.ends_with("(exit status: 3)");
    assert!(Agent::log().lines().any(is_told), "{}", Agent::log());
    std::fs::remove_file("/run/fail").unwrap();

    // Another one holds a file system: what became of it, nobody knows.
    let held = std::fs::File::open("/inner").unwrap();
    // SAFETY: FIFREEZE takes no argument that the kernel would read.
    unsafe { fifreeze(held.as_raw_fd(), 0) }.unwrap();
    assert_eq!(client.call("guest-fsfreeze-freeze"), FILE_SYSTEMS - 1);
    client.call("guest-fsfreeze-thaw");
    let held = newest(5);
    assert_eq!(held["level"], "crash", "{held:#}");
    assert!(reasons(&held).contains("/inner: it had been frozen by somebody else"), "{held:#}");
    nothing_is_frozen();
}

#[test]
fn a_freeze_that_is_over_too_soon_has_a_receipt_that_says_crash() {
    if is_outside() {
        return;
    }
    let agent = Agent::start("[qga.freeze]\ndeadline = 1");
    agent.client().call("guest-fsfreeze-freeze");
    let late = newest(1);
    assert_eq!((&late["level"], &late["end"]["how"]), (&"crash".into(), &"deadline".into()), "{late:#}");
    assert!(late["volumes"].as_array().unwrap().iter().all(|one| one["level"] == "crash"), "{late:#}");
    assert!(description(&agent.client().ask(THAW)).contains("ended by itself"));
    agent.kill();

    // Killed while all is frozen; then with nobody left but the next run.
    for (count, with_guardian) in [(2, true), (3, false)] {
        let settings = std::fs::read_to_string("/run/agent.toml").unwrap();
        std::fs::write("/run/agent.toml", settings.replace("deadline = 1\n", "deadline = 120\n")).unwrap();
        let agent = Agent::again();
        assert_eq!(agent.client().call("guest-fsfreeze-freeze"), FILE_SYSTEMS);
        kill(Pid::from_raw(agent.child.id().cast_signed()), Signal::SIGSTOP).unwrap();
        if !with_guardian {
            for guardian in guardians() {
                kill(Pid::from_raw(guardian), Signal::SIGKILL).unwrap();
            }
        }
        agent.kill();
        if with_guardian {
            nothing_is_frozen();
            let deadline = Instant::now() + PATIENCE;
            while std::path::Path::new("/run/qga.state.isfrozen").exists() {
                assert!(Instant::now() < deadline, "the marker is left behind");
                std::thread::sleep(Duration::from_millis(5));
            }
            assert_eq!(std::fs::read_dir(KEPT).unwrap().count(), count - 1, "nobody has filed it");
        }
        let agent = Agent::again();
        let answer = agent.client().ask(THAW);
        let receipt = newest(count);
        if with_guardian {
            assert!(description(&answer).contains("the agent crashed"), "{answer}");
            assert_eq!(
                (&receipt["level"], &receipt["end"]["how"]),
                (&"crash".into(), &"crash".into()),
                "{receipt:#}"
            );
        } else {
            // It stayed frozen until the thaw.
            assert_eq!(answer, json!({"return": FILE_SYSTEMS}));
            assert_eq!(
                (&receipt["level"], &receipt["end"]["how"]),
                (&"filesystem".into(), &"asked".into()),
                "{receipt:#}"
            );
        }
        assert_eq!(receipt["volumes"].as_array().unwrap().len() as u64, FILE_SYSTEMS, "{receipt:#}");
        assert_eq!(receipt["caller"]["over"], "qga", "{receipt:#}");
        nothing_is_frozen();
    }
}

/// Its guardian thaws 10 s after the deadline.
#[test]
fn an_agent_that_hangs_has_its_freeze_ended_and_told_by_its_next_run() {
    if is_outside() {
        return;
    }
    for (count, is_killed) in [(1, true), (2, false)] {
        let agent = Agent::start("[qga.freeze]\ndeadline = 1");
        assert_eq!(agent.client().call("guest-fsfreeze-freeze"), FILE_SYSTEMS);
        let process = Pid::from_raw(agent.child.id().cast_signed());
        kill(process, Signal::SIGSTOP).unwrap();
        assert!(Writer::to("/a").is_blocked());
        nothing_is_frozen();
        until("the guardian has ended", || guardians().is_empty());
        assert!(!std::path::Path::new("/run/qga.state.isfrozen").exists(), "the marker is left behind");
        if is_killed {
            agent.kill();
            let agent = Agent::again();
            let late = agent.client().ask(THAW);
            let words = "the agent hung, and its guardian ended the freeze: the snapshot is not consistent";
            assert_eq!(description(&late), words);
            let hung = newest(count);
            assert_eq!((&hung["level"], &hung["end"]["how"]), (&"crash".into(), &"hang".into()), "{hung:#}");
            assert!(reasons(&hung).contains("its guardian did"), "{hung:#}");
            let _host = Host::start();
            let receipt = format!("receipt {}: crash", hung["id"].as_str().unwrap());
            until("the host half knows", || {
                let words = said(&["info", "a"]);
                words.contains("because the agent hung") && words.contains(&receipt)
            });
        } else {
            // It goes on, and is as late as its guardian was.
            kill(process, Signal::SIGCONT).unwrap();
            until("the agent has ended its freeze", || status()["stage"] == "thawed");
            assert!(description(&agent.client().ask(THAW)).contains("the snapshot is not consistent"));
            assert_eq!(newest(count)["level"], "crash");
        }
    }
}

#[test]
fn whenever_the_agent_is_killed_each_freeze_has_one_receipt_and_none_says_too_much() {
    if is_outside() {
        return;
    }
    for round in 0..10_u64 {
        let agent = if round == 0 { Agent::start("") } else { Agent::again() };
        let mut client = agent.client();
        make_dirty();
        client.send(FREEZE.as_bytes());
        if round >= 6 {
            client.answer();
            client.send(THAW.as_bytes());
        }
        std::thread::sleep(Duration::from_millis(round % 6 * 15));
        agent.kill();
        nothing_is_frozen();
    }
    let agent = Agent::again();
    agent.client().ask(THAW);
    let list = receipts(&["ls"]);
    let list = list.as_array().unwrap();
    assert!(!list.is_empty() && list.len() <= 10, "{list:?}");
    for one in list {
        let receipt = &receipts(&["show", one["id"].as_str().unwrap()])["receipt"];
        let times = &receipt["times"];
        let proved =
            receipt["end"]["how"] == "asked" && times["frozen"].is_object() && times["thawed"].is_object();
        assert_eq!(receipt["level"] == "filesystem", proved, "{receipt:#}");
    }
}

#[test]
fn a_receipt_that_cannot_be_kept_is_kept_later_and_the_thaw_is_a_good_one() {
    if is_outside() {
        return;
    }
    inside("busybox mkdir -p /var/lib/guestlet; touch /var/lib/guestlet/receipts");
    let agent = Agent::start("");
    let mut client = agent.client();
    for _ in 0..3 {
        assert_eq!(client.call("guest-fsfreeze-freeze"), FILE_SYSTEMS);
        assert_eq!(client.call("guest-fsfreeze-thaw"), FILE_SYSTEMS);
    }
    let deadline = Instant::now() + PATIENCE;
    while !Agent::log().contains("cannot write the receipt") {
        assert!(Instant::now() < deadline, "{}", Agent::log());
        std::thread::sleep(Duration::from_millis(20));
    }
    client.call("guest-fsfreeze-freeze");
    std::fs::remove_file(KEPT).unwrap();
    client.call("guest-fsfreeze-thaw");
    assert_eq!(newest(4)["level"], "filesystem");
}

#[test]
fn what_is_edited_on_the_disk_is_noticed() {
    if is_outside() {
        return;
    }
    // Whose key it is does not count: with one the guest has a key of its own, and signs.
    let key = "ed25519:MCowBQYDK2VwAyEAcuHX3aaVsbQygH5vGG1ph7N3I6kp84R4mW38YFMiq4Q=\n";
    std::fs::create_dir("/run/hosts.d").unwrap();
    std::fs::write("/run/hosts.d/host.pub", key).unwrap();
    let agent = Agent::start("[qga.freeze]\ndeadline = 1");
    let mut client = agent.client();
    client.call("guest-fsfreeze-freeze");
    let id = newest(1)["id"].as_str().unwrap().to_owned();
    let (is_good, words) = guestlet(&["receipts", "verify", &id]);
    assert!(is_good && words.contains("crash\nsigned by SHA256:"), "{words}");
    assert!(words.contains("the key of this guest"), "{words}");

    let entry = std::fs::read_dir(KEPT).unwrap().next().unwrap().unwrap().path();
    let written = std::fs::read_to_string(&entry).unwrap();
    let check = |text: &str, verdict: &str| {
        std::fs::write(&entry, text).unwrap();
        for what in [&*id, entry.to_str().unwrap()] {
            let (is_good, words) = guestlet(&["receipts", "verify", what]);
            assert!(!is_good && words.contains(verdict), "{verdict}: {words}");
        }
        assert_eq!(receipts(&["ls"])[0]["verdict"], verdict, "{text}");
    };
    let better = written.replacen(r#"\"level\":\"crash\""#, r#"\"level\":\"application\""#, 1);
    assert_ne!(better, written);
    check(&better, "altered");
    let bare: Value = serde_json::from_str(&written).unwrap();
    check(&json!({"guestlet-receipt": 1, "document": bare["document"]}).to_string(), "unsigned");
    check("", "unreadable");
    check(&"[".repeat(20_000), "unreadable");
    check(&written[..written.len() / 2], "unreadable");
    std::fs::write(&entry, &written).unwrap();
    assert!(guestlet(&["receipts", "verify", &id]).0);
    let (_, words) = guestlet(&["receipts", "show", "../../etc/passwd"]);
    assert!(words.contains("is not the id of a receipt"), "{words}");
}

#[test]
fn people_on_the_host_are_told_what_their_snapshot_is_worth() {
    if is_outside() {
        return;
    }
    let agent = Agent::start("[qga.freeze]\ndeadline = 60");
    let _host = Host::start();
    let around = |words: &[&str]| ctl(&[&["freeze", "a"], words].concat());
    let done = around(&["--require", "filesystem", "--snapshot", "vg/snap", "--", "touch", "/run/cut"]);
    let why = String::from_utf8_lossy(&done.stderr).into_owned();
    assert!(done.status.success() && why.contains(": filesystem\n"), "{done:?}");
    assert!(why.contains("not more than filesystem: no application took part"), "{why}");
    let good = newest(1);
    assert_eq!(
        (&good["level"], &good["caller"]["over"]),
        (&"filesystem".into(), &"guestlet".into()),
        "{good:#}"
    );
    assert_eq!((&good["cut"]["text"], &good["cut"]["exit_status"]), (&"touch".into(), &0.into()));
    let id = good["id"].as_str().unwrap();
    assert!(why.contains(&format!("receipt {id}: filesystem")), "{why}");

    // More than there is; and a command that fails is no snapshot.
    let (code, why) = fails(&["freeze", "a", "--require", "application", "--", "touch", "/run/cut"]);
    assert!(
        code == 1 && why.contains("application is required, but the snapshot is not more than filesystem"),
        "{why}"
    );
    let (code, why) = fails(&["freeze", "a", "--", "sh", "-c", "exit 7"]);
    assert!(code == 7 && why.contains(": crash\n") && why.contains("(exit status 7)"), "{why}");
    assert_eq!(newest(3)["level"], "crash");

    // They are listed and shown; without keys nothing is proved.
    let list: Value = serde_json::from_str(&said(&["receipts", "ls", "a", "-o", "json"])).unwrap();
    assert_eq!(list.as_array().unwrap().len(), 3, "{list}");
    assert!(said(&["receipts", "show", "a", id]).contains("vg/snap: touch, "), "it tells of the snapshot");
    let (code, why) = fails(&["receipts", "verify", "a", id]);
    assert!(code == 1 && why.contains("there is no proof"), "{why}");
    let none = "0".repeat(32);
    let (code, why) = fails(&["receipts", "show", "a", &none]);
    assert!(code == 1 && why.contains("has no receipt"), "{why}");
    let (_, why) = fails(&["receipts", "show", "a", "x"]);
    assert!(why.contains("32 hexadecimal digits"), "{why}");

    // Whoever thaws by hand, and whoever only looks, is told as well.
    said(&["freeze", "a"]);
    let words = said(&["thaw", "a"]);
    let id = newest(4)["id"].as_str().unwrap().to_owned();
    assert_eq!(words, format!("thawed: {FILE_SYSTEMS} file systems\nreceipt {id}: filesystem\n"));
    until("the host half knows", || said(&["info", "a"]).contains(&format!("receipt {id}: filesystem")));
    drop(agent);
}
