//! Checks the merged fragments and turns them into settings.

use std::path::{Component, PathBuf};
use std::time::Duration;

use crate::config::Problem;
use crate::config::agent::fragment::{
    AgentFragment, ApiFragment, CloudFragment, ForwardFragment, ProgramsFragment, QgaFragment, Time,
    TopologyFragment, VsockFragment,
};
use crate::config::agent::options::Program;
use crate::config::agent::qemu_ga::vsock_address;
use crate::config::agent::{
    AgentSettings, ApiChannel, CONTROL_PORT, DaemonSettings, QgaChannel, QgaLimits, RUNTIME_FOLDER,
    TopologySettings, TrustSettings, VsockPeer, applications, csi, file_systems, grants,
};
use crate::policy::{Bounds, Limits, Mode, Rules};

/// CID of the host: `VMADDR_CID_HOST`, vsock(7).
const HOST_CID: u32 = 2;
const DEFAULT_PORT_PATH: &str = "/dev/virtio-ports/org.qemu.guest_agent.0";
const DEFAULT_LINE_PATH: &str = "/dev/ttyS0";
const DEFAULT_PID_FILE: &str = "/var/run/qemu-ga.pid";
const DROP_INS: [&str; 3] = ["rke2", "k3s", "kubeadm"];
const ZONE_CHANGES: [&str; 3] = ["update", "keep", "report"];
const METHODS: &str = "virtio-serial, isa-serial, unix-listen, vsock-listen or none";
const DEFAULT_FREEZE: Duration = Duration::from_secs(120);
const DEFAULT_HOOK: Duration = Duration::from_secs(60);
/// Default timeout of all hooks: KubeVirt waits 60 s for the answer to a freeze, which includes the freeze itself.
const DEFAULT_HOOKS: Duration = Duration::from_secs(50);
/// Default wait for outputs after a program's exit. Output of processes that the program started belongs to the
/// program's output, but a daemon would hold it open forever.
const DEFAULT_OUTPUT: Duration = Duration::from_secs(10);
const SHORTEST: Duration = Duration::from_secs(1);
const LONGEST: Duration = Duration::from_secs(3600);
/// Time within which systemd-journald has to notify its watchdog (`WatchdogSec=` of its unit), which it cannot do
/// while its file system is frozen.
const JOURNAL_WATCHDOG: Duration = Duration::from_secs(180);
/// Remark on a freeze deadline that is longer than that.
const LONG_FREEZE: &str = "qga.freeze.deadline is 3 minutes or more: systemd-journald is killed by its watchdog when its file \
                           system is frozen for that long";
/// Maximum length of a version in characters.
const MAX_VERSION: usize = 64;

pub(super) fn problem<T>(key: &'static str, text: impl Into<String>) -> Result<T, Problem> {
    Err(Problem { key, text: text.into() })
}

/// Checks the settings of all fragments together, and fills in defaults.
#[allow(clippy::too_many_lines, reason = "one line for each field")]
pub fn check(settings: AgentFragment, program: Program) -> Result<AgentSettings, Problem> {
    let AgentFragment {
        qga,
        control,
        callback,
        vsock,
        csi,
        cloud,
        exec,
        file_systems: of_file_systems,
        forward,
        freeze,
        log,
        topology,
        policy,
        audit,
        trust,
        runtime_dir,
        daemon,
        pidfile,
        semicolons,
        mut remarks,
        ..
    } = settings;
    let channel = channel(&qga)?;
    let limits = limits(&qga)?;
    if limits.freeze_deadline >= JOURNAL_WATCHDOG {
        remarks.push(LONG_FREEZE.to_owned());
    }
    names("qga.block-rpcs", "block-rpcs", qga.block_rpcs.as_deref())?;
    names("qga.allow-rpcs", "allow-rpcs", qga.allow_rpcs.as_deref())?;
    version(qga.version.as_deref())?;
    let no_hook = |path: &PathBuf| path.as_os_str().is_empty() || path.as_os_str() == "/dev/null";
    let fsfreeze_hook = qga.fsfreeze_hook.filter(|path| !no_hook(path));
    let fsfreeze_hook = fsfreeze_hook.map(|path| absolute("qga.fsfreeze-hook", path)).transpose()?;

    let bounds = Bounds {
        allow: qga.allow_rpcs.clone(),
        block: qga.block_rpcs.clone().unwrap_or_default(),
        limits: Limits {
            exec_paths: limits.exec_paths.clone(),
            file_paths: limits.file_paths.clone(),
            files_read_only: limits.files_read_only,
            passwords: limits.allow_passwords,
        },
    };
    let rules =
        Rules { mode: grants::mode(&policy)?, plain: grants::plain(&trust)?, bounds, ..Rules::default() };

    if rules.mode == Mode::Audit {
        remarks.push(
            "policy.mode is \"audit\": calls that no grant allows are recorded, but not denied".to_owned(),
        );
    }

    let control = control_channel(&control)?;
    if callback.listen.is_some() || callback.port.is_some() {
        remarks.push(
            "callback.listen and callback.port no longer have any effect: requests of this guest go over \
             the control channel; remove them"
                .to_owned(),
        );
    }
    Ok(AgentSettings {
        qga: channel,
        retry_path: qga.retry_path.unwrap_or(false),
        block: qga.block_rpcs.unwrap_or_default(),
        allow: qga.allow_rpcs,
        separator: if semicolons { ';' } else { ',' },
        version: qga.version,
        fsfreeze_hook,
        limits,
        state_folder: absolute("qga.statedir", qga.statedir.unwrap_or(super::DEFAULT_STATE_FOLDER.into()))?,
        receipts: absolute(
            "freeze.receipts-dir",
            freeze.receipts_dir.clone().unwrap_or(super::RECEIPTS_FOLDER.into()),
        )?,
        applications: applications::check(freeze)?,
        runtime_folder: absolute("runtime-dir", runtime_dir.unwrap_or(RUNTIME_FOLDER.into()))?,
        local: control != ApiChannel::None || program == Program::Guestlet,
        control,
        vsock_peer: vsock_peer(&vsock),
        verbose: log.verbose.unwrap_or(false),
        log_file: log.file.map(|path| absolute("log.file", path)).transpose()?,
        daemon: DaemonSettings {
            wanted: daemon.unwrap_or(false),
            pid_file: absolute("pidfile", pidfile.unwrap_or(DEFAULT_PID_FILE.into()))?,
        },
        // Still without the grants, which `load` checks file by file.
        rules,
        audit_file: audit.file.map(|path| absolute("audit.file", path)).transpose()?,
        // Replaced by `load` with a path beside the main file.
        disk_rules: super::MAIN_FILE.into(),
        csi: csi::check(csi)?,
        cloud_socket: cloud_socket(cloud)?,
        program_ring: program_ring(&exec)?,
        file_systems: file_systems::check(&of_file_systems)?,
        forwards: forwards(&forward)?,
        topology: self::topology(topology)?,
        trust: TrustSettings {
            // Replaced by `load` with a path beside the main file.
            hosts: super::MAIN_FILE.into(),
            state_folder: absolute("trust.state-dir", trust.state_dir.unwrap_or(super::TRUST_FOLDER.into()))?,
        },
        remarks,
    })
}

/// Checks the version that is reported to QGA clients.
fn version(version: Option<&str>) -> Result<(), Problem> {
    match version {
        Some(version)
            if version.is_empty()
                || version.len() > MAX_VERSION
                || version.contains(|c: char| !c.is_ascii_graphic()) =>
        {
            let text =
                format!("qga.version is {version:?}; it must be a word of at most {MAX_VERSION} characters");
            problem("qga.version", text)
        }
        _ => Ok(()),
    }
}

fn vsock_peer(vsock: &VsockFragment) -> VsockPeer {
    VsockPeer { cid: vsock.peer_cid.unwrap_or(HOST_CID), any_port: vsock.hybrid.unwrap_or(false) }
}

fn forwards(forward: &ForwardFragment) -> Result<usize, Problem> {
    const BOUNDS: std::ops::RangeInclusive<usize> = 1..=2048;

    let connections = forward.connections.unwrap_or(super::FORWARDS);
    if BOUNDS.contains(&connections) {
        return Ok(connections);
    }
    let text = format!("forward.connections is {connections}; use {} to {}", BOUNDS.start(), BOUNDS.end());
    problem("forward.connections", text)
}

fn program_ring(exec: &ProgramsFragment) -> Result<usize, Problem> {
    const BOUNDS: std::ops::RangeInclusive<u64> = 4096..=16 << 20;

    let bytes = exec.ring_bytes.unwrap_or(super::PROGRAM_RING);
    match usize::try_from(bytes) {
        Ok(ring) if BOUNDS.contains(&bytes) => Ok(ring),
        _ => problem(
            "exec.ring-bytes",
            format!("exec.ring-bytes is {bytes}; use {} to {}", BOUNDS.start(), BOUNDS.end()),
        ),
    }
}

fn cloud_socket(cloud: CloudFragment) -> Result<Option<PathBuf>, Problem> {
    let path = cloud.socket.unwrap_or_else(|| super::CLOUD_SOCKET.into());
    let path = Some(path).filter(|path| !path.as_os_str().is_empty());
    path.map(|path| csi::socket("cloud.socket", path)).transpose()
}

fn topology(found: TopologyFragment) -> Result<TopologySettings, Problem> {
    let mut drop_ins = Vec::new();
    for name in found.drop_ins.unwrap_or_default() {
        if !DROP_INS.contains(&name.as_str()) {
            let text = format!("topology.drop-ins: {name:?} is not one of {}", DROP_INS.join(", "));
            return problem("topology.drop-ins", text);
        }
        if !drop_ins.contains(&name) {
            drop_ins.push(name);
        }
    }
    if let Some(change) = found.zone_change.as_deref().filter(|change| !ZONE_CHANGES.contains(change)) {
        let text = format!("topology.zone-change: {change:?} is not one of {}", ZONE_CHANGES.join(", "));
        return problem("topology.zone-change", text);
    }
    Ok(TopologySettings {
        drop_ins,
        no_node_labels: !found.node_labels.unwrap_or(true),
        kubeconfig: found.kubeconfig.map(|path| absolute("topology.kubeconfig", path)).transpose()?,
        zone_change: found.zone_change,
        report_only: found.report_only.unwrap_or(false),
        provider_id: found.provider_id.unwrap_or(false),
    })
}

fn channel(qga: &QgaFragment) -> Result<QgaChannel, Problem> {
    let device = |usual: &str| absolute("qga.path", qga.path.clone().unwrap_or(usual.into()));
    Ok(match (qga.method.as_deref().unwrap_or("virtio-serial"), &qga.path) {
        ("virtio-serial", _) => QgaChannel::VirtioSerial(device(DEFAULT_PORT_PATH)?),
        ("isa-serial", _) => QgaChannel::IsaSerial(device(DEFAULT_LINE_PATH)?),
        ("unix-listen", Some(path)) => QgaChannel::UnixListen(absolute("qga.path", path.clone())?),
        ("unix-listen", None) => {
            return problem("qga.method", "the method unix-listen needs the path of a socket");
        }
        ("vsock-listen", Some(path)) => match path.to_str().and_then(vsock_address) {
            Some((cid, port)) if port != u32::MAX => QgaChannel::VsockListen { cid, port },
            _ => {
                let text = format!(
                    "the path {} is not a vsock address; write it as CID:PORT, such as 3:1234",
                    path.display()
                );
                return problem("qga.path", text);
            }
        },
        ("vsock-listen", None) => {
            return problem(
                "qga.method",
                "the method vsock-listen needs an address: CID:PORT, such as 3:1234",
            );
        }
        ("none", _) => QgaChannel::None,
        (other, _) => {
            return problem("qga.method", format!("unknown method {other:?}; use {METHODS}"));
        }
    })
}

fn limits(qga: &QgaFragment) -> Result<QgaLimits, Problem> {
    let freeze_deadline = time("qga.freeze.deadline", qga.freeze.deadline.as_ref(), DEFAULT_FREEZE)?;
    let usual_hook = DEFAULT_HOOK.min(freeze_deadline);
    let hook_deadline = time("qga.freeze.hook-deadline", qga.freeze.hook_deadline.as_ref(), usual_hook)?;
    let usual_hooks = DEFAULT_HOOKS.max(hook_deadline.min(freeze_deadline));
    let usual_hooks = if qga.freeze.hook_deadline.is_some() { usual_hooks } else { DEFAULT_HOOKS };
    Ok(QgaLimits {
        exec_paths: paths("qga.exec.paths", qga.exec.paths.as_deref())?,
        output_deadline: time("qga.exec.output-deadline", qga.exec.output_deadline.as_ref(), DEFAULT_OUTPUT)?,
        file_paths: paths("qga.files.paths", qga.files.paths.as_deref())?,
        files_read_only: qga.files.read_only.unwrap_or(false),
        allow_passwords: qga.passwords.allow.unwrap_or(true),
        freeze_deadline,
        hook_deadline,
        hooks_deadline: time("qga.freeze.hooks-deadline", qga.freeze.hooks_deadline.as_ref(), usual_hooks)?,
    })
}

/// Refuses a list with a separator other than commas, which would be one long name that no command has.
fn names(key: &'static str, option: &str, list: Option<&[String]>) -> Result<(), Problem> {
    let separator = |c: char| matches!(c, ';' | ',') || c.is_whitespace();
    match list.unwrap_or_default().iter().find(|name| name.contains(separator) || name.is_empty()) {
        None => Ok(()),
        Some(name) if name.is_empty() => problem(key, format!("{option}: a name is empty")),
        Some(name) => {
            let apart: Vec<_> = name.split(separator).filter(|part| !part.is_empty()).collect();
            let apart = apart.join(",");
            problem(
                key,
                format!("{option}: {name:?} is more than one name: separate names by commas, as in {apart}"),
            )
        }
    }
}

fn paths(key: &'static str, list: Option<&[PathBuf]>) -> Result<Option<Vec<PathBuf>>, Problem> {
    let plain = |path: &PathBuf| {
        path.is_absolute() && !path.components().any(|part| matches!(part, Component::ParentDir))
    };
    match list.unwrap_or_default().iter().find(|path| !plain(path)) {
        Some(path) => problem(
            key,
            format!("{key}: {:?} must be an absolute path without \"..\"", path.display().to_string()),
        ),
        // Collected from components, so that no path ends with a slash or has two in a row.
        None => Ok(list.map(|list| list.iter().map(|path| path.components().collect()).collect())),
    }
}

pub(super) fn time(key: &'static str, written: Option<&Time>, usual: Duration) -> Result<Duration, Problem> {
    let parsed = match written {
        None => return Ok(usual),
        Some(Time::Seconds(seconds)) => Some(Duration::from_secs(*seconds)),
        Some(Time::Words(words)) => duration(words),
    };
    match parsed {
        Some(time) if (SHORTEST..=LONGEST).contains(&time) => Ok(time),
        Some(_) => problem(key, format!("{key} must be from 1 second to 1 hour")),
        None => {
            problem(key, format!("{key} must be seconds, or a number with s, min or h, such as \"2min\""))
        }
    }
}

/// Parses a number followed by `s`, `min` or `h`.
fn duration(words: &str) -> Option<Duration> {
    let words = words.trim();
    let (number, unit) = words.split_at(words.find(|c: char| !c.is_ascii_digit()).unwrap_or(words.len()));
    let seconds = match unit.trim_start() {
        "" | "s" => 1,
        "min" => 60,
        "h" => 3600,
        _ => return None,
    };
    Some(Duration::from_secs(number.parse::<u64>().ok()?.saturating_mul(seconds)))
}

fn control_channel(channel: &ApiFragment) -> Result<ApiChannel, Problem> {
    const LISTEN: &str = "control.listen";
    let port = channel.port.unwrap_or(CONTROL_PORT);
    if !(1..1024).contains(&port) {
        let text = format!(
            "control.port is {port}; it must be from 1 to 1023, which unprivileged processes cannot bind"
        );
        return problem("control.port", text);
    }
    let listen = channel.listen.as_deref().unwrap_or("vsock");
    match (listen, listen.strip_prefix("unix:")) {
        (_, Some(path)) => Ok(ApiChannel::Unix(absolute(LISTEN, path.into())?)),
        ("vsock", _) => Ok(ApiChannel::Vsock { port }),
        ("none", _) => Ok(ApiChannel::None),
        (other, _) => problem(LISTEN, format!("{LISTEN} is {other:?}; use vsock, none or unix:/path")),
    }
}

pub(super) fn absolute(key: &'static str, path: PathBuf) -> Result<PathBuf, Problem> {
    if path.is_absolute() {
        return Ok(path);
    }
    problem(key, format!("{key} is {:?}; it must be an absolute path", path.display().to_string()))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::config::{self, Fragment as _};

    fn checked(text: &str) -> Result<AgentSettings, String> {
        let fragment = config::parse(Path::new("agent.toml"), text).map_err(|error| error.to_string())?;
        check(fragment, Program::Guestlet).map_err(|problem| problem.text)
    }

    #[test]
    fn without_settings_the_agent_is_what_qemu_ga_is_with_a_privileged_host() {
        let settings = checked("").unwrap();
        assert_eq!(settings.qga, QgaChannel::VirtioSerial(DEFAULT_PORT_PATH.into()));
        assert_eq!(settings.control, ApiChannel::Vsock { port: 970 });
        assert_eq!(settings.vsock_peer, VsockPeer { cid: 2, any_port: false });
        let limits = QgaLimits {
            exec_paths: None,
            output_deadline: DEFAULT_OUTPUT,
            file_paths: None,
            files_read_only: false,
            allow_passwords: true,
            freeze_deadline: Duration::from_secs(120),
            hook_deadline: Duration::from_secs(60),
            hooks_deadline: Duration::from_secs(50),
        };
        assert_eq!(settings.limits, limits);
        assert_eq!((settings.version, settings.fsfreeze_hook), (None, None));
    }

    #[test]
    fn lists_add_up_and_single_values_are_replaced() {
        let file = Path::new("x");
        let mut first: AgentFragment =
            config::parse(file, "qga.block-rpcs = ['guest-ping']\nqga.method = 'none'").unwrap();
        let second =
            config::parse(file, "qga.block-rpcs = ['guest-sync']\nqga.method = 'virtio-serial'").unwrap();
        first.merge(second, file);
        let settings = check(first, Program::Guestlet).unwrap();
        assert_eq!(settings.block, ["guest-ping", "guest-sync"]);
        assert!(matches!(settings.qga, QgaChannel::VirtioSerial(_)));
    }

    #[test]
    fn channels() {
        let cases = [
            ("method = 'isa-serial'", QgaChannel::IsaSerial("/dev/ttyS0".into())),
            ("method = 'isa-serial'\npath = '/dev/ttyS1'", QgaChannel::IsaSerial("/dev/ttyS1".into())),
            ("method = 'unix-listen'\npath = '/s'", QgaChannel::UnixListen("/s".into())),
            ("method = 'vsock-listen'\npath = '3:1234'", QgaChannel::VsockListen { cid: 3, port: 1234 }),
            ("method = 'none'\npath = '/s'", QgaChannel::None),
        ];
        for (text, expected) in cases {
            assert_eq!(checked(&format!("[qga]\n{text}")).unwrap().qga, expected, "{text}");
        }
    }

    #[test]
    fn what_commands_may_do() {
        let text = "[qga]\nversion = '7.2.0'\n[qga.exec]\npaths = ['/usr/bin/', '/opt//a']\n[qga.files]\npaths = []\n\
            read-only = true\n[qga.passwords]\nallow = false\n[qga.freeze]\ndeadline = '2 min'\nhook-deadline = 5\n";
        let settings = checked(text).unwrap();
        let limits = QgaLimits {
            exec_paths: Some(vec!["/usr/bin".into(), "/opt/a".into()]),
            output_deadline: DEFAULT_OUTPUT,
            file_paths: Some(Vec::new()),
            files_read_only: true,
            allow_passwords: false,
            freeze_deadline: Duration::from_secs(120),
            hook_deadline: Duration::from_secs(5),
            hooks_deadline: Duration::from_secs(50),
        };
        assert_eq!(settings.limits, limits);
        assert_eq!(settings.version.as_deref(), Some("7.2.0"));
        assert!(settings.remarks.is_empty());
        let hooks =
            |text: &str| checked(&format!("[qga.freeze]\n{text}")).unwrap().limits.hooks_deadline.as_secs();
        assert_eq!((hooks("hook-deadline = 90"), hooks("hooks-deadline = 20")), (90, 20));
        let long = checked("qga.freeze.deadline = '1h'").unwrap();
        assert_eq!(long.limits.freeze_deadline, LONGEST);
        assert!(long.remarks[0].contains("watchdog"), "{:?}", long.remarks);
        assert_eq!(
            checked("qga.freeze.deadline = 10").unwrap().limits.hook_deadline,
            Duration::from_secs(10)
        );
    }

    #[test]
    fn what_makes_no_sense_is_refused_with_what_to_do() {
        let cases = [
            ("[qga]\nmethod = 'unix-listen'", "needs the path of a socket"),
            ("[qga]\nmethod = 'vsock-listen'", "CID:PORT"),
            ("[qga]\nmethod = 'vsock-listen'\npath = '/x'", "CID:PORT"),
            ("[qga]\nmethod = 'vsock-listen'\npath = '3:4294967295'", "CID:PORT"),
            ("[qga]\nmethod = 'pigeon'", "use virtio-serial, isa-serial, unix-listen, vsock-listen or none"),
            ("[qga]\npath = 'socket'", "must be an absolute path"),
            ("[qga]\nblock-rpcs = ['guest-exec;guest-ping']", "as in guest-exec,guest-ping"),
            ("[qga]\nblock-rpcs = ['']", "a name is empty"),
            ("[qga]\nversion = ''", "must be a word"),
            ("[qga]\nversion = 'a b'", "must be a word"),
            ("[qga.exec]\npaths = ['bin/x']", "must be an absolute path"),
            ("[qga.files]\npaths = ['/a/../b']", "without \"..\""),
            ("[qga.freeze]\ndeadline = 0", "from 1 second to 1 hour"),
            ("[qga.freeze]\ndeadline = -1", "from 1 second to 1 hour"),
            ("[qga.freeze]\ndeadline = true", "such as \"2min\""),
            ("[qga.freeze]\ndeadline = '61min'", "from 1 second to 1 hour"),
            ("[qga.freeze]\nhook-deadline = '2 weeks'", "such as \"2min\""),
            ("[qga.freeze]\nhook-deadline = 'min'", "such as \"2min\""),
            ("[qga]\nfsfreeze-hook = 'hook'", "must be an absolute path"),
            ("[log]\nfile = 'log'", "must be an absolute path"),
            ("[control]\nport = 1024", "from 1 to 1023"),
            ("[control]\nlisten = 'tcp:1'", "use vsock, none or unix:/path"),
            ("[control]\nlisten = 'unix:x'", "must be an absolute path"),
            ("[topology]\ndrop-ins = ['rke']", "not one of rke2, k3s, kubeadm"),
            ("[topology]\nzone-change = 'follow'", "not one of update, keep, report"),
            ("[topology]\nkubeconfig = 'x'", "must be an absolute path"),
            ("[policy]\nmode = 'permissive'", "use enforce or audit"),
            ("[audit]\nfile = 'audit.jsonl'", "must be an absolute path"),
            ("[trust]\nplain = ['monitor']", "unknown role \"monitor\""),
            ("[controls]\n", "agent.toml:1: unknown field `controls`"),
            ("daemon = true\n", "unknown field `daemon`"),
        ];
        for (text, expected) in cases {
            let error = checked(text).unwrap_err();
            assert!(error.contains(expected), "{text:?}: {error}");
        }
    }
}
