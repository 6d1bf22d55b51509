//! Finds what the harness runs: QEMU and how to accelerate it, the vsock device, and the programs and
//! packages under test.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, bail};

use super::{cache, process, wait_for};

/// QEMU's program.
pub const QEMU: &str = "qemu-system-x86_64";

/// Scripts that come with the harness.
pub fn script(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/setup").join(name)
}

/// Runs one of them.
///
/// # Errors
/// With what it said if it fails.
pub fn run_script(name: &str, arguments: &[&str]) -> anyhow::Result<String> {
    run(&script(name), arguments)
}

/// Runs a program to its end and gives what it printed.
///
/// # Errors
/// With what it said if it fails.
pub fn run(program: &Path, arguments: &[&str]) -> anyhow::Result<String> {
    let output = Command::new(program)
        .args(arguments)
        .output()
        .with_context(|| format!("cannot run {} (make setup)", program.display()))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        bail!("{} {} failed: {}", program.display(), arguments.join(" "), said.trim());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// `vhost-device-vsock`, where `make setup` puts it.
pub fn vhost_device_vsock() -> anyhow::Result<PathBuf> {
    let version = version("VHOST_DEVICE_VSOCK")?;
    tool(&format!("vhost-device-vsock-{version}/bin/vhost-device-vsock"))
}

/// The unpacked packages of libvirt, where `make setup` puts them.
pub fn libvirt() -> anyhow::Result<PathBuf> {
    tool(&format!("libvirt-{}", version("LIBVIRT")?))
}

fn tool(path: &str) -> anyhow::Result<PathBuf> {
    let path = cache::root()?.join("tools").join(path);
    if !path.exists() {
        bail!("{} is missing: run 'make setup'", path.display());
    }
    Ok(path)
}

fn version(name: &str) -> anyhow::Result<&'static str> {
    include_str!("../setup/versions")
        .lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix('='))
        .with_context(|| format!("tests/setup/versions has no {name}"))
}

/// A program under test, from the folder that `GUESTLET_BIN_DIR` names.
pub fn program(name: &str) -> anyhow::Result<PathBuf> {
    let folder = from_environment("GUESTLET_BIN_DIR")?;
    let path = folder.join(name);
    if !path.exists() {
        bail!("{} is missing: run 'make package'", path.display());
    }
    Ok(path)
}

/// The agent's package, which `GUESTLET_DEB` names.
pub fn package() -> anyhow::Result<PathBuf> {
    from_environment("GUESTLET_DEB")
}

/// The agent's package, optimized as it is released, which `GUESTLET_RELEASE_DEB` names: the other one has the tests' profile.
pub fn released_package() -> anyhow::Result<PathBuf> {
    from_environment("GUESTLET_RELEASE_DEB")
}

fn from_environment(variable: &str) -> anyhow::Result<PathBuf> {
    let value = std::env::var_os(variable);
    let path = value.map(PathBuf::from).with_context(|| {
        format!(
            "{variable} is not set: start this with 'make vm-test' or 'make demo', which build what it needs"
        )
    })?;
    path.canonicalize().with_context(|| format!("{variable}={}", path.display()))
}

/// QEMU's version, as a part of cache keys: a saved VM is for one version only.
pub fn qemu_version() -> anyhow::Result<String> {
    let text = run(Path::new(QEMU), &["--version"])?;
    Ok(text.lines().next().unwrap_or_default().to_owned())
}

/// The value of QEMU's `-accel`: KVM if a guest really boots with it. That /dev/kvm opens says little; there
/// are machines where VMs are made and then never get past their kernel's first steps.
pub fn accelerator(kernel: &Path, initrd: &Path) -> anyhow::Result<&'static str> {
    const EMULATION: &str = "tcg,thread=multi";
    if !Path::new("/dev/kvm").exists() {
        return Ok(EMULATION);
    }
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
    let version = qemu_version()?;
    let inputs = [cache::Input::Words(&boot), cache::Input::Words(&version)];
    let entry = cache::entry("accelerator", &inputs, |folder| {
        let works = boots_with_kvm(kernel, initrd)?;
        std::fs::write(folder.join("kvm"), if works { "yes" } else { "no" })?;
        Ok(())
    })?;
    Ok(if std::fs::read_to_string(entry.join("kvm"))? == "yes" { "kvm" } else { EMULATION })
}

fn boots_with_kvm(kernel: &Path, initrd: &Path) -> anyhow::Result<bool> {
    let folder = process::RunFolder::new()?;
    let serial = folder.file("serial");
    let mut arguments: Vec<String> = ["-accel", "kvm", "-machine", "q35", "-cpu", "max", "-m", "512"]
        .into_iter()
        .chain(["-nodefaults", "-display", "none", "-append", "console=ttyS0 quiet"])
        .map(str::to_owned)
        .collect();
    arguments.extend(["-kernel".into(), kernel.display().to_string()]);
    arguments.extend(["-initrd".into(), initrd.display().to_string()]);
    arguments.extend(["-serial".into(), format!("file:{}", serial.display())]);
    let qemu = process::Process::start(Path::new(QEMU), &arguments, &folder.file("log"))?;
    let booted = wait_for("boot", Duration::from_secs(8), || {
        let text = std::fs::read(&serial).unwrap_or_default();
        let ready = String::from_utf8_lossy(&text).contains("testguest: ready");
        (ready || qemu.ended().is_some()).then_some(ready)
    });
    Ok(booted.unwrap_or(false))
}
