//! The clients of docs/api that ask guestlet-host for its VMs, and that hold a guest still. The guest's freezes are those of the real
//! agent; what it freezes is a machine of the test's own.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use guestlet::guest::freeze::{Freezer, Settings};
use guestlet::sys::effects::Effects;
use guestlet::sys::mountinfo::Mount;
use guestlet::sys::root::Root;

use crate::clients::Clients;
use crate::guest::{Door, Guest, Manner, info};
use crate::lab::{Lab, assert_fails, text, uuid};

/// A machine with a file system. As soon as that is thawed there is a file.
#[derive(Debug)]
struct Machine {
    frozen: AtomicUsize,
    thawed: PathBuf,
}

impl Effects for Machine {
    fn open_mount(&self, _: &Mount) -> io::Result<OwnedFd> {
        Ok(std::fs::File::open("/dev/null")?.into())
    }

    fn freeze(&self, _: BorrowedFd<'_>) -> io::Result<()> {
        self.frozen.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }

    fn thaw(&self, _: BorrowedFd<'_>) -> io::Result<()> {
        let take = |frozen: usize| frozen.checked_sub(1);
        self.frozen
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, take)
            .map_err(|_| nix::errno::Errno::EINVAL)?;
        std::fs::write(&self.thawed, "")
    }
}

/// A guest whose freezes last so long, and its file.
fn guest(lab: &Lab, deadline: Duration) -> (Guest, PathBuf) {
    let folder = lab.path("machine");
    for (path, text) in [
        ("proc/self/mountinfo", "27 1 254:1 / /data rw - ext4 /dev/vda1 rw\n"),
        ("proc/sys/kernel/random/boot_id", "this\n"),
    ] {
        let path = folder.join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }
    let mut said = info(&uuid(1), "boot-1");
    said.capabilities.push("machine".into());
    let guest = Guest::start(&lab.path("a.sock"), Door::Unix, Manner::Good, said);
    let thawed = lab.path("thawed");
    guest.machine().lock().laid_out = Some(guestlet::guest::Guest {
        root: Root::at(&folder),
        effects: Arc::new(Machine { frozen: AtomicUsize::new(0), thawed: thawed.clone() }),
        freezer: Freezer::new(Settings { folder, deadline, ..Settings::default() }),
        ..guestlet::guest::Guest::default()
    });
    lab.until_session("a", "connected");
    (guest, thawed)
}

#[test]
fn the_vms_are_listed() {
    let lab = Lab::new().guest("a", 1).guest("b", 2).start();
    let _guest = Guest::start(&lab.path("a.sock"), Door::Unix, Manner::Good, info(&uuid(1), "boot-1"));
    lab.until_session("a", "connected");
    let clients = Clients::new("list_guests");
    for (kind, mut client) in clients.each(&[lab.socket()]) {
        let output = client.output().unwrap();
        let words = String::from_utf8_lossy(&output.stdout);
        let wanted = "a\tconnected\tDebian GNU/Linux 12 (bookworm)\nb\tconnecting\t-\n";
        assert_eq!(words, wanted, "{kind}: {output:?}\n{}", lab.log());
    }
    for (kind, mut client) in clients.each(&[lab.path("nothing")]) {
        let output = client.output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{kind}: {output:?}");
    }
}

#[test]
fn a_command_runs_while_a_guest_is_frozen() {
    let lab = Lab::new().guest("a", 1).start();
    let (_guest, thawed) = guest(&lab, Duration::from_secs(600));
    let clients = Clients::new("freeze");
    let (socket, file) = (text(&lab.socket()), text(&thawed));
    // It is frozen as long as the command runs.
    let arguments = [&socket, "a", "sh", "-c", "[ ! -e \"$0\" ]; exit $(($? + $1))", &file];
    for (code, said) in [("0", 0), ("7", 1)] {
        for (kind, mut client) in clients.each(&[&arguments[..], &[code]].concat()) {
            drop(std::fs::remove_file(&thawed));
            let output = client.output().unwrap();
            assert_eq!(output.status.code(), Some(said), "{kind}: {output:?}\n{}", lab.log());
            assert_eq!(String::from_utf8_lossy(&output.stdout), "frozen: /data\n", "{kind}");
            assert!(thawed.exists(), "{kind}");
        }
    }
    for (_, mut client) in clients.each(&[&socket, "nobody", "true"]) {
        assert_fails(&client.output().unwrap(), 1, "there is no such VM");
    }
}

#[test]
fn a_freeze_that_was_over_before_the_command_is_told() {
    let lab = Lab::new().guest("a", 1).start();
    let (_guest, thawed) = guest(&lab, Duration::from_secs(1));
    // A snapshot that takes until the guest has thawed by itself.
    let script = "until [ -e \"$0\" ]; do sleep 0.05; done";
    let (socket, file) = (text(&lab.socket()), text(&thawed));
    for (kind, mut client) in Clients::new("freeze").each(&[&socket, "a", "sh", "-c", script, &file]) {
        drop(std::fs::remove_file(&thawed));
        let output = client.output().unwrap();
        assert_eq!(String::from_utf8_lossy(&output.stdout), "frozen: /data\n", "{kind}: {output:?}");
        assert_fails(&output, 1, "the freeze has not lasted");
    }
}
