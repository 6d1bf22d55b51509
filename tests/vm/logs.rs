//! `guestctl logs` of a whole Debian: what journalctl shows there, and everything once while journald, the agent and the host
//! half are restarted.

use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use serde_json::Value;

use crate::harness::host::HostHalf;
use crate::harness::tools::program;
use crate::harness::vm::SOON;
use crate::harness::wait_for;
use crate::{grant_plain, host_with, real};

/// `guestctl logs` with these words; ends with this.
struct Follower {
    child: Child,
    lines: Receiver<String>,
    told: Receiver<String>,
}

impl Follower {
    fn start(host: &HostHalf, words: &[&str]) -> Self {
        let mut command = Command::new(program("guestctl").unwrap());
        command.arg("--socket").arg(host.socket()).arg("logs").args(words).args(["-f", "-o", "json"]);
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let lines = received(child.stdout.take().unwrap());
        let told = received(child.stderr.take().unwrap());
        Self { child, lines, told }
    }

    /// The message of the next entry.
    fn next(&self) -> String {
        let line = self.lines.recv_timeout(SOON).unwrap_or_else(|_| {
            panic!("no more entries; it has said {:?}", self.told.try_iter().collect::<Vec<_>>())
        });
        let entry: Value = serde_json::from_str(&line).unwrap();
        entry["message"].as_str().unwrap().to_owned()
    }
}

impl Drop for Follower {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn received(from: impl std::io::Read + Send + 'static) -> Receiver<String> {
    let (sender, receiver) = channel();
    std::thread::spawn(move || {
        for line in BufReader::new(from).lines().map_while(Result::ok) {
            let _ = sender.send(line);
        }
    });
    receiver
}

/// What host halves may do here.
const ROLES: [&str; 3] = ["status", "topology", "logs"];

#[test]
fn a_journal_is_shown_as_it_is() {
    let vm = real("logs");
    let host = host_with(&vm, &ROLES);
    vm.run(
        "logger -t marked -p user.err 'an error'; logger -t marked -p user.info 'and a word'
         printf 'two\\nlines\\n' > /tmp/two; logger -t marked -f /tmp/two
         head -c 40000 /dev/zero | tr '\\0' x | systemd-cat -t marked
         printf 'a\\033[2Jb\\n' | systemd-cat -t odd
         seq 2500 | systemd-cat -t many
         journalctl --sync",
    )
    .unwrap();
    let ctl = |words: &[&str]| host.ctl(&[&["logs", "logs"], words].concat());
    let json = |words: &[&str]| -> Vec<Value> {
        let said = ctl(&[words, &["-o", "json"]].concat()).unwrap();
        said.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    };
    // All of it, whose parts are read one after the other.
    let all = json(&["-u", "guestlet", "-u", "init.scope"]);
    let same = vm.run("journalctl -q -u guestlet -u init.scope -o cat --no-pager").unwrap();
    let messages: Vec<_> = all.iter().map(|entry| entry["message"].as_str().unwrap()).collect();
    assert!(messages.len() > 20 && same.starts_with(&messages.join("\n")), "{messages:?}\n{same}");
    let last = json(&["--lines", "3", "-u", "init.scope"]);
    let same = vm.run("journalctl -q -u init.scope -n 3 -o short-unix --no-pager").unwrap();
    assert_eq!(last.len(), same.lines().count(), "{last:?}\n{same}");

    let marked: Vec<_> =
        json(&["--since", "1h"]).into_iter().filter(|entry| entry["identifier"] == "marked").collect();
    let error = marked.iter().find(|entry| entry["message"] == "an error").unwrap();
    assert_eq!(error["priority"], "err");
    assert!(error["process_id"].is_u64() && error["time"].as_str().unwrap().ends_with('Z'), "{error}");
    let long: Vec<_> =
        marked.iter().filter(|entry| entry["message"].as_str().unwrap().starts_with("xxx")).collect();
    assert_eq!(long[0]["message"].as_str().unwrap().len(), 16 << 10);
    assert_eq!(long[0]["left_out_bytes"], 40_000 - (16 << 10));
    let urgent = json(&["-p", "err"]);
    assert!(urgent.iter().any(|entry| entry["message"] == "an error"));
    assert!(urgent.iter().all(|entry| entry["message"] != "and a word"));
    // Nothing of a guest steers a terminal.
    let odd = ctl(&["--since", "1h"]).unwrap();
    assert!(!odd.contains('\u{1b}') && odd.contains("a\u{fffd}[2Jb"), "{odd}");
    let many = json(&[]).into_iter().filter(|entry| entry["identifier"] == "many");
    assert!(
        many.map(|entry| entry["message"].as_str().unwrap().to_owned())
            .eq((1..=2500).map(|line| line.to_string()))
    );

    assert_eq!(ctl(&["-u", "no-such.service"]).unwrap(), "");
    let refused = ctl(&["-u", "a b"]).unwrap_err().to_string();
    assert!(refused.contains("not the name of a unit"), "{refused}");
    grant_plain(&vm, &["status"]);
    let refused = wait_for("refusal", SOON, || {
        let said = ctl(&["--lines", "1"]).unwrap_err().to_string();
        said.contains("the role logs").then_some(said)
    });
    let refused = refused.unwrap();
    assert!(refused.contains("/etc/guestlet/agent.d"), "{refused}");
}

#[test]
fn no_entry_is_left_out_or_shown_twice_while_everything_is_restarted() {
    let vm = real("followed");
    let mut host = host_with(&vm, &ROLES);
    let follower = Follower::start(&host, &["followed", "-u", "noise", "--lines", "0"]);
    std::thread::sleep(Duration::from_secs(2));
    vm.run("systemd-run --quiet --unit noise sh -c 'for i in $(seq 600); do echo line $i; sleep 0.05; done'")
        .unwrap();
    for number in 1..=600 {
        // What systemd says of the unit comes in between.
        let mut message = follower.next();
        while !message.starts_with("line ") {
            message = follower.next();
        }
        assert_eq!(message, format!("line {number}"));
        match number {
            100 => host.kill().unwrap(),
            200 => drop(vm.run("systemctl restart systemd-journald").unwrap()),
            300 => drop(vm.run("systemctl restart guestlet").unwrap()),
            400 => drop(vm.run("journalctl --rotate").unwrap()),
            500 => host.restart().unwrap(),
            _ => {}
        }
    }
    // What the guest has removed in between is said to be missing. (The agent is masked: its socket would start it.)
    vm.run("systemctl mask --runtime --now guestlet.socket guestlet.service").unwrap();
    let said = vm
        .run(
            "systemd-run --quiet --wait --unit noise echo before; journalctl --rotate; sleep 3
             journalctl --vacuum-time=1s; systemd-run --quiet --wait --unit noise echo after
             systemctl unmask --runtime guestlet.socket guestlet.service; systemctl start guestlet",
        )
        .unwrap();
    // The warning comes first, but through a pipe of its own, which another thread reads.
    let mut told = Vec::new();
    let warned = wait_for("warning", SOON, || {
        told.extend(follower.told.try_iter());
        told.iter().any(|line| line.contains("entries may be missing here")).then_some(())
    });
    assert!(warned.is_ok(), "{told:?} {said}");
    while !follower.next().contains("after") {}
    // A journal that is put back to what it was: nothing of it comes after the place of the follower.
    vm.run(
        "journalctl --sync && cp -a /var/log/journal /var/log/earlier
         for i in $(seq 40); do systemd-run --quiet --wait --unit noise echo lost; done; journalctl --sync",
    )
    .unwrap();
    while !follower.next().contains("lost") {}
    vm.run(
        "systemctl mask --runtime --now guestlet.socket guestlet.service
         systemctl stop systemd-journald.socket systemd-journald-dev-log.socket systemd-journald-audit.socket
         systemctl stop systemd-journald
         rm -r /var/log/journal && mv /var/log/earlier /var/log/journal
         systemctl start systemd-journald.socket systemd-journald-dev-log.socket systemd-journald
         systemctl unmask --runtime guestlet.socket guestlet.service; systemctl start guestlet",
    )
    .unwrap();
    let warned = wait_for("warning", SOON, || {
        let told: Vec<_> = follower.told.try_iter().collect();
        told.iter().any(|line| line.contains("entries may be missing here")).then_some(())
    });
    warned.unwrap();
    vm.run("systemd-run --quiet --wait --unit noise echo again").unwrap();
    while !follower.next().contains("again") {}
}
