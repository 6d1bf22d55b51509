//! A `[[vm]]` table: one VM of this machine.

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;

use serde::Deserialize;
use toml::Spanned;

use super::super::Error;
use super::Source;
use crate::labels::{self, Labels};

/// Default vsock port of an agent.
pub const DEFAULT_PORT: u32 = 970;
/// Lowest CID of a guest: lower ones are those of the hypervisor, the loopback and the host.
const FIRST_GUEST_CID: u32 = 3;
/// Greatest vsock port; the next number means "any".
const MAX_PORT: u32 = u32::MAX - 1;
/// Default limit on the volumes that are attached to a VM: a virtio-scsi controller has room for 256 disks, and
/// some of them may be the VM's own.
const USUAL_VOLUMES: u32 = 240;
/// Maximum of that limit.
const MOST_VOLUMES: u32 = 4096;
/// Maximum length of the identifier of a character device, in bytes.
const LONGEST_LABEL: usize = 128;
/// Value of `dmi-uuid` for a VM without DMI.
const NO_DMI: &str = "none";

/// Settings of one VM, checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VmSettings {
    /// Name, unique on this host: letters a–z, digits, `-` and `.`, at most 253 bytes.
    pub name: String,
    /// UUID, unique on this host, in lower case with hyphens.
    pub uuid: String,
    /// UUID that the guest reads from DMI, also unique and in lower case; empty for a VM without DMI.
    pub dmi_uuid: String,
    /// Name of the cluster that the VM belongs to; may be empty.
    pub cluster: String,
    /// Address of the VM's agent.
    pub dial: DialSettings,
    /// QMP socket of the VM, if the host half may query the hypervisor.
    pub qmp: Option<PathBuf>,
    /// Character device of the hypervisor that is the console; if not set, that of the first serial port.
    pub console: Option<ConsoleSettings>,
    /// Maximum number of volumes that are attached to the VM.
    pub max_volumes: u32,
    /// Networks of this host that the VM is attached to, by the hardware addresses of its interfaces in lower case.
    pub networks: BTreeMap<String, String>,
    /// Labels, by which people select VMs.
    pub labels: Labels,
}

/// Transport and address of an agent.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum DialSettings {
    /// The `AF_VSOCK` sockets of the kernel.
    Vsock {
        /// Context identifier of the guest, 3 or more.
        cid: u32,
        /// Port of the agent.
        port: u32,
    },
    /// Hybrid vsock: a unix socket that accepts `CONNECT <port>`.
    Hybrid {
        /// Path of the unix socket.
        path: PathBuf,
        /// Port of the agent.
        port: u32,
    },
    /// A unix socket that is connected directly to an agent.
    Unix {
        /// Path of the unix socket.
        path: PathBuf,
    },
}

/// Character device that is a VM's console.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ConsoleSettings {
    /// The character device with this identifier.
    Label(String),
    /// The unix socket with this path, which has to be the hypervisor's.
    Socket(PathBuf),
}

/// Table `[[vm]]`, unchecked.
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
    #[serde(default)]
    labels: BTreeMap<Spanned<String>, Spanned<String>>,
    port: Option<Spanned<u32>>,
    /// Accepted for files of earlier versions; no effect, as is the key below.
    callback_port: Option<Spanned<u32>>,
    callback_socket: Option<Spanned<PathBuf>>,
}

/// Returns the remark for VMs with keys of earlier versions. It names the first place only, which is enough to
/// find the others.
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

/// Values that no two VMs may share, with the place of their first use: a byte offset in a fragment.
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
        let labels = self.labels(&name)?;
        Ok(VmSettings { name, uuid, dmi_uuid, cluster, dial, qmp, console, max_volumes, networks, labels })
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

    /// Checks the networks, whose hardware addresses no other VM may have.
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

    /// Checks the labels of the VM with this name.
    fn labels(&self, vm: &str) -> Result<Labels, Error> {
        let mut labels = Labels::new();
        for (key, value) in &self.vm.get_ref().labels {
            let (name, text) = (key.get_ref(), value.get_ref());
            labels::check_key(name)
                .map_err(|why| self.source.wrong(key, format!("labels of the VM {vm:?}: {name:?}: {why}")))?;
            labels::check_any_value(text).map_err(|why| {
                self.source.wrong(value, format!("labels of the VM {vm:?}: {name:?} = {text:?}: {why}"))
            })?;
            labels.insert(name.clone(), text.clone());
            if labels.len() > labels::MOST_OF_A_VM {
                let problem = format!(
                    "labels of the VM {vm:?}: {name:?} is one too many; remove all but {}",
                    labels::MOST_OF_A_VM
                );
                return Err(self.source.wrong(key, problem));
            }
        }
        Ok(labels)
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

    /// Checks the agent's vsock port.
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

    /// Checks a socket path, which no other setting of any VM may use.
    fn socket(&mut self, key: &str, path: &Spanned<PathBuf>) -> Result<PathBuf, Error> {
        let found = self.source.socket_path(key, path)?;
        self.unique("socket", path, &found.to_string_lossy())?;
        Ok(found)
    }

    fn unique<T>(&mut self, what: &str, at: &Spanned<T>, value: &str) -> Result<(), Error> {
        self.source.unique(self.taken, what, at, value)
    }
}

/// Checks that a name is an RFC 1123 subdomain, as in Kubernetes, so that every backend can use it.
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
