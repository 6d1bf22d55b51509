//! The agent's settings: /etc/guestlet/agent.toml, its drop-ins in agent.d/, and the command line.

use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::config::{self, Error, Fragment};

/// The main file; its drop-ins are in the folder of the same name with `.d`.
pub const MAIN_FILE: &str = "/etc/guestlet/agent.toml";
/// The vsock port of the control channel.
pub const CONTROL_PORT: u32 = 970;
/// The vsock port of the callback channel.
pub const CALLBACK_PORT: u32 = 971;
/// `VMADDR_CID_HOST`, vsock(7).
const HOST_CID: u32 = 2;
const DEFAULT_PORT_PATH: &str = "/dev/virtio-ports/org.qemu.guest_agent.0";
const DEFAULT_STATE_FOLDER: &str = "/var/run";
/// Where the agent keeps what lasts until the next boot.
pub const RUNTIME_FOLDER: &str = "/run/guestlet";

/// What the files and the command line say; every field may be missing.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct AgentFragment {
    /// `[qga]`
    pub qga: QgaFragment,
    /// `[control]`
    pub control: ApiFragment,
    /// `[callback]`
    pub callback: ApiFragment,
    /// `[vsock]`
    pub vsock: VsockFragment,
    /// `[log]`
    pub log: LogFragment,
    /// Where the agent keeps what lasts until the next boot.
    pub runtime_dir: Option<PathBuf>,
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

/// `[control]` and `[callback]`
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
        take(&mut self.callback.listen, later.callback.listen);
        take(&mut self.callback.port, later.callback.port);
        take(&mut self.vsock.peer_cid, later.vsock.peer_cid);
        take(&mut self.vsock.hybrid, later.vsock.hybrid);
        take(&mut self.runtime_dir, later.runtime_dir);
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
    /// Where the agent keeps what lasts until the next boot.
    pub runtime_folder: PathBuf,
    /// Where the host half comes from with its questions.
    pub control: ApiChannel,
    /// Where it comes from for the guest's.
    pub callback: ApiChannel,
    /// Who is let in on vsock.
    pub vsock_peer: VsockPeer,
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

/// Who is let in on vsock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VsockPeer {
    /// The only context identifier.
    pub cid: u32,
    /// Let in any source port of it.
    pub any_port: bool,
}

/// A channel of the guestlet API.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ApiChannel {
    /// A vsock port, unless the service manager passes a socket that listens there.
    Vsock {
        /// The port.
        port: u32,
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
    let command_line = (Path::new("command line"), command_line);
    config::load_checked(main, file.is_some(), &main.with_extension("d"), command_line, check)
}

fn check(settings: AgentFragment) -> Result<AgentSettings, String> {
    let AgentFragment { qga, control, callback, vsock, log, runtime_dir } = settings;
    let runtime_folder = absolute("runtime-dir", runtime_dir.unwrap_or(RUNTIME_FOLDER.into()))?;
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
    let control = api("control", &control, CONTROL_PORT)?;
    let callback = api("callback", &callback, CALLBACK_PORT)?;
    if let (ApiChannel::Vsock { port: one }, ApiChannel::Vsock { port: other }) = (&control, &callback)
        && one == other
    {
        return Err(format!("control.port and callback.port are both {one}; they must differ"));
    }
    let vsock_peer =
        VsockPeer { cid: vsock.peer_cid.unwrap_or(HOST_CID), any_port: vsock.hybrid.unwrap_or(false) };
    Ok(AgentSettings {
        qga: channel,
        block: qga.block_rpcs.unwrap_or_default(),
        allow: qga.allow_rpcs,
        state_folder,
        runtime_folder,
        control,
        callback,
        vsock_peer,
        verbose: log.verbose.unwrap_or(false),
    })
}

fn api(name: &str, channel: &ApiFragment, default_port: u32) -> Result<ApiChannel, String> {
    let port = channel.port.unwrap_or(default_port);
    if !(1..1024).contains(&port) {
        return Err(format!(
            "{name}.port is {port}; it must be from 1 to 1023, which no unprivileged process can take"
        ));
    }
    let listen = channel.listen.as_deref().unwrap_or("vsock");
    match (listen, listen.strip_prefix("unix:")) {
        (_, Some(path)) => Ok(ApiChannel::Unix(absolute(&format!("{name}.listen"), path.into())?)),
        ("vsock", _) => Ok(ApiChannel::Vsock { port }),
        ("none", _) => Ok(ApiChannel::None),
        (other, _) => Err(format!("{name}.listen is {other:?}; use vsock, none or unix:/path")),
    }
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
        assert_eq!(settings.control, ApiChannel::Vsock { port: 970 });
        assert_eq!(settings.callback, ApiChannel::Vsock { port: 971 });
        assert_eq!(settings.vsock_peer, VsockPeer { cid: 2, any_port: false });
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
            ("[callback]\nport = 970", "they must differ"),
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
