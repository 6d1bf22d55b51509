//! Programs that go on without a client, and how they end.

use std::process::Stdio;
use std::time::{Duration, Instant};

use crate::lab::{Lab, code, is_running, text, until};

fn number(program: &serde_json::Value) -> u32 {
    u32::try_from(program["process_id"].as_u64().unwrap()).unwrap()
}

#[test]
fn a_detached_program_goes_on_and_the_last_of_its_output_is_kept() {
    let lab = Lab::new();
    let go = lab.file("go");
    let script = format!(
        "head -c 1048576 /dev/zero; printf end; while [ ! -e {} ]; do sleep 0.05; done; exit 4",
        go.display()
    );
    let id = text(&lab.exec(&["--detach"], &["sh", "-c", &script]));
    let id = id.trim();
    let status = lab.status();
    assert!(status.contains(&format!("{id} runs as root: sh -c")), "{status}");
    let listed = lab.programs();
    assert_eq!((listed.len(), &listed[0]["id"], &listed[0]["is_attached"]), (1, &id.into(), &false.into()));
    assert!(listed[0]["command"].as_str().unwrap().starts_with("sh -c \"head"), "{listed:?}");
    std::thread::sleep(Duration::from_millis(500));
    std::fs::write(&go, "").unwrap();
    until("it has ended", || lab.programs()[0]["exit_code"] == 4);
    assert!(lab.host.words(&["ps", "web"]).contains("exited 4"));
    let attached = lab.host.ctl(&["attach", "web", id]);
    assert_eq!((code(&attached), attached.stdout.len()), (4, 256 << 10), "{:?}", attached.stderr);
    assert!(attached.stdout.ends_with(b"\0end"));
    assert!(lab.programs().is_empty());
}

#[test]
fn a_kill_leaves_nothing_running() {
    let lab = Lab::new();
    let script = "sleep 1001 & setsid sleep 1004 & sh -c 'trap \"\" TERM HUP; sleep 1002 & wait; sleep 1003' & echo ready; wait";
    for signal in [&["--signal", "KILL"][..], &[]] {
        let mut child = lab.command(&[], &["sh", "-c", script]);
        let mut child = child.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap();
        until("it runs", || !lab.programs().is_empty());
        std::thread::sleep(Duration::from_millis(500));
        let program = lab.programs().remove(0);
        let session = number(&program);
        let members = || {
            let entries = std::fs::read_dir("/proc").unwrap();
            let pids = entries.filter_map(|entry| entry.unwrap().file_name().to_str()?.parse::<i32>().ok());
            let group = format!("-{}\n", program["id"].as_str().unwrap());
            let of_program = |pid: &i32| {
                let groups = std::fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default();
                let sid = nix::unistd::getsid(Some(nix::unistd::Pid::from_raw(*pid)));
                groups.ends_with(&group) || sid.is_ok_and(|sid| sid.as_raw().cast_unsigned() == session)
            };
            pids.filter(of_program).filter(|pid| is_running(pid.cast_unsigned())).count()
        };
        // Where the agent has no control group for it, one with a session of its own is not found.
        let has_group =
            std::fs::read_to_string(format!("/proc/{session}/cgroup")).unwrap().contains("guestlet-exec-");
        let all = if has_group { 5 } else { 4 };
        until("all of it runs", || members() >= all);
        let id = program["id"].as_str().unwrap().to_owned();
        lab.host.words(&[&["kill", "web", &id], signal].concat());
        let status = crate::host::wait(&mut child).code();
        assert!(matches!(status, Some(137 | 143)), "{status:?}");
        until("nothing runs", || members() == 0);
    }
}

#[test]
fn a_program_that_takes_too_long_is_ended() {
    let lab = Lab::new();
    let begun = Instant::now();
    let output = lab.exec(&["--timeout", "1s"], &["sleep", "1000"]);
    assert_eq!(code(&output), 143);
    assert!(String::from_utf8_lossy(&output.stderr).contains("--timeout"), "{output:?}");
    assert!(begun.elapsed() < Duration::from_secs(30));
}

#[test]
fn a_program_that_nobody_comes_back_to_is_ended() {
    let lab = Lab::new();
    let mut command = lab.command(&["--on-disconnect", "kill", "--wait", "1s"], &["sleep", "1000"]);
    let mut child = command.stdin(Stdio::null()).spawn().unwrap();
    until("it runs", || !lab.programs().is_empty());
    let number = number(&lab.programs()[0]);
    child.kill().unwrap();
    child.wait().unwrap();
    until("it has ended", || !is_running(number));
}

#[test]
fn signals_are_passed_on() {
    let lab = Lab::new();
    let mut command =
        lab.command(&[], &["sh", "-c", "trap 'exit 9' USR1; echo ready; while :; do sleep 0.05; done"]);
    let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    std::io::BufRead::read_line(&mut std::io::BufReader::new(child.stdout.take().unwrap()), &mut line)
        .unwrap();
    assert_eq!(line, "ready\n");
    let pid = nix::unistd::Pid::from_raw(i32::try_from(child.id()).unwrap());
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGUSR1).unwrap();
    assert_eq!(crate::host::wait(&mut child).code(), Some(9));
}

#[test]
fn programs_of_another_caller_are_not_seen() {
    let lab = Lab::new();
    let id = text(&lab.exec(&["--detach"], &["sleep", "1000"]));
    let id = id.trim();
    // Another user of the host is another caller; these may ask for everything here.
    let mut host = lab;
    host.host.edit("[[vm]]", "[[access]]\nusers = [\"1\"]\nroles = [\"exec\"]\n[[vm]]");
    let mut listed = || host.host.ctl_as(1, &["ps", "web", "-o", "json"]).output().unwrap();
    until_ok(&mut listed);
    let none: Vec<serde_json::Value> = serde_json::from_slice(&listed().stdout).unwrap();
    assert!(none.is_empty(), "{none:?}");
    let killed = host.host.ctl_as(1, &["kill", "web", id]).output().unwrap();
    assert!(String::from_utf8_lossy(&killed.stderr).contains("there is no program"), "{killed:?}");
    assert_eq!(host.programs().len(), 1);
    host.host.words(&["kill", "web", id]);
}

fn until_ok(ask: &mut impl FnMut() -> std::process::Output) {
    let end = Instant::now() + crate::host::DEADLINE;
    loop {
        let output = ask();
        if output.status.success() {
            return;
        }
        assert!(Instant::now() < end, "{output:?}");
        std::thread::sleep(Duration::from_millis(50));
    }
}
