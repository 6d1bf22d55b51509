//! What changes a real guest: its users' keys and passwords, its clocks and time zone, its processors, and sleep.

use std::time::Duration;

use anyhow::Context as _;
use serde_json::{Value, json};

use crate::harness::launch::Options;
use crate::harness::qga::QgaClient;
use crate::harness::vm::{SOON, Vm};
use crate::{images, installed, real};

fn number(vm: &Vm, command: &str) -> i64 {
    vm.run(command).unwrap().trim().parse().with_context(|| command.to_owned()).unwrap()
}

/// A clock that has gone on for at most a minute since it was set.
fn shows(seconds: i64, expected: i64) {
    assert!((expected..expected + 60).contains(&seconds), "{seconds} instead of {expected}");
}

fn set_time(client: &mut QgaClient, seconds: i64) {
    let time = seconds * 1_000_000_000;
    assert_eq!(client.execute("guest-set-time", json!({ "time": time })).unwrap(), json!({}));
}

#[test]
fn clocks_and_time_zone() {
    const DAY: &str = "date +%s";
    const HARDWARE: &str = "cat /sys/class/rtc/rtc0/since_epoch";
    let vm = real("clocks");
    let mut client = vm.qga().unwrap();
    let zone = |client: &mut QgaClient| client.execute("guest-get-timezone", json!({})).unwrap();
    set_time(&mut client, 2_000_000_000);
    shows(number(&vm, DAY), 2_000_000_000);
    shows(number(&vm, HARDWARE), 2_000_000_000);
    let told = client.execute("guest-get-time", json!({})).unwrap().as_i64().unwrap();
    shows(told / 1_000_000_000, 2_000_000_000);

    // From the hardware clock, as after a restore.
    vm.run("date -s @1900000000").unwrap();
    assert_eq!(client.execute("guest-set-time", json!({})).unwrap(), json!({}));
    shows(number(&vm, DAY), 2_000_000_000);

    // A hardware clock in local time, in a zone that was changed while the agent runs.
    vm.run("ln -sf /usr/share/zoneinfo/Asia/Kolkata /etc/localtime; printf '0.0 0 0.0\\n0\\nLOCAL\\n' > /etc/adjtime")
        .unwrap();
    assert_eq!(zone(&mut client), json!({ "zone": "IST", "offset": 19_800 }));
    set_time(&mut client, 2_000_000_000);
    shows(number(&vm, DAY), 2_000_000_000);
    shows(number(&vm, HARDWARE), 2_000_019_800);
    vm.run("date -s @1900000000").unwrap();
    client.execute("guest-set-time", json!({})).unwrap();
    shows(number(&vm, DAY), 2_000_000_000);

    // 2033-07-01 and 2033-12-01.
    vm.run("ln -sf /usr/share/zoneinfo/America/New_York /etc/localtime").unwrap();
    for (seconds, name, offset) in [(2_003_875_200, "EDT", -14_400), (2_017_094_400, "EST", -18_000)] {
        set_time(&mut client, seconds);
        assert_eq!(zone(&mut client), json!({ "zone": name, "offset": offset }));
        shows(number(&vm, HARDWARE), seconds + offset);
    }
    let error = client.execute("guest-set-time", json!({ "time": -1 })).unwrap_err().to_string();
    assert!(error.contains("1970 to 2069"), "{error}");
}

#[test]
fn users_keys_and_passwords() {
    let vm = real("users");
    let mut client = vm.qga().unwrap();
    vm.run("useradd -m -s /bin/sh alice").unwrap();
    let alice = |mut arguments: Value| {
        arguments["username"] = "alice".into();
        arguments
    };

    // Base64 of "Grün:1 x" and "geheim".
    let password = alice(json!({ "password": "R3LDvG46MSB4", "crypted": false }));
    assert_eq!(client.execute("guest-set-user-password", password).unwrap(), json!({}));
    let is = |password: &str| {
        let check = format!(
            "perl -e '$h = (split /:/, `grep ^alice: /etc/shadow`)[1]; print crypt(\"{password}\", $h) eq $h'"
        );
        vm.run(&check).unwrap().trim() == "1"
    };
    assert!(is("Gr\\xc3\\xbcn:1 x") && !is("geheim"));
    let crypted = vm.run("perl -e 'print crypt(\"geheim\", \"\\$6\\$salt\")'").unwrap();
    let encoded = vm.run(&format!("printf %s '{}' | base64 -w 0", crypted.trim())).unwrap();
    let password = alice(json!({ "password": encoded.trim(), "crypted": true }));
    client.execute("guest-set-user-password", password).unwrap();
    assert!(is("geheim"));
    assert!(vm.run("grep ^alice: /etc/shadow").unwrap().contains(crypted.trim()));
    let nobody = json!({ "username": "bob", "password": "eA==", "crypted": false });
    let error = client.execute("guest-set-user-password", nobody).unwrap_err().to_string();
    assert!(error.contains("unknown user") && error.contains("bob"), "{error}");

    let file = "/home/alice/.ssh/authorized_keys";
    let keys = alice(json!({ "keys": ["ssh-ed25519 AAAA host\n", "ssh-rsa BBBB"] }));
    client.execute("guest-ssh-add-authorized-keys", keys).unwrap();
    let owners = vm.run(&format!("stat -c '%U:%G %a' /home/alice/.ssh {file}")).unwrap();
    assert_eq!(owners, "alice:alice 700\nalice:alice 600\n");
    vm.run(&format!("su alice -c 'echo \"# mine\" >> {file}'")).unwrap();
    client.execute("guest-ssh-remove-authorized-keys", alice(json!({ "keys": ["ssh-rsa BBBB"] }))).unwrap();
    assert_eq!(vm.run(&format!("cat {file}")).unwrap(), "ssh-ed25519 AAAA host\n# mine\n");
    let listed = client.execute("guest-ssh-get-authorized-keys", alice(json!({}))).unwrap();
    assert_eq!(listed, json!({ "keys": ["ssh-ed25519 AAAA host"] }));
    vm.run(&format!("su alice -c 'ln -sf /etc/shadow {file}'")).unwrap();
    let before = vm.run("sha256sum /etc/shadow").unwrap();
    let keys = alice(json!({ "keys": ["ssh-rsa CCCC"] }));
    let error = client.execute("guest-ssh-add-authorized-keys", keys).unwrap_err().to_string();
    assert!(error.contains("symbolic link"), "{error}");
    assert_eq!(vm.run("sha256sum /etc/shadow").unwrap(), before);

    // root is logged in on the console.
    let users = client.execute("guest-get-users", json!({})).unwrap();
    let root = users.as_array().unwrap().iter().find(|user| user["user"] == "root").unwrap();
    assert!(root["login-time"].as_f64().unwrap() > 1.0e9, "{users}");

    vm.run("journalctl --sync").unwrap();
    let journal = vm.run("journalctl --unit guestlet --output cat --identifier guestlet").unwrap();
    assert!(journal.contains("guest-set-user-password (alice): done"), "{journal}");
    assert!(journal.contains("guest-ssh-add-authorized-keys (alice): "), "{journal}");
    for secret in ["geheim", "n:1 x", "R3LDvG46MSB4", crypted.trim(), encoded.trim()] {
        assert!(!journal.contains(secret), "{secret} is in the journal");
    }
}

#[test]
fn processors_memory_and_routes() {
    let vm = real("hardware");
    let mut client = vm.qga().unwrap();
    let online = || vm.run("cat /sys/devices/system/cpu/online").unwrap().trim().to_owned();
    let mut set = |id: u64, online: bool| {
        client.execute("guest-set-vcpus", json!({ "vcpus": [{ "logical-id": id, "online": online }] }))
    };
    vm.plug_processor().unwrap();
    assert_eq!(online(), "0");
    assert_eq!(set(1, true).unwrap(), 1);
    assert_eq!(online(), "0-1");
    assert_eq!(set(1, false).unwrap(), 1);
    assert_eq!(online(), "0");
    assert_eq!(set(1, true).unwrap(), 1);
    assert_eq!(online(), "0-1");
    let error = set(0, false).unwrap_err().to_string();
    assert!(error.contains("processor 0 cannot be switched off"), "{error}");
    assert!(set(7, true).unwrap_err().to_string().contains("there is no processor 7"));
    let listed = client.execute("guest-get-vcpus", json!({})).unwrap();
    assert_eq!(
        listed,
        json!([
            { "logical-id": 0, "online": true, "can-offline": false },
            { "logical-id": 1, "online": true, "can-offline": true },
        ])
    );
    assert_eq!(client.execute("guest-get-cpustats", json!({})).unwrap().as_array().unwrap().len(), 2);

    let blocks = client.execute("guest-get-memory-blocks", json!({})).unwrap();
    let folders = number(&vm, "ls -d /sys/devices/system/memory/memory[0-9]* | wc -l");
    assert_eq!(i64::try_from(blocks.as_array().unwrap().len()).unwrap(), folders);

    vm.run("ip link set lo up; ip route add 198.51.100.0/24 dev lo metric 7").unwrap();
    let routes = client.execute("guest-network-get-route", json!({})).unwrap();
    let route =
        routes.as_array().unwrap().iter().find(|route| route["destination"] == "198.51.100.0").unwrap();
    let seen = (&route["iface"], &route["mask"], &route["metric"], &route["version"]);
    assert_eq!(seen, (&json!("lo"), &json!("255.255.255.0"), &json!(7), &json!(4)));
    assert!(client.execute("guest-get-load", json!({})).unwrap()["load1m"].is_f64());
}

#[test]
fn the_guest_sleeps_and_wakes() {
    let vm = Options::named("sleep").without_vsock().restored(images(), installed()).unwrap();
    let mut client = vm.qga().unwrap();
    // There is no swap to hibernate to.
    let error = client.execute("guest-suspend-disk", json!({})).unwrap_err().to_string();
    assert!(error.contains("cannot be suspended to disk"), "{error}");
    client.send(b"{\"execute\":\"guest-suspend-ram\"}\n").unwrap();
    vm.qmp().wait_event("SUSPEND", Duration::from_secs(60)).unwrap();
    drop(client);
    vm.qmp().execute("system_wakeup", json!({})).unwrap();
    vm.qmp().wait_event("WAKEUP", SOON).unwrap();
    assert_eq!(vm.qga().unwrap().execute("guest-ping", json!({})).unwrap(), json!({}));
}
