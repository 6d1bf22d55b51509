//! Another guest, with the same servers: it starts them from what snapshots of a disk have, one after another.

use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::Context as _;
use serde_json::Value;

use super::load::Acknowledged;
use super::rounds::{Figures, Taken, evidence, told};
use super::{KINDS, PROGRAM, plug};
use crate::harness::images::{Images, text};
use crate::harness::launch::Options;
use crate::harness::process::RunFolder;
use crate::harness::tools::run;
use crate::harness::vm::{BOOT, SOON, Vm};
use crate::harness::wait_for;
use crate::images;

/// The guest, and the disk that it has.
pub struct Other {
    vm: Vm,
    disk: PathBuf,
}

/// A disk that begins as another one, which stays as it is.
fn on_top_of(below: &Path, kept: &RunFolder) -> PathBuf {
    let disk = kept.file(&format!("on-{}.qcow2", below.file_stem().unwrap().display()));
    let format = if below.extension().is_some_and(|extension| extension == "raw") { "raw" } else { "qcow2" };
    let arguments = ["create", "-q", "-f", "qcow2", "-F", format, "-b"];
    let files = [text(below).unwrap(), text(&disk).unwrap()];
    run(Path::new("qemu-img"), &[&arguments[..], &files[..]].concat()).unwrap();
    disk
}

impl Other {
    /// Boots from snapshots of all disks: its databases come up with it.
    pub fn boot(root: &Path, data: &Path, kept: &RunFolder) -> Self {
        let vm = Options::named("copy").without_cloud_init().real(images(), root).unwrap();
        let disk = on_top_of(data, kept);
        vm.plug_read_only("programs", &Images::databases().unwrap().0).unwrap();
        plug(&vm, "data", &disk);
        wait_for("the copy's databases", BOOT, || {
            vm.run("systemctl is-active postgresql mariadb etcd && mountpoint /data").ok()
        })
        .unwrap();
        Self { vm, disk }
    }

    /// Starts the databases from another snapshot of the disk with the data. When this returns, they may still be recovering.
    pub fn given(&mut self, data: &Path, kept: &RunFolder) -> anyhow::Result<()> {
        let vm = &self.vm;
        vm.run("systemctl stop postgresql mariadb etcd && { ! mountpoint -q /data || umount /data; }")?;
        let sound = vm.run("e2fsck -f -n /dev/disk/by-label/data");
        vm.qmp().execute("device_del", serde_json::json!({ "id": "data0" }))?;
        wait_for("end of the disk", SOON, || {
            vm.qmp().execute("blockdev-del", serde_json::json!({ "node-name": "data" })).ok()
        })?;
        std::fs::remove_file(&self.disk)?;
        self.disk = on_top_of(data, kept);
        plug(vm, "data", &self.disk);
        // Until systemd has heard of the disk, it takes the one before for what the link leads to.
        let start = "udevadm settle && systemctl reset-failed && systemctl start postgresql mariadb etcd && mountpoint /data";
        wait_for("the copy's databases", BOOT, || vm.run(start).ok())?;
        sound.context("the file system of the snapshot before is damaged").map(drop)
    }

    fn check(&self, kind: &str, position: &str) -> anyhow::Result<Value> {
        let said = self.vm.run(&format!("{PROGRAM} check {kind} '{position}'"))?;
        serde_json::from_str(&said).with_context(|| said)
    }

    /// The databases have all that was acknowledged, and all that there was at the positions of the receipt.
    pub fn assert_restored(&self, taken: &Taken, figures: &mut Figures) {
        self.assert_whole(
            &taken.acknowledged,
            |name, position| evidence(told(&taken.receipt, name), position).to_owned(),
            figures,
        );
    }

    /// The same of a snapshot that has no receipt.
    pub fn assert_acknowledged(&self, acknowledged: &Acknowledged, figures: &mut Figures) {
        self.assert_whole(acknowledged, |_, _| String::new(), figures);
    }

    fn assert_whole(
        &self,
        acknowledged: &Acknowledged,
        position: impl Fn(&str, &str) -> String,
        figures: &mut Figures,
    ) {
        let begun = Instant::now();
        for (kind, name, key) in KINDS {
            let position = position(name, key);
            let found = self.check(kind, &position).unwrap();
            let (last, expected) = (found["last"].as_u64().unwrap(), acknowledged[kind]);
            println!("{kind}: {expected} were acknowledged: {found}");
            assert!(last >= expected && found["count"] == last, "{kind}: {found}, of {expected}");
            assert_eq!(found["whole"], true, "{kind}: {found}");
            assert!(position.is_empty() || found["reached"] == true, "{kind} {position}: {found}");
            if let Some(bytes) = found["replayed"].as_u64() {
                figures.add(&format!("KiB of its log that {kind} reads again"), bytes >> 10);
            }
        }
        figures.add("ms until all are recovered and checked", begun.elapsed().as_millis());
    }

    /// Tells what became of a snapshot of which nothing is promised.
    pub fn tell(&self, what: &str, acknowledged: &Acknowledged, figures: &mut Figures) {
        for (kind, ..) in KINDS {
            match self.check(kind, "") {
                Ok(found) => {
                    let lost = acknowledged[kind].saturating_sub(found["last"].as_u64().unwrap_or(0));
                    println!("{what}, {kind}: {lost} of {} are lost: {found}", acknowledged[kind]);
                    figures.add(&format!("{what}: lost of {kind}"), lost);
                    figures.add(&format!("{what}: not whole, {kind}"), u64::from(found["whole"] != true));
                    if let Some(bytes) = found["replayed"].as_u64() {
                        figures.add(&format!("{what}: KiB of its log that {kind} reads again"), bytes >> 10);
                    }
                }
                Err(error) => {
                    println!("{what}, {kind}: it does not come up: {error:#}");
                    figures.add(&format!("{what}: {kind} does not come up"), 1_u32);
                }
            }
        }
    }
}
