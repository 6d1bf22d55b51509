//! The network's links, made as people make them, in a network namespace of the test's own.

use std::net::UdpSocket;
use std::time::Instant;

use serde_json::{Value, json};

use crate::agent::{Client, PATIENCE};
use crate::beside_qemu_ga::both;
use crate::namespace::{is_outside_of, run};

const COMMAND: &str = "guest-network-get-interfaces";

/// Asks both until they agree, as the kernel itself sends something now and then, and returns the answer.
fn agreed(ours: &mut Client, theirs: &mut Client) -> Value {
    let begun = Instant::now();
    loop {
        let (our_answer, their_answer) = (ours.call(COMMAND), theirs.call(COMMAND));
        if our_answer == their_answer {
            return our_answer;
        }
        assert!(begun.elapsed() < PATIENCE, "ours:   {our_answer}\ntheirs: {their_answer}");
    }
}

fn named<'a>(interfaces: &'a Value, name: &str) -> &'a Value {
    let found = interfaces.as_array().unwrap().iter().find(|interface| interface["name"] == name);
    found.unwrap_or_else(|| panic!("no {name} in {interfaces}"))
}

#[test]
fn links_of_every_kind_agree_with_qemu_ga() {
    if is_outside_of("--net") {
        return;
    }
    let (ours, theirs) = both();
    let (mut ours, mut theirs) = (ours.client(), theirs.client());
    let answer = agreed(&mut ours, &mut theirs);
    assert_eq!(answer, json!([{"name": "lo", "hardware-address": "00:00:00:00:00:00"}]), "an empty machine");

    run("ip link set lo up
        ip link add eth0 address 52:54:00:12:34:56 type veth peer name veth0
        ip link add br0 type bridge
        ip link set veth0 master br0
        for link in eth0 veth0 br0; do ip link set $link up; done
        ip address add 192.0.2.7/24 dev eth0
        ip address add 192.0.2.8/24 dev eth0
        ip address add 10.0.0.1 peer 10.0.0.2/32 dev eth0
        ip address add 10.1.0.1/8 dev eth0 label eth0:1
        ip address add 10.2.0.1/8 dev eth0 label eth0:1
        ip address add 10.3.0.1/8 dev eth0 label eth0x
        ip address add 10.4.0.1/8 dev br0 label br0:eth0
        ip address add 2001:db8::7/64 dev eth0 nodad
        ip address add 2001:db8:1::1 peer 2001:db8:1::2/128 dev eth0 nodad
        ip address add 172.16.0.1/12 dev br0
        ip tuntap add tap0 mode tap
        ip tuntap add tun0 mode tun
        ip link set tun0 up
        ip address add 10.9.9.9 peer 10.9.9.8/32 dev tun0
        { ip link add link eth0 name eth0.100 type vlan id 100 && ip link set eth0.100 up; } 2> /dev/null || true
        { ip link add wg0 type wireguard && ip address add 10.8.0.1/24 dev wg0; } 2> /dev/null || true
        { ip link add gre1 type gre local 192.0.2.7 remote 192.0.2.9 && ip link set gre1 up; } 2> /dev/null || true
        # Counters that differ from each other.
        ip neighbour replace 10.0.0.2 lladdr 02:00:00:00:00:01 dev eth0");
    let socket = UdpSocket::bind("10.0.0.1:0").unwrap();
    for length in [1, 20, 300] {
        socket.send_to(&vec![0; length], "10.0.0.2:9").unwrap();
    }
    let begun = Instant::now();
    let answer = loop {
        let answer = agreed(&mut ours, &mut theirs);
        // The kernel makes it in its own time.
        if named(&answer, "eth0").to_string().contains("fe80::") {
            break answer;
        }
        assert!(begun.elapsed() < PATIENCE, "{answer}");
    };
    let eth0 = named(&answer, "eth0");
    assert_eq!(eth0["hardware-address"], "52:54:00:12:34:56");
    assert!(eth0["statistics"]["tx-bytes"].as_u64() > Some(321), "{eth0}");
    let addresses = eth0["ip-addresses"].as_array().unwrap();
    for expected in [
        json!({"ip-address": "10.0.0.1", "ip-address-type": "ipv4", "prefix": 32}),
        json!({"ip-address": "2001:db8:1::1", "ip-address-type": "ipv6", "prefix": 128}),
    ] {
        assert!(addresses.contains(&expected), "{expected} is not in {eth0}");
    }
    assert_eq!(named(&answer, "eth0:1")["ip-addresses"].as_array().unwrap().len(), 2);
    assert_eq!(named(&answer, "eth0:1")["hardware-address"], "52:54:00:12:34:56");
    assert_eq!(named(&answer, "tun0")["ip-addresses"][0]["ip-address"], "10.9.9.9");
}

#[test]
fn links_that_come_and_go_meanwhile_hide_no_other() {
    if is_outside_of("--net") {
        return;
    }
    run(
        "for number in $(seq 50); do echo link add one$number type veth peer name two$number; done | ip -batch -",
    );
    let agent = crate::agent::Agent::start();
    let mut client = agent.client();
    let script = "for number in $(seq 100); do echo link add new$number type veth peer name other$number; \
        echo link del new$number; done | ip -batch -";
    let mut changes = std::process::Command::new("sh").args(["-c", script]).spawn().unwrap();
    let mut calls = 0;
    while changes.try_wait().unwrap().is_none() {
        let answer = client.call(COMMAND);
        let kept = answer.as_array().unwrap().iter().filter(|interface| {
            let name = interface["name"].as_str().unwrap();
            name.starts_with("one") || name.starts_with("two")
        });
        assert_eq!(kept.count(), 100, "{answer}");
        calls += 1;
    }
    assert!(calls > 0);
    assert!(changes.wait().unwrap().success());
    assert_eq!(client.call(COMMAND).as_array().unwrap().len(), 101);
}
