//! Debian's qemu-ga beside ours, asked about the clock, the users and the hardware of the same machine.

use std::path::PathBuf;

use serde_json::Value;

use crate::agent::Agent;

fn both() -> (Agent, Agent) {
    let theirs = std::env::var_os("QEMU_GA").expect("QEMU_GA must name Debian's qemu-ga; make test sets it");
    (Agent::start(), Agent::start_other(&PathBuf::from(theirs), &[]))
}

/// In an order of their own.
fn sorted(mut list: Value) -> Value {
    list.as_array_mut().unwrap().sort_by_key(ToString::to_string);
    list
}

#[test]
fn what_stands_still_agrees() {
    let (ours, theirs) = both();
    let (mut ours, mut theirs) = (ours.client(), theirs.client());
    for command in ["guest-get-timezone", "guest-get-memory-block-info"] {
        assert_eq!(ours.call(command), theirs.call(command), "{command}");
    }
    for command in ["guest-get-users", "guest-get-vcpus", "guest-get-memory-blocks"] {
        assert_eq!(sorted(ours.call(command)), sorted(theirs.call(command)), "{command}");
    }
}

#[test]
fn what_goes_on_agrees_when_it_is_asked_twice() {
    let (ours, theirs) = both();
    let (mut ours, mut theirs) = (ours.client(), theirs.client());
    let command = "guest-get-time";
    let (before, between, after) = (ours.call(command), theirs.call(command), ours.call(command));
    assert!(before.as_u64() <= between.as_u64() && between.as_u64() <= after.as_u64());
}

/// Times go on between the two calls, and processors have all of them.
#[test]
fn times_of_processors_have_the_same_fields() {
    let (ours, theirs) = both();
    let command = "guest-get-cpustats";
    let (before, between, after) =
        (ours.client().call(command), theirs.client().call(command), ours.client().call(command));
    let rows = |value: &Value| value.as_array().unwrap().clone();
    let (before, between, after) = (rows(&before), rows(&between), rows(&after));
    assert_eq!((before.len(), after.len()), (between.len(), between.len()));
    for ((before, between), after) in before.iter().zip(&between).zip(&after) {
        let names = |row: &Value| row.as_object().unwrap().keys().cloned().collect::<Vec<_>>();
        assert_eq!(names(before), names(between));
        assert_eq!((&before["cpu"], &before["type"]), (&between["cpu"], &between["type"]));
        let steady = ["user", "system", "nice", "steal"];
        for name in steady {
            assert!(before[name].as_u64() <= between[name].as_u64(), "{name}: {before} {between}");
            assert!(between[name].as_u64() <= after[name].as_u64(), "{name}: {between} {after}");
        }
    }
}
