//! What becomes of connections when one of the programs on the way ends.

use std::io::Read as _;
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::Stdio;
use std::sync::mpsc;

use crate::forwarding::{Forwarding, grants, lab_of, until_broken};
use crate::host::DEADLINE;
use crate::lab::until;
use crate::launch;
use crate::servers::{echo, ping, tcp};

#[test]
fn a_guestctl_that_is_killed_closes_its_connections_in_the_guest() {
    let (sender, ended) = mpsc::channel();
    let port = tcp(move |mut client: TcpStream| {
        let mut part = [0; 4];
        client.read_exact(&mut part).unwrap();
        std::io::Write::write_all(&mut client, &part).unwrap();
        // However it ends: with an end, or broken.
        let _ = client.read(&mut part);
        sender.send(()).unwrap();
    });
    let lab = lab_of(&[port]);
    let mut forwarding = Forwarding::of(&lab, port);
    let mut client = forwarding.connect();
    ping(&mut client);
    assert!(lab.status().contains("1 connection of the host half for uid:0 root"), "{}", lab.status());
    forwarding.child.kill().unwrap();
    ended.recv_timeout(DEADLINE).unwrap();
    until("none is left", || !lab.status().contains("forwarding"));
    let records = lab.agent_log();
    assert!(records.contains("ended with its call: 4 bytes to the target, 4 bytes from it"), "{records}");
}

#[test]
fn a_host_half_that_is_killed_breaks_them_and_the_next_one_goes_on() {
    let port = tcp(echo);
    let mut lab = lab_of(&[port]);
    let forwarding = Forwarding::of(&lab, port);
    let mut client = forwarding.connect();
    ping(&mut client);
    lab.host.kill();
    assert_eq!(until_broken(&client), std::io::ErrorKind::ConnectionReset);
    forwarding.until_complains("no connection to web");
    lab.host.again();
    lab.host.until_session("web", "connected");
    ping(&mut forwarding.connect());
}

#[test]
fn an_agent_that_is_restarted_breaks_them_and_what_its_settings_say_then_counts() {
    let (first, second) = (tcp(echo), tcp(echo));
    let mut lab = lab_of(&[first]);
    let forwarding = Forwarding::start(&lab, &[&format!("0:{first}"), &format!("0:{second}")]);
    let mut client = forwarding.connect();
    ping(&mut client);
    let denied = TcpStream::connect(&forwarding.places[1]).unwrap();
    until_broken(&denied);
    forwarding.until_complains(&format!("add forward = [\"{second}\"]"));
    lab.kill_agent();
    assert_eq!(until_broken(&client), std::io::ErrorKind::ConnectionReset);
    let folder = lab.file("web");
    let more = format!("method = \"none\"\n[csi]\nenabled = false\n{}", grants(&[second.to_string()]));
    std::fs::write(folder.join("agent.toml"), launch::settings_with(&folder, &more)).unwrap();
    lab.start_agent();
    lab.host.until_session("web", "connected");
    ping(&mut TcpStream::connect(&forwarding.places[1]).unwrap());
    until_broken(&forwarding.connect());
    forwarding.until_complains(&format!("add forward = [\"{first}\"]"));
}

#[test]
fn a_socket_here_is_for_its_user_and_is_removed_if_it_is_still_the_same() {
    let port = tcp(echo);
    let lab = lab_of(&[port]);
    let path = lab.file("here.sock");
    let spec = format!("{}:{port}", path.display());
    let mut forwarding = Forwarding::start(&lab, &[&spec]);
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    ping(&mut UnixStream::connect(&path).unwrap());
    let again = lab.host.ctl_command(&["forward", "web", &spec]).stdin(Stdio::null()).output().unwrap();
    crate::host::assert_fails(&again, 1, "is in use by another process");
    assert!(forwarding.stop().success());
    assert!(!path.exists(), "it is left behind");

    let mut forwarding = Forwarding::start(&lab, &[&spec]);
    std::fs::remove_file(&path).unwrap();
    let _other = UnixListener::bind(&path).unwrap();
    assert!(forwarding.stop().success());
    assert!(path.exists(), "another's was removed");

    std::fs::remove_file(&path).unwrap();
    std::fs::write(&path, "a file").unwrap();
    let file = lab.host.ctl_command(&["forward", "web", &spec]).stdin(Stdio::null()).output().unwrap();
    crate::host::assert_fails(&file, 1, "exists and is not a socket");
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "a file");
}
