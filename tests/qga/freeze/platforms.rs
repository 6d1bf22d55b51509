//! The commands that each platform sends around its snapshot, in their order, and what its user learns: in time, and when the
//! deadline has ended the freeze before the snapshot was done. docs/freeze.md has the same in a table.

use super::receipts::{milliseconds, newest};
use super::*;

/// What a platform tells its user of a freeze or a thaw.
type Said = Result<(), String>;

/// Asks the agent for a command, as a program that manages its channel does.
type Ask = fn(&mut Client, &Value) -> Value;

/// One platform.
struct Platform {
    name: &'static str,
    freeze: fn(&mut Client) -> Said,
    thaw: fn(&mut Client) -> Said,
    /// Its user is told that a thaw came too late.
    tells: bool,
}

const PLATFORMS: [Platform; 7] = [
    Platform {
        name: "virsh snapshot-create --quiesce",
        freeze: libvirt_freeze,
        thaw: libvirt_thaw,
        tells: true,
    },
    Platform {
        name: "virsh domfsfreeze, domfsthaw",
        freeze: libvirt_freeze,
        thaw: libvirt_thaw,
        tells: true,
    },
    Platform { name: "OpenStack Nova", freeze: libvirt_freeze, thaw: libvirt_thaw, tells: true },
    Platform { name: "Proxmox", freeze: proxmox_freeze, thaw: proxmox_thaw, tells: true },
    Platform { name: "KubeVirt", freeze: kubevirt_freeze, thaw: kubevirt_thaw, tells: false },
    // Its hooks run virt-freezer in the launcher, which asks KubeVirt's launcher for the same.
    Platform { name: "Velero", freeze: kubevirt_freeze, thaw: kubevirt_thaw, tells: false },
    Platform { name: "Harvester", freeze: kubevirt_freeze, thaw: kubevirt_thaw, tells: false },
];

/// A guest-sync before each command, on the one connection that there is.
fn by_libvirt(client: &mut Client, command: &Value) -> Value {
    let id = 1_700_000_000_123_u64;
    let sync = json!({"execute": "guest-sync", "arguments": {"id": id}});
    assert_eq!(client.ask(&format!("{sync}\n")), json!({"return": id}));
    client.ask(&format!("{command}\n"))
}

/// A connection for each command, which begins with a guest-sync-delimited.
fn by_proxmox(_: &mut Client, command: &Value) -> Value {
    let mut client = Client::over(Agent::first_stream());
    let sync = json!({"execute": "guest-sync-delimited", "arguments": {"id": 7}});
    client.send(&[&[0xff], sync.to_string().as_bytes()].concat());
    let is_it = |line: &[u8]| {
        let answer = serde_json::from_slice::<Value>(line.strip_prefix(b"\xff").unwrap_or(line));
        answer.is_ok_and(|answer| answer == json!({"return": 7}))
    };
    // What came before the byte may be answered, too.
    while !is_it(&client.line()) {}
    client.ask(&command.to_string())
}

fn ask(by: Ask, client: &mut Client, name: &str) -> Result<Value, String> {
    let answer = by(client, &json!({"execute": name}));
    match answer.get("return") {
        Some(value) => Ok(value.clone()),
        None => Err(description(&answer).to_owned()),
    }
}

fn libvirt_freeze(client: &mut Client) -> Said {
    ask(by_libvirt, client, "guest-fsfreeze-freeze").map(|count| assert_eq!(count, FILE_SYSTEMS))
}

fn libvirt_thaw(client: &mut Client) -> Said {
    ask(by_libvirt, client, "guest-fsfreeze-thaw").map(|count| assert_eq!(count, FILE_SYSTEMS))
}

fn proxmox_freeze(client: &mut Client) -> Said {
    ask(by_proxmox, client, "guest-ping")?;
    ask(by_proxmox, client, "guest-fsfreeze-freeze").map(|count| assert_eq!(count, FILE_SYSTEMS))
}

fn proxmox_thaw(client: &mut Client) -> Said {
    ask(by_proxmox, client, "guest-fsfreeze-thaw").map(|count| assert_eq!(count, FILE_SYSTEMS))
}

/// One that is frozen already is taken for its own.
fn kubevirt_freeze(client: &mut Client) -> Said {
    match ask(by_libvirt, client, "guest-fsfreeze-status")?.as_str() {
        Some("frozen") => Ok(()),
        _ => libvirt_freeze(client),
    }
}

/// One that is thawed already is not thawed.
fn kubevirt_thaw(client: &mut Client) -> Said {
    match ask(by_libvirt, client, "guest-fsfreeze-status")?.as_str() {
        Some("thawed") => Ok(()),
        _ => libvirt_thaw(client),
    }
}

/// Takes a snapshot: when, on the clock that receipts have.
fn cut() -> u64 {
    let now = nix::time::clock_gettime(nix::time::ClockId::CLOCK_BOOTTIME).unwrap();
    u64::try_from(Duration::from(now).as_millis()).unwrap()
}

#[test]
fn each_platform_that_thaws_in_time_has_its_snapshot_in_the_window() {
    if is_outside() {
        return;
    }
    let agent = Agent::start("");
    for (number, platform) in PLATFORMS.iter().enumerate() {
        let (mut client, name) = (agent.client(), platform.name);
        make_dirty();
        assert_eq!((platform.freeze)(&mut client), Ok(()), "{name}");
        assert!(Writer::to("/b").is_blocked(), "{name}");
        // libvirt and KubeVirt poll it meanwhile.
        assert_eq!(ask(by_libvirt, &mut client, "guest-fsfreeze-status"), Ok("frozen".into()), "{name}");
        let cut = cut();
        assert_eq!((platform.thaw)(&mut client), Ok(()), "{name}");
        nothing_is_frozen();
        let good = newest(number + 1);
        assert_eq!(
            (&good["level"], &good["end"]["how"]),
            (&"filesystem".into(), &"asked".into()),
            "{name}: {good:#}"
        );
        let window = milliseconds(&good, "frozen")..=milliseconds(&good, "thaw_asked");
        assert!(window.contains(&cut), "{name}: {cut} {good:#}");
        assert_eq!(status()["spoiled"], "", "{name}");
    }
}

#[test]
fn each_platform_whose_snapshot_is_too_late_is_told_as_the_documents_say_and_the_receipt_says_crash() {
    if is_outside() {
        return;
    }
    let agent = Agent::start("[qga.freeze]\ndeadline = 1");
    for (number, platform) in PLATFORMS.iter().enumerate() {
        let (mut client, name) = (agent.client(), platform.name);
        assert_eq!((platform.freeze)(&mut client), Ok(()), "{name}");
        let late = newest(number + 1);
        assert_eq!(
            (&late["level"], &late["end"]["how"]),
            (&"crash".into(), &"deadline".into()),
            "{name}: {late:#}"
        );
        let words = "no thaw was requested before the deadline";
        assert!(late["reasons"].to_string().contains(words), "{name}: {late:#}");
        assert!(late["times"].get("thaw_asked").is_none(), "{name}: {late:#}");
        let said = (platform.thaw)(&mut client);
        if platform.tells {
            let words = "the freeze ended by itself after 1 s: the snapshot is not consistent";
            assert_eq!(said, Err(words.to_owned()), "{name}");
        } else {
            // Nothing says so but the guest: until the next freeze, its status.
            assert_eq!(said, Ok(()), "{name}");
            assert!(
                status()["spoiled"].as_str().unwrap().contains("ended by itself"),
                "{name}: {}",
                status()
            );
        }
        nothing_is_frozen();
    }
}

/// Harvester has KubeVirt thaw 1 s after the freeze, whether its snapshot is done or not.
#[test]
fn a_snapshot_after_the_timers_thaw_is_outside_of_the_window() {
    if is_outside() {
        return;
    }
    let agent = Agent::start("");
    let mut client = agent.client();
    assert_eq!(kubevirt_freeze(&mut client), Ok(()));
    std::thread::sleep(Duration::from_secs(1));
    assert_eq!(kubevirt_thaw(&mut client), Ok(()));
    let cut = cut();
    // Its own thaw, after the snapshot, finds nothing to do.
    assert_eq!(kubevirt_thaw(&mut client), Ok(()));
    let receipt = newest(1);
    // It was a thaw like any other.
    assert_eq!(
        (&receipt["level"], &receipt["end"]["how"]),
        (&"filesystem".into(), &"asked".into()),
        "{receipt:#}"
    );
    let thawed = milliseconds(&receipt, "thaw_asked");
    assert!(cut >= thawed, "{cut} {receipt:#}");
    assert!(thawed >= milliseconds(&receipt, "frozen") + 1000, "{receipt:#}");
    let shown = guestlet(&["receipts", "show", receipt["id"].as_str().unwrap()]).1;
    assert!(shown.contains("the caller's log must show the snapshot in it"), "{shown}");
}

/// KubeVirt tries a freeze that fails every 5 s, and takes one that it finds for its own.
#[test]
fn kubevirt_takes_a_freeze_for_its_own_and_its_next_one_forgets_what_became_of_the_last() {
    if is_outside() {
        return;
    }
    std::fs::write("/bin/hook", "#!/bin/sh\n[ $1 = thaw ] || [ ! -e /run/fail ]\n").unwrap();
    inside("busybox chmod 755 /bin/hook");
    let agent = Agent::start("fsfreeze-hook = '/bin/hook'\n[qga.freeze]\ndeadline = 3");
    let (mut client, mut other) = (agent.client(), agent.client());
    // Somebody else's freeze: there is one receipt, and it is theirs.
    assert_eq!(libvirt_freeze(&mut other), Ok(()));
    assert_eq!(kubevirt_freeze(&mut client), Ok(()));
    assert_eq!(kubevirt_thaw(&mut client), Ok(()));
    assert_eq!(newest(1)["level"], "filesystem");
    assert_eq!(ask(by_libvirt, &mut other, "guest-fsfreeze-thaw"), Ok(0.into()));

    // One that fails, one that is late, and one that is good: the last one's thaw is a good one, and each has its receipt.
    std::fs::write("/run/fail", "").unwrap();
    let failed = kubevirt_freeze(&mut client).unwrap_err();
    assert!(failed.contains("the hook /bin/hook failed (exit status: 1)"), "{failed}");
    assert_eq!(newest(2)["end"]["how"], "failed");
    std::fs::remove_file("/run/fail").unwrap();
    assert_eq!(kubevirt_freeze(&mut client), Ok(()));
    assert_eq!(newest(3)["end"]["how"], "deadline");
    assert_eq!(kubevirt_thaw(&mut client), Ok(()));
    assert_eq!(kubevirt_freeze(&mut client), Ok(()));
    assert_eq!(kubevirt_thaw(&mut client), Ok(()));
    assert_eq!(newest(4)["level"], "filesystem");
    nothing_is_frozen();
}
