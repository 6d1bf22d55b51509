//! Debian's qemu-ga beside ours, on the same machine, asked the same: the answers agree.

use std::path::PathBuf;

use guestlet::qga::table::{self, COMMANDS};
use serde_json::{Value, json};

use crate::agent::{Agent, Client};

/// The program to compare with, which `make setup` unpacks; `QEMU_GA` names it.
pub fn qemu_ga() -> PathBuf {
    let path = std::env::var_os("QEMU_GA").expect("QEMU_GA must name Debian's qemu-ga; make test sets it");
    let path = PathBuf::from(path);
    assert!(path.is_file(), "QEMU_GA names {}, which is no file", path.display());
    path
}

pub fn both() -> (Agent, Agent) {
    (Agent::start(), Agent::start_other(&qemu_ga(), &[]))
}

#[test]
fn results_agree_field_by_field() {
    let (ours, theirs) = both();
    let (mut ours, mut theirs) = (ours.client(), theirs.client());
    for command in ["guest-ping", "guest-get-host-name", "guest-get-osinfo"] {
        assert_eq!(ours.call(command), theirs.call(command), "{command}");
    }
    let steady = |mut interfaces: Value| {
        for interface in interfaces.as_array_mut().unwrap() {
            // The counters go on between the two calls; that they are there must agree.
            if let Some(statistics) = interface.get_mut("statistics") {
                for counter in statistics.as_object_mut().unwrap().values_mut() {
                    assert!(counter.is_u64());
                    *counter = Value::Null;
                }
            }
        }
        interfaces
    };
    let command = "guest-network-get-interfaces";
    assert_eq!(steady(ours.call(command)), steady(theirs.call(command)), "{command}");
}

#[test]
fn our_commands_are_listed_with_the_same_flags() {
    let (ours, theirs) = both();
    let theirs = theirs.client().call("guest-info");
    let theirs = theirs["supported_commands"].as_array().unwrap();
    for command in ours.client().call("guest-info")["supported_commands"].as_array().unwrap() {
        // Debian's is 7.2.
        let place = table::find(command["name"].as_str().unwrap()).unwrap();
        let since = COMMANDS[place].since.split_once('.').unwrap();
        let since: (u32, u32) = (since.0.parse().unwrap(), since.1.parse().unwrap());
        assert!(theirs.contains(command) || since > (7, 2), "{command}");
    }
}

/// The kinds of all answers until a sync answers; an error is its class.
fn kinds(client: &mut Client, input: &[u8]) -> Vec<String> {
    client.send(input);
    client.send(b"{\"execute\":\"guest-sync\",\"arguments\":{\"id\":4711}}\n");
    let mut kinds = Vec::new();
    loop {
        let line = client.line();
        let (delimited, text) = match line.strip_prefix(b"\xff") {
            Some(text) => ("delimited ", text),
            None => ("", line.as_slice()),
        };
        let answer: Value = serde_json::from_slice(text).unwrap();
        if answer == json!({"return": 4711}) {
            return kinds;
        }
        let id = answer.get("id").map(|id| format!(" id {id}")).unwrap_or_default();
        kinds.push(match answer.get("error") {
            Some(error) => format!("{delimited}{}{id}", error["class"].as_str().unwrap()),
            None => format!("{delimited}return {}{id}", answer["return"]),
        });
    }
}

#[test]
fn what_is_on_the_wire_is_taken_apart_alike() {
    let (ours, theirs) = both();
    let cases: &[&[u8]] = &[
        b"{\"execute\":\"guest-ping\"}",
        b"{\"execute\":\"guest-ping\"}{\"execute\":\"guest-ping\"}",
        b"\n\n \t{'execute':'guest-ping', 'id':'a\"b'}\r\n",
        b"{\"execute\":\"guest-ping\",\"id\":[1,{\"a\":null}]}",
        b"{\"execute\":\"guest-nothing\",\"id\":1}",
        b"{\"execute\":\"guest-ping\",\"arguments\":{\"x\":1},\"id\":2}",
        b"{\"execute\":\"guest-ping\",\"arguments\":[],\"id\":2}",
        b"{\"execute\":\"guest-ping\",\"more\":1,\"id\":3}",
        b"{\"execute\":1,\"id\":4}",
        b"{\"id\":5}",
        b"{}",
        b"[]",
        b"[1,2]",
        b"\xff{\"execute\":\"guest-ping\"}",
        b"{\"execute\":\"guest-pi\xff{\"execute\":\"guest-ping\"}",
        b"{\"execute\":\xff\n{\"execute\":\"guest-ping\"}",
        b"\xff{\"execute\":\"guest-sync-delimited\",\"arguments\":{\"id\":5}}",
        b"{\"execute\":\"guest-sync\",\"arguments\":{\"id\":-9223372036854775808}}",
        b"{\"execute\":\"guest-sync\",\"arguments\":{\"id\":9223372036854775808}}",
        b"{\"execute\":\"guest-sync\",\"arguments\":{\"id\":\"1\"}}",
        b"{\"execute\":\"guest-sync\",\"arguments\":{\"id\":1.0}}",
        b"{\"execute\":\"guest-sync\",\"arguments\":{}}",
        b"{\"execute\":\"guest-sync\"}",
        b"{\"execute\":\"guest-shutdown\",\"arguments\":{\"mode\":7}}",
        b"5 ",
        b"\"text\"",
        b"true ",
        b"}",
        b"]}",
        b"{]",
        b"{\"a\" \"b\"}",
        b"{\"a\":1,}",
        b"{\"execute\":\"gu\nest-ping\"}\n",
        b"@",
        b"{\"execute\":\"guest-ping\",\"execute\":\"guest-ping\"}",
        b"{\"execute\":\"guest-p\\u0069ng\"}",
        b"{\"execute\":\"guest-\\'ping\"}",
    ];
    let mut wrong = Vec::new();
    for case in cases {
        // Each case has connections of its own: what one leaves behind is not the next one's.
        let (mut ours, mut theirs) = (ours.client(), theirs.client());
        let (our_kinds, their_kinds) = (kinds(&mut ours, case), kinds(&mut theirs, case));
        if our_kinds != their_kinds {
            let case = String::from_utf8_lossy(case);
            wrong.push(format!("{case}\n  ours:   {our_kinds:?}\n  theirs: {their_kinds:?}"));
        }
    }
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}
