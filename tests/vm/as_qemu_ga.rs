//! The agent in qemu-ga's place: under its name, on vsock, and on a socket of systemd.

use serde_json::json;

use crate::harness::qga::QgaClient;
use crate::harness::vm::{SOON, Vm};
use crate::harness::wait_for;
use crate::{fast, real};

fn client(vm: &Vm, port: u32) -> QgaClient {
    let asked = wait_for("a QGA client's answer on vsock", SOON, || {
        let mut client = QgaClient::over(vm.dial(port).ok()?);
        client.execute("guest-ping", json!({})).ok()?;
        Some(client)
    });
    asked.unwrap()
}

#[test]
fn a_daemon_under_the_name_qemu_ga_serves_several_clients_on_vsock() {
    let vm = fast("named");
    vm.run("ln -s /usr/bin/guestlet /run/qemu-ga").unwrap();
    // It is up when the command returns.
    vm.run("/run/qemu-ga -d -m vsock-listen -p 4294967295:1234 -t /run -f /run/qemu-ga.pid").unwrap();
    let mut clients = [(); 3].map(|()| QgaClient::over(vm.dial(1234).unwrap()));
    for _ in 0..2 {
        for client in &mut clients {
            let name = client.execute("guest-get-host-name", json!({})).unwrap();
            assert_eq!(name["host-name"], "named");
        }
    }
    // The agent beside it is not in its way, nor it in that one's.
    vm.run("guestlet status").unwrap();
    vm.qga().unwrap().execute("guest-ping", json!({})).unwrap();
    vm.run("kill $(cat /run/qemu-ga.pid); while [ -e /run/qemu-ga.pid ]; do :; done").unwrap();
    assert!(vm.dial(1234).is_err());
}

#[test]
fn on_vsock_programs_in_the_guest_itself_are_refused() {
    let vm = real("insider-qga");
    vm.run("ln -s /usr/bin/guestlet /root/qemu-ga").unwrap();
    vm.run("systemd-run --unit other --service-type exec /root/qemu-ga -m vsock-listen -p 4294967295:1234")
        .unwrap();
    client(&vm, 1234);
    let script = "import socket\n\
        s = socket.socket(socket.AF_VSOCK); s.settimeout(10); s.connect((1, 1234))\n\
        try: s.sendall(b'{\"execute\":\"guest-ping\"}\\n'); print('answer', s.recv(99))\n\
        except (ConnectionError, BrokenPipeError): print('answer', b'')\n";
    vm.run("modprobe vsock_loopback").unwrap();
    vm.write("/tmp/insider.py", script.as_bytes()).unwrap();
    assert_eq!(vm.run("python3 /tmp/insider.py").unwrap(), "answer b''\n");
    let log = vm.run("journalctl --unit other --output cat").unwrap();
    assert!(log.contains("is refused: only connections from the context 2 are accepted"), "{log}");
}

#[test]
fn a_socket_of_systemd_carries_qga_beside_those_of_the_api() {
    let vm = real("passed");
    let unit = "[Socket]\nListenStream=vsock::1235\nService=guestlet.service\n";
    vm.write("/etc/systemd/system/guestlet-qga.socket", unit.as_bytes()).unwrap();
    vm.run("mkdir -p /etc/systemd/system/guestlet.service.d").unwrap();
    let drop_in = "[Service]\nSockets=guestlet-qga.socket\n";
    vm.write("/etc/systemd/system/guestlet.service.d/qga.conf", drop_in.as_bytes()).unwrap();
    vm.write("/etc/sysconfig-qemu-ga", b"BLACKLIST_RPC=guest-get-osinfo\n").unwrap();
    vm.run("mkdir -p /etc/sysconfig && mv /etc/sysconfig-qemu-ga /etc/sysconfig/qemu-ga").unwrap();
    vm.run("systemctl daemon-reload && systemctl stop guestlet.service").unwrap();
    vm.run("systemctl start guestlet-qga.socket && systemctl start guestlet.service").unwrap();
    let mut client = client(&vm, 1235);
    let error = client.execute("guest-get-osinfo", json!({})).unwrap_err().to_string();
    assert!(error.contains("CommandNotFound"), "{error}");
    let status = vm.run("guestlet status").unwrap();
    assert!(status.contains("vsock port 1235") && status.contains("vsock port 970, held by"), "{status}");
}
