//! A guest whose databases are frozen and snapshotted again and again, by guestctl and over QGA, by copies and by overlays; and
//! what that takes.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Instant;

use serde_json::{Value, json};

use super::load::{Acknowledged, Load};
use super::{KINDS, set_up};
use crate::harness::host::{HostHalf, Listed};
use crate::harness::process::RunFolder;
use crate::harness::qga::QgaClient;
use crate::harness::vm::{BOOT, SOON, Vm};
use crate::harness::wait_for;
use crate::real;

/// Milliseconds before a freeze, for comparison.
const BEFORE: u64 = 5000;

/// Who freezes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    Guestctl,
    Qga,
}

/// How the disk is cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum How {
    /// A backup: what is about to be overwritten is copied first.
    Copy,
    /// An external snapshot: the guest goes on in a new file, which has the one before below it.
    Overlay,
}

impl Way {
    /// By turns.
    pub fn of(round: usize) -> Self {
        if round.is_multiple_of(2) { Self::Guestctl } else { Self::Qga }
    }
}

impl How {
    /// By turns, each with both ways.
    pub fn of(round: usize) -> Self {
        if (round / 2).is_multiple_of(2) { Self::Copy } else { Self::Overlay }
    }
}

/// The guest under load, and the disk that it writes to.
pub struct Lab {
    pub host: HostHalf,
    pub vm: Vm,
    pub load: Load,
    pub kept: RunFolder,
    active: RefCell<Active>,
}

struct Active {
    node: String,
    file: PathBuf,
}

/// What a freeze was good for: what was acknowledged before its end, its receipt, and what was done meanwhile.
pub struct Taken<T = Cut> {
    pub acknowledged: Acknowledged,
    pub receipt: Value,
    pub made: T,
}

/// A disk of one moment.
pub struct Cut {
    pub file: PathBuf,
    how: How,
    took: u128,
}

impl Cut {
    /// Removes it, unless the guest has it below the file that it writes to.
    pub fn remove(&self) {
        if self.how == How::Copy {
            std::fs::remove_file(&self.file).unwrap();
        }
    }
}

fn ask(client: &mut QgaClient, command: &str) -> Result<Value, String> {
    client.send(format!("{}\n", json!({ "execute": command })).as_bytes()).unwrap();
    let answer = client.receive(SOON).unwrap().unwrap_or_else(|| panic!("{command}: no answer"));
    if answer.get("error").is_some() {
        Err(answer["error"].to_string())
    } else {
        Ok(answer["return"].clone())
    }
}

impl Lab {
    pub fn new() -> Self {
        let kept = RunFolder::new().unwrap();
        let vm = real("databases");
        let file = set_up(&vm, &kept);
        let host = HostHalf::start(&[Listed::of(&vm)]).unwrap();
        host.wait_connected(vm.name(), SOON).unwrap();
        let active = RefCell::new(Active { node: "data".to_owned(), file });
        Self { host, load: Load::of(&vm), vm, kept, active }
    }

    /// Gives the agent these settings.
    pub fn set(&self, settings: &str) {
        self.vm.write("/etc/guestlet/agent.d/freeze.toml", settings.as_bytes()).unwrap();
        self.vm.run("systemctl restart guestlet").unwrap();
        wait_for("a session", SOON, || self.host.ctl(&["receipts", "ls", self.vm.name()]).ok()).unwrap();
    }

    fn newest(&self) -> Option<String> {
        let list = self.host.ctl(&["receipts", "ls", self.vm.name(), "-o", "json"]).unwrap();
        let list: Value = serde_json::from_str(&list).unwrap();
        list.as_array().unwrap().last().map(|one| one["id"].as_str().unwrap().to_owned())
    }

    /// Freezes as long as `meanwhile` lasts.
    pub fn take<T>(&self, way: Way, meanwhile: impl FnOnce() -> T) -> Taken<T> {
        let before = self.newest();
        let meanwhile = || {
            let made = meanwhile();
            // Nothing of this can have been acknowledged after the snapshot, unless the freeze is over.
            (made, self.load.acknowledged())
        };
        let (made, acknowledged) = match way {
            Way::Guestctl => self.by_guestctl(meanwhile),
            Way::Qga => {
                let mut client = self.vm.qga().unwrap();
                ask(&mut client, "guest-fsfreeze-freeze").unwrap();
                let made = meanwhile();
                println!("guest-fsfreeze-thaw: {:?}", ask(&mut client, "guest-fsfreeze-thaw"));
                made
            }
        };
        let newest = || self.newest().filter(|id| Some(id) != before.as_ref());
        let id = wait_for("the receipt", SOON, newest).unwrap();
        let shown = self.host.ctl(&["receipts", "show", self.vm.name(), &id, "-o", "json"]).unwrap();
        let shown: Value = serde_json::from_str(&shown).unwrap();
        Taken { acknowledged, receipt: shown["receipt"].clone(), made }
    }

    fn by_guestctl<T>(&self, meanwhile: impl FnOnce() -> T) -> T {
        let (begun, done) = (self.kept.file("begun"), self.kept.file("done"));
        for file in [&begun, &done] {
            let _ = std::fs::remove_file(file);
        }
        // It ends also if nobody tells it to.
        let command = format!(
            "touch {}; for try in $(seq 2400); do [ -e {} ] && break; sleep 0.05; done",
            begun.display(),
            done.display()
        );
        let (host, name) = (&self.host, self.vm.name());
        std::thread::scope(|scope| {
            let freeze = scope.spawn(|| host.ctl(&["freeze", name, "--", "sh", "-c", &command]));
            wait_for("the freeze", SOON, || (begun.exists() || freeze.is_finished()).then_some(())).unwrap();
            assert!(begun.exists(), "{:?}", freeze.join());
            let made = meanwhile();
            std::fs::write(&done, "").unwrap();
            println!("guestctl freeze: {:?}", freeze.join().unwrap());
            made
        })
    }

    /// Cuts the disk with the data, and where `root` names a file, at the same moment the guest's own disk. [`Self::wait_cut`]
    /// waits until all of it is there.
    pub fn cut(&self, number: usize, how: How, root: Option<&Path>) -> Cut {
        let mut active = self.active.borrow_mut();
        let copy = |node: &str, sync: &str, target: &Path| {
            let data = json!({
                "device": node, "job-id": format!("copy-{node}"), "target": target, "sync": sync, "format": "qcow2"
            });
            json!({ "type": "drive-backup", "data": data })
        };
        let (node, file) = match how {
            How::Copy => (String::new(), self.kept.file(&format!("cut-{number}.qcow2"))),
            How::Overlay => (format!("live-{number}"), self.kept.file(&format!("live-{number}.qcow2"))),
        };
        let mut actions = vec![match how {
            How::Copy => copy(&active.node, "full", &file),
            How::Overlay => {
                let data = json!({
                    "node-name": active.node, "snapshot-file": file, "snapshot-node-name": node, "format": "qcow2"
                });
                json!({ "type": "blockdev-snapshot-sync", "data": data })
            }
        }];
        actions.extend(root.map(|target| copy("root", "top", target)));
        let begun = Instant::now();
        self.vm.qmp().execute("transaction", json!({ "actions": actions })).unwrap();
        let took = begun.elapsed().as_millis();
        let file = match how {
            How::Copy => file,
            How::Overlay => std::mem::replace(&mut *active, Active { node, file }).file,
        };
        Cut { file, how, took }
    }

    pub fn wait_cut(&self) {
        wait_for("the copies", BOOT, || {
            let jobs = self.vm.qmp().execute("query-block-jobs", json!({})).unwrap();
            jobs.as_array().unwrap().is_empty().then_some(())
        })
        .unwrap();
    }

    /// A round: a snapshot that the load goes on after.
    pub fn round(&self, number: usize, root: Option<&Path>) -> Taken {
        self.load.goes_on();
        let how = How::of(number);
        let taken = self.take(Way::of(number), || self.cut(number, how, root));
        self.wait_cut();
        self.load.goes_on();
        taken
    }

    /// Freezes, and has the power fail: the guest is gone. What was acknowledged by then, and the file of the disk.
    pub fn power_fails_while_frozen(&self) -> (Acknowledged, PathBuf) {
        self.load.goes_on();
        let mut client = self.vm.qga().unwrap();
        ask(&mut client, "guest-fsfreeze-freeze").unwrap();
        assert_eq!(ask(&mut client, "guest-fsfreeze-status").unwrap(), "frozen");
        self.vm.qemu().signal(nix::sys::signal::Signal::SIGKILL).unwrap();
        self.vm.qemu().wait(SOON).unwrap();
        (self.load.acknowledged(), self.active.borrow().file.clone())
    }

    /// Whether the receipt is of the highest level; the snapshot is inside of its window then. It is of a lower one if a database took
    /// too long to be held or released, as on a machine with much else to do, and for no other reason.
    pub fn is_proved(&self, way: Way, taken: &Taken, figures: &mut Figures) -> bool {
        let receipt = &taken.receipt;
        let over = if way == Way::Qga { "qga" } else { "guestlet" };
        assert_eq!(
            (&receipt["end"]["how"], &receipt["caller"]["over"]),
            (&"asked".into(), &over.into()),
            "{receipt:#}"
        );
        if receipt["level"] != "application" {
            let reasons = receipt["reasons"].as_array().unwrap();
            println!("{reasons:?}");
            let log = self.vm.run("journalctl --unit postgresql --output short-precise --lines 12");
            println!("{}", log.unwrap_or_default());
            let is_late = |reason: &Value| reason.as_str().unwrap().ends_with("in time");
            assert!(receipt["level"] == "filesystem" && reasons.iter().all(is_late), "{receipt:#}");
            return false;
        }
        for (_, name, position) in KINDS {
            let one = told(receipt, name);
            assert_eq!(one["level"], "application", "{receipt:#}");
            assert!(!evidence(one, position).is_empty());
        }
        let at = |name: &str| receipt["times"][name]["boottime_ms"].as_u64().unwrap();
        let (asked, held, frozen, thawing) = (at("asked"), at("hooks_ended"), at("frozen"), at("thaw_asked"));
        assert!(asked <= held && held <= frozen && frozen < thawing, "{receipt:#}");
        // Callers of QGA cannot say it.
        let took = receipt["cut"]["took_ms"].as_u64();
        assert_eq!(took.is_some(), way == Way::Guestctl, "{receipt:#}");
        assert!(took.unwrap_or(0) <= thawing - frozen, "{receipt:#}");

        figures.add("ms from the request until all is frozen", frozen - asked);
        figures.add("ms of that, until the databases are held", held - asked);
        if let Some(checkpoint) = self.checkpoint() {
            figures.add("ms of that, PostgreSQL's checkpoint", checkpoint);
            figures.add(
                "ms until all is frozen, beyond the checkpoint",
                (frozen - asked).saturating_sub(checkpoint),
            );
        }
        figures.add("ms from frozen to the request to thaw", thawing - frozen);
        figures.add(&format!("ms of the cut itself, {:?}", taken.made.how), taken.made.took);
        let thawed = at("thawed");
        figures.add("ms from the request to thaw until all is thawed", thawed - thawing);
        for (kind, ..) in KINDS {
            let gap = |from, to| self.load.longest_gap(kind, from, to);
            figures.add(
                &format!("ms between acknowledgments of {kind}, longest before a freeze"),
                gap(asked.saturating_sub(BEFORE), asked),
            );
            figures
                .add(&format!("ms between acknowledgments of {kind}, around a freeze"), gap(asked, thawed));
        }
        true
    }

    /// Milliseconds that the last checkpoint took that somebody asked for, as the server logs it.
    fn checkpoint(&self) -> Option<u64> {
        let script = "/checkpoint starting:/ { asked = /immediate/ } /checkpoint complete:/ && asked { last = $0 } END { print last }";
        let log = format!("journalctl --unit postgresql --output cat --lines 20 | awk '{script}'");
        let line = self.vm.run(&log).unwrap();
        let seconds = line.split_once("total=")?.1.split_once(" s")?.0;
        let (whole, part) = seconds.split_once('.')?;
        Some(whole.parse::<u64>().ok()? * 1000 + part.parse::<u64>().ok()?)
    }
}

/// What the receipt says of an application.
pub fn told<'a>(receipt: &'a Value, name: &str) -> &'a Value {
    let all = receipt["applications"].as_array().unwrap();
    all.iter().find(|one| one["name"] == name).unwrap_or_else(|| panic!("{name}: {receipt:#}"))
}

pub fn evidence<'a>(application: &'a Value, name: &str) -> &'a str {
    let pair = application["evidence"].as_array().unwrap().iter().find(|pair| pair[0] == name);
    pair.unwrap_or_else(|| panic!("{name}: {application:#}"))[1].as_str().unwrap()
}

/// What was measured in each round.
#[derive(Default)]
pub struct Figures(BTreeMap<String, Vec<u128>>);

impl Figures {
    pub fn add(&mut self, name: &str, value: impl Into<u128>) {
        self.0.entry(name.to_owned()).or_default().push(value.into());
    }

    /// Prints the least, the median and the most of each.
    pub fn print(&mut self) {
        for (name, all) in &mut self.0 {
            all.sort_unstable();
            let (least, median, most) = (all[0], all[all.len() / 2], all[all.len() - 1]);
            println!("{name}: {median} ({least} to {most}; {} times)", all.len());
        }
    }
}
