//! Connections with what listens in a whole Debian, over vsock.

use std::io::{Read as _, Write as _};
use std::net::{Shutdown, TcpStream};
use std::process::{Command, Stdio};

use crate::harness::host::{HostHalf, Listed};
use crate::harness::tools::program;
use crate::harness::vm::SOON;
use crate::harness::wait_for;
use crate::real;

/// Bytes whose place in the stream can be told.
fn pattern(length: usize) -> Vec<u8> {
    (0..length as u64).map(|at| (at.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56) as u8).collect()
}

fn forward(host: &HostHalf, words: &[&str]) -> Command {
    let mut command = Command::new(program("guestctl").unwrap());
    command.arg("--socket").arg(host.socket()).args(["forward", "forwarded"]).args(words);
    command
}

#[test]
fn what_listens_in_a_guest_is_reached_over_vsock_and_every_byte_arrives() {
    const GRANT: &str = "[[grant]]\nhost = \"plain\"\nroles = [\"status\", \"disks\", \"topology\", \"forward\"]\n\
                         forward = [\"7000\", \"unix:/run/sum.sock\"]\n";
    let vm = real("forwarded");
    vm.write("/etc/guestlet/agent.d/forward.toml", GRANT.as_bytes()).unwrap();
    // One sends back what comes, the other a checksum of all that came before the end.
    for (unit, address, does) in [
        ("echo", "TCP-LISTEN:7000,bind=127.0.0.1,fork,reuseaddr", "EXEC:cat"),
        ("sum", "UNIX-LISTEN:/run/sum.sock,fork", "EXEC:sha256sum"),
    ] {
        vm.run(&format!("systemd-run --quiet --unit {unit} socat -t 60 {address} {does}")).unwrap();
    }
    // With the privileges that the settings leave it.
    vm.run("systemctl daemon-reload && systemctl restart guestlet").unwrap();
    let host = HostHalf::start(&[Listed::of(&vm)]).unwrap();
    host.wait_connected(vm.name(), SOON).unwrap();
    wait_for("servers", SOON, || vm.run("test -S /run/sum.sock && ss -tln | grep -q :7000").ok()).unwrap();

    let sent = pattern(16 << 20);
    let mut child = forward(&host, &["/run/sum.sock", "--stdio"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let (mut sink, all) = (child.stdin.take().unwrap(), sent.clone());
    let writer = std::thread::spawn(move || sink.write_all(&all).unwrap());
    let summed = child.wait_with_output().unwrap();
    writer.join().unwrap();
    let mut own = Command::new("sha256sum").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    own.stdin.take().unwrap().write_all(&sent).unwrap();
    assert!(summed.status.success());
    assert_eq!(
        String::from_utf8_lossy(&summed.stdout),
        String::from_utf8_lossy(&own.wait_with_output().unwrap().stdout)
    );

    let mut forwarding = forward(&host, &["0:7000"]).stdout(Stdio::piped()).spawn().unwrap();
    let mut line = [0; 128];
    let length = forwarding.stdout.as_mut().unwrap().read(&mut line).unwrap();
    let line = String::from_utf8_lossy(&line[..length]).into_owned();
    let place = line.split(' ').nth(1).unwrap_or_else(|| panic!("{line}"));
    let begun = std::time::Instant::now();
    let mut stream = TcpStream::connect(place).unwrap();
    let mut writer = stream.try_clone().unwrap();
    let all = sent.clone();
    let writing = std::thread::spawn(move || {
        writer.write_all(&all).unwrap();
        writer.shutdown(Shutdown::Write).unwrap();
    });
    let mut back = Vec::new();
    stream.read_to_end(&mut back).unwrap();
    writing.join().unwrap();
    println!("{} bytes there and back in {:?}", back.len(), begun.elapsed());
    assert!(back == sent, "{} bytes came back", back.len());

    // The session does not wait for what nobody reads.
    let mut stuck = TcpStream::connect(place).unwrap();
    stuck.set_nonblocking(true).unwrap();
    while stuck.write(&sent).is_ok() {}
    host.ctl(&["ping", "forwarded", "--count", "2"]).unwrap();
    forwarding.kill().unwrap();
    forwarding.wait().unwrap();
    let denied = forward(&host, &["22", "--stdio"]).stdin(Stdio::null()).output().unwrap();
    let said = String::from_utf8_lossy(&denied.stderr);
    assert!(said.contains("add forward = [\"22\"]"), "{said}");
}
