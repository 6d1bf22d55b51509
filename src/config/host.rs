//! Settings of `guestlet-host`: where it listens, and the VMs of this machine.
//!
//! ```toml
//! socket = "/run/guestlet-host/api.sock"
//!
//! [[vm]]
//! name = "web-1"
//! uuid = "6f1c0a52-5c0f-4a8e-9d1b-0d7a2f3b4c5d"
//! cluster = "dev"                 # optional
//! vsock-cid = 3                   # or vsock-socket, or unix-socket
//! qmp = "/run/vm/web-1/qmp.sock"  # optional
//! port = 970                      # optional
//! ```
//!
//! `[[vm]]` tables of all fragments add up; of `socket` the last one wins. To add a setting of a VM: a field
//! in `VmFragment`, its check in `Checker::vm`, and its place in [`VmSettings`].

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use toml::Spanned;

use super::{Error, Fragment, load};

/// Where the settings are unless the command line says otherwise.
pub const DEFAULT_FILE: &str = "/etc/guestlet/host.toml";
/// Where `guestctl` finds the daemon unless told otherwise.
pub const DEFAULT_SOCKET: &str = "/run/guestlet-host/api.sock";
/// The vsock port of an agent's control channel.
pub const DEFAULT_PORT: u32 = 970;
/// CIDs below are the hypervisor's, the loopback's and the host's own.
const FIRST_GUEST_CID: u32 = 3;
/// The greatest vsock port; the number after it means "any".
const MAX_PORT: u32 = u32::MAX - 1;
/// Longest socket path that Linux takes, in bytes (without the final zero).
const MAX_SOCKET_PATH: usize = 107;

/// What `guestlet-host` does, checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostSettings {
    /// The unix socket of the admin API.
    pub socket: PathBuf,
    /// The VMs, in the order of their names.
    pub vms: Vec<VmSettings>,
}

/// One VM, checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VmSettings {
    /// Unique on this host: letters a–z, digits, `-` and `.`, at most 253 bytes.
    pub name: String,
    /// Unique on this host, in lower case with hyphens.
    pub uuid: String,
    /// Name of the cluster that the VM belongs to; may be empty.
    pub cluster: String,
    /// How its agent is reached.
    pub dial: DialSettings,
    /// The VM's QMP socket, if the host half may ask the hypervisor.
    pub qmp: Option<PathBuf>,
}

/// How an agent is reached.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum DialSettings {
    /// The kernel's `AF_VSOCK`.
    Vsock {
        /// Context identifier of the guest, 3 or more.
        cid: u32,
        /// Port of the agent.
        port: u32,
    },
    /// Hybrid vsock: a unix socket that takes `CONNECT <port>`.
    Hybrid {
        /// The socket.
        path: PathBuf,
        /// Port of the agent.
        port: u32,
    },
    /// A unix socket that leads straight to an agent.
    Unix {
        /// The socket.
        path: PathBuf,
    },
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
#[serde(deny_unknown_fields)]
struct Parsed {
    socket: Option<Spanned<PathBuf>>,
    #[serde(default)]
    vm: Vec<Spanned<VmFragment>>,
}

/// A `[[vm]]` table.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct VmFragment {
    name: Option<Spanned<String>>,
    uuid: Option<Spanned<String>>,
    cluster: Option<Spanned<String>>,
    vsock_cid: Option<Spanned<u32>>,
    vsock_socket: Option<Spanned<PathBuf>>,
    unix_socket: Option<Spanned<PathBuf>>,
    qmp: Option<Spanned<PathBuf>>,
    port: Option<Spanned<u32>>,
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
        let mut vms = Vec::new();
        let mut taken = HashMap::new();
        for source in &self.sources {
            if let Some(path) = &source.parsed.socket {
                socket = source.socket_path("socket", path)?;
            }
            for vm in &source.parsed.vm {
                vms.push(Checker { source, vm, taken: &mut taken }.vm()?);
            }
        }
        vms.sort_by(|a: &VmSettings, b| a.name.cmp(&b.name));
        Ok(HostSettings { socket, vms })
    }
}

impl Source {
    fn wrong<T>(&self, at: &Spanned<T>, problem: String) -> Error {
        Error::at(&self.file, &self.text, at.span().start, problem)
    }

    fn socket_path(&self, key: &str, path: &Spanned<PathBuf>) -> Result<PathBuf, Error> {
        let found = path.get_ref();
        if !found.is_absolute() {
            return Err(self.wrong(
                path,
                format!("{key} = {:?} is a relative path; give one that starts with /", found.display()),
            ));
        }
        if found.as_os_str().len() > MAX_SOCKET_PATH {
            let problem = format!(
                "{key} is a path of {} bytes, and the kernel takes {MAX_SOCKET_PATH}; use a shorter one",
                found.as_os_str().len()
            );
            return Err(self.wrong(path, problem));
        }
        Ok(found.clone())
    }
}

/// What no two VMs may share, and where it was first seen.
type Taken = HashMap<String, String>;

struct Checker<'a> {
    source: &'a Source,
    vm: &'a Spanned<VmFragment>,
    taken: &'a mut Taken,
}

impl Checker<'_> {
    fn vm(mut self) -> Result<VmSettings, Error> {
        let vm = self.vm.get_ref();
        let name = self.required("name", "give it a name", vm.name.as_ref())?;
        check_name(name.get_ref()).map_err(|problem| self.source.wrong(name, problem))?;
        self.unique("name", name, name.get_ref())?;
        let spelled = self.required("uuid", "the guest's DMI UUID is compared with it", vm.uuid.as_ref())?;
        let uuid =
            canonical_uuid(spelled.get_ref()).map_err(|problem| self.source.wrong(spelled, problem))?;
        self.unique("uuid", spelled, &uuid)?;
        let dial = self.dial()?;
        let qmp = vm.qmp.as_ref().map(|path| self.socket("qmp", path)).transpose()?;
        if let Some(cluster) = &vm.cluster
            && (cluster.get_ref().len() > 253 || cluster.get_ref().chars().any(char::is_control))
        {
            let problem = "cluster is longer than 253 bytes or has control characters".to_owned();
            return Err(self.source.wrong(cluster, problem));
        }
        let cluster = vm.cluster.as_ref().map(|cluster| cluster.get_ref().clone()).unwrap_or_default();
        Ok(VmSettings { name: name.get_ref().clone(), uuid, cluster, dial, qmp })
    }

    fn dial(&mut self) -> Result<DialSettings, Error> {
        let vm = self.vm.get_ref();
        let port = match &vm.port {
            Some(port) if !(1..=MAX_PORT).contains(port.get_ref()) => {
                let problem = format!("port = {}: a vsock port is 1 to {MAX_PORT}", port.get_ref());
                return Err(self.source.wrong(port, problem));
            }
            Some(port) => *port.get_ref(),
            None => DEFAULT_PORT,
        };
        match (&vm.vsock_cid, &vm.vsock_socket, &vm.unix_socket) {
            (Some(cid), None, None) => {
                let number = *cid.get_ref();
                if !(FIRST_GUEST_CID..u32::MAX).contains(&number) {
                    let problem = format!("vsock-cid = {number}: guests have CIDs from {FIRST_GUEST_CID} on");
                    return Err(self.source.wrong(cid, problem));
                }
                self.unique("vsock-cid", cid, &number.to_string())?;
                Ok(DialSettings::Vsock { cid: number, port })
            }
            (None, Some(path), None) => {
                Ok(DialSettings::Hybrid { path: self.socket("vsock-socket", path)?, port })
            }
            (None, None, Some(path)) => {
                if let Some(port) = &vm.port {
                    let problem = "port has no meaning with unix-socket; remove it".to_owned();
                    return Err(self.source.wrong(port, problem));
                }
                Ok(DialSettings::Unix { path: self.socket("unix-socket", path)? })
            }
            (None, None, None) => Err(self.source.wrong(
                self.vm,
                "[[vm]] says no way to reach the agent; add vsock-cid or vsock-socket".to_owned(),
            )),
            _ => Err(self.source.wrong(
                self.vm,
                "[[vm]] says more than one way to reach the agent; keep one of vsock-cid, vsock-socket and \
                 unix-socket"
                    .to_owned(),
            )),
        }
    }

    fn required<'v, T>(
        &self,
        key: &str,
        reason: &str,
        value: Option<&'v Spanned<T>>,
    ) -> Result<&'v Spanned<T>, Error> {
        value.ok_or_else(|| self.source.wrong(self.vm, format!("[[vm]] has no {key}; {reason}")))
    }

    /// A socket path that no other setting of any VM uses.
    fn socket(&mut self, key: &str, path: &Spanned<PathBuf>) -> Result<PathBuf, Error> {
        let found = self.source.socket_path(key, path)?;
        self.unique("socket", path, &found.to_string_lossy())?;
        Ok(found)
    }

    fn unique<T>(&mut self, what: &str, at: &Spanned<T>, value: &str) -> Result<(), Error> {
        let error = self.source.wrong(at, String::new());
        let place = format!("{}:{}", error.file.display(), error.line.unwrap_or_default());
        match self.taken.insert(format!("{what} {value}"), place) {
            Some(first) => Err(Error {
                problem: format!("{what} {value:?} is used a second time, first at {first}; change one"),
                ..error
            }),
            None => Ok(()),
        }
    }
}

/// Names as Kubernetes has them (RFC 1123 subdomains), so that every backend can use them.
fn check_name(name: &str) -> Result<(), String> {
    let inside = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    let label = |label: &str| {
        label.bytes().next().is_some_and(inside)
            && label.bytes().last().is_some_and(inside)
            && label.bytes().all(|byte| inside(byte) || byte == b'-')
    };
    if name.len() <= 253 && name.split('.').all(label) {
        return Ok(());
    }
    Err(format!(
        "name {name:?} is no DNS name; use lower-case letters, digits, - and ., beginning and ending with a \
         letter or digit"
    ))
}

/// Accepts a UUID in any case, with its hyphens; returns it in lower case.
fn canonical_uuid(spelled: &str) -> Result<String, String> {
    let lengths = [8, 4, 4, 4, 12];
    let parts: Vec<_> = spelled.split('-').collect();
    let well_formed = parts.len() == lengths.len()
        && parts
            .iter()
            .zip(lengths)
            .all(|(part, length)| part.len() == length && part.bytes().all(|byte| byte.is_ascii_hexdigit()));
    if well_formed {
        return Ok(spelled.to_ascii_lowercase());
    }
    Err(format!(
        "uuid {spelled:?} is no UUID; write it like 6f1c0a52-5c0f-4a8e-9d1b-0d7a2f3b4c5d, as QEMU's -uuid has it"
    ))
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
        let first = format!("[[vm]]\nname = 'web-1'\nuuid = '{}'\nvsock-cid = 3\n", ONE.to_uppercase());
        let second = format!(
            "socket = '/run/x.sock'\n[[vm]]\nname = 'db.dev'\ncluster = 'dev'\nuuid = '{TWO}'\n\
             vsock-socket = '/run/db.vsock'\nport = 1970\nqmp = '/run/db.qmp'\n"
        );
        let settings = check(&[&first, &second]).unwrap();
        assert_eq!(settings.socket, Path::new("/run/x.sock"));
        assert_eq!(
            settings.vms,
            [
                VmSettings {
                    name: "db.dev".into(),
                    uuid: TWO.into(),
                    cluster: "dev".into(),
                    dial: DialSettings::Hybrid { path: "/run/db.vsock".into(), port: 1970 },
                    qmp: Some("/run/db.qmp".into()),
                },
                VmSettings {
                    name: "web-1".into(),
                    uuid: ONE.into(),
                    cluster: String::new(),
                    dial: DialSettings::Vsock { cid: 3, port: 970 },
                    qmp: None,
                },
            ]
        );
    }

    #[test]
    fn nothing_at_all_is_a_host_without_vms() {
        assert_eq!(
            check(&[]).unwrap(),
            HostSettings { socket: PathBuf::from(DEFAULT_SOCKET), vms: Vec::new() }
        );
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
        for (case, texts, expected) in cases {
            let texts: Vec<_> = texts.iter().map(String::as_str).collect();
            let error = check(&texts).expect_err(case);
            assert!(error.starts_with(expected), "{case}: {error}");
        }
    }
}
