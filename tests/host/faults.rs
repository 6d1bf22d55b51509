//! Streams that fail between the host half and a guest: the session ends or goes on as it should, says why, and
//! nobody else notices.

use std::time::{Duration, Instant};

use guestlet::wire::proto::v1::ClockJumped;
use guestlet::wire::proto::v1::event::Kind;

use crate::guest::{Door, Guest, Manner, info};
use crate::lab::{Lab, Watch, uuid};
use crate::neighbour::{LOOK, Neighbour};
use crate::proxy::{Fault, Proxy};

/// A guest `a` behind a proxy, and a good one beside it.
fn lab() -> (Lab, Guest, Proxy, Neighbour) {
    let lab = Lab::new().guest("a", 1).guest("good", 2).start();
    let agent = lab.path("a.agent");
    let guest = Guest::start(&agent, Door::Unix, Manner::Good, info(&uuid(1), "boot-1"));
    let proxy = Proxy::start(&lab.path("a.sock"), &agent);
    let neighbour = Neighbour::start(&lab);
    (lab, guest, proxy, neighbour)
}

fn clock(milliseconds: i64) -> Kind {
    Kind::ClockJumped(ClockJumped { milliseconds })
}

/// Every event up to the given one was heard, once and in order.
fn assert_heard(lab: &Lab, last: i64) {
    let watch = Watch::quiet(lab, &["a", "--since", "1h", "--kind", "clock-jumped", "-o", "json"]);
    for milliseconds in 1..=last {
        assert_eq!(watch.event("a", "clock-jumped")["milliseconds"], milliseconds);
    }
    assert_eq!(lab.info("a")["missed_events"], 0);
}

#[test]
fn a_stream_that_is_cut_anywhere_is_dialled_again_and_loses_no_event() {
    let (lab, guest, proxy, neighbour) = lab();
    lab.until_vm("a", |vm| vm["callback"] == "open");
    // In a frame's head, in settings, in the head and in the body of an answer, in an event.
    let places = [1, 8, 9, 20, 45, 70, 100, 150, 200, 300, 400, 500, 600];
    for (number, bytes) in (1..).zip(places) {
        let before = proxy.cut();
        proxy.set(Fault::Cut(bytes));
        guest.happen(clock(number));
        lab.until("the next cut", || proxy.cut() > before);
    }
    let vm = lab.until_vm("a", |vm| vm["reason"] != "");
    let reason = vm["reason"].as_str().unwrap();
    assert!(reason.contains("the connection broke") || reason.contains("closed the connection"), "{reason}");
    assert_eq!(vm["session"], "connecting");
    proxy.set(Fault::None);
    lab.until_vm("a", |vm| vm["session"] == "connected" && vm["callback"] == "open");
    assert_heard(&lab, 13);
    neighbour.assert_unharmed(&lab);
}

#[test]
fn a_half_open_stream_is_given_up_and_the_guest_is_back_when_it_is_whole_again() {
    let (lab, guest, proxy, neighbour) = lab();
    lab.until_vm("a", |vm| vm["callback"] == "open");
    guest.happen(clock(1));
    lab.until_vm("a", |vm| vm["state"].is_object());
    proxy.set(Fault::HalfOpen);
    guest.happen(clock(2));
    let vm = lab.until_vm("a", |vm| vm["reason"] != "");
    assert_eq!(
        (&vm["session"], &vm["reason"]),
        (&"connecting".into(), &"no message from the agent for 2.5 s".into())
    );
    let answers = guest.answers();
    lab.until("both streams are closed, and at most one is dialled", || proxy.open() <= 1);
    lab.until_vm("a", |vm| vm["reason"] == "the agent does not answer");
    assert!(proxy.open() <= 1, "{} streams", proxy.open());
    assert_eq!((guest.answers(), guest.open() >= 2), (answers, true), "to the guest all is as it was");
    guest.happen(clock(3));
    proxy.set(Fault::None);
    let vm = lab.until_vm("a", |vm| vm["session"] == "connected" && vm["callback"] == "open");
    assert_eq!(vm["sessions"], 2);
    assert_heard(&lab, 3);
    neighbour.assert_unharmed(&lab);
}

#[test]
fn a_slow_stream_is_a_session_and_what_is_under_way_at_its_end_is_not_served() {
    const LATE: Duration = Duration::from_millis(150);
    let (mut lab, guest, proxy, neighbour) = lab();
    proxy.set(Fault::Delay(LATE));
    // Whatever was dialled before goes on, but slower.
    let vm = lab.until_vm("a", |vm| vm["session"] == "connected" && vm["callback"] == "open");
    guest.happen(clock(1));
    assert_heard(&lab, 1);
    let asked = Instant::now();
    lab.words(&["ping", "a", "-c", "1"]);
    assert!(asked.elapsed() >= LATE * 2, "there and back");
    let answers = guest.answers();
    lab.until("its calls are answered", || guest.answers() > answers);
    assert_eq!(lab.info("a")["sessions"], vm["sessions"]);

    let settings = std::fs::read_to_string(lab.settings()).unwrap();
    let (start, end) = (settings.find("[[vm]]").unwrap(), settings.rfind("[[vm]]").unwrap());
    lab.edit(&settings[start..end], "");
    lab.until("both streams are closed", || proxy.open() == 0);
    // What was answered before the end may be on its way for so long.
    std::thread::sleep(LATE * 2);
    let answers = guest.answers();
    std::thread::sleep(LOOK);
    assert_eq!((guest.answers(), proxy.open()), (answers, 0));
    neighbour.assert_unharmed(&lab);
}

#[test]
fn bytes_that_come_one_by_one_make_a_session_unless_they_come_too_slowly() {
    let (lab, guest, proxy, neighbour) = lab();
    lab.until_session("a", "connected");
    proxy.set(Fault::Cut(1));
    lab.until("it is cut", || proxy.cut() > 0);
    proxy.set(Fault::Drip(Duration::ZERO));
    let vm = lab.until_vm("a", |vm| vm["session"] == "connected" && vm["callback"] == "open");
    guest.happen(clock(1));
    assert_heard(&lab, 1);
    lab.words(&["ping", "a", "-c", "1"]);
    assert_eq!(lab.info("a")["sessions"], vm["sessions"]);

    proxy.set(Fault::Cut(1));
    lab.until_vm("a", |vm| vm["session"] == "connecting");
    proxy.set(Fault::Drip(Duration::from_millis(50)));
    lab.until_vm("a", |vm| vm["reason"] == "the agent does not answer");
    proxy.set(Fault::None);
    lab.until_session("a", "connected");
    neighbour.assert_unharmed(&lab);
}

/// Issue 16: programs of tests found what is on the machine.
#[test]
fn the_host_halves_of_tests_leave_the_machine_alone() {
    if crate::traps::is_outside() {
        return;
    }
    let traps = crate::traps::Traps::set();
    let mut lab = Lab::new().guest("web", 1).start();
    assert!(lab.words(&["ls"]).contains("web"));
    lab.words(&["topology"]);
    lab.kill();
    lab.again();
    assert!(lab.stop().success());
    traps.are_untouched();
}
