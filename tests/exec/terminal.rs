//! Programs on a terminal, driven through another one.

use std::time::Duration;

use guestlet::sys::terminal::{self, Size};

use crate::lab::{Lab, is_running, until};
use crate::screen::Screen;

const SIZE: Size = Size { rows: 31, columns: 101 };

fn start(lab: &Lab, command: &[&str], size: Size) -> Screen {
    Screen::of(lab.command(&["-it"], command), size)
}

#[test]
fn a_terminal_has_its_size_from_the_start_and_is_resized() {
    let lab = Lab::new();
    let mut screen = start(
        &lab,
        &["sh", "-c", "stty size; test -t 0 && test -t 1 && test -t 2 && echo all $TERM; cat"],
        SIZE,
    );
    screen.until("31 101\r\n");
    screen.until("all xterm\r\n");
    assert!(screen.is_raw());
    screen.type_keys("\u{4}");
    assert_eq!(screen.code(), Some(0));

    let mut screen =
        start(&lab, &["sh", "-c", "trap 'stty size' WINCH; echo ready; while :; do sleep 0.05; done"], SIZE);
    screen.until("ready");
    terminal::set_size(&screen.terminal, Size { rows: 40, columns: 90 }).unwrap();
    // It is not this one's controlling terminal, so that the kernel tells nobody.
    let pid = nix::unistd::Pid::from_raw(i32::try_from(screen.child.id()).unwrap());
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGWINCH).unwrap();
    screen.until("40 90\r\n");
    screen.type_keys("\u{3}");
    assert_eq!(screen.code(), Some(130));
}

#[test]
fn keys_reach_the_program_in_the_foreground() {
    let lab = Lab::new();
    let mut screen = start(&lab, &["bash", "--norc"], SIZE);
    screen.type_keys("echo $((6*7))\r");
    screen.until("42\r\n");
    screen.type_keys("sleep 1000; echo after-$?\r");
    std::thread::sleep(Duration::from_millis(500));
    screen.type_keys("\u{3}");
    // Interrupted, and the shell goes on.
    screen.type_keys("echo still-$((1+1))\r");
    screen.until("still-2\r\n");
    screen.type_keys("exit 5\r");
    assert_eq!(screen.code(), Some(5));
}

#[test]
fn less_and_top_draw_their_screens() {
    let lab = Lab::new();
    let mut screen = start(&lab, &["sh", "-c", "seq 1000 | less"], SIZE);
    screen.until("30\r\n");
    screen.type_keys("G");
    screen.until("1000");
    screen.type_keys("q");
    assert_eq!(screen.code(), Some(0));
    let mut screen = start(&lab, &["top", "-d", "1"], SIZE);
    screen.until("load average");
    screen.type_keys("q");
    assert_eq!(screen.code(), Some(0));
}

#[test]
fn a_terminal_is_as_before_whatever_ends_guestctl_and_the_program_is_still_there() {
    let lab = Lab::new();
    let mut screen = start(&lab, &["sh", "-c", "echo ready; exec sleep 1000"], SIZE);
    screen.until("ready");
    let program = &lab.programs()[0];
    let pid = nix::unistd::Pid::from_raw(i32::try_from(screen.child.id()).unwrap());
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM).unwrap();
    assert_eq!(screen.code(), Some(255));
    let number = u32::try_from(program["process_id"].as_u64().unwrap()).unwrap();
    assert!(is_running(number));

    // Somebody else goes on with it.
    let id = program["id"].as_str().unwrap();
    let mut screen = Screen::of(lab.host.ctl_command(&["attach", "-it", "web", id]), SIZE);
    until("somebody is attached", || lab.programs()[0]["is_attached"] == true);
    screen.type_keys("\u{3}");
    assert_eq!(screen.code(), Some(130));
    until("it has ended", || !is_running(number));
}

#[test]
fn a_terminal_is_as_before_when_guestctl_is_ended_while_it_has_no_connection() {
    let mut lab = Lab::new();
    let mut screen = start(&lab, &["sh", "-c", "echo ready; exec cat"], SIZE);
    screen.until("ready");
    let program = lab.programs().remove(0);
    lab.host.kill();
    // Keys are for the program until a person is told that there is none.
    screen.type_keys("kept\r");
    screen.until("reconnecting to the program");
    assert!(screen.is_raw());
    screen.type_keys("\u{3}");
    assert_eq!(screen.code(), Some(255));
    screen.until("attaches to it again");

    lab.host.again();
    lab.host.until_session("web", "connected");
    let id = program["id"].as_str().unwrap();
    let mut screen = Screen::of(lab.host.ctl_command(&["attach", "-it", "web", id]), SIZE);
    until("somebody is attached", || lab.programs()[0]["is_attached"] == true);
    lab.host.kill();
    std::thread::sleep(Duration::from_millis(300));
    let pid = nix::unistd::Pid::from_raw(i32::try_from(screen.child.id()).unwrap());
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM).unwrap();
    assert_eq!(screen.code(), Some(255));
    assert!(is_running(u32::try_from(program["process_id"].as_u64().unwrap()).unwrap()));
}

#[test]
fn keys_that_are_typed_without_a_connection_reach_the_program_later() {
    let mut lab = Lab::new();
    let mut screen = start(&lab, &["bash", "--norc"], SIZE);
    screen.type_keys("echo $((6*7))\r");
    screen.until("42\r\n");
    lab.host.signal(nix::sys::signal::Signal::SIGSTOP);
    screen.type_keys("echo $((6*");
    std::thread::sleep(Duration::from_millis(300));
    lab.host.kill();
    screen.type_keys("8))\r");
    screen.until("reconnecting to the program");
    lab.host.again();
    screen.until("48\r\n");
    screen.type_keys("exit 5\r");
    assert_eq!(screen.code(), Some(5));
}
