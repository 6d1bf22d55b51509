//! Disks that only a test sees: files behind loop devices, in a mount namespace of the test's own.

use std::cell::OnceCell;
use std::future::Future;
use std::hash::{DefaultHasher, Hasher as _};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use guestlet::guest::Guest;
use guestlet::guest::disks::identity::{KnownDisk, Serial, Source};
use guestlet::guest::disks::location::Bus;
use guestlet::guest::volumes::Error;
use guestlet::guest::volumes::format::{Format, Formatted, format};
use guestlet::guest::volumes::grow::{Step, grow};
use guestlet::guest::volumes::held::Held;
use guestlet::sys::{block, block_device};
use nix::unistd::{Whence, lseek};
use tempfile::TempDir;

use crate::namespace::is_outside;

/// Runs this test again in a mount namespace of its own; absent outside of it.
pub fn enter() -> Option<Lab> {
    (!is_outside()).then(Lab::new)
}

/// Runs a script that has to succeed; what it said.
#[track_caller]
pub fn run(script: &str) -> String {
    let output = Command::new("sh").args(["-ec", script]).output().unwrap();
    assert!(output.status.success(), "{script}\n{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

/// What every test here begins with.
pub struct Lab {
    pub guest: Guest,
    folder: TempDir,
    runtime: tokio::runtime::Runtime,
}

impl Lab {
    fn new() -> Self {
        // What is noted there lasts no longer than the test.
        std::fs::create_dir_all("/run/guestlet").unwrap();
        run("mount -t tmpfs lab /var/lib; mount -t tmpfs lab /run/guestlet");
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        Self { guest: Guest::default(), folder: tempfile::tempdir().unwrap(), runtime }
    }

    pub fn wait<T>(&self, work: impl Future<Output = T>) -> T {
        self.runtime.block_on(work)
    }

    /// Holds whatever has this name.
    pub fn hold(&self, device: &Path) -> Result<Held, Error> {
        self.wait(Held::called(&self.guest, device, "a test holds it"))
    }

    pub fn format(&self, device: &Path, wanted: &Format<'_>) -> Result<Formatted, Error> {
        let held = self.hold(device)?;
        self.wait(format(&self.guest, &held, wanted))
    }

    pub fn grow(&self, device: &Path) -> Result<Vec<Step>, Error> {
        let held = self.hold(device)?;
        self.wait(grow(&self.guest, &held, Duration::from_secs(300)))
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// A blank disk.
    pub fn disk(&self, name: &str, mebibytes: u64) -> Disk {
        let file = self.path(name);
        std::fs::File::create(&file).unwrap().set_len(mebibytes << 20).unwrap();
        Disk::of(file, "")
    }

    /// An empty folder.
    pub fn folder(&self, name: &str) -> PathBuf {
        let path = self.path(name);
        std::fs::create_dir(&path).unwrap();
        path
    }

    /// Puts a script into the place of a program, where `$REAL` is what was there.
    pub fn replace(&self, program: &str, script: &str) -> Replaced {
        let program = run(&format!("readlink -f $(command -v {program})"));
        let name = program.rsplit('/').next().unwrap();
        let (real, path) = (self.path(&format!("real-{name}")), self.path(&format!("script-{name}")));
        std::fs::copy(&program, &real).unwrap();
        let (real, path) = (real.display(), path.display());
        std::fs::write(path.to_string(), format!("#!/bin/sh\nREAL={real}\n{script}\n")).unwrap();
        run(&format!("chmod 755 {path}; mount --bind {path} {program}"));
        Replaced(program)
    }
}

/// How many notes the agent has of disks that are being formatted.
pub fn notes() -> usize {
    std::fs::read_dir("/var/lib/guestlet/formats").map_or(0, Iterator::count)
}

/// A program that has another in its place; dropped, it is itself again.
pub struct Replaced(String);

impl Drop for Replaced {
    fn drop(&mut self) {
        run(&format!("umount {}", self.0));
    }
}

/// A disk.
pub struct Disk {
    pub file: PathBuf,
    pub device: PathBuf,
    held: OnceCell<Held>,
}

impl Disk {
    /// The disk that holds what is in `file`.
    pub fn of(file: PathBuf, options: &str) -> Self {
        let device = run(&format!("losetup --find --show --partscan {options} {}", file.display()));
        Self { file, device: device.into(), held: OnceCell::new() }
    }

    /// Held from now on.
    pub fn held(&self, lab: &Lab) -> &Held {
        self.held.get_or_init(|| lab.hold(&self.device).unwrap())
    }

    /// As the agent would know it, if it were no loop device.
    pub fn known(&self, serial: &str) -> KnownDisk {
        let (root, name) = (guestlet::sys::root::Root::default(), self.name().trim_start_matches("/dev/"));
        let place = block::disk_place(&root, name).unwrap();
        let facts = block_device::facts(&self.device).unwrap();
        KnownDisk {
            name: name.to_owned(),
            file: self.name().to_owned(),
            number: facts.number,
            generation: block::generation(&root, &place).unwrap(),
            sequence: block::sequence(&root, &place),
            bus: Bus::Unknown,
            pci: None,
            scsi: None,
            serials: Serial::new(Source::Device, serial.as_bytes()).into_iter().collect(),
            alias: None,
            wwn: None,
            bytes: facts.bytes,
            sector: 512,
            read_only: false,
            rotational: false,
            partitions: block::partitions(&root, &place),
            place,
            holders: Vec::new(),
            silent: false,
        }
    }

    /// Has something else in it, under the same name.
    pub fn change_to(&mut self, file: &Path) {
        // Others that look for a free one may have it open for a moment, or take it for a test of theirs.
        let again = "for i in $(seq 3000); do losetup $0 $1 2> /dev/null && exit; sleep 0.02; done; exit 1";
        run(&format!("losetup --detach {0}; sh -c '{again}' {0} {1}", self.name(), file.display()));
        file.clone_into(&mut self.file);
    }

    pub fn name(&self) -> &str {
        self.device.to_str().unwrap()
    }

    /// Removes a partition from the kernel, which refuses that for as long as any program that looks at all disks (of
    /// another test, say) has it open.
    pub fn forget_partition(&self, number: u32) {
        let forget = format!("delpart {} {number}", self.name());
        run(&format!("for i in $(seq 300); do {forget} 2> /dev/null && exit; sleep 0.1; done; {forget}"));
    }

    /// Puts bytes on it.
    pub fn put(&self, at: u64, bytes: &[u8]) {
        let device = std::fs::File::options().write(true).open(&self.device).unwrap();
        device.write_all_at(bytes, at).unwrap();
        device.sync_all().unwrap();
    }

    /// All that is on it, in short.
    pub fn sum(&self) -> u64 {
        run(&format!("sync {}", self.name()));
        let file = std::fs::File::open(&self.file).unwrap();
        let (mut at, mut hash) = (0, DefaultHasher::new());
        while let Ok(begin) = lseek(&file, at, Whence::SeekData) {
            let end = lseek(&file, begin, Whence::SeekHole).unwrap();
            let mut bytes = vec![0; (end - begin) as usize];
            file.read_exact_at(&mut bytes, begin as u64).unwrap();
            // Holes are zeros.
            for (page, bytes) in
                bytes.chunks(4096).enumerate().filter(|(_, page)| page.iter().any(|byte| *byte != 0))
            {
                hash.write_u64(begin as u64 + page as u64 * 4096);
                hash.write(bytes);
            }
            at = end;
        }
        hash.finish()
    }

    /// Blank again.
    pub fn clear(&self) {
        let length = self.file.metadata().unwrap().len();
        run(&format!("blkdiscard -f {} 2> /dev/null || true", self.name()));
        self.put(0, &vec![0; 2 << 20]);
        self.put(length - (2 << 20), &vec![0; 2 << 20]);
    }

    /// Larger, or smaller.
    pub fn resize(&self, mebibytes: u64) {
        std::fs::File::options().write(true).open(&self.file).unwrap().set_len(mebibytes << 20).unwrap();
        run(&format!("losetup --set-capacity {}", self.name()));
    }

    /// A word of what blkid says of it.
    pub fn blkid(&self, word: &str) -> String {
        run(&format!("blkid -p -o value -s {word} {}", self.name()))
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        drop(self.held.take());
        // What is still mounted goes with the namespace, and the device then.
        let _ = Command::new("losetup").arg("--detach").arg(&self.device).status();
    }
}
