//! The serial console of a whole Debian, as guestctl shows it: without an agent, and while the guest boots.

use std::io::{Read as _, Write as _};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};

use crate::harness::host::{HostHalf, Listed};
use crate::harness::tools::program;
use crate::harness::vm::{BOOT, SOON};
use crate::harness::wait_for;
use crate::real;

#[test]
fn a_console_shows_its_guest_without_an_agent_and_while_it_boots() {
    let vm = real("console");
    vm.run("systemctl stop guestlet.socket guestlet").unwrap();
    let host = HostHalf::start(&[Listed::of(&vm)]).unwrap();
    let mut command = Command::new(program("guestctl").unwrap());
    command.arg("--socket").arg(host.socket()).args(["console", "console"]);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let all = Arc::new(Mutex::new(Vec::new()));
    let streams: [Box<dyn std::io::Read + Send>; 2] =
        [Box::new(child.stdout.take().unwrap()), Box::new(child.stderr.take().unwrap())];
    for mut stream in streams {
        let all = Arc::clone(&all);
        std::thread::spawn(move || {
            let mut part = [0; 4096];
            while let Ok(length @ 1..) = stream.read(&mut part) {
                all.lock().unwrap().extend(&part[..length]);
            }
        });
    }
    let has = |words: &str| String::from_utf8_lossy(&all.lock().unwrap()).contains(words).then_some(());
    wait_for("the console", SOON, || has("connected to the console of console")).unwrap();
    let mut keys = child.stdin.take().unwrap();
    keys.write_all(b"echo $((6*7))-by-console\n").unwrap();
    wait_for("the shell on the console", SOON, || has("42-by-console")).unwrap();

    // The end of the kernel is not that of the console, and what boots next is seen from the beginning.
    keys.write_all(b"systemctl reboot\n").unwrap();
    wait_for("another boot on the console", BOOT, || has("automatic login")).unwrap();
    wait_for("a shell of that boot", BOOT, || {
        keys.write_all(b"echo $((7*7))-by-console\n").ok()?;
        std::thread::sleep(std::time::Duration::from_secs(1));
        has("49-by-console")
    })
    .unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    vm.run("systemctl is-active guestlet").unwrap();
}
