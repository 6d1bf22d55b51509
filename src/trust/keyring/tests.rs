use std::path::Path;

use super::*;
use crate::trust::peer::Keyed;

fn machine(dmi: &str, id: &str, generation: &str) -> Machine {
    Machine { dmi: dmi.to_owned(), id: id.to_owned(), generation: generation.to_owned() }
}

#[test]
fn a_machine_is_another_one_only_where_something_known_differs() {
    let known = machine("a", "b", "c");
    for (other, same) in [
        (machine("a", "b", "c"), true),
        (machine("a", "b", ""), true),
        (machine("", "", ""), true),
        (machine("a", "b", "x"), false),
        (machine("a", "x", "c"), false),
        (machine("x", "b", "c"), false),
    ] {
        assert_eq!((known.may_be(&other), other.may_be(&known)), (same, same), "{other:?}");
    }
    assert_eq!(machine("a", "", "").with(machine("x", "b", "")), machine("a", "b", ""));
    assert_eq!(Machine::parse(&known.text()), Some(known));
    for damaged in ["", "dmi a\n", "dmi a\nvmgenid c\nmachine-id b\n"] {
        assert_eq!(Machine::parse(damaged), None, "{damaged:?}");
    }
}

/// A keyring in `folder` whose machine is what the cell says.
fn keyring(folder: &Path, now: &Arc<Mutex<Machine>>, is_writable: bool) -> Keyring {
    let now = Arc::clone(now);
    Keyring::new(Sources {
        hosts: folder.join("hosts.d"),
        folder: folder.join("own"),
        platform: Box::new(Vec::new),
        machine: Box::new(move || now.lock().unwrap().clone()),
        is_writable: Box::new(move || is_writable),
        clock: || Clock::Unset,
        plain: false,
    })
}

#[allow(clippy::disallowed_methods)]
fn give(folder: &Path, name: &str, text: &str) {
    std::fs::create_dir_all(folder.join("hosts.d")).unwrap();
    std::fs::write(folder.join("hosts.d").join(name), text).unwrap();
}

fn line() -> String {
    format!("{}\n", Key::generate().unwrap().public())
}

#[tokio::test]
async fn whoever_was_let_in_before_a_machine_became_another_one_does_not_stay() {
    let folder = tempfile::tempdir().unwrap();
    give(folder.path(), "a.pub", &line());
    let now = Arc::new(Mutex::new(machine("a", "b", "")));
    let keyring = keyring(folder.path(), &now, true);
    let Standing::Keyed(keys) = keyring.read().await else { panic!("no keys") };
    let anchor = keys.anchors[0].fingerprint;
    let peer = Peer::Keyed(Keyed { fingerprint: anchor, anchor, names: Vec::new(), roles: Vec::new() });
    let mut lost = Box::pin(keyring.lost(&peer));
    // What becomes known only later is no change.
    *now.lock().unwrap() = machine("a", "b", "c");
    keyring.tick().await;
    assert!(tokio::time::timeout(Duration::from_millis(50), &mut lost).await.is_err());
    *now.lock().unwrap() = machine("a", "b", "d");
    keyring.tick().await;
    lost.await;
    let Standing::Keyed(after) = keyring.read().await else { panic!("no keys") };
    assert_ne!(after.key.public(), keys.key.public());
}

#[tokio::test]
async fn while_nothing_can_be_written_a_guest_that_needs_a_key_lets_nobody_in() {
    let folder = tempfile::tempdir().unwrap();
    give(folder.path(), "a.pub", &line());
    let now = Arc::default();
    let frozen = keyring(folder.path(), &now, false);
    assert!(matches!(frozen.read().await, Standing::Unusable(_)));
    assert!(!folder.path().join("own").exists());
    let thawed = keyring(folder.path(), &now, true);
    assert!(matches!(thawed.read().await, Standing::Keyed(_)));
    // One that is there is used.
    assert!(matches!(frozen.read().await, Standing::Keyed(_)));
}

#[tokio::test]
async fn texts_that_disagree_leave_what_was_before() {
    let folder = tempfile::tempdir().unwrap();
    let line = line();
    give(folder.path(), "a.pub", &line);
    let ours = keyring(folder.path(), &Arc::default(), true);
    let Standing::Keyed(before) = ours.read().await else { panic!("no keys") };
    give(folder.path(), "b.pub", &line.replace('\n', " ca\n"));
    let Standing::Keyed(after) = ours.read().await else { panic!("no keys") };
    assert_eq!(after.anchors, before.anchors);
    assert_eq!(ours.list().problems.len(), 1);
    // Who begins with that has none of them.
    let fresh = keyring(folder.path(), &Arc::default(), true);
    let Standing::Keyed(fresh) = fresh.read().await else { panic!("no keys") };
    assert!(fresh.anchors.is_empty());
}
