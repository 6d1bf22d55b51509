//! Snapshots of a guest with a PostgreSQL under load. virsh knows nothing of it: the agent has it take part in the freeze, and
//! keeps the receipt in the guest.

use anyhow::{Context as _, ensure};
use serde_json::Value;

use super::Check;
use crate::databases::{PROGRAM, copy};
use crate::harness::images::Images;
use crate::harness::libvirt::Domain;
use crate::harness::vm::SOON;
use crate::harness::wait_for;

pub const CHECKS: &[Check] = &[Check(
    "snapshot-create-as --disk-only --quiesce",
    &["guest-fsfreeze-freeze", "guest-fsfreeze-thaw"],
    quiesced,
)];

/// Where in the guest, in memory, acknowledged numbers are written to.
const TOLD: &str = "/run/told";

fn attach(domain: &Domain, file: &std::path::Path, target: &str, more: &[&str]) -> anyhow::Result<()> {
    let file = file.to_str().context("a path")?;
    let arguments = [file, target, "--targetbus", "scsi", "--subdriver", "raw"];
    domain.verb("attach-disk", &[&arguments[..], more].concat())?;
    wait_for("the disk", SOON, || domain.run(&format!("test -b /dev/{target}")).ok()).map(drop)
}

fn acknowledged(domain: &Domain) -> anyhow::Result<u64> {
    let line = domain.run(&format!("tail -n 1 {TOLD}"))?;
    Ok(line.split(' ').nth(1).with_context(|| format!("{TOLD} ends with {line:?}"))?.parse()?)
}

fn quiesced(domain: &Domain) -> anyhow::Result<()> {
    let (programs, data) = Images::databases()?;
    attach(domain, &programs, "sdb", &["--mode", "readonly"])?;
    attach(domain, &data, "sdc", &["--mode", "readonly"])?;
    domain.run("mkdir -p /opt/databases /run/new && mount -o ro /dev/sdb /opt/databases")?;
    domain.run("mount -o ro,noload /dev/sdc /run/new && cp -a /run/new/pg /data/ && umount /run/new")?;
    domain.verb("detach-disk", &["sdc"])?;
    domain.run(&format!("{PROGRAM} set-up postgresql"))?;
    domain.run(&format!("systemd-run --quiet --unit load {PROGRAM} load postgresql {TOLD}"))?;
    wait_for("the load", SOON, || acknowledged(domain).ok().filter(|number| *number > 20))?;

    let before = acknowledged(domain)?;
    domain.verb("snapshot-create-as", &["cut", "--disk-only", "--quiesce", "--no-metadata"])?;
    let receipts: Value = serde_json::from_str(&domain.run("guestlet receipts ls -o json")?)?;
    let newest = receipts.as_array().and_then(|all| all.last()).context("there is no receipt")?;
    ensure!(newest["level"] == "application" && newest["end"] == "asked", "{receipts:#}");
    wait_for("the load goes on", SOON, || acknowledged(domain).ok().filter(|number| *number > before + 20))?;

    // Whatever is written since then is in files of libvirt's: the disk's own file is as it was.
    copy(&domain.file("data.raw"), &domain.file("cut.raw"));
    domain.run("systemctl stop load postgresql && umount /data")?;
    attach(domain, &domain.file("cut.raw"), "sdc", &[])?;
    domain.run("mount /dev/sdc /data && systemctl start postgresql")?;
    let found: Value = serde_json::from_str(&domain.run(&format!("{PROGRAM} check postgresql 0/0"))?)?;
    println!("  {before} were acknowledged before the snapshot: {found}");
    let last = found["last"].as_u64().context("no number")?;
    ensure!(last >= before && found["count"] == last && found["whole"] == true, "{found}, of {before}");

    // As it was for the checks that follow.
    domain.run("systemctl disable --quiet --now postgresql && umount /data /opt/databases")?;
    domain.run("sed -i /LABEL=/d /etc/fstab && systemctl daemon-reload && mount /dev/sda /data")?;
    domain.verb("detach-disk", &["sdc"])?;
    domain.verb("detach-disk", &["sdb"]).map(drop)
}
