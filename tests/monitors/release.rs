//! Disks that are released before they are unplugged, over trees of sysfs. What the kernel does with what is written
//! there is done by the tests.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use guestlet::guest::disks::release::{ReleaseError, Released, find, release};
use guestlet::guest::disks::room::WaitError;
use guestlet::sys::effects::Effects;
use guestlet::sys::uevents::Action;
use tokio::sync::oneshot;

use crate::disks::{LONG, Lab, serial, told};
use crate::lay_out::lay_out;
use crate::run;

const SCSI: &str = "/sys/devices/pci0000:00/0000:00:04.0/virtio2";

/// What happens when a disk is claimed: whether that is allowed.
type Claim = Box<dyn FnOnce() -> bool + Send>;

/// The devices of a machine.
#[derive(Default)]
struct Machine {
    claims: Mutex<VecDeque<Claim>>,
    flushed: Mutex<usize>,
    /// Told when a flush begins, which lasts until it hears something.
    hang: Mutex<Option<(oneshot::Sender<()>, mpsc::Receiver<()>)>>,
}

impl std::fmt::Debug for Machine {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("Machine")
    }
}

impl Effects for Machine {
    fn claim_disk(&self, _: &Path) -> io::Result<OwnedFd> {
        let claim = self.claims.lock().unwrap().pop_front();
        if claim.is_none_or(|claim| claim()) {
            Ok(std::fs::File::open("/dev/null")?.into())
        } else {
            Err(io::Error::from_raw_os_error(16))
        }
    }

    fn flush_disk(&self, _: BorrowedFd<'_>) -> io::Result<()> {
        if let Some((begun, end)) = self.hang.lock().unwrap().take() {
            begun.send(()).unwrap();
            end.recv().unwrap();
        }
        *self.flushed.lock().unwrap() += 1;
        Ok(())
    }
}

fn lab() -> (Lab, Arc<Machine>) {
    let mut lab = Lab::new();
    let machine = Arc::new(Machine::default());
    lab.guest.effects = machine.clone();
    (lab, machine)
}

/// The outcome in a few words.
async fn released(lab: &Lab, number: &str) -> String {
    match release(&lab.guest, &serial(number)).await {
        Ok(Released::Absent) => "absent".to_owned(),
        Ok(Released::Unused(disk)) => format!("{} is unused", disk.name),
        Ok(Released::Removed(disk)) => format!("{} is removed", disk.name),
        Err(error) => error.to_string(),
    }
}

fn write(path: PathBuf, text: &str) {
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::write(path, text).unwrap();
}

#[tokio::test]
async fn a_virtio_disk_that_nobody_uses_is_flushed_and_stays() {
    let (mut lab, machine) = lab();
    lab.plug("vdb", "data");
    lab.beside(async |lab, _| {
        // It may have come just now.
        assert_eq!(released(lab, "data").await, "vdb is unused");
        assert_eq!(released(lab, "data").await, "vdb is unused");
        assert_eq!(*machine.flushed.lock().unwrap(), 2);
        assert_eq!(released(lab, "other").await, "absent");
        assert!(released(lab, "000").await.contains("all zeros"));
        lab.plug("vdc", "data");
        lab.say(Action::Add, "vdc");
        lab.guest
            .disks
            .wait(&guestlet::guest::disks::lookup::Selector::Name("vdc".into()), LONG)
            .await
            .unwrap();
        assert!(released(lab, "data").await.starts_with("2 disks have the serial number \"data\""));
    })
    .await;
}

#[tokio::test]
async fn what_anybody_uses_is_not_released_and_they_are_named() {
    let (mut lab, machine) = lab();
    let place = Lab::place("vdb");
    lab.plug("vdb", "data");
    let part = format!(
        "{place}/vdb1/dev = \"254:200\\n\"\n{place}/vdb1/partition = \"1\\n\"\n{place}/vdb1/size = \"8\\n\"\n"
    );
    lay_out(&part, lab.folder.path());
    lab.beside(async |lab, watcher| {
        assert_eq!(told(watcher).await, "+vdb");
        let why = "the disk vdb (virtio, serial number \"data\") is in use: ";
        let mounts = lab.path("/proc/self/mountinfo");
        write(
            mounts.clone(),
            "1 0 254:200 / /srv/a\\040b rw - ext4 /dev/vdb1 rw\n2 0 254:98 / /x rw - xfs /dev/vdb rw\n",
        );
        assert_eq!(released(lab, "data").await, format!("{why}mounted at /srv/a b; mounted at /x"));
        write(mounts, "");
        let swaps = lab.path("/proc/swaps");
        write(swaps.clone(), "Filename Type Size Used Priority\n/dev/vdb1 partition 4 0 -2\n");
        assert_eq!(released(lab, "data").await, format!("{why}swap space on /dev/vdb1"));
        std::fs::remove_file(swaps).unwrap();
        // Its holders are read anew: nobody has told that they changed.
        let volume = "/sys/devices/virtual/block/dm-0";
        lay_out(
            &format!("{volume}/dev = \"253:0\\n\"\n{volume}/dm/name = \"group-volume\\n\"\n"),
            lab.folder.path(),
        );
        let holder = lab.path(&format!("{place}/vdb1/holders/dm-0"));
        std::fs::create_dir_all(holder.parent().unwrap()).unwrap();
        symlink(lab.path(volume), &holder).unwrap();
        assert_eq!(released(lab, "data").await, format!("{why}dm-0 (group-volume) is built on it"));
        std::fs::remove_file(holder).unwrap();
        // These do not claim it.
        lay_out("/proc/4711/fd/3 -> /dev/vdb1\n/proc/4711/comm = \"dd\\n\"\n", lab.folder.path());
        lay_out("/sys/block/loop7/loop/backing_file = \"/dev/vdb\\n\"\n", lab.folder.path());
        let both = "loop7 is built on /dev/vdb; dd (process 4711) has /dev/vdb1 open";
        assert_eq!(released(lab, "data").await, format!("{why}{both}"));
        std::fs::remove_dir_all(lab.path("/sys/block/loop7")).unwrap();
        assert_eq!(*machine.flushed.lock().unwrap(), 0);
        // Who only looks at it is waited for.
        let file = lab.path("/proc/4711/fd/3");
        let leaves = move || {
            std::fs::remove_file(&file).unwrap();
            true
        };
        machine.claims.lock().unwrap().extend([Box::new(|| false) as Claim, Box::new(leaves)]);
        assert_eq!(released(lab, "data").await, "vdb is unused");
        for _ in 0..100 {
            machine.claims.lock().unwrap().push_back(Box::new(|| false));
        }
        assert!(
            released(lab, "data")
                .await
                .contains("it is opened exclusively by something that cannot be found")
        );
        assert_eq!(*machine.flushed.lock().unwrap(), 1);
    })
    .await;
}

/// Writes what makes a SCSI disk of it, and has pipes where the kernel is told to delete it and to look for others.
fn plug_scsi(lab: &Lab) -> [PathBuf; 2] {
    let device = format!("{SCSI}/host0/target0:0:0/0:0:0:3");
    let place = format!("{device}/block/sdb");
    let tree = format!(
        "{place}/dev = \"8:16\\n\"\n{place}/size = \"2048\\n\"\n{place}/device/serial = \"data\\n\"\n\
         {place}/device/type = \"0\\n\"\n{SCSI}/driver -> /sys/bus/virtio/drivers/virtio_scsi\n\
         {device}/driver -> /sys/bus/scsi/drivers/sd\n"
    );
    lay_out(&tree, lab.folder.path());
    symlink(place.replace("/sys/", "../"), lab.path("/sys/block/sdb")).unwrap();
    let pipes = [lab.path(&format!("{place}/device/delete")), lab.path("/sys/class/scsi_host/host0/scan")];
    for pipe in &pipes {
        std::fs::create_dir_all(pipe.parent().unwrap()).unwrap();
        run(&format!("test -e {0} || mkfifo {0}", pipe.display()));
    }
    pipes
}

fn unplug_scsi(lab: &Lab) {
    std::fs::remove_file(lab.path("/sys/block/sdb")).unwrap();
    // Kept elsewhere, so that no inode comes back, as none does in sysfs.
    let grave = tempfile::Builder::new().disable_cleanup(true).tempdir_in(lab.folder.path()).unwrap();
    std::fs::rename(lab.path(SCSI), grave.path()).unwrap();
}

fn say(lab: &Lab, action: Action) {
    lab.say_at(action, &format!("{SCSI}/host0/target0:0:0/0:0:0:3/block/sdb"));
}

/// What somebody writes to a pipe.
async fn heard(pipe: &Path) -> String {
    let pipe = pipe.to_owned();
    tokio::task::spawn_blocking(move || std::fs::read_to_string(pipe).unwrap()).await.unwrap()
}

#[tokio::test]
async fn a_scsi_disk_is_deleted_and_found_again_while_it_is_plugged() {
    let (mut lab, machine) = lab();
    let [delete, scan] = plug_scsi(&lab);
    lab.beside(async |lab, watcher| {
        assert_eq!(told(watcher).await, "+sdb");
        let kernel = async {
            assert_eq!(heard(&delete).await, "1");
            assert_eq!(*machine.flushed.lock().unwrap(), 1);
            unplug_scsi(lab);
            say(lab, Action::Remove);
        };
        let (outcome, ()) = tokio::join!(released(lab, "data"), kernel);
        assert_eq!(outcome, "sdb is removed");
        // From then on nobody finds it who does not look for it.
        assert!(lab.guest.disks.all().is_empty());
        assert_eq!(told(watcher).await, "-sdb");
        assert_eq!(released(lab, "data").await, "absent");
        // What was not released is not looked for.
        let none = find(&lab.guest, &serial("other"), Duration::from_millis(1)).await;
        assert!(matches!(none, Err(WaitError::TooLate { .. })), "{none:?}");

        let kernel = async {
            assert_eq!(heard(&scan).await, "0 0 3");
            plug_scsi(lab);
            say(lab, Action::Add);
        };
        let data = serial("data");
        let (found, ()) = tokio::join!(find(&lab.guest, &data, LONG), kernel);
        assert_eq!(found.unwrap().name, "sdb");
        assert_eq!(told(watcher).await, "+sdb");
        // It is not looked for any more: nobody reads the pipe now.
        unplug_scsi(lab);
        say(lab, Action::Remove);
        assert_eq!(told(watcher).await, "-sdb");
        std::fs::remove_file(&scan).unwrap();
        std::fs::write(&scan, "").unwrap();
        assert!(find(&lab.guest, &data, Duration::from_millis(300)).await.is_err());
        assert_eq!(std::fs::read_to_string(&scan).unwrap(), "");
    })
    .await;
}

#[tokio::test]
async fn a_disk_that_hangs_is_given_up_and_not_deleted_later() {
    let (mut lab, machine) = lab();
    let [delete, _] = plug_scsi(&lab);
    std::fs::remove_file(&delete).unwrap();
    std::fs::write(&delete, "").unwrap();
    lab.beside(async |lab, watcher| {
        assert_eq!(told(watcher).await, "+sdb");
        let (begins, begun) = oneshot::channel();
        let (end, ends) = mpsc::channel();
        *machine.hang.lock().unwrap() = Some((begins, ends));
        let data = serial("data");
        let time = async {
            begun.await.unwrap();
            tokio::time::pause();
            tokio::time::advance(Duration::from_secs(46)).await;
            tokio::time::resume();
        };
        let (outcome, ()) = tokio::join!(release(&lab.guest, &data), time);
        assert!(matches!(outcome, Err(ReleaseError::Silent { .. })), "{outcome:?}");
        // As long as it hangs nothing is begun with it.
        assert!(released(lab, "data").await.contains("it is being released"));
        end.send(()).unwrap();
        let again = async {
            while released(lab, "data").await.contains("it is being released") {
                tokio::task::yield_now().await;
            }
        };
        tokio::select! {
            () = again => {}
            () = async { while std::fs::read(&delete).unwrap().is_empty() { tokio::task::yield_now().await } } => {}
        }
        // The one that was given up has flushed only: the second one has deleted it.
        assert_eq!(*machine.flushed.lock().unwrap(), 2);
    })
    .await;
}
