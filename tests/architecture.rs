//! Reads the sources and holds the table of who may import whom.

#![allow(clippy::disallowed_methods, clippy::unwrap_used)]

mod dependencies;
mod docs;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// Room → the rooms that it may import. Imports go one way; when this table should change, change it on
/// purpose.
const ALLOWED: &[(&str, &[&str])] = &[
    // Programs: arguments → settings → run.
    (
        "bin",
        &[
            "agent",
            "applications",
            "ccm",
            "config",
            "ctl",
            "doctor",
            "hostd",
            "kubernetes",
            "policy",
            "privileges",
            "qga",
            "receipt",
            "status",
            "sys",
            "text",
            "thaw",
            "wire",
        ],
    ),
    // Assemblies: the only readers of settings.
    (
        "agent",
        &[
            "cloud",
            "config",
            "copies",
            "csi",
            "guest",
            "labels",
            "pace",
            "policy",
            "qga",
            "receipt",
            "rpc",
            "supervise",
            "sys",
            "text",
            "topology",
            "transport",
            "trust",
            "wire",
        ],
    ),
    (
        "hostd",
        &["access", "addresses", "config", "host", "kubernetes", "supervise", "sys", "transport", "trust"],
    ),
    // (Its own terminal, while a program in a guest has it.)
    ("ctl", &["copies", "events", "labels", "metrics", "receipt", "sys", "text", "transport", "wire"]),
    ("status", &["text", "transport", "wire"]),
    // What settings come to, told to people and to systemd. (The command table is for a test of the names.)
    ("doctor", &["config", "policy", "privileges", "status", "sys", "text", "wire"]),
    ("privileges", &["config", "policy", "qga"]),
    // Has to work without an agent, and so without a protocol.
    ("thaw", &["guest", "status", "sys"]),
    // Protocols: parse, check policy, call a verb, answer.
    ("qga", &["guest", "pace", "policy", "receipt", "sys", "wire"]),
    ("rpc", &["copies", "guest", "metrics", "policy", "receipt", "sys", "transport", "trust", "wire"]),
    // Reads and writes what is copied, as the messages about it ask: the same at both ends.
    ("copies", &["sys", "wire"]),
    // Who may do what, and what was done; the protocols ask it.
    ("policy", &["pace", "sys", "text", "trust"]),
    // kubelet's sockets come and go with its folder, so that it owns them and what is served on them.
    ("csi", &["guest", "supervise", "sys", "transport", "wire"]),
    // The same of the socket for the cloud controller manager.
    ("cloud", &["supervise", "sys", "transport", "wire"]),
    // (What it tells of are the messages of events, which it passes on as they are.)
    ("guest", &["applications", "events", "labels", "metrics", "receipt", "sys", "turns", "wire"]),
    // Clients of databases, each in a process of its own, which a guest starts and speaks with.
    ("applications", &["sys"]),
    // What of a guest is a node of a cluster.
    ("topology", &["guest", "labels", "sys"]),
    // The host half owns its sessions and so the streams under them.
    (
        "host",
        &[
            "access",
            "addresses",
            "events",
            "kubernetes",
            "labels",
            "metrics",
            "pace",
            "receipt",
            "supervise",
            "sys",
            "transport",
            "trust",
            "turns",
            "wire",
        ],
    ),
    ("transport", &["supervise", "sys", "wire"]),
    // (Grants and rules of access are checked where they are read; kinds of applications are known by their names.)
    ("config", &["access", "addresses", "applications", "labels", "policy", "sys", "text", "trust"]),
    ("access", &["text"]),
    ("addresses", &[]),
    // Pure, of both ends: agents tell what host halves keep and people read.
    ("events", &["text", "wire"]),
    // A client of its own cluster, and of the host half through an agent.
    ("ccm", &["kubernetes", "labels", "pace", "supervise", "sys", "transport", "wire"]),
    // Clients of an API server, whichever cluster it is of.
    ("kubernetes", &["sys"]),
    ("labels", &[]),
    // Pure, of both ends: agents measure what host halves and people read.
    ("metrics", &["wire"]),
    ("pace", &[]),
    // Pure, of both ends: a guest makes what a host half and people read.
    ("receipt", &["text"]),
    ("supervise", &[]),
    ("sys", &[]),
    ("text", &[]),
    // Keys, in files and in handshakes; what a peer may do is decided elsewhere.
    ("trust", &["sys", "transport"]),
    ("turns", &[]),
    ("wire", &[]),
];

fn source() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("src")
}

fn files(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

/// The room of a file: the first part of its path below src.
fn room(path: &Path) -> String {
    let relative = path.strip_prefix(source()).unwrap();
    relative.components().next().unwrap().as_os_str().to_str().unwrap().trim_end_matches(".rs").to_owned()
}

/// The text without comments, so that a path in a doc link is no import.
fn code(text: &str) -> String {
    let start =
        |line: &str| line.match_indices("//").find(|(at, _)| !line[..*at].ends_with(':')).map(|(at, _)| at);
    text.lines().map(|line| &line[..start(line).unwrap_or(line.len())]).collect::<Vec<_>>().join("\n")
}

/// Every room that the code names by `crate::room` or, in a program, `guestlet::room`; also in braces.
fn imports(code: &str, roots: &[&str]) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for root in roots {
        for (at, _) in code.match_indices(&format!("{root}::")) {
            if code[..at].ends_with(|before: char| before.is_alphanumeric() || before == '_' || before == ':')
            {
                continue;
            }
            let rest = &code[at + root.len() + 2..];
            match rest.strip_prefix('{') {
                None => found.extend(first_name(rest)),
                Some(list) => {
                    let mut depth = 1;
                    let mut item = String::new();
                    for character in list.chars() {
                        match character {
                            '{' => depth += 1,
                            '}' => depth -= 1,
                            ',' if depth == 1 => found.extend(first_name(&std::mem::take(&mut item))),
                            _ if depth == 1 => item.push(character),
                            _ => {}
                        }
                        if depth == 0 {
                            break;
                        }
                    }
                    found.extend(first_name(&item));
                }
            }
        }
    }
    found
}

/// Whether a chain of `super::` is so long that it names the crate's root, or more.
fn leaves_its_room(path: &Path, text: &str) -> bool {
    let relative = path.strip_prefix(source()).unwrap();
    let depth = relative.components().count() - usize::from(relative.ends_with("mod.rs"));
    code(text).contains(&"super::".repeat(depth))
}

fn first_name(text: &str) -> Option<String> {
    let text = text.trim_start();
    let end = text.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(text.len());
    // Rooms are modules; constants and macros of the crate's root belong to everyone.
    let name = &text[..end];
    (!name.is_empty() && name.chars().all(|c| c.is_lowercase() || c == '_')).then(|| name.to_owned())
}

#[test]
fn imports_go_only_where_the_table_allows() {
    let allowed: BTreeMap<&str, &[&str]> = ALLOWED.iter().copied().collect();
    let mut found = Vec::new();
    files(&source(), &mut found);
    assert!(found.len() > 20, "the sources were not found");
    let mut wrong = Vec::new();
    for path in found {
        let room = room(&path);
        if room == "lib" {
            continue;
        }
        let roots: &[&str] = if room == "bin" { &["guestlet"] } else { &["crate"] };
        let Some(allowed) = allowed.get(room.as_str()) else {
            wrong.push(format!("{}: the room {room:?} is not in the table", path.display()));
            continue;
        };
        let text = std::fs::read_to_string(&path).unwrap();
        if leaves_its_room(&path, text.split("#[cfg(test)]").next().unwrap_or_default()) {
            wrong.push(format!("{}: super:: must not lead out of the room; write crate::", path.display()));
        }
        for import in imports(&code(&text), roots) {
            if import != room && !allowed.contains(&import.as_str()) {
                wrong.push(format!("{}: {room} must not import {import}", path.display()));
            }
        }
    }
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}

#[test]
fn the_reader_of_imports_sees_every_form() {
    let code = code(
        "use crate::sys::root;\nuse crate::{guest, qga::{self, table}, wire as w};\nfn f() { crate::rpc::guest::x() }\n\
         // use crate::ctl;\nlet v = crate::VERSION; my_crate::config::x(); crate::proto!();",
    );
    assert_eq!(
        imports(&code, &["crate"]).into_iter().collect::<Vec<_>>(),
        ["guest", "proto", "qga", "rpc", "sys", "wire"]
    );
}

/// The modules below this one that a file of it names by `super::` or from the crate's root, without its tests.
fn neighbours(path: &Path, room: &Path, top: &str) -> BTreeSet<String> {
    let relative = path.strip_prefix(room).unwrap();
    let depth = relative.components().count() - usize::from(relative.ends_with("mod.rs"));
    let text = std::fs::read_to_string(path).unwrap();
    let code = code(text.split("#[cfg(test)]\nmod tests").next().unwrap());
    let up = vec!["super"; depth].join("::");
    let mut found = imports(&code, &[&up, top]);
    found.remove("super");
    found
}

/// Whether there is a way from one to the other.
fn leads(arrows: &BTreeSet<(String, String)>, from: &str, to: &str) -> bool {
    let (mut seen, mut next) = (BTreeSet::new(), vec![from]);
    while let Some(at) = next.pop() {
        for (_, there) in arrows.iter().filter(|(from, _)| from == at) {
            if there == to {
                return true;
            }
            if seen.insert(there.as_str()) {
                next.push(there);
            }
        }
    }
    false
}

/// Directories whose modules form circles still. None is to be added: what two modules need of each other is a third one.
const IN_CIRCLES: &[&str] = &[
    "ccm",
    "ccm/services",
    "config/agent",
    "ctl",
    "ctl/cluster",
    "guest",
    "guest/disk_rules",
    "guest/pod_volumes",
    "guest/volumes",
    "host/backends/kubevirt",
    "host/backends/kubevirt/hotplug",
    "host/cloud/remote",
    "policy",
    "qga",
    "rpc",
];

/// The arrows between modules of a directory that are in a circle.
fn circles(room: &Path) -> Vec<String> {
    let mut found = Vec::new();
    files(room, &mut found);
    // These are tests alone.
    let is_test = |path: &Path| {
        let mut parts = path.strip_prefix(room).unwrap().components();
        parts.any(|part| {
            ["tests", "tests.rs", "model", "model.rs"].iter().any(|name| part.as_os_str() == *name)
        })
    };
    found.retain(|path| !is_test(path) && *path != room.join("mod.rs"));
    let module = |path: &Path| {
        let first = path.strip_prefix(room).unwrap().components().next().unwrap();
        first.as_os_str().to_str().unwrap().trim_end_matches(".rs").to_owned()
    };
    let modules: BTreeSet<_> = found.iter().map(|path| module(path)).collect();
    let relative = room.strip_prefix(source()).unwrap().to_str().unwrap().replace('/', "::");
    let mut arrows = BTreeSet::new();
    for path in &found {
        let from = module(path);
        let others = neighbours(path, room, &format!("crate::{relative}")).into_iter();
        arrows.extend(others.filter(|to| *to != from && modules.contains(to)).map(|to| (from.clone(), to)));
    }
    let closes = |(from, to): &&(String, String)| leads(&arrows, to, from);
    arrows.iter().filter(closes).map(|(from, to)| format!("{from} → {to}")).collect()
}

#[test]
fn modules_of_a_directory_form_no_circle() {
    let mut found = Vec::new();
    files(&source(), &mut found);
    let parents = found.iter().flat_map(|path| path.ancestors().skip(1));
    let rooms: BTreeSet<_> =
        parents.filter(|path| path.starts_with(source()) && **path != source()).collect();
    assert!(rooms.len() > 50, "the sources were not found");
    let (mut wrong, mut still) = (Vec::new(), Vec::new());
    for room in rooms {
        let arrows = circles(room);
        let name = room.strip_prefix(source()).unwrap().to_str().unwrap();
        if arrows.is_empty() {
            continue;
        }
        still.push(name);
        if !IN_CIRCLES.contains(&name) {
            wrong.push(format!("{name}: {}", arrows.join(", ")));
        }
    }
    assert!(wrong.is_empty(), "these are in circles:\n{}", wrong.join("\n"));
    assert_eq!(still, IN_CIRCLES, "some are in circles no more, and leave the table");
}

/// What users of a backend read is in its own words; what all backends share speaks of none of them.
#[test]
fn what_backends_share_speaks_of_none_of_them() {
    let mut found = Vec::new();
    files(&source().join("host"), &mut found);
    let of_one = ["host/backends/qemu", "host/backends/kubevirt"].map(|room| source().join(room));
    found.retain(|path| !of_one.iter().any(|room| path.starts_with(room)));
    assert!(found.len() > 20, "the sources were not found");
    for path in found {
        // These are all tests.
        if path.ends_with("volumes/model.rs") || path.ends_with("fleet/tests.rs") {
            continue;
        }
        let text = std::fs::read_to_string(&path).unwrap();
        let code = code(text.split("#[cfg(test)]\nmod tests {").next().unwrap());
        for name in ["QEMU", "QMP", "libvirt", "KubeVirt"] {
            assert!(!code.contains(name), "{}: {name}", path.display());
        }
    }
}

/// Issue 16: agents of tests served the kubelet of the machine. What starts one has to get it where its settings keep it
/// away from the machine.
#[test]
fn tests_get_the_programs_in_one_place_each() {
    // In two parts, so that this file is not among them.
    let agent = concat!("CARGO_BIN_EXE_", "guestlet\"");
    let host = concat!("CARGO_BIN_EXE_", "guestlet-host\"");
    let top = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut found = Vec::new();
    files(&top.join("tests"), &mut found);
    files(&top.join("benches"), &mut found);
    for (words, places) in [
        (agent, &["tests/fixtures/launch.rs"][..]),
        (host, &["benches/host_scale/host.rs", "tests/host/lab.rs"]),
    ] {
        let has = |path: &&PathBuf| std::fs::read_to_string(path).unwrap().contains(words);
        let there = found.iter().filter(has).map(|path| path.strip_prefix(top).unwrap().to_str().unwrap());
        assert_eq!(there.collect::<BTreeSet<_>>().into_iter().collect::<Vec<_>>(), places);
    }
}
