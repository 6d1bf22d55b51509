//! Which vsock ports a host half dials from, and whom an agent lets in from which: with the kernel's own vsock at both ends, in
//! a guest that is its own host. That is context 1 for the agent ([vsock(7)], "Local communication").
//!
//! [vsock(7)]: https://man7.org/linux/man-pages/man7/vsock.7.html

use std::path::Path;

use serde_json::Value;

use crate::harness::images::text;
use crate::harness::process::RunFolder;
use crate::harness::tools::{program, run};
use crate::harness::vm::{BOOT, SOON, Vm};
use crate::harness::wait_for;
use crate::real;

/// The least port that any user may dial from.
const FIRST_UNPRIVILEGED: u32 = 1024;

/// Says in plain that HTTP/2 begins, from a port of its own, and prints how many bytes come back.
const CLIENT: &str = "\
import socket, sys
client = socket.socket(socket.AF_VSOCK)
client.settimeout(100)
client.bind((socket.VMADDR_CID_ANY, int(sys.argv[1])))
client.connect((int(sys.argv[2]), 970))
try:
    client.sendall(b'PRI * HTTP/2.0\\r\\n\\r\\nSM\\r\\n\\r\\n\\0\\0\\0\\x04\\0\\0\\0\\0\\0')
    print(len(client.recv(9)))
except ConnectionError:
    print(0)
";

/// Takes every port below 1024 that nobody has, says how many these are, and holds them.
const HOLDER: &str = "\
import resource, socket, time
resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
held = []
for port in range(1, 1024):
    holder = socket.socket(socket.AF_VSOCK)
    try:
        holder.bind((socket.VMADDR_CID_ANY, port))
        held.append(holder)
    except OSError:
        pass
with open('/run/held', 'w') as told:
    told.write(str(len(held)))
time.sleep(1000)
";

/// Has the guest's programs of the host half, and vsock lead back to it.
fn prepare(vm: &Vm) {
    let folder = RunFolder::new().unwrap();
    let disk = folder.file("host.iso");
    let graft = |name: &str| format!("/{name}={}", program(name).unwrap().display());
    let (host, ctl) = (graft("guestlet-host"), graft("guestctl"));
    let arguments = ["-quiet", "-rock", "-graft-points", "-output", text(&disk).unwrap(), &host, &ctl];
    run(Path::new("genisoimage"), &arguments).unwrap();
    vm.plug_read_only("host", &disk).unwrap();
    vm.run("for try in $(seq 100); do [ -b /dev/sda ] && break; sleep 0.1; done; mount -o ro /dev/sda /mnt")
        .unwrap();
    vm.run("modprobe -a vsock_loopback vsock_diag").unwrap();
    vm.write("/run/client.py", CLIENT.as_bytes()).unwrap();
    vm.write("/etc/guestlet/agent.d/tests.toml", b"[vsock]\npeer-cid = 1\n").unwrap();
    vm.run("systemctl restart guestlet.service").unwrap();
    let settings = format!(
        "socket = '/run/half/api.sock'\nvolumes-dir = '/run/half/volumes'\ntrust.state-dir = '/run/half/trust'\n\
         [[vm]]\nname = 'self'\nuuid = '{}'\nvsock-cid = {}\n",
        vm.uuid(),
        vm.cid().unwrap()
    );
    vm.run("mkdir /run/half").unwrap();
    vm.write("/run/half/host.toml", settings.as_bytes()).unwrap();
}

fn ctl(vm: &Vm, words: &str) -> Value {
    let told = vm.run(&format!("/mnt/guestctl --socket /run/half/api.sock {words} -o json")).unwrap();
    serde_json::from_str(&told).unwrap()
}

fn start_host_half(vm: &Vm) {
    vm.run("systemd-run --unit=half /mnt/guestlet-host --config /run/half/host.toml").unwrap();
    wait_for("host half", SOON, || vm.run("test -S /run/half/api.sock").ok()).unwrap();
}

fn until_speaks(vm: &Vm, how: &str) {
    let speaks = || (ctl(vm, "trust show self")["session"] == how).then_some(());
    wait_for(&format!("{how} session"), BOOT, speaks).unwrap_or_else(|error| {
        panic!(
            "{error}: {:#}\n{}",
            ctl(vm, "info self"),
            vm.run("journalctl -u half -u guestlet -n 40").unwrap()
        )
    });
}

/// The ports that the agent's peers have dialled from.
fn sources(vm: &Vm) -> Vec<u32> {
    let listed = vm.run("ss -H -n -A vsock state established").unwrap();
    let ends = |line: &str| {
        let ports = line.split_whitespace().filter_map(|word| word.rsplit_once(':')?.1.parse().ok());
        ports.collect::<Vec<u32>>()
    };
    let peers = listed.lines().filter_map(|line| match ends(line)[..] {
        [970, peer] => Some(peer),
        _ => None,
    });
    peers.collect()
}

/// How many bytes somebody gets who speaks without a key, from this port.
fn answered(vm: &Vm, port: u32) -> u32 {
    let told = vm.run(&format!("python3 /run/client.py {port} {}", vm.cid().unwrap())).unwrap();
    told.trim().parse().unwrap()
}

/// Gives the guest the host half's key.
fn give_key(vm: &Vm) {
    let line = ctl(vm, "trust bootstrap self")["key_line"].as_str().unwrap().to_owned() + "\n";
    vm.run("mkdir -p /etc/guestlet/hosts.d").unwrap();
    vm.write("/run/host.pub", line.as_bytes()).unwrap();
    vm.run("install -m 644 /run/host.pub /etc/guestlet/hosts.d/host.pub").unwrap();
}

#[test]
fn a_host_half_with_a_key_needs_no_privileged_port_and_nobody_else_gets_in_by_one() {
    let vm = real("ports");
    prepare(&vm);
    start_host_half(&vm);
    until_speaks(&vm, "plain");
    let ports = sources(&vm);
    assert!(matches!(ports[..], [port] if port < FIRST_UNPRIVILEGED), "{ports:?}");
    assert_eq!((answered(&vm, 700), answered(&vm, 7000)), (9, 0), "of who may bind a port and who may not");

    give_key(&vm);
    until_speaks(&vm, "keyed");
    let ports = sources(&vm);
    assert!(matches!(ports[..], [port] if port >= FIRST_UNPRIVILEGED), "at the first contact: {ports:?}");
    vm.run("systemctl stop half").unwrap();
    start_host_half(&vm);
    until_speaks(&vm, "keyed");
    let ports = sources(&vm);
    assert!(matches!(ports[..], [port] if port >= FIRST_UNPRIVILEGED), "{ports:?}");
    // A process with privileges, as a pod of the host may have them.
    assert_eq!((answered(&vm, 701), answered(&vm, 7001)), (0, 0));
    assert_eq!(sources(&vm), ports, "the session went on");
}

#[test]
fn keyed_sessions_are_opened_when_every_privileged_port_is_taken_and_plain_ones_are_not() {
    let vm = real("taken");
    prepare(&vm);
    vm.write("/run/holder.py", HOLDER.as_bytes()).unwrap();
    vm.run("systemd-run --unit=holder python3 /run/holder.py").unwrap();
    let held = || vm.run("cat /run/held").ok().filter(|told| !told.is_empty());
    // All but that of the agent.
    assert_eq!(wait_for("the ports", SOON, held).unwrap(), "1022");
    start_host_half(&vm);
    let reason = || {
        let told = ctl(&vm, "info self")["reason"].as_str().unwrap().to_owned();
        told.contains("every vsock port below 1024 is in use").then_some(())
    };
    wait_for("want of a port", SOON, reason)
        .unwrap_or_else(|error| panic!("{error}: {:#}", ctl(&vm, "info self")));

    // That guest's key is not pinned yet.
    give_key(&vm);
    until_speaks(&vm, "keyed");
    let ports = sources(&vm);
    assert!(matches!(ports[..], [port] if port >= FIRST_UNPRIVILEGED), "{ports:?}");
    vm.run("rm /etc/guestlet/hosts.d/host.pub && guestlet trust reset").unwrap();
    vm.run("/mnt/guestctl --socket /run/half/api.sock trust forget self").unwrap();
    wait_for("want of a port", SOON, reason)
        .unwrap_or_else(|error| panic!("{error}: {:#}", ctl(&vm, "info self")));
    vm.run("systemctl stop holder").unwrap();
    until_speaks(&vm, "plain");
}
