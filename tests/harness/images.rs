//! Builds what VMs boot from: the kernel, the first user land, the agent's archive and the real guest's disk.
//! To change what is in them, change the scripts in tests/setup; the cache notices.

use std::fs::File;
use std::io::Write as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};

use super::archive::{Archive, libraries};
use super::cache::{Input, entry, key};
use super::tools::{accelerator, run_script, script};

/// Settings of the agent in every test guest: the tests' side of vsock is a unix socket, behind which no
/// port is privileged.
pub const AGENT_SETTINGS: &str = "[vsock]\nhybrid = true\n";

/// What every VM needs.
#[derive(Debug, Clone)]
pub struct Images {
    /// The folder of the kernel and its modules.
    kernel: PathBuf,
    initrd: PathBuf,
    /// The value of QEMU's `-accel`.
    pub accelerator: &'static str,
}

impl Images {
    /// Finds or builds the kernel and the first user land.
    pub fn prepare() -> anyhow::Result<Self> {
        let package = run_script("kernel.sh", &["newest"])?;
        let package = package.trim();
        let how = script("kernel.sh");
        let kernel = entry("kernel", &[Input::Words(package), Input::File(&how)], |folder| {
            run_script("kernel.sh", &["unpack", package, text(folder)?]).map(drop)
        })?;
        let (how, init) = (script("initrd.sh"), script("guest-init"));
        let inputs = [Input::Words(key(&kernel)), Input::File(&how), Input::File(&init)];
        let initrd = entry("initrd", &inputs, |folder| {
            run_script("initrd.sh", &[text(&kernel)?, text(&folder.join("initrd"))?]).map(drop)
        })?;
        let initrd = initrd.join("initrd");
        let accelerator = accelerator(&kernel.join("vmlinuz"), &initrd)?;
        Ok(Self { kernel, initrd, accelerator })
    }

    /// Disks with databases: one with their programs, which guests only read, and one with their data, to be copied.
    pub fn databases() -> anyhow::Result<(PathBuf, PathBuf)> {
        let from = |variable: &str| {
            std::env::var(variable).with_context(|| format!("{variable} is not set; make vm-test sets it"))
        };
        let (postgresql, mariadb) = (from("POSTGRESQL")?, from("MARIADB")?);
        let etcd = Path::new(&from("KUBERNETES_BIN_DIR")?).join("etcd");
        let servers = [
            Path::new(&postgresql).join("usr/lib/postgresql/15/bin/postgres"),
            Path::new(&mariadb).join("usr/sbin/mariadbd"),
            etcd.clone(),
            script("databases.sh"),
            script("databases-guest.py"),
        ];
        let inputs: Vec<_> = servers.iter().map(|file| Input::File(file)).collect();
        let made = entry("databases", &inputs, |folder| {
            run_script("databases.sh", &[&postgresql, &mariadb, text(&etcd)?, text(folder)?]).map(drop)
        })?;
        Ok((made.join("programs.raw"), made.join("data.raw")))
    }

    /// The kernel.
    pub fn kernel(&self) -> PathBuf {
        self.kernel.join("vmlinuz")
    }

    /// The first user land, which finds a disk's root.
    pub fn initrd(&self) -> &Path {
        &self.initrd
    }

    /// The first user land with an agent in it: the fast guest.
    pub fn initrd_with_agent(&self, agent: &Path) -> anyhow::Result<PathBuf> {
        let inputs = [Input::File(&self.initrd), Input::File(agent), Input::Words(AGENT_SETTINGS)];
        let made = entry("fast", &inputs, |folder| {
            let mut archive = self.behind_initrd(folder)?;
            archive.file("/usr/bin/guestlet", &std::fs::read(agent)?)?;
            archive.file("/etc/guestlet/agent.toml", AGENT_SETTINGS.as_bytes())?;
            for library in libraries(agent)? {
                archive.file(&library, &std::fs::read(&library)?)?;
            }
            archive.finish()?.flush()?;
            Ok(())
        })?;
        Ok(made.join("initrd"))
    }

    /// The first user land with the kernel's modules of vsock emptied, so that they cannot be loaded.
    pub fn initrd_without_vsock(&self) -> anyhow::Result<PathBuf> {
        let made = entry("without-vsock", &[Input::File(&self.initrd)], |folder| {
            let mut archive = self.behind_initrd(folder)?;
            for module in ["vsock", "vmw_vsock_virtio_transport_common", "vmw_vsock_virtio_transport"] {
                archive.file(&format!("/modules/{module}.ko"), &[])?;
            }
            archive.finish()?.flush()?;
            Ok(())
        })?;
        Ok(made.join("initrd"))
    }

    /// An archive behind the first user land, in a file called `initrd` in that folder.
    fn behind_initrd(&self, folder: &Path) -> anyhow::Result<Archive<File>> {
        let mut out = File::create(folder.join("initrd"))?;
        let mut first = std::fs::read(&self.initrd)?;
        // The kernel looks for the next archive at a multiple of four.
        first.resize(first.len().next_multiple_of(4), 0);
        out.write_all(&first)?;
        Ok(Archive::new(out))
    }

    /// The real guest's disk as it is before its first boot: an ext4 file system, sparse.
    pub fn root(&self) -> anyhow::Result<PathBuf> {
        let how = script("root.sh");
        let made = entry("root", &[Input::Words(key(&self.kernel)), Input::File(&how)], |folder| {
            if !nix::unistd::geteuid().is_root() {
                bail!("building the guest's disk needs root (sudo make images)");
            }
            run_script("root.sh", &[text(&self.kernel)?, text(&folder.join("root.raw"))?]).map(drop)
        })?;
        Ok(made.join("root.raw"))
    }
}

/// A path as the argument of a script.
pub fn text(path: &Path) -> anyhow::Result<&str> {
    path.to_str().with_context(|| format!("{} is not UTF-8", path.display()))
}
