//! Snapshots of a guest with databases under load: PostgreSQL, MariaDB and etcd on a disk of their own. QEMU takes them while
//! `guestctl freeze VM -- COMMAND` waits, or a client of QGA does. Another guest starts the databases from each, which have to
//! have everything that they had acknowledged by then, and nothing by half. `guestctl receipts verify --from` has to find the
//! same by a clone of its own.
//!
//! [`load`] is what the guest tells of its databases, [`rounds`] freezes and snapshots it, [`other`] is the other guest,
//! [`mod@restore`] the clone.

mod load;
mod other;
mod restore;
mod rounds;

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::json;

use crate::harness::images::Images;
use crate::harness::process::RunFolder;
use crate::harness::turns;
use crate::harness::vm::{SOON, Vm};
use crate::harness::wait_for;
use crate::soak::steps;
use load::TOLD;
use other::Other;
use restore::{Restore, image};
use rounds::{Figures, How, Lab, Way, told};

pub const PROGRAM: &str = "/opt/databases/bin/databases";
/// Their names in the guest, in receipts, and the position that a copy has to have reached.
const KINDS: [(&str, &str, &str); 3] =
    [("postgresql", "postgresql", "lsn"), ("mariadb", "mysql", "gtid-binlog"), ("etcd", "etcd", "revision")];

/// A machine with much else to do may hold up the databases of an emulated guest.
const PATIENT: &str = "[qga.freeze]\nhooks-deadline = 100\n[freeze]\napplications-deadline = \"90s\"\n";

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

/// Plugs the disks with programs and data, and starts the databases. The file of the data.
fn set_up(vm: &Vm, kept: &RunFolder) -> PathBuf {
    let (programs, data) = Images::databases().unwrap();
    let file = kept.file("data.raw");
    vm.plug_read_only("programs", &programs).unwrap();
    copy(&data, &file);
    plug(vm, "data", &file);
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
    file
}

#[test]
fn what_databases_acknowledged_before_a_snapshot_is_in_the_guest_that_boots_from_it() {
    let _turn = turns::beside();
    let lab = Lab::new();
    let mut figures = Figures::default();
    let mut other = first(&lab, &mut figures);
    let rounds = steps(1, 50);
    if rounds > 1 {
        lab.set(PATIENT);
        many(&lab, &mut other, rounds, &mut figures);
        control_group(&lab, &mut other, rounds, &mut figures);
    }
    for way in [Way::Guestctl, Way::Qga].into_iter().take(steps(1, 2)) {
        too_late(&lab, way);
    }
    if rounds > 1 {
        lab.set("");
        let (acknowledged, disk) = lab.power_fails_while_frozen();
        other.given(&disk, &lab.kept).unwrap();
        other.assert_acknowledged(&acknowledged, &mut figures);
    }
    figures.print();
}

/// Further snapshots, which the other guest is given one after another.
fn many(lab: &Lab, other: &mut Other, rounds: usize, figures: &mut Figures) {
    let mut late = 0;
    for number in 1..rounds {
        println!("round {number}: {:?}, {:?}", Way::of(number), How::of(number));
        let taken = lab.round(number, None);
        let is_proved = lab.is_proved(Way::of(number), &taken, figures);
        other.given(&taken.made.file, &lab.kept).unwrap();
        if is_proved {
            other.assert_restored(&taken, figures);
        } else {
            late += 1;
            other.assert_acknowledged(&taken.acknowledged, figures);
        }
        // (The other guest has it below its disk until it is given the next one; it reads a file that has no name.)
        taken.made.remove();
    }
    assert!(late * 5 < rounds, "{late} of {rounds} receipts are not of the highest level");
}

/// The first snapshot, of all disks: restore tests of it, and the other guest, which boots from it.
fn first(lab: &Lab, figures: &mut Figures) -> Other {
    let root = lab.kept.file("root.qcow2");
    let taken = lab.round(0, Some(&root));
    assert!(lab.is_proved(Way::of(0), &taken, figures));
    let data = &taken.made.file;
    let test = Restore { vm: &lab.vm, host: &lab.host, id: taken.receipt["id"].as_str().unwrap() };
    test.of_nothing(&lab.kept);
    let disks = [&*root, data, &Images::databases().unwrap().0].map(image);
    test.succeeds(&disks, &lab.kept);
    test.claim_more();
    let other = std::thread::scope(|scope| {
        let of_more = scope.spawn(|| test.of_more(&disks));
        let other = Other::boot(&root, data, &lab.kept);
        of_more.join().unwrap();
        other
    });
    other.assert_restored(&taken, figures);
    other
}

/// What snapshots are worth that databases take no part in: frozen file systems, and no freeze at all.
fn control_group(lab: &Lab, other: &mut Other, rounds: usize, figures: &mut Figures) {
    lab.set("[freeze]\napplications = \"listed\"\n");
    for number in rounds..rounds + 5 {
        let taken = lab.round(number, None);
        assert_eq!(taken.receipt["level"], "filesystem", "{:#}", taken.receipt);
        assert_eq!(taken.receipt["applications"], json!([]), "{:#}", taken.receipt);
        if let Err(error) = other.given(&taken.made.file, &lab.kept) {
            println!("file systems only: {error:#}");
        }
        other.tell("file systems only", &taken.acknowledged, figures);
        taken.made.remove();
    }
    for number in rounds + 5..rounds + 10 {
        lab.load.goes_on();
        let acknowledged = lab.load.acknowledged();
        let cut = lab.cut(number, How::of(number), None);
        lab.wait_cut();
        if let Err(error) = other.given(&cut.file, &lab.kept) {
            println!("nothing frozen: {error:#}");
        }
        other.tell("nothing frozen", &acknowledged, figures);
        cut.remove();
    }
    lab.set("");
}

/// A snapshot that is taken when the freeze has ended by itself is proved by nothing.
fn too_late(lab: &Lab, way: Way) {
    lab.set("[qga.freeze]\ndeadline = 5\n");
    let taken = lab.take(way, || lab.load.goes_on());
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
