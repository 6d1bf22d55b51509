//! Tests the keeper on a simulated machine whose file systems freeze, refuse, fail or hang as configured.

#![allow(clippy::disallowed_methods)]

mod left;

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use nix::errno::Errno;

use super::{By, Error, Freezer, Settings, Status, freeze, thaw};
use crate::guest::Guest;
use crate::guest::events::{Kind, News};
use crate::guest::freeze::marker::{Found, Marker};
use crate::receipt::Caller;
use crate::sys::effects::Effects;
use crate::sys::error_chain;
use crate::sys::mountinfo::Mount;
use crate::sys::root::Root;
use crate::wire::proto::v1;

/// Behaviour of the file systems at `/a`, `/b` and `/c` when they are frozen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Does {
    Freeze,
    Fail(Errno),
    Hang,
}

#[derive(Debug, Default)]
struct Machine {
    state: Mutex<Disks>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Disks {
    does: BTreeMap<String, Option<Does>>,
    /// Mount points that are frozen, in order; one entry for each nested freeze.
    frozen: Vec<String>,
    /// Log of all operations.
    log: Vec<String>,
    descriptors: BTreeMap<i32, String>,
    /// Number of freezes that hang.
    hanging: usize,
    released: bool,
    /// Pair of file systems: the freeze of the first completes only when the second, which is stored on it, is
    /// being thawed.
    late: Option<(String, String)>,
}

impl Machine {
    fn at(&self, descriptor: BorrowedFd<'_>) -> String {
        self.state.lock().unwrap().descriptors.get(&descriptor.as_raw_fd()).unwrap().clone()
    }

    fn frozen(&self) -> Vec<String> {
        self.state.lock().unwrap().frozen.clone()
    }

    fn log(&self) -> Vec<String> {
        self.state.lock().unwrap().log.clone()
    }

    fn release(&self) {
        self.state.lock().unwrap().released = true;
        self.changed.notify_all();
    }

    async fn until(&self, what: &str, done: impl Fn(&Disks) -> bool) {
        let deadline = Instant::now() + Duration::from_secs(20);
        while !done(&self.state.lock().unwrap()) {
            assert!(Instant::now() < deadline, "{what}: {:?}", self.state.lock().unwrap());
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
}

impl Effects for Machine {
    fn open_mount(&self, mount: &Mount) -> io::Result<OwnedFd> {
        let descriptor: OwnedFd = std::fs::File::open("/dev/null")?.into();
        let mut state = self.state.lock().unwrap();
        state.descriptors.insert(descriptor.as_raw_fd(), mount.mount_point.clone());
        Ok(descriptor)
    }

    fn freeze(&self, mount: BorrowedFd<'_>) -> io::Result<()> {
        let name = self.at(mount);
        let mut state = self.state.lock().unwrap();
        match state.does.get(&name).copied().flatten().unwrap_or(Does::Freeze) {
            Does::Fail(error) => return Err(error.into()),
            Does::Hang => {
                state.hanging += 1;
                while !state.released {
                    state = self.changed.wait(state).unwrap();
                }
            }
            Does::Freeze => {}
        }
        state.log.push(format!("freeze {name}"));
        state.frozen.push(name);
        Ok(())
    }

    fn thaw(&self, mount: BorrowedFd<'_>) -> io::Result<()> {
        let name = self.at(mount);
        let mut state = self.state.lock().unwrap();
        if let Some((below, _)) = state.late.take_if(|(_, above)| *above == name) {
            state.frozen.push(below.clone());
            while state.frozen.contains(&below) {
                state = self.changed.wait(state).unwrap();
            }
        }
        let place = state.frozen.iter().position(|known| *known == name).ok_or(Errno::EINVAL)?;
        state.frozen.remove(place);
        state.log.push(format!("thaw {name}"));
        self.changed.notify_all();
        Ok(())
    }
}

const MOUNTS: &str = "\
22 27 0:21 / /proc rw - proc proc rw\n\
27 1 254:1 / /a rw - ext4 /dev/vda1 rw\n\
28 27 254:2 / /b rw - ext4 /dev/vda2 rw\n\
29 27 254:3 / /c rw - xfs /dev/vda3 rw\n";

struct Lab {
    guest: Guest,
    machine: Arc<Machine>,
    folder: tempfile::TempDir,
}

impl Lab {
    fn new(does: &[(&str, Does)]) -> Self {
        Self::with(does, |_, _| {})
    }

    fn with(does: &[(&str, Does)], set: impl FnOnce(&mut Settings, &Path)) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let root = Root::at(folder.path());
        for (path, text) in [("/proc/self/mountinfo", MOUNTS), ("/proc/sys/kernel/random/boot_id", "this\n")]
        {
            let path = root.path(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        let machine = Arc::new(Machine::default());
        machine.state.lock().unwrap().does =
            does.iter().map(|(name, does)| ((*name).to_owned(), Some(*does))).collect();
        let mut settings = Settings { folder: folder.path().to_owned(), ..Settings::default() };
        set(&mut settings, folder.path());
        let effects: Arc<dyn Effects> = Arc::<Machine>::clone(&machine);
        let guest = Guest { root, effects, freezer: Freezer::new(settings), ..Guest::default() };
        Self { guest, machine, folder }
    }

    async fn freeze(&self) -> Result<u64, Error> {
        freeze(&self.guest, None, &Caller::new("the test", "qga")).await
    }

    async fn thaw(&self) -> Result<u64, Error> {
        thaw(&self.guest, By::Client).await
    }

    fn marker(&self) -> Found {
        Marker::new(self.folder.path(), &self.guest.root).find()
    }

    /// Checks that nothing is left of a freeze.
    #[track_caller]
    fn is_clean(&self) {
        assert_eq!(self.machine.frozen(), [""; 0]);
        assert!(!self.guest.freezer.restricts());
        assert_eq!(self.guest.freezer.status(), Status::Thawed { spoiled: None });
        assert_eq!(self.marker(), Found::Nothing);
    }

    fn script(folder: &Path, name: &str, text: &str) -> std::path::PathBuf {
        use std::os::unix::fs::PermissionsExt as _;
        let path = folder.join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, format!("#!/bin/sh\ncd {}\n{text}\n", folder.display())).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        path
    }

    fn file(&self, name: &str) -> String {
        std::fs::read_to_string(self.folder.path().join(name)).unwrap_or_default()
    }
}

fn words(error: &Error) -> String {
    error_chain::words(error)
}

#[tokio::test]
async fn frozen_in_order_and_thawed_in_reverse() {
    let lab = Lab::new(&[]);
    assert_eq!(lab.freeze().await.unwrap(), 3);
    assert!(lab.guest.freezer.restricts());
    assert!(matches!(lab.marker(), Found::Freeze(freeze) if freeze.file_systems.len() == 3));
    let busy = lab.freeze().await.unwrap_err();
    assert!(words(&busy).contains("the test requested a freeze"), "{}", words(&busy));
    assert_eq!(lab.thaw().await.unwrap(), 3);
    let order = ["freeze /c", "freeze /b", "freeze /a", "thaw /a", "thaw /b", "thaw /c"];
    assert_eq!(lab.machine.log(), order);
    lab.is_clean();
    assert_eq!(lab.thaw().await.unwrap(), 0);
}

#[tokio::test]
async fn some_by_their_mount_points() {
    let lab = Lab::new(&[]);
    let list = |names: &[&str]| Some(names.iter().map(ToString::to_string).collect::<Vec<_>>());
    assert_eq!(freeze(&lab.guest, list(&["/b/", "/a", "/proc"]), &Caller::new("x", "qga")).await.unwrap(), 2);
    assert_eq!(lab.machine.frozen(), ["/b", "/a"]);
    assert_eq!(lab.thaw().await.unwrap(), 2);
    let unknown = freeze(&lab.guest, list(&["/a", "/nowhere"]), &Caller::new("x", "qga")).await.unwrap_err();
    assert_eq!(words(&unknown), "\"mountpoints\": \"/nowhere\" is not a mount point");
    assert_eq!(freeze(&lab.guest, list(&[]), &Caller::new("x", "qga")).await.unwrap(), 0);
    lab.is_clean();
}

#[tokio::test]
async fn what_cannot_be_frozen_is_passed_over_and_what_others_froze_is_thawed() {
    let lab = Lab::new(&[("/a", Does::Fail(Errno::EOPNOTSUPP)), ("/b", Does::Fail(Errno::EBUSY))]);
    // Frozen twice by somebody else.
    lab.machine.state.lock().unwrap().frozen = vec!["/b".to_owned(), "/b".to_owned()];
    assert_eq!(lab.freeze().await.unwrap(), 1);
    assert_eq!(lab.thaw().await.unwrap(), 2);
    lab.is_clean();
    lab.machine.state.lock().unwrap().frozen = vec!["/a".to_owned()];
    assert_eq!(lab.thaw().await.unwrap(), 1, "without a freeze of our own, too");
    lab.is_clean();
}

#[tokio::test]
async fn a_failure_names_the_path_and_leaves_none_frozen() {
    let lab = Lab::new(&[("/a", Does::Fail(Errno::EIO))]);
    let error = lab.freeze().await.unwrap_err();
    assert_eq!(words(&error), "cannot freeze /a: EIO: I/O error");
    assert_eq!(lab.machine.log(), ["freeze /c", "freeze /b", "thaw /b", "thaw /c"]);
    lab.is_clean();
    lab.machine.state.lock().unwrap().does.clear();
    assert_eq!(lab.freeze().await.unwrap(), 3, "and the next one can succeed");
    lab.thaw().await.unwrap();
}

#[tokio::test]
async fn a_freeze_that_fails_is_told_to_everybody() {
    let lab = Lab::new(&[("/a", Does::Fail(Errno::EIO))]);
    let (_, mut watcher) = lab.guest.events.watch(None);
    lab.freeze().await.unwrap_err();
    assert!(matches!(watcher.next().await,
        News::Event(told) if matches!(&told.event, Kind::Thawed(v1::Thawed { holder, end, problem, .. })
            if end == "failed" && holder == "the test" && problem == "cannot freeze /a: EIO: I/O error")));
    lab.is_clean();
}

#[tokio::test]
async fn the_deadline_thaws_and_the_thaw_that_comes_late_is_told_once() {
    let lab = Lab::with(&[], |settings, _| settings.deadline = Duration::from_millis(50));
    let (_, mut watcher) = lab.guest.events.watch(None);
    assert_eq!(lab.freeze().await.unwrap(), 3);
    assert!(matches!(watcher.next().await,
        News::Event(told) if matches!(told.event, Kind::Frozen(v1::Frozen { file_systems: 3, .. }))));
    assert!(matches!(watcher.next().await,
        News::Event(told) if matches!(&told.event, Kind::Thawed(v1::Thawed { holder, end, problem, by_itself: true, .. })
            if end == "deadline" && holder == "the test" && problem == "the freeze ended by itself after 0 s")));
    lab.guest.freezer.0.over.subscribe().wait_for(|over| *over > 0).await.unwrap();
    assert_eq!(lab.machine.frozen(), [""; 0]);
    assert!(matches!(lab.guest.freezer.status(), Status::Thawed { spoiled: Some(_) }));
    let late = lab.thaw().await.unwrap_err();
    assert_eq!(words(&late), "the freeze ended by itself after 0 s: the snapshot is not consistent");
    assert_eq!(lab.thaw().await.unwrap(), 0);
    lab.is_clean();
}

#[tokio::test]
async fn a_thaw_ends_a_freeze_that_hangs() {
    let lab = Lab::new(&[("/b", Does::Hang)]);
    let (frozen, thawed) = tokio::join!(lab.freeze(), async {
        lab.machine.until("hangs", |disks| disks.hanging == 1).await;
        assert_eq!(lab.machine.frozen(), ["/c"]);
        let thaw = lab.thaw();
        tokio::pin!(thaw);
        // What is frozen is thawed at once; the one that hangs, as soon as its freeze returns.
        tokio::select! {
            outcome = &mut thaw => panic!("{outcome:?}"),
            () = lab.machine.until("thawed", |disks| disks.frozen.is_empty()) => {}
        }
        lab.machine.release();
        thaw.await
    });
    assert!(matches!(frozen, Err(Error::Cancelled)), "{frozen:?}");
    assert_eq!(thawed.unwrap(), 2);
    lab.is_clean();
}

#[tokio::test]
async fn a_freeze_that_hangs_ends_by_the_deadline() {
    let lab = Lab::with(&[("/a", Does::Hang)], |settings, _| settings.deadline = Duration::from_millis(50));
    let (frozen, ()) = tokio::join!(lab.freeze(), async {
        lab.machine.until("thawed", |disks| disks.hanging == 1 && disks.frozen.is_empty()).await;
        lab.machine.release();
    });
    let error = words(&frozen.unwrap_err());
    assert_eq!(error, "freezing took longer than 0 s (/a); everything is thawed again");
    lab.is_clean();
}

#[tokio::test]
async fn hooks_are_told_before_and_after_in_reverse() {
    let lab = Lab::with(&[], |settings, folder| {
        Lab::script(folder, "hooks/10-one", "echo one $1 >> told");
        Lab::script(folder, "hooks/20-two", "echo two $1 >> told");
        Lab::script(folder, "hooks/30-two.bak", "echo three $1 >> told");
        settings.hook = Some(folder.join("hooks"));
    });
    lab.freeze().await.unwrap();
    assert_eq!(lab.file("told"), "one freeze\ntwo freeze\n");
    lab.thaw().await.unwrap();
    assert_eq!(lab.file("told"), "one freeze\ntwo freeze\ntwo thaw\none thaw\n");
    lab.is_clean();
}

#[tokio::test]
async fn a_hook_that_fails_stops_the_freeze_in_its_own_words() {
    let lab = Lab::with(&[], |settings, folder| {
        Lab::script(folder, "hooks/1", "echo one $1 >> told");
        Lab::script(folder, "hooks/2", "echo two $1 >> told; echo tables are locked >&2; [ $1 = thaw ]");
        Lab::script(folder, "hooks/3", "echo three $1 >> told");
        settings.hook = Some(folder.join("hooks"));
    });
    let error = words(&lab.freeze().await.unwrap_err());
    assert!(error.contains("hooks/2 failed (exit status: 1): tables are locked"), "{error}");
    assert_eq!(lab.file("told"), "one freeze\ntwo freeze\ntwo thaw\none thaw\n");
    assert_eq!(lab.machine.log(), [""; 0]);
    lab.is_clean();
}

#[tokio::test]
async fn a_hook_that_hangs_is_killed_with_what_it_started() {
    let lab = Lab::with(&[], |settings, folder| {
        let text = "[ $1 = thaw ] && exit; echo waiting; sleep 1000 & echo $! > child; wait";
        settings.hook = Some(Lab::script(folder, "hook", text));
        settings.hook_deadline = Duration::from_millis(500);
    });
    let error = words(&lab.freeze().await.unwrap_err());
    assert!(error.contains("did not end within 0 s and was killed: waiting"), "{error}");
    let child = lab.file("child");
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", child.trim())).unwrap_or_default();
    assert!(stat.is_empty() || stat.contains(") Z "), "{stat}");
    lab.is_clean();
}

#[tokio::test]
async fn a_thaw_ends_a_hook_that_hangs() {
    let lab = Lab::with(&[], |settings, folder| {
        let text = "[ $1 = thaw ] && { touch thawed; exit; }; touch begun; sleep 1000";
        settings.hook = Some(Lab::script(folder, "hook", text));
    });
    let (frozen, thawed) = tokio::join!(lab.freeze(), async {
        lab.machine.until("begun", |_| lab.folder.path().join("begun").exists()).await;
        assert!(!lab.guest.freezer.restricts(), "nothing is frozen while hooks run");
        lab.thaw().await
    });
    assert!(matches!(frozen, Err(Error::Cancelled)), "{frozen:?}");
    assert_eq!(thawed.unwrap(), 0);
    assert!(lab.folder.path().join("thawed").exists());
    lab.is_clean();
}

#[tokio::test]
async fn without_a_marker_nothing_is_frozen() {
    let lab = Lab::with(&[], |settings, _| settings.folder = "/nowhere/at/all".into());
    let error = words(&lab.freeze().await.unwrap_err());
    assert!(error.contains("/nowhere/at/all/qga.state.isfrozen cannot be written"), "{error}");
    assert_eq!(lab.machine.log(), [""; 0]);
}

#[tokio::test]
async fn a_freeze_that_is_refused_hides_no_earlier_one_that_was_spoiled() {
    let lab = Lab::with(&[], |settings, _| settings.deadline = Duration::from_millis(50));
    lab.freeze().await.unwrap();
    lab.guest.freezer.0.over.subscribe().wait_for(|over| *over > 0).await.unwrap();
    freeze(&lab.guest, Some(vec!["/nowhere".to_owned()]), &Caller::new("the test", "qga")).await.unwrap_err();
    let late = words(&lab.thaw().await.unwrap_err());
    assert!(late.contains("ended by itself"), "{late}");
    lab.is_clean();
}

#[tokio::test]
async fn what_somebody_else_thaws_meanwhile_is_told() {
    let lab = Lab::new(&[]);
    lab.freeze().await.unwrap();
    lab.machine.state.lock().unwrap().frozen.retain(|name| name != "/b");
    let error = words(&lab.thaw().await.unwrap_err());
    assert!(error.contains("/b was no longer frozen") && error.contains("not consistent"), "{error}");
    lab.is_clean();
}

#[tokio::test]
async fn a_person_can_end_it_and_the_client_is_told() {
    let lab = Lab::new(&[]);
    lab.freeze().await.unwrap();
    assert_eq!(thaw(&lab.guest, By::Person).await.unwrap(), 3);
    assert_eq!(thaw(&lab.guest, By::Person).await.unwrap(), 0, "this is not for persons");
    let error = words(&lab.thaw().await.unwrap_err());
    assert!(error.contains("ended by a person in the guest: the snapshot is not"), "{error}");
    lab.is_clean();
}

#[tokio::test]
async fn the_agents_end_waits_for_the_thaw() {
    let lab = Lab::new(&[]);
    lab.freeze().await.unwrap();
    let stop = lab.guest.freezer.stop();
    tokio::pin!(stop);
    tokio::select! {
        biased;
        thawed = lab.thaw() => assert_eq!(thawed.unwrap(), 3),
        () = &mut stop => panic!("it did not wait"),
    }
    stop.await;
    assert!(matches!(lab.freeze().await, Err(Error::Stopping)));
    lab.is_clean();
}

#[tokio::test]
async fn files_are_written_after_the_thaw() {
    let lab = Lab::new(&[]);
    let written = Arc::new(Mutex::new(0));
    let write = || {
        let written = Arc::clone(&written);
        move || *written.lock().unwrap() += 1
    };
    lab.guest.freezer.unfrozen(write());
    assert_eq!(*written.lock().unwrap(), 1);
    lab.freeze().await.unwrap();
    lab.guest.freezer.unfrozen(write());
    assert_eq!(*written.lock().unwrap(), 1);
    lab.thaw().await.unwrap();
    assert_eq!(*written.lock().unwrap(), 2);
}
