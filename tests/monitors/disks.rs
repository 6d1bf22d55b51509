//! Disks of trees of sysfs, with the kernel's words made up, and the kernel's own words of this machine.

use std::io::{self, Write as _};
use std::os::unix::fs::symlink;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use guestlet::guest::Guest;
use guestlet::guest::disks::lookup::Selector;
use guestlet::guest::events::{Kind, Watcher};
use guestlet::guest::monitor::disks::{News, follow};
use guestlet::sys::root::Root;
use guestlet::sys::uevents::{Action, Heard, Uevent, Uevents};
use guestlet::wire::proto::v1::Disk;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use crate::lay_out::lay_out;
use crate::{event, run, silence};

const CAPTURED: &str = include_str!("../fixtures/debian12-disks.tree");
/// Longer than any disk takes that answers.
pub const LONG: Duration = Duration::from_secs(30);

/// What a test has the kernel say.
pub struct Words(UnboundedReceiver<Heard>);

impl News for Words {
    async fn next(&mut self) -> io::Result<Heard> {
        match self.0.recv().await {
            Some(heard) => Ok(heard),
            None => std::future::pending().await,
        }
    }

    fn at_hand(&mut self) -> io::Result<Option<Heard>> {
        Ok(self.0.try_recv().ok())
    }
}

/// A guest with a tree of its own.
pub struct Lab {
    pub guest: Guest,
    pub folder: tempfile::TempDir,
    kernel: UnboundedSender<Heard>,
    words: Option<Words>,
}

impl Lab {
    pub fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let guest = Guest { root: Root::at(folder.path()), ..Guest::default() };
        let (kernel, words) = unbounded_channel();
        std::fs::create_dir_all(folder.path().join("sys/block")).unwrap();
        Self { guest, folder, kernel, words: Some(Words(words)) }
    }

    pub fn path(&self, path: &str) -> std::path::PathBuf {
        self.folder.path().join(path.trim_start_matches('/'))
    }

    pub fn place(name: &str) -> String {
        format!("/sys/devices/pci0000:00/0000:00:06.0/virtio4/{name}/block/{name}")
    }

    /// A disk as virtio-blk shows it.
    pub fn plug(&self, name: &str, serial: &str) {
        let place = Self::place(name);
        let minor = u32::from(name.bytes().last().unwrap());
        lay_out(
            &format!(
                "{place}/dev = \"254:{minor}\\n\"\n{place}/size = \"2048\\n\"\n{place}/serial = \"{serial}\"\n"
            ),
            self.folder.path(),
        );
        self.list(name);
    }

    fn list(&self, name: &str) {
        let link = Self::place(name).replace("/sys/", "../");
        symlink(link, self.path(&format!("/sys/block/{name}"))).unwrap();
    }

    pub fn unplug(&self, name: &str) {
        std::fs::remove_file(self.path(&format!("/sys/block/{name}"))).unwrap();
        // Kept elsewhere, so that no inode comes back, as none does in sysfs.
        let grave = tempfile::Builder::new().disable_cleanup(true).tempdir_in(self.folder.path()).unwrap();
        std::fs::rename(self.path(&Self::place(name)), grave.path()).unwrap();
    }

    pub fn say(&self, action: Action, name: &str) {
        self.say_at(action, &Self::place(name));
    }

    pub fn say_at(&self, action: Action, place: &str) {
        let uevent = Uevent { action, place: place.to_owned(), partition: false, disk: None };
        self.hear(Heard::Uevent(uevent));
    }

    pub fn hear(&self, heard: Heard) {
        self.kernel.send(heard).unwrap();
    }

    /// Runs the monitor while `test` does.
    pub async fn beside(&mut self, test: impl AsyncFnOnce(&Self, &mut Watcher)) {
        let words = self.words.take().unwrap();
        let (_, mut watcher) = self.guest.events.watch(None);
        tokio::select! {
            ended = follow(&self.guest, words) => panic!("{ended:?}"),
            () = test(self, &mut watcher) => {}
        }
    }
}

pub fn serial(text: &str) -> Selector {
    Selector::Serial(text.to_owned())
}

/// In a few words.
pub async fn told(watcher: &mut Watcher) -> String {
    let name = |disk: Option<Disk>| disk.unwrap().name;
    match event(watcher).await {
        Kind::DiskAdded(added) => format!("+{}", name(added.disk)),
        Kind::DiskRemoved(removed) => {
            format!("-{} {}", name(removed.disk), removed.in_use.join(" ")).trim().to_owned()
        }
        Kind::DiskResized(resized) => {
            let disk = resized.disk.unwrap();
            format!("{} {}->{}", disk.name, resized.bytes_before, disk.bytes)
        }
        Kind::DiskChanged(changed) => format!("*{}", name(changed.disk)),
        Kind::DiskFailed(failed) => format!("!{} {}", name(failed.disk), failed.problem),
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn the_disks_of_a_captured_guest_are_known_by_all_that_tells_them_apart() {
    let mut lab = Lab::new();
    std::fs::remove_dir_all(lab.path("/sys")).unwrap();
    lay_out(CAPTURED, lab.folder.path());
    lab.beside(async |lab, watcher| {
        let mut added = Vec::new();
        for _ in 0..7 {
            added.push(told(watcher).await);
        }
        added.sort();
        assert_eq!(added, ["+nvme0n1", "+sda", "+sdb", "+sdc", "+vda", "+vdb", "+vdc"]);
        let room = &lab.guest.disks;
        let names: Vec<_> = room.all().iter().map(|disk| disk.name.clone()).collect();
        assert_eq!(names, ["sda", "sdb", "sdc", "vda", "vdb", "vdc", "nvme0n1"]);
        for (name, bus, pci, scsi, serial, alias) in [
            ("sda", "scsi", 4, "0:0:0:0", "programs vpd80", Some("programs")),
            ("sdb", "scsi", 4, "0:0:0:3", "data-one vpd80", Some("data-one")),
            ("sdc", "scsi", 4, "0:0:1:2", "data-four vpd80", Some("data-four")),
            ("vda", "virtio", 6, "", "", None),
            ("vdb", "virtio", 7, "", "", None),
            ("vdc", "virtio", 0, "", "data-two virtio", None),
            ("nvme0n1", "nvme", 0, "", "data-three device", None),
        ] {
            let disk = room.find(&Selector::Name(name.to_owned())).unwrap();
            let told = disk.serial().map(|it| format!("{} {}", it.text(), it.source.word()));
            assert_eq!(told.unwrap_or_default(), serial, "{name}");
            assert_eq!((disk.bus.word(), disk.alias.as_deref()), (bus, alias), "{name}");
            assert_eq!(disk.scsi.map(|at| at.to_string()).unwrap_or_default(), scsi, "{name}");
            assert_eq!(disk.pci.unwrap().slot, pci, "{name}");
            assert!(!disk.silent && disk.bytes > 0 && disk.sector == 512, "{disk:?}");
        }
        for number in ["one", "two", "three", "four"] {
            assert!(room.find(&serial(&format!("data-{number}"))).is_ok(), "{number}");
        }
        silence(watcher).await;
        let (_, state) = lab.guest.events.state();
        assert_eq!(state.disks.len(), 7);
    })
    .await;
}

#[tokio::test]
async fn disks_that_come_and_go_are_told_and_who_waits_is_answered() {
    let mut lab = Lab::new();
    lab.plug("vda", "root");
    lab.beside(async |lab, watcher| {
        assert_eq!(told(watcher).await, "+vda");
        let room = Arc::clone(&lab.guest.disks);
        let waiters: Vec<_> = (0..64)
            .map(|number| {
                let room = Arc::clone(&room);
                let name = char::from(b'b' + number % 8);
                tokio::spawn(async move { room.wait(&serial(&format!("data-{name}")), LONG).await.unwrap() })
            })
            .collect();
        for name in 'b'..='i' {
            lab.plug(&format!("vd{name}"), &format!("data-{name}"));
            lab.say(Action::Add, &format!("vd{name}"));
        }
        for (number, waiter) in waiters.into_iter().enumerate() {
            let name = format!("vd{}", char::from(b'b' + u8::try_from(number).unwrap() % 8));
            assert_eq!(waiter.await.unwrap().name, name);
        }
        for _ in 0..8 {
            assert!(told(watcher).await.starts_with("+vd"));
        }
        std::fs::write(lab.path(&format!("{}/size", Lab::place("vdb"))), "4096\n").unwrap();
        lab.say(Action::Change, "vdb");
        assert_eq!(told(watcher).await, "vdb 1048576->2097152");
        // It is mounted, and taken away nevertheless.
        let mounts = format!("1 0 254:{} / /data rw - ext4 /dev/vdc rw\n", u32::from(b'c'));
        std::fs::create_dir_all(lab.path("/proc/self")).unwrap();
        std::fs::write(lab.path("/proc/self/mountinfo"), mounts).unwrap();
        for (name, expected) in [("vdb", "-vdb"), ("vdc", "-vdc /data")] {
            lab.unplug(name);
            lab.say(Action::Remove, name);
            assert_eq!(told(watcher).await, expected);
        }
        assert!(room.find(&serial("data-b")).is_err());
        silence(watcher).await;
        // What was told is lost.
        lab.unplug("vdd");
        lab.plug("vdz", "new");
        lab.kernel.send(Heard::Overrun).unwrap();
        let mut both = [told(watcher).await, told(watcher).await];
        both.sort();
        assert_eq!(both, ["+vdz", "-vdd"]);
    })
    .await;
}

#[tokio::test]
async fn a_disk_that_does_not_answer_keeps_nobody_else_waiting() {
    let mut lab = Lab::new();
    let place = Lab::place("vdb");
    lab.plug("vda", "root");
    lay_out(&format!("{place}/dev = \"254:98\\n\"\n{place}/size = \"8\\n\"\n"), lab.folder.path());
    let pipe = lab.path(&format!("{place}/serial"));
    run(&format!("mkfifo {}", pipe.display()));
    lab.list("vdb");
    let begun = Instant::now();
    lab.beside(async |lab, watcher| {
        assert_eq!(told(watcher).await, "+vda");
        lab.plug("vdc", "data");
        lab.say(Action::Add, "vdc");
        assert_eq!(told(watcher).await, "+vdc");
        assert!(begun.elapsed() < Duration::from_secs(4), "{:?}", begun.elapsed());
        let late = serial("late");
        let waiting = lab.guest.disks.wait(&late, LONG);
        let answering = async {
            assert_eq!(told(watcher).await, "+vdb");
            assert_eq!(told(watcher).await, "!vdb the disk does not identify itself");
            tokio::task::spawn_blocking(move || {
                std::fs::File::options().write(true).open(pipe).unwrap().write_all(b"late").unwrap();
            })
            .await
            .unwrap();
            assert_eq!(told(watcher).await, "*vdb");
        };
        let (disk, ()) = tokio::join!(waiting, answering);
        assert!(!disk.unwrap().silent);
    })
    .await;
}

/// As udev writes it.
fn processed(lab: &Lab, minor: u8, time: u64) {
    let data = lab.path("/run/udev/data");
    std::fs::write(data.join(".new"), format!("I:{time}\nE:ID_SERIAL=x\n")).unwrap();
    std::fs::rename(data.join(".new"), data.join(format!("b254:{minor}"))).unwrap();
}

#[tokio::test]
async fn where_udev_runs_it_comes_first() {
    let mut lab = Lab::new();
    std::fs::create_dir_all(lab.path("/run/udev/data")).unwrap();
    std::fs::write(lab.path("/run/udev/control"), "").unwrap();
    lab.plug("vda", "root");
    processed(&lab, b'a', 1);
    lab.beside(async |lab, watcher| {
        assert_eq!(told(watcher).await, "+vda");
        lab.plug("vdb", "data");
        lab.say(Action::Add, "vdb");
        silence(watcher).await;
        // Of another device.
        processed(lab, b'x', 2);
        silence(watcher).await;
        processed(lab, b'b', 3);
        assert_eq!(told(watcher).await, "+vdb");

        // Another disk gets the number, and udev's entry of the one before is still there.
        lab.unplug("vdb");
        lab.plug("vdb", "other");
        lab.say(Action::Change, "vdb");
        assert_eq!(told(watcher).await, "-vdb");
        silence(watcher).await;
        processed(lab, b'b', 4);
        assert_eq!(told(watcher).await, "+vdb");
        assert_eq!(lab.guest.disks.find(&serial("other")).unwrap().name, "vdb");
    })
    .await;
}

#[tokio::test]
#[allow(clippy::print_stdout, reason = "a figure for people")]
async fn many_disks_are_known_soon() {
    const MANY: usize = 256;
    let mut lab = Lab::new();
    for number in 0..MANY {
        let name = format!("vd{number}x");
        let place = Lab::place(&name);
        let tree = format!(
            "{place}/dev = \"254:{number}\\n\"\n{place}/size = \"2048\\n\"\n{place}/serial = \"data-{number}\"\n\
             {place}/queue/rotational = \"1\\n\"\n{place}/ro = \"0\\n\"\n{place}/holders\n{place}/slaves\n"
        );
        lay_out(&tree, lab.folder.path());
        lab.list(&name);
    }
    let begun = Instant::now();
    lab.beside(async |lab, watcher| {
        for _ in 0..MANY {
            assert!(told(watcher).await.starts_with("+vd"));
        }
        println!("{MANY} disks are known after {:?}", begun.elapsed());
        assert_eq!(lab.guest.disks.find(&serial("data-200")).unwrap().name, "vd200x");
    })
    .await;
}

#[tokio::test]
async fn the_kernels_own_words_are_heard() {
    let uevents = Uevents::subscribe().unwrap();
    assert_eq!(uevents.at_hand().unwrap(), None);
    let disk = std::fs::read_dir("/sys/block").unwrap().next().expect("this machine has no block device");
    let name = disk.unwrap().file_name().into_string().unwrap();
    // Only words: nothing happens to the device.
    std::fs::write(Path::new("/sys/block").join(&name).join("uevent"), "change").unwrap();
    let heard = tokio::time::timeout(LONG, async {
        loop {
            if let Heard::Uevent(uevent) = uevents.next().await.unwrap()
                && uevent.place.ends_with(&format!("/block/{name}"))
            {
                return uevent;
            }
        }
    });
    let uevent = heard.await.unwrap();
    assert_eq!((uevent.action, uevent.partition), (Action::Change, false));
}
