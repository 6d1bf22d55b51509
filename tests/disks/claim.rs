//! Who claims a disk, and who has it open.

use std::io::BufRead as _;
use std::os::fd::AsFd as _;
use std::path::Path;

use guestlet::guest::disks::identity::KnownDisk;
use guestlet::guest::disks::openers;
use guestlet::sys::block_device::{self, claim, flush};

use crate::lab::{Lab, enter, run};

/// Other tests look for free loop devices meanwhile, and open all of them for that.
fn who(lab: &Lab, disk: &KnownDisk) -> Vec<String> {
    let all = openers::of(&lab.guest.root, disk).unwrap();
    all.iter().map(ToString::to_string).filter(|one| !one.starts_with("losetup (")).collect()
}

#[test]
fn a_claimed_disk_is_not_mounted_and_a_mounted_one_not_claimed() {
    let Some(lab) = enter() else { return };
    let (disk, folder) = (lab.disk("disk", 16), lab.folder("mnt"));
    run(&format!("mke2fs -q {}", disk.name()));
    let mount = format!("mount {} {}", disk.name(), folder.display());
    let held = claim(&disk.device).unwrap();
    flush(held.as_fd()).unwrap();
    run(&format!("! {mount} 2> /dev/null"));
    drop(held);
    run(&mount);
    assert_eq!(claim(&disk.device).unwrap_err().raw_os_error(), Some(16));
    run(&format!("umount {}", folder.display()));
    claim(&disk.device).unwrap();
    assert!(claim(&folder).is_err());
}

#[test]
fn who_has_a_disk_open_is_named_under_whatever_name() {
    let Some(lab) = enter() else { return };
    let disk = lab.disk("disk", 16);
    let known = disk.known("");
    assert_eq!(block_device::number_at(&disk.device), Some(known.number));
    assert_eq!(block_device::number_at(Path::new("/dev/null")), None);
    assert_eq!(block_device::number_at(Path::new("/nothing")), None);
    // This process does not count.
    let _own = std::fs::File::open(&disk.device).unwrap();
    assert_eq!(who(&lab, &known), [""; 0]);
    // As a container has it.
    let node = lab.path("xvda");
    run(&format!("mknod {} b {} {}", node.display(), known.number.0, known.number.1));
    let mut reader = std::process::Command::new("sleep")
        .arg("1000")
        .stdin(std::fs::File::open(&node).unwrap())
        .spawn()
        .unwrap();
    let other = run(&format!("losetup --find --show {}", node.display()));
    let found = who(&lab, &known);
    reader.kill().unwrap();
    reader.wait().unwrap();
    run(&format!("losetup --detach {other}"));
    let name = other.trim_start_matches("/dev/");
    let node = node.display();
    let reader = format!("sleep (process {}) has {node} open", reader.id());
    assert_eq!(found, [format!("{name} is built on {node}"), reader]);
}

#[test]
fn a_mount_in_another_namespace_is_found() {
    let Some(lab) = enter() else { return };
    let (disk, folder) = (lab.disk("disk", 16), lab.folder("mnt"));
    run(&format!("mke2fs -q {}", disk.name()));
    let known = disk.known("");
    let work = format!("mount {} {} && echo mounted && exec sleep 1000", disk.name(), folder.display());
    let mut other = std::process::Command::new("unshare")
        .args(["--mount", "sh", "-ec", &work])
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    std::io::BufReader::new(other.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let claimed = claim(&disk.device);
    let found = openers::mounts_elsewhere(&lab.guest.root, &known).unwrap();
    other.kill().unwrap();
    other.wait().unwrap();
    assert_eq!((line.as_str(), claimed.unwrap_err().raw_os_error()), ("mounted\n", Some(16)));
    let words: Vec<_> = found.iter().map(ToString::to_string).collect();
    let place = folder.display();
    let expected = format!("mounted at {place} in the mount namespace of ");
    assert!(words.len() == 1 && words[0].starts_with(&expected), "{words:?}");
}
