//! Reload of the settings while the host half runs: edited files are read again, and valid settings are
//! applied.
//!
//! ```text
//!  a file changes ──▶ wait until it is quiet ──▶ read, check ──good──▶ in force ──▶ backend ──▶ fleet
//!        ▲                                           └──wrong──▶ the old ones stay; the reason is reported
//!        └─────────────────────────────────────────────────────────────────────────────┘
//! ```
//!
//! `parts` derives from them what each part of the host half needs.

mod parts;

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use anyhow::Context as _;
use notify::{ErrorKind, EventKind, PollWatcher, RecursiveMode, Watcher};
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;

use super::{Options, check};
use crate::access::Rules;
use crate::config::host::HostSettings;
#[cfg(feature = "kubevirt")]
use crate::host::backends::kubevirt::{controller, node};
use crate::host::backends::qemu;
use crate::host::backends::qemu::pools;
use crate::host::cloud::settings as cloud;
use crate::host::exporters::Jobs;
use crate::host::peer;
use crate::host::place::Topology;
use crate::host::settings::Standing;
use crate::host::volumes::policy::Policies;

use parts::{cloud_of, jobs_of, machines, policies_of, pools_of, topology};
#[cfg(feature = "kubevirt")]
use parts::{controller_of, node_of};

/// Quiet time after the last change before files are read, because editors write a file in several steps.
const QUIET: Duration = Duration::from_millis(100);
/// Longest wait before changed files are read.
const PATIENCE: Duration = Duration::from_secs(2);
/// Interval at which files are checked where the kernel cannot report changes.
const LOOK_AGAIN: Duration = Duration::from_secs(10);

/// Reads changed settings and applies them.
pub struct Reloader {
    options: Options,
    /// Settings in force, apart from those that need a restart.
    current: HostSettings,
    machines: watch::Sender<Vec<qemu::Machine>>,
    pools: watch::Sender<Vec<pools::Pool>>,
    policies: watch::Sender<Policies>,
    cloud: watch::Sender<Arc<cloud::Settings>>,
    topology: watch::Sender<Arc<Topology>>,
    #[cfg(feature = "kubevirt")]
    node: watch::Sender<node::Options>,
    #[cfg(feature = "kubevirt")]
    controller: watch::Sender<controller::Options>,
    access: watch::Sender<Arc<Rules>>,
    exporters: watch::Sender<Jobs>,
    standing: watch::Sender<Standing>,
    changed: mpsc::Receiver<()>,
    watcher: Box<dyn Watcher + Send + Sync>,
    listener: Listener,
}

/// Receivers of the settings for the other parts.
pub struct Followed {
    /// Virtual machines.
    pub machines: watch::Receiver<Vec<qemu::Machine>>,
    /// Storage pools.
    pub pools: watch::Receiver<Vec<pools::Pool>>,
    /// Policies of clusters for volumes.
    pub policies: watch::Receiver<Policies>,
    /// Settings of clusters for load balancers.
    pub cloud: watch::Receiver<Arc<cloud::Settings>>,
    /// Topology of this host.
    pub topology: watch::Receiver<Arc<Topology>>,
    /// Options for all VMs of a node.
    #[cfg(feature = "kubevirt")]
    pub node: watch::Receiver<node::Options>,
    /// Options for all VMs of a cluster.
    #[cfg(feature = "kubevirt")]
    pub controller: watch::Receiver<controller::Options>,
    /// Rules of access for the callers of the host half.
    pub access: watch::Receiver<Arc<Rules>>,
    /// Exporters in guests that are scraped.
    pub exporters: watch::Receiver<Jobs>,
    /// State of the settings: the problems with them.
    pub standing: watch::Receiver<Standing>,
}

impl Reloader {
    /// Starts to watch the files of `options`, from which `current` was read.
    ///
    /// # Errors
    /// Fails if the kernel does not permit watching them.
    pub fn new(options: Options, current: HostSettings) -> anyhow::Result<(Self, Followed)> {
        let (machines, followed_machines) = watch::channel(machines(&current));
        let (pools, followed_pools) = watch::channel(pools_of(&current));
        let (policies, followed_policies) = watch::channel(policies_of(&current));
        let (cloud, followed_cloud) = watch::channel(Arc::new(cloud_of(&current)));
        let (topology, topologies) = watch::channel(Arc::new(topology(&current.topology)));
        #[cfg(feature = "kubevirt")]
        let (node, followed_node) = watch::channel(node_of(&current));
        #[cfg(feature = "kubevirt")]
        let (controller, followed_controller) = watch::channel(controller_of(&current));
        let (access, rules) = watch::channel(Arc::new(current.access.clone()));
        let (exporters, jobs) = watch::channel(jobs_of(&current));
        let (standing, told) = watch::channel(Standing::new(options.file.clone()));
        let (change, changed) = mpsc::channel(1);
        let listener = Listener { ours: Ours::of(&options.file), change };
        let watcher: Box<dyn Watcher + Send + Sync> = match notify::recommended_watcher(listener.clone()) {
            Ok(watcher) => Box::new(watcher),
            Err(error) => Box::new(listener.look(&error)?),
        };
        let mut reloader = Self {
            options,
            current,
            machines,
            pools,
            policies,
            cloud,
            topology,
            #[cfg(feature = "kubevirt")]
            node,
            #[cfg(feature = "kubevirt")]
            controller,
            access,
            exporters,
            standing,
            changed,
            watcher,
            listener,
        };
        reloader.watch()?;
        let followed = Followed {
            machines: followed_machines,
            pools: followed_pools,
            policies: followed_policies,
            cloud: followed_cloud,
            topology: topologies,
            #[cfg(feature = "kubevirt")]
            node: followed_node,
            #[cfg(feature = "kubevirt")]
            controller: followed_controller,
            access: rules,
            exporters: jobs,
            standing: told,
        };
        Ok((reloader, followed))
    }

    /// Reloads the settings until `shutdown`.
    pub async fn run(mut self, shutdown: CancellationToken) {
        self.warn_of_unknown_names().await;
        loop {
            tokio::select! {
                () = shutdown.cancelled() => return,
                change = self.changed.recv() => if change.is_none() { return shutdown.cancelled().await },
            }
            let quiet =
                async { while let Ok(Some(())) = tokio::time::timeout(QUIET, self.changed.recv()).await {} };
            drop(tokio::time::timeout(PATIENCE, quiet).await);
            if let Err(error) = self.watch() {
                tracing::error!("changes of the settings may not be noticed: {error:#}");
            }
            let rules = Arc::clone(&self.access.borrow());
            self.reload();
            if !Arc::ptr_eq(&rules, &self.access.borrow()) {
                self.warn_of_unknown_names().await;
            }
        }
    }

    /// Warns of unknown names in rules: they may be mistakes, or those of future users.
    async fn warn_of_unknown_names(&self) {
        let rules = Arc::clone(&self.access.borrow());
        for name in peer::unknown_names(&rules).await {
            tracing::warn!("an [[access]] table names the {name}, which does not exist");
        }
    }

    /// Watches the directory of the main file, because editors replace the file by a rename, and that of the
    /// drop-ins.
    fn watch(&mut self) -> anyhow::Result<()> {
        let folders = [folder(&self.options.file), self.options.file.with_extension("d")];
        let watch = |watcher: &mut dyn Watcher| {
            for folder in &folders {
                match watcher.watch(folder, RecursiveMode::NonRecursive) {
                    Err(error) if matches!(error.kind, ErrorKind::MaxFilesWatch) => return Err(error),
                    // A missing directory is noticed when it appears: that of the drop-ins is inside the other one.
                    Err(error) => tracing::debug!(%error, folder = %folder.display(), "not watched"),
                    Ok(()) => {}
                }
            }
            Ok(())
        };
        if let Err(error) = watch(&mut *self.watcher) {
            self.watcher = Box::new(self.listener.look(&error)?);
            watch(&mut *self.watcher)?;
        }
        Ok(())
    }

    fn reload(&mut self) {
        match check(&self.options) {
            Err(error) => self.refused(format!("{error:#}")),
            Ok(new) => {
                let waits = waits_for_restart(&self.current, &new);
                let new = HostSettings {
                    socket: self.current.socket.clone(),
                    metrics_socket: self.current.metrics_socket.clone(),
                    metrics: self.current.metrics,
                    volumes: self.current.volumes.clone(),
                    trust: self.current.trust.clone(),
                    audit: self.current.audit.clone(),
                    load_balancers: self.current.load_balancers.clone(),
                    ..new
                };
                if new.remarks != self.current.remarks {
                    new.remarks.iter().for_each(|remark| tracing::warn!("{remark}"));
                }
                if new != self.current {
                    tracing::info!(vms = new.vms.len(), "the settings changed");
                    self.pools.send_replace(pools_of(&new));
                    self.policies.send_replace(policies_of(&new));
                    let cloud = Arc::new(cloud_of(&new));
                    self.cloud
                        .send_if_modified(|before| std::mem::replace(before, Arc::clone(&cloud)) != cloud);
                    // A host of which only the location has changed still has the same VMs.
                    if (&new.vms, &new.limits) != (&self.current.vms, &self.current.limits) {
                        self.machines.send_replace(machines(&new));
                    }
                    if new.topology != self.current.topology {
                        self.topology.send_replace(Arc::new(topology(&new.topology)));
                    }
                    #[cfg(feature = "kubevirt")]
                    if (&new.kubevirt, &new.limits) != (&self.current.kubevirt, &self.current.limits) {
                        self.node.send_replace(node_of(&new));
                        self.controller.send_replace(controller_of(&new));
                    }
                    if new.scrapes != self.current.scrapes {
                        self.exporters.send_replace(jobs_of(&new));
                    }
                    if new.access != self.current.access {
                        self.access.send_replace(Arc::new(new.access.clone()));
                    }
                    self.standing.send_modify(|standing| standing.since = SystemTime::now());
                    self.current = new;
                }
                if let Some(waits) = &waits {
                    tracing::warn!("{waits}");
                }
                self.standing.send_modify(|standing| standing.problem = waits);
            }
        }
    }

    fn refused(&self, problem: String) {
        tracing::error!("the settings are invalid, and the previous ones stay in force: {problem}");
        self.standing.send_modify(|standing| standing.problem = Some(problem));
    }
}

/// Receiver of events about files.
#[derive(Clone)]
struct Listener {
    ours: Ours,
    change: mpsc::Sender<()>,
}

impl notify::EventHandler for Listener {
    fn handle_event(&mut self, event: notify::Result<notify::Event>) {
        if event.map_or(true, |event| self.ours.concerns(&event)) {
            // A change that is already queued covers this one.
            let _ = self.change.try_send(());
        }
    }
}

impl Listener {
    /// Polls the files at an interval, because the kernel has no resources for watches.
    fn look(&self, problem: &notify::Error) -> anyhow::Result<PollWatcher> {
        let seconds = LOOK_AGAIN.as_secs();
        tracing::warn!(
            "no inotify instances or watches are left ({problem}): other programs of this user have used them \
             up; changed settings are noticed after up to {seconds} s: raise the sysctls fs.inotify.max_user_instances and \
             fs.inotify.max_user_watches, and restart guestlet-host"
        );
        let how = notify::Config::default().with_poll_interval(LOOK_AGAIN).with_compare_contents(true);
        PollWatcher::new(self.clone(), how).context("cannot watch files")
    }
}

/// Names of the files that contain the settings.
#[derive(Clone)]
struct Ours {
    file: Option<OsString>,
    drop_ins: Option<OsString>,
}

impl Ours {
    fn of(file: &Path) -> Self {
        let name = |path: &Path| path.file_name().map(ToOwned::to_owned);
        Self { file: name(file), drop_ins: name(&file.with_extension("d")) }
    }

    /// Returns whether an event may have changed the settings. An event without a path reports that events were
    /// lost.
    fn concerns(&self, event: &notify::Event) -> bool {
        if matches!(event.kind, EventKind::Access(_)) {
            return false;
        }
        let ours = |path: &PathBuf| {
            let name = path.file_name();
            let folder = path.parent().and_then(Path::file_name);
            name == self.file.as_deref()
                || name == self.drop_ins.as_deref()
                || folder == self.drop_ins.as_deref()
                // Kubernetes replaces this link when it changes a mounted ConfigMap.
                || name == Some("..data".as_ref())
        };
        event.paths.is_empty() || event.paths.iter().any(ours)
    }
}

/// Describes the changes in `new` that need a restart; `None` if there are none.
fn waits_for_restart(current: &HostSettings, new: &HostSettings) -> Option<String> {
    let changed = [
        ("socket", new.socket != current.socket),
        ("metrics-socket", new.metrics_socket != current.metrics_socket),
        ("metrics", new.metrics != current.metrics),
        ("volumes-dir", new.volumes != current.volumes),
        ("trust", new.trust != current.trust),
        ("audit.file", new.audit != current.audit),
        ("load-balancers", new.load_balancers != current.load_balancers),
        ("kubevirt.controller", new.kubevirt.controller != current.kubevirt.controller),
        ("kubevirt.access-mode", new.kubevirt.access_mode != current.kubevirt.access_mode),
    ];
    let keys: Vec<_> = changed.into_iter().filter_map(|(key, changed)| changed.then_some(key)).collect();
    (!keys.is_empty()).then(|| format!("{} changed: restart guestlet-host to apply it", keys.join(", ")))
}

fn folder(file: &Path) -> PathBuf {
    match file.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder.to_owned(),
        _ => PathBuf::from("."),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::host::Role;
    use notify::event::{AccessKind, ModifyKind};

    #[test]
    #[allow(clippy::disallowed_methods)]
    fn volumes_that_name_no_class_are_of_the_first_pool_unless_another_is_said() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("host.toml");
        for (rest, expected) in [("", "a"), ("default = false", "a"), ("default = true", "b")] {
            let pools = format!(
                "[[pool]]\nname = 'a'\npath = '/a'\n[[pool]]\nname = 'b'\npath = '/b'\n{rest}\n[[pool]]\nname = 'c'\npath = '/c'\n"
            );
            std::fs::write(&file, pools).unwrap();
            let pools = pools_of(&HostSettings::load(&file, true, Role::Machine).unwrap());
            let names: Vec<_> =
                pools.iter().filter(|pool| pool.is_default).map(|pool| pool.name.as_str()).collect();
            assert_eq!(names, [expected], "{rest}");
        }
    }

    #[test]
    fn only_changes_of_the_settings_concern_them() {
        let ours = Ours::of(Path::new("/etc/guestlet/host.toml"));
        let change = EventKind::Modify(ModifyKind::Any);
        let cases = [
            ("host.toml", change, true),
            ("host.toml", EventKind::Access(AccessKind::Any), false),
            ("host.toml.swp", change, false),
            ("log", change, false),
            ("host.d", change, true),
            ("host.d/10-more.toml", change, true),
            ("..data", change, true),
        ];
        for (path, kind, expected) in cases {
            let event = notify::Event::new(kind).add_path(Path::new("/etc/guestlet").join(path));
            assert_eq!(ours.concerns(&event), expected, "{path}");
        }
        assert!(ours.concerns(&notify::Event::new(EventKind::Other)));
    }

    #[test]
    fn what_needs_a_restart_is_named() {
        let settings = |text: &str| {
            let fragment: crate::config::host::HostFragment =
                crate::config::parse(Path::new("a"), text).unwrap();
            fragment.check(Role::Machine).unwrap()
        };
        let before = settings("");
        assert_eq!(waits_for_restart(&before, &settings("limits.users = 3")), None);
        assert_eq!(
            waits_for_restart(&before, &settings("metrics = '[::1]:1'\nmetrics-socket = '/a'")).unwrap(),
            "metrics-socket, metrics changed: restart guestlet-host to apply it"
        );
    }
}
