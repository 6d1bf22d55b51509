//! A file system that shows a directory, and hangs and goes on as it is told: a server of FUSE's protocol without any
//! library, in a mount namespace of the test's own. While it hangs nothing is lost: what was asked is answered later, and
//! who asked can be killed meanwhile, as with an NFS server that is away.
//!
//! It knows what pools and QEMU need: regular files in directories, without links, locks (the kernel keeps them) and
//! reserved room.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::{File, Metadata, OpenOptions, Permissions};
use std::io::{self, Read as _, Write as _};
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{FileExt as _, MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _, chown};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use nix::fcntl::OFlag;
use nix::libc;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::poll::{PollFd, PollFlags, poll};
use nix::sys::statvfs::statvfs;

/// The node of the directory itself.
const ROOT: u64 = 1;
/// The largest write, in bytes.
const LARGEST: u32 = 1 << 16;

/// It is gone when this is dropped: what is asked then fails, and so does what waits.
pub struct Mirror {
    place: PathBuf,
    hangs: Arc<AtomicBool>,
    ends: Arc<AtomicBool>,
    server: Option<JoinHandle<()>>,
}

impl Mirror {
    /// Shows the directory `of` at `place`.
    pub fn mount(of: &Path, place: &Path) -> Self {
        let device = OpenOptions::new().read(true).write(true).open("/dev/fuse").unwrap();
        let options = format!("fd={},rootmode=40000,user_id=0,group_id=0,allow_other", device.as_raw_fd());
        mount(Some("mirror"), place, Some("fuse"), MsFlags::empty(), Some(options.as_str())).unwrap();
        let (hangs, ends) = (Arc::<AtomicBool>::default(), Arc::<AtomicBool>::default());
        let mut nodes = Nodes(BTreeMap::from([(ROOT, Node { itself: reach(of).unwrap(), lookups: 1 })]));
        let (its, end) = (Arc::clone(&hangs), Arc::clone(&ends));
        let server = std::thread::spawn(move || serve(device, &mut nodes, &its, &end));
        Self { place: place.to_owned(), hangs, ends, server: Some(server) }
    }

    /// Shows a new directory at another new one, both below `folder`, and returns where.
    pub fn below(folder: &Path) -> (Self, PathBuf) {
        let (kept, shown) = (folder.join("kept"), folder.join("shown"));
        std::fs::create_dir(&kept).unwrap();
        std::fs::create_dir(&shown).unwrap();
        (Self::mount(&kept, &shown), shown)
    }

    /// From now on nothing is answered, or everything is.
    pub fn hang(&self, hangs: bool) {
        self.hangs.store(hangs, Ordering::SeqCst);
    }

    pub fn hangs(&self) -> bool {
        self.hangs.load(Ordering::SeqCst)
    }
}

impl Drop for Mirror {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::SeqCst);
        let _ = self.server.take().unwrap().join();
        let _ = umount2(&self.place, MntFlags::MNT_DETACH);
    }
}

fn serve(mut device: File, nodes: &mut Nodes, hangs: &AtomicBool, ends: &AtomicBool) {
    let mut bytes = vec![0; 1 << 18];
    while !ends.load(Ordering::SeqCst) {
        // What was not read does not keep whoever asked from being killed.
        if hangs.load(Ordering::SeqCst) {
            std::thread::sleep(Duration::from_millis(10));
            continue;
        }
        let mut ready = [PollFd::new(device.as_fd(), PollFlags::POLLIN)];
        if poll(&mut ready, 10_u8).unwrap_or(0) == 0 {
            continue;
        }
        let Ok(length) = device.read(&mut bytes) else { continue };
        let request = Request(&bytes[..length]);
        let Some(outcome) = nodes.answer(&request) else { continue };
        let (error, body) = match outcome {
            Ok(body) => (0, body),
            Err(error) => (-error.raw_os_error().unwrap_or(libc::EIO), Vec::new()),
        };
        let mut answer = u32::try_from(16 + body.len()).unwrap().to_le_bytes().to_vec();
        answer.extend(error.to_le_bytes());
        answer.extend(&request.0[8..16]);
        answer.extend(body);
        // Whoever asked may have gone.
        let _ = device.write_all(&answer);
    }
}

/// What the kernel asks: `struct fuse_in_header`, and what belongs to the kind of request.
struct Request<'r>(&'r [u8]);

impl Request<'_> {
    /// Bytes of the header.
    const HEADER: usize = 40;

    fn kind(&self) -> u32 {
        u32::from_le_bytes(self.0[4..8].try_into().unwrap())
    }

    fn node(&self) -> u64 {
        u64::from_le_bytes(self.0[16..24].try_into().unwrap())
    }

    /// A number behind the header.
    fn short(&self, at: usize) -> u32 {
        let at = Self::HEADER + at;
        u32::from_le_bytes(self.0[at..at + 4].try_into().unwrap())
    }

    /// A large number behind the header.
    fn long(&self, at: usize) -> u64 {
        let at = Self::HEADER + at;
        u64::from_le_bytes(self.0[at..at + 8].try_into().unwrap())
    }

    /// The names behind so many bytes.
    fn names(&self, at: usize) -> impl Iterator<Item = &OsStr> {
        self.0[Self::HEADER + at..].split(|byte| *byte == 0).map(OsStr::from_bytes)
    }

    fn name(&self, at: usize) -> &OsStr {
        self.names(at).next().unwrap()
    }
}

/// What the kernel knows by a number, which is the inode's own.
struct Node {
    /// Opened to be reached only.
    itself: File,
    /// How often the kernel was told of it.
    lookups: u64,
}

struct Nodes(BTreeMap<u64, Node>);

impl Nodes {
    /// Where a node can be reached, whatever its name is now.
    fn path(&self, node: u64) -> io::Result<PathBuf> {
        let node = self.0.get(&node).ok_or_else(|| io::Error::from_raw_os_error(libc::ESTALE))?;
        Ok(format!("/proc/self/fd/{}", node.itself.as_raw_fd()).into())
    }

    fn forget(&mut self, node: u64, lookups: u64) {
        if let Some(known) = self.0.get_mut(&node) {
            known.lookups = known.lookups.saturating_sub(lookups);
            if known.lookups == 0 && node != ROOT {
                self.0.remove(&node);
            }
        }
    }

    /// `struct fuse_entry_out` of what is at `path`, valid for no time.
    fn entry(&mut self, path: &Path) -> io::Result<Vec<u8>> {
        let itself = reach(path)?;
        let found = itself.metadata()?;
        self.0.entry(found.ino()).or_insert(Node { itself, lookups: 0 }).lookups += 1;
        let mut entry = [found.ino(), 0, 0, 0, 0].map(u64::to_le_bytes).concat();
        entry.extend(attributes(found.ino(), &found));
        Ok(entry)
    }

    /// `struct fuse_attr_out`, valid for no time.
    fn attributes(&self, node: u64) -> io::Result<Vec<u8>> {
        let found = self.path(node)?.metadata()?;
        Ok([vec![0; 16], attributes(node, &found)].concat())
    }

    /// What is answered, if anything is.
    fn answer(&mut self, request: &Request<'_>) -> Option<io::Result<Vec<u8>>> {
        match request.kind() {
            // FORGET, INTERRUPT, BATCH_FORGET
            2 => self.forget(request.node(), request.long(0)),
            36 => {}
            42 => {
                for at in 0..request.short(0) as usize {
                    self.forget(request.long(8 + 16 * at), request.long(16 + 16 * at));
                }
            }
            _ => return Some(self.done(request)),
        }
        None
    }

    fn done(&mut self, request: &Request<'_>) -> io::Result<Vec<u8>> {
        let node = request.node();
        let path = self.path(node);
        match request.kind() {
            // LOOKUP
            1 => self.entry(&path?.join(request.name(0))),
            // GETATTR
            3 => self.attributes(node),
            // SETATTR
            4 => {
                change(&path?, request)?;
                self.attributes(node)
            }
            // MKDIR
            9 => {
                let made = path?.join(request.name(8));
                std::fs::create_dir(&made)?;
                self.entry(&made)
            }
            // UNLINK
            10 => std::fs::remove_file(path?.join(request.name(0))).map(|()| Vec::new()),
            // RENAME, RENAME2
            kind @ (12 | 45) => {
                let mut names = request.names(if kind == 12 { 8 } else { 16 });
                let from = path?.join(names.next().unwrap());
                let to = self.path(request.long(0))?.join(names.next().unwrap());
                std::fs::rename(from, to).map(|()| Vec::new())
            }
            // OPEN, OPENDIR
            14 | 27 => Ok(vec![0; 16]),
            // READ
            15 => {
                let mut bytes = vec![0; request.short(16) as usize];
                let length = File::open(path?)?.read_at(&mut bytes, request.long(8))?;
                bytes.truncate(length);
                Ok(bytes)
            }
            // WRITE
            16 => {
                let bytes = &request.0[Request::HEADER + 40..][..request.short(16) as usize];
                OpenOptions::new().write(true).open(path?)?.write_all_at(bytes, request.long(8))?;
                Ok([request.short(16), 0].map(u32::to_le_bytes).concat())
            }
            // STATFS
            17 => {
                let found = statvfs(&path?)?;
                let blocks = [found.blocks(), found.blocks_free(), found.blocks_available()];
                let mut all = blocks.map(u64::to_le_bytes).concat();
                all.extend([found.files(), found.files_free()].map(u64::to_le_bytes).concat());
                all.extend([found.block_size(), found.name_max()].map(narrow).concat());
                all.extend(narrow(found.fragment_size()));
                all.resize(80, 0);
                Ok(all)
            }
            // RELEASE, FSYNC, RELEASEDIR, FSYNCDIR, DESTROY: what is written is there at once.
            18 | 20 | 29 | 30 | 38 => Ok(Vec::new()),
            // INIT: protocol 7.31
            26 => {
                let mut body = [7, 31, 0, 0, 16 << 16 | 16, LARGEST, 1].map(u32::to_le_bytes).concat();
                body.resize(64, 0);
                Ok(body)
            }
            // READDIR
            28 => list(&path?, request.long(8), request.short(16) as usize),
            // CREATE
            35 => {
                let made = path?.join(request.name(16));
                let flags = OFlag::from_bits_truncate(request.short(0).cast_signed());
                let mut options = OpenOptions::new();
                options.write(true).mode(request.short(4) & 0o777);
                options.create(true).create_new(flags.contains(OFlag::O_EXCL)).open(&made)?;
                Ok([self.entry(&made)?, vec![0; 16]].concat())
            }
            _ => Err(io::Error::from_raw_os_error(libc::ENOSYS)),
        }
    }
}

/// Opens what is at `path`, and is no link, to reach it.
fn reach(path: &Path) -> io::Result<File> {
    let flags = OFlag::O_PATH | OFlag::O_NOFOLLOW;
    OpenOptions::new().read(true).custom_flags(flags.bits()).open(path)
}

fn narrow(number: u64) -> [u8; 4] {
    u32::try_from(number).unwrap().to_le_bytes()
}

/// `struct fuse_attr`
fn attributes(node: u64, found: &Metadata) -> Vec<u8> {
    let mut all = [node, found.len(), found.blocks()].map(u64::to_le_bytes).concat();
    all.extend([found.atime(), found.mtime(), found.ctime()].map(i64::to_le_bytes).concat());
    let links = u32::try_from(found.nlink()).unwrap();
    let whole = [0, 0, 0, found.mode(), links, found.uid(), found.gid(), 0, 4096, 0];
    all.extend(whole.map(u32::to_le_bytes).concat());
    all
}

/// Does what `struct fuse_setattr_in` asks, but for times.
fn change(path: &Path, request: &Request<'_>) -> io::Result<()> {
    let wanted = |bit: u32| request.short(0) & bit != 0;
    if wanted(1) {
        std::fs::set_permissions(path, Permissions::from_mode(request.short(68) & 0o7777))?;
    }
    if wanted(2 | 4) {
        let (user, group) = (request.short(76), request.short(80));
        chown(path, wanted(2).then_some(user), wanted(4).then_some(group))?;
    }
    if wanted(8) {
        OpenOptions::new().write(true).open(path)?.set_len(request.long(16))?;
    }
    Ok(())
}

/// `struct fuse_dirent`s from that number on, in at most so many bytes.
fn list(path: &Path, from: u64, most: usize) -> io::Result<Vec<u8>> {
    let entries: io::Result<Vec<_>> = std::fs::read_dir(path)?.collect();
    let mut entries = entries?;
    entries.sort_by_key(std::fs::DirEntry::file_name);
    let mut all = Vec::new();
    for (at, entry) in (1_u64..).zip(entries).skip(usize::try_from(from).unwrap()) {
        let name = entry.file_name();
        let mut one = [entry.metadata()?.ino(), at].map(u64::to_le_bytes).concat();
        one.extend([u32::try_from(name.len()).unwrap(), 0].map(u32::to_le_bytes).concat());
        one.extend(name.as_bytes());
        one.resize(one.len().next_multiple_of(8), 0);
        if all.len() + one.len() > most {
            break;
        }
        all.extend(one);
    }
    Ok(all)
}
