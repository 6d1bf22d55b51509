//! Mounts of the system, `proc_pid_mountinfo(5)`: the list, its parser, and notifications of changes.

use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::ffi::OsStringExt as _;
use std::path::PathBuf;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::unistd::{Whence, lseek, read};
use tokio::io::Interest;

use crate::sys::descriptor::wait;
use crate::sys::root::Root;

/// Number of times that the list is read because it changed meanwhile.
const TRIES: usize = 3;

/// Suffix that the kernel adds to the root of a mount whose file or directory was removed.
pub const REMOVED: &str = "//deleted";

/// One mount; a line of the file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mount {
    /// Mount ID in this mount namespace; may be reused after the unmount.
    pub id: u64,
    /// Major and minor number; the major number is 0 where there is no block device, or several.
    pub device: (u32, u32),
    /// Root of the mount in its file system: `/`, or a directory of it.
    pub root: String,
    /// Mount point as text; bytes that are not UTF-8 are replaced by `\u{fffd}`.
    pub mount_point: String,
    /// The same to the letter, for the kernel.
    pub path: PathBuf,
    /// File system type, such as `ext4` or `fuse.sshfs`.
    pub kind: String,
    /// Source of the mount, such as `/dev/vda1`.
    pub source: String,
    /// The options of the file system, separated by commas, such as `rw,upperdir=/var/upper`.
    pub options: String,
    /// The options of this mount of it, separated by commas, such as `ro,nosuid`.
    pub flags: String,
}

impl Mount {
    /// The file of a device that a btrfs was mounted from, such as `/dev/vdb`; `None` for other kinds of file systems.
    /// A btrfs has a number of its own, and may be on other devices, too ([`BlockStack`]).
    ///
    /// [`BlockStack`]: crate::sys::block_stack::BlockStack
    pub fn btrfs_source(&self) -> Option<&str> {
        (self.device.0 == 0 && self.kind == "btrfs").then_some(&*self.source)
    }

    /// Returns whether this mount has the per-mount option `flag`, such as `ro`.
    pub fn has_flag(&self, flag: &str) -> bool {
        self.flags.split(',').any(|one| one == flag)
    }
}

/// Parses the list and returns the mounts in its order. Lines of another form are skipped.
pub fn parse(file: &[u8]) -> Vec<Mount> {
    file.split(|byte| *byte == b'\n').filter_map(line).collect()
}

/// `36 35 98:0 /root /mount/point rw,noatime master:1 … - ext3 /dev/root rw`
fn line(line: &[u8]) -> Option<Mount> {
    let mut fields = line.split(|byte| *byte == b' ');
    let id = std::str::from_utf8(fields.next()?).ok()?.parse().ok()?;
    let (major, minor) = std::str::from_utf8(fields.nth(1)?).ok()?.split_once(':')?;
    let (root, mount_point) = (fields.next()?, fields.next()?);
    // The options of the mount, then any number of optional fields up to the dash.
    let flags = fields.next()?;
    fields.find(|field| *field == b"-")?;
    let (kind, source) = (fields.next()?, fields.next()?);
    Some(Mount {
        id,
        device: (major.parse().ok()?, minor.parse().ok()?),
        root: unescape(root),
        mount_point: unescape(mount_point),
        path: OsString::from_vec(unescape_bytes(mount_point)).into(),
        kind: unescape(kind),
        source: unescape(source),
        options: unescape(fields.next().unwrap_or_default()),
        flags: unescape(flags),
    })
}

/// Undoes the kernel's `\ooo`, three octal digits, for white space and the backslash.
pub fn unescape(field: &[u8]) -> String {
    String::from_utf8(unescape_bytes(field))
        .unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned())
}

fn unescape_bytes(field: &[u8]) -> Vec<u8> {
    let mut plain = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((first, after)) = rest.split_first() {
        if let [b'\\', a @ b'0'..=b'3', b @ b'0'..=b'7', c @ b'0'..=b'7', after @ ..] = rest {
            plain.push(((a - b'0') << 6) | ((b - b'0') << 3) | (c - b'0'));
            rest = after;
        } else {
            plain.push(*first);
            rest = after;
        }
    }
    plain
}

/// The list of what is mounted in the mount namespace of this process.
#[derive(Debug)]
pub struct MountList(OwnedFd);

impl MountList {
    /// Watches for all changes from now on.
    ///
    /// # Errors
    /// If there is no such list.
    pub fn open(root: &Root) -> io::Result<Self> {
        Ok(Self(std::fs::File::open(root.path("/proc/self/mountinfo"))?.into()))
    }

    /// Waits until something is mounted, unmounted or remounted. All changes up to then count as one.
    ///
    /// # Errors
    /// If the list is not a file of the kernel.
    pub async fn changed(&self) -> io::Result<()> {
        wait(self.0.as_fd(), Interest::PRIORITY).await
    }

    /// Returns whether there was a change since the last one that was reported.
    ///
    /// # Errors
    /// The errors of poll(2).
    pub fn has_changed(&self) -> io::Result<bool> {
        let mut files = [PollFd::new(self.0.as_fd(), PollFlags::POLLPRI)];
        match poll(&mut files, PollTimeout::ZERO) {
            // The file is always readable, so that its being ready says nothing yet.
            Ok(_) => Ok(files[0].revents().is_some_and(|events| events.contains(PollFlags::POLLPRI))),
            Err(Errno::EINTR) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    /// Reads the current mounts.
    ///
    /// # Errors
    /// The errors of lseek(2) and read(2).
    pub fn read(&self) -> io::Result<Vec<Mount>> {
        let mut bytes = Vec::new();
        for attempt in 1.. {
            self.read_once(&mut bytes)?;
            // The kernel returns the list in parts, and it may change in between. After the last attempt the change stays
            // pending, and is reported by the next poll.
            if attempt == TRIES || !self.has_changed()? {
                break;
            }
        }
        Ok(parse(&bytes))
    }

    fn read_once(&self, bytes: &mut Vec<u8>) -> io::Result<()> {
        let file = &self.0;
        bytes.clear();
        lseek(file, 0, Whence::SeekSet)?;
        let mut part = [0; 8192];
        loop {
            match read(file, &mut part) {
                Ok(0) => return Ok(()),
                Ok(length) => bytes.extend_from_slice(part.get(..length).unwrap_or_default()),
                Err(Errno::EINTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// From a Debian 12 guest and the manual page, with an odd one added.
    const CAPTURED: &[u8] = b"\
22 27 0:21 / /proc rw,nosuid,nodev,noexec,relatime shared:14 - proc proc rw\n\
27 1 254:1 / / rw,relatime shared:1 - ext4 /dev/vda1 rw,discard,errors=remount-ro\n\
36 35 98:0 /mnt1 /mnt\\0402\\134 rw,noatime master:1 propagate_from:2 unbindable - fuse.sshfs me@host:/a\\011b rw\n\
40 27 0:50 / /empty rw - tmpfs  rw\n\
broken\n41 27 0:50 / /no-dash rw tmpfs x rw\n42 27 0: / /no-minor rw - tmpfs x rw\n";

    fn mount(id: u64, device: (u32, u32), [root, mount_point, kind, source]: [&str; 4]) -> Mount {
        Mount {
            id,
            device,
            root: root.to_owned(),
            mount_point: mount_point.to_owned(),
            path: mount_point.into(),
            kind: kind.to_owned(),
            source: source.to_owned(),
            options: if id == 27 { "rw,discard,errors=remount-ro" } else { "rw" }.to_owned(),
            flags: match id {
                22 => "rw,nosuid,nodev,noexec,relatime",
                27 => "rw,relatime",
                36 => "rw,noatime",
                _ => "rw",
            }
            .to_owned(),
        }
    }

    #[test]
    fn captured_list() {
        assert_eq!(
            parse(CAPTURED),
            [
                mount(22, (0, 21), ["/", "/proc", "proc", "proc"]),
                mount(27, (254, 1), ["/", "/", "ext4", "/dev/vda1"]),
                mount(36, (98, 0), ["/mnt1", "/mnt 2\\", "fuse.sshfs", "me@host:/a\tb"]),
                mount(40, (0, 50), ["/", "/empty", "tmpfs", ""]),
            ]
        );
    }

    #[test]
    fn a_path_that_is_no_text_is_kept_to_the_letter() {
        let mounts = parse(b"50 27 7:1 / /mnt/caf\xe9\\040x rw - ext4 /dev/loop1 rw\n");
        assert_eq!(mounts[0].mount_point, "/mnt/caf\u{fffd} x");
        assert_eq!(mounts[0].path.as_os_str().as_encoded_bytes(), b"/mnt/caf\xe9 x");
    }

    #[tokio::test]
    async fn the_list_of_this_machine_begins_with_the_same_mounts_every_time() {
        let list = MountList::open(&Root::default()).unwrap();
        let mounts = list.read().unwrap();
        assert!(mounts.iter().any(|mount| mount.mount_point == "/"));
        assert_eq!(list.read().unwrap(), mounts);
    }

    /// As the kernel does.
    fn escape(text: &str) -> String {
        let escape = |character: char| match character {
            ' ' | '\t' | '\n' | '\\' | '#' => format!("\\{:03o}", u32::from(character)),
            other => other.to_string(),
        };
        text.chars().map(escape).collect::<Vec<_>>().concat()
    }

    proptest! {
        #[test]
        fn what_the_kernel_escapes_comes_back(
            texts in prop::array::uniform4("\\PC*[ \t\n\\\\#]?\\PC*"),
            device: (u32, u32),
            optional in prop::collection::vec("(shared|master):[0-9]{1,4} ", 0..4),
        ) {
            let [root, mount_point, kind, source] = texts.each_ref().map(|text| escape(text));
            let optional = optional.concat();
            let (major, minor) = device;
            let line = format!("1 2 {major}:{minor} {root} {mount_point} rw {optional}- {kind} {source} rw\n");
            prop_assert_eq!(parse(line.as_bytes()), [mount(1, device, texts.each_ref().map(String::as_str))]);
        }

        #[test]
        fn any_bytes_will_do(bytes: Vec<u8>) {
            prop_assert!(parse(&bytes).len() <= bytes.len());
        }
    }
}
