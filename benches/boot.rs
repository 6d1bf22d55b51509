//! What the agent costs a guest that boots, beside Debian's qemu-guest-agent: two real guests that differ in nothing else
//! boot in turns, one at a time: a part of `make bench`.

#![allow(
    clippy::disallowed_methods,
    clippy::expect_used,
    clippy::print_stdout,
    clippy::print_stderr,
    clippy::unwrap_used
)]

#[allow(dead_code, reason = "shared with the tests with VMs")]
#[path = "../tests/harness/mod.rs"]
mod harness;

use std::time::Duration;

use harness::images::Images;
use harness::launch::Options;
use harness::repository::Repository;
use harness::snapshot::Saved;
use harness::tools;
use harness::vm::{BOOT, Vm};
use serde_json::json;

const BOOTS: usize = 5;
const RESTARTS: usize = 20;

struct Guest {
    vm: Vm,
    unit: &'static str,
    /// Userspace's part of each boot, and the unit's start within it.
    boots: Vec<(Duration, Duration)>,
    restarts: Vec<Duration>,
}

fn main() {
    let images = Images::prepare().unwrap();
    let mut packages = Repository::new(&[]).unwrap();
    packages.add_real_agent().unwrap();
    let start = |saved: &Saved, unit| {
        let vm = Options::named("boot").restored(&images, saved).unwrap();
        Guest { vm, unit, boots: Vec::new(), restarts: Vec::new() }
    };
    let ours = start(&Saved::installed(&images, &tools::package().unwrap()).unwrap(), "guestlet");
    let theirs = start(&Saved::booted(&images).unwrap(), "qemu-guest-agent");
    packages.mount(&theirs.vm).unwrap();
    let install = "dpkg -i /srv/packages/*.deb; umount /srv/packages; systemctl restart qemu-guest-agent";
    let (_, said) = theirs.vm.console().run(install, BOOT).unwrap();
    assert!(theirs.vm.run("systemctl is-active qemu-guest-agent").is_ok(), "{said}");
    let mut guests = [ours, theirs];
    for guest in &guests {
        guest.vm.run("sync").unwrap();
        guest.pause();
    }
    for _ in 0..BOOTS {
        for guest in &mut guests {
            guest.boot();
        }
    }
    for guest in &mut guests {
        let (mut boots, mut starts): (Vec<_>, Vec<_>) = guest.boots.iter().copied().unzip();
        println!(
            "{}: userspace boots in {}, the unit in {} of it",
            guest.unit,
            spread(&mut boots),
            spread(&mut starts)
        );
    }
    for _ in 0..RESTARTS {
        for guest in &mut guests {
            guest.restart();
        }
    }
    for guest in &mut guests {
        println!("{}: started anew in {}", guest.unit, spread(&mut guest.restarts));
    }
}

impl Guest {
    /// It does nothing while the other one is measured.
    fn pause(&self) {
        self.vm.qmp().execute("stop", json!({})).unwrap();
    }

    fn boot(&mut self) {
        self.vm.qmp().execute("cont", json!({})).unwrap();
        self.vm.reset_and_wait().unwrap();
        self.vm.run("systemctl is-system-running --wait || :").unwrap();
        let userspace = self.since("", "UserspaceTimestampMonotonic", "FinishTimestampMonotonic");
        let unit = self.start_took();
        self.boots.push((userspace, unit));
        self.pause();
    }

    fn restart(&mut self) {
        self.vm.qmp().execute("cont", json!({})).unwrap();
        // The unit of qemu-guest-agent may be started five times in 10 s.
        self.vm.run(&format!("systemctl reset-failed {0} && systemctl restart {0}", self.unit)).unwrap();
        self.restarts.push(self.start_took());
        self.pause();
    }

    /// From the unit's start job to the time when it was active.
    fn start_took(&self) -> Duration {
        self.since(self.unit, "InactiveExitTimestampMonotonic", "ActiveEnterTimestampMonotonic")
    }

    /// The time between two events of a unit, or of systemd itself.
    fn since(&self, unit: &str, begin: &str, end: &str) -> Duration {
        let command = format!("systemctl show --property {begin},{end} {unit}");
        let said = self.vm.run(&command).unwrap();
        let time = |name: &str| {
            let value = said.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix('='));
            Duration::from_micros(value.unwrap().parse().unwrap())
        };
        time(end).checked_sub(time(begin)).unwrap_or_else(|| panic!("{said}"))
    }
}

fn spread(times: &mut [Duration]) -> String {
    times.sort_unstable();
    format!("{:?} ({:?} to {:?})", times[times.len() / 2], times[0], times[times.len() - 1])
}
