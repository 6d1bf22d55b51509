//! Disks for an agent: loop devices that a made-up tree of sysfs shows as disks of the machine. The kernel's own words
//! about the loop devices have the agent look there.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::lab::run;

const BUS: &str = "devices/pci0000:00/0000:00:06.0/virtio4";

/// The tree, in the place of /sys; what was there is still at `real`.
pub struct Machine {
    folder: tempfile::TempDir,
    real: PathBuf,
    tree: PathBuf,
}

impl Machine {
    pub fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let real = folder.path().join("sys");
        std::fs::create_dir(&real).unwrap();
        run(&format!("mount --rbind /sys {0}", real.display()));
        Self { folder, real, tree: "/sys".into() }.filled()
    }

    /// A second machine. Its tree is elsewhere: an agent of this machine is to have it in the place of /sys.
    pub fn beside(&self) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let tree = folder.path().join("tree");
        std::fs::create_dir(&tree).unwrap();
        Self { folder, real: self.real.clone(), tree }.filled()
    }

    fn filled(self) -> Self {
        run(&format!("mount -t tmpfs sys {}", self.tree.display()));
        for folder in ["block", "dev/block", "devices/virtual/block", "class/scsi_host/host0", "fs"] {
            std::fs::create_dir_all(self.tree.join(folder)).unwrap();
        }
        std::fs::write(self.tree.join("class/scsi_host/host0/scan"), "").unwrap();
        // What the agent has to see of the machine itself.
        run(&format!("mount --bind {}/fs {}/fs", self.real(), self.tree.display()));
        self
    }

    /// Where the tree is.
    pub fn tree(&self) -> &Path {
        &self.tree
    }

    /// A blank disk that is not plugged.
    pub fn disk(&self, serial: &str, mebibytes: u64) -> Disk {
        let file = self.folder.path().join(format!("{serial}.disk"));
        std::fs::File::create(&file).unwrap().set_len(mebibytes << 20).unwrap();
        let device = run(&format!("losetup --find --show {}", file.display()));
        self.show(&device, file, serial)
    }

    /// The disk that holds what is in `file`, as the loop device of this number, which is nobody else's; none if that is
    /// still used.
    pub fn attach(&self, loop_number: u32, file: &Path, serial: &str) -> Option<Disk> {
        let device = format!("/dev/loop{loop_number}");
        let attached = Command::new("losetup").arg(&device).arg(file).stderr(Stdio::null()).status().unwrap();
        attached.success().then(|| self.show(&device, file.to_owned(), serial))
    }

    /// What a loop device has its bytes from, if it is used.
    pub fn backing(&self, loop_number: u32) -> Option<PathBuf> {
        let file = format!("{}/block/loop{loop_number}/loop/backing_file", self.real());
        std::fs::read_to_string(file).ok().map(|path| path.trim_end().into())
    }

    /// Whether any loop device has its bytes from a disk that was made here.
    pub fn is_used(&self) -> bool {
        let devices = std::fs::read_dir(format!("{}/block", self.real())).unwrap();
        let file =
            |entry: std::io::Result<std::fs::DirEntry>| entry.unwrap().path().join("loop/backing_file");
        let mut backing = devices.filter_map(|entry| std::fs::read_to_string(file(entry)).ok());
        backing.any(|path| Path::new(&path).starts_with(self.folder.path()))
    }

    /// Frees the loop devices that have their bytes from files below a folder.
    pub fn let_go(&self, below: &Path) {
        for entry in std::fs::read_dir(format!("{}/block", self.real())).unwrap() {
            let entry = entry.unwrap();
            let backing = std::fs::read_to_string(entry.path().join("loop/backing_file")).unwrap_or_default();
            if Path::new(&backing).starts_with(below) {
                run(&format!("losetup --detach /dev/{}", entry.file_name().display()));
            }
        }
    }

    fn show(&self, device: &str, file: PathBuf, serial: &str) -> Disk {
        let name = device.rsplit('/').next().unwrap().to_owned();
        let number = run(&format!("cat {}/block/{name}/dev", self.real()));
        let mut disk =
            Disk { file, name, number, serial: serial.to_owned(), real: self.real(), tree: PathBuf::new() };
        self.take(&mut disk);
        disk
    }

    /// Has a disk that is not plugged be one of this machine.
    pub fn take(&self, disk: &mut Disk) {
        let name = &disk.name;
        // A link by which a word about the loop device leads to the disk.
        let slaves = self.tree.join(format!("devices/virtual/block/{name}/slaves"));
        std::fs::create_dir_all(&slaves).unwrap();
        let link = slaves.join(name);
        let _ = std::fs::remove_file(&link);
        symlink(format!("../../../../../{BUS}/{name}/block/{name}"), link).unwrap();
        disk.tree.clone_from(&self.tree);
    }

    /// A disk that is plugged.
    pub fn plugged(&self, serial: &str, mebibytes: u64) -> Disk {
        let disk = self.disk(serial, mebibytes);
        disk.plug();
        disk
    }

    /// Takes a disk away, and plugs what is on it again as another device of the kernel's.
    pub fn under_another_number(&self, before: Disk) -> Disk {
        before.unplug();
        let mut after = self.disk(&format!("{}-again", before.serial), 1);
        std::fs::copy(&before.file, &after.file).unwrap();
        run(&format!("losetup --set-capacity {}", after.device()));
        after.serial.clone_from(&before.serial);
        after.plug();
        drop(before);
        after
    }

    /// Where the machine's own /sys is.
    pub fn real(&self) -> String {
        self.real.display().to_string()
    }
}

pub struct Disk {
    pub file: PathBuf,
    pub name: String,
    number: String,
    pub serial: String,
    real: String,
    tree: PathBuf,
}

impl Disk {
    fn place(&self) -> PathBuf {
        self.tree.join(format!("{BUS}/{0}/block/{0}", self.name))
    }

    pub fn device(&self) -> String {
        format!("/dev/{}", self.name)
    }

    pub fn plug(&self) {
        let place = self.place();
        std::fs::create_dir_all(&place).unwrap();
        std::fs::write(place.join("dev"), &self.number).unwrap();
        std::fs::write(place.join("serial"), &self.serial).unwrap();
        if let Ok(count) = std::fs::read(format!("{}/block/{}/diskseq", self.real, self.name)) {
            std::fs::write(place.join("diskseq"), count).unwrap();
        }
        self.show_size();
        let link = format!("../{BUS}/{0}/block/{0}", self.name);
        symlink(&link, self.tree.join("block").join(&self.name)).unwrap();
        symlink(format!("../{link}"), self.tree.join("dev/block").join(&self.number)).unwrap();
        self.say();
    }

    /// Another disk, with the same name, of which the kernel has not said anything yet.
    pub fn change_to(&self, file: &Path, serial: &str) {
        // Others that look for a free one may have it open for a moment, and it stays for as long.
        let again = "for i in $(seq 200); do losetup $0 $1 2> /dev/null && exit; sleep 0.02; done; exit 1";
        run(&format!("losetup --detach {0}; sh -c '{again}' {0} {1}", self.device(), file.display()));
        std::fs::write(self.place().join("serial"), serial).unwrap();
    }

    pub fn unplug(&self) {
        std::fs::remove_file(self.tree.join("block").join(&self.name)).unwrap();
        std::fs::remove_file(self.tree.join("dev/block").join(&self.number)).unwrap();
        // Kept elsewhere, so that no inode comes back, as none does in sysfs.
        let grave = tempfile::Builder::new().disable_cleanup(true).tempdir_in(&self.tree).unwrap();
        std::fs::rename(self.place(), grave.path()).unwrap();
        self.say();
    }

    /// Has the kernel say something about it.
    fn say(&self) {
        std::fs::write(format!("{}/devices/virtual/block/{}/uevent", self.real, self.name), "change")
            .unwrap();
    }

    fn show_size(&self) {
        let sectors = std::fs::metadata(&self.file).unwrap().len() / 512;
        std::fs::write(self.place().join("size"), sectors.to_string()).unwrap();
    }

    /// Larger.
    pub fn resize(&self, mebibytes: u64) {
        std::fs::File::options().write(true).open(&self.file).unwrap().set_len(mebibytes << 20).unwrap();
        run(&format!("losetup --set-capacity {}", self.device()));
        self.show_size();
        self.say();
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        if self.place().exists() {
            self.unplug();
        }
        // What is still mounted goes with the namespace, and the device then.
        let _ = Command::new("losetup").arg("--detach").arg(self.device()).status();
    }
}
