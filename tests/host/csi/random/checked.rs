//! What must be so whatever was done, as seen from outside: by the kernel, by QMP, and in the images.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::Write as _;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::Value;

use super::{MIB, Machine, Made, World};
use crate::lab::DEADLINE;

/// Where a volume's mark is, in bytes from its beginning.
const MARK: u64 = MIB.unsigned_abs();
/// Bytes that images of qcow2 are read and written by.
const SECTOR: usize = 512;

impl World {
    /// What must be so whatever was done.
    pub fn check(&self) {
        let mut writers: BTreeMap<PathBuf, Vec<&str>> = BTreeMap::new();
        for vm in &self.vms {
            let Some(machine) = &vm.machine else { continue };
            for host in 0..self.hosts.len() {
                for open in machine.open_below(&self.pools(host)) {
                    assert!(!open.is_unlinked, "{} has {open:?}", vm.name);
                    if open.is_writable {
                        let of = writers.entry(open.path).or_default();
                        // QEMU may have one image behind several descriptors.
                        if of.last() != Some(&vm.name.as_str()) {
                            of.push(&vm.name);
                        }
                    }
                }
            }
        }
        for (image, of) in writers {
            assert!(of.len() == 1, "{} is written by {of:?}", image.display());
        }
        self.check_nodes();
        for made in self.made.values().filter(|made| !made.is_doubtful) {
            let image = self.kept(made);
            let length = image.metadata().unwrap_or_else(|error| panic!("{made:?} is lost: {error}")).len();
            // Those of qcow2 have it in their header, and have to be opened for that, which others must not find.
            assert!(length >= made.bytes.unsigned_abs() || made.id.starts_with("qcow"), "{made:?} is short");
        }
    }

    /// What QEMU says that it has is what the kernel says, and no two say it of one image.
    fn check_nodes(&self) {
        let end = Instant::now() + DEADLINE;
        while let Err(problem) = self.compare_nodes() {
            // The host half may just be taking back what was plugged late.
            assert!(Instant::now() < end, "{problem}");
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    fn compare_nodes(&self) -> Result<(), String> {
        let mut all: BTreeMap<PathBuf, &str> = BTreeMap::new();
        for vm in self.vms.iter().filter(|vm| !self.mirrors[vm.host].hangs()) {
            let Some(machine) = vm.asked() else { continue };
            let pools = self.pools(vm.host);
            let open: BTreeSet<_> = machine.open_below(&pools).into_iter().map(|open| open.path).collect();
            let said: BTreeSet<_> = images(machine, &pools);
            if open != said {
                return Err(format!("{} has {open:?} open, and says that it has {said:?}", vm.name));
            }
            for image in said {
                if let Some(other) = all.insert(image.clone(), &vm.name) {
                    return Err(format!("{} is in {other} and in {}", image.display(), vm.name));
                }
            }
        }
        Ok(())
    }

    /// Puts into a new volume what is to be found in it to its end.
    pub fn mark(&self, made: &Made) {
        let image = self.kept(made);
        if !made.id.starts_with("qcow") {
            File::options().write(true).open(image).unwrap().write_all_at(made.id.as_bytes(), MARK).unwrap();
            return;
        }
        let mut sector = made.id.clone().into_bytes();
        sector.resize(SECTOR, 0);
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(&sector).unwrap();
        let write = format!("write -s {} {MARK} {SECTOR}", file.path().display());
        run(Command::new("qemu-io").args(["-f", "qcow2", "-c", &write]).arg(image));
    }

    /// A volume that nobody has is whole, and has what was put into it. One of qcow2 gets its size when it is plugged again.
    pub fn assert_kept(&self, made: &Made) {
        let image = self.kept(made);
        let found = if made.id.starts_with("qcow") {
            // It finds what is wrong with the tables, and the marks of an image as dirty or corrupt. That room is lost where a QEMU was
            // killed, is no fault.
            let checked =
                run(Command::new("qemu-img").args(["check", "-f", "qcow2", "--output=json"]).arg(&image));
            let report: Value = serde_json::from_slice(&checked).unwrap();
            let wrong = ["corruptions", "check-errors"].map(|kind| report[kind].as_u64().unwrap_or(0));
            assert_eq!(wrong, [0, 0], "{made:?}: {report}");
            let info =
                run(Command::new("qemu-img").args(["info", "-f", "qcow2", "--output=json"]).arg(&image));
            let info: Value = serde_json::from_slice(&info).unwrap();
            assert_eq!(
                (&info["dirty-flag"], &info["format-specific"]["data"]["corrupt"]),
                (&false.into(), &false.into()),
                "{made:?}"
            );
            let raw = tempfile::NamedTempFile::new().unwrap();
            run(Command::new("qemu-img")
                .args(["convert", "-f", "qcow2", "-O", "raw"])
                .arg(image)
                .arg(raw.path()));
            read_mark(raw.as_file(), made)
        } else {
            let image = File::open(image).unwrap();
            assert!(image.metadata().unwrap().len() >= made.bytes.unsigned_abs(), "{made:?} is short");
            read_mark(&image, made)
        };
        assert_eq!(String::from_utf8_lossy(&found), made.id, "{made:?} has lost what was in it");
    }
}

fn read_mark(image: &File, made: &Made) -> Vec<u8> {
    let mut found = vec![0; made.id.len()];
    image.read_exact_at(&mut found, MARK).unwrap();
    found
}

/// What a program says, that has to succeed; 3 is that of `qemu-img check` where clusters are lost.
fn run(command: &mut Command) -> Vec<u8> {
    let output = command.output().unwrap();
    assert!(matches!(output.status.code(), Some(0 | 3)), "{command:?}: {output:?}");
    output.stdout
}

/// The images below `pools` of which a QEMU says that it has them.
fn images(machine: &Machine, pools: &Path) -> BTreeSet<PathBuf> {
    let nodes = machine.ask("query-named-block-nodes");
    let files =
        nodes.as_array().unwrap().iter().filter_map(|node| Some(PathBuf::from(node["file"].as_str()?)));
    files.filter(|file| file.starts_with(pools)).collect()
}
