//! File systems: beside Debian's qemu-ga in a mount namespace with loop devices, and trimming over a machine that
//! is not there.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use guestlet::guest::Guest;
use guestlet::guest::file_systems::{NotTrimmed, trim};
use guestlet::sys::effects::{Effects, Trimmed};
use nix::errno::Errno;
use serde_json::{Value, json};

use crate::agent::Agent;
use crate::beside_qemu_ga::both;
use crate::disks::{guest, without_own_serials};
use crate::namespace::{is_outside, run};

/// What both say of a file system, where nobody else uses it; of others what does not change meanwhile.
fn steady(mut file_systems: Value, folder: &str) -> Value {
    for entry in file_systems.as_array_mut().unwrap() {
        let ours = entry["mountpoint"].as_str().unwrap().starts_with(folder);
        let entry = entry.as_object_mut().unwrap();
        // Newer than the qemu-ga that is compared with.
        entry.remove("total-bytes-privileged");
        if !ours {
            entry.remove("used-bytes");
            entry.remove("total-bytes");
        }
    }
    file_systems
}

#[test]
fn file_systems_agree_with_qemu_ga() {
    if is_outside() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path().to_str().unwrap();
    run(&format!(
        "mount -t tmpfs tmpfs {at}; cd {at}; mkdir 'a b' 'c\\d' e f; \
         for disk in 1 2; do truncate -s 8M disk$disk; mkfs.ext4 -q disk$disk; done; \
         mount -o loop disk1 'a b'; mount -o loop,ro disk2 'c\\d'; mount --bind 'a b' e; mount -t tmpfs x f"
    ));
    let (ours, theirs) = both();
    let theirs = steady(theirs.client().call("guest-get-fsinfo"), at);
    let ours = ours.client().call("guest-get-fsinfo");
    let told: Vec<_> =
        ours.as_array().unwrap().iter().map(|entry| entry["mountpoint"].as_str().unwrap()).collect();
    assert_eq!(told[..3], [format!("{at}/e"), format!("{at}/c\\d"), format!("{at}/a b")]);
    let first = &ours[0];
    assert!(first["total-bytes-privileged"].as_u64() > first["total-bytes"].as_u64(), "{first}");
    assert!(first["name"].as_str().unwrap().starts_with("loop"), "{first}");
    assert_eq!(first["disk"], json!([]));
    assert_eq!(without_own_serials(steady(ours, at), &theirs), theirs);
    run(&format!("cd /; umount {at}/e {at}/a* {at}/c* {at}/f"));
}

#[test]
fn a_thousand_mounts_are_told_in_order() {
    if is_outside() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path().to_str().unwrap();
    run(&format!(
        "mount -t tmpfs tmpfs {at}; cd {at}; truncate -s 8M disk; mkfs.ext4 -q disk; mkdir origin; \
         mount -o loop disk origin; for number in $(seq 1000); do mkdir $number; \
         echo $PWD/origin $PWD/$number none bind 0 0; done > table; mount -a -T table"
    ));
    let agent = Agent::start();
    let file_systems = agent.client().call("guest-get-fsinfo");
    let told = file_systems.as_array().unwrap();
    for (number, entry) in (1..=1000).rev().zip(told) {
        assert_eq!(entry["mountpoint"], format!("{at}/{number}"));
        assert_eq!((&entry["type"], &entry["disk"]), (&json!("ext4"), &json!([])));
        assert!(entry["used-bytes"].is_u64());
    }
    run(&format!(
        "cd {at}; for number in $(seq 1000); do echo $PWD/$number; done | xargs umount; umount origin"
    ));
}

/// A machine whose file systems answer to FITRIM as it is laid down; it keeps what it was asked.
#[derive(Debug, Default)]
struct Machine {
    answers: Vec<(&'static str, Result<u64, Errno>)>,
    asked: Mutex<Vec<(PathBuf, u64)>>,
}

impl Effects for Machine {
    fn trim(&self, directory: &Path, minimum: u64) -> io::Result<Trimmed> {
        self.asked.lock().unwrap().push((directory.to_owned(), minimum));
        let answer = self.answers.iter().find(|(path, _)| Path::new(path) == directory);
        let bytes = answer.unwrap_or_else(|| panic!("{} is not to be trimmed", directory.display())).1?;
        Ok(Trimmed { bytes, minimum: minimum.max(4096) })
    }
}

#[test]
fn each_file_system_is_trimmed_once_and_each_mount_is_told() {
    let machine = Arc::new(Machine {
        answers: vec![
            ("/", Ok(1 << 20)),
            ("/cd", Err(Errno::ENOTTY)),
            ("/old", Err(Errno::EOPNOTSUPP)),
            ("/broken", Err(Errno::EIO)),
            ("/mnt/a b", Err(Errno::EACCES)),
            ("/mnt/c", Ok(7)),
        ],
        ..Machine::default()
    });
    let mounts = "22 27 0:21 / /proc rw - proc proc rw\\n27 1 254:1 / / rw - ext4 /dev/vda1 rw\\n\
        28 27 11:0 / /cd ro - iso9660 /dev/sr0 ro\\n29 27 8:1 / /old rw - ext3 /dev/sda1 rw\\n\
        30 27 254:1 /srv /srv rw - ext4 /dev/vda1 rw\\n31 27 8:1 / /older rw - ext3 /dev/sda1 rw\\n\
        32 27 0:50 / /mnt/nfs rw - nfs4 server:/ rw\\n33 27 8:2 / /broken rw - xfs /dev/sda2 rw\\n\
        34 27 8:3 / /mnt/a\\\\040b rw - xfs /dev/sda3 rw\\n35 27 8:3 / /mnt/c rw - xfs /dev/sda3 rw\\n";
    let (guest, _folder) = guest(&format!("/proc/self/mountinfo = \"{mounts}\""));
    let guest = Guest { effects: Arc::clone(&machine) as Arc<dyn Effects>, ..guest };
    let trims = trim(&guest, 65536, &[]).unwrap();
    let trimmed = |bytes| Ok(Trimmed { bytes, minimum: 65536 });
    let failed = |errno: Errno| Err(NotTrimmed::Failed(io::Error::from(errno).to_string()));
    let told: Vec<_> = trims.into_iter().map(|trim| (trim.mount_point, trim.outcome)).collect();
    assert_eq!(
        told,
        [
            ("/mnt/c".to_owned(), trimmed(7)),
            ("/mnt/a b".to_owned(), failed(Errno::EACCES)),
            ("/broken".to_owned(), failed(Errno::EIO)),
            ("/older".to_owned(), Err(NotTrimmed::Unsupported)),
            ("/srv".to_owned(), trimmed(0)),
            ("/old".to_owned(), Err(NotTrimmed::Unsupported)),
            ("/cd".to_owned(), Err(NotTrimmed::Unsupported)),
            ("/".to_owned(), trimmed(1 << 20)),
        ]
    );
    let asked = machine.asked.lock().unwrap();
    let asked: Vec<_> = asked.iter().map(|(path, minimum)| (path.to_str().unwrap(), *minimum)).collect();
    let paths = ["/", "/cd", "/old", "/broken", "/mnt/a b", "/mnt/c"];
    assert_eq!(asked, paths.map(|path| (path, 65536)));
}

#[test]
fn a_wrong_minimum_is_named() {
    let agent = Agent::start();
    let mut client = agent.client();
    for (minimum, named) in [
        (json!(-1), "\"minimum\" must not be negative"),
        (json!("1"), "\"minimum\" must be an integer"),
        (json!(u64::MAX), "\"minimum\" must be an integer"),
    ] {
        let answer =
            client.ask(&json!({"execute": "guest-fstrim", "arguments": {"minimum": minimum}}).to_string());
        assert!(answer["error"]["desc"].as_str().unwrap().contains(named), "{minimum}: {answer}");
    }
}
