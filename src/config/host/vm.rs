//! A `[[vm]]` table: one VM of this machine.

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;

use serde::Deserialize;
use toml::Spanned;

use super::super::Error;
use super::Source;

/// The vsock port of an agent.
pub const DEFAULT_PORT: u32 = 970;
/// CIDs below are the hypervisor's, the loopback's and the host's own.
const FIRST_GUEST_CID: u32 = 3;
/// The greatest vsock port; the number after it means "any".
const MAX_PORT: u32 = u32::MAX - 1;
/// Volumes that may be plugged into a VM unless the settings say otherwise: a virtio-scsi controller has room for 256
/// disks, and some of them may be the VM's own.
const USUAL_VOLUMES: u32 = 240;
/// The most that they may say.
const MOST_VOLUMES: u32 = 4096;
/// Bytes of an identifier of a character device.
const LONGEST_LABEL: usize = 128;
/// `dmi-uuid` of a VM without DMI.
const NO_DMI: &str = "none";

/// One VM, checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VmSettings {
    /// Unique on this host: letters a–z, digits, `-` and `.`, at most 253 bytes.
    pub name: String,
    /// Unique on this host, in lower case with hyphens.
    pub uuid: String,
    /// What its guest reads from DMI, likewise; empty for a VM without DMI.
    pub dmi_uuid: String,
    /// Name of the cluster that the VM belongs to; may be empty.
    pub cluster: String,
    /// How its agent is reached.
    pub dial: DialSettings,
    /// The VM's QMP socket, if the host half may ask the hypervisor.
    pub qmp: Option<PathBuf>,
    /// Which of the hypervisor's character devices is its console; without it that of the first serial port.
    pub console: Option<ConsoleSettings>,
    /// How many volumes may be plugged into it.
    pub max_volumes: u32,
    /// The networks of this host that it is attached to, by the hardware addresses of its interfaces in lower case.
    pub networks: BTreeMap<String, String>,
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

/// Which console a VM has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ConsoleSettings {
    /// The character device with this identifier.
    Label(String),
    /// This unix socket, which has to be the hypervisor's.
    Socket(PathBuf),
}

/// A `[[vm]]` table.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct VmFragment {
    name: Option<Spanned<String>>,
    uuid: Option<Spanned<String>>,
    dmi_uuid: Option<Spanned<String>>,
    cluster: Option<Spanned<String>>,
    vsock_cid: Option<Spanned<u32>>,
    vsock_socket: Option<Spanned<PathBuf>>,
    unix_socket: Option<Spanned<PathBuf>>,
    qmp: Option<Spanned<PathBuf>>,
    console: Option<Spanned<String>>,
    max_volumes: Option<Spanned<u32>>,
    networks: Option<Spanned<BTreeMap<String, String>>>,
    port: Option<Spanned<u32>>,
    /// Of earlier versions.
    callback_port: Option<Spanned<u32>>,
    callback_socket: Option<Spanned<PathBuf>>,
}

/// What to say of VMs with keys of earlier versions: the first place is enough to find the others.
pub(super) fn remark(source: &Source, vms: &[Spanned<VmFragment>]) -> Option<String> {
    let of = |vm: &VmFragment| {
        let port = vm.callback_port.as_ref().map(|port| ("callback-port", port.span().start));
        port.or_else(|| vm.callback_socket.as_ref().map(|path| ("callback-socket", path.span().start)))
    };
    let (key, at) = vms.iter().find_map(|vm| of(vm.get_ref()))?;
    let why = "no longer has any effect, here and in other tables: requests of a guest come over its only \
               connection; remove it";
    Some(Error::at(&source.file, &source.text, at, format!("{key} {why}")).to_string())
}

/// What no two VMs may share, and where it was first seen: at that byte of that fragment.
pub(super) type Taken<'a> = HashMap<String, (&'a Source, usize)>;

pub(super) struct Checker<'a, 't> {
    pub source: &'a Source,
    pub vm: &'a Spanned<VmFragment>,
    pub taken: &'t mut Taken<'a>,
}

impl Checker<'_, '_> {
    pub fn vm(mut self) -> Result<VmSettings, Error> {
        let vm = self.vm.get_ref();
        let name = self.required("name", "give it a name", vm.name.as_ref())?;
        check_name(name.get_ref()).map_err(|problem| self.source.wrong(name, problem))?;
        self.unique("name", name, name.get_ref())?;
        let spelled = self.required("uuid", "the guest's DMI UUID is compared with it", vm.uuid.as_ref())?;
        let uuid =
            canonical_uuid(spelled.get_ref()).map_err(|problem| self.source.wrong(spelled, problem))?;
        self.unique("uuid", spelled, &uuid)?;
        let dmi_uuid = match &vm.dmi_uuid {
            None => uuid.clone(),
            Some(spelled) if spelled.get_ref() == NO_DMI => String::new(),
            Some(spelled) => canonical_uuid(spelled.get_ref())
                .map_err(|problem| self.source.wrong(spelled, format!("dmi-{problem}; or \"{NO_DMI}\"")))?,
        };
        let dial = self.dial()?;
        let qmp = vm.qmp.as_ref().map(|path| self.socket("qmp", path)).transpose()?;
        let console = vm.console.as_ref().map(|console| self.console(console)).transpose()?;
        if let Some(cluster) = &vm.cluster
            && (cluster.get_ref().len() > 253 || cluster.get_ref().chars().any(char::is_control))
        {
            let problem = "cluster is longer than 253 bytes or has control characters".to_owned();
            return Err(self.source.wrong(cluster, problem));
        }
        let cluster = vm.cluster.as_ref().map(|cluster| cluster.get_ref().clone()).unwrap_or_default();
        let max_volumes = match &vm.max_volumes {
            Some(count) if *count.get_ref() > MOST_VOLUMES => {
                let problem = format!("max-volumes = {}: use 0 to {MOST_VOLUMES}", count.get_ref());
                return Err(self.source.wrong(count, problem));
            }
            Some(count) => *count.get_ref(),
            None => USUAL_VOLUMES,
        };
        let networks = self.networks()?;
        let name = name.get_ref().clone();
        Ok(VmSettings { name, uuid, dmi_uuid, cluster, dial, qmp, console, max_volumes, networks })
    }

    fn console(&mut self, spelled: &Spanned<String>) -> Result<ConsoleSettings, Error> {
        let text = spelled.get_ref();
        if self.vm.get_ref().qmp.is_none() {
            let problem = "console has no effect without qmp, through which the hypervisor is asked; set qmp"
                .to_owned();
            return Err(self.source.wrong(spelled, problem));
        }
        if text.starts_with('/') {
            let path =
                self.source.socket_path("console", &Spanned::new(spelled.span(), PathBuf::from(text)))?;
            self.unique("socket", spelled, &path.to_string_lossy())?;
            return Ok(ConsoleSettings::Socket(path));
        }
        if text.is_empty() || text.len() > LONGEST_LABEL || !text.bytes().all(|byte| byte.is_ascii_graphic())
        {
            let problem = format!(
                "console = {text:?}: write the identifier of a character device, as in -chardev socket,id=console0, or the absolute \
                 path of its socket"
            );
            return Err(self.source.wrong(spelled, problem));
        }
        Ok(ConsoleSettings::Label(text.clone()))
    }

    /// The networks, by hardware addresses that no other VM has.
    fn networks(&mut self) -> Result<BTreeMap<String, String>, Error> {
        let mut networks = BTreeMap::new();
        let Some(found) = &self.vm.get_ref().networks else { return Ok(networks) };
        for (spelled, network) in found.get_ref() {
            let address = hardware_address(spelled).ok_or_else(|| {
                let problem = format!(
                    "networks has {spelled:?}, which is not a hardware address; write it like 52:54:00:12:34:56"
                );
                self.source.wrong(found, problem)
            })?;
            check_name(network)
                .map_err(|problem| self.source.wrong(found, format!("networks: {spelled}: {problem}")))?;
            self.unique("hardware address", found, &address)?;
            networks.insert(address, network.clone());
        }
        Ok(networks)
    }

    fn dial(&mut self) -> Result<DialSettings, Error> {
        let vm = self.vm.get_ref();
        match (&vm.vsock_cid, &vm.vsock_socket, &vm.unix_socket) {
            (Some(cid), None, None) => {
                let number = *cid.get_ref();
                if !(FIRST_GUEST_CID..u32::MAX).contains(&number) {
                    let problem = format!(
                        "vsock-cid = {number}: the CIDs of guests begin at {FIRST_GUEST_CID}"
                    );
                    return Err(self.source.wrong(cid, problem));
                }
                self.unique("vsock-cid", cid, &number.to_string())?;
                Ok(DialSettings::Vsock { cid: number, port: self.port()? })
            }
            (None, Some(path), None) => {
                let path = self.socket("vsock-socket", path)?;
                Ok(DialSettings::Hybrid { path, port: self.port()? })
            }
            (None, None, Some(path)) => {
                if let Some(port) = &vm.port {
                    let problem = "port has no effect with unix-socket; remove it".to_owned();
                    return Err(self.source.wrong(port, problem));
                }
                Ok(DialSettings::Unix { path: self.socket("unix-socket", path)? })
            }
            (None, None, None) => Err(self.source.wrong(
                self.vm,
                "[[vm]] has no way to reach the agent; add vsock-cid or vsock-socket".to_owned(),
            )),
            _ => Err(self.source.wrong(
                self.vm,
                "[[vm]] has more than one way to reach the agent; keep one of vsock-cid, vsock-socket and unix-socket"
                    .to_owned(),
            )),
        }
    }

    /// The agent's vsock port.
    fn port(&self) -> Result<u32, Error> {
        match &self.vm.get_ref().port {
            Some(port) if !(1..=MAX_PORT).contains(port.get_ref()) => {
                let problem = format!("port = {}: use 1 to {MAX_PORT}", port.get_ref());
                Err(self.source.wrong(port, problem))
            }
            Some(port) => Ok(*port.get_ref()),
            None => Ok(DEFAULT_PORT),
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
        self.source.unique(self.taken, what, at, value)
    }
}

/// Names as Kubernetes has them (RFC 1123 subdomains), so that every backend can use them.
pub(super) fn check_name(name: &str) -> Result<(), String> {
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
        "name {name:?} is not a DNS name; use lower-case letters, digits, - and ., beginning and ending with a \
         letter or digit"
    ))
}

/// Accepts a hardware address of six bytes in any case; returns it in lower case.
fn hardware_address(spelled: &str) -> Option<String> {
    let parts: Vec<_> = spelled.split(':').collect();
    let well_formed = parts.len() == 6
        && parts.iter().all(|part| part.len() == 2 && part.bytes().all(|byte| byte.is_ascii_hexdigit()));
    well_formed.then(|| spelled.to_ascii_lowercase())
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
        "uuid {spelled:?} is not a UUID; write it like 6f1c0a52-5c0f-4a8e-9d1b-0d7a2f3b4c5d, as QEMU's -uuid has it"
    ))
}
