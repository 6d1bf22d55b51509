//! What is refused, with the reason, and what is written down.

use std::process::Stdio;

use crate::forwarding::{Forwarding, lab, lab_of, until_broken};
use crate::host::assert_fails;
use crate::lab::Lab;
use crate::servers::{echo, ping, tcp};

const OTHER: u32 = 4_000_001;

#[test]
fn a_guest_without_grants_lets_nothing_be_reached() {
    let lab = Lab::with("");
    let output = lab.host.ctl(&["forward", "web", "0:22"]);
    assert_fails(&output, 1, "no grant gives the role forward to a host half without a key for uid:0 root");
    assert_fails(&output, 1, "roles = [\"forward\"] to /etc/guestlet/agent.d, and in it forward = [\"22\"]");
}

#[test]
fn a_role_alone_lets_nothing_be_reached_and_the_reason_says_what_to_write() {
    let port = tcp(echo);
    let lab = lab(&[]);
    let forwarding = Forwarding::of(&lab, port);
    until_broken(&forwarding.connect());
    let words = format!("reach {port}; add forward = [\"{port}\"] to a [[grant]] with host = \"plain\"");
    forwarding.until_complains(&words);
    let records = lab.agent_log();
    let record = format!(
        "ForwardConnections ({port}): denied: no grant lets a host half without a key for uid:0 root"
    );
    assert!(records.contains(&record), "{records}");
}

#[test]
fn only_what_is_named_is_reached() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("socket");
    crate::servers::unix(&socket, echo);
    let (named, other) = (tcp(echo), tcp(echo));
    let lab = lab(&[format!("127.0.0.1:{named}")]);
    let specs = [
        format!("0:{named}"),
        format!("0:{other}"),
        format!("0:127.0.0.2:{named}"),
        format!("0:[::1]:{named}"),
        format!("0:{}", socket.display()),
    ];
    let forwarding = Forwarding::start(&lab, &specs.each_ref().map(String::as_str));
    ping(&mut forwarding.connect());
    for place in &forwarding.places[1..] {
        until_broken(&std::net::TcpStream::connect(place).unwrap());
    }
    ping(&mut forwarding.connect());
}

#[test]
fn what_does_not_answer_is_told() {
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let lab = lab(&[free.to_string(), "unix:/nonexistent/socket".to_owned()]);
    let forwarding = Forwarding::start(&lab, &[&format!("0:{free}"), "0:/nonexistent/socket"]);
    until_broken(&forwarding.connect());
    forwarding.until_complains(&format!("cannot reach {free} in web: "));
    let output = lab.host.ctl_command(&["forward", "web", "/nonexistent/socket", "--stdio"]);
    let output = { output }.stdin(Stdio::null()).output().unwrap();
    assert_fails(&output, 1, "cannot reach unix:/nonexistent/socket in web: No such file or directory");
}

#[test]
fn what_is_typed_wrong_is_told() {
    let lab = lab_of(&[22]);
    for (arguments, words) in [
        (&["web", "a:b:c"][..], "write [LISTEN:]TARGET"),
        (&["web", "db:5432"], "host names are not resolved"),
        (&["web"], "required arguments"),
        (&["web", "22", "--stdio", "--address", "::1"], "cannot be used with"),
    ] {
        assert_fails(&lab.host.ctl(&[&["forward"], arguments].concat()), 2, words);
    }
    assert_fails(&lab.host.ctl(&["forward", "web", "/run/x"]), 1, "specify where to listen for unix:/run/x");
    assert_fails(
        &lab.host.ctl(&["forward", "web", "1:22", "--stdio"]),
        1,
        "--stdio needs exactly one target",
    );
    assert_fails(&lab.host.ctl(&["forward", "db", "0:22"]), 4, "knows no VM named \"db\"");
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let spec = format!("{}:22", taken.local_addr().unwrap());
    assert_fails(&lab.host.ctl(&["forward", "web", &spec]), 1, "cannot listen on 127.0.0.1:");
}

#[test]
fn others_than_root_need_a_rule() {
    let port = tcp(echo);
    let mut lab = lab_of(&[port]);
    let target = port.to_string();
    let ask = |lab: &Lab| {
        let mut command = lab.host.ctl_as(OTHER, &["forward", "web", &target, "--stdio"]);
        command.stdin(Stdio::null()).output().unwrap()
    };
    let rule = |role: &str| format!("[[access]]\nusers = ['{OTHER}']\nroles = ['{role}']\n[[vm]]\n");
    lab.host.kill();
    lab.host.edit("[[vm]]\n", &rule("exec"));
    lab.host.again();
    lab.host.until_session("web", "connected");
    assert_fails(&ask(&lab), 1, "may not do \"forward\" with the VM \"web\"");
    lab.host.kill();
    lab.host.edit("'exec'", "'forward'");
    lab.host.again();
    lab.host.until_session("web", "connected");
    let output = ask(&lab);
    assert!(output.status.success(), "{output:?}");
    let (agent, host) = (lab.agent_log(), lab.host.log());
    assert!(agent.contains(&format!("for uid:{OTHER}")) && agent.contains("connected"), "{agent}");
    assert!(host.lines().any(|line| line.contains("audit:") && line.contains("forward")), "{host}");
}
