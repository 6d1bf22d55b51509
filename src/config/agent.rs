//! The agent's settings: /etc/guestlet/agent.toml, its drop-ins in agent.d/, and the command line.

use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::config::{self, Error, Fragment};

/// The main file; its drop-ins are in the folder of the same name with `.d`.
pub const MAIN_FILE: &str = "/etc/guestlet/agent.toml";
/// The vsock port of the control channel.
pub const CONTROL_PORT: u32 = 970;
/// `VMADDR_CID_HOST`, vsock(7).
const HOST_CID: u32 = 2;
const DEFAULT_PORT_PATH: &str = "/dev/virtio-ports/org.qemu.guest_agent.0";
const DEFAULT_STATE_FOLDER: &str = "/var/run";

/// What the files and the command line say; every field may be missing.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct AgentFragment {
    /// `[qga]`
    pub qga: QgaFragment,
    /// `[control]`
    pub control: ControlFragment,
    /// `[log]`
    pub log: LogFragment,
}

/// `[qga]`: names and meanings are those of qemu-ga.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct QgaFragment {
    /// `virtio-serial`, `unix-listen`, or `none`.
    pub method: Option<String>,
    /// Device or socket.
    pub path: Option<PathBuf>,
    /// Where state is kept.
    pub statedir: Option<PathBuf>,
    /// Commands that may not be called; lists of several places add up.
    pub block_rpcs: Option<Vec<String>>,
    /// The only commands that may be called.
    pub allow_rpcs: Option<Vec<String>>,
}

/// `[control]`
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct ControlFragment {
    /// `vsock`, `none`, or `unix:` and a path.
    pub listen: Option<String>,
    /// vsock port.
    pub port: Option<u32>,
    /// The only context identifier that is let in.
    pub peer_cid: Option<u32>,
    /// The hypervisor has hybrid vsock.
    pub hybrid_vsock: Option<bool>,
}

/// `[log]`
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct LogFragment {
    /// Log each call.
    pub verbose: Option<bool>,
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
        take(&mut self.qga.statedir, later.qga.statedir);
        add(&mut self.qga.block_rpcs, later.qga.block_rpcs);
        add(&mut self.qga.allow_rpcs, later.qga.allow_rpcs);
        take(&mut self.control.listen, later.control.listen);
        take(&mut self.control.port, later.control.port);
        take(&mut self.control.peer_cid, later.control.peer_cid);
        take(&mut self.control.hybrid_vsock, later.control.hybrid_vsock);
        take(&mut self.log.verbose, later.log.verbose);
    }
}

/// The agent's settings, checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AgentSettings {
    /// Where QGA clients come from.
    pub qga: QgaChannel,
    /// Commands that may not be called.
    pub block: Vec<String>,
    /// The only commands that may be called.
    pub allow: Option<Vec<String>>,
    /// Where state is kept.
    pub state_folder: PathBuf,
    /// Where the host half comes from.
    pub control: ControlChannel,
    /// Log each call.
    pub verbose: bool,
}

/// The channel of the QGA protocol.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum QgaChannel {
    /// A virtio-serial port, by its device.
    VirtioSerial(PathBuf),
    /// A unix socket to listen on.
    UnixListen(PathBuf),
    /// No QGA.
    None,
}

/// The control channel of the guestlet API.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ControlChannel {
    /// A vsock port, unless the service manager passes a socket named `control`.
    Vsock {
        /// The port.
        port: u32,
        /// The only context identifier that is let in.
        peer_cid: u32,
        /// Let in any source port of it.
        any_port: bool,
    },
    /// A unix socket to listen on, for tests and for guests whose vsock ends elsewhere.
    Unix(PathBuf),
    /// No guestlet API.
    None,
}

/// Reads the settings; what `command_line` sets wins. Without `file`, the main file may be missing.
///
/// # Errors
/// If a file cannot be read, has an unknown key, or sets what makes no sense.
pub fn load(file: Option<&Path>, command_line: AgentFragment) -> Result<AgentSettings, Error> {
    let main = file.unwrap_or(Path::new(MAIN_FILE));
    let mut merged: AgentFragment = config::load(main, file.is_some(), &main.with_extension("d"))?;
    merged.merge(command_line, Path::new("command line"));
    check(merged).map_err(|problem| Error::in_file(main, problem))
}

fn check(settings: AgentFragment) -> Result<AgentSettings, String> {
    let AgentFragment { qga, control, log } = settings;
    let state_folder = absolute("qga.statedir", qga.statedir.unwrap_or(DEFAULT_STATE_FOLDER.into()))?;
    let path = qga.path.map(|path| absolute("qga.path", path)).transpose()?;
    let channel = match (qga.method.as_deref().unwrap_or("virtio-serial"), path) {
        ("virtio-serial", path) => QgaChannel::VirtioSerial(path.unwrap_or(DEFAULT_PORT_PATH.into())),
        ("unix-listen", Some(path)) => QgaChannel::UnixListen(path),
        ("unix-listen", None) => return Err("the method unix-listen needs the path of a socket".into()),
        ("none", _) => QgaChannel::None,
        (other, _) => {
            return Err(format!("unknown method {other:?}; use virtio-serial, unix-listen or none"));
        }
    };
    for (key, list) in [("block-rpcs", &qga.block_rpcs), ("allow-rpcs", &qga.allow_rpcs)] {
        if let Some(name) = list.iter().flatten().find(|name| name.contains([';', ' ', ','])) {
            return Err(format!("{key}: {name:?} is no command's name; names are separated by commas"));
        }
    }
    let port = control.port.unwrap_or(CONTROL_PORT);
    if !(1..1024).contains(&port) {
        return Err(format!(
            "control.port is {port}; it must be from 1 to 1023, which no unprivileged process can take"
        ));
    }
    let listen = control.listen.as_deref().unwrap_or("vsock");
    let control = match (listen, listen.strip_prefix("unix:")) {
        (_, Some(path)) => ControlChannel::Unix(absolute("control.listen", path.into())?),
        ("vsock", _) => ControlChannel::Vsock {
            port,
            peer_cid: control.peer_cid.unwrap_or(HOST_CID),
            any_port: control.hybrid_vsock.unwrap_or(false),
        },
        ("none", _) => ControlChannel::None,
        (other, _) => return Err(format!("control.listen is {other:?}; use vsock, none or unix:/path")),
    };
    Ok(AgentSettings {
        qga: channel,
        block: qga.block_rpcs.unwrap_or_default(),
        allow: qga.allow_rpcs,
        state_folder,
        control,
        verbose: log.verbose.unwrap_or(false),
    })
}

fn absolute(key: &str, path: PathBuf) -> Result<PathBuf, String> {
    if path.is_absolute() {
        return Ok(path);
    }
    Err(format!("{key} is {:?}; it must be an absolute path", path.display().to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checked(text: &str) -> Result<AgentSettings, String> {
        check(config::parse(Path::new("agent.toml"), text).map_err(|error| error.to_string())?)
    }

    #[test]
    fn without_settings_the_agent_is_what_qemu_ga_is_with_a_privileged_host() {
        let settings = checked("").unwrap();
        assert_eq!(settings.qga, QgaChannel::VirtioSerial(DEFAULT_PORT_PATH.into()));
        assert_eq!(settings.control, ControlChannel::Vsock { port: 970, peer_cid: 2, any_port: false });
    }

    #[test]
    fn lists_add_up_and_single_values_are_replaced() {
        let file = Path::new("x");
        let mut first: AgentFragment =
            config::parse(file, "qga.block-rpcs = ['guest-ping']\nqga.method = 'none'").unwrap();
        let second =
            config::parse(file, "qga.block-rpcs = ['guest-sync']\nqga.method = 'virtio-serial'").unwrap();
        first.merge(second, file);
        let settings = check(first).unwrap();
        assert_eq!(settings.block, ["guest-ping", "guest-sync"]);
        assert!(matches!(settings.qga, QgaChannel::VirtioSerial(_)));
    }

    #[test]
    fn what_makes_no_sense_is_refused_with_what_to_do() {
        let cases = [
            ("[qga]\nmethod = 'unix-listen'", "needs the path of a socket"),
            ("[qga]\nmethod = 'pigeon'", "use virtio-serial, unix-listen or none"),
            ("[qga]\npath = 'socket'", "must be an absolute path"),
            ("[qga]\nblock-rpcs = ['guest-exec;guest-ping']", "separated by commas"),
            ("[control]\nport = 1024", "from 1 to 1023"),
            ("[control]\nlisten = 'tcp:1'", "use vsock, none or unix:/path"),
            ("[control]\nlisten = 'unix:x'", "must be an absolute path"),
            ("[controls]\n", "agent.toml:1: unknown field `controls`"),
        ];
        for (text, expected) in cases {
            let error = checked(text).unwrap_err();
            assert!(error.contains(expected), "{text:?}: {error}");
        }
    }
}
