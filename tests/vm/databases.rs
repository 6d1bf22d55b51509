//! Snapshots of a guest with databases under load: PostgreSQL, MariaDB and etcd on a disk of their own. QEMU takes the snapshot
//! while `guestctl freeze VM -- COMMAND` waits; another guest boots from it, and its databases have to have everything that they
//! had acknowledged by then, and nothing by half. `guestctl receipts verify --from` has to find the same by a clone of its own.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Command, Output};

use serde_json::{Value, json};

use crate::harness::host::{HostHalf, Listed};
use crate::harness::images::Images;
use crate::harness::launch::Options;
use crate::harness::process::RunFolder;
use crate::harness::vm::{BOOT, SOON, Vm};
use crate::harness::wait_for;
use crate::harness::{tools, turns};
use crate::soak::steps;
use crate::{images, real};

pub const PROGRAM: &str = "/opt/databases/bin/databases";
/// Their names in the guest, in receipts, and the position that a copy has to have reached.
const KINDS: [(&str, &str, &str); 3] =
    [("postgresql", "postgresql", "lsn"), ("mariadb", "mysql", "gtid-binlog"), ("etcd", "etcd", "revision")];
/// Where in the guest acknowledged numbers are written to: the host has them at once, in the file `agent.log`.
const TOLD: &str = "/dev/ttyS1";

/// Plugs a disk, in the format of its file.
fn plug(vm: &Vm, name: &str, file: &Path) {
    let format = file.extension().unwrap().to_str().unwrap();
    let below = json!({ "driver": "file", "filename": file });
    vm.qmp().execute("blockdev-add", json!({ "driver": format, "node-name": name, "file": below })).unwrap();
    let device = json!({
        "driver": "scsi-hd", "id": format!("{name}0"), "bus": "scsi0.0", "drive": name, "serial": name
    });
    vm.qmp().execute("device_add", device).unwrap();
}

/// Copies a file, its holes as holes.
pub fn copy(from: &Path, to: &Path) {
    let status = Command::new("cp").arg("--sparse=always").args([from, to]).status().unwrap();
    assert!(status.success(), "{}", from.display());
}

/// Plugs the disks with programs and data, and starts the databases.
fn set_up(vm: &Vm, kept: &RunFolder) {
    let (programs, data) = Images::databases().unwrap();
    vm.plug_read_only("programs", &programs).unwrap();
    copy(&data, &kept.file("data.raw"));
    plug(vm, "data", &kept.file("data.raw"));
    wait_for("the disks", SOON, || {
        vm.run("test -e /dev/disk/by-label/databases -a -e /dev/disk/by-label/data").ok()
    })
    .unwrap();
    vm.run("mkdir /opt/databases && mount -o ro LABEL=databases /opt/databases").unwrap();
    vm.run(&format!("{PROGRAM} set-up postgresql mariadb etcd")).unwrap();
    vm.run(&format!("stty -F {TOLD} raw -echo")).unwrap();
    for (kind, ..) in KINDS {
        vm.run(&format!("systemd-run --quiet --unit load-{kind} {PROGRAM} load {kind} {TOLD}")).unwrap();
    }
}

/// The last number of each database that was acknowledged, and the longest time that one took, in seconds.
fn acknowledged(vm: &Vm) -> BTreeMap<String, (u64, f64)> {
    let mut found = BTreeMap::new();
    for line in std::fs::read_to_string(vm.file("agent.log")).unwrap().lines() {
        let words: Vec<_> = line.split(' ').collect();
        // The last line may not be complete.
        let [kind, number, seconds] = words[..] else { continue };
        let (Ok(number), Ok(seconds)) = (number.parse(), seconds.parse::<f64>()) else { continue };
        let entry: &mut (u64, f64) = found.entry(kind.to_owned()).or_default();
        *entry = (number, entry.1.max(seconds));
    }
    found
}

/// Waits until each database has acknowledged more.
fn goes_on(vm: &Vm) {
    let before = acknowledged(vm);
    wait_for("the load goes on", SOON, || {
        let now = acknowledged(vm);
        let more = |kind: &str| now.get(kind).map(|one| one.0) > before.get(kind).map(|one| one.0 + 5);
        KINDS.iter().all(|(kind, ..)| now.contains_key(*kind) && more(kind)).then_some(())
    })
    .unwrap();
}

/// What a snapshot is of: what was acknowledged before it, and its receipt.
struct Taken {
    acknowledged: BTreeMap<String, (u64, f64)>,
    receipt: Value,
}

/// Freezes by guestctl, whose command lasts as long as `meanwhile`.
fn take(vm: &Vm, host: &HostHalf, kept: &RunFolder, meanwhile: impl FnOnce()) -> Taken {
    let (begun, done) = (kept.file("begun"), kept.file("done"));
    for file in [&begun, &done] {
        let _ = std::fs::remove_file(file);
    }
    let command =
        format!("touch {}; while ! [ -e {} ]; do sleep 0.05; done", begun.display(), done.display());
    let acknowledged = std::thread::scope(|scope| {
        let freeze = scope.spawn(|| host.ctl(&["freeze", vm.name(), "--", "sh", "-c", &command]));
        let is_frozen =
            wait_for("the freeze", SOON, || (begun.exists() || freeze.is_finished()).then_some(()));
        if is_frozen.is_ok() && begun.exists() {
            meanwhile();
        }
        // Nothing of this can have been acknowledged after the snapshot, unless the freeze is over.
        let acknowledged = acknowledged(vm);
        std::fs::write(&done, "").unwrap();
        let said = freeze.join().unwrap();
        println!("guestctl freeze: {said:?}");
        acknowledged
    });
    let list: Value =
        serde_json::from_str(&host.ctl(&["receipts", "ls", vm.name(), "-o", "json"]).unwrap()).unwrap();
    let id = list.as_array().unwrap().last().unwrap()["id"].as_str().unwrap();
    let shown = host.ctl(&["receipts", "show", vm.name(), id, "-o", "json"]).unwrap();
    let shown: Value = serde_json::from_str(&shown).unwrap();
    Taken { acknowledged, receipt: shown["receipt"].clone() }
}

/// Begins copies of disks at one moment: what is written later is not in them.
fn back_up(vm: &Vm, disks: &[(&str, &str, &Path)]) {
    let actions: Vec<_> = disks
        .iter()
        .map(|(device, sync, target)| {
            let data = json!({
                "device": device, "job-id": format!("copy-{device}"), "target": target, "sync": sync, "format": "qcow2"
            });
            json!({ "type": "drive-backup", "data": data })
        })
        .collect();
    vm.qmp().execute("transaction", json!({ "actions": actions })).unwrap();
}

fn wait_backed_up(vm: &Vm) {
    wait_for("the copies", BOOT, || {
        let jobs = vm.qmp().execute("query-block-jobs", json!({})).unwrap();
        jobs.as_array().unwrap().is_empty().then_some(())
    })
    .unwrap();
}

/// What the receipt says of an application.
fn told<'a>(receipt: &'a Value, name: &str) -> &'a Value {
    let all = receipt["applications"].as_array().unwrap();
    all.iter().find(|one| one["name"] == name).unwrap_or_else(|| panic!("{name}: {receipt:#}"))
}

fn evidence<'a>(application: &'a Value, name: &str) -> &'a str {
    let pair = application["evidence"].as_array().unwrap().iter().find(|pair| pair[0] == name);
    pair.unwrap_or_else(|| panic!("{name}: {application:#}"))[1].as_str().unwrap()
}

/// The receipt is of the highest level, and the snapshot inside of its window.
fn assert_proved(receipt: &Value) {
    assert_eq!(
        (&receipt["level"], &receipt["end"]["how"]),
        (&"application".into(), &"asked".into()),
        "{receipt:#}"
    );
    for (_, name, position) in KINDS {
        let one = told(receipt, name);
        assert_eq!(one["level"], "application", "{receipt:#}");
        assert!(!evidence(one, position).is_empty());
    }
    let at = |name: &str| receipt["times"][name]["boottime_ms"].as_u64().unwrap();
    let (held, frozen, thawing) = (at("hooks_ended"), at("frozen"), at("thaw_asked"));
    let took = receipt["cut"]["took_ms"].as_u64().unwrap();
    assert!(held <= frozen && frozen < thawing && took <= thawing - frozen, "{receipt:#}");
    println!(
        "held after {} ms, frozen {} ms later, for {} ms, of which the cut {took} ms",
        held - at("hooks_begun"),
        frozen - held,
        thawing - frozen
    );
}

/// The databases of a guest that was started from a snapshot have all of it.
fn assert_restored(copy: &Vm, taken: &Taken) {
    for (kind, name, position) in KINDS {
        let position = evidence(told(&taken.receipt, name), position);
        let found: Value =
            serde_json::from_str(&copy.run(&format!("{PROGRAM} check {kind} '{position}'")).unwrap())
                .unwrap();
        let last = found["last"].as_u64().unwrap();
        let (expected, _) = taken.acknowledged[kind];
        println!("{kind}: {expected} were acknowledged, {last} are there");
        assert!(last >= expected && found["count"] == last, "{kind}: {found}, of {expected}");
        assert_eq!(
            (&found["whole"], &found["reached"]),
            (&true.into(), &true.into()),
            "{kind} {position}: {found}"
        );
    }
}

#[test]
fn what_databases_acknowledged_before_a_snapshot_is_in_the_guest_that_boots_from_it() {
    let _turn = turns::beside();
    let kept = RunFolder::new().unwrap();
    let vm = real("databases");
    set_up(&vm, &kept);
    let host = HostHalf::start(&[Listed::of(&vm)]).unwrap();
    host.wait_connected(vm.name(), SOON).unwrap();

    let mut copy: Option<Vm> = None;
    for round in 0..steps(1_u32, 50) {
        goes_on(&vm);
        let (root, data) = (kept.file("root.qcow2"), kept.file(&format!("cut-{round}.qcow2")));
        let mut disks = vec![("data", "full", &*data)];
        if copy.is_none() {
            disks.push(("root", "top", &*root));
        }
        let taken = take(&vm, &host, &kept, || back_up(&vm, &disks));
        assert_proved(&taken.receipt);
        wait_backed_up(&vm);
        goes_on(&vm);
        if let Some(copy) = &copy {
            another_disk(copy, &data);
            std::fs::remove_file(kept.file(&format!("cut-{}.qcow2", round - 1))).unwrap();
        } else {
            let test = Restore { vm: &vm, host: &host, id: taken.receipt["id"].as_str().unwrap() };
            test.of_nothing(&kept);
            let disks = [&*root, &data, &Images::databases().unwrap().0].map(image);
            test.succeeds(&disks, &kept);
            test.claim_more();
            // The other guest writes to it.
            let again = kept.file("again.qcow2");
            self::copy(&data, &again);
            let disks = [&*root, &again, &Images::databases().unwrap().0].map(image);
            copy = Some(std::thread::scope(|scope| {
                let of_more = scope.spawn(|| test.of_more(&disks));
                let copy = boot_copy(&root, &data);
                of_more.join().unwrap();
                copy
            }));
        }
        assert_restored(copy.as_ref().unwrap(), &taken);
    }
    drop(copy);
    println!("the longest that a transaction took: {:?}", acknowledged(&vm));
    too_late(&vm, &host, &kept);
}

/// A guest from copies of all disks: its databases come up with the guest.
fn boot_copy(root: &Path, data: &Path) -> Vm {
    let copy = Options::named("copy").without_cloud_init().real(images(), root).unwrap();
    copy.plug_read_only("programs", &Images::databases().unwrap().0).unwrap();
    plug(&copy, "data", data);
    wait_for("the copy's databases", BOOT, || {
        copy.run("systemctl is-active postgresql mariadb etcd && mountpoint /data").ok()
    })
    .unwrap();
    copy
}

/// Starts the databases of that guest from another copy of the data.
fn another_disk(copy: &Vm, data: &Path) {
    copy.run("systemctl stop postgresql mariadb etcd && umount /data").unwrap();
    copy.qmp().execute("device_del", json!({ "id": "data0" })).unwrap();
    wait_for("the disk is gone", SOON, || {
        copy.qmp().execute("blockdev-del", json!({ "node-name": "data" })).ok()
    })
    .unwrap();
    plug(copy, "data", data);
    // Until systemd has heard of the disk, it takes the one before for what the link leads to.
    let start = "udevadm settle && systemctl reset-failed && systemctl start postgresql mariadb etcd && mountpoint /data";
    wait_for("the copy's databases", BOOT, || copy.run(start).ok()).unwrap();
}

/// A snapshot that is taken when the freeze has ended by itself is proved by nothing.
fn too_late(vm: &Vm, host: &HostHalf, kept: &RunFolder) {
    let settings = b"[qga.freeze]\ndeadline = 5\n";
    vm.write("/etc/guestlet/agent.d/freeze.toml", settings).unwrap();
    vm.run("systemctl restart guestlet").unwrap();
    wait_for("a session", SOON, || host.ctl(&["receipts", "ls", vm.name()]).ok()).unwrap();
    let taken = take(vm, host, kept, || goes_on(vm));
    let receipt = &taken.receipt;
    assert_eq!(
        (&receipt["level"], &receipt["end"]["how"]),
        (&"crash".into(), &"deadline".into()),
        "{receipt:#}"
    );
    for (_, name, _) in KINDS {
        assert_eq!(told(receipt, name)["level"], "crash", "{receipt:#}");
    }
}

/// How guestctl is told of an image.
fn image(file: &Path) -> String {
    format!("--from={}={}", file.extension().unwrap().display(), file.display())
}

/// Restore tests by guestctl.
struct Restore<'a> {
    vm: &'a Vm,
    host: &'a HostHalf,
    id: &'a str,
}

/// Direct boot, as the guest itself has it; the root is the first disk.
fn boot() -> Vec<String> {
    let (kernel, initrd) = (images().kernel().display().to_string(), images().initrd().display().to_string());
    let append = "console=ttyS0 quiet testguest.root=/dev/vda cloud-init=disabled no_timer_check";
    let words = ["-kernel", &kernel, "-initrd", &initrd, "-append", append];
    words.iter().map(|word| format!("--qemu-argument={word}")).collect()
}

impl Restore<'_> {
    /// In a mount namespace where it keeps its marks in memory, which are told after it, as guestctl shows the receipt.
    fn verify(&self, words: &[String]) -> Output {
        let ctl = format!(
            "{} --socket {}",
            tools::program("guestctl").unwrap().display(),
            self.host.socket().display()
        );
        let (name, id) = (self.vm.name(), self.id);
        let script = format!(
            "mount -t tmpfs none /var/lib; {ctl} receipts verify {name} {id} \"$@\"; {ctl} receipts show {name} {id} -o json"
        );
        let accelerator = format!("--accelerator={}", images().accelerator);
        let mut command = Command::new("unshare");
        command.args(["--mount", "sh", "-ec", &script, "sh", "--memory=512", &accelerator]).args(words);
        command.output().unwrap()
    }

    /// It fails, and says why.
    fn fails(&self, words: &[String], why: &str) {
        let output = self.verify(words);
        let said = String::from_utf8_lossy(&output.stderr);
        println!("{}", said.lines().find(|line| line.contains("not verified")).unwrap_or_default());
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.contains("not verified") && said.contains(why), "{why}: {said}");
    }

    /// Images with nothing in them, and a guestctl that is killed.
    fn of_nothing(&self, kept: &RunFolder) {
        let (empty, blank, garbage) =
            (kept.file("empty.raw"), kept.file("blank.raw"), kept.file("garbage.qcow2"));
        std::fs::write(&empty, "").unwrap();
        std::fs::File::create(&blank).unwrap().set_len(1 << 20).unwrap();
        std::fs::write(&garbage, [b'g'; 4096]).unwrap();
        self.fails(&[image(&empty)], "the file is empty");
        self.fails(&[image(&blank)], "it does not boot");
        self.fails(&[image(&garbage)], "not in qcow2 format");
        self.fails(
            &[vec![image(&blank), "--timeout=5s".into()], boot()].concat(),
            "in 5 s: the agent in the clone does not answer",
        );
        assert_eq!(clones_of(&blank), [0; 0]);

        let mut command = Command::new(tools::program("guestctl").unwrap());
        command.arg("--socket").arg(self.host.socket()).args(["receipts", "verify", self.vm.name(), self.id]);
        let accelerator = format!("--accelerator={}", images().accelerator);
        let mut child = command.args([image(&blank), accelerator]).args(boot()).spawn().unwrap();
        wait_for("the clone", SOON, || (clones_of(&blank).len() == 1).then_some(())).unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        wait_for("the end of the clone", SOON, || clones_of(&blank).is_empty().then_some(())).unwrap();
    }

    /// All databases come up in the clone, and the images stay as they were.
    fn succeeds(&self, disks: &[String], kept: &RunFolder) {
        let changed = || {
            let file = |disk: &String| disk.rsplit_once('=').unwrap().1.to_owned();
            disks
                .iter()
                .map(|disk| std::fs::metadata(file(disk)).unwrap().modified().unwrap())
                .collect::<Vec<_>>()
        };
        let (before, console) = (changed(), kept.file("clone.log"));
        let serial = ["-serial".to_owned(), format!("file:{}", console.display())];
        let serial = serial.map(|word| format!("--qemu-argument={word}"));
        let output = self.verify(&[disks, &serial, &boot()].concat());
        let said = String::from_utf8_lossy(&output.stdout);
        let (errors, console) =
            (String::from_utf8_lossy(&output.stderr), std::fs::read(&console).unwrap_or_default());
        assert!(output.status.success(), "{said}{errors}\n{}", String::from_utf8_lossy(&console));
        let (told, shown) = said.split_at(said.find("\n{").unwrap());
        println!("{told}");
        for found in ["file systems: ", "recovered-to", "gtid-binlog", "revision", "the receipt was unsigned"]
        {
            assert!(told.contains(found), "{found}: {told}");
        }
        let shown: Value = serde_json::from_str(shown).unwrap();
        assert_eq!(shown["restored"]["id"], self.id, "{shown:#}");
        assert_eq!(changed(), before);
        assert_eq!(clones_of(Path::new(&disks[0])), [0; 0]);
    }

    /// Has the guest's receipt say that the log of PostgreSQL was further.
    fn claim_more(&self) {
        let file = self.vm.run(&format!("echo /var/lib/guestlet/receipts/*{}*", self.id)).unwrap();
        let change = r#"s,\(\[\\"lsn\\"\,\\"\)[^\\]*,\1FFFF/FFFFFFF8,"#;
        self.vm.run(&format!("sed -i '{change}' {} && grep -c FFFF/FFFFFFF8 {0}", file.trim())).unwrap();
    }

    fn of_more(&self, disks: &[String]) {
        self.fails(&[disks, &boot()].concat(), "its lsn was FFFF/FFFFFFF8");
    }
}

/// Processes of QEMU for a restore test from this image.
fn clones_of(file: &Path) -> Vec<u32> {
    let file = file.to_str().unwrap();
    let processes = std::fs::read_dir("/proc").unwrap().flatten();
    let ids = processes.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    ids.filter(|id| {
        let words = std::fs::read(format!("/proc/{id}/cmdline")).unwrap_or_default();
        let mut words = words.split(|byte| *byte == 0).map(String::from_utf8_lossy);
        words.next().is_some_and(|program| program.contains("qemu-system"))
            && words.any(|word| word.contains(file))
    })
    .collect()
}
