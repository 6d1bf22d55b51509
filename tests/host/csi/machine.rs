//! A real QEMU, with a virtio-scsi controller and no guest in it: what it does with images is its own. The test asks it
//! through a QMP socket of its own, and the kernel which files it has open.

use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};

use crate::lab::DEADLINE;

/// A running QEMU, which ends when this is dropped.
pub struct Machine {
    process: Child,
    checker: PathBuf,
    sockets: [PathBuf; 2],
}

/// A file that a QEMU has open.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Open {
    /// As the kernel names it.
    pub path: PathBuf,
    /// It has no name any more.
    pub is_unlinked: bool,
    /// It may be written.
    pub is_writable: bool,
}

impl Machine {
    /// Starts one whose QMP socket for guestlet-host is at `qmp`. It stays when its guest shuts down.
    pub fn start(qmp: &Path) -> Self {
        Self::start_with(qmp, &["-no-reboot"])
    }

    /// Starts one with a guest, of a few bytes, that writes to the disk behind the one it boots from, as long as it runs.
    pub fn start_writing(qmp: &Path) -> Self {
        // Sets ds to 0; and again and again: writes 64 sectors from 0x10000 on to the sector that the packet at 0x7c1c says,
        // by function 43h of interrupt 13h for the drive 81h, and goes on to the sector behind them.
        const PROGRAM: [u8; 44] = [
            0x31, 0xc0, 0x8e, 0xd8, 0xbe, 0x1c, 0x7c, 0xb8, 0x00, 0x43, 0xb2, 0x81, 0xcd, 0x13, 0x83, 0x06,
            0x24, 0x7c, 0x40, 0x83, 0x16, 0x26, 0x7c, 0x00, 0xeb, 0xea, 0x90, 0x90, 0x10, 0x00, 0x40, 0x00,
            0x00, 0x00, 0x00, 0x10, 0, 0, 0, 0, 0, 0, 0, 0,
        ];
        let mut sector = [0; 512];
        sector[..PROGRAM.len()].copy_from_slice(&PROGRAM);
        sector[510..].copy_from_slice(&[0x55, 0xaa]);
        let disk = qmp.with_extension("boot");
        std::fs::write(&disk, [sector.to_vec(), vec![0; 1 << 20]].concat()).unwrap();
        let drive = format!("if=none,id=boot,format=raw,file={}", disk.display());
        Self::start_with(qmp, &["-drive", &drive, "-device", "virtio-blk-pci,drive=boot,bootindex=0"])
    }

    /// One with these arguments besides.
    pub fn start_with(qmp: &Path, more: &[&str]) -> Self {
        let checker = qmp.with_extension("checker");
        let socket = |path: &Path| format!("unix:{},server=on,wait=off", path.display());
        let process = Command::new("qemu-system-x86_64")
            .args(["-nodefaults", "-no-user-config", "-display", "none", "-machine", "q35", "-accel", "tcg"])
            .args(["-m", "16", "-no-shutdown", "-device", "virtio-scsi-pci,id=scsi0"])
            .args(["-qmp", &socket(qmp), "-qmp", &socket(&checker)])
            .args(more)
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        let machine = Self { process, checker: checker.clone(), sockets: [qmp.to_owned(), checker] };
        let end = Instant::now() + DEADLINE;
        while UnixStream::connect(&machine.checker).is_err() {
            assert!(Instant::now() < end, "QEMU does not listen");
            std::thread::sleep(Duration::from_millis(20));
        }
        machine
    }

    /// Runs a command on the test's socket.
    pub fn ask(&self, command: &str) -> Value {
        let mut stream = UnixStream::connect(&self.checker).unwrap();
        let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
        for (id, command) in ["qmp_capabilities", command].into_iter().enumerate() {
            let line = json!({ "execute": command, "id": id });
            stream.write_all(format!("{line}\n").as_bytes()).unwrap();
        }
        loop {
            let message: Value = serde_json::from_str(&lines.next().unwrap().unwrap()).unwrap();
            if message["id"] == 1 {
                assert!(message["error"].is_null(), "{command}: {message}");
                return message["return"].clone();
            }
        }
    }

    /// It does nothing any more, or goes on.
    pub fn hang(&self, hangs: bool) {
        let process = Pid::from_raw(i32::try_from(self.process.id()).unwrap());
        kill(process, if hangs { Signal::SIGSTOP } else { Signal::SIGCONT }).unwrap();
    }

    /// Its guest shuts down, and QEMU stays.
    pub fn shut_down(&self) {
        // One that stands still does not shut down.
        self.ask("cont");
        self.ask("system_reset");
        let end = Instant::now() + DEADLINE;
        while self.ask("query-status")["status"] != "shutdown" {
            assert!(Instant::now() < end, "it does not shut down");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Whether QMP says that a block node has this file.
    pub fn has_node_of(&self, image: &Path) -> bool {
        let nodes = self.ask("query-named-block-nodes");
        nodes.as_array().unwrap().iter().any(|node| node["file"] == image.to_str().unwrap())
    }

    /// The files below `folder` that it has open.
    pub fn open_below(&self, folder: &Path) -> Vec<Open> {
        const DELETED: &str = " (deleted)";
        const ACCESS: u32 = 0o3;
        let process = PathBuf::from(format!("/proc/{}", self.process.id()));
        let mut found = Vec::new();
        for entry in std::fs::read_dir(process.join("fd")).unwrap() {
            let entry = entry.unwrap();
            let Ok(target) = std::fs::read_link(entry.path()) else { continue };
            if !target.starts_with(folder) {
                continue;
            }
            let told = std::fs::read_to_string(process.join("fdinfo").join(entry.file_name())).unwrap();
            let flags = told.lines().find_map(|line| line.strip_prefix("flags:")).unwrap().trim();
            let is_writable = u32::from_str_radix(flags, 8).unwrap() & ACCESS != 0;
            let name = target.to_str().unwrap();
            let path = PathBuf::from(name.strip_suffix(DELETED).unwrap_or(name));
            found.push(Open { path, is_unlinked: name.ends_with(DELETED), is_writable });
        }
        found
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        drop(self.process.kill());
        drop(self.process.wait());
        for socket in &self.sockets {
            drop(std::fs::remove_file(socket));
        }
    }
}
