//! The settings of `[csi]`: the sockets for kubelet and the sidecars, and the name of the driver.

use std::path::{Path, PathBuf};

use crate::config::Problem;
use crate::config::agent::check::{absolute, problem};
use crate::config::agent::fragment::{Choice, CsiFragment};

const DRIVER: &str = "driver.harvesterhci.io";
const KUBELET_ROOT: &str = "/var/lib/kubelet";
/// Maximum length of a driver's name in characters, according to CSI.
const LONGEST_NAME: usize = 63;
/// Maximum length of a socket's path in bytes, unix(7).
const LONGEST_SOCKET: usize = 107;
/// Maximum length in characters of a label key's part before the slash, and of the part after it.
const LONGEST_PREFIX: usize = 253;
const LONGEST_KEY: usize = 63;

/// Condition for serving kubelet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CsiMode {
    /// Kubelet is never served.
    Off,
    /// Kubelet is served while its directory exists.
    Auto,
    /// Kubelet is always served; missing directories are created.
    On,
}

/// Settings of the CSI driver, which serves volumes to pods.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CsiSettings {
    /// Condition for serving kubelet.
    pub mode: CsiMode,
    /// Name of the CSI driver.
    pub driver: String,
    /// Root directory of kubelet.
    pub kubelet_root: PathBuf,
    /// Socket of the Identity and Node services.
    pub node_socket: PathBuf,
    /// Socket of the Identity and Controller services, if there is to be one.
    pub controller_socket: Option<PathBuf>,
    /// Topology keys that are reported to kubelet.
    pub topology: Vec<String>,
}

/// Checks the settings, and fills in defaults.
pub fn check(csi: CsiFragment) -> Result<CsiSettings, Problem> {
    let mode = match csi.enabled {
        Some(Choice::Plain(true)) => CsiMode::On,
        Some(Choice::Plain(false)) => CsiMode::Off,
        None => CsiMode::Auto,
        Some(Choice::Word(word)) if word == "auto" => CsiMode::Auto,
        Some(Choice::Word(word)) => {
            return problem("csi.enabled", format!("csi.enabled is {word:?}; use true, false or \"auto\""));
        }
    };
    let driver = csi.driver.unwrap_or_else(|| DRIVER.to_owned());
    if !is_driver_name(&driver) {
        let text = format!(
            "csi.driver is {driver:?}; it must be a domain name of at most {LONGEST_NAME} letters, digits, dashes and dots"
        );
        return problem("csi.driver", text);
    }
    let kubelet_root = absolute("csi.kubelet-root", csi.kubelet_root.unwrap_or_else(|| KUBELET_ROOT.into()))?;
    if kubelet_root == Path::new("/") {
        return problem("csi.kubelet-root", "csi.kubelet-root must not be the whole file system");
    }
    let plugin = kubelet_root.join("plugins").join(&driver);
    let node_socket = socket("csi.node-socket", csi.node_socket.unwrap_or_else(|| plugin.join("csi.sock")))?;
    let registration = kubelet_root.join(format!("plugins_registry/{driver}-reg.sock"));
    socket("csi.kubelet-root", registration)?;
    let controller = csi.controller_socket.unwrap_or_else(|| plugin.join("controller/csi.sock"));
    let controller_socket = Some(controller).filter(|path| !path.as_os_str().is_empty());
    let controller_socket =
        controller_socket.map(|path| socket("csi.controller-socket", path)).transpose()?;
    if controller_socket.as_ref() == Some(&node_socket) {
        return problem("csi.controller-socket", "csi.controller-socket and csi.node-socket must differ");
    }
    let topology = csi.topology.unwrap_or_default();
    if let Some(key) = topology.iter().find(|key| !is_label_key(key)) {
        return problem("csi.topology", format!("csi.topology: {key:?} is not a key of a label"));
    }
    Ok(CsiSettings { mode, driver, kubelet_root, node_socket, controller_socket, topology })
}

/// Checks a socket's path, which has to be absolute and no longer than the kernel allows.
pub(super) fn socket(key: &'static str, path: PathBuf) -> Result<PathBuf, Problem> {
    let path = absolute(key, path)?;
    if path.as_os_str().len() > LONGEST_SOCKET || path.file_name().is_none() {
        let shown = path.display().to_string();
        return problem(
            key,
            format!("{key}: the socket {shown:?} has a path of more than {LONGEST_SOCKET} bytes"),
        );
    }
    Ok(path)
}

fn is_driver_name(name: &str) -> bool {
    let inside = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '.');
    let ends = |c: char| c.is_ascii_alphanumeric();
    name.len() <= LONGEST_NAME && name.chars().all(inside) && name.starts_with(ends) && name.ends_with(ends)
}

fn is_label_key(key: &str) -> bool {
    let word = |text: &str, longest: usize| {
        let ends = |c: char| c.is_ascii_alphanumeric();
        text.len() <= longest
            && text.starts_with(ends)
            && text.ends_with(ends)
            && text.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.'))
    };
    match key.split_once('/') {
        Some((prefix, name)) => word(prefix, LONGEST_PREFIX) && word(name, LONGEST_KEY),
        None => word(key, LONGEST_KEY),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checked(text: &str) -> Result<CsiSettings, String> {
        check(toml::from_str(text).unwrap()).map_err(|problem| format!("{}: {}", problem.key, problem.text))
    }

    #[test]
    fn what_is_usual_and_what_follows_from_what() {
        let usual = checked("").unwrap();
        assert_eq!(usual.mode, CsiMode::Auto);
        let plugin = Path::new("/var/lib/kubelet/plugins/driver.harvesterhci.io");
        assert_eq!(usual.node_socket, plugin.join("csi.sock"));
        assert_eq!(usual.controller_socket, Some(plugin.join("controller/csi.sock")));
        let other = checked(
            "enabled = true\ndriver = 'a.b'\nkubelet-root = '/k'\ncontroller-socket = ''\ntopology = ['x/y']",
        )
        .unwrap();
        let expected = CsiSettings {
            mode: CsiMode::On,
            driver: "a.b".to_owned(),
            kubelet_root: "/k".into(),
            node_socket: "/k/plugins/a.b/csi.sock".into(),
            controller_socket: None,
            topology: vec!["x/y".to_owned()],
        };
        assert_eq!(other, expected);
    }

    #[test]
    fn what_cannot_be_is_refused_with_its_key() {
        let long = format!("kubelet-root = '/{}'", "k".repeat(60));
        for (text, expected) in [
            ("enabled = 'yes'", "csi.enabled: "),
            ("driver = ''", "csi.driver: "),
            ("driver = '../x'", "csi.driver: "),
            ("driver = 'a/b'", "csi.driver: "),
            ("driver = '-a'", "csi.driver: "),
            ("kubelet-root = 'k'", "csi.kubelet-root: "),
            ("kubelet-root = '/'", "csi.kubelet-root: "),
            (&long, "csi.kubelet-root: "),
            ("node-socket = 'x'", "csi.node-socket: "),
            ("node-socket = '/s'\ncontroller-socket = '/s'", "csi.controller-socket: "),
            ("topology = ['a b']", "csi.topology: "),
            ("topology = ['/b']", "csi.topology: "),
        ] {
            let error = checked(text).unwrap_err();
            // With a long root, the path of its first socket is too long.
            let expected = if text == long { "csi." } else { expected };
            assert!(error.starts_with(expected), "{text}: {error}");
        }
        assert!(toml::from_str::<CsiFragment>("enabled = 1").is_err());
    }
}
