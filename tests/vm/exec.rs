//! Programs and verbs of guestctl in a whole Debian: under systemd, with its users, and while guest, vsock device, host half
//! and agent stop, go and come back.

use std::io::{Read as _, Write as _};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::harness::host::HostHalf;
use crate::harness::tools::program;
use crate::harness::vm::SOON;
use crate::harness::wait_for;
use crate::{host_with, real};

/// What host halves may do here.
const ROLES: [&str; 6] = ["status", "disks", "topology", "exec", "power", "freeze"];

/// `guestctl exec` with these words.
fn exec(host: &HostHalf, words: &[&str]) -> Command {
    let mut command = Command::new(program("guestctl").unwrap());
    command.arg("--socket").arg(host.socket()).arg("exec").args(words);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Its exit code and what it printed.
#[track_caller]
fn ended(command: &mut Command) -> (Option<i32>, String, String) {
    told(&command.output().unwrap())
}

fn told(output: &Output) -> (Option<i32>, String, String) {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (output.status.code(), text(&output.stdout), text(&output.stderr))
}

/// `cat` in the guest with this input, a slice at a time, so that it lasts.
fn echo(host: &HostHalf, name: &str, seconds: u32) -> (Child, std::thread::JoinHandle<Vec<u8>>) {
    let mut child = exec(host, &["-i", name, "--", "cat"]).stdin(Stdio::piped()).spawn().unwrap();
    let (mut sink, mut source) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
    std::thread::spawn(move || {
        for number in 0..seconds * 100 {
            writeln!(sink, "line {number}").unwrap();
            std::thread::sleep(Duration::from_millis(10));
        }
    });
    let reader = std::thread::spawn(move || {
        let mut all = Vec::new();
        source.read_to_end(&mut all).unwrap();
        all
    });
    (child, reader)
}

#[test]
fn programs_run_under_systemd_with_the_guests_users_and_end_with_the_service() {
    let vm = real("programs");
    vm.run("groupadd readers && useradd --create-home --groups readers worker").unwrap();
    let host = host_with(&vm, &ROLES);

    let (code, out, _) = ended(&mut exec(&host, &["programs", "--", "cat", "/proc/self/cgroup"]));
    assert!(code == Some(0) && out.contains("/guestlet.service/"), "{out}");
    let (code, out, _) = ended(&mut exec(
        &host,
        &[
            "--user",
            "worker",
            "programs",
            "--",
            "sh",
            "-c",
            "id -un; id -Gn; pwd; echo $HOME; grep NoNewPrivs /proc/self/status; exit 7",
        ],
    ));
    assert_eq!(
        (code, out.as_str()),
        (Some(7), "worker\nworker readers\n/home/worker\n/home/worker\nNoNewPrivs:\t0\n")
    );
    // What a root shell of the guest can, a program can: the service's own restrictions are not its own.
    let all = "touch /etc/made /usr/made /boot/made && mount -t tmpfs none /mnt && echo made";
    let (code, out, said) = ended(&mut exec(&host, &["programs", "--", "sh", "-c", all]));
    assert_eq!((code, out.as_str()), (Some(0), "made\n"), "{said}");
    vm.run("test -e /etc/made && test -e /usr/made && test -e /boot/made && mountpoint -q /mnt").unwrap();
    let (code, _, said) = ended(&mut exec(&host, &["programs", "--", "/no/such/program"]));
    assert_eq!(code, Some(127), "{said}");

    // Nothing is started in a frozen guest, and what runs goes on.
    let (mut child, reader) = echo(&host, "programs", 3);
    wait_for("the program", SOON, || vm.run("pgrep -x cat").ok()).unwrap();
    host.ctl(&["freeze", "programs"]).unwrap();
    let (code, _, refused) = ended(&mut exec(&host, &["programs", "--", "true"]));
    assert!(code == Some(125) && refused.contains("frozen"), "{code:?} {refused}");
    host.ctl(&["thaw", "programs"]).unwrap();
    assert!(child.wait().unwrap().success());
    assert_eq!(String::from_utf8(reader.join().unwrap()).unwrap().lines().count(), 300);

    // They end with the service, whatever they have started.
    let begun = exec(&host, &["programs", "--", "sh", "-c", "setsid sleep 4242 & setsid sleep 4243"])
        .spawn()
        .unwrap();
    wait_for("sleepers", SOON, || vm.run("pgrep -f 'sleep 424[2]' && pgrep -f 'sleep 424[3]'").ok()).unwrap();
    vm.run("systemctl restart guestlet").unwrap();
    vm.run("! pgrep -f '[s]leep 424'").unwrap();
    let (code, _, lost) = told(&begun.wait_with_output().unwrap());
    // That systemd has ended it may be told before the agent itself ends.
    assert!(code == Some(255) || code == Some(143), "{code:?} {lost}");
    assert!(code == Some(143) || lost.contains("restarted") || lost.contains("lost"), "{lost}");
}

#[test]
fn a_login_is_a_session_of_logind_and_ends_as_a_whole() {
    let vm = real("logins");
    vm.run("useradd --create-home --shell /bin/bash worker && echo 'FROM=profile' > ~worker/.bash_profile")
        .unwrap();
    vm.run("echo 'worker hard nofile 321' >> /etc/security/limits.conf").unwrap();
    let host = host_with(&vm, &ROLES);
    let login =
        |command: &str| exec(&host, &["--login", "--user", "worker", "logins", "--", "bash", "-c", command]);
    let show = "echo $(id -un) $(ulimit -Hn) $PWD; loginctl show-session $XDG_SESSION_ID -p Name -p Service -p State; \
                grep -o 'session-.*' /proc/self/cgroup; exit 7";
    let (code, out, said) = ended(&mut login(show));
    assert_eq!(code, Some(7), "{out} {said}");
    let lines: Vec<_> = out.lines().collect();
    assert_eq!(lines[0], "worker 321 /home/worker", "{out} {said}");
    for line in ["Name=worker", "Service=runuser-l", "State=active"] {
        assert!(lines.contains(&line), "{out} {said}");
    }
    assert!(lines.iter().any(|line| line.starts_with("session-") && line.contains(".scope")), "{out} {said}");
    wait_for("the session's end", SOON, || {
        vm.run("! loginctl list-sessions --no-legend | grep -w worker").ok()
    })
    .unwrap();
    vm.run("journalctl | grep 'pam_unix(runuser-l:session): session closed for user worker'").unwrap();

    // What has left its group, and its session as a process, is in that of logind.
    let leave = "setsid sleep 4244 & setsid sleep 4245 & wait";
    let mut running = login(leave).spawn().unwrap();
    let both = "pgrep -f '[s]leep 4244' && pgrep -f '[s]leep 4245'";
    wait_for("sleepers", SOON, || vm.run(both).ok()).unwrap();
    let programs: Value = serde_json::from_str(&host.ctl(&["ps", "logins", "-o", "json"]).unwrap()).unwrap();
    let id = programs[0]["id"].as_str().unwrap().to_owned();
    host.ctl(&["kill", "logins", &id, "--signal", "KILL"]).unwrap();
    assert_eq!(running.wait().unwrap().code(), Some(137));
    vm.run("! pgrep -f '[s]leep 424'").unwrap();

    // They end with the agent, too, even if that has no time for it.
    let begun = login(leave).spawn().unwrap();
    wait_for("sleepers", SOON, || vm.run(both).ok()).unwrap();
    vm.run("systemctl kill --signal KILL guestlet").unwrap();
    wait_for("their end", SOON, || vm.run("! pgrep -f '[s]leep 424'").ok()).unwrap();
    assert_eq!(told(&begun.wait_with_output().unwrap()).0, Some(255));
}

#[test]
fn a_program_goes_on_while_its_guest_is_paused_its_device_replaced_and_its_host_half_killed() {
    let mut vm = real("going");
    let mut host = host_with(&vm, &ROLES);
    let (mut child, reader) = echo(&host, "going", 40);
    std::thread::sleep(Duration::from_secs(2));
    // Longer than the silence that ends a session.
    vm.qmp().execute("stop", json!({})).unwrap();
    std::thread::sleep(Duration::from_secs(22));
    vm.qmp().execute("cont", json!({})).unwrap();
    std::thread::sleep(Duration::from_secs(2));
    host.kill().unwrap();
    std::thread::sleep(Duration::from_secs(2));
    // What a move to another host does to connections.
    vm.unplug_vsock().unwrap();
    host.wait("going", "no session", SOON, |now| now["session"] != "connected").unwrap();
    vm.replug_vsock().unwrap();
    host.wait_connected("going", SOON).unwrap();
    let status = child.wait().unwrap();
    let all = String::from_utf8(reader.join().unwrap()).unwrap();
    let said = std::io::read_to_string(child.stderr.take().unwrap()).unwrap();
    assert!(status.success(), "{status} {said}");
    assert!(said.contains("reconnecting"), "nothing was interrupted: {said}");
    let wanted = (0..4000).map(|number| format!("line {number}"));
    assert!(all.lines().eq(wanted), "{} lines: {said}", all.lines().count());

    let begun = Instant::now();
    let (mut latencies, rounds) = (Vec::new(), 10);
    for _ in 0..rounds {
        let one = Instant::now();
        assert_eq!(ended(&mut exec(&host, &["going", "--", "true"])).0, Some(0));
        latencies.push(one.elapsed());
    }
    latencies.sort_unstable();
    println!("{rounds} starts of true: median {:?}, all {:?}", latencies[rounds / 2], begun.elapsed());
}

#[test]
fn guestctl_tells_of_a_machine_what_its_own_tools_and_qga_tell() {
    let vm = real("machine");
    vm.run(
        "ip link add name dummy0 type dummy && ip addr add 192.0.2.77/24 dev dummy0 && ip link set dummy0 up",
    )
    .unwrap();
    let host = host_with(&vm, &ROLES);
    let mut qga = vm.qga().unwrap();
    let mut qga = |command: &str| qga.execute(command, json!({})).unwrap();
    let ctl = |verb: &str| -> Value {
        serde_json::from_str(&host.ctl(&[verb, "machine", "-o", "json"]).unwrap()).unwrap()
    };

    let (of_ctl, of_qga) = (ctl("fs"), qga("guest-get-fsinfo"));
    let places = |all: &Value, key: &str| {
        let mut places: Vec<_> = all
            .as_array()
            .unwrap()
            .iter()
            .map(|one| {
                format!(
                    "{} {} {}",
                    one[key],
                    one["type"],
                    one[if key == "mountpoint" { "name" } else { "device" }]
                )
            })
            .collect();
        places.sort();
        places
    };
    assert_eq!(places(&of_ctl, "mount_point"), places(&of_qga, "mountpoint"));
    let root = of_ctl.as_array().unwrap().iter().find(|one| one["mount_point"] == "/").unwrap();
    let bytes = vm.run("echo $(($(stat -f -c '%b * %S' /)))").unwrap();
    assert_eq!(root["total_bytes_privileged"].as_u64().unwrap(), bytes.trim().parse::<u64>().unwrap());

    let network = ctl("network");
    let mut seen: Vec<_> =
        network.as_array().unwrap().iter().map(|one| one["name"].as_str().unwrap()).collect();
    seen.sort_unstable();
    let links = vm.run("ls /sys/class/net | sort").unwrap();
    assert_eq!(seen, links.split_whitespace().collect::<Vec<_>>());
    let of_qga = qga("guest-network-get-interfaces");
    for one in network.as_array().unwrap() {
        let same = of_qga.as_array().unwrap().iter().find(|other| other["name"] == one["name"]).unwrap();
        assert_eq!(one["hardware_address"], same["hardware-address"]);
        let addresses: Vec<_> = same["ip-addresses"]
            .as_array()
            .into_iter()
            .flatten()
            .map(|address| format!("{}/{}", address["ip-address"].as_str().unwrap(), address["prefix"]))
            .collect();
        let mut of_ctl: Vec<_> =
            one["addresses"].as_array().unwrap().iter().map(|one| one.as_str().unwrap().to_owned()).collect();
        let mut of_qga = addresses;
        of_ctl.sort();
        of_qga.sort();
        assert_eq!(of_ctl, of_qga, "{one}");
    }
    assert!(network.to_string().contains("192.0.2.77/24"), "{network}");

    let online = |all: &Value, key: &str| {
        all.as_array()
            .unwrap()
            .iter()
            .map(|one| (one[key].clone(), one["online"].clone()))
            .collect::<Vec<_>>()
    };
    assert_eq!(online(&ctl("cpus"), "id"), online(&qga("guest-get-vcpus"), "logical-id"));
    let memory = ctl("memory");
    assert_eq!(memory["block_bytes"], qga("guest-get-memory-block-info")["size"]);
    assert_eq!(online(&memory["blocks"], "id"), online(&qga("guest-get-memory-blocks"), "phys-index"));
    let users =
        |all: &Value| all.as_array().unwrap().iter().map(|one| one["user"].clone()).collect::<Vec<_>>();
    assert_eq!(users(&ctl("users")), users(&qga("guest-get-users")));
    let zone = ctl("time");
    assert_eq!(zone["offset_seconds"], qga("guest-get-timezone")["offset"]);
    // Whatever has no verb of its own.
    let said = host.ctl(&["qga", "machine", r#"{"execute": "guest-get-host-name"}"#]).unwrap();
    assert_eq!(serde_json::from_str::<Value>(&said).unwrap()["return"], qga("guest-get-host-name"), "{said}");
}
