//! Settings of `guestlet-host`: where it listens, and the VMs of this machine.
//!
//! ```toml
//! socket = "/run/guestlet-host/api.sock"
//! volumes-dir = "/var/lib/guestlet-host/volumes"
//!
//! [[vm]]
//! name = "web-1"
//! uuid = "6f1c0a52-5c0f-4a8e-9d1b-0d7a2f3b4c5d"
//! cluster = "dev"                 # optional
//! vsock-cid = 3                   # or vsock-socket, or unix-socket
//! qmp = "/run/vm/web-1/qmp.sock"  # optional
//! port = 970                      # optional
//!
//! [[pool]]                        # a storage class, optional
//! name = "fast"
//! path = "/srv/fast"
//!
//! [[address-pool]]                # addresses for load balancers, optional
//! name = "lan"
//! ranges = ["192.0.2.10-192.0.2.99"]
//!
//! [cluster.dev]                   # limits of a cluster, optional
//! max-volumes = 100
//!
//! [[access]]                      # permissions of users of the host, optional
//! groups = ["vm-operators"]
//! roles = ["read"]
//! vms = ["web-*"]
//!
//! [[scrape]]                      # exporters in guests, optional
//! job = "node"
//! target = "9100"
//!
//! [audit]                         # optional
//! file = "/var/log/guestlet-host/audit.json"
//!
//! [limits]                        # optional
//! events-per-second = 64
//! ```
//!
//! A node of a Kubernetes cluster has a table `[kubevirt]` instead of `[[vm]]`, `[[pool]]`, `[[address-pool]]` and
//! `[topology]`.
//!
//! The tables `[[vm]]`, `[[pool]]`, `[[address-pool]]`, `[[access]]` and `[[scrape]]` of all fragments add up; for
//! any other setting the last fragment wins. To add a setting of a VM: a field in `vm::VmFragment`, its check in
//! `Checker::vm`, and its place in [`VmSettings`].

use std::collections::{BTreeMap, HashMap};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use toml::Spanned;

use super::{Error, Fragment, load};
use crate::access::{Rule, Rules};

mod access;
mod address_pool;
mod audit;
mod cluster;
mod kubevirt;
mod limits;
mod load_balancers;
mod pool;
mod scrape;
mod topology;
mod trust;
mod vm;

use access::AccessFragment;
use address_pool::AddressPoolFragment;
pub use address_pool::AddressPoolSettings;
use audit::AuditFragment;
pub use audit::AuditSettings;
use cluster::ClusterFragment;
pub use cluster::ClusterSettings;
use kubevirt::KubevirtFragment;
pub use kubevirt::KubevirtSettings;
pub use limits::LimitSettings;
use limits::LimitsFragment;
pub use load_balancers::LoadBalancerSettings;
use load_balancers::LoadBalancersFragment;
use pool::PoolFragment;
pub use pool::{Allocation, Bus, Format, PoolSettings};
use scrape::ScrapeFragment;
pub use scrape::ScrapeSettings;
use topology::TopologyFragment;
pub use topology::TopologySettings;
use trust::TrustFragment;
pub use trust::TrustSettings;
use vm::{Checker, VmFragment};
pub use vm::{ConsoleSettings, DEFAULT_PORT, DialSettings, VmSettings};

/// Default path of the settings file, which the command line may override.
pub const DEFAULT_FILE: &str = "/etc/guestlet/host.toml";
/// Default path of the socket on which `guestctl` reaches the daemon.
pub const DEFAULT_SOCKET: &str = "/run/guestlet-host/api.sock";
/// Default name of the metrics socket, in the directory of the admin API's socket.
const METRICS_SOCKET: &str = "metrics.sock";
/// Default directory of the volumes.
const VOLUMES: &str = "/var/lib/guestlet-host/volumes";
/// Maximum length of a socket path on Linux, in bytes (without the final zero).
const MAX_SOCKET_PATH: usize = 107;

/// Role in which `guestlet-host` runs. Some settings are valid in one role only.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// The host half of this machine, whose VMs are in the settings.
    Machine,
    /// The host half of a node of a Kubernetes cluster, whose API lists the VMs.
    Node,
    /// The controller, which attaches volumes to the VMs of such a cluster.
    Controller,
}

impl Role {
    /// Returns whether VMs are found through the API of a Kubernetes cluster.
    fn is_of_a_cluster(self) -> bool {
        self != Self::Machine
    }
}

/// Settings of `guestlet-host`, merged from all fragments and checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostSettings {
    /// Unix socket of the admin API.
    pub socket: PathBuf,
    /// Unix socket of the metrics.
    pub metrics_socket: PathBuf,
    /// TCP address of the metrics, on loopback unless the network namespace is that of a pod.
    pub metrics: Option<SocketAddr>,
    /// Directory of the volumes that are created for VMs.
    pub volumes: PathBuf,
    /// Address pools, in the order in which they are written.
    pub address_pools: Vec<AddressPoolSettings>,
    /// Storage of load balancer records, and the program that sets up forwarding.
    pub load_balancers: LoadBalancerSettings,
    /// Access rules for users of the host other than root and guestlet-host's own user.
    pub access: Rules,
    /// Audit log of the requests.
    pub audit: AuditSettings,
    /// Settings for all VMs of a Kubernetes node.
    pub kubevirt: KubevirtSettings,
    /// Limits on the resources that one guest may use.
    pub limits: LimitSettings,
    /// Volume pools, in the order in which they are written.
    pub pools: Vec<PoolSettings>,
    /// Limits and permissions of clusters, by cluster name.
    pub clusters: BTreeMap<String, ClusterSettings>,
    /// Exporters in guests that are scraped, in the order in which they are written.
    pub scrapes: Vec<ScrapeSettings>,
    /// Topology of this host: region, zone, name and labels.
    pub topology: TopologySettings,
    /// Locations of the keys of guests and of this host half.
    pub trust: TrustSettings,
    /// VMs, sorted by name.
    pub vms: Vec<VmSettings>,
    /// Remarks on settings that no longer have any effect, for the user, with file and line.
    pub remarks: Vec<String>,
}

impl HostSettings {
    /// Reads and checks `file`, and the fragments in the directory of the same name with `.d` for `.toml`.
    ///
    /// # Errors
    /// The first problem, with file and line. A missing `file` is an error only if it is `required`.
    pub fn load(file: &Path, required: bool, role: Role) -> Result<Self, Error> {
        let fragment: HostFragment = load(file, required, &file.with_extension("d"))?;
        fragment.check(role)
    }
}

/// Fragments in the order in which they were read, unchecked.
#[derive(Debug, Default, Deserialize)]
#[serde(from = "Parsed")]
pub struct HostFragment {
    sources: Vec<Source>,
}

/// Fragment, with the file and text that it was read from.
#[derive(Debug, Default)]
struct Source {
    file: PathBuf,
    text: String,
    parsed: Parsed,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct Parsed {
    socket: Option<Spanned<PathBuf>>,
    metrics_socket: Option<Spanned<PathBuf>>,
    metrics: Option<Spanned<String>>,
    volumes_dir: Option<Spanned<PathBuf>>,
    #[serde(default)]
    address_pool: Vec<Spanned<AddressPoolFragment>>,
    #[serde(default)]
    load_balancers: LoadBalancersFragment,
    #[serde(default)]
    access: Vec<Spanned<AccessFragment>>,
    #[serde(default)]
    audit: AuditFragment,
    kubevirt: Option<Spanned<KubevirtFragment>>,
    #[serde(default)]
    limits: LimitsFragment,
    #[serde(default)]
    pool: Vec<Spanned<PoolFragment>>,
    #[serde(default)]
    cluster: BTreeMap<String, Spanned<ClusterFragment>>,
    #[serde(default)]
    scrape: Vec<Spanned<ScrapeFragment>>,
    topology: Option<Spanned<TopologyFragment>>,
    #[serde(default)]
    trust: TrustFragment,
    #[serde(default)]
    vm: Vec<Spanned<VmFragment>>,
}

impl From<Parsed> for HostFragment {
    fn from(parsed: Parsed) -> Self {
        Self { sources: vec![Source { parsed, ..Source::default() }] }
    }
}

impl Fragment for HostFragment {
    fn merge(&mut self, later: Self, file: &Path) {
        self.sources
            .extend(later.sources.into_iter().map(|source| Source { file: file.to_owned(), ..source }));
    }

    fn remember(&mut self, text: &str) {
        for source in &mut self.sources {
            text.clone_into(&mut source.text);
        }
    }
}

impl HostFragment {
    /// Merges the fragments and checks the outcome for the role.
    ///
    /// # Errors
    /// The first invalid setting, with file and line.
    pub fn check(self, role: Role) -> Result<HostSettings, Error> {
        let mut socket = PathBuf::from(DEFAULT_SOCKET);
        let (mut metrics_socket, mut metrics) = (None, None);
        let mut volumes = PathBuf::from(VOLUMES);
        let mut limits = LimitSettings::default();
        let (mut topology, mut kubevirt) = (TopologySettings::default(), KubevirtSettings::default());
        let mut trust = TrustSettings::default();
        let (mut vms, mut pools, mut clusters) = (Vec::new(), Vec::new(), BTreeMap::new());
        let mut scrapes = Vec::new();
        let (mut access, mut audit) = (Vec::<Rule>::new(), AuditSettings::default());
        let (mut address_pools, mut load_balancers) = (Vec::new(), LoadBalancerSettings::usual(role));
        let mut remarks = Vec::new();
        let mut taken = HashMap::new();
        for source in &self.sources {
            source.check_role(role)?;
            if let Some(path) = &source.parsed.socket {
                socket = source.socket_path("socket", path)?;
            }
            if let Some(path) = &source.parsed.metrics_socket {
                metrics_socket = Some(source.socket_path("metrics-socket", path)?);
            }
            if let Some(address) = &source.parsed.metrics {
                metrics = Some(source.address(address, role)?);
            }
            if let Some(path) = &source.parsed.volumes_dir {
                volumes = source.absolute("volumes-dir", path)?;
            }
            for pool in &source.parsed.address_pool {
                let pool = address_pool::check(source, pool, &address_pools, &mut taken)?;
                address_pools.push(pool);
            }
            load_balancers::check(source, &source.parsed.load_balancers, &mut load_balancers)?;
            for rule in &source.parsed.access {
                access.push(access::check(source, rule)?);
            }
            audit::check(source, &source.parsed.audit, &mut audit)?;
            limits::check(source, &source.parsed.limits, &mut limits)?;
            for pool in &source.parsed.pool {
                pools.push(pool::check(source, pool, &mut taken)?);
            }
            for (name, cluster) in &source.parsed.cluster {
                clusters.insert(name.clone(), cluster::check(source, name, cluster)?);
            }
            for one in &source.parsed.scrape {
                scrapes.push(scrape::check(source, one, &mut taken)?);
            }
            trust::check(source, &source.parsed.trust, &mut trust)?;
            if let Some(found) = &source.parsed.topology {
                topology::check(source, found.get_ref(), &mut topology)?;
            }
            if let Some(found) = &source.parsed.kubevirt {
                kubevirt::check(source, found.get_ref(), &mut kubevirt)?;
            }
            remarks.extend(vm::remark(source, &source.parsed.vm));
            for vm in &source.parsed.vm {
                vms.push(Checker { source, vm, taken: &mut taken }.vm()?);
            }
        }
        // In the other roles, the storage classes and VMs of a cluster are not in the settings.
        if role == Role::Machine {
            self.check_references(&pools, &vms)?;
        }
        vms.sort_by(|a: &VmSettings, b| a.name.cmp(&b.name));
        let metrics_socket = metrics_socket.unwrap_or_else(|| socket.with_file_name(METRICS_SOCKET));
        Ok(HostSettings {
            socket,
            metrics_socket,
            metrics,
            volumes,
            address_pools,
            load_balancers,
            access: Rules::new(access),
            audit,
            kubevirt,
            limits,
            pools,
            clusters,
            scrapes,
            topology,
            trust,
            vms,
            remarks,
        })
    }

    /// Checks that the pools and VMs that clusters name exist.
    fn check_references(&self, pools: &[PoolSettings], vms: &[VmSettings]) -> Result<(), Error> {
        for source in &self.sources {
            for (name, cluster) in &source.parsed.cluster {
                cluster::check_references(source, name, cluster, pools, vms)?;
            }
        }
        Ok(())
    }
}

impl Source {
    fn wrong<T>(&self, at: &Spanned<T>, problem: String) -> Error {
        Error::at(&self.file, &self.text, at.span().start, problem)
    }

    /// Checks that no setting is present that belongs to another role only.
    fn check_role(&self, role: Role) -> Result<(), Error> {
        let Parsed { vm, pool, address_pool, topology, kubevirt, .. } = &self.parsed;
        let vm = vm
            .first()
            .map(|vm| self.wrong(vm, "VMs are found through the Kubernetes API; remove [[vm]]".to_owned()));
        let pool = pool.first().map(|pool| {
            self.wrong(
                pool,
                "there are no pools: volumes are claims in the Kubernetes cluster; remove [[pool]]"
                    .to_owned(),
            )
        });
        let address_pool = address_pool.first().map(|pool| {
            let words = "load balancers get their addresses from the pools of the Kubernetes cluster; remove [[address-pool]]";
            self.wrong(pool, words.to_owned())
        });
        let topology = topology.as_ref().map(|topology| {
            let words = "the topology is read from the labels of the Node; remove [topology], and list \
                         further labels in kubevirt.node-labels";
            self.wrong(topology, words.to_owned())
        });
        let kubevirt = kubevirt.as_ref().map(|kubevirt| {
            self.wrong(
                kubevirt,
                "[kubevirt] is for guestlet-host node and controller; start one of these, or remove it"
                    .to_owned(),
            )
        });
        let wrong = match role {
            Role::Machine => kubevirt,
            Role::Node | Role::Controller => vm.or(pool).or(address_pool).or(topology),
        };
        wrong.map_or(Ok(()), Err)
    }

    /// Parses the address of the metrics, which has to be on loopback unless the network namespace is that of a pod.
    fn address(&self, address: &Spanned<String>, role: Role) -> Result<SocketAddr, Error> {
        let found = address.get_ref();
        match found.parse::<SocketAddr>() {
            Ok(parsed) if parsed.ip().is_loopback() || role.is_of_a_cluster() => Ok(parsed),
            Ok(_) => {
                let problem = format!("metrics = {found:?} is not on loopback; use 127.0.0.1 or [::1]");
                Err(self.wrong(address, problem))
            }
            Err(_) => {
                let problem =
                    format!("metrics = {found:?} is not an address and port; write it like 127.0.0.1:9970");
                Err(self.wrong(address, problem))
            }
        }
    }

    /// Checks that `value` was not used as `what` before, and remembers where it is used.
    fn unique<'a, T>(
        &'a self,
        taken: &mut vm::Taken<'a>,
        what: &str,
        at: &Spanned<T>,
        value: &str,
    ) -> Result<(), Error> {
        let Some((first, offset)) = taken.insert(format!("{what} {value}"), (self, at.span().start)) else {
            return Ok(());
        };
        let first = format!("{}:{}", first.file.display(), super::line_of(&first.text, offset));
        let problem = format!("{what} {value:?} is already used at {first}; change one");
        Err(self.wrong(at, problem))
    }

    fn absolute(&self, key: &str, path: &Spanned<PathBuf>) -> Result<PathBuf, Error> {
        let found = path.get_ref();
        if !found.is_absolute() {
            return Err(self.wrong(
                path,
                format!("{key} = {:?} is a relative path; give one that starts with /", found.display()),
            ));
        }
        Ok(found.clone())
    }

    fn socket_path(&self, key: &str, path: &Spanned<PathBuf>) -> Result<PathBuf, Error> {
        let found = self.absolute(key, path)?;
        if found.as_os_str().len() > MAX_SOCKET_PATH {
            let problem = format!(
                "{key} is a path of {} bytes, but the kernel allows {MAX_SOCKET_PATH}; use a shorter one",
                found.as_os_str().len()
            );
            return Err(self.wrong(path, problem));
        }
        Ok(found)
    }
}

#[cfg(test)]
mod tests;
