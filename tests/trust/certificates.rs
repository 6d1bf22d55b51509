//! Host halves for which a CA vouches: guests go from one to the other.

use crate::agent::{Agent, key, keys, listed, until_refused, until_speaks};
use crate::authority::{Authority, Oddly};
use crate::host::Lab;

/// Gives the lab's host half a key and a certificate, which its settings name from then on.
fn vouch(authority: &Authority, lab: Lab, host: &str, oddly: Oddly) -> Lab {
    let (key, certificate) = authority.files(&lab.path(""), host, oddly);
    lab.set(&format!("trust.key = '{}'\ntrust.certificate = '{}'", key.display(), certificate.display()))
}

#[test]
fn a_guest_goes_to_another_host_of_the_same_ca_and_to_none_of_another() {
    let (ours, theirs) = (Authority::new(), Authority::new());
    let here = listed(vouch(&ours, Lab::new(), "one", Oddly::default()), &["web"]).start();
    let mut web = Agent::new(&here, "web");
    web.give("ca.pub", &ours.line());
    web.start();
    until_speaks(&here, "web", "keyed");
    assert_ne!(keys(&here)["ca_key"], "");
    assert_eq!(web.keys()["hosts"][0]["ca"], true);
    let mut here = here;
    here.stop();
    let dial = |authority: &Authority, oddly| {
        let lab = listed(vouch(authority, Lab::new(), "two", oddly), &["web"]);
        std::fs::create_dir_all(lab.path("web")).unwrap();
        std::os::unix::fs::symlink(web.socket(), lab.path("web/control.sock")).unwrap();
        lab.start()
    };
    let there = dial(&ours, Oddly::default());
    until_speaks(&there, "web", "keyed");
    assert_eq!(key(&there, "web")["key"], web.own());
    drop(there);
    let foreign = dial(&theirs, Oddly::default());
    assert!(until_refused(&foreign, "web").contains("does not know this host half's key"));
    drop(foreign);
    // Certificates that are not what they have to be.
    let wrong = [
        (Oddly { not_after: Some(2021), ..Oddly::default() }, "it is not valid now"),
        (Oddly { not_before: Some(2080), ..Oddly::default() }, "it is not valid now"),
        (
            Oddly { name: Some("https://lab/host/one"), ..Oddly::default() },
            "see the guest's log for what is wrong",
        ),
        (
            Oddly { name: Some("guestlet://lab/guest/one"), ..Oddly::default() },
            "see the guest's log for what is wrong",
        ),
        (Oddly { for_servers: true, ..Oddly::default() }, "see the guest's log for what is wrong"),
    ];
    let is_synchronized = web_clock_counts();
    for (oddly, expected) in wrong {
        if expected.contains("not valid now") && !is_synchronized {
            continue;
        }
        let wrong = dial(&ours, oddly);
        let reason = until_refused(&wrong, "web");
        assert!(reason.contains(expected), "{reason}\n{}", web.log());
    }
}

/// Whether this machine's clock is one that the agent believes; where it is not, dates are proved by the tests of the module.
fn web_clock_counts() -> bool {
    let output = std::process::Command::new("timedatectl").args(["show", "-p", "NTPSynchronized"]).output();
    output.is_ok_and(|output| output.stdout.starts_with(b"NTPSynchronized=yes"))
}

#[test]
fn a_certificate_is_renewed_without_a_restart() {
    let ours = Authority::new();
    let mut lab = listed(vouch(&ours, Lab::new(), "one", Oddly::default()), &["web"]).start();
    let mut web = Agent::new(&lab, "web");
    web.give("ca.pub", &ours.line());
    web.start();
    until_speaks(&lab, "web", "keyed");
    let before = keys(&lab)["host_key"].clone();
    ours.files(&lab.path(""), "one", Oddly::default());
    lab.until("the new one is shown", || keys(&lab)["host_key"] != before);
    web.restart();
    lab.until("a new session", || lab.info("web")["sessions"] == 2);
    until_speaks(&lab, "web", "keyed");
    // One that does not fit its key is told, and the one before stays.
    let shown = keys(&lab)["host_key"].clone();
    std::fs::write(lab.path("tls.pem"), "nothing").unwrap();
    lab.until("it is told", || {
        drop(keys(&lab));
        lab.log().contains("the previous key stays in use")
    });
    assert_eq!(keys(&lab)["host_key"], shown);
    // At a start there is none before.
    lab.stop();
    let output = lab.daemon("second.log").output().unwrap();
    assert!(!output.status.success());
    let log = std::fs::read_to_string(lab.path("second.log")).unwrap();
    assert!(log.contains("tls.pem: it has 0 certificates; it needs two"), "{log}");
}
