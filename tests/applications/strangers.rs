//! Sockets that are not what they seem, and servers that answer what none does: never `application`, and nobody else is held up.

use std::os::unix::fs::{chown, symlink};
use std::os::unix::net::UnixListener;
use std::process::Stdio;

use crate::lab::{Agent, Process, USER, as_user, inside, level, until};
use crate::postgres::{SOCKET, Server, is_outside};

fn socket(port: u32) -> String {
    format!("/run/postgresql/.s.PGSQL.{port}")
}

/// A server of the databases' user that answers each client with the output of a script.
fn server(port: u32, script: &str) -> Process {
    let file = format!("/etc/stranger-{port}");
    std::fs::write(&file, format!("#!/bin/sh\n{script}\n")).unwrap();
    inside(&format!("chmod 755 {file}"));
    let child = as_user(USER, "/usr/bin/socat")
        .arg(format!("UNIX-LISTEN:{},fork", socket(port)))
        .arg(format!("EXEC:{file}"))
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    until("the stranger listens", || std::fs::exists(socket(port)).unwrap());
    Process(child)
}

#[test]
fn what_is_not_the_database_is_never_an_application() {
    if is_outside() {
        return;
    }
    let real = Server::new();
    // A password that is asked for; garbage; a message without an end; messages without an end; one that is let in and then
    // gets rows of nothing; nothing at all; an end at once.
    let let_in = r"R\000\000\000\010\000\000\000\000Z\000\000\000\005I";
    let row = r"D\000\000\000\006\000\000";
    let strangers = [
        (1, r"printf 'R\000\000\000\010\000\000\000\003'; cat".to_owned(), "local all postgres peer"),
        (2, "yes hello".to_owned(), "does not speak PostgreSQL"),
        (3, r"printf 'R\177\377\377\377'; cat".to_owned(), "does not speak PostgreSQL"),
        (4, r"yes 'N' | tr '\n' '\000'".to_owned(), "does not speak PostgreSQL"),
        (5, format!("printf '{let_in}'; while true; do printf '{row}'; done"), "too long"),
        (6, "exec sleep 1000".to_owned(), "in time"),
        (7, "true".to_owned(), "ended"),
    ];
    let _servers: Vec<_> = strangers.iter().map(|(port, script, _)| server(*port, script)).collect();
    // A link to the real one; a socket of root's process that looks like the user's; one of somebody else in this directory.
    symlink(SOCKET, socket(11)).unwrap();
    let _of_root = UnixListener::bind(socket(12)).unwrap();
    chown(socket(12), Some(USER), Some(USER)).unwrap();
    let _of_another = UnixListener::bind(socket(13)).unwrap();
    chown(socket(13), Some(65534), None).unwrap();
    std::fs::write(socket(14), "").unwrap();
    let mut wanted: Vec<_> = strangers.iter().map(|(port, _, words)| (*port, *words)).collect();
    wanted.extend([
        (11, "is not a socket"),
        (12, "a process of the user 0 listens"),
        (13, "other users could replace the socket"),
        (14, "is not a socket"),
    ]);

    let agent = Agent::start("[freeze]\napplications-deadline = 5");
    for _ in 0..2 {
        let receipt = agent.freeze_and_thaw();
        for (port, words) in &wanted {
            let (reached, why) = level(&receipt, &socket(*port));
            assert!(reached == "filesystem" && why.contains(words), "{port} {words}: {why}");
        }
        assert_eq!(level(&receipt, SOCKET), ("application", ""), "{receipt:#}");
        assert_eq!(receipt["level"], "filesystem");
    }
    drop(agent);

    // Where everybody may put a socket, one is spoken with only if the settings name it.
    inside("chmod 1777 /run/postgresql");
    let agent = Agent::start("[freeze]\napplications-deadline = 5");
    let receipt = agent.freeze_and_thaw();
    assert!(level(&receipt, SOCKET).1.contains("other users could replace the socket"), "{receipt:#}");
    drop(agent);
    let agent = Agent::start(&format!(
        "[freeze]\napplications = 'listed'\n[[freeze.application]]\nkind = 'postgresql'\ntarget = '{SOCKET}'\nuser = 'postgres'"
    ));
    assert_eq!(agent.freeze_and_thaw()["level"], "application");
    drop((agent, real));
}
