//! Passwords and SSH keys.

use std::fs::File;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::process::Stdio;

use guestlet::sys::terminal::{self, Size};
use serde_json::{Value, json};

use super::{Inside, KEYS};
use crate::lab::{assert_fails, wait};

/// Words that must be nowhere.
const PASSWORD: &str = "Geh3im:und lang";

#[test]
fn a_password_comes_from_standard_input_and_is_in_no_record() {
    let inside = Inside::new().with_user();
    inside.fails(&["passwd", "a", "me"], "a password from standard input");
    inside.chpasswd("echo \"[$*]\" > arguments; cat > input");
    let output = inside.with_input(&["passwd", "a", "me", "-o", "json"], format!("{PASSWORD}\n").as_bytes());
    assert!(output.status.success(), "{output:?}");
    let done: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(done, json!({"user": "me", "done": "password set"}));
    assert_eq!((inside.read("input"), inside.read("arguments")), (format!("me:{PASSWORD}\n"), "[]\n".into()));
    let output = inside.with_input(&["passwd", "a", "me", "--crypted"], b"$6$x$y");
    assert_eq!(String::from_utf8_lossy(&output.stdout), "the password of me is set\n");
    assert_eq!((inside.read("input"), inside.read("arguments")), ("me:$6$x$y\n".into(), "[-e]\n".into()));

    // Never on a command line, where others read it.
    assert_fails(&inside.lab.ctl(&["passwd", "a", "me", PASSWORD]), 2, "unexpected argument");
    assert_fails(&inside.lab.ctl(&["passwd", "a", "me", "--password", PASSWORD]), 2, "unexpected argument");

    std::fs::remove_file(inside.root.join("input")).unwrap();
    let longest = vec![b'x'; 4096];
    for (user, input, said) in [
        ("me", &b""[..], "it is empty"),
        ("me", b"\n", "it is empty"),
        ("me", b"a\0b\n", "has an invalid character"),
        ("me", b"a\rb\n", "has an invalid character"),
        ("me", &[&longest[..], b"x"].concat(), "it is too long"),
        ("me", &vec![b'x'; 1 << 20], "it is too long"),
        ("nobody-at-all", b"x\n", "unknown user \"nobody-at-all\""),
        ("me:x", b"x\n", "the user name is empty, too long, or has an invalid character"),
        ("../me", b"x\n", "the user name is empty"),
        ("", b"x\n", "the user name is empty"),
    ] {
        assert_fails(&inside.with_input(&["passwd", "a", user], input), 1, said);
    }
    assert_eq!(inside.read("input"), "", "nothing of that reaches chpasswd");
    assert!(inside.with_input(&["passwd", "a", "me"], &longest).status.success());
    assert_eq!(inside.read("input").len(), "me:\n".len() + 4096);
    inside.chpasswd("cat >&2; echo 'too weak' >&2; exit 1");
    let output = inside.with_input(&["passwd", "a", "me"], format!("{PASSWORD}\n").as_bytes());
    assert_fails(&output, 1, "the password of me is not set");
    assert!(!String::from_utf8_lossy(&output.stderr).contains("Geh3im"), "{output:?}");
    let log = inside.lab.log();
    assert!(log.contains("audit: uid:0 root: passwd \"a\" \"me\": allowed, OK"), "{log}");
    assert!(!log.contains("Geh3im") && !log.contains("$6$"), "{log}");
}

#[test]
fn a_password_that_is_typed_is_not_shown_and_asked_for_twice() {
    let inside = Inside::new().with_user();
    inside.chpasswd("cat > input");
    // What is typed as an answer to each question, the exit code, and what chpasswd gets.
    for (typed, code, got) in [
        (["other", "another"], 1, ""),
        (["\u{3}", ""], 130, ""),
        ([PASSWORD, PASSWORD], 0, "me:Geh3im:und lang\n"),
    ] {
        let (controller, terminal) = terminal::open(Size { rows: 25, columns: 80 }).unwrap();
        let flags = nix::fcntl::FcntlArg::F_SETFL(nix::fcntl::OFlag::empty());
        nix::fcntl::fcntl(&controller, flags).unwrap();
        let mut controller = File::from(controller);
        let mut command = inside.lab.ctl_command(&["passwd", "a", "me"]);
        command.stdin(terminal.try_clone().unwrap()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        // It has the terminal open as well.
        drop(command);
        let mut said = BufReader::new(child.stderr.take().unwrap());
        for (question, answer) in ["the new password of me:", "once more:"].into_iter().zip(typed) {
            if answer.is_empty() {
                break;
            }
            let mut line = String::new();
            said.read_line(&mut line).unwrap();
            assert!(line.contains(question), "{line}");
            let end = if answer == "\u{3}" { "" } else { "\n" };
            controller.write_all(format!("{answer}{end}").as_bytes()).unwrap();
        }
        assert_eq!(wait(&mut child).code(), Some(code), "{:?}", std::io::read_to_string(said));
        let shows = nix::sys::termios::tcgetattr(&terminal).unwrap().local_flags;
        assert!(
            shows.contains(nix::sys::termios::LocalFlags::ECHO),
            "the terminal shows again what is typed"
        );
        drop(terminal);
        let mut echoed = Vec::new();
        drop(controller.read_to_end(&mut echoed));
        let echoed = String::from_utf8_lossy(&echoed);
        assert!(echoed.chars().all(char::is_whitespace), "{echoed:?}");
        assert_eq!(inside.read("input"), got);
    }
}

#[test]
fn a_signal_while_a_password_is_typed_leaves_a_terminal_that_shows_what_is_typed() {
    use nix::sys::signal::Signal;
    use nix::sys::termios::{LocalFlags, tcgetattr};

    let inside = Inside::new().with_user();
    inside.chpasswd("cat > input");
    for signal in [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP, Signal::SIGQUIT] {
        let (_controller, terminal) = terminal::open(Size { rows: 25, columns: 80 }).unwrap();
        let shows = || tcgetattr(&terminal).unwrap().local_flags.contains(LocalFlags::ECHO);
        let mut command = inside.lab.ctl_command(&["passwd", "a", "me"]);
        command.stdin(terminal.try_clone().unwrap()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut said = BufReader::new(child.stderr.take().unwrap());
        said.read_line(&mut String::new()).unwrap();
        assert!(!shows());
        let pid = nix::unistd::Pid::from_raw(i32::try_from(child.id()).unwrap());
        nix::sys::signal::kill(pid, signal).unwrap();
        assert_eq!(wait(&mut child).code(), Some(128 + signal as i32), "{signal}");
        assert!(shows(), "{signal}");
    }
    assert_eq!(inside.read("input"), "");
}

#[test]
fn keys_are_listed_added_and_removed() {
    let inside = Inside::new().with_user();
    let file = inside.lab.path("keys");
    let path = file.to_str().unwrap();
    let keys = || inside.lab.words(&["keys", "ls", "a", "me"]);
    assert_eq!(keys(), "");
    std::fs::write(&file, "# mine\nssh-rsa A me\n\nssh-rsa B\r\nssh-rsa A me\n").unwrap();
    assert_eq!(inside.lab.words(&["keys", "add", "a", "me", path]), "me: keys added\n");
    assert_eq!(inside.read(KEYS), "ssh-rsa A me\nssh-rsa B\n");
    assert_eq!(inside.json(&["keys", "ls", "a", "me"]), json!(["ssh-rsa A me", "ssh-rsa B"]));
    assert!(inside.with_input(&["keys", "add", "a", "me", "-"], b"ssh-rsa C").status.success());
    assert_eq!(keys(), "ssh-rsa A me\nssh-rsa B\nssh-rsa C\n");
    let removed = inside.json(&["keys", "rm", "a", "me", path]);
    assert_eq!(removed, json!({"user": "me", "done": "keys removed"}));
    assert_eq!(keys(), "ssh-rsa C\n");
    // It is so already.
    inside.lab.words(&["keys", "rm", "a", "me", path]);
    assert_eq!(inside.lab.words(&["keys", "add", "a", "me", path, "--reset"]), "me: keys replaced\n");
    assert_eq!(keys(), "ssh-rsa A me\nssh-rsa B\n");

    for (input, said) in [
        (&b""[..], "it has no key"),
        (b"# none\n\n", "it has no key"),
        (b"ssh-rsa A\0\n", "a key is one line, and not a comment"),
        (b"ssh-rsa \xff\n", "UTF-8"),
        (&vec![b'x'; 1 << 20], "it is too large"),
        (&b"x\n".repeat(29_000), "too large"),
    ] {
        for verb in ["add", "rm"] {
            assert_fails(&inside.with_input(&["keys", verb, "a", "me", "-"], input), 1, said);
        }
    }
    for (user, said) in [
        ("nobody-at-all", "unknown user \"nobody-at-all\""),
        ("../me", "the user name is empty, too long, or has an invalid character"),
        ("", "the user name is empty"),
        ("root", "cannot read or write the authorized keys of root"),
    ] {
        inside.fails(&["keys", "ls", "a", user], said);
        inside.fails(&["keys", "add", "a", user, path], said);
        inside.fails(&["keys", "rm", "a", user, path], said);
    }
    inside.fails(&["keys", "add", "a", "me", "/nonexistent/keys"], "cannot read /nonexistent/keys");
    assert_eq!(inside.read(KEYS), "ssh-rsa A me\nssh-rsa B\n");
    // What the user has written there does not steer the terminal of whoever looks.
    inside.write(KEYS, "ssh-rsa \x1b[2J\n");
    assert_eq!(keys(), "ssh-rsa \u{fffd}[2J\n");
    let log = inside.lab.log();
    assert!(log.contains("audit: uid:0 root: keys add \"a\" \"me\": allowed, OK"), "{log}");
    assert!(
        log.contains("audit: uid:0 root: keys add \"a\" \"nobody-at-all\": allowed, FAILED_PRECONDITION"),
        "{log}"
    );
}
