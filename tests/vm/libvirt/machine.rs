//! Clock, processors, freezing and trimming; and strings of the firmware.

use std::os::unix::fs::MetadataExt as _;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, ensure};
use guestlet::ctl::trust::bootstrap::{Format, text};
use serde_json::{Value, json};

use super::Check;
use crate::harness::libvirt::Domain;
use crate::harness::vm::SOON;
use crate::harness::wait_for;

pub const CHECKS: &[Check] = &[
    Check("domtime", &["guest-get-time"], time),
    Check("domtime --time", &["guest-get-time", "guest-set-time"], set_time),
    Check("domtime --now", &["guest-get-time", "guest-set-time"], set_now),
    Check("domtime --sync", &["guest-get-time", "guest-set-time"], set_from_hardware),
    Check("guestvcpus", &["guest-get-vcpus"], processors),
    Check("guestvcpus --disable", &["guest-get-vcpus", "guest-set-vcpus"], choose_processors),
    Check("setvcpus --guest", &["guest-get-vcpus", "guest-set-vcpus"], count_processors),
    Check("domfsfreeze", &["guest-fsfreeze-freeze", "guest-fsfreeze-status", "guest-fsfreeze-thaw"], freeze),
    Check("domfsfreeze --mountpoint", &["guest-fsfreeze-freeze-list", "guest-fsfreeze-thaw"], freeze_one),
    Check("domfstrim", &["guest-fstrim"], trim),
    Check("define (with a string of the firmware)", &[], string),
];

/// What a key's line may have in it that XML, libvirt or QEMU could take for something else.
const STRING: &str = "role=status,exec # <ours> & \"their's\", 100 %";

/// The domain with a string as `guestctl trust bootstrap` prints it, under a name that is not that of keys: with a key, the agent
/// would obey libvirt no more than its settings say.
pub fn with_a_string(domain: &str) -> String {
    let printed = text(Format::Libvirt, "virsh", STRING, None).replace("guestlet.hosts", "guestlet.test");
    let between = |from: &str, to: &str| {
        let start = printed.find(from).unwrap();
        printed[start..start + printed[start..].find(to).unwrap()].to_owned()
    };
    let (smbios, end) = (between("<smbios mode", "</os>"), "</sysinfo>");
    let sysinfo = between("<sysinfo", end) + end;
    let (before, after) = domain.split_once("</os>").unwrap();
    format!("{before}{smbios}</os>{sysinfo}{after}")
}

/// Comes to the guest to the letter, and to systemd as a credential.
fn string(domain: &Domain) -> anyhow::Result<()> {
    let credential = domain.run("cat /run/credentials/@system/guestlet.test")?;
    ensure!(credential == STRING, "{credential}");
    domain.run("grep -aq io.systemd.credential:guestlet.test= /sys/firmware/dmi/tables/DMI").map(drop)
}

fn said_time(domain: &Domain) -> anyhow::Result<u64> {
    Ok(domain.table("domtime", &[])?.get("Time").context("no time")?.parse()?)
}

/// Whether guest and virsh agree that it is that time, or little later.
fn is_time(domain: &Domain, expected: u64) -> anyhow::Result<()> {
    let said = said_time(domain)?;
    let there: u64 = domain.run("date +%s")?.trim().parse()?;
    let soon = expected.saturating_sub(2)..expected + 30;
    ensure!(
        soon.contains(&said) && soon.contains(&there),
        "{expected} is due, {said} is said, {there} is there"
    );
    Ok(())
}

fn now() -> anyhow::Result<u64> {
    Ok(SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs())
}

fn time(domain: &Domain) -> anyhow::Result<()> {
    is_time(domain, now()?)
}

fn set_time(domain: &Domain) -> anyhow::Result<()> {
    const THEN: u64 = 1_700_000_000;
    domain.verb("domtime", &["--time", &THEN.to_string()])?;
    is_time(domain, THEN)?;
    let hardware = domain.run("cat /sys/class/rtc/rtc0/date")?;
    ensure!(hardware.trim() == "2023-11-14", "the hardware clock says {hardware}");
    Ok(())
}

fn set_now(domain: &Domain) -> anyhow::Result<()> {
    domain.verb("domtime", &["--now"])?;
    is_time(domain, now()?)
}

fn set_from_hardware(domain: &Domain) -> anyhow::Result<()> {
    domain.run("date --set @1600000000")?;
    domain.verb("domtime", &["--sync"])?;
    is_time(domain, now()?)
}

fn online(domain: &Domain) -> anyhow::Result<String> {
    Ok(domain.run("cat /sys/devices/system/cpu/online")?.trim().to_owned())
}

fn processors(domain: &Domain) -> anyhow::Result<()> {
    let table = domain.table("guestvcpus", &[])?;
    ensure!(table["vcpus"] == "0-1" && table["online"] == "0-1", "{table:?}");
    let count = domain.run("ls -d /sys/devices/system/cpu/cpu[0-9]*/online")?;
    ensure!(table["offlinable"] == "1" && count.trim().ends_with("cpu1/online"), "{table:?} {count}");
    ensure!(domain.verb("vcpucount", &["--guest"])?.trim() == "2");
    Ok(())
}

fn choose_processors(domain: &Domain) -> anyhow::Result<()> {
    domain.verb("guestvcpus", &["--disable", "--cpulist", "1"])?;
    ensure!(online(domain)? == "0", "processor 1 is still there");
    ensure!(domain.table("guestvcpus", &[])?["online"] == "0");
    domain.verb("guestvcpus", &["--enable", "--cpulist", "1"])?;
    ensure!(online(domain)? == "0-1", "processor 1 is not back");
    Ok(())
}

fn count_processors(domain: &Domain) -> anyhow::Result<()> {
    domain.verb("setvcpus", &["1", "--guest"])?;
    ensure!(online(domain)? == "0", "processor 1 is still there");
    domain.verb("setvcpus", &["2", "--guest"])?;
    ensure!(online(domain)? == "0-1", "processor 1 is not back");
    Ok(())
}

/// Thaws what a failed check left frozen.
fn thawed_in_the_end(domain: &Domain, check: fn(&Domain) -> anyhow::Result<()>) -> anyhow::Result<()> {
    check(domain).inspect_err(|_| drop(domain.verb("domfsthaw", &[])))
}

/// Runs a verb, for which the agent has to answer that so many file systems were concerned.
fn counts(domain: &Domain, verb: &str, arguments: &[&str], count: u64) -> anyhow::Result<()> {
    domain.verb(verb, arguments)?;
    let exchanges = domain.exchanges();
    let answered = exchanges.last().context("libvirt asked nothing")?.answered.concat();
    ensure!(serde_json::from_str::<Value>(&answered)?["return"] == count, "{verb}: {answered}");
    Ok(())
}

fn status(domain: &Domain) -> anyhow::Result<()> {
    let status = domain.agent("guest-fsfreeze-status", &json!({}))?;
    ensure!(status == "frozen", "{status}");
    Ok(())
}

/// Starts to write a file to `folder`, which blocks where that is frozen.
fn begin_to_write(domain: &Domain, folder: &str) -> anyhow::Result<()> {
    domain.run(&format!("(echo late > {folder}/late &) > /dev/null 2>&1")).map(drop)
}

fn wait_written(domain: &Domain, folder: &str) -> anyhow::Result<()> {
    wait_for(&format!("write to {folder}"), SOON, || domain.run(&format!("rm {folder}/late")).ok()).map(drop)
}

fn freeze(domain: &Domain) -> anyhow::Result<()> {
    thawed_in_the_end(domain, |domain| {
        counts(domain, "domfsfreeze", &[], 2)?;
        status(domain)?;
        begin_to_write(domain, "/data")?;
        domain.run("sleep 0.5; ! [ -e /data/late ]").context("/data is not frozen")?;
        domain.agent("guest-info", &json!({})).context("guest-info while frozen")?;
        let error = domain.verb("guestinfo", &["--os"]).unwrap_err().to_string();
        ensure!(error.contains("guest-get-osinfo") && error.contains("disabled"), "{error}");
        ensure!(domain.verb("domfsfreeze", &[]).is_err(), "it freezes twice");
        counts(domain, "domfsthaw", &[], 2)?;
        wait_written(domain, "/data")?;
        counts(domain, "domfsthaw", &[], 0)?;
        domain.verb("guestinfo", &["--os"]).context("guestinfo after the thaw").map(drop)
    })
}

fn freeze_one(domain: &Domain) -> anyhow::Result<()> {
    thawed_in_the_end(domain, |domain| {
        counts(domain, "domfsfreeze", &["--mountpoint", "/data"], 1)?;
        begin_to_write(domain, "/data")?;
        begin_to_write(domain, "/root")?;
        wait_written(domain, "/root").context("more than /data is frozen")?;
        domain.run("! [ -e /data/late ]").context("/data is not frozen")?;
        counts(domain, "domfsthaw", &[], 1)?;
        wait_written(domain, "/data")
    })
}

fn trim(domain: &Domain) -> anyhow::Result<()> {
    const SIZE: u64 = 64 << 20;
    let taken = || anyhow::Ok(std::fs::metadata(domain.file("data.raw"))?.blocks() * 512);
    domain.run("dd if=/dev/urandom of=/data/big bs=1M count=64 2> /dev/null && sync")?;
    let full = taken()?;
    ensure!(full > SIZE, "the file takes only {full} bytes");
    domain.run("rm /data/big && sync")?;
    domain.verb("domfstrim", &[])?;
    let trimmed = taken()?;
    ensure!(trimmed < full - SIZE / 2, "the disk took {full} bytes and takes {trimmed}");
    domain.verb("domfstrim", &["--minimum", "1048576"]).map(drop)
}
