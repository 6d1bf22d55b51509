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
//! callback-port = 971             # optional
//!
//! [[pool]]                        # a storage class, optional
//! name = "fast"
//! path = "/srv/fast"
//!
//! [cluster.dev]                   # what a cluster may, optional
//! max-volumes = 100
//!
//! [limits]                        # optional
//! events-per-second = 64
//! ```
//!
//! `[[vm]]` and `[[pool]]` tables of all fragments add up; of anything else the last one wins. To add a setting of a VM: a
//! field in `vm::VmFragment`, its check in `Checker::vm`, and its place in [`VmSettings`].

use std::collections::{BTreeMap, HashMap};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use toml::Spanned;

use super::{Error, Fragment, load};

mod cluster;
mod limits;
mod pool;
mod topology;
mod vm;

use cluster::ClusterFragment;
pub use cluster::ClusterSettings;
pub use limits::LimitSettings;
use limits::LimitsFragment;
use pool::PoolFragment;
pub use pool::{Allocation, Bus, Format, PoolSettings};
use topology::TopologyFragment;
pub use topology::TopologySettings;
use vm::{Checker, VmFragment};
pub use vm::{DEFAULT_CALLBACK_PORT, DEFAULT_PORT, DialSettings, VmSettings};

/// Where the settings are unless the command line says otherwise.
pub const DEFAULT_FILE: &str = "/etc/guestlet/host.toml";
/// Where `guestctl` finds the daemon unless told otherwise.
pub const DEFAULT_SOCKET: &str = "/run/guestlet-host/api.sock";
/// Where the metrics are, beside the admin API, unless told otherwise.
const METRICS_SOCKET: &str = "metrics.sock";
/// Where volumes are unless told otherwise.
const VOLUMES: &str = "/var/lib/guestlet-host/volumes";
/// Longest socket path that Linux takes, in bytes (without the final zero).
const MAX_SOCKET_PATH: usize = 107;

/// What `guestlet-host` does, checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostSettings {
    /// The unix socket of the admin API.
    pub socket: PathBuf,
    /// The unix socket of the metrics.
    pub metrics_socket: PathBuf,
    /// The TCP address of the metrics, on loopback.
    pub metrics: Option<SocketAddr>,
    /// The folder of the volumes that are made for VMs.
    pub volumes: PathBuf,
    /// What one guest may cost.
    pub limits: LimitSettings,
    /// The pools, in the order in which they are written.
    pub pools: Vec<PoolSettings>,
    /// What clusters may, by their names.
    pub clusters: BTreeMap<String, ClusterSettings>,
    /// Where this host is.
    pub topology: TopologySettings,
    /// The VMs, in the order of their names.
    pub vms: Vec<VmSettings>,
}

impl HostSettings {
    /// Reads and checks `file` and the fragments in the folder of the same name with `.d` for `.toml`.
    ///
    /// # Errors
    /// At the first thing wrong, with file and line. A missing `file` is wrong only if it is `required`.
    pub fn load(file: &Path, required: bool) -> Result<Self, Error> {
        let fragment: HostFragment = load(file, required, &file.with_extension("d"))?;
        fragment.check()
    }
}

/// All fragments, unchecked.
#[derive(Debug, Default, Deserialize)]
#[serde(from = "Parsed")]
pub struct HostFragment {
    sources: Vec<Source>,
}

/// One fragment, and where it was read.
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
    limits: LimitsFragment,
    #[serde(default)]
    pool: Vec<Spanned<PoolFragment>>,
    #[serde(default)]
    cluster: BTreeMap<String, Spanned<ClusterFragment>>,
    #[serde(default)]
    topology: TopologyFragment,
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
    /// What the fragments together say.
    ///
    /// # Errors
    /// At the first thing that makes no sense, with file and line.
    pub fn check(self) -> Result<HostSettings, Error> {
        let mut socket = PathBuf::from(DEFAULT_SOCKET);
        let (mut metrics_socket, mut metrics) = (None, None);
        let mut volumes = PathBuf::from(VOLUMES);
        let mut limits = LimitSettings::default();
        let mut topology = TopologySettings::default();
        let (mut vms, mut pools, mut clusters) = (Vec::new(), Vec::new(), BTreeMap::new());
        let mut taken = HashMap::new();
        for source in &self.sources {
            if let Some(path) = &source.parsed.socket {
                socket = source.socket_path("socket", path)?;
            }
            if let Some(path) = &source.parsed.metrics_socket {
                metrics_socket = Some(source.socket_path("metrics-socket", path)?);
            }
            if let Some(address) = &source.parsed.metrics {
                metrics = Some(source.loopback(address)?);
            }
            if let Some(path) = &source.parsed.volumes_dir {
                volumes = source.absolute("volumes-dir", path)?;
            }
            limits::check(source, &source.parsed.limits, &mut limits)?;
            for pool in &source.parsed.pool {
                pools.push(pool::check(source, pool, &mut taken)?);
            }
            for (name, cluster) in &source.parsed.cluster {
                clusters.insert(name.clone(), cluster::check(source, name, cluster)?);
            }
            topology::check(source, &source.parsed.topology, &mut topology)?;
            for vm in &source.parsed.vm {
                vms.push(Checker { source, vm, taken: &mut taken }.vm()?);
            }
        }
        self.check_references(&pools, &vms)?;
        vms.sort_by(|a: &VmSettings, b| a.name.cmp(&b.name));
        let metrics_socket = metrics_socket.unwrap_or_else(|| socket.with_file_name(METRICS_SOCKET));
        Ok(HostSettings { socket, metrics_socket, metrics, volumes, limits, pools, clusters, topology, vms })
    }

    /// Names that clusters use have to be there.
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

    fn loopback(&self, address: &Spanned<String>) -> Result<SocketAddr, Error> {
        let found = address.get_ref();
        match found.parse::<SocketAddr>() {
            Ok(parsed) if parsed.ip().is_loopback() => Ok(parsed),
            Ok(_) => {
                let problem = format!("metrics = {found:?} is not on loopback; use 127.0.0.1 or [::1]");
                Err(self.wrong(address, problem))
            }
            Err(_) => {
                let problem =
                    format!("metrics = {found:?} is no address and port; write it like 127.0.0.1:9970");
                Err(self.wrong(address, problem))
            }
        }
    }

    /// That `value` is used for the first time as `what`; where it was is remembered.
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
        let problem = format!("{what} {value:?} is used a second time, first at {first}; change one");
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
                "{key} is a path of {} bytes, and the kernel takes {MAX_SOCKET_PATH}; use a shorter one",
                found.as_os_str().len()
            );
            return Err(self.wrong(path, problem));
        }
        Ok(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::parse;

    const ONE: &str = "6f1c0a52-5c0f-4a8e-9d1b-0d7a2f3b4c5d";
    const TWO: &str = "7f1c0a52-5c0f-4a8e-9d1b-0d7a2f3b4c5d";

    fn check(texts: &[&str]) -> Result<HostSettings, String> {
        let mut merged = HostFragment::default();
        for (number, text) in texts.iter().enumerate() {
            let file = PathBuf::from(format!("{number}.toml"));
            merged.merge(parse(&file, text).map_err(|error| error.to_string())?, &file);
        }
        merged.check().map_err(|error| error.to_string())
    }

    #[test]
    fn fragments_add_up() {
        let first = format!(
            "[topology]\nregion = 'eu'\nzone = 'a'\nlabels = {{ 'example.com/row' = '7' }}\n[limits]\nusers = 5\nopen-calls = 9\n[[vm]]\nname = 'web-1'\nuuid = '{}'\nvsock-cid = 3\n",
            ONE.to_uppercase()
        );
        let second = format!(
            "topology = {{ zone = 'b', labels = {{ rack = '2' }} }}\nsocket = '/run/x.sock'\nvolumes-dir = '/srv/v'\nmetrics = '127.0.0.1:9970'\nlimits.users = 6\n[[vm]]\nname = 'db.dev'\ncluster = 'dev'\nuuid = '{TWO}'\n\
             vsock-socket = '/run/db.vsock'\nport = 1970\nqmp = '/run/db.qmp'\n"
        );
        let settings = check(&[&first, &second]).unwrap();
        assert_eq!(settings.socket, Path::new("/run/x.sock"));
        assert_eq!(settings.metrics_socket, Path::new("/run/metrics.sock"));
        assert_eq!(settings.metrics, Some(([127, 0, 0, 1], 9970).into()));
        assert_eq!(settings.volumes, Path::new("/srv/v"));
        let limits = LimitSettings { users: Some(6), open_calls: Some(9), ..LimitSettings::default() };
        assert_eq!(settings.limits, limits);
        let labels = [("example.com/row", "7"), ("rack", "2")];
        let topology = TopologySettings {
            region: "eu".into(),
            zone: "b".into(),
            host: None,
            labels: labels.map(|(key, value)| (key.to_owned(), value.to_owned())).into(),
        };
        assert_eq!(settings.topology, topology);
        assert_eq!(
            settings.vms,
            [
                VmSettings {
                    name: "db.dev".into(),
                    uuid: TWO.into(),
                    cluster: "dev".into(),
                    dial: DialSettings::Hybrid { path: "/run/db.vsock".into(), port: 1970 },
                    callback: Some(DialSettings::Hybrid { path: "/run/db.vsock".into(), port: 971 }),
                    qmp: Some("/run/db.qmp".into()),
                    max_volumes: 240,
                },
                VmSettings {
                    name: "web-1".into(),
                    uuid: ONE.into(),
                    cluster: String::new(),
                    dial: DialSettings::Vsock { cid: 3, port: 970 },
                    callback: Some(DialSettings::Vsock { cid: 3, port: 971 }),
                    qmp: None,
                    max_volumes: 240,
                },
            ]
        );
    }

    #[test]
    fn nothing_at_all_is_a_host_without_vms() {
        let settings = check(&[]).unwrap();
        assert_eq!((settings.socket.as_path(), settings.vms), (Path::new(DEFAULT_SOCKET), Vec::new()));
        assert_eq!(settings.metrics_socket, Path::new("/run/guestlet-host/metrics.sock"));
        assert_eq!(settings.volumes, Path::new(VOLUMES));
    }

    #[test]
    fn what_is_wrong_is_named_with_file_and_line() {
        let vm = |rest: &str| format!("\n[[vm]]\nname = 'a'\nuuid = '{ONE}'\n{rest}\n");
        let good = vm("vsock-cid = 3");
        let cases: Vec<(&str, Vec<String>, &str)> = vec![
            (
                "relative socket",
                vec!["socket = 'api.sock'".into()],
                "0.toml:1: socket = \"api.sock\" is a rel",
            ),
            (
                "no name",
                vec![format!("\n[[vm]]\nuuid = '{ONE}'\nvsock-cid = 3")],
                "0.toml:2: [[vm]] has no name",
            ),
            ("no uuid", vec!["\n\n[[vm]]\nname = 'a'\n".into()], "0.toml:3: [[vm]] has no uuid"),
            ("name", vec![good.replace("'a'", "'A_b'")], "0.toml:3: name \"A_b\" is no DNS name"),
            ("empty name", vec![good.replace("'a'", "''")], "0.toml:3: name \"\" is no DNS name"),
            ("uuid", vec![good.replace(ONE, "6f1c")], "0.toml:4: uuid \"6f1c\" is no UUID"),
            ("no dial", vec![vm("")], "0.toml:2: [[vm]] says no way to reach"),
            (
                "two dials",
                vec![vm("vsock-cid = 3\nvsock-socket = '/a'")],
                "0.toml:2: [[vm]] says more than one",
            ),
            ("cid", vec![vm("vsock-cid = 2")], "0.toml:5: vsock-cid = 2: guests have CIDs from 3"),
            ("port", vec![vm("vsock-cid = 3\nport = 0")], "0.toml:6: port = 0"),
            ("unix port", vec![vm("unix-socket = '/a'\nport = 5")], "0.toml:6: port has no meaning"),
            (
                "unix callback port",
                vec![vm("unix-socket = '/a'\ncallback-port = 5")],
                "0.toml:6: callback-port has no",
            ),
            (
                "callback socket",
                vec![vm("vsock-cid = 3\ncallback-socket = '/a'")],
                "0.toml:6: callback-socket has",
            ),
            (
                "same ports",
                vec![vm("vsock-cid = 3\nport = 971")],
                "0.toml:6: port and callback-port are both",
            ),
            ("volumes", vec!["volumes-dir = 'v'".into()], "0.toml:1: volumes-dir = \"v\" is a relative path"),
            ("metrics", vec!["metrics = '0.0.0.0:1'".into()], "0.toml:1: metrics = \"0.0.0.0:1\" is not on"),
            ("metrics port", vec!["metrics = '127.0.0.1'".into()], "0.toml:1: metrics = \"127.0.0.1\" is no"),
            ("limit", vec!["[limits]\nusers = 0".into()], "0.toml:2: limits.users = 0: it may be 1 to"),
            (
                "zone",
                vec!["[topology]\nzone = 'a b'".into()],
                "0.toml:2: topology.zone = \"a b\": Kubernetes",
            ),
            (
                "denied label",
                vec!["[topology.labels]\na = 'b'\n'node-role.kubernetes.io/x' = 'y'".into()],
                "0.toml:3: topology.labels: \"node-role.kubernetes.io/x\": the API server (NodeRestriction) lets no",
            ),
            (
                "long label",
                vec![format!("[topology.labels]\na = '{}'", "b".repeat(64))],
                "0.toml:2: topology.labels: \"a\" = \"bbbb",
            ),
            ("unknown limit", vec!["[limits]\nuser = 1".into()], "0.toml:2: unknown field `user`"),
            ("qmp", vec![vm("vsock-cid = 3\nqmp = 'q'")], "0.toml:6: qmp = \"q\" is a relative path"),
            (
                "long",
                vec![vm(&format!("vsock-socket = '/{}'", "a".repeat(107)))],
                "0.toml:5: vsock-socket is",
            ),
            ("cluster", vec![vm("vsock-cid = 3\ncluster = \"a\\u0007\"")], "0.toml:6: cluster is longer"),
            (
                "same name",
                vec![good.clone(), good.replace(ONE, TWO).replace('3', "4")],
                "1.toml:3: name \"a\" is used a second time, first at 0.toml:3",
            ),
            (
                "same uuid",
                vec![good.clone(), good.replace("'a'", "'b'").replace("= 3", "= 4")],
                "1.toml:4: uuid \"6f1c0a52-5c0f-4a8e-9d1b-0d7a2f3b4c5d\" is used a second time",
            ),
            (
                "same cid",
                vec![good.clone(), good.replace("'a'", "'b'").replace(ONE, TWO)],
                "1.toml:5: vsock-cid \"3\" is used a second time",
            ),
            (
                "same socket",
                vec![vm("vsock-socket = '/s'\nqmp = '/s'")],
                "0.toml:6: socket \"/s\" is used a second time, first at 0.toml:5",
            ),
            ("unknown", vec![vm("vsock-cid = 3\ncidd = 4")], "0.toml:6: unknown field `cidd`"),
        ];
        assert_wrong(cases);
        let many = vec![vm("vsock-cid = 3\nmax-volumes = 5000")];
        assert_wrong(vec![("volumes of a VM", many, "0.toml:6: max-volumes = 5000")]);
    }

    fn assert_wrong(cases: Vec<(&str, Vec<String>, &str)>) {
        for (case, texts, expected) in cases {
            let texts: Vec<_> = texts.iter().map(String::as_str).collect();
            let error = check(&texts).expect_err(case);
            assert!(error.starts_with(expected), "{case}: {error}");
        }
    }

    #[test]
    fn pools_and_what_clusters_may() {
        let pools = "[[pool]]\nname = 'fast'\npath = '/srv/fast'\nformat = 'qcow2'\nallocation = 'full'\nbus = 'virtio'\n\
                     default = true\n[cluster.dev]\nmax-volumes = 5\nmax-bytes = '1T'\nclasses = ['fast', 'slow']\n\
                     controllers = ['a']\n[cluster.other]\nmax-bytes = 1000\n";
        let more = format!(
            "[[pool]]\nname = 'slow'\npath = '/srv/slow'\n[[vm]]\nname = 'a'\nuuid = '{ONE}'\nvsock-cid = 3\n\
             cluster = 'dev'\nmax-volumes = 9\n[cluster.dev]\nclasses = ['slow']\n"
        );
        let settings = check(&[pools, &more]).unwrap();
        let pool = |name: &str| PoolSettings {
            name: name.into(),
            path: format!("/srv/{name}").into(),
            format: Format::Raw,
            allocation: Allocation::Thin,
            bus: None,
            default: false,
        };
        let fast = PoolSettings {
            format: Format::Qcow2,
            allocation: Allocation::Full,
            bus: Some(Bus::Virtio),
            default: true,
            ..pool("fast")
        };
        assert_eq!(settings.pools, [fast, pool("slow")]);
        assert_eq!(settings.vms[0].max_volumes, 9);
        let dev = ClusterSettings { classes: Some(vec!["slow".into()]), ..ClusterSettings::default() };
        assert_eq!(settings.clusters["dev"], dev, "the last table of a cluster wins");
        assert_eq!(settings.clusters["other"].max_bytes, Some(1000));
        let dev = &check(&[pools, &more.replace("[cluster.dev]\nclasses = ['slow']\n", "")])
            .unwrap()
            .clusters["dev"];
        assert_eq!((dev.max_volumes, dev.max_bytes), (Some(5), Some(1 << 40)));
        assert_eq!(dev.controllers, Some(vec!["a".into()]));
    }

    #[test]
    fn what_is_wrong_with_pools_and_clusters_is_named_with_file_and_line() {
        let pool = |rest: &str| format!("\n[[pool]]\nname = 'fast'\n{rest}\n");
        let good = pool("path = '/srv/fast'");
        let long = "a".repeat(64);
        assert_wrong(vec![
            ("no name", vec!["\n[[pool]]\npath = '/a'".into()], "0.toml:2: [[pool]] has no name"),
            ("no path", vec![pool("")], "0.toml:2: [[pool]] has no path"),
            ("name", vec![good.replace("'fast'", "'Fast'")], "0.toml:3: name \"Fast\" is no DNS name"),
            (
                "long name",
                vec![good.replace("'fast'", &format!("'{long}'"))],
                "0.toml:3: name has more than 63",
            ),
            ("relative", vec![pool("path = 'a'")], "0.toml:4: path = \"a\" is a relative path"),
            ("format", vec![pool("path = '/a'\nformat = 'vmdk'")], "0.toml:5: unknown variant `vmdk`"),
            ("allocation", vec![pool("path = '/a'\nallocation = 'x'")], "0.toml:5: unknown variant `x`"),
            ("unknown key", vec![pool("path = '/a'\nfat = 1")], "0.toml:5: unknown field `fat`"),
            (
                "same name",
                vec![good.clone(), pool("path = '/b'")],
                "1.toml:3: pool \"fast\" is used a second time, first at 0.toml:3",
            ),
            (
                "same path",
                vec![good.clone(), good.replace("'fast'", "'b'")],
                "1.toml:4: path \"/srv/fast\" is used a second time, first at 0.toml:4",
            ),
            (
                "two defaults",
                vec![
                    pool("path = '/a'\ndefault = true"),
                    "[[pool]]\nname = 'b'\npath = '/b'\ndefault = true".into(),
                ],
                "1.toml:4: default \"true\" is used a second time",
            ),
            (
                "size",
                vec!["[cluster.dev]\nmax-bytes = '5X'".into()],
                "0.toml:2: max-bytes = \"5X\": give a number",
            ),
            (
                "no cluster",
                vec!["[cluster.'']\nmax-volumes = 1".into()],
                "0.toml:1: [cluster] with an empty name",
            ),
            (
                "class",
                vec![good.clone(), "[cluster.dev]\nclasses = ['fast',\n 'fats']".into()],
                "1.toml:3: classes names \"fats\", and no [[pool]]",
            ),
            (
                "controller",
                vec!["[cluster.dev]\ncontrollers = ['a']".into()],
                "0.toml:2: controllers names \"a\", and no [[vm]] of the cluster dev",
            ),
            (
                "unknown in cluster",
                vec!["[cluster.dev]\nclass = 'a'".into()],
                "0.toml:2: unknown field `class`",
            ),
        ]);
    }
}
