//! Suspending, rebooting and shutting down. The last one ends the guest.

use std::time::Duration;

use anyhow::{Context as _, ensure};
use serde_json::json;

use super::Check;
use crate::harness::libvirt::Domain;
use crate::harness::vm::{BOOT, SOON};
use crate::harness::wait_for;

pub const CHECKS: &[Check] = &[
    Check("dompmsuspend disk", &["guest-suspend-disk"], refused_hibernation),
    Check("reboot --mode agent", &["guest-shutdown"], reboot),
    Check("shutdown --mode agent", &["guest-shutdown"], shut_down),
    // In the end, and in a boot of its own: an emulated guest that was suspended may neither restart nor power off, after
    // its kernel has handed over to the machine. By then the agent has long done its part.
    Check("dompmsuspend mem", &["guest-suspend-ram"], sleep),
];

/// The guest has no swap to save its memory to.
fn refused_hibernation(domain: &Domain) -> anyhow::Result<()> {
    let error =
        domain.verb("dompmsuspend", &["disk"]).err().context("it says that it hibernates")?.to_string();
    ensure!(error.contains("guest agent command failed"), "{error}");
    domain.wait_state("running", Duration::ZERO)?;
    domain.agent("guest-ping", &json!({})).map(drop)
}

fn sleep(domain: &Domain) -> anyhow::Result<()> {
    // An emulated guest with several processors may boot with a dead timer on a machine that is busy.
    domain.verb("setvcpus", &["1", "--config"])?;
    domain.verb("start", &[])?;
    domain.wait_agent()?;
    // A kernel that does not come back says on the console how far it got.
    domain.run("dmesg --console-level debug && echo N > /sys/module/printk/parameters/console_suspend")?;
    domain.verb("dompmsuspend", &["mem"])?;
    domain.wait_state("pmsuspended", SOON)?;
    domain.verb("dompmwakeup", &[])?;
    domain.wait_state("running", SOON)?;
    domain.wait_agent()
}

fn reboot(domain: &Domain) -> anyhow::Result<()> {
    const BOOT_ID: &str = "cat /proc/sys/kernel/random/boot_id";
    let before = domain.run(BOOT_ID)?;
    domain.verb("reboot", &["--mode", "agent"])?;
    wait_for("other boot", BOOT, || {
        let (status, now) = domain.console().run(BOOT_ID, Duration::from_secs(5)).ok()?;
        (status == 0 && now != before).then_some(())
    })?;
    domain.wait_agent()
}

fn shut_down(domain: &Domain) -> anyhow::Result<()> {
    domain.verb("shutdown", &["--mode", "agent"])?;
    domain.wait_state("shut off", BOOT)?;
    let reason = domain.verb("domstate", &["--reason"])?;
    ensure!(reason.trim() == "shut off (shutdown)", "{reason}");
    Ok(())
}
