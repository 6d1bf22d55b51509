//! Who has the console, how it is left, and what happens when something between the client and the guest ends.

use std::os::unix::net::UnixStream;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::guest::GREETING;
use crate::host::assert_fails;
use crate::lab::{Lab, read_until, until};

#[test]
fn a_second_client_is_refused_and_by_force_the_first_is_ended() {
    let lab = Lab::new();
    let mut first = lab.client(&[]);
    lab.qemu.go();
    first.until(GREETING);
    assert_fails(&lab.ctl(&[]), 1, "the console is in use by uid:0 root, for ");
    let mut second = lab.client(&["--force"]);
    assert!(second.complaint().contains("the console was taken from uid:0 root"), "{}", second.complaint());
    assert_eq!(first.code(), Some(7));
    first.until_complaint("uid:0 root has taken the console of web over");
    second.write(b"a");
    second.until("b");
    // Whoever leaves makes room.
    drop(second);
    let mut third = lab.client(&[]);
    third.write(b"c");
    third.until("d");
}

#[test]
fn another_program_that_has_the_console_is_named_and_waited_for() {
    let lab = Lab::new();
    let mut other = UnixStream::connect(lab.host.path("console")).unwrap();
    lab.qemu.go();
    read_until(&mut other, GREETING);
    for options in [&[][..], &["--force"]] {
        assert_fails(&lab.ctl(options), 1, "another program of this host is connected to the console");
    }
    drop(other);
    let mut client = lab.client(&[]);
    client.write(b"a");
    client.until("b");
}

#[test]
fn the_end_of_the_vm_is_the_end_of_its_console() {
    let mut lab = Lab::new();
    let client = lab.client(&[]);
    lab.qemu.go();
    client.until(GREETING);
    let mut screen = {
        drop(client);
        lab.screen()
    };
    assert!(screen.is_raw());
    lab.qemu.kill();
    assert_eq!(screen.code(), Some(6));
    screen.until("the VM web has ended");
    lab.host.until_vm("web", |vm| vm["power"] == "off");
    assert_fails(&lab.ctl(&[]), 1, "the VM is off: it has no console");
}

#[test]
fn a_vm_that_the_settings_do_not_list_any_more_has_no_console() {
    let mut lab = Lab::new();
    let mut client = lab.client(&[]);
    lab.host.edit("name = 'web'", "name = 'db'");
    assert_eq!(client.code(), Some(6));
    client.until_complaint("the settings of guestlet-host for web have changed");
    assert_fails(&lab.ctl(&[]), 4, "knows no VM named \"web\"");
}

#[test]
fn a_key_leaves_the_console_and_the_terminal_is_as_it_was() {
    let lab = Lab::new();
    let mut screen = lab.screen();
    assert!(screen.is_raw());
    lab.qemu.go();
    screen.until(GREETING);
    // Ctrl-C is the guest's.
    screen.type_keys("a\u{3}y");
    screen.until("b\u{4}z");
    screen.type_keys("\u{1d}");
    assert_eq!(screen.code(), Some(0));
    let mut screen = lab.screen();
    kill(Pid::from_raw(i32::try_from(screen.child.id()).unwrap()), Signal::SIGTERM).unwrap();
    assert_eq!(screen.code(), Some(143));
}

#[test]
fn a_host_half_that_is_killed_is_a_pause() {
    let mut lab = Lab::new();
    let mut screen = lab.screen();
    lab.qemu.go();
    screen.until(GREETING);
    for key in ["a", "c"] {
        lab.host.kill();
        screen.until("reconnecting to the console (keys are lost meanwhile; Ctrl-] disconnects)");
        screen.type_keys("lost");
        assert!(screen.is_raw());
        lab.host.again();
        screen.until("reconnected to the console");
        screen.clear();
        screen.type_keys(key);
        screen.until(if key == "a" { "b" } else { "d" });
        let seen = screen.seen();
        assert!(!seen.contains("mptu"), "{seen:?}");
        screen.clear();
    }
    lab.host.kill();
    screen.until("reconnecting to the console");
    screen.type_keys("\u{1d}");
    assert_eq!(screen.code(), Some(0));
}

#[test]
fn input_waits_for_a_host_half_that_is_killed_and_is_not_sent_twice() {
    let mut lab = Lab::new();
    let mut client = lab.client(&[]);
    lab.qemu.go();
    client.until(GREETING);
    lab.host.kill();
    client.until_complaint("reconnecting to the console (input waits)");
    client.write(b"abc");
    lab.host.again();
    client.until("bcd");
    client.write(b"z");
    client.until("{");
    let output = String::from_utf8(client.output.lock().unwrap().clone()).unwrap();
    assert_eq!(output, format!("{GREETING}bcd{{"));
    // A VM that has ended meanwhile has no console to go on with.
    lab.host.kill();
    lab.qemu.kill();
    lab.host.again();
    assert_eq!(client.code(), Some(255));
    client.until_complaint("the VM is off");
}

#[test]
fn a_host_half_that_knows_the_vm_no_more_is_not_asked_for_ever() {
    let mut lab = Lab::new();
    let mut client = lab.client(&[]);
    lab.host.kill();
    lab.host.edit("name = 'web'", "name = 'db'");
    lab.host.again();
    assert_eq!(client.code(), Some(4));
    client.until_complaint("knows no VM named \"web\"");
}

#[test]
fn a_reset_of_the_guest_is_seen_on_its_console() {
    let lab = Lab::new();
    let client = lab.client(&[]);
    lab.qemu.go();
    client.until(GREETING);
    lab.qemu.execute("system_reset");
    let twice = format!("{GREETING}{GREETING}");
    until("it begins anew", || String::from_utf8_lossy(&client.output.lock().unwrap()).contains(&twice));
}
