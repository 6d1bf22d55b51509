//! The clocks and the time zone.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use guestlet::sys::calendar::Date;
use serde_json::{Value, json};

use crate::agent::Agent;
use crate::laid_out::LaidOut;

const NEW_YEAR: Date = Date { year: 2000, month: 1, day: 1, hour: 0, minute: 0, second: 0 };

#[test]
fn the_time_is_this_machines() {
    let agent = Agent::start();
    let before = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    let time = Duration::from_nanos(agent.client().call("guest-get-time").as_u64().unwrap());
    let after = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    assert!(before <= time && time <= after, "{before:?} {time:?} {after:?}");
}

#[test]
fn both_clocks_are_set() {
    let guest = LaidOut::new();
    guest.machine.0.lock().unwrap().hardware_clock = Some(NEW_YEAR);
    guest.call("guest-set-time", &json!({"time": 1_795_272_819_999_999_999_u64}));
    let state = guest.machine.0.lock().unwrap();
    assert_eq!(state.clock, Some(Duration::from_nanos(1_795_272_819_999_999_999)));
    let expected = Date { year: 2026, month: 11, day: 21, hour: 14, minute: 53, second: 39 };
    assert_eq!(state.hardware_clock, Some(expected));
}

#[test]
fn the_clock_is_set_from_the_hardware_clock() {
    let guest = LaidOut::new();
    let error = guest.error("guest-set-time", &Value::Null);
    assert!(error.contains("hardware clock cannot be read"), "{error}");
    assert_eq!(guest.machine.0.lock().unwrap().clock, None);
    guest.machine.0.lock().unwrap().hardware_clock = Some(NEW_YEAR);
    guest.call("guest-set-time", &json!({}));
    assert_eq!(guest.machine.0.lock().unwrap().clock, Some(Duration::from_secs(946_684_800)));
    // One that has lost its battery may show anything.
    for year in [1969, 2070, i32::MIN, i32::MAX] {
        guest.machine.0.lock().unwrap().hardware_clock = Some(Date { year, ..NEW_YEAR });
        assert!(guest.error("guest-set-time", &json!({})).contains("1970 to 2069"));
    }
    assert_eq!(guest.machine.0.lock().unwrap().clock, Some(Duration::from_secs(946_684_800)));
}

#[test]
fn a_guest_without_a_hardware_clock_is_set_all_the_same() {
    let guest = LaidOut::new();
    guest.call("guest-set-time", &json!({"time": 0}));
    let state = guest.machine.0.lock().unwrap();
    assert_eq!((state.clock, state.hardware_clock), (Some(Duration::ZERO), None));
}

#[test]
fn a_time_that_is_none_changes_nothing() {
    let guest = LaidOut::new();
    guest.machine.0.lock().unwrap().hardware_clock = Some(NEW_YEAR);
    for time in [
        json!(-1),
        json!(i64::MIN),
        json!(i64::MAX),
        json!(3_155_760_000_000_000_000_u64),
        json!(u64::MAX),
        json!(1.5),
        json!("1"),
        json!(null),
    ] {
        let error = guest.error("guest-set-time", &json!({"time": time}));
        assert!(error.contains("\"time\" must be"), "{time}: {error}");
    }
    assert!(guest.error("guest-set-time", &json!({"tiem": 1})).contains("Parameter 'tiem' is unexpected"));
    guest.machine.0.lock().unwrap().forbidden = true;
    assert!(guest.error("guest-set-time", &json!({"time": 1})).contains("not permitted"));
    let state = guest.machine.0.lock().unwrap();
    assert_eq!((state.clock, state.hardware_clock), (None, Some(NEW_YEAR)));
}
