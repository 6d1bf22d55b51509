//! Tests shares on a machine whose mounts are simulated: its list of mounts is a file.

#![allow(clippy::disallowed_methods, reason = "a test writes files")]

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd, RawFd};
use std::path::PathBuf;
use std::sync::Mutex;

use nix::errno::Errno;
use nix::mount::MsFlags;

use super::*;
use crate::guest::pod_volumes::remove::{unpublish, unstage};
use crate::sys::effects::Effects;
use crate::sys::mountinfo::MountList;
use crate::sys::mounting::{How, Place, What};
use crate::sys::root::Root;
use crate::sys::usage::{Usage as Room, usage};

/// Simulated machine: the requests to it, and its mounts.
#[derive(Debug)]
pub(crate) struct Machine {
    root: Root,
    list: PathBuf,
    mounts: Mutex<Vec<Mounted>>,
    /// Unattached mounts by their descriptors.
    made: Mutex<BTreeMap<RawFd, (String, &'static str)>>,
    /// Errors with which making a mount fails, in this order.
    pub(crate) refusals: Mutex<Vec<Errno>>,
    /// Sources whose servers do not respond.
    dead: Mutex<BTreeSet<String>>,
    /// Paths at which mounting and unmounting fail with this error; `EBUSY` stands for a mount that is in use.
    stuck: Mutex<BTreeMap<PathBuf, Errno>>,
    data: Mutex<Vec<String>>,
    /// Log of the operations on mounts, except for mounting.
    ended: Mutex<Vec<(&'static str, PathBuf)>>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Mounted {
    id: u64,
    path: PathBuf,
    source: String,
    flags: &'static str,
}

impl Machine {
    fn change(&self, change: impl FnOnce(&mut Vec<Mounted>)) {
        let mut mounts = self.mounts.lock().unwrap();
        change(&mut mounts);
        let line = |Mounted { id, path, source, flags }: &Mounted| {
            let device: u32 = source.bytes().map(u32::from).sum();
            format!("{id} 1 0:{device} / {} {flags} - nfs4 {source} rw,vers=4.0,hard\n", path.display())
        };
        std::fs::write(&self.list, mounts.iter().map(line).collect::<String>()).unwrap();
    }

    pub(crate) fn add(&self, path: &Path, source: &str, flags: &'static str) {
        static NEXT: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(100);
        let id = NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let mounted = Mounted { id, path: path.to_owned(), source: source.to_owned(), flags };
        self.change(|mounts| mounts.push(mounted));
    }

    fn end(&self, how: &'static str, path: &Path) -> io::Result<()> {
        self.ended.lock().unwrap().push((how, path.to_owned()));
        let stuck = self.stuck.lock().unwrap().get(path).copied();
        if let (Some(error), true) = (stuck, how != "detach") {
            return Err(error.into());
        }
        let at = self.mounts.lock().unwrap().iter().rposition(|mounted| mounted.path == path);
        let at = at.ok_or(Errno::EINVAL)?;
        self.change(|mounts| drop(mounts.remove(at)));
        Ok(())
    }

    /// Returns the last mount at a path.
    pub(crate) fn shown(&self, path: &Path) -> Option<(String, &'static str)> {
        let mounts = self.mounts.lock().unwrap();
        mounts.iter().rfind(|one| one.path == path).map(|one| (one.source.clone(), one.flags))
    }
}

fn flags(flags: MsFlags) -> &'static str {
    if flags.contains(MsFlags::MS_RDONLY) { "ro" } else { "rw" }
}

impl Effects for Machine {
    fn make_mount(&self, source: &str, kind: &str, options: &str, how: MsFlags) -> io::Result<OwnedFd> {
        assert_eq!(kind, "nfs4");
        self.data.lock().unwrap().push(options.to_owned());
        let mut refusals = self.refusals.lock().unwrap();
        if !refusals.is_empty() {
            return Err(refusals.remove(0).into());
        }
        let made: OwnedFd = std::fs::File::open("/dev/null")?.into();
        self.made.lock().unwrap().insert(made.as_raw_fd(), (source.to_owned(), flags(how)));
        Ok(made)
    }

    fn attach(&self, made: BorrowedFd<'_>, place: &Place) -> io::Result<()> {
        let (source, flags) = self.made.lock().unwrap().remove(&made.as_raw_fd()).unwrap();
        assert_eq!(self.shown(&place.path), None, "nothing is mounted over a share to stage another");
        self.add(&place.path, &source, flags);
        Ok(())
    }

    fn open_place(&self, mount: &Mount) -> io::Result<Place> {
        let list = MountList::open(&self.root)?.read()?;
        let there = last(&list, &mount.path).is_some_and(|there| there.id == mount.id);
        if there { Place::open_mounted_folder(&mount.path) } else { Err(Errno::ESTALE.into()) }
    }

    fn set_private(&self, place: &Place) -> io::Result<()> {
        assert!(place.as_fd().as_raw_fd() >= 0);
        Ok(())
    }

    fn mount(&self, what: &What<'_>, place: &Place, how: How) -> io::Result<()> {
        let What::Bind { source, .. } = what else { panic!("{what:?}") };
        if let Some(error) = self.stuck.lock().unwrap().get(&place.path) {
            return Err((*error).into());
        }
        let (source, _) = self.shown(&source.path).unwrap();
        self.add(&place.path, &source, flags(how.flags));
        Ok(())
    }

    fn usage(&self, directory: &Path) -> io::Result<Room> {
        let is_dead =
            self.shown(directory).is_some_and(|(source, _)| self.dead.lock().unwrap().contains(&source));
        if is_dead { Err(Errno::ETIMEDOUT.into()) } else { usage(directory) }
    }

    fn unmount(&self, path: &Path) -> io::Result<()> {
        self.end("unmount", path)
    }

    fn abort(&self, path: &Path) -> io::Result<()> {
        self.end("abort", path)
    }

    fn detach(&self, path: &Path) -> io::Result<()> {
        self.end("detach", path)
    }
}

pub(crate) struct Bench {
    pub(crate) guest: Guest,
    pub(crate) machine: Arc<Machine>,
    pub(crate) kubelet: PathBuf,
    pub(crate) staging: PathBuf,
    _folder: tempfile::TempDir,
}

impl Bench {
    pub(crate) fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let above = folder.path().canonicalize().unwrap();
        std::fs::create_dir_all(above.join("proc/self")).unwrap();
        let kubelet = above.join("kubelet");
        let list = above.join("proc/self/mountinfo");
        std::fs::create_dir_all(kubelet.join("pods")).unwrap();
        std::fs::write(&list, "").unwrap();
        let root = Root::at(&above);
        let machine = Arc::new(Machine {
            root: root.clone(),
            list,
            mounts: Mutex::default(),
            made: Mutex::default(),
            refusals: Mutex::default(),
            dead: Mutex::default(),
            stuck: Mutex::default(),
            data: Mutex::default(),
            ended: Mutex::default(),
        });
        let effects = Arc::clone(&machine) as Arc<dyn Effects>;
        let guest = Guest { root, effects, ..Guest::default() };
        guest.pod_volumes.serve(&kubelet);
        let staging = kubelet.join("plugins/v/globalmount");
        note(&staging, "v");
        Self { guest, machine, kubelet, staging, _folder: folder }
    }

    pub(crate) fn pod(&self, name: &str) -> PathBuf {
        let place = self.kubelet.join("pods").join(name).join("mount");
        note(&place, "v");
        place
    }

    async fn stage(&self, server: &str, usage: &Usage) -> Result<(), Error> {
        stage(&self.guest, &share(server), self.staging.to_str().unwrap(), usage).await
    }

    pub(crate) async fn publish(&self, server: &str, pod: &str, usage: &Usage) -> Result<(), Error> {
        let (staging, target) = (self.staging.to_str().unwrap(), self.pod(pod));
        publish(&self.guest, &share(server), (staging, target.to_str().unwrap()), usage).await
    }

    async fn unpublish(&self, pod: &str) -> Result<(), Error> {
        unpublish(&self.guest, "v", self.pod(pod).to_str().unwrap()).await
    }

    async fn unstage(&self) -> Result<(), Error> {
        unstage(&self.guest, "v", self.staging.to_str().unwrap()).await
    }

    /// Lets the host half report this server; returns whether that was a change.
    async fn moves_to(&self, server: &str, pod: &str) -> Result<bool, Error> {
        let told = || std::future::ready(Some(share(server)));
        find_again(&self.guest, self.pod(pod).to_str().unwrap(), told).await
    }

    fn is_empty(&self) -> bool {
        self.machine.mounts.lock().unwrap().is_empty()
    }
}

/// Writes the record that kubelet keeps beside a place.
fn note(place: &Path, volume: &str) {
    let folder = place.parent().unwrap();
    std::fs::create_dir_all(folder).unwrap();
    let text = format!("{{\"driverName\":\"d\",\"volumeHandle\":\"{volume}\",\"specVolID\":\"pv\"}}");
    std::fs::write(folder.join("vol_data.json"), text).unwrap();
}

fn share(server: &str) -> Share {
    let server = server.parse().unwrap();
    Share { volume: "v".into(), server, path: "/pvc-1".into(), options: Vec::new() }
}

pub(crate) fn writable() -> Usage {
    Usage { options: Vec::new(), read_only: false, single: false }
}

fn read_only() -> Usage {
    Usage { read_only: true, ..writable() }
}

fn from(server: &str, flags: &'static str) -> (String, &'static str) {
    (format!("{server}:/pvc-1"), flags)
}

#[tokio::test]
async fn a_share_is_mounted_shown_and_taken_away() {
    let bench = Bench::new();
    for _ in 0..2 {
        bench.stage("10.0.0.1", &writable()).await.unwrap();
    }
    assert_eq!(
        *bench.machine.data.lock().unwrap(),
        ["vers=4.1,noresvport,softerr,timeo=600,retrans=5,addr=10.0.0.1"]
    );
    let not = bench.stage("10.0.0.1", &read_only()).await.unwrap_err();
    assert!(matches!(not, Error::Otherwise { .. }), "{not}");
    for _ in 0..2 {
        bench.publish("10.0.0.1", "a", &writable()).await.unwrap();
        bench.publish("10.0.0.1", "b", &read_only()).await.unwrap();
    }
    assert_eq!(bench.machine.shown(&bench.pod("a")), Some(from("10.0.0.1", "rw")));
    assert_eq!(bench.machine.shown(&bench.pod("b")), Some(from("10.0.0.1", "ro")));
    let taken = bench.publish("10.0.0.1", "c", &Usage { single: true, ..writable() }).await.unwrap_err();
    assert!(matches!(taken, Error::Taken(_)), "{taken}");
    for pod in ["a", "b"] {
        bench.unpublish(pod).await.unwrap();
        assert!(!bench.pod(pod).exists());
    }
    for _ in 0..2 {
        bench.unstage().await.unwrap();
    }
    assert!(bench.is_empty());
    let none = bench.publish("10.0.0.1", "a", &writable()).await.unwrap_err();
    assert!(matches!(none, Error::NotStaged { .. }), "{none}");
}

#[tokio::test]
async fn a_server_that_has_moved_is_seen_wherever_the_one_before_was() {
    let bench = Bench::new();
    bench.stage("10.0.0.2", &writable()).await.unwrap();
    bench.publish("10.0.0.2", "a", &writable()).await.unwrap();
    bench.publish("10.0.0.2", "b", &read_only()).await.unwrap();
    // Mount of a different volume, which another server exports with the same path.
    let foreign = bench.kubelet.join("pods/c/mount");
    note(&foreign, "w");
    std::fs::create_dir(&foreign).unwrap();
    bench.machine.add(&foreign, "10.0.0.8:/pvc-1", "rw");
    // The address that kubelet repeats is outdated, and the present server responds.
    bench.stage("10.0.0.1", &writable()).await.unwrap();
    assert_eq!(bench.machine.shown(&bench.staging), Some(from("10.0.0.2", "rw")));
    // A process that waits for the dead server holds the lock of its directory, which must not block this.
    bench.machine.dead.lock().unwrap().insert("10.0.0.2:/pvc-1".into());
    bench.machine.stuck.lock().unwrap().insert(bench.pod("a"), Errno::ETIMEDOUT);
    bench.stage("10.0.0.3", &writable()).await.unwrap();
    assert_eq!(bench.machine.shown(&bench.staging), Some(from("10.0.0.3", "rw")));
    assert_eq!(
        bench.machine.shown(&bench.pod("a")),
        Some(from("10.0.0.2", "rw")),
        "this is for another time"
    );
    assert_eq!(bench.machine.shown(&bench.pod("b")), Some(from("10.0.0.3", "ro")));
    bench.machine.stuck.lock().unwrap().clear();
    assert!(!bench.moves_to("10.0.0.3", "b").await.unwrap());
    assert_eq!(bench.machine.shown(&bench.pod("a")), Some(from("10.0.0.3", "rw")));

    // Only the host half reports the move; kubelet does not stage it again.
    assert!(bench.moves_to("10.0.0.4", "b").await.unwrap());
    assert!(!bench.moves_to("10.0.0.4", "b").await.unwrap());
    for (place, flags) in [(bench.staging.clone(), "rw"), (bench.pod("a"), "rw"), (bench.pod("b"), "ro")] {
        assert_eq!(bench.machine.shown(&place), Some(from("10.0.0.4", flags)));
    }
    let data = bench.machine.data.lock().unwrap().last().unwrap().clone();
    assert!(data.ends_with(",hard,addr=10.0.0.4"), "as before: {data}");
    assert_eq!(bench.machine.shown(&foreign), Some(from("10.0.0.8", "rw")));
    // A server that refuses leaves all mounts as they were.
    bench.machine.refusals.lock().unwrap().push(Errno::ENOENT);
    bench.moves_to("10.0.0.5", "b").await.unwrap_err();
    assert_eq!(bench.machine.shown(&bench.staging), Some(from("10.0.0.4", "rw")));
    // All mounts on top of each other are removed.
    for pod in ["a", "b"] {
        bench.unpublish(pod).await.unwrap();
    }
    bench.unstage().await.unwrap();
    assert_eq!(bench.machine.mounts.lock().unwrap().len(), 1, "the foreign one");
}

/// `MNT_FORCE` affects the whole file system: writes of another pod would be lost.
#[tokio::test(start_paused = true)]
async fn a_dead_server_is_given_up_only_by_its_last_mount() {
    let bench = Bench::new();
    bench.stage("10.0.0.1", &writable()).await.unwrap();
    for pod in ["a", "b"] {
        bench.publish("10.0.0.1", pod, &writable()).await.unwrap();
    }
    bench.machine.dead.lock().unwrap().insert("10.0.0.1:/pvc-1".into());
    // A process of the pod is still using it.
    bench.machine.stuck.lock().unwrap().insert(bench.pod("a"), Errno::EBUSY);
    for pod in ["a", "b"] {
        bench.unpublish(pod).await.unwrap();
    }
    let expected = [("unmount", bench.pod("a")), ("detach", bench.pod("a")), ("unmount", bench.pod("b"))];
    assert_eq!(std::mem::take(&mut *bench.machine.ended.lock().unwrap()), expected);
    bench.unstage().await.unwrap();
    assert_eq!(*bench.machine.ended.lock().unwrap(), [("abort", bench.staging.clone())]);
    assert!(bench.is_empty());

    // With a server that responds, a mount in use is kept.
    bench.machine.dead.lock().unwrap().clear();
    let stuck = std::mem::take(&mut *bench.machine.stuck.lock().unwrap());
    bench.stage("10.0.0.1", &writable()).await.unwrap();
    bench.publish("10.0.0.1", "a", &writable()).await.unwrap();
    *bench.machine.stuck.lock().unwrap() = stuck;
    let used = bench.unpublish("a").await.unwrap_err();
    assert!(used.to_string().contains("in use"), "{used}");
}

#[tokio::test]
async fn only_what_was_looked_at_is_acted_on() {
    let bench = Bench::new();
    bench.stage("10.0.0.1", &writable()).await.unwrap();
    let list = place::mounts(&bench.guest).await.unwrap();
    let staged = last(&list, &bench.staging).unwrap();
    std::fs::create_dir(bench.pod("a")).unwrap();
    // The staged mount has been removed, and replaced by another one.
    bench.unstage().await.unwrap();
    let gone = mounts::bind(&bench.guest, staged, &bench.pod("a"), MsFlags::empty()).await.unwrap_err();
    assert!(matches!(gone, Error::System { .. } | Error::NotStaged { .. }), "{gone}");
    bench.stage("10.0.0.1", &writable()).await.unwrap();
    let gone = mounts::bind(&bench.guest, staged, &bench.pod("a"), MsFlags::empty()).await.unwrap_err();
    assert!(matches!(gone, Error::NotStaged { .. }), "{gone}");
    assert_eq!(bench.machine.shown(&bench.pod("a")), None, "a pod is never shown an empty folder");
    let made = mounts::make(&bench.guest, &share("10.0.0.2"), &writable()).await.unwrap();
    mounts::put(&bench.guest, made, &bench.staging, Some(staged)).await.unwrap_err();
    assert_eq!(bench.machine.shown(&bench.staging), Some(from("10.0.0.1", "rw")));
}

#[tokio::test]
async fn what_cannot_be_mounted_says_why() {
    let bench = Bench::new();
    let refuse = |errors: &[Errno]| *bench.machine.refusals.lock().unwrap() = errors.to_vec();
    for error in [Errno::ENODEV, Errno::ENOSYS] {
        refuse(&[error]);
        let error = bench.stage("10.0.0.1", &writable()).await.unwrap_err();
        assert!(error.to_string().contains("no module nfsv4"), "{error}");
    }
    refuse(&[Errno::ETIMEDOUT]);
    let error = bench.stage("10.0.0.1", &writable()).await.unwrap_err();
    assert!(matches!(error, Error::NoServer { .. }), "{error}");
    refuse(&[Errno::EACCES]);
    let error = bench.stage("10.0.0.1", &writable()).await.unwrap_err();
    assert!(matches!(error, Error::System { .. }), "{error}");
    assert!(bench.is_empty());
    // Something else is mounted there.
    bench.machine.add(&bench.staging, "10.0.0.1:/pvc-2", "rw");
    let error = bench.stage("10.0.0.1", &writable()).await.unwrap_err();
    assert!(matches!(error, Error::Otherwise { .. }), "{error}");
    let error = bench.publish("10.0.0.1", "a", &writable()).await.unwrap_err();
    assert!(matches!(error, Error::NotStaged { .. }), "{error}");
}
