//! Settings of the agent, merged from all their sources. A later source wins; lists add up.
//!
//! 1. `/etc/qemu/qemu-ga.conf`, or the file that `-c` or `$QGA_CONF` names ([`qemu_ga`])
//! 2. `/etc/sysconfig/qemu-ga` ([`qemu_ga`])
//! 3. `/etc/guestlet/agent.toml`, then `/etc/guestlet/agent.d/*.toml` ([`fragment`])
//! 4. the command line ([`options`])
//!
//! To add a setting: a field in its fragment, its merging, its check here, its field in [`AgentSettings`], and its
//! line in docs/configuration.md and packaging/agent.toml.

mod applications;
mod check;
mod csi;
mod dump;
mod file_systems;
pub mod fragment;
mod grants;
pub mod options;
pub mod qemu_ga;

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::config::{self, Error, disk_rules};
use fragment::AgentFragment;
use options::{Program, Run};

use crate::policy::Rules;

pub use applications::{ApplicationSetting, ApplicationSettings};
pub use csi::{CsiMode, CsiSettings};
pub use file_systems::FileSystemSettings;

/// Main settings file; its drop-ins are in the directory of the same name with `.d` for `.toml`.
pub const MAIN_FILE: &str = "/etc/guestlet/agent.toml";
/// Default vsock port of the control channel.
pub const CONTROL_PORT: u32 = 970;
/// Default directory for the agent's state.
pub const DEFAULT_STATE_FOLDER: &str = "/var/run";
/// Default directory for the guest's own key.
pub const TRUST_FOLDER: &str = "/var/lib/guestlet";
/// Default directory for the receipts of freezes.
pub const RECEIPTS_FOLDER: &str = "/var/lib/guestlet/receipts";
/// Directory of the keys that the guest is given, beside the main file.
pub const HOSTS_FOLDER: &str = "hosts.d";
/// Default directory for data that lasts until the next boot.
pub const RUNTIME_FOLDER: &str = "/run/guestlet";

/// Default number of bytes that are kept of each output of a program.
const PROGRAM_RING: u64 = 256 << 10;
/// Default limit on forwarded connections at a time.
const FORWARDS: usize = 1024;
/// Default socket that guestlet-ccm connects to. Its directory belongs to the pod, not to the agent.
pub const CLOUD_SOCKET: &str = "/run/guestlet-cloud/cloud.sock";

/// Settings of the agent, merged from all sources and checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AgentSettings {
    /// Channel on which QGA clients connect.
    pub qga: QgaChannel,
    /// True to keep retrying while listening on a socket fails.
    pub retry_path: bool,
    /// Commands that may not be called.
    pub block: Vec<String>,
    /// Only commands that may be called, if set.
    pub allow: Option<Vec<String>>,
    /// Separator between the names of a list when the settings are shown.
    pub separator: char,
    /// Version that guest-info reports, if not the program's own.
    pub version: Option<String>,
    /// Hook that is run before a freeze and after a thaw.
    pub fsfreeze_hook: Option<PathBuf>,
    /// Restrictions on QGA commands.
    pub limits: QgaLimits,
    /// Directory for the agent's state.
    pub state_folder: PathBuf,
    /// Directory for the receipts of freezes.
    pub receipts: PathBuf,
    /// Applications that take part in freezes.
    pub applications: ApplicationSettings,
    /// Directory for data that lasts until the next boot.
    pub runtime_folder: PathBuf,
    /// True if users in the guest may query the agent, and events are collected.
    pub local: bool,
    /// Channel on which the host half connects.
    pub control: ApiChannel,
    /// Peer that is accepted on vsock.
    pub vsock_peer: VsockPeer,
    /// True to log each call.
    pub verbose: bool,
    /// File for the log, in place of the journal or standard error.
    pub log_file: Option<PathBuf>,
    /// Settings for running as a daemon, with the PID file.
    pub daemon: DaemonSettings,
    /// Directory of the disk rules.
    pub disk_rules: PathBuf,
    /// Settings of the CSI driver, which serves volumes to pods.
    pub csi: CsiSettings,
    /// Socket for guestlet-ccm, if there is to be one.
    pub cloud_socket: Option<PathBuf>,
    /// Number of bytes that are kept of each output of a program, for the host half.
    pub program_ring: usize,
    /// Checks of how full file systems are.
    pub file_systems: FileSystemSettings,
    /// Limit on forwarded connections at a time.
    pub forwards: usize,
    /// Use of the topology: which files and labels in the guest follow it.
    pub topology: TopologySettings,
    /// Directories of the keys.
    pub trust: TrustSettings,
    /// Grants and bounds by which calls are allowed or denied.
    pub rules: Rules,
    /// Additional file for audit records.
    pub audit_file: Option<PathBuf>,
    /// Remarks on the settings that are logged and are not errors.
    pub remarks: Vec<String>,
}

/// Directories of the keys.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TrustSettings {
    /// Directory of the keys that the guest is given: those of host halves and of CAs.
    pub hosts: PathBuf,
    /// Directory of the guest's own key.
    pub state_folder: PathBuf,
}

/// Use of the topology, that is of where the guest runs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TopologySettings {
    /// Kubernetes distributions whose configuration files get the labels of the Node: `rke2`, `k3s`, `kubeadm`.
    pub drop_ins: Vec<String>,
    /// True to leave the Node's labels alone.
    pub no_node_labels: bool,
    /// Path of kubelet's kubeconfig, if it is not at a usual place.
    pub kubeconfig: Option<PathBuf>,
    /// Treatment of the zone and region labels when the guest runs somewhere else: `update`, `keep` or `report`.
    pub zone_change: Option<String>,
    /// True to change no labels and only report them.
    pub report_only: bool,
    /// True to give the Node a provider ID if it has none.
    pub provider_id: bool,
}

/// Settings for running as a daemon.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DaemonSettings {
    /// True to become a daemon.
    pub wanted: bool,
    /// File to which a daemon writes its process ID.
    pub pid_file: PathBuf,
}

/// Restrictions on QGA commands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QgaLimits {
    /// Only programs that guest-exec may run: files, or directories with everything below them; absolute paths.
    pub exec_paths: Option<Vec<PathBuf>>,
    /// Time that the outputs of a program are still waited for after it has exited.
    pub output_deadline: Duration,
    /// Only files that guest-file-open may open: files, or directories with everything below them; absolute paths.
    pub file_paths: Option<Vec<PathBuf>>,
    /// True if guest-file-open may open files for reading only.
    pub files_read_only: bool,
    /// True if guest-set-user-password may be called.
    pub allow_passwords: bool,
    /// Time after which file systems are thawed if no client thaws them.
    pub freeze_deadline: Duration,
    /// Timeout of one hook of a freeze.
    pub hook_deadline: Duration,
    /// Timeout of all hooks of a freeze together.
    pub hooks_deadline: Duration,
}

/// Channel of the QGA protocol.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum QgaChannel {
    /// A virtio-serial port, by its device.
    VirtioSerial(PathBuf),
    /// A serial line, by its device.
    IsaSerial(PathBuf),
    /// A unix socket to listen on.
    UnixListen(PathBuf),
    /// A vsock port to listen on.
    VsockListen {
        /// The context identifier of this guest, or `VMADDR_CID_ANY`.
        cid: u32,
        /// The vsock port to listen on.
        port: u32,
    },
    /// No QGA channel.
    None,
}

/// Peer that is accepted on vsock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VsockPeer {
    /// Context identifier that is accepted.
    pub cid: u32,
    /// True to accept connections from any source port of it.
    pub any_port: bool,
}

/// Channel of the guestlet API.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ApiChannel {
    /// A vsock port to listen on, unless the service manager passes a listening socket.
    Vsock {
        /// The vsock port to listen on.
        port: u32,
    },
    /// A unix socket to listen on, for tests and for guests whose vsock ends elsewhere.
    Unix(PathBuf),
    /// No channel: the guestlet API is not served.
    None,
}

/// Files that settings are read from.
#[derive(Debug, Clone)]
pub struct Places {
    /// qemu-ga's settings file, and whether it is required.
    pub config: (PathBuf, bool),
    /// Files with variables of qemu-ga's unit.
    pub variables: Vec<PathBuf>,
    /// guestlet's settings file, and whether it is required.
    pub main: (PathBuf, bool),
}

impl Places {
    /// Returns the usual files, or those that are named by the options or by `variable`, the value of `$QGA_CONF`.
    pub fn new(config: Option<PathBuf>, variable: Option<OsString>, settings: Option<PathBuf>) -> Self {
        let named = |path: Option<PathBuf>, usual: &str| match path {
            Some(path) => (path, true),
            None => (usual.into(), false),
        };
        let variable = variable.filter(|path| !path.is_empty()).map(PathBuf::from);
        Self {
            config: named(config.or(variable), qemu_ga::DEFAULT_CONFIG),
            variables: qemu_ga::VARIABLE_FILES.map(PathBuf::from).to_vec(),
            main: named(settings, MAIN_FILE),
        }
    }
}

/// Reads the settings from all `places`; those of `command_line` win.
///
/// If the program was started as qemu-ga, it serves no guestlet API unless one of guestlet's files says where to
/// listen.
///
/// # Errors
/// If a file cannot be read, has an unknown key or an invalid value: with the file and, if known, the line.
pub fn load(places: &Places, program: Program, command_line: AgentFragment) -> Result<AgentSettings, Error> {
    let mut fragments = Vec::new();
    if program == Program::QemuGa {
        let mut quiet = AgentFragment::default();
        quiet.control.listen = Some("none".to_owned());
        fragments.push((PathBuf::from("qemu-ga"), quiet));
    }
    let (main, required) = &places.main;
    let own: Vec<(_, AgentFragment)> = config::fragments(main, *required, &main.with_extension("d"))?;
    let qemu_gas = own.iter().rev().find_map(|(_, fragment)| fragment.qemu_ga_files).unwrap_or(true);
    let (config, required) = &places.config;
    match if qemu_gas || *required { config::bytes(config)? } else { None } {
        Some(bytes) => fragments.push((config.clone(), qemu_ga::config(config, &bytes)?)),
        None if *required => return Err(Error::in_file(config, "there is no such file")),
        None => {}
    }
    let mut variables = Vec::new();
    for file in places.variables.iter().filter(|_| qemu_gas) {
        if let Some(bytes) = config::bytes(file)? {
            variables.push((file.clone(), String::from_utf8_lossy(&bytes).into_owned()));
        }
    }
    fragments.extend(qemu_ga::variables(&variables)?);
    fragments.extend(own);
    fragments.push((PathBuf::from("command line"), command_line));
    let mut grants = Vec::new();
    for (file, fragment) in &fragments {
        grants.extend(grants::check(file, &fragment.text, &fragment.grant)?);
    }
    let mut settings = config::merge_checked(fragments, |merged| check::check(merged, program))?;
    settings.rules.grants = grants;
    settings.disk_rules = main.with_file_name(disk_rules::FOLDER);
    settings.trust.hosts = main.with_file_name(HOSTS_FOLDER);
    Ok(settings)
}

/// Reads the settings as [`load`] does, from the files that a command line or `variable`, the value of
/// `$QGA_CONF`, names.
///
/// # Errors
/// The errors of [`load`].
pub fn load_for(run: Run, program: Program, variable: Option<OsString>) -> Result<AgentSettings, Error> {
    load(&Places::new(run.config, variable, run.settings), program, run.fragment)
}

impl AgentSettings {
    /// Formats the settings as a qemu-ga.conf, as far as qemu-ga has them, for `--dump-conf`.
    pub fn dump(&self) -> String {
        dump::text(self)
    }
}

impl From<&Path> for Places {
    /// Returns the usual files below a directory that is laid out as `/`.
    fn from(root: &Path) -> Self {
        let below = |path: &str| root.join(path.trim_start_matches('/'));
        Self {
            config: (below(qemu_ga::DEFAULT_CONFIG), false),
            variables: qemu_ga::VARIABLE_FILES.map(below).to_vec(),
            main: (below(MAIN_FILE), false),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(root: &Path, file: &str, text: &str) {
        let path = root.join(file.trim_start_matches('/'));
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        #[allow(clippy::disallowed_methods)]
        std::fs::write(path, text).unwrap();
    }

    fn command_line(words: &[&str]) -> AgentFragment {
        match options::parse(words.iter().map(OsString::from), Program::Guestlet) {
            Ok(options::Request::Run(run)) => run.fragment,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn later_places_win_and_lists_add_up() {
        let root = tempfile::tempdir().unwrap();
        write(
            root.path(),
            "/etc/qemu/qemu-ga.conf",
            "[general]\nblock-rpcs=one\nstatedir=/one\nfsfreeze-hook=/one\nlogfile=/one\nverbose=true\n",
        );
        write(
            root.path(),
            "/etc/sysconfig/qemu-ga",
            "FILTER_RPC_ARGS='--block-rpcs=two -t /two'\nFSFREEZE_HOOK_PATHNAME=/two\n",
        );
        write(
            root.path(),
            "/etc/guestlet/agent.toml",
            "[qga]\nblock-rpcs = ['three']\nstatedir = '/three'\n[log]\nfile = '/three'\n",
        );
        write(root.path(), "/etc/guestlet/agent.d/10.toml", "[qga]\nblock-rpcs = ['four']\n");
        let places = Places::from(root.path());
        let settings =
            load(&places, Program::Guestlet, command_line(&["-b", "five", "-t", "/five"])).unwrap();
        assert_eq!(settings.block, ["one", "two", "three", "four", "five"]);
        assert_eq!(settings.state_folder, Path::new("/five"));
        assert_eq!(settings.fsfreeze_hook, Some("/two".into()));
        assert_eq!(settings.log_file, Some("/three".into()));
        assert!(settings.verbose);
    }

    #[test]
    fn qemu_gas_files_can_be_left_alone() {
        let root = tempfile::tempdir().unwrap();
        write(root.path(), "/etc/qemu/qemu-ga.conf", "[general]\npoison\n");
        write(root.path(), "/etc/sysconfig/qemu-ga", "FILTER_RPC_ARGS=--poison\n");
        write(root.path(), "/etc/guestlet/agent.toml", "qemu-ga-files = true\n");
        write(root.path(), "/etc/guestlet/agent.d/1.toml", "qemu-ga-files = false\n");
        let places = Places::from(root.path());
        let settings = load(&places, Program::Guestlet, AgentFragment::default()).unwrap();
        assert_eq!(settings.block, [""; 0]);
        // A file that is named explicitly is read.
        write(root.path(), "/named", "[general]\nblock-rpcs=one\n");
        let places = Places { config: (root.path().join("named"), true), ..places };
        let settings = load(&places, Program::Guestlet, AgentFragment::default()).unwrap();
        assert_eq!(settings.block, ["one"]);
        write(root.path(), "/etc/guestlet/agent.d/2.toml", "qemu-ga-files = true\n");
        load(&places, Program::Guestlet, AgentFragment::default()).unwrap_err();
    }

    #[test]
    fn a_hook_can_be_switched_off_again() {
        for (file, text) in [
            ("/etc/sysconfig/qemu-ga", "FSFREEZE_HOOK_PATHNAME=/dev/null\n"),
            ("/etc/guestlet/agent.toml", "qga.fsfreeze-hook = ''\n"),
        ] {
            let root = tempfile::tempdir().unwrap();
            write(root.path(), "/etc/qemu/qemu-ga.conf", "[general]\nfsfreeze-hook=/one\n");
            write(root.path(), file, text);
            let places = Places::from(root.path());
            let settings = load(&places, Program::Guestlet, AgentFragment::default()).unwrap();
            assert_eq!(settings.fsfreeze_hook, None, "{file}");
        }
    }

    #[test]
    fn as_qemu_ga_the_api_is_off_until_it_is_asked_for() {
        let root = tempfile::tempdir().unwrap();
        let places = Places::from(root.path());
        let settings = load(&places, Program::QemuGa, AgentFragment::default()).unwrap();
        assert_eq!(settings.control, ApiChannel::None);
        assert!(!settings.local);
        write(root.path(), "/etc/guestlet/agent.toml", "[control]\nlisten = 'vsock'\n");
        let settings = load(&places, Program::QemuGa, AgentFragment::default()).unwrap();
        assert_eq!(settings.control, ApiChannel::Vsock { port: CONTROL_PORT });
        assert!(settings.local);
    }

    #[test]
    fn mistakes_are_found_with_file_and_line() {
        let cases = [
            (
                "/etc/qemu/qemu-ga.conf",
                "[general]\nmethod=pigeon\n",
                "qemu-ga.conf:2: unknown method \"pigeon\"",
            ),
            (
                "/etc/qemu/qemu-ga.conf",
                "[general]\nverbose=yes\n",
                "qemu-ga.conf:2: verbose: \"yes\" is not one of",
            ),
            ("/etc/qemu/qemu-ga.conf", "verbose=1\n", "qemu-ga.conf:1: \"verbose=1\" is before"),
            (
                "/etc/qemu/qemu-ga.conf",
                "[general]\n\nblock-rpcs=guest-exec guest-ping\n",
                "qemu-ga.conf:3: block-rpcs: \"guest-exec guest-ping\" is more than one name: separate names by commas, \
                 as in guest-exec,guest-ping",
            ),
            (
                "/etc/sysconfig/qemu-ga",
                "# x\nBLACKLIST_RPC=\"guest-exec guest-ping\"\n",
                "sysconfig/qemu-ga:2: block-rpcs: \"guest-exec guest-ping\" is more than one name",
            ),
            ("/etc/sysconfig/qemu-ga", "FILTER_RPC_ARGS=--x\n", "sysconfig/qemu-ga:1: FILTER_RPC_ARGS: "),
            ("/etc/guestlet/agent.toml", "[qga]\n\nallow-rpcs = ['a;b']\n", "agent.toml:3: allow-rpcs: "),
            ("/etc/guestlet/agent.d/1.toml", "[qga.freeze]\ndeadline = 0\n", "1.toml:2: qga.freeze.deadline"),
            ("/etc/guestlet/agent.toml", "[qga.exec]\npath = []\n", "agent.toml:2: unknown field `path`"),
            (
                "/etc/guestlet/agent.d/1.toml",
                "\n[[grant]]\nhost = 'qga'\nroles = ['all']\n",
                "1.toml:4: unknown role",
            ),
            (
                "/etc/guestlet/agent.d/1.toml",
                "[trust]\nplain = ['all']\n",
                "1.toml:2: trust.plain: unknown role",
            ),
            ("/etc/guestlet/agent.d/1.toml", "[policy]\nmode = 'off'\n", "1.toml:2: policy.mode is \"off\""),
        ];
        for (file, text, expected) in cases {
            let root = tempfile::tempdir().unwrap();
            write(root.path(), file, text);
            let places = Places::from(root.path());
            let error = load(&places, Program::Guestlet, AgentFragment::default()).unwrap_err().to_string();
            assert!(error.contains(expected), "{text:?}: {error}");
        }
    }

    #[test]
    fn a_file_that_is_named_has_to_be_there() {
        let missing = || Some(PathBuf::from("/no/such/file"));
        for places in [
            Places::new(missing(), None, None),
            Places::new(None, Some("/no/such/file".into()), None),
            Places::new(None, None, missing()),
        ] {
            let error = load(&places, Program::Guestlet, AgentFragment::default()).unwrap_err().to_string();
            assert!(error.starts_with("/no/such/file: "), "{error}");
        }
        assert!(!Places::new(None, Some("".into()), None).config.1);
        assert_eq!(Places::new(Some("/a".into()), Some("/b".into()), None).config, ("/a".into(), true));
    }
}
