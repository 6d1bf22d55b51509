//! What is done to disks where the kernel has device mapper and lets file systems grow: `tests/disks/layers.rs`, run in
//! a guest that has nothing else to do.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::Context as _;
use serde_json::Value;

use crate::harness::cache::{Input, entry};
use crate::harness::images::text;
use crate::harness::process::{Process, RunFolder};
use crate::harness::tools::{QEMU, run_script, script};
use crate::harness::turns;
use crate::images;

/// Builds the program of those tests, by the profile that this one was built by; where it is.
fn program() -> anyhow::Result<PathBuf> {
    let cargo = std::env::var_os("CARGO").context("this runs under cargo")?;
    let own = std::env::current_exe()?;
    let profile = own.ancestors().nth(2).and_then(Path::file_name).and_then(std::ffi::OsStr::to_str);
    let profile = profile.filter(|folder| *folder != "debug").unwrap_or("dev");
    let words = ["test", "--locked", "--quiet", "--no-run", "--message-format=json", "--test", "disk_layers"];
    let output = Command::new(cargo)
        .args(words)
        .args(["--profile", profile])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()?;
    anyhow::ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let messages = String::from_utf8(output.stdout)?;
    let found =
        messages.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok()).find_map(|message| {
            let ours = message["target"]["name"] == "disk_layers";
            message["executable"].as_str().filter(|_| ours).map(PathBuf::from)
        });
    found.context("cargo does not say where it built the tests")
}

fn initrd(kernel: &Path, program: &Path) -> anyhow::Result<PathBuf> {
    let how = script("disk-lab.sh");
    let made =
        entry("disk-lab", &[Input::File(kernel), Input::File(program), Input::File(&how)], |folder| {
            let kernel = kernel.parent().context("the kernel is in a folder")?;
            run_script("disk-lab.sh", &[text(kernel)?, text(program)?, text(&folder.join("initrd"))?])
                .map(drop)
        })?;
    Ok(made.join("initrd"))
}

#[test]
fn encrypted_and_logical_volumes_grow_and_failing_disks_are_let_go_of() {
    let _turn = turns::beside();
    let images = images();
    let initrd = initrd(&images.kernel(), &program().unwrap()).unwrap();
    let folder = RunFolder::new().unwrap();
    let console = folder.file("console");
    let arguments = [
        "-nodefaults",
        "-no-user-config",
        "-no-reboot",
        "-display",
        "none",
        "-accel",
        images.accelerator,
        "-cpu",
        "max",
        "-smp",
        "1",
        "-m",
        "1536",
        "-kernel",
        text(&images.kernel()).unwrap(),
        "-initrd",
        text(&initrd).unwrap(),
        "-append",
        "console=ttyS0 quiet panic=-1",
        "-serial",
        &format!("file:{}", text(&console).unwrap()),
    ]
    .map(str::to_owned);
    let qemu = Process::start(Path::new(QEMU), &arguments, &folder.file("qemu.log")).unwrap();
    let ended = qemu.wait(Duration::from_secs(600));
    let said = String::from_utf8_lossy(&std::fs::read(&console).unwrap_or_default()).into_owned();
    assert!(ended.is_ok() && said.contains("disk lab: ended with 0"), "{ended:?}\n{said}");
    assert!(said.contains("6 passed; 0 failed"), "{said}");
}
