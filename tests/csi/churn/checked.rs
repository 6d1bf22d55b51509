//! The disks of the churn, and what the checker holds against them.

use std::fs::File;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, SystemTime};

use super::run;

const MEBIBYTES: u64 = 40;
/// What a file says that nobody has written to since.
const LONG_AGO: Duration = Duration::from_secs(1_000_000_000);

/// Numbers that look random, the same for the same seed.
pub struct Dice(pub u64);

impl Dice {
    pub fn below(&mut self, below: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        usize::try_from((mixed ^ mixed >> 31) % below as u64).unwrap()
    }

    pub fn percent(&mut self, percent: usize) -> bool {
        self.below(100) < percent
    }
}

/// A disk, and what may become of it.
pub struct Identity {
    pub serial: String,
    pub file: PathBuf,
    /// Where alone it may be mounted; nothing may be written to it if it is named nowhere.
    pub place: Option<PathBuf>,
    /// What was written to its file system last.
    pub written: Option<String>,
    /// Of one that nobody may write to.
    pub sum: String,
}

impl Identity {
    pub fn new(folder: &Path, name: &str, serial: &str, place: Option<PathBuf>) -> Self {
        let file = folder.join(name);
        File::create(&file).unwrap().set_len(MEBIBYTES << 20).unwrap();
        let mut identity = Self { serial: serial.to_owned(), file, place, written: None, sum: String::new() };
        identity.seal();
        identity
    }

    /// Fills it with something that looks blank to who does not look well.
    pub fn fill(&mut self, how: usize) {
        let file = File::create(&self.file).unwrap();
        file.set_len(100 << 20).unwrap();
        drop(file);
        let script = match how {
            0 => "printf x | dd of=$F bs=1M seek=1 conv=notrunc",
            1 => "mkfs.ext4 -q -F -E offset=1048576 $F 80m",
            2 => "mkfs.ext4 -q -F $F; dd if=/dev/zero of=$F bs=1M count=1 conv=notrunc",
            3 => "head -c 30M /dev/zero | tr '\\0' x | dd of=$F bs=1M seek=2 conv=notrunc iflag=fullblock",
            _ => "printf x | dd of=$F bs=1 seek=$((100 * 1048576 - 1)) conv=notrunc",
        };
        run(&format!("F={}\n{{ {script}; }} > /dev/null 2>&1", self.file.display()));
        self.seal();
    }

    /// From now on nobody writes to it.
    fn seal(&mut self) {
        let file = File::options().write(true).open(&self.file).unwrap();
        file.sync_all().unwrap();
        file.set_modified(SystemTime::UNIX_EPOCH + LONG_AGO).unwrap();
        self.sum = self.summed();
    }

    pub fn summed(&self) -> String {
        run(&format!("sha256sum < {}", self.file.display()))
    }

    #[track_caller]
    pub fn check(&self) {
        let written = self.file.metadata().unwrap().modified().unwrap();
        let untouched = self.place.is_some() || written == SystemTime::UNIX_EPOCH + LONG_AGO;
        assert!(untouched, "somebody wrote to {}, which is named nowhere", self.file.display());
    }

    pub fn is_empty(&self) -> bool {
        self.file.metadata().unwrap().blocks() == 0
    }
}

/// Loop devices of the test's own, so that no other test has their names meanwhile. The kernel forgets them with this.
pub struct Loops(pub std::ops::Range<u32>);

impl Drop for Loops {
    fn drop(&mut self) {
        const LOOP_CTL_REMOVE: nix::libc::c_ulong = 0x4c81;

        let control = File::options().write(true).open("/dev/loop-control").unwrap();
        for number in self.0.clone() {
            // SAFETY: the call takes a number, and nothing that the kernel would write to.
            unsafe { nix::libc::ioctl(control.as_raw_fd(), LOOP_CTL_REMOVE as _, number) };
        }
    }
}

/// What the checker is for: it notices.
#[test]
fn a_byte_that_is_written_to_a_wrong_disk_is_noticed() {
    let folder = tempfile::tempdir().unwrap();
    let mut disk = Identity::new(folder.path(), "disk", "x", None);
    disk.check();
    let file = File::options().write(true).open(&disk.file).unwrap();
    file.write_all_at(b"x", 12345).unwrap();
    assert!(std::panic::catch_unwind(|| disk.check()).is_err());
    assert_ne!(disk.summed(), disk.sum);
    // Nor is giving back blocks hidden.
    disk.seal();
    let status = Command::new("fallocate").args(["-p", "-l", "1M"]).arg(&disk.file).status().unwrap();
    assert!(status.success());
    assert!(std::panic::catch_unwind(|| disk.check()).is_err());
}
