//! The churn of `tests/csi/churn` with disks that are plugged into a real guest and taken from it: names are the kernel's
//! own, udev and systemd look at each disk as well, and a disk that goes is gone under whoever uses it.
//!
//! The checker looks at the files behind the disks, from the host: no byte is written to a disk that no rule or volume
//! names for sure, what the guest writes at a place is on the disk that belongs there and on no other, and nothing is
//! lost of it.

#[allow(dead_code, reason = "each churn uses a part of it")]
#[path = "../csi/churn/checked.rs"]
mod checked;

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread::{Scope, ScopedJoinHandle};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use self::checked::{Dice, Identity};
use crate::harness::csi::{Csi, staging};
use crate::harness::host::{HostHalf, Listed};
use crate::harness::vm::{SOON, Vm};
use crate::harness::wait_for;
use crate::random::seed;
use crate::real;
use crate::soak::steps;

const SLOTS: usize = 4;
/// How long programs go on that a killed agent had begun.
const ORPHANS: Duration = Duration::from_secs(10);
/// A disk that has the first 20 bytes of it is not named for sure.
const CUT: &str = "churn-cut-serial-0001";
const PLACES: &str = "/srv/churn";
/// Volumes by identifier, with the serial number that whoever attached it says.
const VOLUMES: [(&str, &str); 4] =
    [("pvc-a", "volume-a"), ("pvc-b", "volume-b"), ("pvc-lost", "volume-lost"), ("pvc-part-of", "")];

/// Runs a script on this machine that has to succeed; what it said.
#[track_caller]
fn run(script: &str) -> String {
    let output = Command::new("sh").args(["-ec", script]).output().unwrap();
    assert!(output.status.success(), "{script}\n{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).trim().to_owned()
}

/// A disk that the guest has.
struct Plugged {
    identity: usize,
    target: u32,
    /// The process in the guest that has locked it, and whether it was empty then.
    lock: Option<(String, bool)>,
}

/// What came to pass.
#[derive(Debug, Default)]
struct Counts {
    plugged: usize,
    written: usize,
    read: usize,
    staged: usize,
    frozen: usize,
    locked: usize,
    killed: usize,
}

struct Churn<'s, 'v> {
    vm: &'v Vm,
    scope: &'s Scope<'s, 'v>,
    node: Csi<'v>,
    dice: Dice,
    identities: Vec<Identity>,
    slots: [Option<Plugged>; SLOTS],
    /// Addresses are not taken again at once: what the kernel writes to a disk that is gone must not meet the next one.
    next_target: u32,
    calls: HashMap<usize, ScopedJoinHandle<'s, bool>>,
    frozen: Vec<String>,
    killed: Option<Instant>,
    counts: Counts,
}

impl Churn<'_, '_> {
    fn step(&mut self, number: usize) {
        match self.dice.below(100) {
            0..30 => self.swap(),
            30..40 => self.write_rules(80),
            40..66 => self.call(),
            66..76 => self.freeze_or_thaw(),
            76..84 => self.lock_or_unlock(),
            84..87 => self.kill(),
            87..91 => self.change(),
            91..96 => self.resize(),
            _ => self.blink(),
        }
        // An emulated guest needs a second to format and mount a disk.
        let pause = [0, 5, 50, 300, 1000, 2500][self.dice.below(6)];
        std::thread::sleep(Duration::from_millis(pause));
        self.check(number);
    }

    /// A disk of a rule and one of a volume are in use when it begins.
    fn begin(&mut self) {
        const FULL: usize = 2;
        const VOLUME: usize = 3;

        self.plug(0, FULL);
        self.plug(1, VOLUME);
        self.write_rules(100);
        let place = format!("{PLACES}/full");
        wait_for("the mount", SOON, || self.mounted().contains(&place).then_some(())).unwrap();
        self.node.stage(VOLUMES[0].0, context(VOLUMES[0].1)).unwrap();
        self.check(0);
    }

    fn plug(&mut self, slot: usize, identity: usize) {
        let Identity { file, serial, .. } = &self.identities[identity];
        let name = format!("churn-{identity}");
        let node = json!({
            "driver": "raw", "node-name": name, "file": { "driver": "file", "filename": file },
        });
        self.vm.qmp().execute("blockdev-add", node).unwrap();
        self.next_target = self.next_target % 250 + 1;
        let target = self.next_target;
        let device = json!({
            "driver": "scsi-hd", "bus": "scsi0.0", "channel": 0, "scsi-id": target, "lun": 0, "serial": serial,
            "drive": name, "id": name,
        });
        self.vm.qmp().execute("device_add", device).unwrap();
        self.slots[slot] = Some(Plugged { identity, target, lock: None });
        self.counts.plugged += 1;
    }

    /// Takes a disk away, whatever the guest does with it; which one it was.
    fn unplug(&mut self, slot: usize) -> Option<usize> {
        self.unlock(slot);
        let identity = self.slots[slot].take()?.identity;
        let name = format!("churn-{identity}");
        self.vm.qmp().execute("device_del", json!({ "id": name })).unwrap();
        let deleted = || self.vm.qmp().execute("blockdev-del", json!({ "node-name": name })).ok();
        wait_for("end of the disk", SOON, deleted).unwrap();
        Some(identity)
    }

    fn is_plugged(&self, identity: usize) -> bool {
        self.slots.iter().flatten().any(|plugged| plugged.identity == identity)
    }

    /// One disk goes, and another has its name.
    fn swap(&mut self) {
        let slot = self.dice.below(SLOTS);
        self.unplug(slot);
        let free: Vec<_> =
            (0..self.identities.len()).filter(|identity| !self.is_plugged(*identity)).collect();
        if !self.dice.percent(15) {
            let identity = free[self.dice.below(free.len())];
            self.plug(slot, identity);
        }
    }

    /// A disk is gone for a moment.
    fn blink(&mut self) {
        let slot = self.dice.below(SLOTS);
        if let Some(identity) = self.unplug(slot) {
            self.plug(slot, identity);
        }
    }

    /// Each rule is there with this probability.
    fn write_rules(&mut self, percent: usize) {
        let mut rules = Vec::new();
        for (serial, name) in
            [("rule-a", "a"), ("rule-b", "b"), ("rule-full", "full"), ("rule-lost", "lost"), (CUT, "cut")]
        {
            if !self.dice.percent(percent) {
                continue;
            }
            rules.push(format!(
                "[[disk]]\nmatch = {{ serial = '{serial}' }}\nmount-point = '{PLACES}/{name}'\n\
                 file-system = 'ext4'\nformat-if-blank = true\ngrow = {}\noptions = [{}]\n",
                self.dice.percent(50),
                if self.dice.percent(30) { "'noatime'" } else { "" },
            ));
        }
        if percent < 100 && self.dice.percent(10) {
            // Refused, with all the others.
            rules.push("[[disk]]\nmatch = { serial = 'x' }\nmount-point = 'not absolute'\n".to_owned());
        }
        self.vm.write("/etc/guestlet/churn.new", rules.concat().as_bytes()).unwrap();
        self.vm.run("mv /etc/guestlet/churn.new /etc/guestlet/disks.d/churn.toml").unwrap();
    }

    /// kubelet asks for something, and does not wait for the answer.
    fn call(&mut self) {
        // Mostly for a disk that is there: others are waited for.
        let is_there = |number: &usize| {
            let serial = VOLUMES[*number].1;
            self.slots.iter().flatten().any(|plugged| self.identities[plugged.identity].serial == serial)
        };
        let there: Vec<_> = (0..VOLUMES.len()).filter(is_there).collect();
        let number = if there.is_empty() || self.dice.percent(10) {
            self.dice.below(VOLUMES.len())
        } else {
            there[self.dice.below(there.len())]
        };
        if let Some(call) = self.calls.remove(&number) {
            if !call.is_finished() {
                self.calls.insert(number, call);
                return;
            }
            self.counts.staged += usize::from(call.join().unwrap());
        }
        let (node, (id, serial)) = (self.node, VOLUMES[number]);
        let stages = self.dice.percent(60);
        let call = self.scope.spawn(move || {
            if !stages {
                let _ = node.unstage(id);
                return false;
            }
            node.stage(id, context(serial)).is_ok()
        });
        self.calls.insert(number, call);
    }

    /// Where something is mounted that may be of this test.
    fn mounted(&self) -> Vec<String> {
        let list = self.vm.run("cut -d ' ' -f 5 /proc/self/mountinfo").unwrap();
        let is_place = |place: &&str| {
            self.identities.iter().any(|identity| identity.place.as_deref() == Some(place.as_ref()))
                || place.starts_with(PLACES)
        };
        list.lines().filter(is_place).map(str::to_owned).collect()
    }

    fn freeze_or_thaw(&mut self) {
        if !self.frozen.is_empty() {
            return self.thaw();
        }
        // Never anything but what is on a disk of this test: the console's shell has to go on.
        let places = self.mounted();
        if places.is_empty() {
            return;
        }
        let frozen = self.vm.qga().and_then(|mut client| {
            client.execute("guest-fsfreeze-freeze-list", json!({ "mountpoints": places }))
        });
        self.frozen = places;
        self.counts.frozen += usize::from(frozen.is_ok_and(|count| count.as_u64() > Some(0)));
    }

    /// That a freeze ended before is said as an error.
    fn thaw(&mut self) {
        let thawed = || {
            let mut client = self.vm.qga().ok()?;
            let _ = client.execute("guest-fsfreeze-thaw", json!({}));
            client.execute("guest-fsfreeze-status", json!({})).ok()
        };
        let status: Value = wait_for("the agent", SOON, thawed).unwrap();
        assert_eq!(status, "thawed");
        self.frozen.clear();
    }

    fn lock_or_unlock(&mut self) {
        let slot = self.dice.below(SLOTS);
        let Some(plugged) = &mut self.slots[slot] else { return };
        if plugged.lock.is_some() {
            return self.unlock(slot);
        }
        // The kernel has perhaps not seen the disk yet, and udev or the agent may have the lock.
        let locked = self.vm.run(&format!(
            "exec 9< /dev/$(ls /sys/bus/scsi/devices/0:0:{}:0/block) && flock -n 9 && {{ sleep 10000 > /dev/null & echo $!; }}",
            plugged.target
        ));
        if let Ok(process) = locked {
            self.counts.locked += 1;
            let empty = self.identities[plugged.identity].is_empty()
                && self.killed.is_none_or(|killed| killed.elapsed() > ORPHANS);
            plugged.lock = Some((process.trim().to_owned(), empty));
        }
    }

    /// Nobody formats what another tool has locked.
    fn unlock(&mut self, slot: usize) {
        let Some(plugged) = &mut self.slots[slot] else { return };
        let Some((process, was_empty)) = plugged.lock.take() else { return };
        let identity = &self.identities[plugged.identity];
        let untouched = !was_empty || identity.is_empty();
        assert!(untouched, "{} was written to while it was locked", identity.file.display());
        self.vm.run(&format!("kill {process}")).unwrap();
    }

    fn kill(&mut self) {
        self.vm.run("systemctl kill --signal KILL guestlet.service").unwrap();
        self.killed = Some(Instant::now());
        self.counts.killed += 1;
        // Whatever it was doing when it was killed.
        self.thaw();
    }

    /// Something happens to a disk while it is nowhere.
    fn change(&mut self) {
        let (number, how) = (self.dice.below(self.identities.len()), self.dice.below(5));
        if self.is_plugged(number) {
            return;
        }
        let identity = &mut self.identities[number];
        if identity.place.is_some() {
            let file = std::fs::File::options().write(true).open(&identity.file).unwrap();
            file.set_len(larger(file.metadata().unwrap().len())).unwrap();
        } else if !identity.is_empty() {
            identity.fill(how);
        }
    }

    /// A disk grows while it is used.
    fn resize(&mut self) {
        let slot = self.dice.below(SLOTS);
        let Some(plugged) = &self.slots[slot] else { return };
        let identity = &self.identities[plugged.identity];
        if identity.place.is_some() {
            let size = larger(identity.file.metadata().unwrap().len());
            let wanted = json!({ "node-name": format!("churn-{}", plugged.identity), "size": size });
            self.vm.qmp().execute("block_resize", wanted).unwrap();
        }
    }

    fn check(&mut self, step: usize) {
        self.identities.iter().for_each(Identity::check);
        let mut texts = Vec::new();
        for place in self.mounted() {
            let of_place = |identity: &Identity| identity.place.as_deref() == Some(place.as_ref());
            let Some(number) = self.identities.iter().position(of_place) else {
                panic!("something is mounted at {place}, where nothing belongs");
            };
            if self.frozen.contains(&place) || self.dice.percent(30) {
                continue;
            }
            let text = format!("{} in step {step} of {:x}", self.identities[number].serial, self.dice.0);
            // As long as a shell is there it is not unmounted. It ends with an error on a disk that is gone.
            let done = self.vm.run(&format!(
                "cd {place} && [ $(stat -c %d .) != $(stat -c %d /) ] && {{ [ ! -e written ] || cat written; }} && \
                 echo {text} > written && sync written . && rm -f copy"
            ));
            let Ok(found) = done else { continue };
            let identity = &mut self.identities[number];
            assert_eq!(found.trim(), identity.written.as_deref().unwrap_or_default(), "at {place}");
            self.counts.read += usize::from(!found.is_empty());
            self.counts.written += 1;
            identity.written = Some(text.clone());
            texts.push((number, text));
        }
        for (number, text) in texts {
            let found = self.found(&text);
            assert_eq!(found, [self.identities[number].file.clone()], "{text:?}");
        }
    }

    /// The disks that a text is on.
    fn found(&self, text: &str) -> Vec<PathBuf> {
        let files: Vec<_> =
            self.identities.iter().map(|identity| identity.file.display().to_string()).collect();
        let found = run(&format!("grep -l -a -F '{text}' {} || true", files.join(" ")));
        found.lines().map(PathBuf::from).collect()
    }

    /// Everything goes, and is looked at without the guest.
    fn end(mut self) -> Counts {
        (0..SLOTS).for_each(|slot| self.unlock(slot));
        self.thaw();
        self.vm.run("systemctl stop guestlet.socket guestlet.service").unwrap();
        for (_, call) in std::mem::take(&mut self.calls) {
            self.counts.staged += usize::from(call.join().unwrap());
        }
        let unmounted = || {
            let places = self.mounted();
            // Not while a program looks at it that the agent had begun.
            let _ = self.vm.run(&format!("for place in {}; do umount $place; done", places.join(" ")));
            places.is_empty().then_some(())
        };
        wait_for("the end of the mounts", SOON, unmounted).unwrap();
        for slot in 0..SLOTS {
            self.unplug(slot);
        }
        for identity in &self.identities {
            identity.check();
            let file = identity.file.display();
            if identity.place.is_none() {
                assert_eq!(identity.summed(), identity.sum, "{file}");
            } else if let Some(written) = &identity.written {
                // It may have gone while it was mounted: its journal is replayed, as a mount does.
                run(&format!(
                    "e2fsck -E journal_only -y {file} > /dev/null 2>&1 || true; e2fsck -fn {file} 2>&1"
                ));
                let found = run(&format!("debugfs -R 'cat /written' {file} 2> /dev/null"));
                assert_eq!(found, *written, "{file}");
            }
        }
        self.counts
    }
}

/// What the sidecars tell kubelet of the disk that they have attached.
fn context(serial: &str) -> HashMap<String, String> {
    let pair = |key: &str, value: &str| (key.to_owned(), value.to_owned());
    match serial {
        "" => HashMap::new(),
        _ => [pair("guestlet.io/serial", serial), pair("guestlet.io/bus", "scsi")].into(),
    }
}

/// What a disk of so many bytes grows to.
fn larger(bytes: u64) -> u64 {
    (bytes + (8 << 20)).min(96 << 20)
}

/// The disks, and what may become of each.
fn identities(folder: &Path, dice: &mut Dice) -> Vec<Identity> {
    std::fs::create_dir(folder).unwrap();
    let rule = |name: &str| Some(PathBuf::from(PLACES).join(name));
    let volume = |number: usize| Some(PathBuf::from(staging(VOLUMES[number].0)));
    let new = |name: &str, serial: &str, place| Identity::new(folder, name, serial, place);
    let mut identities = vec![
        new("a", "rule-a", rule("a")),
        new("b", "rule-b", rule("b")),
        new("full", "rule-full", rule("full")),
        new("volume-a", "volume-a", volume(0)),
        new("volume-b", "volume-b", volume(1)),
        // Blank, and named by nobody, or not for sure.
        new("foreign", "foreign", None),
        new("cut", &CUT[..20], None),
        new("part", "x-pvc-part-of-x", None),
        // Named, and not blank.
        new("twin", "rule-a", None),
        new("lost", "rule-lost", None),
        new("volume-lost", "volume-lost", None),
    ];
    run(&format!("mkfs.ext4 -q -F {}", identities[2].file.display()));
    for identity in &mut identities[8..] {
        identity.fill(dice.below(5));
    }
    identities
}

#[test]
fn whatever_disks_do_in_a_guest_nothing_is_written_to_the_wrong_one_and_nothing_is_lost() {
    let mut dice = Dice(seed());
    let steps = steps(6, 500);
    let vm = real("churn");
    let host = HostHalf::start(&[Listed::of(&vm)]).unwrap();
    host.wait_connected("churn", SOON).unwrap();
    // What its kernel says is not to stand between what programs print.
    vm.run("dmesg --console-off").unwrap();
    let node = Csi::of(&vm).unwrap();
    node.register().unwrap();
    for (id, _) in VOLUMES {
        node.make_folders(id).unwrap();
    }
    let identities = identities(&vm.file("churn"), &mut dice);
    let begun = Instant::now();
    let counts = std::thread::scope(|scope| {
        let mut churn = Churn {
            vm: &vm,
            scope,
            node,
            dice,
            identities,
            slots: [const { None }; SLOTS],
            next_target: 0,
            calls: HashMap::new(),
            frozen: Vec::new(),
            killed: None,
            counts: Counts::default(),
        };
        churn.begin();
        for number in 1..=steps {
            churn.step(number);
        }
        churn.end()
    });
    println!("{steps} steps in {:?}: {counts:?}", begun.elapsed());
    assert!(counts.written >= 2, "{counts:?}");
    if steps >= 100 {
        let Counts { plugged, written, read, staged, frozen, locked, killed } = counts;
        assert!([plugged, written, read, staged, frozen, locked, killed].iter().all(|count| *count > 0));
    }
}
