//! The QGA channel on virtio-serial, asked as libvirt asks.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::fast;
use crate::harness::qga::QgaClient;

#[test]
fn a_client_on_virtio_serial_gets_answers() {
    let vm = fast("port");
    let mut client = vm.qga().unwrap();
    assert_eq!(client.execute("guest-ping", json!({})).unwrap(), json!({}));
    assert_eq!(client.execute("guest-get-host-name", json!({})).unwrap(), json!({ "host-name": "port" }));

    let info = client.execute("guest-info", json!({})).unwrap();
    let commands = info["supported_commands"].as_array().unwrap();
    assert!(commands.iter().any(|command| command["name"] == "guest-shutdown"), "{info}");

    let system = client.execute("guest-get-osinfo", json!({})).unwrap();
    assert_eq!(system["id"], "testguest");
    assert_eq!(system["kernel-release"], vm.run("uname -r").unwrap().trim());

    let interfaces = client.execute("guest-network-get-interfaces", json!({})).unwrap();
    let card = interfaces.as_array().unwrap().iter().find(|card| card["name"] == "eth0").unwrap();
    assert_eq!(card["hardware-address"], "52:54:00:12:34:56");
    let address = json!({ "ip-address": "192.0.2.10", "ip-address-type": "ipv4", "prefix": 24 });
    assert!(card["ip-addresses"].as_array().unwrap().contains(&address), "{card}");

    let error = client.execute("guest-no-such-command", json!({})).unwrap_err();
    assert!(error.to_string().contains("CommandNotFound"), "{error}");
}

#[test]
fn clients_come_and_go_and_garbage_hurts_nobody() {
    let vm = fast("rough");
    let started = Instant::now();
    for _ in 0..20 {
        vm.qga().unwrap().execute("guest-ping", json!({})).unwrap();
    }
    println!("20 clients one after the other: {:?}", started.elapsed());

    let deep = "[".repeat(100_000);
    let long = format!("{{\"execute\":\"{}\"}}\n", "x".repeat(1 << 20));
    let garbage: [&[u8]; 6] =
        [b"\x00\x01\x02\xfe\n", b"}{\n", b"{\"execute\":", deep.as_bytes(), b"\xff\xff\xff", long.as_bytes()];
    for bytes in garbage {
        let mut client = QgaClient::connect(&vm.qga_socket()).unwrap();
        client.send(bytes).unwrap();
        // What it answers, if anything, is an error.
        while let Some(answer) = client.receive(Duration::from_millis(300)).unwrap() {
            assert_eq!(answer.get("return"), None, "{answer}");
        }
        client.synchronize().unwrap();
    }
    // A request that is cut off by its client's end says nothing to the next one.
    QgaClient::connect(&vm.qga_socket()).unwrap().send(b"{\"execute\":\"guest-p").unwrap();
    assert_eq!(vm.qga().unwrap().execute("guest-ping", json!({})).unwrap(), json!({}));
    assert_ne!(vm.run("pidof guestlet").unwrap(), "");
    let agent = std::fs::read_to_string(vm.file("agent.log")).unwrap();
    assert!(!agent.contains("testguest: the agent ended"), "{agent}");
    assert_eq!(agent.matches("panicked").count(), 0, "{agent}");
    let _: Value = vm.qga().unwrap().execute("guest-info", json!({})).unwrap();
}
