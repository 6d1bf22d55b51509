//! `guestlet trust reset`, whatever the agent is doing at that moment.

use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::agent::{Agent, lab, until, until_speaks};
use crate::wire::PLAIN;

/// Within this time after its directory has changed the agent has read its keys again.
const NOTICED: u64 = 150;
/// Times that the keys are taken away.
const ROUNDS: u64 = 30;

/// Whether whoever speaks without keys is answered.
fn answers_plain(socket: &Path) -> bool {
    let mut stream = UnixStream::connect(socket).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    stream.write_all(PLAIN).is_ok() && stream.read(&mut [0; 9]).is_ok_and(|length| length > 0)
}

/// The agent reads its keys for each connection, and when their directory has changed: a reset in the middle of that must not
/// have it make the guest's own key anew, after which it would let nobody in.
#[test]
fn a_reset_right_after_the_last_key_is_taken_away_leaves_a_guest_without_keys() {
    let lab = lab(&["web"]).start();
    let web = Agent::keyed(&lab, "web");
    let has_ended = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !has_ended.load(Ordering::Relaxed) {
                drop(UnixStream::connect(web.socket()));
                // Not so many at a time that they take the place of others who have not said a word yet.
                std::thread::sleep(Duration::from_millis(25));
            }
        });
        let ended = Ended(&has_ended);
        for round in 0..ROUNDS {
            web.know(&lab);
            until("the guest has a key", || !web.own().is_empty());
            std::fs::remove_file(web.file("hosts.d/host.pub")).unwrap();
            std::thread::sleep(Duration::from_millis(round * NOTICED / ROUNDS));
            let reset = web.trust(&["reset"]);
            let told = String::from_utf8_lossy(&reset.stdout);
            assert!(reset.status.success(), "{round}: {reset:?}");
            assert!(!told.contains("still given keys"), "{round}: {told}");
            assert!(answers_plain(&web.socket()), "{round}: it is in force: {}", web.log());
            std::thread::sleep(Duration::from_millis(2 * NOTICED));
            assert_eq!(web.keys()["keyed"], false, "{round}: {}", web.log());
        }
        drop(ended);
    });
    // The host half is told so.
    lab.until_vm("web", |vm| vm["reason"].as_str().unwrap_or_default().contains("uses no keys"));
    lab.words(&["trust", "forget", "web"]);
    until_speaks(&lab, "web", "plain");
}

/// Ends the other thread whether the test has failed or not.
struct Ended<'a>(&'a AtomicBool);

impl Drop for Ended<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn a_reset_works_without_an_agent_and_says_what_is_still_given() {
    let lab = lab(&["web"]).start();
    let mut web = Agent::keyed(&lab, "web");
    let before = web.own();
    for runs in [true, false] {
        let reset = web.trust(&["reset"]);
        let told = String::from_utf8_lossy(&reset.stdout);
        assert!(reset.status.success() && told.contains("still given keys"), "{runs}: {reset:?}");
        assert_ne!(web.own(), before);
        // A running agent has made itself a new key before it answers.
        assert_eq!(web.own().is_empty(), !runs);
        web.stop();
    }
    std::fs::remove_file(web.file("hosts.d/host.pub")).unwrap();
    assert!(web.trust(&["reset"]).status.success());
    assert_eq!(web.keys()["keyed"], false);
    web.start();
    assert!(answers_plain(&web.socket()));
}
