//! Freezes of a whole Debian, its root and its journal with it, under systemd. A port has one client at a time, so each
//! goes before the next one comes.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::harness::host::{HostHalf, Listed};
use crate::harness::qga::QgaClient;
use crate::harness::vm::{SOON, Vm};
use crate::harness::wait_for;
use crate::real;

fn main_process(vm: &Vm) -> String {
    vm.run("systemctl show --value --property MainPID guestlet").unwrap().trim().to_owned()
}

/// Begins to write to the root file system, in the background.
fn write(vm: &Vm, name: &str) {
    vm.run(&format!(
        "(echo data > /root/{name} && sync /root/{name} && touch /run/{name}) > /dev/null 2>&1 &"
    ))
    .unwrap();
}

fn is_written(vm: &Vm, name: &str) -> bool {
    vm.run(&format!("test -e /run/{name}")).is_ok()
}

fn wait_written(vm: &Vm, name: &str) {
    wait_for(&format!("end of the write of {name}"), SOON, || is_written(vm, name).then_some(())).unwrap();
}

/// Freezes, and makes sure that it is so.
fn freeze(vm: &Vm, client: &mut QgaClient, name: &str) {
    let frozen = client.execute("guest-fsfreeze-freeze", json!({})).unwrap();
    assert!(frozen.as_u64().unwrap() >= 1, "{frozen}");
    write(vm, name);
    // The journal has something to write, too.
    vm.run("logger a line that cannot be written now").unwrap();
    std::thread::sleep(Duration::from_millis(500));
    assert!(!is_written(vm, name), "the root is not frozen");
}

fn status(vm: &Vm) -> Value {
    serde_json::from_str(&vm.run("guestlet status -o json").unwrap()).unwrap()
}

fn set_deadline(vm: &Vm, seconds: u32) {
    vm.write("/etc/guestlet/agent.d/freeze.toml", format!("[qga.freeze]\ndeadline = {seconds}\n").as_bytes())
        .unwrap();
    vm.run("systemctl restart guestlet").unwrap();
}

#[test]
fn a_whole_guest_is_frozen_and_thawed_while_its_agent_answers() {
    let vm = real("frozen");
    let mut client = vm.qga().unwrap();
    for round in ["one", "two"] {
        freeze(&vm, &mut client, round);
        let begun = Instant::now();
        for _ in 0..20 {
            client.execute("guest-ping", json!({})).unwrap();
        }
        println!("20 pings of a frozen guest: {:?}", begun.elapsed());
        assert_eq!(client.execute("guest-fsfreeze-status", json!({})).unwrap(), "frozen");
        let refused = client.execute("guest-get-host-name", json!({})).unwrap_err().to_string();
        assert!(refused.contains("CommandNotFound"), "{refused}");
        assert_eq!(status(&vm)["freeze"]["stage"], "frozen");
        assert!(client.execute("guest-fsfreeze-thaw", json!({})).unwrap().as_u64().unwrap() >= 1);
        wait_written(&vm, round);
    }

    // Nobody thaws: it ends by itself, and the thaw that comes late is told.
    drop(client);
    set_deadline(&vm, 8);
    let mut client = vm.qga().unwrap();
    freeze(&vm, &mut client, "deadline");
    wait_written(&vm, "deadline");
    let late = client.execute("guest-fsfreeze-thaw", json!({})).unwrap_err().to_string();
    assert!(late.contains("ended by itself after 8 s"), "{late}");
    assert_eq!(client.execute("guest-fsfreeze-thaw", json!({})).unwrap(), 0);
    drop(client);
    people_on_the_host(&vm);
}

/// The same, and the end of the guest, by guestctl.
fn people_on_the_host(vm: &Vm) {
    let host = HostHalf::start(&[Listed::of(vm)]).unwrap();
    host.wait_connected("frozen", SOON).unwrap();
    let during = ["freeze", "frozen", "--", "sh", "-c", "sleep 1; echo snapshot"];
    assert_eq!(host.ctl(&during).unwrap(), "snapshot\n");
    receipt(vm, &host);
    let frozen = host.ctl(&["freeze", "frozen"]).unwrap();
    assert!(frozen.starts_with("frozen: /") && frozen.contains("thaws by itself after"), "{frozen}");
    write(vm, "people");
    wait_written(vm, "people");
    let late = host.ctl(&["thaw", "frozen"]).unwrap_err().to_string();
    assert!(late.contains("ended by itself after 8 s: the snapshot is not consistent"), "{late}");

    let before = vm.boot_id().unwrap();
    let begun = Instant::now();
    host.ctl(&["reboot", "frozen", "--wait"]).unwrap();
    println!("another boot {:?} after guestctl reboot", begun.elapsed());
    let seen = host.info("frozen").unwrap();
    assert_ne!(seen["guest"]["boot_id"], before.as_str());
    let begun = Instant::now();
    assert_eq!(host.ctl(&["shutdown", "frozen", "--wait"]).unwrap(), "frozen is off\n");
    println!("off {:?} after guestctl shutdown", begun.elapsed());
    assert_eq!(host.info("frozen").unwrap()["power"], "off");
}

/// Of that snapshot: what the guest has kept of it on its own disk, and the host half can read.
fn receipt(vm: &Vm, host: &HostHalf) {
    let list = host.ctl(&["receipts", "ls", "frozen", "-o", "json"]).unwrap();
    let list: Value = serde_json::from_str(&list).unwrap();
    let newest = list.as_array().unwrap().last().unwrap();
    assert_eq!((&newest["level"], &newest["end"]), (&"filesystem".into(), &"asked".into()), "{list}");
    let id = newest["id"].as_str().unwrap();
    let shown: Value =
        serde_json::from_str(&host.ctl(&["receipts", "show", "frozen", id, "-o", "json"]).unwrap()).unwrap();
    let root =
        shown["receipt"]["volumes"].as_array().unwrap().iter().find(|one| one["mount_point"] == "/").unwrap();
    let uuid = vm.run("findmnt --noheadings --output UUID /").unwrap();
    assert_eq!(root["uuid"], uuid.trim(), "{shown:#}");
    assert!(root["disks"].as_array().unwrap().iter().any(|disk| disk["file"] == "/dev/vda"), "{shown:#}");
    assert!(shown["receipt"]["cut"]["text"].as_str().unwrap().contains("sh"), "{shown:#}");
    let kept =
        vm.run(&format!("ls /var/lib/guestlet/receipts/*-{id}.json; guestlet receipts show {id}")).unwrap();
    assert!(kept.contains("filesystem"), "{kept}");
}

#[test]
fn an_agent_that_is_killed_or_restarted_leaves_nothing_frozen() {
    let vm = real("killed");
    // With its guardian, and both at once: then it is the service manager who thaws.
    for (name, others) in [("guarded", ""), ("unguarded", "$(pgrep -f '[t]haw --guard')")] {
        let mut client = vm.qga().unwrap();
        freeze(&vm, &mut client, name);
        let before = main_process(&vm);
        let begun = Instant::now();
        vm.run(&format!("kill -9 {others} {before}")).unwrap();
        wait_written(&vm, name);
        println!("{name}: written {:?} after the kill", begun.elapsed());
        if !others.is_empty() {
            wait_for("word of the service manager's thaw", SOON, || {
                vm.run(
                    "journalctl --unit guestlet | grep 'the agent is not running; thawed 1 file systems: /'",
                )
                .ok()
            })
            .unwrap();
        }
        wait_for("another agent", SOON, || {
            let now = main_process(&vm);
            (now != before && now != "0").then_some(())
        })
        .unwrap();
        drop(client);
        let mut client = vm.qga().unwrap();
        assert_eq!(client.execute("guest-fsfreeze-status", json!({})).unwrap(), "thawed");
        let late = client.execute("guest-fsfreeze-thaw", json!({})).unwrap_err().to_string();
        assert!(late.contains("the agent crashed"), "{late}");
        assert_eq!(client.execute("guest-fsfreeze-thaw", json!({})).unwrap(), 0);
    }

    // A restart waits for the thaw.
    let mut client = vm.qga().unwrap();
    freeze(&vm, &mut client, "restart");
    let before = main_process(&vm);
    vm.run("systemctl restart --no-block guestlet").unwrap();
    std::thread::sleep(Duration::from_secs(3));
    assert_eq!(main_process(&vm), before, "the agent did not wait");
    client.execute("guest-ping", json!({})).unwrap();
    assert!(client.execute("guest-fsfreeze-thaw", json!({})).unwrap().as_u64().unwrap() >= 1);
    wait_written(&vm, "restart");
    wait_for("another agent", SOON, || (main_process(&vm) != before).then_some(())).unwrap();

    // Or for the deadline.
    drop(client);
    set_deadline(&vm, 8);
    let mut client = vm.qga().unwrap();
    freeze(&vm, &mut client, "stop");
    vm.run("systemctl stop --no-block guestlet").unwrap();
    wait_written(&vm, "stop");
    drop(client);
    vm.run("systemctl start guestlet").unwrap();
    let late = vm.qga().unwrap().execute("guest-fsfreeze-thaw", json!({})).unwrap_err().to_string();
    assert!(late.contains("ended by itself"), "{late}");
}
