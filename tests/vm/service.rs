//! The package in a real guest: its units, its log, its restarts, and who may reach its port.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::harness::host::{HostHalf, Listed};
use crate::harness::launch::Options;
use crate::harness::snapshot::install;
use crate::harness::tools;
use crate::harness::turns;
use crate::harness::vm::{SOON, Vm};
use crate::harness::wait_for;
use crate::{images, installed, real};

fn property(vm: &Vm, unit: &str, name: &str) -> String {
    vm.run(&format!("systemctl show --value --property {name} {unit}")).unwrap().trim().to_owned()
}

fn agent_id(vm: &Vm) -> String {
    property(vm, "guestlet.service", "MainPID")
}

/// What `guestlet doctor` finds in a guest. Its status says the same.
pub fn doctor(vm: &Vm) -> Value {
    let (status, said) = vm.console().run("guestlet doctor -o json", SOON).unwrap();
    let doctor: Value = serde_json::from_str(&said).unwrap_or_else(|error| panic!("{error}: {said}"));
    assert_eq!(status, if doctor["wrong"] == true { 5 } else { 0 }, "{doctor:#}");
    doctor
}

/// How well it is with one subject of the doctor's.
pub fn level(doctor: &Value, subject: &str) -> Value {
    finding(doctor, subject)["level"].clone()
}

/// What the doctor says of one subject.
fn says<'d>(doctor: &'d Value, subject: &str) -> &'d str {
    finding(doctor, subject)["says"].as_str().unwrap()
}

fn finding<'d>(doctor: &'d Value, subject: &str) -> &'d Value {
    let findings = doctor["findings"].as_array().unwrap();
    let finding = findings.iter().find(|found| found["subject"] == subject);
    finding.unwrap_or_else(|| panic!("nothing of {subject}: {doctor:#}"))
}

#[test]
fn the_units_are_valid_and_the_log_is_in_the_journal() {
    let vm = real("units");
    vm.run("systemd-analyze verify --man=no guestlet.service guestlet.socket").unwrap();
    assert_eq!(property(&vm, "guestlet.service", "UnitFileState"), "enabled");
    assert_eq!(property(&vm, "guestlet.socket", "UnitFileState"), "enabled");
    assert_eq!(property(&vm, "guestlet.socket", "Listen"), "vsock::970 (Stream)");
    let journal = vm.run("journalctl --unit guestlet --output cat --identifier guestlet").unwrap();
    assert!(journal.contains("started"), "{journal}");
    assert_eq!(vm.run("journalctl --unit guestlet --output cat --priority err").unwrap(), "");
    let units = "guestlet.service guestlet.socket";
    let said = vm.run(&format!("systemctl disable {units}; systemctl enable {units} 2>&1")).unwrap();
    assert!(!said.contains("non-existent"), "{said}");
}

#[test]
fn an_idle_agent_sleeps() {
    const WATCHED: Duration = Duration::from_secs(20);
    let _alone = turns::alone();
    let vm = real("idle");
    let id = agent_id(&vm);
    let wakeups = || -> BTreeMap<u32, u32> {
        let text = vm.run(&format!("grep -H ^voluntary_ctxt_switches: /proc/{id}/task/*/status")).unwrap();
        let count = |line: &str| {
            let (file, count) = line.split_once(":voluntary_ctxt_switches:")?;
            Some((file.split('/').nth(4)?.parse().ok()?, count.trim().parse().ok()?))
        };
        text.lines().filter_map(count).collect()
    };
    // A restored guest has no file in its memory. The first tick would read the program from the disk page by page, and the
    // kernel counts each wait for a page as it counts a sleep: with QEMU 7.2 that was most of 11.
    let files = format!("awk '$6 ~ /^\\// {{ print $6 }}' /proc/{id}/maps | sort -u | xargs cat > /dev/null");
    vm.run(&files).unwrap();
    std::thread::sleep(Duration::from_secs(1));
    let before = wakeups();
    assert!(!before.is_empty());
    std::thread::sleep(WATCHED);
    // A thread that has nothing to do for long ends.
    let woken: u32 =
        wakeups().iter().map(|(thread, count)| count - before.get(thread).copied().unwrap_or_default()).sum();
    let memory = vm.run(&format!("grep -E '^Rss(Anon|File):|^VmRSS:' /proc/{id}/status")).unwrap();
    println!("{woken} wakeups in {WATCHED:?}; {}", memory.split_whitespace().collect::<Vec<_>>().join(" "));
    assert!(woken <= 6, "{woken} wakeups in {WATCHED:?}");
}

#[test]
fn a_killed_agent_is_back() {
    let vm = real("agent");
    let host = HostHalf::start(&[Listed::of(&vm)]).unwrap();
    let (before, _) = host.wait_connected("agent", SOON).unwrap();
    assert_eq!(before["guest"]["os"]["id"], "debian");
    let id = agent_id(&vm);
    vm.run(&format!("kill -9 {id}")).unwrap();
    let sessions = before["sessions"].as_u64().unwrap();
    let (after, took) = host
        .wait("agent", "connected again", SOON, |now| {
            now["session"] == "connected" && now["sessions"].as_u64() > Some(sessions)
        })
        .unwrap();
    println!("back {took:?} after the kill");
    assert_eq!(after["guest"]["boot_id"], before["guest"]["boot_id"]);
    assert_ne!(agent_id(&vm), id);
    vm.qga().unwrap().execute("guest-ping", json!({})).unwrap();
}

#[test]
fn the_port_is_held_across_a_stop_and_an_upgrade() {
    let vm = real("upgrade");
    // The first descriptor that the service manager passes.
    let socket = || vm.run(&format!("readlink /proc/{}/fd/3", agent_id(&vm))).unwrap();
    let held = socket();
    let id = agent_id(&vm);
    install(&vm, &tools::package().unwrap()).unwrap();
    assert_ne!(agent_id(&vm), id, "the new agent runs");
    assert_eq!(socket(), held, "the port was never free");
    vm.run("dpkg --purge guestlet && ! systemctl is-active --quiet guestlet.socket && ! pidof guestlet")
        .unwrap();
    assert_eq!(vm.run("ls /etc/systemd/system/*.wants | grep guestlet || :").unwrap(), "");
}

#[test]
fn programs_in_the_guest_itself_are_refused() {
    let vm = real("insider");
    let script = "import socket\n\
        for source in 999, 40000:\n\
        \x20 s = socket.socket(socket.AF_VSOCK); s.settimeout(10)\n\
        \x20 s.bind((socket.VMADDR_CID_ANY, source)); s.connect((1, 970))\n\
        \x20 try: s.sendall(b'PRI * HTTP/2.0\\r\\n\\r\\nSM\\r\\n\\r\\n' + bytes(9)); print('answer', s.recv(99))\n\
        \x20 except (ConnectionError, BrokenPipeError) as e: print('answer', b'')\n";
    vm.run("modprobe vsock_loopback").unwrap();
    vm.write("/tmp/insider.py", script.as_bytes()).unwrap();
    let said = vm.run("python3 /tmp/insider.py").unwrap();
    assert_eq!(said, "answer b''\nanswer b''\n");
    // The host is still let in.
    let host = HostHalf::start(&[Listed::of(&vm)]).unwrap();
    host.wait_connected("insider", SOON).unwrap();
}

fn unplug_port(vm: &Vm, device: &str) {
    vm.qmp().execute("device_del", json!({ "id": device })).unwrap();
    vm.qmp().wait_event("DEVICE_DELETED", SOON).unwrap();
}

fn plug_port(vm: &Vm) {
    let name = "org.qemu.guest_agent.0";
    let port = json!({ "driver": "virtserialport", "id": "port", "bus": "serial0.0", "nr": 1, "chardev": "qga", "name": name });
    vm.qmp().execute("device_add", port).unwrap();
}

#[test]
fn it_boots_without_any_channel_and_serves_each_that_comes() {
    let mut vm = Options::named("late").without_vsock().restored(images(), installed()).unwrap();
    let anonymous = "/machine/peripheral-anon";
    let devices = vm.qmp().execute("qom-list", json!({ "path": anonymous })).unwrap();
    let port = devices.as_array().unwrap().iter().find(|device| device["type"] == "child<virtserialport>");
    unplug_port(&vm, &format!("{anonymous}/{}", port.unwrap()["name"].as_str().unwrap()));
    vm.run("sync").unwrap();
    vm.reset_and_wait().unwrap();
    vm.run("systemctl is-system-running --wait || :").unwrap();
    let active = vm.run("systemctl is-active guestlet.service guestlet.socket").unwrap();
    assert_eq!(active, "active\nactive\n");
    assert_eq!(property(&vm, "guestlet.service", "NRestarts"), "0");
    let told = doctor(&vm);
    assert_eq!((level(&told, "QGA"), level(&told, "vsock")), (json!("wrong"), json!("note")), "{told:#}");
    let id = agent_id(&vm);

    vm.replug_vsock().unwrap();
    let host = HostHalf::start(&[Listed::of(&vm)]).unwrap();
    let (_, took) = host.wait_connected("late", SOON).unwrap();
    println!("held {took:?} after vsock was plugged");
    plug_port(&vm);
    vm.qga().unwrap().execute("guest-ping", json!({})).unwrap();
    assert_eq!(agent_id(&vm), id, "one process all along");

    // What was stopped stays so, whatever is plugged, until it is started.
    unplug_port(&vm, "port");
    vm.run("systemctl stop guestlet.socket guestlet.service && ! pidof guestlet").unwrap();
    plug_port(&vm);
    vm.run("udevadm settle && ! systemctl is-active guestlet.service").unwrap();
    vm.run("systemctl start guestlet.service").unwrap();
    vm.qga().unwrap().execute("guest-ping", json!({})).unwrap();
}

/// As where the kernel's modules are in several packages, and that with vsock is installed later, or never.
#[test]
fn a_kernel_without_vsock_is_no_fault_and_what_is_loaded_later_is_used() {
    let options = Options::named("modules").without_vsock().without_vsock_module();
    let mut vm = options.restored(images(), installed()).unwrap();
    let modules = "/lib/modules/$(uname -r)/kernel/net";
    vm.run(&format!("mv {modules}/vmw_vsock /root && depmod && sync")).unwrap();
    vm.reset_and_wait().unwrap();
    let state = vm.run("systemctl is-system-running --wait || systemctl --failed").unwrap();
    assert_eq!(state, "running\n");
    vm.run("systemctl is-active guestlet.service && ! [ -e /dev/vsock ] && ! grep vsock /proc/modules")
        .unwrap();
    let units = "--unit guestlet.service --unit guestlet.socket";
    let said = vm.run(&format!("journalctl --boot --quiet --output cat --priority warning {units}")).unwrap();
    assert_eq!(said, "");
    let id = agent_id(&vm);
    vm.qga().unwrap().execute("guest-ping", json!({})).unwrap();
    let told = doctor(&vm);
    assert_eq!(level(&told, "vsock"), "note", "{told:#}");
    assert!(says(&told, "vsock").contains("this VM has no vsock device"), "{told:#}");

    vm.replug_vsock().unwrap();
    let missing = || says(&doctor(&vm), "vsock").contains("the kernel has no module").then_some(());
    wait_for("word of the missing module", SOON, missing).unwrap();
    vm.run(&format!("mv /root/vmw_vsock {modules} && depmod")).unwrap();
    let told = doctor(&vm);
    assert_eq!(level(&told, "vsock"), "wrong", "{told:#}");
    assert!(says(&told, "vsock").ends_with("vmw_vsock_virtio_transport is not loaded"), "{told:#}");
    vm.run("modprobe vmw_vsock_virtio_transport").unwrap();
    let host = HostHalf::start(&[Listed::of(&vm)]).unwrap();
    host.wait_connected("modules", SOON).unwrap();
    assert!(says(&doctor(&vm), "vsock").starts_with("the device is present; vsock port 970"));
    assert_eq!(agent_id(&vm), id, "one process all along");
}

/// A socket cannot be started beside a service that runs: it stayed away until both were stopped.
#[test]
fn the_agent_brings_its_socket_back() {
    let vm = real("socket");
    let active = || vm.run("systemctl is-active guestlet.socket guestlet.service || :").unwrap();
    vm.run("systemctl stop guestlet.socket").unwrap();
    assert_eq!(active(), "inactive\ninactive\n");
    vm.run("systemctl start guestlet.service").unwrap();
    assert_eq!(active(), "active\nactive\n");
    vm.run("systemctl restart guestlet.socket").unwrap();
    wait_for("both", SOON, || (active() == "active\nactive\n").then_some(())).unwrap();
    assert!(vm.run("guestlet status").unwrap().contains("vsock port 970, held by"));
}

#[test]
fn guest_shutdown_powers_off_through_logind() {
    let vm = real("off");
    vm.run("(journalctl --follow --lines 0 --unit systemd-logind > /dev/ttyS0 2>&1 &); sleep 1").unwrap();
    let mut client = vm.qga().unwrap();
    let started = Instant::now();
    // A success is not answered.
    client.send(b"{\"execute\":\"guest-shutdown\"}\n").unwrap();
    let event = vm.qmp().wait_event("SHUTDOWN", Duration::from_secs(60)).unwrap();
    println!("off {:?} after guest-shutdown", started.elapsed());
    assert_eq!(event["data"]["reason"], "guest-shutdown", "{event}");
    vm.wait_off(SOON).unwrap();
    wait_for("word of logind", Duration::from_secs(1), || {
        vm.console().log().contains("powering down").then_some(())
    })
    .unwrap();
}
