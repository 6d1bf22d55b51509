//! A file system that answers until it is told to hang: a server of FUSE's protocol without any library, in a mount
//! namespace of the test's own. Whatever is looked up in its root folder is a file of one block.

use std::fs::{File, OpenOptions};
use std::io::{Read as _, Write as _};
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::poll::{PollFd, PollFlags, poll};
use tempfile::TempDir;

/// What every file holds.
pub const CONTENTS: &[u8] = b"NAME=hangs\n";

/// Nothing hangs any more when this is dropped: then the file system is gone.
pub struct Hanging {
    shared: Arc<Shared>,
    server: Option<JoinHandle<()>>,
    /// What the kernel says of all file systems of this kind, and which one this is.
    control: TempDir,
    number: u64,
}

struct Shared {
    hangs: AtomicBool,
    ends: AtomicBool,
}

impl Hanging {
    /// Mounts it, answering.
    pub fn mount(place: &Path) -> Self {
        Self::new(place, false)
    }

    /// Mounts one whose server has never answered: whatever is asked of it waits.
    pub fn silent(place: &Path) -> Self {
        Self::new(place, true)
    }

    fn new(place: &Path, is_silent: bool) -> Self {
        let device = OpenOptions::new().read(true).write(true).open("/dev/fuse").unwrap();
        let options = format!("fd={},rootmode=40000,user_id=0,group_id=0,allow_other", device.as_raw_fd());
        mount(Some("hangs"), place, Some("fuse"), MsFlags::empty(), Some(options.as_str())).unwrap();
        let shared = Arc::new(Shared { hangs: AtomicBool::new(is_silent), ends: AtomicBool::new(false) });
        let its = Arc::clone(&shared);
        let server = std::thread::spawn(move || serve(device, &its));
        let control = tempfile::tempdir().unwrap();
        let flags = MsFlags::empty();
        mount(Some("control"), control.path(), Some("fusectl"), flags, None::<&str>).unwrap();
        // The list of mounts has its device, which stat(2) would have to ask for.
        let number = number(place);
        if !is_silent {
            // Until the protocol is agreed on, everybody waits for that.
            std::fs::metadata(place).unwrap();
        }
        Self { shared, server: Some(server), control, number }
    }

    /// From now on nothing is answered, nor even read: who waits for what was read cannot be killed.
    pub fn hang(&self) {
        self.shared.hangs.store(true, Ordering::SeqCst);
    }

    /// How many requests wait for ever.
    pub fn unanswered(&self) -> usize {
        let file = self.control.path().join(self.number.to_string()).join("waiting");
        std::fs::read_to_string(file).unwrap().trim().parse().unwrap()
    }
}

/// The number by which the kernel knows the file system that is mounted there: its device's minor one.
fn number(place: &Path) -> u64 {
    let list = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
    let line = list.lines().rfind(|line| line.split(' ').nth(4) == place.to_str()).unwrap();
    line.split(' ').nth(2).and_then(|device| device.split_once(':')?.1.parse().ok()).unwrap()
}

impl Drop for Hanging {
    fn drop(&mut self) {
        self.shared.ends.store(true, Ordering::SeqCst);
        let _ = self.server.take().unwrap().join();
        let _ = umount2(self.control.path(), MntFlags::MNT_DETACH);
    }
}

fn serve(mut device: File, shared: &Shared) {
    let mut request = vec![0; 1 << 18];
    while !shared.ends.load(Ordering::SeqCst) {
        if shared.hangs.load(Ordering::SeqCst) {
            std::thread::sleep(Duration::from_millis(20));
            continue;
        }
        let mut ready = [PollFd::new(device.as_fd(), PollFlags::POLLIN)];
        if poll(&mut ready, 20_u8).unwrap_or(0) == 0 {
            continue;
        }
        let Ok(length) = device.read(&mut request) else { continue };
        let request = &request[..length];
        let number = |at: usize| u32::from_le_bytes(request[at..at + 4].try_into().unwrap());
        let (kind, node) = (number(4), number(16));
        let body = match kind {
            // FORGET, INTERRUPT and BATCH_FORGET are not answered.
            2 | 36 | 42 => continue,
            // INIT: protocol 7.31, 64 KiB at once.
            26 => {
                let mut body = [7_u32, 31, 0, 0, 16 << 16 | 16, 1 << 16, 1].map(u32::to_le_bytes).concat();
                body.resize(64, 0);
                Ok(body)
            }
            // LOOKUP: node 2, valid for no time, and so are its attributes.
            1 => Ok([2_u64, 0, 0, 0, 0]
                .map(u64::to_le_bytes)
                .concat()
                .into_iter()
                .chain(attributes(2))
                .collect()),
            // GETATTR and SETATTR
            3 | 4 => {
                Ok([0_u64, 0].map(u64::to_le_bytes).concat().into_iter().chain(attributes(node)).collect())
            }
            // OPEN and OPENDIR
            14 | 27 => Ok(vec![0; 16]),
            // READ
            15 => {
                let offset = usize::try_from(number(48)).unwrap();
                Ok(CONTENTS.get(offset..).unwrap_or_default().to_vec())
            }
            // WRITE: all of it.
            16 => Ok([number(56), 0].map(u32::to_le_bytes).concat()),
            // RELEASE, FSYNC, FLUSH, RELEASEDIR, ACCESS, DESTROY
            18 | 20 | 25 | 29 | 34 | 38 => Ok(Vec::new()),
            _ => Err(nix::libc::ENOSYS),
        };
        let (error, body) = body.map_or_else(|error| (-error, Vec::new()), |body| (0, body));
        let mut answer = u32::try_from(16 + body.len()).unwrap().to_le_bytes().to_vec();
        answer.extend(error.to_le_bytes());
        answer.extend(&request[8..16]);
        answer.extend(body);
        // Whoever asked may have gone.
        let _ = device.write_all(&answer);
    }
}

/// `struct fuse_attr` of a node: the first is the root folder.
fn attributes(node: u32) -> Vec<u8> {
    let (mode, size) = if node == 1 { (0o40_755_u32, 0) } else { (0o100_755, CONTENTS.len() as u64) };
    let mut all = [u64::from(node), size, 1, 0, 0, 0].map(u64::to_le_bytes).concat();
    all.extend([0_u32, 0, 0, mode, 1, 0, 0, 0, 4096, 0].map(u32::to_le_bytes).concat());
    all
}
