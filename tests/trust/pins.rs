//! What a host half remembers of guests, and when that goes.

use crate::agent::{Agent, key, keys, lab, until, until_speaks};
use crate::host::{Lab, uuid};

/// Whether a VM is shown as one that is not there any more; none if it is not shown.
fn note(lab: &Lab, name: &str) -> Option<bool> {
    let list = keys(lab);
    let mut guests = list["guests"].as_array().unwrap().iter();
    guests.find(|guest| guest["name"] == name).map(|guest| guest["no_vm"].as_bool().unwrap())
}

#[test]
fn what_is_pinned_of_a_vm_that_is_gone_stays_is_shown_and_goes_on_demand() {
    let mut lab = lab(&["web", "db"]).start();
    let (web, db) = (Agent::keyed(&lab, "web"), Agent::keyed(&lab, "db"));
    assert_eq!((note(&lab, "web"), note(&lab, "db")), (Some(false), Some(false)));
    assert!(
        lab.words(&["trust", "forget", "--unlisted"])
            .contains("every VM whose key is known is in the settings")
    );
    let listed = format!("[[vm]]\nname = 'db'\nuuid = '{}'\n", uuid(2));
    let rest = std::fs::read_to_string(lab.settings()).unwrap().split(&listed).nth(1).unwrap().to_owned();
    let entry = listed + &rest;

    // What protects a VM that returns is still there when it does.
    let pinned = key(&lab, "db")["key"].clone();
    lab.edit(&entry, "");
    lab.until("db is gone", || !lab.ctl(&["info", "db"]).status.success());
    assert_eq!(note(&lab, "db"), Some(true));
    assert!(lab.words(&["trust", "ls"]).contains(&format!("unknown VM {}", uuid(2))));
    lab.edit("[[vm]]", &format!("{entry}[[vm]]"));
    lab.until("db is back", || lab.ctl(&["info", "db"]).status.success());
    until_speaks(&lab, "db", "keyed");
    assert_eq!((&key(&lab, "db")["key"], note(&lab, "db")), (&pinned, Some(false)));

    // Whoever gives a key up for good says so, and no other one goes with it.
    lab.edit(&entry, "");
    lab.until("db is gone", || !lab.ctl(&["info", "db"]).status.success());
    let told = lab.words(&["trust", "forget", "--unlisted"]);
    assert!(told.contains(&format!("db: forgotten ({})", db.own())), "{told}");
    assert_eq!((note(&lab, "db"), note(&lab, "web")), (None, Some(false)));
    assert_eq!(key(&lab, "web")["key"], web.own());
    until_speaks(&lab, "web", "keyed");
}

#[test]
fn a_guest_that_does_not_take_the_next_key_is_told_of_once() {
    let lab = lab(&["web"]).start();
    // Its line gives the host half no more than a look.
    let mut web = Agent::new(&lab, "web");
    web.give("host.pub", &crate::agent::key_line(&lab));
    web.start();
    until_speaks(&lab, "web", "keyed");
    drop(lab.words(&["trust", "rotate", "--host"]));
    let complaint = "cannot send this host half's keys to the guest";
    until("it is refused", || lab.log().contains(complaint));
    for sessions in 2..5 {
        web.restart();
        lab.until("another session", || lab.info("web")["sessions"] == sessions);
        until_speaks(&lab, "web", "keyed");
    }
    let denials = || web.log().matches("ReplaceHostKey").count();
    until("each session has tried", || denials() >= 4);
    assert_eq!(lab.log().matches(complaint).count(), 1, "{}", lab.log());
    let rotation = lab.words(&["trust", "rotate", "--host"]);
    assert!(rotation.contains("Not yet:   web"), "{rotation}");
}
