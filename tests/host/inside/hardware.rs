//! Clock, processors, memory, network, and who is logged in.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use guestlet::sys::calendar::Date;
use serde_json::json;

use super::{CPU, Inside};
use crate::lab::assert_fails;

const MEMORY: &str = "sys/devices/system/memory";

#[test]
fn the_clock_is_shown_and_set() {
    let inside = Inside::new();
    let before = SystemTime::now();
    let shown = inside.json(&["time", "a"]);
    let time: prost_types::Timestamp = shown["time"].as_str().unwrap().parse().unwrap();
    let time = SystemTime::try_from(time).unwrap();
    assert!(before <= time && time <= SystemTime::now(), "{shown}");
    assert!(
        shown["offset_seconds"].is_i64() && shown["ahead_milliseconds"].as_i64().unwrap() <= 0,
        "{shown}"
    );
    assert!(inside.lab.words(&["time", "a"]).starts_with("Time:    20"));

    let set = || *inside.clocks.system.lock().unwrap();
    inside.fails(&["time", "a", "--set", "hardware"], "the hardware clock cannot be read");
    assert_eq!(set(), None);
    *inside.clocks.hardware.lock().unwrap() =
        Some(Date { year: 2000, month: 1, day: 1, hour: 0, minute: 0, second: 0 });
    let words = inside.lab.words(&["time", "a", "--set", "hardware"]);
    assert_eq!(words, "the clock of a is set to what the hardware clock shows\n");
    assert_eq!(set(), Some(Duration::from_secs(946_684_800)));
    inside.lab.words(&["time", "a", "--set", "2026-11-21T14:53:39.999999999Z"]);
    assert_eq!(set(), Some(Duration::from_nanos(1_795_272_819_999_999_999)));
    let date = Date { year: 2026, month: 11, day: 21, hour: 14, minute: 53, second: 39 };
    assert_eq!(*inside.clocks.hardware.lock().unwrap(), Some(date));
    for wrong in ["1969-12-31T23:59:59Z", "2070-01-01T00:00:00Z", "9999-12-31T23:59:59Z"] {
        inside.fails(&["time", "a", "--set", wrong], "the time is outside the years 1970 to 2069");
    }
    assert_fails(&inside.lab.ctl(&["time", "a", "--set", "tomorrow"]), 2, "give now, hardware, or a time");
    assert_eq!(set(), Some(Duration::from_nanos(1_795_272_819_999_999_999)));
    let before = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    let done = inside.json(&["time", "a", "--set", "now"]);
    assert!(done["set"].is_string(), "{done}");
    assert!(set().is_some_and(|time| before <= time), "{:?}", set());
    let log = inside.lab.log();
    assert!(
        log.contains("audit: uid:0 root: time --set \"a\" \"2026-11-21T14:53:39.999999999Z\": allowed, OK"),
        "{log}"
    );
}

#[test]
fn processors_and_memory_are_shown_and_switched() {
    let inside = Inside::new();
    for (file, text) in
        [("cpu0/uevent", ""), ("cpu2/online", "0\n"), ("cpu1/online", "1\n"), ("cpu10/online", "1\n")]
    {
        inside.write(&format!("{CPU}/{file}"), text);
    }
    let processor = |id: u64, online: bool| json!({"id": id, "online": online, "can_offline": id != 0});
    let all = [processor(0, true), processor(1, true), processor(2, false), processor(10, true)];
    assert_eq!(inside.json(&["cpus", "a"]), json!(all));
    let words = inside.lab.words(&["cpus", "a", "--offline", "1", "--online", "2,10"]);
    assert_eq!(words, "3 of 3 processors are in the requested state\n");
    assert_eq!(
        inside.lab.words(&["cpus", "a"]),
        "CPU  STATE  CAN BE SWITCHED OFF\n0    on     no\n1    off    yes\n2    on     yes\n10   on     yes\n"
    );
    assert_eq!(
        (inside.read(&format!("{CPU}/cpu1/online")), inside.read(&format!("{CPU}/cpu2/online"))),
        ("0".into(), "1".into())
    );
    inside.fails(&["cpus", "a", "--offline", "7"], "there is no processor 7");
    inside.fails(&["cpus", "a", "--offline", "0"], "processor 0 cannot be switched off");
    let partly = inside.lab.ctl(&["cpus", "a", "--online", "1", "--offline", "7,10"]);
    assert_fails(&partly, 1, "processor 7 was not switched, nor were those after it");
    assert_eq!(String::from_utf8_lossy(&partly.stdout), "1 of 3 processors are in the requested state\n");
    assert_eq!(inside.read(&format!("{CPU}/cpu10/online")), "1\n");
    for wrong in ["-1", "x", "18446744073709551616", "1,,2"] {
        assert_fails(&inside.lab.ctl(&["cpus", "a", &format!("--offline={wrong}")]), 2, "invalid value");
    }
    // More than fits one request.
    let many = (100_000_u64..118_000).map(|id| id.to_string()).collect::<Vec<_>>().join(",");
    inside.fails(&["cpus", "a", "--offline", &format!("10,{many}")], "too large");
    assert_eq!(inside.read(&format!("{CPU}/cpu10/online")), "1\n");

    let nothing = "the guest's memory cannot be switched in blocks\n";
    assert_eq!(inside.lab.words(&["memory", "a"]), nothing);
    for (file, text) in [
        ("block_size_bytes", "8000000\n"),
        ("memory0/state", "online\n"),
        ("memory0/removable", "1\n"),
        ("memory32/state", "offline\n"),
    ] {
        inside.write(&format!("{MEMORY}/{file}"), text);
    }
    let block = |id: u64, online: bool| json!({"id": id, "online": online, "can_offline": id == 0});
    let all = json!({"block_bytes": 128 << 20, "blocks": [block(0, true), block(32, false)]});
    assert_eq!(inside.json(&["memory", "a"]), all);
    let output = inside.lab.ctl(&["memory", "a", "--offline", "0,999", "--online", "32"]);
    assert_fails(&output, 1, "1 of 3 blocks were not switched");
    let became = "block 32 is in the requested state\nblock 0 is in the requested state\nblock 999: there is no such memory block\n";
    assert_eq!(String::from_utf8_lossy(&output.stdout), became);
    let done = inside.json(&["memory", "a", "--offline", "0"]);
    assert_eq!(done, json!([{"id": 0, "problem": null}]));
    let expected =
        "Blocks of 128 MiB\nBLOCK  STATE  CAN BE SWITCHED OFF\n0      off    yes\n32     on     no\n";
    assert_eq!(inside.lab.words(&["memory", "a"]), expected);
    let log = inside.lab.log();
    assert!(log.contains("memory --online \"a\" \"32 on, 0 off, 999 off\": allowed, OK"), "{log}");
}

#[test]
fn interfaces_routes_and_users_are_shown() {
    let inside = Inside::new();
    let shown = inside.json(&["network", "a"]);
    let interfaces = shown.as_array().unwrap();
    let lo = interfaces.iter().find(|one| one["name"] == "lo").unwrap();
    assert!(lo["counters"]["received_bytes"].is_u64() && lo["running"].is_boolean(), "{lo}");
    assert!(inside.lab.words(&["network", "a"]).starts_with("NAME "));
    inside.fails(&["network", "a", "--routes"], "No such file");
    inside.write(
        "proc/net/route",
        "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n\
         eth0\t000200C0\t010200C0\t0003\t0\t0\t100\t00FFFFFF\t1400\t2\t3\n",
    );
    let (prefix, zeros) = (format!("fd{}", "0".repeat(30)), "0".repeat(32));
    inside.write(
        "proc/net/ipv6_route",
        format!("{prefix} 40 {zeros} 00 {zeros} 00000400 00000002 00000001 80200003     eth0\n"),
    );
    let expected = json!([
        {"interface": "eth0", "destination": "192.0.2.0/24", "gateway": "192.0.2.1", "metric": 100},
        {"interface": "eth0", "destination": "fd00::/64", "gateway": "", "metric": 1024},
    ]);
    assert_eq!(inside.json(&["network", "a", "--routes"]), expected);
    let table = inside.lab.words(&["network", "a", "--routes"]);
    assert!(table.ends_with("fd00::/64     -          eth0       1024\n"), "{table}");

    assert_eq!(inside.json(&["users", "a"]), json!([]));
    // As utmp(5) of x86-64 has a session; a name that would steer a terminal does not.
    let mut record = vec![0; 384];
    record[0] = 7;
    record[44..49].copy_from_slice(b"m\x1b[2J");
    record[340..344].copy_from_slice(&30_i32.to_le_bytes());
    inside.write("run/utmp", record);
    assert_eq!(
        inside.json(&["users", "a"]),
        json!([{"user": "m\u{fffd}[2J", "since": "1970-01-01T00:00:30Z"}])
    );
}
