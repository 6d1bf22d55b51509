//! Paths to the agent: the channel of QGA, vsock, and the host half that holds this guest.

use std::path::Path;

use super::Patient;
use crate::config::agent::{ApiChannel, QgaChannel};
use crate::policy::{Host, Mode};
use crate::privileges;
use crate::sys::root::Root;
use crate::text::findings::Finding;

/// Name of the port by which QGA clients find it.
const PORT: &str = "org.qemu.guest_agent.0";
/// Device type of a socket device in virtio.
const VSOCK_DEVICE: &str = "0x0013";
/// PCI vendor of virtio, and PCI device of a socket device.
const VIRTIO_VENDOR: &str = "0x1af4";
const VSOCK_ON_PCI: &str = "0x1053";
/// Kernel module with the driver of the socket device.
const VSOCK_MODULE: &str = "vmw_vsock_virtio_transport";
/// Commands without any of which `KubeVirt` calls the agent unsupported.
const KUBEVIRT: [&str; 10] = [
    "guest-ping",
    "guest-get-time",
    "guest-info",
    "guest-shutdown",
    "guest-network-get-interfaces",
    "guest-get-fsinfo",
    "guest-get-host-name",
    "guest-get-users",
    "guest-get-timezone",
    "guest-get-osinfo",
];

/// Returns whether a host half holds this guest. If so, the guest is reachable, whatever else is missing.
fn is_held(patient: &Patient<'_>) -> bool {
    patient.answer.as_ref().is_ok_and(|answer| answer.status.host.is_some())
}

fn missing(patient: &Patient<'_>, subject: &str, says: String, remedy: &str) -> Finding {
    if is_held(patient) {
        Finding::note(subject, says, remedy)
    } else {
        Finding::wrong(subject, says, remedy)
    }
}

/// Checks the channel of QGA clients.
pub fn qga(patient: &Patient<'_>) -> Option<Finding> {
    let subject = "QGA";
    let path = match &patient.settings.ok()?.qga {
        QgaChannel::None => return Some(Finding::note(subject, "it is off (qga.method = \"none\")", "")),
        QgaChannel::VirtioSerial(path) | QgaChannel::IsaSerial(path) => path,
        QgaChannel::UnixListen(path) => {
            return Some(Finding::good(subject, format!("clients come from the socket {}", path.display())));
        }
        QgaChannel::VsockListen { port, .. } => {
            return Some(Finding::good(subject, format!("clients come from vsock port {port}")));
        }
    };
    let shown = path.display();
    let device = patient.root.path(&path.to_string_lossy());
    if !device.exists() {
        let names = port_names(patient.root);
        let (says, remedy) = if names.iter().any(|name| name == PORT) {
            (
                format!("the port {PORT} is there, but {shown} is not"),
                "udev creates it: udevadm trigger --subsystem-match=virtio-ports",
            )
        } else {
            let what = format!("this VM has no channel {PORT} ({shown} is missing); the agent waits for it");
            (
                what,
                "libvirt: <channel type='unix'><target type='virtio' name='org.qemu.guest_agent.0'/></channel>; \
                    KubeVirt, Proxmox: enable the guest agent; or set qga.method",
            )
        };
        return Some(missing(patient, subject, says, remedy));
    }
    let agent = patient.answer.as_ref().ok().and_then(|answer| answer.process);
    let holders = openers(patient.root, &device, agent);
    Some(if holders.is_empty() {
        Finding::good(subject, format!("the channel {shown} is present"))
    } else {
        let says =
            format!("{shown} is in use by {}: the agent gets it when that program ends", holders.join(", "));
        Finding::wrong(subject, says, "stop that program, and disable it")
    })
}

fn port_names(root: &Root) -> Vec<String> {
    let ports = names(root, "/sys/class/virtio-ports");
    ports.iter().map(|port| root.line(&format!("/sys/class/virtio-ports/{port}/name"))).collect()
}

/// Returns the names and processes that have the device open, apart from `agent`. A process that cannot be
/// examined is given by name only.
fn openers(root: &Root, device: &Path, agent: Option<i32>) -> Vec<String> {
    let Ok(device) = device.canonicalize() else { return Vec::new() };
    let processes = std::fs::read_dir(root.path("/proc")).into_iter().flatten().flatten();
    let own = i32::try_from(std::process::id()).unwrap_or(0);
    let mut found = Vec::new();
    for process in processes {
        let Some(number) = process.file_name().to_str().and_then(|name| name.parse::<i32>().ok()) else {
            continue;
        };
        let files = std::fs::read_dir(process.path().join("fd")).into_iter().flatten().flatten();
        let mut opened = files.filter_map(|file| std::fs::read_link(file.path()).ok());
        if number == own || !opened.any(|file| file == device) {
            continue;
        }
        let name = root.line(&format!("/proc/{number}/comm"));
        if !agent.map_or(name == "guestlet", |agent| agent == number) {
            found.push(format!("{name} (process {number})"));
        }
    }
    found
}

/// Checks that the commands are allowed that managers of hypervisors require.
pub fn commands(patient: &Patient<'_>) -> Option<Finding> {
    let settings = patient.settings.ok()?;
    let allowed = |name: &&str| privileges::may_call(settings, name);
    let blocked: Vec<_> = KUBEVIRT.into_iter().filter(|name| !allowed(name)).collect();
    (!blocked.is_empty() && settings.qga != QgaChannel::None).then(|| {
        let says =
            format!("the settings block {}; KubeVirt calls such an agent unsupported", blocked.join(", "));
        Finding::note("QGA commands", says, "under KubeVirt, allow them")
    })
}

/// Checks whether the grants in the settings are effective for every client.
pub fn grants(patient: &Patient<'_>) -> Option<Finding> {
    let settings = patient.settings.ok()?;
    let rules = &settings.rules;
    if rules.mode == Mode::Audit {
        let says = "policy.mode is \"audit\": calls that no grant allows are recorded, but not denied";
        let remedy = "guestlet policy suggest writes the grants; then remove policy.mode";
        return Some(Finding::note("grants", says, remedy));
    }
    let for_keys = |host: &Host| !matches!(host, Host::Qga | Host::Plain);
    let has_grant = rules.grants.iter().any(|grant| for_keys(&grant.host));
    (has_grant && !rules.has_grant_for(&Host::Qga) && privileges::may_call(settings, "guest-exec")).then(
        || {
            let says = "grants limit host halves, but QGA clients may run programs and read files";
            let remedy =
                "add a [[grant]] with host = \"qga\" and roles such as [\"status\", \"freeze\", \"power\"]";
            Finding::note("grants", says, remedy)
        },
    )
}

/// Checks the vsock device, and the ports on it.
pub fn vsock(patient: &Patient<'_>) -> Option<Finding> {
    let subject = "vsock";
    let settings = patient.settings.ok()?;
    if !matches!(settings.control, ApiChannel::Vsock { .. }) {
        return Some(Finding::note(subject, "it is not used (control.listen)", ""));
    }
    match vsock_device(patient.root) {
        Vsock::Works => {}
        Vsock::NoDevice => {
            return Some(Finding::note(
                subject,
                "this VM has no vsock device: guestlet-host cannot reach it; QGA works without",
                "libvirt: <vsock model='virtio'><cid auto='no' address='N'/></vsock>, N unique on the host; KubeVirt: autoattachVSOCK: true",
            ));
        }
        Vsock::NoDriver if has_module(patient.root, VSOCK_MODULE) => {
            let says =
                format!("this VM has a vsock device, but the kernel module {VSOCK_MODULE} is not loaded");
            return Some(Finding::wrong(subject, says, "modprobe vmw_vsock_virtio_transport"));
        }
        Vsock::NoDriver => {
            return Some(Finding::wrong(
                subject,
                format!("this VM has a vsock device, but the kernel has no module {VSOCK_MODULE} for it"),
                "install the rest of the kernel's modules (Ubuntu: linux-modules-extra-$(uname -r); Fedora, RHEL: \
                 kernel-modules), then modprobe vmw_vsock_virtio_transport",
            ));
        }
    }
    let Ok(answer) = &patient.answer else {
        return Some(Finding::good(subject, "the device is there"));
    };
    let control = &answer.status.control_channel;
    if control.starts_with("none") {
        let says = "the agent does not listen on vsock";
        return Some(Finding::wrong(subject, says, "systemctl restart guestlet"));
    }
    let says = format!("the device is present; {control}");
    Some(if !control.starts_with("vsock") || control.contains("held by") {
        Finding::good(subject, says)
    } else {
        let remedy = "systemctl enable guestlet.socket && systemctl restart guestlet, so that no other \
                      program can take the port while the agent restarts";
        Finding::note(subject, says, remedy)
    })
}

/// State of this guest's vsock device.
enum Vsock {
    /// A driver is bound to the device.
    Works,
    /// No driver is bound to the device.
    NoDriver,
    /// The device is missing.
    NoDevice,
}

fn vsock_device(root: &Root) -> Vsock {
    let is = |folder: &str, name: &str, file: &str, wanted: &str| {
        root.line(&format!("{folder}/{name}/{file}")) == wanted
    };
    let virtio = "/sys/bus/virtio/devices";
    if let Some(name) = names(root, virtio).iter().find(|name| is(virtio, name, "device", VSOCK_DEVICE)) {
        let is_driven = root.path(&format!("{virtio}/{name}/driver")).exists();
        return if is_driven { Vsock::Works } else { Vsock::NoDriver };
    }
    // Without virtio's PCI driver, the device is visible on the PCI bus only.
    let pci = "/sys/bus/pci/devices";
    let on_pci =
        |name: &String| is(pci, name, "vendor", VIRTIO_VENDOR) && is(pci, name, "device", VSOCK_ON_PCI);
    if names(root, pci).iter().any(on_pci) { Vsock::NoDriver } else { Vsock::NoDevice }
}

fn names(root: &Root, folder: &str) -> Vec<String> {
    let entries = std::fs::read_dir(root.path(folder)).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().into_string().ok()).collect()
}

/// Returns whether the module is installed for the running kernel. (A built-in module needs no loading.)
fn has_module(root: &Root, module: &str) -> bool {
    let kernel = root.line("/proc/sys/kernel/osrelease");
    let list = root.read(&format!("/lib/modules/{kernel}/modules.dep")).unwrap_or_default();
    let file = format!("/{module}.ko");
    // Format of a line: `kernel/net/vmw_vsock/vmw_vsock_virtio_transport.ko.xz: …`
    String::from_utf8_lossy(&list).lines().any(|line| {
        let path = line.split(':').next().unwrap_or_default();
        path.rsplit_once(&file).is_some_and(|(_, end)| end.is_empty() || end.starts_with('.'))
    })
}

/// Checks whether a host half holds this guest.
pub fn host(patient: &Patient<'_>) -> Option<Finding> {
    let status = &patient.answer.as_ref().ok()?.status;
    let subject = "host";
    Some(match (&status.host, &status.identity) {
        (Some(host), Some(identity)) => {
            let says = format!(
                "guestlet-host on {} holds this guest, and names it {}",
                host.host_name, identity.vm_name
            );
            Finding::good(subject, says)
        }
        (Some(host), None) => {
            let says = format!(
                "guestlet-host on {} holds this guest, but does not report its name for it",
                host.host_name
            );
            Finding::wrong(subject, says, "on the host: guestctl doctor")
        }
        (None, _) => Finding::note(
            subject,
            "no guestlet-host holds this guest",
            "if one should: on the host, run guestctl doctor; its settings must have this VM with its vsock address and UUID",
        ),
    })
}
