//! Block devices as sysfs lays them out: where a device is in the tree, what it is made of, what drives it.
//!
//! A device is named by its place below /sys/devices, with every link followed, such as
//! `/sys/devices/pci0000:00/0000:00:06.0/virtio3/block/vda/vda1`.

use std::io;
use std::path::Path;

use crate::sys::root::Root;

/// Major and minor number.
pub type Number = (u32, u32);

const BY_NUMBER: &str = "/sys/dev/block";
const DISKS: &str = "/sys/block";

/// Returns the sysfs path of the device with this number.
///
/// # Errors
/// `NotFound` if there is no such device, as in a container that has no /sys of its own.
pub fn place(root: &Root, (major, minor): Number) -> io::Result<String> {
    let link = std::fs::read_link(root.path(&format!("{BY_NUMBER}/{major}:{minor}")))?;
    target(BY_NUMBER, &link)
}

/// The whole disks, by name, in the kernel's order.
///
/// # Errors
/// If there is no list of them.
pub fn disks(root: &Root) -> io::Result<Vec<String>> {
    names(root, DISKS, std::fs::FileType::is_symlink)
}

/// Returns the sysfs path of the whole disk called `name`.
///
/// # Errors
/// `NotFound` if there is no such disk.
pub fn disk_place(root: &Root, name: &str) -> io::Result<String> {
    target(DISKS, &std::fs::read_link(root.path(&format!("{DISKS}/{name}")))?)
}

/// Returns the sysfs paths of the devices that the one at `place` is made of, in the kernel's order; `None` if
/// the kernel does not list them.
///
/// # Errors
/// The errors of opendir(3) and readlink(2), except for a missing list.
pub fn parts(root: &Root, place: &str) -> io::Result<Option<Vec<String>>> {
    let folder = format!("{place}/slaves");
    let names = match names(root, &folder, std::fs::FileType::is_symlink) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        names => names?,
    };
    let part = |name: &String| target(&folder, &std::fs::read_link(root.path(&format!("{folder}/{name}")))?);
    names.iter().map(part).collect::<io::Result<_>>().map(Some)
}

/// Returns the name of the driver of the device at `place`, such as `virtio-pci`; `None` if it has no driver.
pub fn driver(root: &Root, place: &str) -> Option<String> {
    let link = std::fs::read_link(root.path(&format!("{place}/driver"))).ok()?;
    Some(link.file_name()?.to_str()?.to_owned())
}

/// Returns the sysfs path of the controller of a disk that the kernel lists apart from its controllers, as it
/// does with NVMe disks that may have several; `None` for every other disk.
pub fn controller(root: &Root, place: &str) -> Option<String> {
    let (before, after) = place.split_once("/nvme-subsystem/")?;
    let subsystem = format!("{before}/nvme-subsystem/{}", after.split('/').next()?);
    let mut controllers = names(root, &subsystem, std::fs::FileType::is_symlink).ok()?;
    controllers.retain(|name| {
        let number = name.strip_prefix("nvme").unwrap_or_default();
        !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit())
    });
    let first = controllers.into_iter().min()?;
    target(&subsystem, &std::fs::read_link(root.path(&format!("{subsystem}/{first}"))).ok()?).ok()
}

/// Returns the numbers of the entries of the directory `folder` whose names are `name` followed by a number,
/// sorted; empty if the directory cannot be read.
pub fn numbered(root: &Root, folder: &str, name: &str) -> Vec<u32> {
    let names = names(root, folder, |_| true).unwrap_or_default();
    let mut numbers: Vec<_> =
        names.iter().filter_map(|entry| entry.strip_prefix(name)?.parse().ok()).collect();
    numbers.sort_unstable();
    numbers
}

/// A partition as the kernel has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Partition {
    /// Kernel name, such as `vda1`.
    pub name: String,
    /// Index in the disk's partition table: 1, 2, 3, …
    pub index: u32,
    /// Device number (major and minor).
    pub number: Number,
    /// Offset of its first byte on the disk.
    pub start: u64,
    /// Size in bytes.
    pub bytes: u64,
}

/// Unit in which the kernel reports sizes, in bytes, whatever the sector size of the disk is.
const SECTOR: u64 = 512;

/// The size of the device at `place`, in bytes.
pub fn bytes(root: &Root, place: &str) -> u64 {
    let sectors: u64 = root.line(&format!("{place}/size")).parse().unwrap_or_default();
    sectors.saturating_mul(SECTOR)
}

/// The partitions of the disk at `place`, in the order of their table.
pub fn partitions(root: &Root, place: &str) -> Vec<Partition> {
    let disk = name(place);
    let mut partitions: Vec<_> = names(root, place, std::fs::FileType::is_dir)
        .unwrap_or_default()
        .into_iter()
        .filter(|name| name.starts_with(disk))
        .filter_map(|name| {
            let place = format!("{place}/{name}");
            let start: u64 = root.line(&format!("{place}/start")).parse().unwrap_or_default();
            Some(Partition {
                index: root.line(&format!("{place}/partition")).parse().ok()?,
                number: number(root, &place)?,
                start: start.saturating_mul(SECTOR),
                bytes: bytes(root, &place),
                name,
            })
        })
        .collect();
    partitions.sort_unstable_by_key(|partition| partition.index);
    partitions
}

/// The names of the devices that are made of the one at `place`, such as `dm-0`, sorted.
pub fn holders(root: &Root, place: &str) -> Vec<String> {
    let mut holders = names(root, &format!("{place}/holders"), |_| true).unwrap_or_default();
    holders.sort_unstable();
    holders
}

/// The number of the device at `place`.
pub fn number(root: &Root, place: &str) -> Option<Number> {
    let line = root.line(&format!("{place}/dev"));
    let (major, minor) = line.split_once(':')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

/// Tells the device at `place` from one that is there at another time: the kernel numbers the nodes of sysfs and
/// takes no number twice.
pub fn generation(root: &Root, place: &str) -> Option<u64> {
    use std::os::unix::fs::MetadataExt as _;

    std::fs::metadata(root.path(place)).ok().map(|folder| folder.ino())
}

/// The kernel's number of the whole disk at `place`, which no other disk, nor another medium in its drive, has until the
/// next boot; none where the kernel has no such numbers (Linux before 5.15).
pub fn sequence(root: &Root, place: &str) -> Option<u64> {
    root.line(&format!("{place}/diskseq")).parse().ok()
}

/// Returns whether the device exists in the kernel only: it is built on other devices, on a file, or on
/// memory.
pub fn is_virtual(place: &str) -> bool {
    place.contains("/devices/virtual/block/")
}

/// The last part of a device's place, such as `vda1`.
pub fn name(place: &str) -> &str {
    place.rsplit('/').next().unwrap_or_default()
}

/// The path of the device's file, such as `/dev/vda1`.
pub fn file(name: &str) -> String {
    // sysfs writes the slash of names such as cciss/c0d0 in another way.
    format!("/dev/{}", name.replace('!', "/"))
}

/// Returns the sysfs path of the whole disk that the device at `place` is, or is a partition of.
pub fn whole(place: &str) -> &str {
    match place.rsplit_once('/') {
        Some((above, partition)) if disk_of(partition) == Some(name(above)) => above,
        _ => place,
    }
}

/// The name of the disk that a partition of this name would be of: the kernel puts a `p` before the number where
/// the disk's name ends with a digit. A disk may have such a name, too.
pub fn disk_of(partition: &str) -> Option<&str> {
    let before = partition.trim_end_matches(|last: char| last.is_ascii_digit());
    let ends_with_digit = |disk: &str| disk.ends_with(|last: char| last.is_ascii_digit());
    match before.strip_suffix('p').filter(|disk| ends_with_digit(disk)) {
        _ if before.len() == partition.len() => None,
        Some(disk) => Some(disk),
        None => Some(before).filter(|disk| !disk.is_empty()),
    }
}

/// A line of /proc/partitions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sized {
    /// Device number (major and minor).
    pub number: Number,
    /// Name in sysfs, where `!` stands for a slash.
    pub name: String,
}

/// Parses /proc/partitions, which lists the disks and partitions that have a size. Lines of another form are
/// skipped.
pub fn parse_partitions(file: &str) -> Vec<Sized> {
    let line = |line: &str| {
        let mut fields = line.split_ascii_whitespace();
        let number = (fields.next()?.parse().ok()?, fields.next()?.parse().ok()?);
        let _blocks: u64 = fields.next()?.parse().ok()?;
        Some(Sized { number, name: fields.next()?.replace('/', "!") })
    };
    file.lines().filter_map(line).collect()
}

/// Returns the names of the entries of a directory whose type is `wanted`.
fn names(root: &Root, folder: &str, wanted: fn(&std::fs::FileType) -> bool) -> io::Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in std::fs::read_dir(root.path(folder))? {
        let entry = entry?;
        if wanted(&entry.file_type()?)
            && let Ok(name) = entry.file_name().into_string()
        {
            names.push(name);
        }
    }
    Ok(names)
}

/// Returns the absolute path that a symbolic link in `folder` points to.
fn target(folder: &str, link: &Path) -> io::Result<String> {
    let link = link.to_str().ok_or(io::ErrorKind::InvalidData)?;
    Ok(follow(folder, link))
}

/// Resolves `link`, relative to `folder`, without looking at the file system: `.` and `..` are removed.
pub fn follow(folder: &str, link: &str) -> String {
    let mut path = if link.starts_with('/') { String::new() } else { folder.to_owned() };
    for part in link.split('/') {
        match part {
            "" | "." => {}
            ".." => path.truncate(path.rfind('/').unwrap_or_default()),
            part => {
                path.push('/');
                path.push_str(part);
            }
        }
    }
    path
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn links_are_followed() {
        let link = "../../devices/pci0000:00/0000:00:02.0/virtio1/block/vda";
        let vda = "/sys/devices/pci0000:00/0000:00:02.0/virtio1/block/vda";
        assert_eq!(follow("/sys/dev/block", link), vda);
        assert_eq!(follow("/sys/dev", "/a/./b/../c"), "/a/c");
        assert_eq!(follow("/a", "../../../b"), "/b");
    }

    #[test]
    fn partitions_are_told_from_disks() {
        for (partition, disk) in [
            ("sda1", Some("sda")),
            ("vda15", Some("vda")),
            ("nvme0n1p1", Some("nvme0n1")),
            ("md0p12", Some("md0")),
            ("cciss!c0d0p1", Some("cciss!c0d0")),
            ("sdp1", Some("sdp")),
            ("vda", None),
            ("12", None),
            ("", None),
        ] {
            assert_eq!(disk_of(partition), disk, "{partition}");
        }
        assert_eq!(whole("/sys/x/block/vda/vda1"), "/sys/x/block/vda");
        assert_eq!(whole("/sys/x/nvme/nvme0/nvme0n1"), "/sys/x/nvme/nvme0/nvme0n1");
        assert_eq!(file("cciss!c0d0"), "/dev/cciss/c0d0");
    }

    #[test]
    fn captured_partitions() {
        let text =
            "major minor  #blocks  name\n\n 254        0  268435456 vda\n 104        0   10 cciss/c0d0\nx\n";
        let sized = |number, name: &str| Sized { number, name: name.to_owned() };
        assert_eq!(parse_partitions(text), [sized((254, 0), "vda"), sized((104, 0), "cciss!c0d0")]);
    }

    proptest! {
        #[test]
        fn any_text_will_do(folder: String, text: String) {
            prop_assert!(follow(&folder, &text).len() <= folder.len() + text.len() + 1);
            prop_assert!(parse_partitions(&text).len() <= text.len());
            prop_assert!(place_is_whole(&text));
        }
    }

    fn place_is_whole(place: &str) -> bool {
        place.starts_with(whole(place)) && place.ends_with(name(place))
    }
}
