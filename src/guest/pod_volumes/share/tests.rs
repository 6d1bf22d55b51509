//! On a machine that is only said to mount: its list of mounts is a file.

#![allow(clippy::disallowed_methods, reason = "a test writes files")]

use std::io;
use std::sync::Mutex;

use nix::errno::Errno;

use super::*;
use crate::guest::pod_volumes::remove::{unpublish, unstage};
use crate::sys::effects::Effects;
use crate::sys::root::Root;

/// What the machine was asked for, and what it has mounted: path, source, and flags.
#[derive(Debug)]
pub(crate) struct Machine {
    list: PathBuf,
    mounts: Mutex<Vec<(PathBuf, String, &'static str)>>,
    /// What mount(2) says to each, from the first on.
    pub(crate) refusals: Mutex<Vec<Errno>>,
    data: Mutex<Vec<String>>,
}

impl Machine {
    fn change(&self, change: impl FnOnce(&mut Vec<(PathBuf, String, &'static str)>)) {
        let mut mounts = self.mounts.lock().unwrap();
        change(&mut mounts);
        let line = |(id, (path, source, flags)): (usize, &(PathBuf, String, &'static str))| {
            let device = 40 + source.len() + usize::from(source.as_bytes()[0]);
            format!(
                "{} 1 0:{device} / {} {flags} - nfs4 {source} rw,vers=4.0,hard\n",
                100 + id,
                path.display()
            )
        };
        std::fs::write(&self.list, mounts.iter().enumerate().map(line).collect::<String>()).unwrap();
    }

    fn drop_last(&self, path: &Path) -> io::Result<()> {
        let at = self.mounts.lock().unwrap().iter().rposition(|(at, ..)| at == path);
        let at = at.ok_or(Errno::EINVAL)?;
        self.change(|mounts| drop(mounts.remove(at)));
        Ok(())
    }

    /// What is mounted last at a path.
    pub(crate) fn shown(&self, path: &Path) -> Option<(String, &'static str)> {
        let mounts = self.mounts.lock().unwrap();
        mounts.iter().rfind(|(at, ..)| at == path).map(|(_, source, flags)| (source.clone(), *flags))
    }
}

impl Effects for Machine {
    fn mount(&self, what: &What<'_>, place: &Place, how: How) -> io::Result<()> {
        let flags = if how.flags.contains(MsFlags::MS_RDONLY) { "ro" } else { "rw" };
        let source = match what {
            What::FileSystem { source, kind, data } => {
                assert_eq!(*kind, "nfs4");
                self.data.lock().unwrap().push((*data).to_owned());
                let mut refusals = self.refusals.lock().unwrap();
                if !refusals.is_empty() {
                    return Err(refusals.remove(0).into());
                }
                source.display().to_string()
            }
            What::Bind { source, .. } => self.shown(&source.path).unwrap().0,
        };
        self.change(|mounts| mounts.push((place.path.clone(), source, flags)));
        Ok(())
    }

    fn unmount(&self, path: &Path) -> io::Result<()> {
        self.drop_last(path)
    }
}

pub(crate) struct Bench {
    pub(crate) guest: Guest,
    pub(crate) machine: Arc<Machine>,
    pub(crate) staging: PathBuf,
    _folder: tempfile::TempDir,
}

impl Bench {
    pub(crate) fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let above = folder.path().canonicalize().unwrap();
        std::fs::create_dir_all(above.join("proc/self")).unwrap();
        let kubelet = above.join("kubelet");
        std::fs::create_dir_all(kubelet.join("pods")).unwrap();
        let list = above.join("proc/self/mountinfo");
        std::fs::write(&list, "").unwrap();
        let (mounts, refusals, data) = (Mutex::default(), Mutex::default(), Mutex::default());
        let machine = Arc::new(Machine { list, mounts, refusals, data });
        let effects = Arc::clone(&machine) as Arc<dyn Effects>;
        let guest = Guest { root: Root::at(&above), effects, ..Guest::default() };
        guest.pod_volumes.serve(&kubelet);
        Self { guest, machine, staging: kubelet.join("globalmount"), _folder: folder }
    }

    pub(crate) fn pod(&self, name: &str) -> PathBuf {
        self.staging.with_file_name("pods").join(name)
    }

    async fn stage(&self, server: &str, usage: &Usage) -> Result<(), Error> {
        stage(&self.guest, &share(server), self.staging.to_str().unwrap(), usage).await
    }

    pub(crate) async fn publish(&self, server: &str, pod: &str, usage: &Usage) -> Result<(), Error> {
        let (staging, target) = (self.staging.to_str().unwrap(), self.pod(pod));
        publish(&self.guest, &share(server), (staging, target.to_str().unwrap()), usage).await
    }
}

fn share(server: &str) -> Share {
    let server = server.parse().unwrap();
    Share { volume: "v".into(), server, path: "/pvc-1".into(), options: Vec::new() }
}

pub(crate) fn writable() -> Usage {
    Usage { options: Vec::new(), read_only: false, single: false }
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
    let not = bench.stage("10.0.0.1", &Usage { read_only: true, ..writable() }).await.unwrap_err();
    assert!(matches!(not, Error::Otherwise { .. }), "{not}");
    for _ in 0..2 {
        bench.publish("10.0.0.1", "a", &writable()).await.unwrap();
        bench.publish("10.0.0.1", "b", &Usage { read_only: true, ..writable() }).await.unwrap();
    }
    let from = |flags| Some(("10.0.0.1:/pvc-1".to_owned(), flags));
    assert_eq!(bench.machine.shown(&bench.pod("a")), from("rw"));
    assert_eq!(bench.machine.shown(&bench.pod("b")), from("ro"));
    let taken = bench.publish("10.0.0.1", "c", &Usage { single: true, ..writable() }).await.unwrap_err();
    assert!(matches!(taken, Error::Taken(_)), "{taken}");
    for pod in ["a", "b"] {
        unpublish(&bench.guest, "v", bench.pod(pod).to_str().unwrap()).await.unwrap();
        assert!(!bench.pod(pod).exists());
    }
    for _ in 0..2 {
        unstage(&bench.guest, "v", bench.staging.to_str().unwrap()).await.unwrap();
    }
    assert!(bench.machine.mounts.lock().unwrap().is_empty());
    let none = bench.publish("10.0.0.1", "a", &writable()).await.unwrap_err();
    assert!(matches!(none, Error::NotStaged { .. }), "{none}");
}

#[tokio::test]
async fn a_server_that_has_moved_is_mounted_over_the_one_before_wherever_that_is_seen() {
    let bench = Bench::new();
    bench.stage("10.0.0.1", &writable()).await.unwrap();
    bench.publish("10.0.0.1", "a", &writable()).await.unwrap();
    bench.publish("10.0.0.1", "b", &Usage { read_only: true, ..writable() }).await.unwrap();
    // The agent ended after the new one was mounted, before pods were shown it.
    let moved = "10.0.0.2:/pvc-1".to_owned();
    bench.machine.change(|mounts| mounts.push((bench.staging.clone(), moved.clone(), "rw")));
    for _ in 0..2 {
        bench.stage("10.0.0.2", &writable()).await.unwrap();
        assert_eq!(bench.machine.shown(&bench.pod("a")), Some((moved.clone(), "rw")));
        assert_eq!(bench.machine.shown(&bench.pod("b")), Some((moved.clone(), "ro")));
    }
    bench.stage("10.0.0.3", &writable()).await.unwrap();
    let again = Some(("10.0.0.3:/pvc-1".to_owned(), "rw"));
    assert_eq!(bench.machine.shown(&bench.staging), again);
    assert_eq!(bench.machine.shown(&bench.pod("a")), again);
    // It is the same one, as the kernel knows.
    *bench.machine.refusals.lock().unwrap() = vec![Errno::EBUSY];
    bench.stage("10.0.0.9", &writable()).await.unwrap();
    assert_eq!(bench.machine.shown(&bench.staging), again);
    // The host half says so, and nobody stages it.
    let path = bench.pod("b").to_str().unwrap().to_owned();
    let ask = async |server: &str| {
        let told = |is_read_only: bool| {
            assert!(!is_read_only, "where it is staged it is writable");
            std::future::ready(Some(share(server)))
        };
        find_again(&bench.guest, "v", &path, told).await.unwrap()
    };
    assert!(ask("10.0.0.4").await);
    assert!(!ask("10.0.0.4").await);
    let now = "10.0.0.4:/pvc-1".to_owned();
    for (place, flags) in [(bench.staging.clone(), "rw"), (bench.pod("a"), "rw"), (bench.pod("b"), "ro")] {
        assert_eq!(bench.machine.shown(&place), Some((now.clone(), flags)));
    }
    let data = bench.machine.data.lock().unwrap().last().unwrap().clone();
    assert!(data.starts_with("vers=4.0,") && data.ends_with(",hard,addr=10.0.0.4"), "as before: {data}");
    // Whatever lies on top of each other goes.
    unpublish(&bench.guest, "v", bench.pod("a").to_str().unwrap()).await.unwrap();
    unpublish(&bench.guest, "v", bench.pod("b").to_str().unwrap()).await.unwrap();
    unstage(&bench.guest, "v", bench.staging.to_str().unwrap()).await.unwrap();
    assert!(bench.machine.mounts.lock().unwrap().is_empty());
}

#[tokio::test]
async fn what_cannot_be_mounted_says_why() {
    let bench = Bench::new();
    let refuse = |errors: &[Errno]| *bench.machine.refusals.lock().unwrap() = errors.to_vec();
    refuse(&[Errno::ENODEV]);
    let error = bench.stage("10.0.0.1", &writable()).await.unwrap_err();
    assert!(error.to_string().contains("no module nfsv4"), "{error}");
    refuse(&[Errno::ETIMEDOUT]);
    let error = bench.stage("10.0.0.1", &writable()).await.unwrap_err();
    assert!(matches!(error, Error::NoServer { .. }), "{error}");
    refuse(&[Errno::EACCES]);
    let error = bench.stage("10.0.0.1", &writable()).await.unwrap_err();
    assert!(matches!(error, Error::System { .. }), "{error}");
    // A kernel that knows no softerr.
    refuse(&[Errno::EINVAL]);
    bench.stage("10.0.0.1", &writable()).await.unwrap();
    assert!(bench.machine.data.lock().unwrap().last().unwrap().contains(",soft,"));
    // Something else is there.
    let other = "10.0.0.1:/pvc-2".to_owned();
    bench.machine.change(|mounts| mounts[0].1 = other);
    let error = bench.stage("10.0.0.1", &writable()).await.unwrap_err();
    assert!(matches!(error, Error::Otherwise { .. }), "{error}");
    let error = bench.publish("10.0.0.1", "a", &writable()).await.unwrap_err();
    assert!(matches!(error, Error::NotStaged { .. }), "{error}");
}
