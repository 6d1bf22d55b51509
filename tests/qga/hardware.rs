//! Processors, memory blocks, the load and routes, over a machine that is laid out.

use std::fmt::Write as _;

use serde_json::{Value, json};

use crate::laid_out::LaidOut;

const CPU: &str = "/sys/devices/system/cpu";
const MEMORY: &str = "/sys/devices/system/memory";

/// Three processors of which the first cannot be switched off, and a folder that only looks like one.
fn processors() -> LaidOut {
    let guest = LaidOut::new();
    for (file, text) in [
        ("cpu0/uevent", ""),
        ("cpu2/online", "0\n"),
        ("cpu1/online", "1\n"),
        ("cpu10/online", "1\n"),
        ("cpufreq/online", "1\n"),
    ] {
        guest.write(&format!("{CPU}/{file}"), text);
    }
    guest
}

#[test]
fn processors_are_listed_and_switched() {
    let guest = processors();
    let expected = json!([
        {"logical-id": 0, "online": true, "can-offline": false},
        {"logical-id": 1, "online": true, "can-offline": true},
        {"logical-id": 2, "online": false, "can-offline": true},
        {"logical-id": 10, "online": true, "can-offline": true},
    ]);
    assert_eq!(guest.call("guest-get-vcpus", &Value::Null), expected);
    let wanted = json!([
        {"logical-id": 1, "online": false},
        {"logical-id": 2, "online": true, "can-offline": true},
        {"logical-id": 10, "online": true},
        {"logical-id": 0, "online": true},
    ]);
    assert_eq!(guest.call("guest-set-vcpus", &json!({"vcpus": wanted})), 4);
    assert_eq!(guest.read(&format!("{CPU}/cpu1/online")), "0");
    assert_eq!(guest.read(&format!("{CPU}/cpu2/online")), "1");
    // What is as it should be is not touched.
    assert_eq!(guest.read(&format!("{CPU}/cpu10/online")), "1\n");
    assert_eq!(guest.call("guest-set-vcpus", &json!({"vcpus": []})), 0);
}

#[test]
fn switching_ends_at_the_first_processor_that_fails() {
    let guest = processors();
    let off = |id: u64| json!({"logical-id": id, "online": false});
    let cannot = "processor 0 cannot be switched off";
    assert_eq!(guest.error("guest-set-vcpus", &json!({"vcpus": [off(0), off(1)]})), cannot);
    assert_eq!(guest.error("guest-set-vcpus", &json!({"vcpus": [off(3)]})), "there is no processor 3");
    assert_eq!(guest.read(&format!("{CPU}/cpu1/online")), "1\n");
    assert_eq!(guest.call("guest-set-vcpus", &json!({"vcpus": [off(1), off(3), off(10)]})), 1);
    assert_eq!(guest.read(&format!("{CPU}/cpu1/online")), "0");
    assert_eq!(guest.read(&format!("{CPU}/cpu10/online")), "1\n");
    assert!(LaidOut::new().error("guest-get-vcpus", &json!({})).contains("No such file"));
}

#[test]
fn a_list_that_is_not_understood_switches_nothing() {
    let good = json!({"logical-id": 1, "online": false});
    let many = vec![&good; 100_000];
    for (vcpus, named) in [
        (json!([good, {"logical-id": 2}]), "\"online\" is missing in vcpus[1]"),
        (json!([good, {"online": true}]), "\"logical-id\" is missing in vcpus[1]"),
        (json!([good, {"logical-id": -1, "online": true}]), "\"vcpus[1].logical-id\" must not be negative"),
        (
            json!([good, {"logical-id": u64::MAX, "online": true}]),
            "\"logical-id\" must be an integer of 64 bits",
        ),
        (json!([good, {"logical-id": "1", "online": true}]), "\"logical-id\" must be an integer of 64 bits"),
        (json!([good, {"logical-id": 1, "online": 1}]), "\"online\" must be true or false"),
        (json!([good, {"logical-id": 1, "online": true, "can-offline": 1}]), "\"can-offline\" must be true"),
        (json!([good, {"logical-id": 1, "online": true, "x": 1}]), "Parameter 'vcpus[1].x' is unexpected"),
        (json!([good, 7]), "\"vcpus[1]\" must be an object"),
        (json!({"0": good}), "\"vcpus\" must be a list"),
        (json!(many), "\"vcpus\" must be a list of at most 65536 elements"),
    ] {
        let guest = processors();
        let error = guest.error("guest-set-vcpus", &json!({"vcpus": vcpus}));
        assert!(error.contains(named), "{error}");
        assert_eq!(guest.read(&format!("{CPU}/cpu1/online")), "1\n", "{named}");
    }
    assert!(LaidOut::new().error("guest-set-vcpus", &json!({})).contains("\"vcpus\" is missing"));
}

#[test]
fn memory_blocks_are_listed_and_switched_each_for_itself() {
    let guest = LaidOut::new();
    assert_eq!(guest.call("guest-get-memory-blocks", &Value::Null), json!([]));
    let all = json!({"mem-blks": [
        {"phys-index": 0, "online": false},
        {"phys-index": 7, "online": false},
        {"phys-index": 32, "online": true, "can-offline": false},
        {"phys-index": 40, "online": false},
        {"phys-index": i64::MAX, "online": true},
    ]});
    for response in guest.call("guest-set-memory-blocks", &all).as_array().unwrap() {
        assert_eq!(
            (&response["response"], &response["error-code"]),
            (&json!("operation-not-supported"), &json!(2))
        );
    }
    for (file, text) in [
        ("block_size_bytes", "8000000\n"),
        ("memory0/state", "online\n"),
        ("memory0/removable", "1\n"),
        ("memory7/removable", "0\n"),
        ("memory32/state", "offline\n"),
        ("memory40/state/is-a-folder", ""),
        ("soft_offline_page", ""),
    ] {
        guest.write(&format!("{MEMORY}/{file}"), text);
    }
    assert!(guest.error("guest-get-memory-blocks", &Value::Null).contains("Is a directory"));
    std::fs::remove_dir_all(guest.path(&format!("{MEMORY}/memory40/state"))).unwrap();
    let expected = json!([
        {"phys-index": 0, "online": true, "can-offline": true},
        {"phys-index": 7, "online": true, "can-offline": false},
        {"phys-index": 32, "online": false, "can-offline": false},
        {"phys-index": 40, "online": true, "can-offline": false},
    ]);
    assert_eq!(guest.call("guest-get-memory-blocks", &Value::Null), expected);
    std::fs::create_dir(guest.path(&format!("{MEMORY}/memory40/state"))).unwrap();
    let expected = json!([
        {"phys-index": 0, "response": "success"},
        {"phys-index": 7, "response": "operation-not-supported", "error-code": 2},
        {"phys-index": 32, "response": "success"},
        {"phys-index": 40, "response": "operation-failed", "error-code": 21},
        {"phys-index": i64::MAX, "response": "not-found", "error-code": 2},
    ]);
    assert_eq!(guest.call("guest-set-memory-blocks", &all), expected);
    assert_eq!(guest.read(&format!("{MEMORY}/memory0/state")), "offline");
    assert_eq!(guest.read(&format!("{MEMORY}/memory32/state")), "online");
    assert_eq!(guest.call("guest-get-memory-block-info", &Value::Null), json!({"size": 128 << 20}));
    let negative = json!({"mem-blks": [{"phys-index": -1, "online": true}]});
    assert!(guest.error("guest-set-memory-blocks", &negative).contains("must not be negative"));
    guest.write(&format!("{MEMORY}/block_size_bytes"), "huge");
    assert!(guest.error("guest-get-memory-block-info", &Value::Null).contains("\"huge\" is not a size"));
}

#[test]
fn times_of_processors_are_in_milliseconds() {
    let guest = LaidOut::new();
    guest.write("/proc/stat", "cpu  9 9 9 9\ncpu0 1 2 3 4 5 6 7 8 9 10\ncpu3 1 2 3 4\nintr 1\n");
    let expected = json!([
        {"type": "linux", "cpu": 0, "user": 10, "nice": 20, "system": 30, "idle": 40, "iowait": 50, "irq": 60,
         "softirq": 70, "steal": 80, "guest": 90, "guestnice": 100},
        {"type": "linux", "cpu": 3, "user": 10, "nice": 20, "system": 30, "idle": 40},
    ]);
    assert_eq!(guest.call("guest-get-cpustats", &Value::Null), expected);
}

#[test]
fn load_is_three_numbers() {
    let guest = LaidOut::new();
    assert!(guest.error("guest-get-load", &Value::Null).contains("No such file"));
    guest.write("/proc/loadavg", "0.00 1.25 300.10 1/2 3\n");
    let expected = json!({"load1m": 0.0, "load5m": 1.25, "load15m": 300.1});
    assert_eq!(guest.call("guest-get-load", &Value::Null), expected);
}

#[test]
fn routes_of_both_families() {
    let guest = LaidOut::new();
    assert!(guest.error("guest-network-get-route", &Value::Null).contains("No such file"));
    guest.write(
        "/proc/net/route",
        "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n\
         eth0\t000200C0\t010200C0\t0003\t0\t0\t100\t00FFFFFF\t1400\t2\t3\n",
    );
    let four = json!({"iface": "eth0", "destination": "192.0.2.0", "metric": 100, "gateway": "192.0.2.1",
        "mask": "255.255.255.0", "irtt": 3, "flags": 3, "refcnt": 0, "use": 0, "window": 2, "mtu": 1400, "version": 4});
    assert_eq!(guest.call("guest-network-get-route", &Value::Null), json!([four]));
    let (prefix, zeros) = (format!("fd{}", "0".repeat(30)), "0".repeat(32));
    let six_line = format!("{prefix} 40 {zeros} 00 {prefix} 00000400 00000002 00000001 80200003     eth0\n");
    guest.write("/proc/net/ipv6_route", &six_line);
    let six = json!({"iface": "eth0", "destination": "fd00::", "metric": 1024, "flags": 0x8020_0003_u32, "refcnt": 2,
        "use": 1, "desprefixlen": "64", "source": "::", "srcprefixlen": "0", "nexthop": "fd00::", "version": 6});
    assert_eq!(guest.call("guest-network-get-route", &json!({})), json!([four, six]));
    let mut many = String::new();
    for number in 0..5_000_u32 {
        writeln!(many, "eth0\t{number:08X}\t00000000\t0001\t0\t0\t0\tFFFFFFFF\t0\t0\t0").unwrap();
    }
    guest.write("/proc/net/route", many);
    assert_eq!(guest.call("guest-network-get-route", &json!({})).as_array().unwrap().len(), 5_001);
}
