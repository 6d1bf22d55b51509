//! The settings while the host half runs: edited files are read again, and what is good is put in force.
//!
//! ```text
//!  a file changes ──▶ wait until it is quiet ──▶ read, check ──good──▶ in force ──▶ backend ──▶ fleet
//!        ▲                                           └──wrong──▶ the old ones stay; people are told why
//!        └─────────────────────────────────────────────────────────────────────────────┘
//! ```
//!
//! `parts` has what they come to for each part of the host half.

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

/// Editors write a file in several steps: it is read when nothing has happened for this long.
const QUIET: Duration = Duration::from_millis(100);
/// It is read after this long in any case.
const PATIENCE: Duration = Duration::from_secs(2);
/// How often files are looked at where the kernel cannot tell when they change.
const LOOK_AGAIN: Duration = Duration::from_secs(10);

/// Reads edited settings and puts them in force.
pub struct Reloader {
    options: Options,
    /// Those in force, but for what needs a restart.
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

/// What others learn of the settings.
pub struct Followed {
    /// The VMs.
    pub machines: watch::Receiver<Vec<qemu::Machine>>,
    /// The pools.
    pub pools: watch::Receiver<Vec<pools::Pool>>,
    /// What clusters may.
    pub policies: watch::Receiver<Policies>,
    /// What they may have of load balancers.
    pub cloud: watch::Receiver<Arc<cloud::Settings>>,
    /// Where this host is.
    pub topology: watch::Receiver<Arc<Topology>>,
    /// What holds for all VMs of a node.
    #[cfg(feature = "kubevirt")]
    pub node: watch::Receiver<node::Options>,
    /// What holds for all VMs of a cluster.
    #[cfg(feature = "kubevirt")]
    pub controller: watch::Receiver<controller::Options>,
    /// Who may ask for what.
    pub access: watch::Receiver<Arc<Rules>>,
    /// What is fetched from exporters in guests.
    pub exporters: watch::Receiver<Jobs>,
    /// How the settings are.
    pub standing: watch::Receiver<Standing>,
}

impl Reloader {
    /// Begins to watch the files of `options`, of which `current` was read.
    ///
    /// # Errors
    /// If the kernel does not let them be watched.
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

    /// Reloads until `shutdown`.
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

    /// Names of rules that nobody has may be mistakes, or those of users to be.
    async fn warn_of_unknown_names(&self) {
        let rules = Arc::clone(&self.access.borrow());
        for name in peer::unknown_names(&rules).await {
            tracing::warn!("an [[access]] table names the {name}, which does not exist");
        }
    }

    /// Watches the folder of the main file, where an editor renames the new one to it, and the drop-ins'.
    fn watch(&mut self) -> anyhow::Result<()> {
        let folders = [folder(&self.options.file), self.options.file.with_extension("d")];
        let watch = |watcher: &mut dyn Watcher| {
            for folder in &folders {
                match watcher.watch(folder, RecursiveMode::NonRecursive) {
                    Err(error) if matches!(error.kind, ErrorKind::MaxFilesWatch) => return Err(error),
                    // A folder that is not there is seen when it comes: the drop-ins' is in the other one.
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
                    // A host that is only somewhere else has the same VMs.
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

/// Told what happens to files.
#[derive(Clone)]
struct Listener {
    ours: Ours,
    change: mpsc::Sender<()>,
}

impl notify::EventHandler for Listener {
    fn handle_event(&mut self, event: notify::Result<notify::Event>) {
        if event.map_or(true, |event| self.ours.concerns(&event)) {
            // One that waits already stands for this one too.
            let _ = self.change.try_send(());
        }
    }
}

impl Listener {
    /// Looks at the files now and then, as the kernel has no room to tell of them.
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

/// Which files the settings are in.
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

    /// Whether the settings may be others now. An event without a path says that some were lost.
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
                // The link that Kubernetes moves when it changes a mounted ConfigMap.
                || name == Some("..data".as_ref())
        };
        event.paths.is_empty() || event.paths.iter().any(ours)
    }
}

/// What of `new` cannot be put in force while the program runs.
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
