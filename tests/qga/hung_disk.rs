//! A file system that answers nothing: a FUSE mount that nobody serves, in a mount namespace of its own.

use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd as _;
use std::path::Path;
use std::time::{Duration, Instant};

use nix::mount::{MsFlags, mount};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};

use crate::agent::{Agent, Client, PATIENCE};
use crate::namespace::is_outside;

/// Mounts it; whoever waits for it is let go when this is dropped.
fn mount_one_that_hangs(place: &Path) -> File {
    let server = OpenOptions::new().read(true).write(true).open("/dev/fuse").unwrap();
    let options = format!("fd={},rootmode=40000,user_id=0,group_id=0", server.as_raw_fd());
    mount(Some("hangs"), place, Some("fuse"), MsFlags::empty(), Some(options.as_str())).unwrap();
    server
}

fn send(client: &mut Client, command: &str, arguments: &Value) {
    client.send(json!({"execute": command, "arguments": arguments, "id": command}).to_string().as_bytes());
}

/// The agent would not end before it was killed, two minutes later. What was under way is in the log.
#[test]
fn a_disk_that_hangs_holds_up_no_other_call_and_not_the_agents_end() {
    if is_outside() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let mut agent = Agent::start();
    // In the kernel, who looks into a folder of this kind waits for who did before, and cannot be killed: the program that
    // is to be run, a process of its own, gets another one.
    let programs = tempfile::tempdir().unwrap();
    // Dropped first, whatever happens: then nothing hangs any more.
    let servers = [folder.path(), programs.path()].map(mount_one_that_hangs);
    let (path, program) = (folder.path().join("file"), programs.path().join("program"));
    let mut stuck: Vec<_> = (0..3).map(|_| agent.client()).collect();
    send(&mut stuck[0], "guest-file-open", &json!({"path": path}));
    send(&mut stuck[1], "guest-exec", &json!({"path": program}));
    send(&mut stuck[2], "guest-file-open", &json!({"path": path, "mode": "w"}));
    let mut other = agent.client();
    for client in stuck.iter_mut().chain([&mut other]) {
        assert_eq!(client.call("guest-ping"), json!({}));
    }
    for command in ["guest-get-fsinfo", "guest-get-disks", "guest-get-osinfo"] {
        other.call(command);
    }
    let begun = Instant::now();
    kill(Pid::from_raw(agent.child.id().cast_signed()), Signal::SIGTERM).unwrap();
    while agent.child.try_wait().unwrap().is_none() {
        assert!(begun.elapsed() < PATIENCE, "the agent does not end");
        std::thread::sleep(Duration::from_millis(5));
    }
    drop(servers);
    let pid = std::process::id();
    for client in [
        format!(" (pid {pid}, uid 0): guest-file-open ({}): not known:", path.display()),
        format!(" (pid {pid}, uid 0): guest-exec ({}): not known:", program.display()),
    ] {
        assert!(
            agent.log().lines().any(|line| line.contains("audit: ") && line.contains(&client)),
            "{client}"
        );
    }
}
