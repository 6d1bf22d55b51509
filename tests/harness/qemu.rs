//! QEMU's command line: the one machine that every test guest runs on. A saved VM can be restored only into
//! the machine it was saved from, so a change here changes the key of the snapshots.

use std::path::{Path, PathBuf};

/// What differs between VMs.
#[derive(Debug)]
pub struct Machine {
    /// QEMU's name of it.
    pub name: String,
    /// SMBIOS system UUID.
    pub uuid: String,
    /// Value of `-accel`.
    pub accelerator: &'static str,
    /// How many processors it has at first, at most [`PROCESSORS`].
    pub processors: u32,
    /// MiB of memory.
    pub memory: u32,
    /// Kernel image.
    pub kernel: PathBuf,
    /// Initial RAM disk.
    pub initrd: PathBuf,
    /// Words for the kernel's command line.
    pub words: Vec<String>,
    /// A qcow2 disk with the root file system, and the cloud-init seed.
    pub disk: Option<(PathBuf, PathBuf)>,
    /// The file of a saved VM to restore.
    pub restore: Option<PathBuf>,
    /// The socket of a vhost-user vsock device that is there from the start.
    pub vsock: Option<PathBuf>,
}

/// Part of the key of everything that was made by running the machine.
pub const SOURCE: &str = include_str!("qemu.rs");

/// How many processors a machine may have in the end.
pub const PROCESSORS: u32 = 2;

/// The bus where vsock is plugged.
pub const VSOCK_BUS: &str = "port1";

impl Machine {
    /// The arguments, with sockets and logs made by `file` from their names.
    pub fn arguments(&self, file: impl Fn(&str) -> PathBuf) -> Vec<String> {
        let memory = self.memory;
        let file = |name: &str| quoted(&file(name));
        let mut words = vec!["console=ttyS0".to_owned(), "quiet".to_owned()];
        words.extend(self.words.iter().cloned());
        let mut list = Arguments(vec!["-nodefaults".into(), "-no-user-config".into()]);
        list.add("-display", "none");
        list.add("-name", quoted(Path::new(&self.name)));
        list.add("-uuid", &self.uuid);
        list.add("-machine", "q35,memory-backend=memory");
        list.add("-accel", self.accelerator);
        list.add("-cpu", "max");
        list.add("-smp", format!("{},maxcpus={PROCESSORS}", self.processors));
        list.add("-m", memory.to_string());
        // Shared, because the vsock device is another process.
        list.add("-object", format!("memory-backend-memfd,id=memory,size={memory}M,share=on"));
        list.add("-kernel", self.kernel.display().to_string());
        list.add("-initrd", self.initrd.display().to_string());
        list.add("-append", words.join(" "));
        for monitor in ["qmp.sock", "qmp-host.sock", "qmp-gate.sock"] {
            list.add("-qmp", format!("unix:{},server=on,wait=off", file(monitor)));
        }
        let log = file("console.log");
        list.socket("console", &file("console.sock"), &format!(",logfile={log}"));
        list.add("-serial", "chardev:console");
        list.add("-serial", format!("file:{}", file("agent.log")));
        list.add("-device", "virtio-rng-pci,bus=pcie.0,addr=2");
        list.add("-device", "virtio-serial-pci,id=serial0,bus=pcie.0,addr=3");
        list.socket("qga", &file("qga.sock"), "");
        list.add("-device", "virtserialport,bus=serial0.0,nr=1,chardev=qga,name=org.qemu.guest_agent.0");
        list.add("-device", "virtio-scsi-pci,id=scsi0,bus=pcie.0,addr=4");
        // A network card on a hub that leads nowhere.
        list.add("-netdev", "hubport,id=net0,hubid=0");
        list.add("-device", "virtio-net-pci,netdev=net0,mac=52:54:00:12:34:56,romfile=,bus=pcie.0,addr=5");
        list.add("-device", format!("pcie-root-port,id={VSOCK_BUS},chassis=1,slot=1,bus=pcie.0,addr=8"));
        list.add("-device", "pcie-root-port,id=port2,chassis=2,slot=2,bus=pcie.0,addr=9");
        if let Some((disk, seed)) = &self.disk {
            // The host may lose the disk when it crashes, and the guest's flushes cost nothing.
            let (disk, seed) = (quoted(disk), quoted(seed));
            list.add("-drive", format!("if=none,id=root,format=qcow2,cache=unsafe,file={disk}"));
            list.add("-device", "virtio-blk-pci,drive=root,bus=pcie.0,addr=6");
            list.add("-drive", format!("if=none,id=seed,format=raw,readonly=on,file={seed}"));
            list.add("-device", "virtio-blk-pci,drive=seed,bus=pcie.0,addr=7");
        }
        if let Some(socket) = &self.vsock {
            list.add("-chardev", format!("socket,id=vsock,path={}", quoted(socket)));
            list.add("-device", format!("vhost-user-vsock-pci,id=vsock0,chardev=vsock,bus={VSOCK_BUS}"));
        }
        if let Some(saved) = &self.restore {
            list.add("-incoming", format!("exec:cat {}", shell_quoted(saved)));
        }
        list.0
    }
}

struct Arguments(Vec<String>);

impl Arguments {
    fn add(&mut self, option: &str, value: impl Into<String>) {
        self.0.extend([option.to_owned(), value.into()]);
    }

    fn socket(&mut self, id: &str, path: &str, more: &str) {
        self.add("-chardev", format!("socket,id={id},path={path},server=on,wait=off{more}"));
    }
}

/// A path within an option list, where a comma is written twice.
fn quoted(path: &Path) -> String {
    path.display().to_string().replace(',', ",,")
}

/// A path within a command line of the shell.
pub fn shell_quoted(path: &Path) -> String {
    format!("'{}'", path.display().to_string().replace('\'', r"'\''"))
}
