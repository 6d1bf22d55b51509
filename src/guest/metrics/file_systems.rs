//! Usage of file systems, whether they are read-only, and whether the kernel has found errors in them.
//!
//! statvfs(3) hangs for as long as a server or a disk does not answer, and cannot be interrupted. So each file
//! system is queried separately, with a common deadline; one that still hangs is not queried again before it has
//! answered; and only a few are queried at a time.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::Semaphore;
use tokio::time::Instant;

use crate::guest::metrics::{Things, flag, put, whole};
use crate::metrics::{Sample, table};
use crate::sys::blocking;
use crate::sys::mountinfo::{self, Mount};
use crate::sys::root::Root;
use crate::sys::usage::{Usage, usage};

/// Deadline for all file systems together.
const DEADLINE: Duration = Duration::from_secs(1);
/// Number of file systems that are queried at a time, hanging ones included: on disks, and on servers.
const ON_DISKS: usize = 2;
const ON_SERVERS: usize = 4;
/// Maximum number of file systems that are queried.
const MOST: usize = 128;
/// Maximum size of the list of mounts in bytes.
const MOST_BYTES: u64 = 8 << 20;

/// Types without a block device that hold data: those of servers, and those that span several devices.
const WITHOUT_DEVICE: [&str; 12] =
    ["9p", "bcachefs", "beegfs", "btrfs", "ceph", "cifs", "gpfs", "lustre", "nfs", "nfs4", "virtiofs", "zfs"];
/// Types among `WITHOUT_DEVICE` that are on disks of this machine.
const ON_DISKS_OF_THIS: [&str; 3] = ["bcachefs", "btrfs", "zfs"];
/// Types with a block device that are always full.
const ALWAYS_FULL: [&str; 4] = ["erofs", "iso9660", "squashfs", "udf"];

/// Mount options of a file system that cannot be written to. Later kernels show the last two for an ext4 with
/// errors.
const READ_ONLY: [&str; 3] = ["ro", "emergency_ro", "shutdown"];

/// File system to query.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::guest) struct Probed {
    /// Mount ID of the selected mount; the file system may have others.
    pub(in crate::guest) id: u64,
    /// Major and minor device number, which stay the same as long as the file system is mounted anywhere.
    pub(in crate::guest) device: (u32, u32),
    path: PathBuf,
    pub(in crate::guest) mount_point: String,
    /// Source of the mount, such as `/dev/vda1`.
    pub(in crate::guest) source: String,
    pub(in crate::guest) kind: String,
    pub(in crate::guest) is_read_only: bool,
    is_on_disks: bool,
    /// Number of errors that are recorded in the file system.
    errors: Option<u64>,
}

impl Probed {
    /// Returns whether the file system is on disks of this guest, and not on a server.
    pub(in crate::guest) fn is_on_disks(&self) -> bool {
        self.is_on_disks
    }
}

#[cfg(test)]
impl Probed {
    /// Creates a file system on a disk, for tests.
    pub(in crate::guest) fn for_tests(id: u64) -> Self {
        Self {
            id,
            device: (254, u32::try_from(id).unwrap_or_default()),
            path: format!("/{id}").into(),
            mount_point: format!("/{id}"),
            source: "/dev/vda".into(),
            kind: "ext4".into(),
            is_read_only: false,
            is_on_disks: true,
            errors: None,
        }
    }
}

/// Returns the mounted file systems, each once, those on disks first.
///
/// # Errors
/// If the list of mounts cannot be read, or is longer than 8 MiB.
pub(in crate::guest) fn mounts(root: &Root) -> io::Result<Vec<Probed>> {
    let list = root.read_at_most("/proc/self/mountinfo", MOST_BYTES)?;
    let mut found = chosen(mountinfo::parse(&list));
    for (mount, probed) in &mut found {
        if mount.kind == "ext4" {
            probed.errors = errors(root, mount.device);
        }
    }
    Ok(found.into_iter().map(|(_, probed)| probed).collect())
}

fn errors(root: &Root, (major, minor): (u32, u32)) -> Option<u64> {
    let device = std::fs::read_link(root.path(&format!("/sys/dev/block/{major}:{minor}"))).ok()?;
    let name = device.file_name()?.to_str()?;
    root.line(&format!("/sys/fs/ext4/{name}/errors_count")).parse().ok()
}

/// Selects the mounts of file systems that hold data, one for each file system: a mount of its root directory if
/// there is one, and of several the one with the shortest mount point.
fn chosen(mounts: Vec<Mount>) -> Vec<(Mount, Probed)> {
    // A later mount at the same mount point hides the earlier one.
    let mut by_place: BTreeMap<PathBuf, Mount> = BTreeMap::new();
    for mount in mounts {
        by_place.insert(mount.path.clone(), mount);
    }
    let mut by_device: BTreeMap<(u32, u32), Mount> = BTreeMap::new();
    let rank = |mount: &Mount| (mount.root != "/", mount.mount_point.len(), mount.id);
    for mount in by_place.into_values().filter(holds_something) {
        match by_device.get(&mount.device) {
            Some(known) if rank(known) <= rank(&mount) => {}
            _ => drop(by_device.insert(mount.device, mount)),
        }
    }
    let probed = |mount: Mount| {
        let is_read_only =
            mount.has_flag("ro") || mount.options.split(',').any(|one| READ_ONLY.contains(&one));
        let is_on_disks = mount.device.0 != 0 || ON_DISKS_OF_THIS.contains(&mount.kind.as_str());
        let (path, mount_point) = (mount.path.clone(), mount.mount_point.clone());
        let (kind, source) = (mount.kind.clone(), mount.source.clone());
        let (id, device) = (mount.id, mount.device);
        let probed =
            Probed { id, device, path, mount_point, source, kind, is_read_only, is_on_disks, errors: None };
        (mount, probed)
    };
    let mut all: Vec<_> = by_device.into_values().map(probed).collect();
    all.sort_by_key(|(mount, probed)| (!probed.is_on_disks, mount.mount_point.len(), mount.id));
    all.truncate(MOST);
    all
}

fn holds_something(mount: &Mount) -> bool {
    let kind = mount.kind.as_str();
    // Container runtimes mount single files over those of /proc and /sys: these are no file systems to report.
    let is_virtual = mount.mount_point.starts_with("/proc/") || mount.mount_point.starts_with("/sys/");
    let has_device = mount.device.0 != 0 && !ALWAYS_FULL.contains(&kind);
    !is_virtual && (has_device || WITHOUT_DEVICE.contains(&kind) || kind.starts_with("fuse."))
}

/// Queries file systems, and remembers which of them do not answer.
#[derive(Debug)]
pub(in crate::guest) struct Prober {
    on_disks: Arc<Semaphore>,
    on_servers: Arc<Semaphore>,
    /// Mount IDs of the file systems that are being queried.
    asked: Arc<Mutex<BTreeSet<u64>>>,
}

impl Default for Prober {
    fn default() -> Self {
        let [on_disks, on_servers] = [ON_DISKS, ON_SERVERS].map(|most| Arc::new(Semaphore::new(most)));
        Self { on_disks, on_servers, asked: Arc::default() }
    }
}

/// Marks a mount as being queried until this is dropped.
struct Asked(Arc<Mutex<BTreeSet<u64>>>, u64);

impl Drop for Asked {
    fn drop(&mut self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.1);
    }
}

impl Prober {
    /// Returns the series of each file system that answers, the fullest first, and the number of those that do not
    /// answer.
    pub(super) async fn measure(&self, root: &Root, mounts: Vec<Probed>) -> (Things, u64) {
        self.measure_with(mounts, DEADLINE, usage, root).await
    }

    async fn measure_with(
        &self,
        mounts: Vec<Probed>,
        within: Duration,
        ask: impl Fn(&std::path::Path) -> io::Result<Usage> + Clone + Send + 'static,
        root: &Root,
    ) -> (Things, u64) {
        let (answers, unresponsive) = self.ask_all(mounts, within, ask, root).await;
        let mut full: Vec<_> =
            answers.iter().map(|(probed, usage)| (free(usage), series(probed, usage))).collect();
        full.sort_by(|one, other| one.0.total_cmp(&other.0));
        (full.into_iter().map(|(_, series)| series).collect(), unresponsive)
    }

    /// Returns the usage of each file system that answers before the deadline.
    pub(in crate::guest) async fn usages(&self, root: &Root, mounts: Vec<Probed>) -> Vec<(Probed, Usage)> {
        self.ask_all(mounts, DEADLINE, usage, root).await.0
    }

    /// Returns the usage of each file system that answers and has a size, and the number of those that do not answer.
    async fn ask_all(
        &self,
        mounts: Vec<Probed>,
        within: Duration,
        ask: impl Fn(&std::path::Path) -> io::Result<Usage> + Clone + Send + 'static,
        root: &Root,
    ) -> (Vec<(Probed, Usage)>, u64) {
        let end = Instant::now() + within;
        let all = mounts.into_iter().map(|probed| {
            let (path, ask) = (root.path_of(&probed.path), ask.clone());
            async move {
                let answer = tokio::time::timeout_at(end, self.ask(&probed, move || ask(&path))).await;
                (probed, answer.unwrap_or(None))
            }
        });
        let mut unresponsive = 0;
        let mut answers = Vec::new();
        for (probed, answer) in futures_util::future::join_all(all).await {
            match answer {
                None => unresponsive += 1,
                // It was unmounted in the meantime, or cannot be reached.
                Some(Err(_)) => {}
                // A pseudo file system without a size.
                Some(Ok(usage)) if usage.total_privileged == 0 => {}
                Some(Ok(usage)) => answers.push((probed, usage)),
            }
        }
        (answers, unresponsive)
    }

    /// Queries one file system; returns `None` if an earlier query of it still hangs. Waits until one of the slots is
    /// free.
    async fn ask(
        &self,
        probed: &Probed,
        ask: impl FnOnce() -> io::Result<Usage> + Send + 'static,
    ) -> Option<io::Result<Usage>> {
        if self.asked.lock().unwrap_or_else(PoisonError::into_inner).contains(&probed.id) {
            return None;
        }
        let turns = if probed.is_on_disks { &self.on_disks } else { &self.on_servers };
        let turn = Arc::clone(turns).acquire_owned().await.ok()?;
        if !self.asked.lock().unwrap_or_else(PoisonError::into_inner).insert(probed.id) {
            return None;
        }
        let asked = Asked(Arc::clone(&self.asked), probed.id);
        // The slot and the mark are held until the file system has answered, even if the caller has timed out.
        let answer = blocking::attempt(move || {
            let answer = ask();
            drop((asked, turn));
            answer
        });
        answer.await.ok()
    }
}

/// Returns the free fraction of the file system, from 0 to 1: of its bytes or of its inodes, whichever is less.
pub(in crate::guest) fn free(usage: &Usage) -> f64 {
    let of = |free: u64, all: u64| if all == 0 { 1.0 } else { whole(free) / whole(all) };
    of(usage.available, usage.total).min(of(usage.inodes_free, usage.inodes))
}

fn series(probed: &Probed, usage: &Usage) -> Vec<Sample> {
    let mut samples = Vec::new();
    let labels = [probed.mount_point.as_str(), probed.kind.as_str()];
    let limited = usage.inodes > 0;
    let rows = [
        (&table::FS_SIZE, Some(whole(usage.total_privileged))),
        (&table::FS_AVAILABLE, Some(whole(usage.available))),
        (&table::FS_INODES, limited.then(|| whole(usage.inodes))),
        (&table::FS_INODES_FREE, limited.then(|| whole(usage.inodes_free))),
        (&table::FS_READ_ONLY, Some(flag(probed.is_read_only))),
        (&table::FS_ERRORS, probed.errors.map(whole)),
    ];
    for (family, value) in rows {
        if let Some(value) = value {
            put(&mut samples, family, &labels, value);
        }
    }
    samples
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;
    use crate::guest::metrics::told;

    const CAPTURED: &[u8] = b"\
22 27 0:21 / /proc rw - proc proc rw\n\
27 1 254:1 / / rw,relatime shared:1 - ext4 /dev/vda1 rw,errors=remount-ro\n\
28 27 254:1 /var/lib/x /short rw - ext4 /dev/vda1 rw\n\
29 27 8:16 /sub /data/long rw - xfs /dev/sdb rw\n\
30 27 8:16 /sub /data rw - xfs /dev/sdb ro\n\
31 27 0:50 / /run rw - tmpfs tmpfs rw\n\
32 27 0:51 / /nfs rw - nfs4 server:/x rw\n\
33 27 7:0 / /snap/x ro - squashfs /dev/loop0 ro\n\
34 27 0:52 / /pool ro - btrfs /dev/sdc ro\n\
37 27 8:48 / /broken rw - ext4 /dev/sde rw,errors=remount-ro,emergency_ro\n\
35 27 8:32 / /hidden rw - ext4 /dev/sdd rw\n\
36 35 0:53 / /hidden rw - tmpfs over rw\n";

    #[test]
    fn each_file_system_that_holds_something_is_found_once() {
        let found = chosen(mountinfo::parse(CAPTURED));
        let told: Vec<_> = found
            .iter()
            .map(|(_, one)| (one.mount_point.as_str(), one.kind.as_str(), one.is_read_only, one.is_on_disks))
            .collect();
        let expected = [
            ("/", "ext4", false, true),
            ("/data", "xfs", true, true),
            ("/pool", "btrfs", true, true),
            ("/broken", "ext4", true, true),
            ("/nfs", "nfs4", false, false),
        ];
        assert_eq!(told, expected);
    }

    #[test]
    fn errors_of_ext4_are_found_by_its_device() {
        let folder = tempfile::tempdir().unwrap();
        let root = Root::at(folder.path());
        for directory in ["proc/self", "sys/dev/block", "sys/fs/ext4/vda1"] {
            std::fs::create_dir_all(folder.path().join(directory)).unwrap();
        }
        #[allow(clippy::disallowed_methods)]
        {
            std::fs::write(folder.path().join("proc/self/mountinfo"), CAPTURED).unwrap();
            std::fs::write(folder.path().join("sys/fs/ext4/vda1/errors_count"), "3\n").unwrap();
        }
        std::os::unix::fs::symlink("../../devices/x/vda/vda1", folder.path().join("sys/dev/block/254:1"))
            .unwrap();
        let errors: Vec<_> = mounts(&root).unwrap().into_iter().map(|one| one.errors).collect();
        assert_eq!(errors, [Some(3), None, None, None, None]);
    }

    fn probed(id: u64, is_on_disks: bool) -> Probed {
        Probed { is_on_disks, ..Probed::for_tests(id) }
    }

    fn half_full(available: u64) -> Usage {
        Usage { used: 50, total: 100, total_privileged: 110, available, inodes: 0, inodes_free: 0 }
    }

    /// A file system that hangs costs the deadline once, and is not queried again until it has answered.
    #[tokio::test]
    async fn one_that_hangs_costs_a_deadline_and_no_thread_more() {
        let prober = Prober::default();
        let (answer, hang) = mpsc::channel::<()>();
        let hang = Arc::new(Mutex::new(hang));
        let asks = Arc::new(Mutex::new(Vec::new()));
        let ask = {
            let asks = Arc::clone(&asks);
            move |path: &std::path::Path| {
                asks.lock().unwrap().push(path.to_owned());
                if path.ends_with("7") {
                    let _ = hang.lock().unwrap().recv();
                }
                Ok(half_full(if path.ends_with("2") { 10 } else { 20 }))
            }
        };
        let mounts = || vec![probed(1, true), probed(2, true), probed(7, false)];
        let root = Root::default();
        for round in 1..4 {
            // Afterwards it would be waited for in vain.
            let within = if round == 1 { Duration::from_secs(3) } else { Duration::from_secs(60) };
            let (series, unresponsive) = prober.measure_with(mounts(), within, ask.clone(), &root).await;
            let first: Vec<_> = series.iter().map(|series| told(series)[1].clone()).collect();
            assert_eq!(
                first,
                ["filesystem_available_bytes /2 ext4 10", "filesystem_available_bytes /1 ext4 20"]
            );
            assert_eq!(unresponsive, 1);
            let hanging = asks.lock().unwrap().iter().filter(|path| path.ends_with("7")).count();
            assert_eq!(hanging, 1, "in round {round}");
        }
        answer.send(()).unwrap();
        while prober.asked.lock().unwrap().contains(&7) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        drop(answer);
        let (series, unresponsive) =
            prober.measure_with(mounts(), Duration::from_secs(60), ask.clone(), &root).await;
        assert_eq!((series.len(), unresponsive), (3, 0));
    }

    /// However many network file systems hang, those on disks are still reported.
    #[tokio::test]
    async fn many_that_hang_take_no_more_threads_than_they_may() {
        let prober = Prober::default();
        let (answer, hang) = mpsc::channel::<()>();
        let hang = Arc::new(Mutex::new(hang));
        let begun = Arc::new(Mutex::new(0));
        let ask = {
            let begun = Arc::clone(&begun);
            move |path: &std::path::Path| {
                if !path.ends_with("1") {
                    *begun.lock().unwrap() += 1;
                    let _ = hang.lock().unwrap().recv();
                }
                Ok(half_full(1))
            }
        };
        let mut mounts = vec![probed(1, true)];
        mounts.extend((100..150).map(|id| probed(id, false)));
        let (series, unresponsive) =
            prober.measure_with(mounts, Duration::from_secs(3), ask, &Root::default()).await;
        assert_eq!((series.len(), unresponsive), (1, 50));
        assert!(*begun.lock().unwrap() <= ON_SERVERS);
        drop(answer);
    }
}
