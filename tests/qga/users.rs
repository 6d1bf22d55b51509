//! Who is logged in.

use serde_json::{Value, json};

use crate::bus::{Kind, Logind};
use crate::laid_out::LaidOut;

const COMMAND: &str = "guest-get-users";

/// A record of utmp(5), as x86-64 has it.
fn record(kind: i16, user: &str, seconds: i32, microseconds: i32) -> Vec<u8> {
    let mut record = vec![0; 384];
    record[..2].copy_from_slice(&kind.to_le_bytes());
    record[44..44 + user.len()].copy_from_slice(user.as_bytes());
    record[340..344].copy_from_slice(&seconds.to_le_bytes());
    record[344..348].copy_from_slice(&microseconds.to_le_bytes());
    record
}

#[test]
fn nobody_where_nothing_keeps_a_list() {
    assert_eq!(LaidOut::new().call(COMMAND, &Value::Null), json!([]));
}

#[test]
fn everybody_of_utmp_once_since_their_first_login() {
    let guest = LaidOut::new();
    let records = [
        record(2, "reboot", 1, 0),
        record(7, "b", 30, 0),
        record(7, "a", 20, 500_000),
        record(7, "b", 10, 0),
    ];
    guest.write("/var/run/utmp", records.concat());
    let expected = json!([{"user": "b", "login-time": 10.0}, {"user": "a", "login-time": 20.5}]);
    assert_eq!(guest.call(COMMAND, &Value::Null), expected);
    guest.write("/run/utmp", "cut off");
    assert_eq!(guest.call(COMMAND, &Value::Null), json!([]));
}

#[test]
fn sessions_of_logind_where_there_is_no_utmp() {
    let guest = LaidOut::new();
    let sessions = vec![
        ("user", "a", 20_250_000),
        ("manager", "a", 1),
        ("greeter", "gdm", 2),
        ("user-early", "root", 5_000_000),
        ("user", "gone", 3),
        ("user", "a", 10_000_000),
    ];
    let _logind = Logind::begin(&guest, Kind { sessions, ..Kind::default() });
    let expected = json!([{"user": "a", "login-time": 10.0}, {"user": "root", "login-time": 5.0}]);
    assert_eq!(guest.call(COMMAND, &json!({})), expected);
    assert!(guest.error(COMMAND, &json!({"x": 1})).contains("Parameter 'x' is unexpected"));
}
