//! Settings from one source of the agent: a file of /etc/guestlet, one of qemu-ga's files, or the command line.

use std::fmt;
use std::path::{Path, PathBuf};

use serde::de::Visitor;
use serde::{Deserialize, Deserializer};
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use crate::config::Fragment;
use crate::config::agent::grants::{AuditFragment, GrantFragment, PolicyFragment, TrustFragment};

/// Settings of one source; every field is optional.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct AgentFragment {
    /// Table `[qga]`.
    pub qga: QgaFragment,
    /// Table `[control]`.
    pub control: ApiFragment,
    /// Table `[callback]` of earlier versions.
    pub callback: ApiFragment,
    /// Table `[vsock]`.
    pub vsock: VsockFragment,
    /// Table `[csi]`.
    pub csi: CsiFragment,
    /// Table `[cloud]`.
    pub cloud: CloudFragment,
    /// Table `[exec]`.
    pub exec: ProgramsFragment,
    /// Table `[file-systems]`.
    pub file_systems: FileSystemsFragment,
    /// Table `[forward]`.
    pub forward: ForwardFragment,
    /// Table `[freeze]`.
    pub freeze: FreezesFragment,
    /// Table `[log]`.
    pub log: LogFragment,
    /// Table `[topology]`.
    pub topology: TopologyFragment,
    /// Table `[policy]`.
    pub policy: PolicyFragment,
    /// Table `[audit]`.
    pub audit: AuditFragment,
    /// Table `[trust]`.
    pub trust: TrustFragment,
    /// Tables `[[grant]]`; those of several sources add up.
    pub grant: Vec<Spanned<GrantFragment>>,
    /// Directory for data that lasts until the next boot.
    pub runtime_dir: Option<PathBuf>,
    /// False to ignore qemu-ga's files. Can be set in guestlet's own files only.
    pub qemu_ga_files: Option<bool>,
    /// Run as a daemon. Cannot be set in TOML, because a unit decides how the agent is started.
    #[serde(skip)]
    pub daemon: Option<bool>,
    /// File to which a daemon writes its process ID.
    #[serde(skip)]
    pub pidfile: Option<PathBuf>,
    /// True if a list was separated by semicolons. It is shown the same way, so that a reader of the output gets the
    /// same list.
    #[serde(skip)]
    pub semicolons: bool,
    /// Remarks on the settings that are logged and are not errors.
    #[serde(skip)]
    pub remarks: Vec<String>,
    /// Keys that this source sets, with their lines.
    #[serde(skip)]
    pub lines: Vec<(String, usize)>,
    /// Text that this source was parsed from, if it has grants, whose checks name lines.
    #[serde(skip)]
    pub text: String,
}

/// Table `[qga]`, with the names and meanings of qemu-ga where it has the setting.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct QgaFragment {
    /// Kind of channel: `virtio-serial`, `isa-serial`, `unix-listen`, `vsock-listen` or `none`.
    pub method: Option<String>,
    /// Path of the device or socket, or `CID:PORT`.
    pub path: Option<PathBuf>,
    /// Keep retrying while listening on a socket fails.
    pub retry_path: Option<bool>,
    /// Directory for the agent's state.
    pub statedir: Option<PathBuf>,
    /// Commands that may not be called; the lists of several sources add up.
    pub block_rpcs: Option<Vec<String>>,
    /// Only commands that may be called.
    pub allow_rpcs: Option<Vec<String>>,
    /// Version that guest-info reports.
    pub version: Option<String>,
    /// Hook that is run before a freeze and after a thaw.
    pub fsfreeze_hook: Option<PathBuf>,
    /// Table `[qga.exec]`.
    pub exec: ExecFragment,
    /// Table `[qga.files]`.
    pub files: FilesFragment,
    /// Table `[qga.passwords]`.
    pub passwords: PasswordsFragment,
    /// Table `[qga.freeze]`.
    pub freeze: FreezeFragment,
}

/// Table `[qga.exec]`: restrictions on guest-exec.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct ExecFragment {
    /// Only programs that may be run; the lists of several sources add up.
    pub paths: Option<Vec<PathBuf>>,
    /// Time that the outputs of a program are still waited for after it has exited.
    pub output_deadline: Option<Time>,
}

/// Table `[qga.files]`: restrictions on guest-file-open.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct FilesFragment {
    /// Only files and directories that may be opened; the lists of several sources add up.
    pub paths: Option<Vec<PathBuf>>,
    /// True if files may be opened for reading only.
    pub read_only: Option<bool>,
}

/// Table `[qga.passwords]`: restrictions on guest-set-user-password.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct PasswordsFragment {
    /// False if clients may not set passwords.
    pub allow: Option<bool>,
}

/// Table `[qga.freeze]`: deadlines of freezes.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct FreezeFragment {
    /// Time after which file systems are thawed if no client thaws them.
    pub deadline: Option<Time>,
    /// Timeout of one hook.
    pub hook_deadline: Option<Time>,
    /// Timeout of all hooks together.
    pub hooks_deadline: Option<Time>,
}

/// Table `[freeze]`: receipts, and applications that take part in freezes.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct FreezesFragment {
    /// Directory for the receipts of freezes.
    pub receipts_dir: Option<PathBuf>,
    /// Applications that take part: `auto` or `listed`.
    pub applications: Option<String>,
    /// Time in which all applications have to be held.
    pub applications_deadline: Option<Time>,
    /// Level without which a freeze fails: `filesystem` or `application`.
    pub require: Option<String>,
    /// Tables `[[freeze.application]]`; those of several sources add up.
    pub application: Vec<ApplicationFragment>,
}

/// Table `[[freeze.application]]`: either a database, or a pair of commands.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct ApplicationFragment {
    /// Name of an application with commands, for messages and receipts.
    pub name: Option<String>,
    /// Kind of database.
    pub kind: Option<String>,
    /// Address of the database, such as the path of its socket.
    pub target: Option<String>,
    /// User that the database has to belong to, or that the commands run as.
    pub user: Option<String>,
    /// Command before a freeze.
    pub freeze: Option<Vec<String>>,
    /// Command after a freeze.
    pub thaw: Option<Vec<String>>,
    /// Directories with the application's data.
    pub data: Option<Vec<PathBuf>>,
}

/// Duration as it is written: seconds, or a number and a unit.
#[derive(Debug, Clone)]
pub enum Time {
    /// A plain number of seconds.
    Seconds(u64),
    /// A number with a unit, such as `90s` or `2min`.
    Words(String),
}

/// Implemented by hand, because the code that serde derives for an untagged enum is large.
impl<'de> Deserialize<'de> for Time {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Either;

        impl Visitor<'_> for Either {
            type Value = Time;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("seconds, or a number with s, min or h, such as \"2min\"")
            }

            fn visit_i64<E: serde::de::Error>(self, seconds: i64) -> Result<Time, E> {
                Ok(Time::Seconds(u64::try_from(seconds).unwrap_or(0)))
            }

            fn visit_str<E: serde::de::Error>(self, words: &str) -> Result<Time, E> {
                Ok(Time::Words(words.to_owned()))
            }
        }

        deserializer.deserialize_any(Either)
    }
}

/// Table `[control]`, or `[callback]` of earlier versions.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct ApiFragment {
    /// Channel to listen on: `vsock`, `none`, or `unix:` and a path.
    pub listen: Option<String>,
    /// The vsock port to listen on.
    pub port: Option<u32>,
}

/// Table `[vsock]`: the peer that is accepted.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct VsockFragment {
    /// Context identifier that is accepted.
    pub peer_cid: Option<u32>,
    /// True if the hypervisor has hybrid vsock.
    pub hybrid: Option<bool>,
}

/// Table `[csi]`: the CSI driver that serves kubelet.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct CsiFragment {
    /// Mode of serving kubelet: true, false or `"auto"`.
    pub enabled: Option<Choice>,
    /// Name of the CSI driver.
    pub driver: Option<String>,
    /// Root directory of kubelet.
    pub kubelet_root: Option<PathBuf>,
    /// Socket of the Identity and Node services, for kubelet.
    pub node_socket: Option<PathBuf>,
    /// Socket of the Identity and Controller services, for the sidecars; `""` for none.
    pub controller_socket: Option<PathBuf>,
    /// Topology keys that are reported to kubelet.
    pub topology: Option<Vec<String>>,
}

/// Table `[exec]`: programs that the host half runs.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct ProgramsFragment {
    /// Number of bytes that are kept of each output of a program.
    pub ring_bytes: Option<u64>,
}

/// Table `[file-systems]`: checks of how full file systems are.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct FileSystemsFragment {
    /// Interval between two checks; 0 for no checks.
    pub interval: Option<Time>,
    /// Percentage in use from which a file system counts as about to fill.
    pub full_percent: Option<u32>,
}

/// Table `[forward]`: connections that are forwarded into the guest.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct ForwardFragment {
    /// Limit on forwarded connections at a time.
    pub connections: Option<usize>,
}

/// Table `[cloud]`: the socket for guestlet-ccm.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct CloudFragment {
    /// Socket that guestlet-ccm connects to; `""` for none.
    pub socket: Option<PathBuf>,
}

/// Boolean, or a word.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Choice {
    /// The boolean `true` or `false`.
    Plain(bool),
    /// A string such as `"auto"`.
    Word(String),
}

/// Implemented by hand, because the code that serde derives for an untagged enum is large.
impl<'de> Deserialize<'de> for Choice {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Either;

        impl Visitor<'_> for Either {
            type Value = Choice;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("true, false or \"auto\"")
            }

            fn visit_bool<E: serde::de::Error>(self, plain: bool) -> Result<Choice, E> {
                Ok(Choice::Plain(plain))
            }

            fn visit_str<E: serde::de::Error>(self, word: &str) -> Result<Choice, E> {
                Ok(Choice::Word(word.to_owned()))
            }
        }

        deserializer.deserialize_any(Either)
    }
}

/// Table `[log]`: the agent's own log.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct LogFragment {
    /// True to log each call.
    pub verbose: Option<bool>,
    /// File for the log.
    pub file: Option<PathBuf>,
}

/// Table `[topology]`: use of the topology in the guest.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct TopologyFragment {
    /// Kubernetes distributions whose configuration files get the labels; the lists of several sources add up.
    pub drop_ins: Option<Vec<String>>,
    /// True to keep the labels of the Node in line with the topology that the host half reports.
    pub node_labels: Option<bool>,
    /// Path of kubelet's kubeconfig.
    pub kubeconfig: Option<PathBuf>,
    /// Treatment of zone and region labels when the guest moves: `update`, `keep` or `report`.
    pub zone_change: Option<String>,
    /// True to change no labels and only report them.
    pub report_only: Option<bool>,
    /// True to set the Node's provider ID once.
    pub provider_id: Option<bool>,
}

impl Fragment for AgentFragment {
    fn merge(&mut self, later: Self, _file: &Path) {
        fn take<T>(earlier: &mut Option<T>, later: Option<T>) {
            if later.is_some() {
                *earlier = later;
            }
        }
        fn add<T>(earlier: &mut Option<Vec<T>>, later: Option<Vec<T>>) {
            if let Some(later) = later {
                earlier.get_or_insert_default().extend(later);
            }
        }
        take(&mut self.qga.method, later.qga.method);
        take(&mut self.qga.path, later.qga.path);
        take(&mut self.qga.retry_path, later.qga.retry_path);
        take(&mut self.qga.statedir, later.qga.statedir);
        add(&mut self.qga.block_rpcs, later.qga.block_rpcs);
        add(&mut self.qga.allow_rpcs, later.qga.allow_rpcs);
        take(&mut self.qga.version, later.qga.version);
        take(&mut self.qga.fsfreeze_hook, later.qga.fsfreeze_hook);
        add(&mut self.qga.exec.paths, later.qga.exec.paths);
        take(&mut self.qga.exec.output_deadline, later.qga.exec.output_deadline);
        add(&mut self.qga.files.paths, later.qga.files.paths);
        take(&mut self.qga.files.read_only, later.qga.files.read_only);
        take(&mut self.qga.passwords.allow, later.qga.passwords.allow);
        take(&mut self.qga.freeze.deadline, later.qga.freeze.deadline);
        take(&mut self.qga.freeze.hook_deadline, later.qga.freeze.hook_deadline);
        take(&mut self.qga.freeze.hooks_deadline, later.qga.freeze.hooks_deadline);
        take(&mut self.freeze.receipts_dir, later.freeze.receipts_dir);
        take(&mut self.freeze.applications, later.freeze.applications);
        take(&mut self.freeze.applications_deadline, later.freeze.applications_deadline);
        take(&mut self.freeze.require, later.freeze.require);
        self.freeze.application.extend(later.freeze.application);
        take(&mut self.control.listen, later.control.listen);
        take(&mut self.control.port, later.control.port);
        take(&mut self.callback.listen, later.callback.listen);
        take(&mut self.callback.port, later.callback.port);
        take(&mut self.vsock.peer_cid, later.vsock.peer_cid);
        take(&mut self.vsock.hybrid, later.vsock.hybrid);
        take(&mut self.csi.enabled, later.csi.enabled);
        take(&mut self.csi.driver, later.csi.driver);
        take(&mut self.csi.kubelet_root, later.csi.kubelet_root);
        take(&mut self.csi.node_socket, later.csi.node_socket);
        take(&mut self.csi.controller_socket, later.csi.controller_socket);
        take(&mut self.csi.topology, later.csi.topology);
        take(&mut self.cloud.socket, later.cloud.socket);
        take(&mut self.exec.ring_bytes, later.exec.ring_bytes);
        take(&mut self.file_systems.interval, later.file_systems.interval);
        take(&mut self.file_systems.full_percent, later.file_systems.full_percent);
        take(&mut self.forward.connections, later.forward.connections);
        take(&mut self.runtime_dir, later.runtime_dir);
        take(&mut self.qemu_ga_files, later.qemu_ga_files);
        take(&mut self.log.verbose, later.log.verbose);
        take(&mut self.log.file, later.log.file);
        take(&mut self.trust.state_dir, later.trust.state_dir);
        add(&mut self.topology.drop_ins, later.topology.drop_ins);
        take(&mut self.topology.node_labels, later.topology.node_labels);
        take(&mut self.topology.kubeconfig, later.topology.kubeconfig);
        take(&mut self.topology.zone_change, later.topology.zone_change);
        take(&mut self.topology.report_only, later.topology.report_only);
        take(&mut self.topology.provider_id, later.topology.provider_id);
        take(&mut self.policy.mode, later.policy.mode);
        take(&mut self.audit.file, later.audit.file);
        take(&mut self.trust.plain, later.trust.plain);
        take(&mut self.daemon, later.daemon);
        take(&mut self.pidfile, later.pidfile);
        self.semicolons |= later.semicolons;
        self.remarks.extend(later.remarks);
    }

    fn remember(&mut self, text: &str) {
        if let Ok(table) = DeTable::parse(text) {
            keys("", table.get_ref(), text, &mut self.lines);
        }
        if !self.grant.is_empty() {
            text.clone_into(&mut self.text);
        }
    }

    fn line(&self, key: &str) -> Option<usize> {
        self.lines.iter().rev().find(|(found, _)| found == key).map(|(_, line)| *line)
    }
}

/// Adds the lines of all keys of a table.
fn keys(prefix: &str, table: &DeTable<'_>, text: &str, lines: &mut Vec<(String, usize)>) {
    for (key, value) in table {
        let name = format!("{prefix}{}", key.get_ref());
        match Spanned::get_ref(value) {
            DeValue::Table(inner) => keys(&format!("{name}."), inner, text, lines),
            _ => lines.push((name, crate::config::line_of(text, key.span().start))),
        }
    }
}
