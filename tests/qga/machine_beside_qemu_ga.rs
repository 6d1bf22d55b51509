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
    for command in ["guest-get-timezone"] {
        assert_eq!(ours.call(command), theirs.call(command), "{command}");
    }
    for command in ["guest-get-users"] {
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
