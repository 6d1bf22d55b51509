//! What one source of the agent's settings says: a file of /etc/guestlet, one of qemu-ga's, or the command line.

use std::fmt;
use std::path::{Path, PathBuf};

use serde::de::Visitor;
use serde::{Deserialize, Deserializer};
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use crate::config::Fragment;
use crate::config::agent::grants::{AuditFragment, GrantFragment, PolicyFragment, TrustFragment};

/// Every field may be missing.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct AgentFragment {
    /// `[qga]`
    pub qga: QgaFragment,
    /// `[control]`
    pub control: ApiFragment,
    /// `[callback]` of earlier versions
    pub callback: ApiFragment,
    /// `[vsock]`
    pub vsock: VsockFragment,
    /// `[csi]`
    pub csi: CsiFragment,
    /// `[cloud]`
    pub cloud: CloudFragment,
    /// `[exec]`
    pub exec: ProgramsFragment,
    /// `[file-systems]`
    pub file_systems: FileSystemsFragment,
    /// `[forward]`
    pub forward: ForwardFragment,
    /// `[freeze]`
    pub freeze: FreezesFragment,
    /// `[log]`
    pub log: LogFragment,
    /// `[topology]`
    pub topology: TopologyFragment,
    /// `[policy]`
    pub policy: PolicyFragment,
    /// `[audit]`
    pub audit: AuditFragment,
    /// `[trust]`
    pub trust: TrustFragment,
    /// `[[grant]]`; those of several places add up.
    pub grant: Vec<Spanned<GrantFragment>>,
    /// Where the agent keeps what lasts until the next boot.
    pub runtime_dir: Option<PathBuf>,
    /// Whether qemu-ga's files are read, too. Only guestlet's own files say so.
    pub qemu_ga_files: Option<bool>,
    /// Become a daemon. Not in TOML: a unit says how it is started.
    #[serde(skip)]
    pub daemon: Option<bool>,
    /// Where a daemon writes its process id.
    #[serde(skip)]
    pub pidfile: Option<PathBuf>,
    /// A list was separated by semicolons: shown again as it stood, so that who reads it reads the same.
    #[serde(skip)]
    pub semicolons: bool,
    /// What is worth a line in the log, and no fault.
    #[serde(skip)]
    pub remarks: Vec<String>,
    /// The lines of the keys that this source sets.
    #[serde(skip)]
    pub lines: Vec<(String, usize)>,
    /// What this source was parsed from, if it has grants: their checks name lines.
    #[serde(skip)]
    pub text: String,
}

/// `[qga]`: names and meanings are those of qemu-ga, where it has them.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct QgaFragment {
    /// `virtio-serial`, `isa-serial`, `unix-listen`, `vsock-listen`, or `none`.
    pub method: Option<String>,
    /// Device, socket, or `CID:PORT`.
    pub path: Option<PathBuf>,
    /// Try again where a socket cannot be listened on.
    pub retry_path: Option<bool>,
    /// Where state is kept.
    pub statedir: Option<PathBuf>,
    /// Commands that may not be called; lists of several places add up.
    pub block_rpcs: Option<Vec<String>>,
    /// The only commands that may be called.
    pub allow_rpcs: Option<Vec<String>>,
    /// The version that guest-info reports.
    pub version: Option<String>,
    /// What is run before a freeze and after a thaw.
    pub fsfreeze_hook: Option<PathBuf>,
    /// `[qga.exec]`
    pub exec: ExecFragment,
    /// `[qga.files]`
    pub files: FilesFragment,
    /// `[qga.passwords]`
    pub passwords: PasswordsFragment,
    /// `[qga.freeze]`
    pub freeze: FreezeFragment,
}

/// `[qga.exec]`
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct ExecFragment {
    /// The only programs that may be run; lists of several places add up.
    pub paths: Option<Vec<PathBuf>>,
    /// How long after a program's end its outputs are waited for.
    pub output_deadline: Option<Time>,
}

/// `[qga.files]`
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct FilesFragment {
    /// The only files and folders that may be opened; lists of several places add up.
    pub paths: Option<Vec<PathBuf>>,
    /// Open files only for reading.
    pub read_only: Option<bool>,
}

/// `[qga.passwords]`
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct PasswordsFragment {
    /// Whether passwords may be set.
    pub allow: Option<bool>,
}

/// `[qga.freeze]`
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct FreezeFragment {
    /// How long file systems stay frozen when nobody thaws them.
    pub deadline: Option<Time>,
    /// How long one hook may take.
    pub hook_deadline: Option<Time>,
    /// How long all of them may take together.
    pub hooks_deadline: Option<Time>,
}

/// `[freeze]`
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct FreezesFragment {
    /// Where the receipts of freezes are kept.
    pub receipts_dir: Option<PathBuf>,
    /// `auto` or `listed`.
    pub applications: Option<String>,
    /// How long applications may take to be held.
    pub applications_deadline: Option<Time>,
    /// `filesystem` or `application`.
    pub require: Option<String>,
    /// `[[freeze.application]]`; those of several places add up.
    pub application: Vec<ApplicationFragment>,
}

/// `[[freeze.application]]`
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct ApplicationFragment {
    /// What people call one with commands.
    pub name: Option<String>,
    /// The kind of a database.
    pub kind: Option<String>,
    /// Where it is.
    pub target: Option<String>,
    /// Whose it is, or as whom the commands run.
    pub user: Option<String>,
    /// The command before a freeze.
    pub freeze: Option<Vec<String>>,
    /// The command after it.
    pub thaw: Option<Vec<String>>,
    /// Where the data are.
    pub data: Option<Vec<PathBuf>>,
}

/// A duration as it is written: seconds, or a number and a unit.
#[derive(Debug, Clone)]
pub enum Time {
    /// Seconds.
    Seconds(u64),
    /// Such as `90s` or `2min`.
    Words(String),
}

/// By hand, because what serde derives for a choice of types is much code.
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

/// `[control]`, and `[callback]` of earlier versions
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct ApiFragment {
    /// `vsock`, `none`, or `unix:` and a path.
    pub listen: Option<String>,
    /// vsock port.
    pub port: Option<u32>,
}

/// `[vsock]`
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct VsockFragment {
    /// The only context identifier that is let in.
    pub peer_cid: Option<u32>,
    /// The hypervisor has hybrid vsock.
    pub hybrid: Option<bool>,
}

/// `[csi]`
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct CsiFragment {
    /// Whether kubelet is served, or `"auto"`.
    pub enabled: Option<Choice>,
    /// The driver's name.
    pub driver: Option<String>,
    /// kubelet's folder.
    pub kubelet_root: Option<PathBuf>,
    /// Where kubelet finds the Identity and Node services.
    pub node_socket: Option<PathBuf>,
    /// Where the sidecars find the Identity and Controller services; `""` for nowhere.
    pub controller_socket: Option<PathBuf>,
    /// Keys of what kubelet is told about where this guest is.
    pub topology: Option<Vec<String>>,
}

/// `[exec]`
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct ProgramsFragment {
    /// Bytes of each output of a program that are kept.
    pub ring_bytes: Option<u64>,
}

/// `[file-systems]`
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct FileSystemsFragment {
    /// How often file systems are looked at; 0 for never.
    pub interval: Option<Time>,
    /// What is in use of one that is about to fill, in percent.
    pub full_percent: Option<u32>,
}

/// `[forward]`
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct ForwardFragment {
    /// Connections that there may be.
    pub connections: Option<usize>,
}

/// `[cloud]`
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct CloudFragment {
    /// Where guestlet-ccm calls; `""` for nowhere.
    pub socket: Option<PathBuf>,
}

/// Yes, no, or a word.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Choice {
    /// `true` or `false`.
    Plain(bool),
    /// Such as `"auto"`.
    Word(String),
}

/// By hand, because what serde derives for a choice of types is much code.
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

/// `[log]`
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct LogFragment {
    /// Log each call.
    pub verbose: Option<bool>,
    /// Log to this file.
    pub file: Option<PathBuf>,
}

/// `[topology]`
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct TopologyFragment {
    /// Whose files get the labels; lists of several places add up.
    pub drop_ins: Option<Vec<String>>,
    /// Whether the labels of the Node are kept as the host half says.
    pub node_labels: Option<bool>,
    /// kubelet's kubeconfig.
    pub kubeconfig: Option<PathBuf>,
    /// `update`, `keep` or `report`.
    pub zone_change: Option<String>,
    /// Only say what the labels would be.
    pub report_only: Option<bool>,
    /// Set the Node's provider id once.
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
