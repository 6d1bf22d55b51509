//! Disks that come, go, grow and change under names that others had a moment ago, under a running agent with rules,
//! volumes of kubelet's, freezes and other tools' locks, that is killed now and then.
//!
//! A checker that knows nothing of the agent looks at the files behind the disks and at the kernel's list of mounts: no
//! byte is written to a disk that no rule or volume names for sure, each is mounted at its own place only, and nothing
//! is lost of what was written there.
//!
//! `GUESTLET_CHURN_STEPS` says how many steps, `GUESTLET_CHURN_SEED` which; the seed is printed.

mod checked;

use std::collections::HashMap;
use std::fs::File;
use std::io::{ErrorKind, Read as _, Write as _};
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant, SystemTime};

use serde_json::{Value, json};
use tokio::task::JoinHandle;

use self::checked::{Dice, Identity, Loops};
use crate::agent::{Client, PATIENCE};
use crate::disk::{Disk, Machine};
use crate::kubelet::{Volume, mount};
use crate::lab::{Lab, is_outside, run, until, wait};
use crate::soak::steps;

/// Steps of `make test`, and of `make soak`.
const STEPS: [usize; 2] = [120, 10_000];
const SLOTS: u32 = 4;
/// How long programs go on that a killed agent had begun.
const ORPHANS: Duration = Duration::from_secs(10);
/// Two rules or disks that are alike in all that virtio-blk has room for.
const CUT: &str = "churn-cut-serial-0001";

/// A loop device, whose name each disk has for a while.
struct Slot {
    loop_number: u32,
    disk: Option<(usize, Disk)>,
    /// Another tool's lock, and whether the disk was empty then.
    lock: Option<(File, bool)>,
}

/// What came to pass.
#[derive(Debug, Default)]
struct Counts {
    swaps: usize,
    written: usize,
    read: usize,
    staged: usize,
    frozen: usize,
    locked: usize,
}

struct Churn<'a> {
    machine: &'a Machine,
    lab: Lab,
    dice: Dice,
    identities: Vec<Identity>,
    slots: Vec<Slot>,
    volumes: Vec<Volume>,
    calls: HashMap<usize, JoinHandle<bool>>,
    frozen: Vec<PathBuf>,
    /// When the agent was killed: a program that it had begun may go on for a moment.
    killed: Option<Instant>,
    counts: Counts,
}

impl Churn<'_> {
    async fn step(&mut self, number: usize) {
        match self.dice.below(100) {
            0..45 => self.swap().await,
            45..55 => self.write_rules(),
            55..75 => self.call().await,
            75..83 => self.freeze_or_thaw(),
            83..90 => self.lock_or_unlock(),
            90..92 => self.kill(),
            92..96 => self.change(),
            _ => self.blink(),
        }
        let pause = [0, 0, 5, 20, 100, 300][self.dice.below(6)];
        tokio::time::sleep(Duration::from_millis(pause)).await;
        self.check(number);
    }

    /// One disk goes, and another has its name.
    async fn swap(&mut self) {
        let slot = self.dice.below(self.slots.len());
        self.unlock(slot);
        let went = self.slots[slot].disk.take().map(|(identity, _)| identity);
        tokio::time::sleep(Duration::from_millis([0, 0, 2, 30][self.dice.below(4)])).await;
        // What is still used is as if its disk had not gone yet.
        let used: Vec<_> =
            self.slots.iter().filter_map(|slot| self.machine.backing(slot.loop_number)).collect();
        let free: Vec<_> = (0..self.identities.len())
            .filter(|identity| !used.contains(&self.identities[*identity].file))
            .collect();
        if free.is_empty() || self.dice.percent(15) {
            return;
        }
        let identity = free[self.dice.below(free.len())];
        let Identity { file, serial, .. } = &self.identities[identity];
        if let Some(disk) = self.machine.attach(self.slots[slot].loop_number, file, serial) {
            disk.plug();
            self.counts.swaps += usize::from(went.is_some_and(|went| went != identity));
            self.slots[slot].disk = Some((identity, disk));
        }
    }

    /// A disk is gone for a moment.
    fn blink(&mut self) {
        let slot = self.dice.below(self.slots.len());
        if let Some((_, disk)) = &self.slots[slot].disk {
            disk.unplug();
            disk.plug();
        }
    }

    fn write_rules(&mut self) {
        let mut rules = Vec::new();
        let place = |name: &str| self.lab.path(&format!("places/{name}")).display().to_string();
        for (serial, name) in
            [("rule-a", "a"), ("rule-b", "b"), ("rule-full", "full"), ("rule-lost", "lost"), (CUT, "cut")]
        {
            if self.dice.percent(20) {
                continue;
            }
            rules.push(format!(
                "[[disk]]\nmatch = {{ serial = '{serial}' }}\nmount-point = '{}'\nfile-system = 'ext4'\n\
                 format-if-blank = true\ngrow = {}\noptions = [{}]\n",
                place(name),
                self.dice.percent(50),
                if self.dice.percent(30) { "'noatime'" } else { "" },
            ));
        }
        if self.dice.percent(10) {
            // Refused, with all the others.
            rules.push(format!(
                "[[disk]]\nmatch = {{ serial = '{CUT}-x' }}\nmount-point = '{0}-x'\n\
                 [[disk]]\nmatch = {{ serial = '{CUT}-y' }}\nmount-point = '{0}-y'\n",
                place("cut")
            ));
        }
        let (folder, new) = (self.lab.path("disks.d"), self.lab.path("rules.new"));
        std::fs::write(&new, rules.concat()).unwrap();
        std::fs::rename(new, folder.join("rules.toml")).unwrap();
    }

    /// kubelet asks for something, and does not wait for the answer.
    async fn call(&mut self) {
        // Mostly for a disk that is there: others are waited for.
        let is_there = |volume: &Volume| {
            let is_its = |(_, disk): &(usize, Disk)| disk.serial == volume.serial;
            self.slots.iter().filter_map(|slot| slot.disk.as_ref()).any(is_its)
        };
        let there: Vec<_> =
            (0..self.volumes.len()).filter(|number| is_there(&self.volumes[*number])).collect();
        let number = if there.is_empty() || self.dice.percent(10) {
            self.dice.below(self.volumes.len())
        } else {
            there[self.dice.below(there.len())]
        };
        if let Some(call) = self.calls.remove(&number) {
            if !call.is_finished() {
                self.calls.insert(number, call);
                return;
            }
            self.counts.staged += usize::from(call.await.unwrap_or(false));
        }
        let volume = self.volumes[number].clone();
        let stage = self.dice.percent(60);
        let call = tokio::spawn(async move {
            if !volume.socket.exists() {
                return false;
            }
            if stage {
                volume.stage(&mount("ext4", &[])).await.is_ok()
            } else {
                let _ = volume.unstage().await;
                false
            }
        });
        self.calls.insert(number, call);
    }

    fn ask(&self, request: &Value) -> Value {
        Client::connect(&self.lab.path("qga.sock")).ask(&format!("{request}\n"))
    }

    fn freeze_or_thaw(&mut self) {
        if !self.frozen.is_empty() {
            return self.thaw();
        }
        // Never anything but what is on a disk of this test.
        let places: Vec<_> = self.mounts().into_iter().map(|(place, ..)| place).collect();
        if !places.is_empty() {
            let request =
                json!({"execute": "guest-fsfreeze-freeze-list", "arguments": {"mountpoints": places}});
            self.frozen = places;
            let answer = self.ask(&request);
            self.counts.frozen += usize::from(answer["return"].as_u64().is_some_and(|count| count > 0));
        }
    }

    /// That a freeze ended before is said as an error.
    fn thaw(&mut self) {
        self.ask(&json!({"execute": "guest-fsfreeze-thaw"}));
        let status = self.ask(&json!({"execute": "guest-fsfreeze-status"}));
        assert_eq!(status["return"], "thawed", "{status}");
        self.frozen.clear();
    }

    fn lock_or_unlock(&mut self) {
        let slot = self.dice.below(self.slots.len());
        if self.slots[slot].lock.is_some() {
            return self.unlock(slot);
        }
        let Some((identity, disk)) = &self.slots[slot].disk else { return };
        let file = File::open(disk.device()).unwrap();
        if file.try_lock().is_ok() {
            self.counts.locked += 1;
            let empty = self.identities[*identity].is_empty()
                && self.killed.is_none_or(|killed| killed.elapsed() > ORPHANS);
            self.slots[slot].lock = Some((file, empty));
        }
    }

    /// Nobody formats what another tool has locked.
    fn unlock(&mut self, slot: usize) {
        let slot = &mut self.slots[slot];
        if let (Some((_, true)), Some((identity, _))) = (slot.lock.take(), &slot.disk) {
            let identity = &self.identities[*identity];
            assert!(identity.is_empty(), "{} was written to while it was locked", identity.file.display());
        }
    }

    fn kill(&mut self) {
        self.lab.kill();
        self.lab.start();
        self.killed = Some(Instant::now());
        self.wait_for_agent();
        // Whatever it was doing when it was killed.
        self.thaw();
    }

    /// What the killed one listened on may be open for a moment longer, so that being let in says nothing.
    fn wait_for_agent(&self) {
        let socket = self.lab.path("qga.sock");
        let answers = || -> std::io::Result<bool> {
            let mut stream = UnixStream::connect(&socket)?;
            stream.set_read_timeout(Some(PATIENCE))?;
            stream.write_all(b"{\"execute\":\"guest-ping\"}\n")?;
            Ok(stream.read(&mut [0; 64])? > 0)
        };
        until("the agent answers", || answers().unwrap_or(false));
    }

    /// Something happens to a disk while it is nowhere.
    fn change(&mut self) {
        let used: Vec<_> =
            self.slots.iter().filter_map(|slot| self.machine.backing(slot.loop_number)).collect();
        let (identity, how) = (self.dice.below(self.identities.len()), self.dice.below(5));
        let identity = &mut self.identities[identity];
        if used.contains(&identity.file) {
            return;
        }
        if identity.place.is_some() {
            let file = File::options().write(true).open(&identity.file).unwrap();
            let length = file.metadata().unwrap().len();
            file.set_len((length + (8 << 20)).min(96 << 20)).unwrap();
        } else if !identity.is_empty() {
            identity.fill(how);
        }
    }

    /// What is mounted of the test's disks: where, whose it is, and its number.
    fn mounts(&self) -> Vec<(PathBuf, usize, u64)> {
        let list = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
        let mut mounts = Vec::new();
        for line in list.lines() {
            let fields: Vec<_> = line.split(' ').collect();
            let Some(minor) = fields[2].strip_prefix("7:").and_then(|minor| minor.parse().ok()) else {
                continue;
            };
            if !self.slots.iter().any(|slot| slot.loop_number == minor) {
                continue;
            }
            let Some(file) = self.machine.backing(minor) else { continue };
            let identity = self.identities.iter().position(|identity| identity.file == file);
            let number = nix::sys::stat::makedev(7, minor.into());
            mounts.push((fields[4].into(), identity.expect("a file of the test"), number));
        }
        mounts
    }

    fn check(&mut self, step: usize) {
        self.identities.iter().for_each(Identity::check);
        for (place, identity, number) in self.mounts() {
            let identity = &mut self.identities[identity];
            assert_eq!(identity.place.as_ref(), Some(&place), "{} is mounted there", identity.file.display());
            if self.frozen.contains(&place) || self.dice.percent(30) {
                continue;
            }
            // As long as it is open it is not unmounted.
            let Ok(folder) = File::open(&place) else { continue };
            if folder.metadata().unwrap().dev() != number {
                continue;
            }
            let file = PathBuf::from(format!("/proc/self/fd/{}/written", folder.as_raw_fd()));
            let found = match std::fs::read_to_string(&file) {
                Err(error) if error.kind() == ErrorKind::NotFound => None,
                found => Some(found.unwrap()),
            };
            assert_eq!(found, identity.written, "{}", identity.file.display());
            self.counts.read += usize::from(found.is_some());
            let text = format!("{} in step {step}\n", identity.serial);
            let mut new = File::create(file).unwrap();
            new.write_all(text.as_bytes()).unwrap();
            new.sync_all().unwrap();
            File::sync_all(&folder).unwrap();
            identity.written = Some(text);
            self.counts.written += 1;
        }
    }

    /// Everything goes, and is looked at without an agent.
    fn end(mut self) -> Counts {
        (0..self.slots.len()).for_each(|slot| self.unlock(slot));
        self.thaw();
        self.lab.kill();
        until("nothing is mounted", || {
            let mounts = self.mounts();
            for (place, ..) in &mounts {
                // Not while a program looks at it that the agent had begun.
                let _ = Command::new("umount").arg(place).status();
            }
            mounts.is_empty()
        });
        let numbers: Vec<_> = self.slots.drain(..).map(|slot| slot.loop_number).collect();
        until("nothing is used", || numbers.iter().all(|number| self.machine.backing(*number).is_none()));
        for identity in &self.identities {
            identity.check();
            let file = identity.file.display();
            if identity.place.is_none() {
                assert_eq!(identity.summed(), identity.sum, "{file}");
            } else if let Some(written) = &identity.written {
                run(&format!("e2fsck -fn {file} 2>&1"));
                let found = run(&format!("debugfs -R 'cat /written' {file} 2> /dev/null"));
                assert_eq!(found, written.trim_end(), "{file}");
            }
        }
        self.counts
    }
}

/// A number from the environment.
fn told(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().unwrap())
}

/// An agent that may freeze what it is told to, on a socket.
fn lab() -> Lab {
    let settings = |all: String| all.replace("fsfreeze-hook = \"/bin/false\"\n", "");
    let lab = Lab::unknown_with("", settings, &["-m", "unix-listen", "-p", "{folder}/qga.sock"]);
    std::fs::create_dir_all(lab.root()).unwrap();
    lab
}

#[test]
fn whatever_disks_do_nothing_is_written_to_the_wrong_one_and_nothing_is_lost() {
    if is_outside() {
        return;
    }
    let seed = told("GUESTLET_CHURN_SEED").unwrap_or_else(|| {
        u64::from(SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().subsec_nanos())
    });
    let steps = told("GUESTLET_CHURN_STEPS")
        .map_or(steps(STEPS[0], STEPS[1]), |steps| usize::try_from(steps).unwrap());
    eprintln!("GUESTLET_CHURN_SEED={seed} GUESTLET_CHURN_STEPS={steps}");
    let first = 2000 + std::process::id() % 10_000 * SLOTS;
    let loops = Loops(first..first + SLOTS);
    let machine = Machine::new();
    wait(async {
        let lab = lab();
        let disks = lab.path("files");
        for folder in ["files", "places", "disks.d"] {
            std::fs::create_dir_all(lab.path(folder)).unwrap();
        }
        let place = |name: &str| Some(lab.path("places").join(name));
        let volumes = [
            Volume::new(&lab, "pvc-a", "volume-a"),
            Volume::new(&lab, "pvc-b", "volume-b"),
            Volume::new(&lab, "pvc-lost", "volume-lost"),
            Volume::new(&lab, "pvc-part-of", ""),
        ];
        let staging = |number: usize| Some(volumes[number].staging.clone());
        let new = |name: &str, serial: &str, place| Identity::new(&disks, name, serial, place);
        let mut identities = vec![
            new("a", "rule-a", place("a")),
            new("b", "rule-b", place("b")),
            new("full", "rule-full", place("full")),
            new("volume-a", "volume-a", staging(0)),
            new("volume-b", "volume-b", staging(1)),
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
        let mut dice = Dice(seed);
        for identity in &mut identities[8..] {
            identity.fill(dice.below(5));
        }
        let slots = loops.0.clone().map(|loop_number| Slot { loop_number, disk: None, lock: None });
        let mut churn = Churn {
            machine: &machine,
            slots: slots.collect(),
            volumes: volumes.into(),
            lab,
            dice,
            identities,
            calls: HashMap::new(),
            frozen: Vec::new(),
            killed: None,
            counts: Counts::default(),
        };
        churn.wait_for_agent();
        churn.write_rules();
        let begun = Instant::now();
        for number in 0..steps {
            churn.step(number).await;
        }
        let counts = churn.end();
        eprintln!("{steps} steps in {:?}: {counts:?}", begun.elapsed());
        if steps >= STEPS[0] {
            assert!([counts.swaps, counts.written, counts.read].iter().all(|count| *count > 0));
        }
    });
}
