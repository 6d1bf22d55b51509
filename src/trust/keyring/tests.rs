use std::path::Path;
use std::sync::atomic::AtomicU64;

use rustls::pki_types::UnixTime;

use super::*;
use crate::trust::Fingerprint;

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

/// Returns a keyring in `folder` on the machine that is in the cell.
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

fn peer(anchor: Fingerprint, until: Option<UnixTime>) -> Peer {
    Peer::Keyed(keyed(anchor, until))
}

fn keyed(anchor: Fingerprint, until: Option<UnixTime>) -> Keyed {
    Keyed { fingerprint: anchor, anchor, names: Vec::new(), roles: Vec::new(), until }
}

#[tokio::test]
async fn whoever_was_let_in_before_a_machine_became_another_one_does_not_stay() {
    let folder = tempfile::tempdir().unwrap();
    give(folder.path(), "a.pub", &line());
    let now = Arc::new(Mutex::new(machine("a", "b", "")));
    let keyring = keyring(folder.path(), &now, true);
    let Standing::Keyed(keys) = keyring.read().await else { panic!("no keys") };
    let anchor = keys.anchors[0].fingerprint;
    let peer = peer(anchor, None);
    let mut lost = Box::pin(keyring.lost(&peer));
    // An identifier that becomes known later is not a change.
    *now.lock().unwrap() = machine("a", "b", "c");
    keyring.tick().await;
    assert!(tokio::time::timeout(Duration::from_millis(50), &mut lost).await.is_err());
    *now.lock().unwrap() = machine("a", "b", "d");
    keyring.tick().await;
    assert_eq!(lost.await, Loss::Machine);
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

/// Regression test: a request of the host half that was made before root removed its key, and is carried out
/// after that.
#[tokio::test]
#[allow(clippy::disallowed_methods)]
async fn a_request_that_was_under_way_brings_no_key_back_after_a_reset() {
    let folder = tempfile::tempdir().unwrap();
    give(folder.path(), "a.pub", &line());
    let keyring = keyring(folder.path(), &Arc::default(), true);
    let Standing::Keyed(keys) = keyring.read().await else { panic!("no keys") };
    let host = keyed(keys.anchors[0].fingerprint, None);
    let next = keyring.change(host.clone(), |files, _| files.prepare_next()).await.unwrap();
    std::fs::remove_file(folder.path().join("hosts.d/a.pub")).unwrap();
    assert!(!keyring.reset().await.unwrap());
    let refused = |result: Result<(), KeyError>| {
        assert!(matches!(result, Err(KeyError::NoLongerTrusted)), "{result:?}");
    };
    refused(keyring.change(host.clone(), |files, _| files.prepare_next().map(drop)).await);
    refused(keyring.change(host.clone(), move |files, _| files.use_next(next.fingerprint()).map(drop)).await);
    refused(keyring.change(host.clone(), move |files, host| files.add_host(host, next)).await);
    refused(keyring.change(host, move |files, host| files.retire_host(host, next.fingerprint())).await);
    assert_eq!(std::fs::read_dir(folder.path().join("own")).unwrap().count(), 0);
    assert!(matches!(keyring.read().await, Standing::Plain));
}

#[tokio::test]
async fn a_reset_waits_for_whoever_reads_and_is_in_force_when_it_returns() {
    let folder = tempfile::tempdir().unwrap();
    give(folder.path(), "a.pub", &line());
    let ours = keyring(folder.path(), &Arc::default(), true);
    let Standing::Keyed(before) = ours.read().await else { panic!("no keys") };
    let peer = peer(before.anchors[0].fingerprint, None);
    // The key is still given: a new one is generated, and connected peers may stay.
    assert!(ours.reset().await.unwrap());
    let own = |keyring: &Keyring| keyring.list().own.unwrap();
    assert_ne!(own(&ours), before.key.public());
    let stays = tokio::time::timeout(Duration::from_millis(20), ours.lost(&peer)).await;
    assert!(stays.is_err(), "{stays:?}");
    #[allow(clippy::disallowed_methods)]
    std::fs::remove_file(folder.path().join("hosts.d/a.pub")).unwrap();
    let (_, is_keyed) = tokio::join!(ours.read(), ours.reset());
    assert!(!is_keyed.unwrap() && !ours.is_keyed().load(Ordering::Relaxed));
    assert_eq!(ours.lost(&peer).await, Loss::Key(before.anchors[0].fingerprint));
    assert!(matches!(ours.read().await, Standing::Plain));

    let frozen = keyring(folder.path(), &Arc::default(), false);
    assert!(matches!(frozen.reset().await, Err(KeyError::Frozen(_))));
}

/// Anybody can open a connection: none of them has the disk written to again and again.
#[tokio::test]
async fn a_key_that_cannot_be_kept_is_not_made_anew_for_each_connection() {
    let folder = tempfile::tempdir().unwrap();
    give(folder.path(), "a.pub", &line());
    let tries = Arc::new(AtomicU64::new(0));
    let counted = Arc::clone(&tries);
    let keyring = Keyring::new(Sources {
        hosts: folder.path().join("hosts.d"),
        // No directory can be made there.
        folder: "/proc/self/guestlet".into(),
        platform: Box::new(Vec::new),
        // Looked at whenever a key is made.
        machine: Box::new(move || {
            counted.fetch_add(1, Ordering::Relaxed);
            Machine::default()
        }),
        is_writable: Box::new(|| true),
        clock: || Clock::Unset,
        plain: false,
    });
    for _ in 0..3 {
        let Standing::Unusable(words) = keyring.read().await else { panic!("it has a key") };
        assert!(words.contains("cannot write /proc/self/guestlet"), "{words}");
    }
    assert_eq!(tries.load(Ordering::Relaxed), 1);
    // After a repair there is no waiting time.
    assert!(keyring.reset().await.unwrap());
    assert_eq!(tries.load(Ordering::Relaxed), 2);
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
    // A new keyring in the directory has none of them.
    let fresh = keyring(folder.path(), &Arc::default(), true);
    let Standing::Keyed(fresh) = fresh.read().await else { panic!("no keys") };
    assert!(fresh.anchors.is_empty());
}

/// Seconds since 1970, as the clock of one test has them; 0 while it is not set.
static SECONDS: AtomicU64 = AtomicU64::new(0);

fn seconds() -> Clock {
    match SECONDS.load(Ordering::Relaxed) {
        0 => Clock::Unset,
        seconds => Clock::Set(UnixTime::since_unix_epoch(Duration::from_secs(seconds))),
    }
}

#[tokio::test]
async fn a_session_does_not_outlive_the_certificate_once_the_clock_is_set() {
    let folder = tempfile::tempdir().unwrap();
    give(folder.path(), "a.pub", &line());
    let ours = keyring(folder.path(), &Arc::default(), true);
    let Standing::Keyed(keys) = ours.read().await else { panic!("no keys") };
    let anchor = keys.anchors[0].fingerprint;
    let sources = Sources {
        hosts: folder.path().join("hosts.d"),
        folder: folder.path().join("own"),
        platform: Box::new(Vec::new),
        machine: Box::new(Machine::default),
        is_writable: Box::new(|| true),
        clock: seconds,
        plain: false,
    };
    let keyring = Keyring::new(sources);
    keyring.read().await;
    let (for_good, certified) =
        (peer(anchor, None), peer(anchor, Some(UnixTime::since_unix_epoch(Duration::from_secs(100)))));
    let mut lost = Box::pin(keyring.lost(&certified));
    for now in [0, 99, 100] {
        SECONDS.store(now, Ordering::Relaxed);
        keyring.tick().await;
        assert!(tokio::time::timeout(Duration::from_millis(20), &mut lost).await.is_err(), "{now}");
    }
    SECONDS.store(101, Ordering::Relaxed);
    keyring.tick().await;
    assert_eq!(lost.await, Loss::Expired);
    let stays = tokio::time::timeout(Duration::from_millis(20), keyring.lost(&for_good)).await;
    assert!(stays.is_err(), "a key that the guest was given itself has no end");
}
