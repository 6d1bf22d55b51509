//! Guests that do what no guest should: each costs itself its session, and nobody else anything.

use guestlet::wire::proto::v1::event::Kind;
use guestlet::wire::proto::v1::{Disk, DiskAdded, DiskHolder, GuestInfo, GuestState, UserSession};

use crate::asking::Unruly;
use crate::frames::Trick;
use crate::guest::{Crowd, Door, Guest, Manner, info};
use crate::lab::{Lab, uuid};
use crate::neighbour::Neighbour;

/// Runs a guest of bad manners beside a good one until `reason` is seen, and checks the good one.
fn beside_a_good_one(manner: Manner, bad: GuestInfo, state: &str, reason: &str) {
    beside_a_good_one_in(Lab::new(), manner, bad, state, reason);
}

/// The same with other settings.
fn beside_a_good_one_in(lab: Lab, manner: Manner, bad: GuestInfo, state: &str, reason: &str) {
    let lab = lab.guest("bad", 1).guest("good", 2).start();
    let neighbour = Neighbour::start(&lab);
    let guest = Guest::start(&lab.path("bad.sock"), Door::Unix, manner, bad);
    lab.until_vm("bad", |vm| vm["session"] == state && vm["reason"].as_str().unwrap().contains(reason));
    if state == "refused" {
        lab.until("the stream is closed", || guest.open() == 0);
    }
    assert!(lab.words(&["ls"]).contains(reason));
    neighbour.assert_unharmed(&lab);
}

/// The same with a guest that plays a trick.
fn tricky(trick: Trick, state: &str, reason: &str) {
    // Its heart beats seldom enough that its silence is not what ends the session.
    let info = GuestInfo { heartbeat_interval_seconds: 60, ..info(&uuid(1), "boot-1") };
    beside_a_good_one(Manner::Tricky(trick), info, state, reason);
}

/// The same with one that does not read. Usually that is borne for longer.
fn unread(manner: Manner) {
    let lab = Lab::new().set("limits.unread-seconds = 3");
    let info = GuestInfo { heartbeat_interval_seconds: 60, ..info(&uuid(1), "boot-1") };
    let reason = "the guest does not read what is sent to it";
    beside_a_good_one_in(lab, manner, info, "refused", reason);
}

#[test]
fn a_flood_of_events() {
    beside_a_good_one(Manner::Flood, info(&uuid(1), "boot-1"), "refused", "sends too many events");
}

#[test]
fn a_flood_of_bytes() {
    beside_a_good_one(Manner::Bulky, info(&uuid(1), "boot-1"), "refused", "the guest sends too many bytes");
}

#[test]
fn a_flood_of_calls() {
    beside_a_good_one(
        Manner::Nagging,
        info(&uuid(1), "boot-1"),
        "refused",
        "makes too many calls to its host",
    );
}

#[test]
fn calls_that_are_reset_at_once() {
    beside_a_good_one(Manner::Resetting, info(&uuid(1), "boot-1"), "refused", "the guest ");
}

#[test]
fn a_flood_of_http2_pings() {
    tricky(Trick::Pings, "refused", "the guest sends too many ");
}

#[test]
fn a_flood_of_http2_settings() {
    tricky(Trick::Settings, "refused", "the guest sends too many ");
}

#[test]
fn a_head_that_never_ends() {
    tricky(Trick::EndlessHead, "connecting", "the connection broke");
}

#[test]
fn a_guest_that_never_reads_the_stream() {
    unread(Manner::Tricky(Trick::UnreadPings));
}

#[test]
fn a_guest_that_gives_no_room_for_an_answer() {
    unread(Manner::Unruly(Unruly::NoRoom));
}

#[test]
fn calls_against_the_rules_of_the_callback() {
    let cases = [
        (Unruly::TooMany, "more than 48 calls are under way"),
        (Unruly::Number, "the call has the number 3, expected 2"),
        (Unruly::Cancellations, "it cancels more calls than it makes"),
        (Unruly::Large, "message length too large"),
    ];
    for (unruly, reason) in cases {
        beside_a_good_one(Manner::Unruly(unruly), info(&uuid(1), "boot-1"), "refused", reason);
    }
}

#[test]
fn a_guest_that_resets_every_call() {
    tricky(Trick::Resets, "connecting", "the agent reset the call");
}

#[test]
fn a_callback_that_is_closed_whenever_it_is_open() {
    let reason = "the guest violates the protocol of the callback";
    beside_a_good_one(Manner::Fleeting, info(&uuid(1), "boot-1"), "refused", reason);
}

#[test]
fn garbage() {
    beside_a_good_one(Manner::Garbage, info(&uuid(1), "boot-1"), "connecting", "the connection broke");
}

#[test]
fn an_oversized_answer() {
    let large = GuestInfo { host_name: "x".repeat(300_000), ..info(&uuid(1), "boot-1") };
    beside_a_good_one(Manner::Good, large, "refused", "message length too large");
}

#[test]
fn words_that_steer_a_terminal() {
    let rest = |name: &str| format!("unix-socket = '@{name}.sock'");
    let lab = Lab::new().vm("bad", 1, &rest("bad")).vm("large", 2, &rest("large")).start();
    let evil = "a\u{1b}]0;title\u{7}\u{1b}[2J\nroot  running\u{202e}";
    let words = GuestInfo {
        host_name: evil.into(),
        kernel_release: "y".repeat(10_000),
        capabilities: vec![evil.repeat(10); 3000],
        ..info(&uuid(2), "boot-1")
    };
    let _large = Guest::start(&lab.path("large.sock"), Door::Unix, Manner::Good, words);
    // 3000 long capabilities are more than one message may have; a session with fewer is taken.
    lab.until_vm("large", |vm| vm["reason"].as_str().unwrap().contains("message length too large"));
    let words =
        GuestInfo { host_name: evil.into(), kernel_release: "y".repeat(10_000), ..info(&uuid(1), "boot-1") };
    let _guest = Guest::start(&lab.path("bad.sock"), Door::Unix, Manner::Good, words);
    let vm = lab.until_session("bad", "connected");
    assert_eq!(vm["guest"]["kernel_release"].as_str().unwrap().chars().count(), 257);
    for verb in [&["ls"][..], &["info", "bad"], &["info", "bad", "-o", "json"]] {
        let shown = lab.words(verb);
        assert!(!shown.chars().any(|one| one.is_control() && one != '\n'), "{shown:?}");
        assert!(!shown.contains('\u{202e}') && !shown.contains("\\u001b"), "{shown:?}");
    }
    assert_eq!(lab.words(&["ls"]).lines().count(), 3);
    assert!(!lab.log().contains('\u{1b}'), "{:?}", lab.log());
}

#[test]
fn another_uuid_with_words_that_steer_a_terminal() {
    let bad = info("\u{1b}[2J", "boot-1");
    beside_a_good_one(Manner::Good, bad, "refused", "the guest's DMI UUID is");
}

#[test]
fn a_state_beyond_its_bounds() {
    let lab = Lab::new().set("limits.users = 2").guest("bad", 1).start();
    let users = vec![UserSession::default(); 3];
    let state = GuestState { users, ..GuestState::default() };
    let guest =
        Guest::start_in(&lab.path("bad.sock"), Door::Unix, Manner::Good, info(&uuid(1), "boot-1"), state);
    let vm = lab.until_session("bad", "refused");
    assert_eq!(vm["reason"], "the guest has more than 2 users; limits.users in the settings allows more");
    lab.until("the streams are closed", || guest.open() == 0);
}

/// What one message takes in memory has nothing to do with what it takes on the wire.
#[test]
fn many_guests_with_states_that_are_large_in_memory_alone() {
    // One guest with that many disks took 91 MiB, when they were counted after they were decoded and copied. What events of
    // all guests may take together is 32 MiB.
    let most = 48 << 20;
    for (guests, crowd, state, reason) in [
        // Few, for their side makes all those disks, and has 5 s to send them.
        (2, Crowd::Disks(120_000), "refused", "the guest has more than 1024 disks"),
        (2, Crowd::Holders(120_000), "refused", "once it is decoded"),
        // As many as may be.
        (12, Crowd::Holders(20_000), "connected", ""),
    ] {
        let names: Vec<_> = (1..=guests).map(|number| format!("vm-{number}")).collect();
        let lab = names.iter().zip(1..).fold(Lab::new(), |lab, (name, number)| lab.guest(name, number));
        let lab = lab.start();
        let before = lab.memory("VmHWM");
        let guests: Vec<_> = names
            .iter()
            .zip(1..)
            .map(|(name, number)| {
                let path = lab.path(&format!("{name}.sock"));
                Guest::start(&path, Door::Unix, Manner::Crowded(crowd), info(&uuid(number), "boot-1"))
            })
            .collect();
        for name in &names {
            lab.until_vm(name, |vm| {
                vm["session"] == state && vm["reason"].as_str().unwrap().contains(reason)
            });
        }
        let taken = lab.memory("VmHWM") - before;
        assert!(taken < most, "{crowd:?}: {} MiB for {} guests", taken >> 20, guests.len());
    }
}

#[test]
fn an_answer_that_is_large_in_memory_alone() {
    let capabilities = vec![String::new(); 100_000];
    let large = GuestInfo { capabilities, ..info(&uuid(1), "boot-1") };
    beside_a_good_one(Manner::Good, large, "refused", "message length too large");
}

#[test]
fn a_state_of_too_many_bytes_is_cut_and_info_says_what_is_left_out() {
    let lab = Lab::new().set("limits.state-bytes = 65536").guest("bad", 1).start();
    // 64 holders are some 100 bytes each on the wire, and twice as many in memory.
    let disk = |generation| {
        let holder = DiskHolder { name: "x".repeat(100), ..DiskHolder::default() };
        Disk { generation, name: format!("vd{generation}"), holders: vec![holder; 64], ..Disk::default() }
    };
    let state = GuestState { disks: (1..=10).map(disk).collect(), ..GuestState::default() };
    let guest =
        Guest::start_in(&lab.path("bad.sock"), Door::Unix, Manner::Good, info(&uuid(1), "boot-1"), state);
    let vm = lab.until_session("bad", "connected");
    let kept = vm["state"]["disks"].as_array().unwrap().len();
    assert!((1..10).contains(&kept), "{kept}");
    assert_eq!(vm["state_cut"]["disks"], 10 - kept);
    guest.happen(Kind::DiskAdded(DiskAdded { disk: Some(disk(11)) }));
    let vm = lab.until_vm("bad", |vm| vm["state_cut"]["disks"] == 11 - kept);
    assert_eq!((&vm["session"], &vm["sessions"]), (&"connected".into(), &1.into()));
    let words =
        format!("Left out:       {} disks; limits.state-bytes in the settings allows more", 11 - kept);
    let shown = lab.words(&["info", "bad"]);
    assert!(shown.contains(&words), "{shown}");
}
