//! How a guest and a host half come to know each other.

use crate::agent::{Agent, bootstrap, key, keys, lab, until_refused, until_speaks};
use crate::wire::{PLAIN, Tap, say};

#[test]
fn without_keys_all_is_as_before_and_shown_as_such() {
    let lab = lab(&["web"]);
    let mut agent = Agent::new(&lab, "web");
    agent.start();
    let lab = lab.start();
    until_speaks(&lab, "web", "plain");
    assert_eq!(key(&lab, "web")["key"], "");
    assert!(lab.words(&["info", "web"]).contains("it uses no keys"));
    let told = agent.trust(&["ls"]);
    assert!(String::from_utf8_lossy(&told.stdout).starts_with("This guest was given no key"), "{told:?}");
    assert!(!agent.file("trust").exists(), "it made itself a key that nobody needs");
}

#[test]
fn a_guest_that_is_given_a_key_cuts_plain_sessions_off_and_is_pinned_when_it_shows_its_own() {
    let lab = lab(&["web"]);
    let mut agent = Agent::new(&lab, "web");
    agent.start();
    let lab = lab.start();
    until_speaks(&lab, "web", "plain");
    agent.know(&lab);
    until_speaks(&lab, "web", "keyed");
    let pinned = key(&lab, "web");
    assert_eq!(
        (pinned["key"].as_str().unwrap(), pinned["how"].as_str().unwrap()),
        (&*agent.own(), "first-use")
    );
    assert_eq!(lab.info("web")["guest_key"], agent.own());
    assert_eq!(agent.keys()["hosts"][0]["key"], keys(&lab)["host_key"]);
    assert!(lab.words(&["ping", "web", "-c", "2"]).contains("2 pings"));
    // Over and over: from now on the same key opens the session, whoever was restarted.
    let mut lab = lab;
    lab.kill();
    lab.again();
    until_speaks(&lab, "web", "keyed");
    agent.restart();
    lab.until("a new session", || lab.info("web")["sessions"].as_u64() > Some(1));
    until_speaks(&lab, "web", "keyed");
    assert_eq!(key(&lab, "web")["key"], pinned["key"]);
}

#[test]
fn once_keyed_no_byte_is_said_in_plain_even_without_the_keys_until_root_resets_it() {
    let lab = lab(&["web"]);
    let mut agent = Agent::new(&lab, "web");
    let lab = lab.start();
    agent.know(&lab);
    agent.start();
    assert_eq!(say(&agent.socket(), PLAIN), b"");
    agent.until_it_says("it uses no key, but this guest was given keys");
    until_speaks(&lab, "web", "keyed");
    // A boot without the credential.
    std::fs::remove_dir_all(agent.file("hosts.d")).unwrap();
    agent.restart();
    assert_eq!(say(&agent.socket(), PLAIN), b"");
    let reason = until_refused(&lab, "web");
    assert!(reason.contains("does not know this host half's key"), "{reason}");
    assert!(reason.contains("guestctl trust bootstrap web"), "{reason}");
    assert!(agent.keys()["keyed"].as_bool().unwrap());
    // Root in the guest.
    let reset = agent.trust(&["reset"]);
    assert!(reset.status.success(), "{reset:?}");
    assert_ne!(say(&agent.socket(), PLAIN), b"");
    lab.until("the reset is told", || lab.info("web")["reason"].as_str().unwrap().contains("uses no keys"));
    assert!(lab.words(&["trust", "forget", "web"]).contains("forgotten"));
    until_speaks(&lab, "web", "plain");
}

#[test]
fn whoever_listens_in_between_sees_tls_alone() {
    let lab = lab(&["tap"]);
    let other = crate::agent::lab(&["web"]);
    let mut agent = Agent::new(&other, "web");
    std::fs::create_dir_all(lab.path("tap")).unwrap();
    let tap = Tap::new(&lab.path("tap/control.sock"), &agent.socket());
    let mut lab = lab.start();
    agent.know(&lab);
    // Before it has keys, it may be spoken to without.
    lab.kill();
    agent.start();
    let before = tap.seen().len();
    lab.again();
    until_speaks(&lab, "tap", "keyed");
    assert!(lab.words(&["ping", "tap", "-c", "3"]).contains("3 pings"));
    let mut connections = 0;
    for [host, guest] in tap.seen().split_off(before) {
        for said in [&host, &guest] {
            assert!(said.is_empty() || matches!(said[0], 0x15 | 0x16), "not TLS: {said:?}");
            assert!(
                !contains(said, b"PRI * HTTP") && !contains(said, b"guestlet.v1") && !contains(said, b"grpc"),
                "{}",
                String::from_utf8_lossy(said)
            );
        }
        connections += usize::from(host.len() > 500 && guest.len() > 500);
    }
    assert!(connections > 0, "nothing went through: {:?}", tap.seen().len());
}

fn contains(said: &[u8], part: &[u8]) -> bool {
    said.windows(part.len()).any(|window| window == part)
}

#[test]
fn a_host_half_whose_key_the_guest_was_not_given_is_refused_on_both_sides_with_what_to_do() {
    let lab = lab(&["web"]);
    let stranger = crate::agent::lab(&["other"]).start();
    let mut agent = Agent::new(&lab, "web");
    agent.know(&stranger);
    agent.start();
    let lab = lab.start();
    let reason = until_refused(&lab, "web");
    let own = keys(&lab)["host_key"].as_str().unwrap().to_owned();
    assert!(reason.contains(&own) && reason.contains("guestctl trust bootstrap web"), "{reason}");
    agent.until_it_says(&format!("its key {own} is not among those that this guest was given"));
    // Given its key, it is let in at its next try.
    agent.know(&lab);
    assert!(lab.words(&["trust", "forget", "web"]).contains("nothing was known"));
    until_speaks(&lab, "web", "keyed");
}

/// How many records `agent` has of connections of this host that were not let in, and how many more the file says there were.
fn refused(agent: &Agent, host: &str) -> (usize, u64) {
    let text = std::fs::read_to_string(agent.file("audit.jsonl")).unwrap_or_default();
    let lines: Vec<serde_json::Value> =
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let (mut count, mut left_out) = (0, 0);
    for line in lines.iter().filter(|line| line["host"] == host && line["role"] == "session") {
        left_out += line["more_denied_before"].as_u64().unwrap();
        // A line of its own says only that.
        if line["verb"].is_string() {
            assert_eq!((&line["verb"], &line["decision"]), (&"connect".into(), &"denied".into()), "{line}");
            count += 1;
        }
    }
    (count, left_out)
}

#[test]
fn whoever_is_not_let_in_leaves_a_record_and_no_flood_of_others_hides_it() {
    let lab = lab(&["web"]).start();
    let stranger = crate::agent::lab(&["web"]);
    let mut agent = Agent::new(&lab, "web");
    let settings = std::fs::read_to_string(agent.file("agent.toml")).unwrap();
    let audit = format!("{settings}\n[audit]\nfile = '{}'\n", agent.file("audit.jsonl").display());
    std::fs::write(agent.file("agent.toml"), audit).unwrap();
    agent.know(&lab);
    agent.start();
    for _ in 0..60 {
        assert_eq!(say(&agent.socket(), PLAIN), b"");
    }
    let (count, _) = refused(&agent, "plain");
    assert!((1..60).contains(&count), "{count}");
    std::fs::create_dir_all(stranger.path("web")).unwrap();
    std::os::unix::fs::symlink(agent.socket(), stranger.path("web/control.sock")).unwrap();
    let stranger = stranger.start();
    until_refused(&stranger, "web");
    let key = keys(&stranger)["host_key"].as_str().unwrap().to_owned();
    crate::agent::until("the stranger's key is recorded", || refused(&agent, &key).0 > 0);
    // By the tick, which comes every ten seconds, at the latest.
    crate::agent::until("all are counted", || {
        let (count, left_out) = refused(&agent, "plain");
        count as u64 + left_out >= 60
    });
    until_speaks(&lab, "web", "keyed");
}

#[test]
fn with_a_token_the_first_contact_is_proved() {
    let mut lab = lab(&["web"]).start();
    let told = bootstrap(&lab, &["--token"]);
    let token = told["token"].as_str().unwrap();
    assert_eq!(
        bootstrap(&lab, &["--token"])["token"],
        told["token"],
        "a second one made the first one worthless"
    );
    assert!(key(&lab, "web")["has_token"].as_bool().unwrap());
    // Another guest, which has no token, or a wrong one.
    let mut agent = Agent::new(&lab, "web");
    agent.know(&lab);
    agent.start();
    let refused = until_refused(&lab, "web");
    assert!(refused.contains("was given no token"), "{refused}");
    assert_eq!(key(&lab, "web")["key"], "");
    agent.token("00112233445566778899aabbccddeeff");
    agent.restart();
    // The next run knows of the token, too, and dials at once.
    lab.kill();
    lab.again();
    let refused = until_refused(&lab, "web");
    assert!(refused.contains("does not match the token"), "{refused}");
    assert!(lab.words(&["trust", "ls"]).contains("a token awaits"));
    agent.token(token);
    agent.restart();
    lab.kill();
    lab.again();
    until_speaks(&lab, "web", "keyed");
    assert_eq!(key(&lab, "web")["how"], "token");
    assert!(!key(&lab, "web")["has_token"].as_bool().unwrap(), "it can be used a second time");
    for text in [agent.log(), lab.log()] {
        assert!(!text.contains(token), "the token is in a log: {text}");
    }
}

/// Anybody who can answer at the guest's socket could be taken for it otherwise, as long as it has not shown a key.
#[test]
fn a_guest_for_which_a_token_waits_is_not_spoken_to_without_keys() {
    let lab = lab(&["web"]).start();
    let told = bootstrap(&lab, &["--token"]);
    let mut agent = Agent::new(&lab, "web");
    agent.start();
    let refused = until_refused(&lab, "web");
    assert!(refused.contains("is refused until it proves the token"), "{refused}");
    assert!(refused.contains("guestctl trust forget web"), "{refused}");
    assert!(!agent.log().contains("held by host half"), "{}", agent.log());
    // Nor by the next run.
    let mut lab = lab;
    lab.kill();
    lab.again();
    until_refused(&lab, "web");
    assert!(lab.words(&["trust", "ls"]).contains("a token awaits"));
    agent.token(told["token"].as_str().unwrap());
    agent.know(&lab);
    agent.restart();
    until_speaks(&lab, "web", "keyed");
    assert_eq!(key(&lab, "web")["how"], "token");

    // Whoever has made the token by mistake takes it back.
    lab.words(&["trust", "forget", "web"]);
    agent.stop();
    std::fs::remove_dir_all(agent.file("hosts.d")).unwrap();
    assert!(agent.trust(&["reset"]).status.success());
    bootstrap(&lab, &["--token"]);
    agent.start();
    until_refused(&lab, "web");
    lab.words(&["trust", "forget", "web"]);
    until_speaks(&lab, "web", "plain");
}
