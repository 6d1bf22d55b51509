//! Mistakes in files: what is said of them, and that none opens or shuts a door.

use std::os::unix::fs::PermissionsExt as _;

use crate::agent::{Agent, key_line, lab, until_refused, until_speaks};
use crate::wire::{PLAIN, say};

#[test]
fn a_mistake_leaves_what_was_before_and_is_told_with_its_line() {
    let lab = lab(&["web"]).start();
    let web = Agent::keyed(&lab, "web");
    let line = key_line(&lab);
    let cases = [
        (format!("{line}{line}"), "host.pub:2: the key SHA256:"),
        (format!("# mine\n{}", &line[..40]), "host.pub:2: "),
        (line.replace(" #", " admin #"), "host.pub:1: unknown word \"admin\""),
        (line.replace(" #", " role=root #"), "host.pub:1: unknown role \"root\""),
        ("\0\0".to_owned(), "host.pub:1: "),
    ];
    for (text, expected) in cases {
        web.give("host.pub", &text);
        web.until_it_says(expected);
        // Whoever comes anew is let in as before.
        let sessions = lab.info("web")["sessions"].as_u64();
        assert_eq!(say(&web.socket(), PLAIN), b"", "{text}");
        assert_eq!(lab.info("web")["session"], "connected", "{text}");
        assert_eq!(lab.info("web")["sessions"].as_u64(), sessions, "{text}");
    }
    assert!(!web.keys()["problems"].as_array().unwrap().is_empty());
    web.know(&lab);
    lab.until("all is well again", || web.keys()["problems"].as_array().unwrap().is_empty());
}

#[test]
fn what_cannot_be_read_leaves_what_was_before_and_is_told() {
    let lab = lab(&["web"]).start();
    let mut web = Agent::keyed(&lab, "web");
    let beside = web.file("hosts.d/beside");
    let read = |bytes: &[u8]| {
        std::fs::write(&beside, bytes).unwrap();
        std::fs::set_permissions(&beside, std::fs::Permissions::from_mode(0o644)).unwrap();
    };
    let cases: [(&dyn Fn(), &str); 4] = [
        (
            &|| std::os::unix::fs::symlink("/nowhere/host.pub", &beside).unwrap(),
            "host.pub is a dangling symbolic link",
        ),
        (&|| nix::unistd::mkfifo(&beside, nix::sys::stat::Mode::S_IRUSR).unwrap(), "it is not a file"),
        (&|| read(b"\xff\xfe"), "it is not UTF-8"),
        (&|| read(&vec![b'#'; 65 * 1024]), "it is too large"),
    ];
    for (make, expected) in cases {
        make();
        std::fs::rename(&beside, web.file("hosts.d/host.pub")).unwrap();
        web.until_it_says(expected);
        assert_eq!(say(&web.socket(), PLAIN), b"", "{expected}");
        assert_eq!(lab.info("web")["session"], "connected", "{expected}");
        assert_eq!(lab.info("web")["sessions"], 1, "{expected}");
    }
    // Whoever starts with that does not know what was before, and lets nobody in.
    web.restart();
    assert_eq!(say(&web.socket(), PLAIN), b"");
    assert!(until_refused(&lab, "web").contains("does not know this host half's key"));
}

#[test]
fn a_guest_whose_only_key_is_wrong_from_the_beginning_lets_nobody_in() {
    let lab = lab(&["web"]).start();
    let mut web = Agent::new(&lab, "web");
    web.give("host.pub", "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIDd4 me@here\n");
    web.start();
    web.until_it_says("host.pub:1: this is an OpenSSH key");
    assert_eq!(say(&web.socket(), PLAIN), b"");
    assert!(until_refused(&lab, "web").contains("does not know this host half's key"));
    // One that others may write to is no better.
    web.know(&lab);
    std::fs::set_permissions(web.file("hosts.d/host.pub"), std::fs::Permissions::from_mode(0o666)).unwrap();
    web.until_it_says("users other than root can write to it");
}

/// As while the disk is not mounted on which the keys are: that says nothing of whether there are any.
#[test]
fn a_directory_of_keys_that_is_a_link_to_nothing_is_not_taken_for_no_keys() {
    let lab = lab(&["web"]).start();
    let mut web = Agent::new(&lab, "web");
    let (hosts, disk) = (web.file("hosts.d"), web.file("disk"));
    std::os::unix::fs::symlink(&disk, &hosts).unwrap();
    let listed = web.keys();
    assert!(listed["keyed"].as_bool().unwrap(), "{listed}");
    web.start();
    assert_eq!(say(&web.socket(), PLAIN), b"");
    web.until_it_says(&format!("{0}: {0} is a dangling symbolic link", hosts.display()));
    std::fs::create_dir(&disk).unwrap();
    web.know(&lab);
    // It is dialled again at once.
    lab.words(&["trust", "forget", "web"]);
    until_speaks(&lab, "web", "keyed");
    // Whoever was let in stays, and is let in again, if that disk goes away.
    std::fs::rename(&disk, web.file("away")).unwrap();
    assert_eq!(say(&web.socket(), PLAIN), b"");
    let mut lab = lab;
    lab.kill();
    lab.again();
    until_speaks(&lab, "web", "keyed");
    assert_eq!(say(&web.socket(), PLAIN), b"");
}

#[test]
fn more_files_of_keys_than_are_read_are_told() {
    let lab = lab(&["web"]).start();
    let web = Agent::new(&lab, "web");
    for number in 0..257 {
        web.give(&format!("{number:03}.pub"), &key_line(&lab));
    }
    let problems = web.keys()["problems"].to_string();
    assert!(
        problems.contains("*.pub: there are 257 files, and only the first 256 of them are used"),
        "{problems}"
    );
}

#[test]
fn a_guest_that_cannot_use_its_own_key_lets_nobody_in_and_says_why() {
    let lab = lab(&["web"]).start();
    let mut web = Agent::keyed(&lab, "web");
    web.stop();
    let own = web.file("trust/guest.key");
    std::fs::set_permissions(&own, std::fs::Permissions::from_mode(0o644)).unwrap();
    web.start();
    assert_eq!(say(&web.socket(), PLAIN), b"");
    web.until_it_says("is readable by users other than its owner");
    std::fs::set_permissions(&own, std::fs::Permissions::from_mode(0o600)).unwrap();
    until_speaks(&lab, "web", "keyed");
}

#[test]
fn garbage_and_silence_disturb_nobody() {
    let lab = lab(&["web"]).start();
    let web = Agent::keyed(&lab, "web");
    let begun = [0x16, 3, 1, 2, 0, 1, 0, 1, 0xfc, 3, 3];
    let silent: Vec<_> =
        (0..8).map(|_| std::os::unix::net::UnixStream::connect(web.socket()).unwrap()).collect();
    for words in [
        &b"\x16"[..],
        &[0x16; 4096],
        &begun,
        b"GET / HTTP/1.1\r\n\r\n",
        &[0; 64],
        b"\x15\x03\x03\0\x02\x02\x28",
    ] {
        let answer = say(&web.socket(), words);
        assert!(answer.is_empty() || answer[0] == 0x15, "{words:?}: {answer:?}");
    }
    drop(silent);
    assert!(lab.words(&["ping", "web", "-c", "2"]).contains("2 pings"));
    assert_eq!(lab.info("web")["sessions"], 1);
}
