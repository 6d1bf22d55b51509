//! What the guest says of itself, compared with what its own programs say.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, ensure};
use serde_json::json;

use super::{ADDRESS, Check};
use crate::harness::libvirt::{CARD, Domain, SERIAL};

pub const CHECKS: &[Check] = &[
    Check("qemu-agent-command", &[], commands),
    Check("guestinfo --user", &["guest-get-users"], users),
    Check("guestinfo --os", &["guest-get-osinfo"], system),
    Check("guestinfo --timezone", &["guest-get-timezone"], time_zone),
    Check("guestinfo --hostname", &["guest-get-host-name"], host_name),
    Check("guestinfo --filesystem", &["guest-get-fsinfo"], file_systems),
    Check("guestinfo --disk", &["guest-get-disks"], disks),
    Check("guestinfo --interface", &["guest-network-get-interfaces"], interfaces),
    Check("guestinfo --load", &["guest-get-load"], load),
    Check("guestinfo", &[], everything),
    Check("domfsinfo", &["guest-get-fsinfo"], mounts),
    Check("domifaddr --source agent", &["guest-network-get-interfaces"], addresses),
    Check("domhostname --source agent", &["guest-get-host-name"], domain_host_name),
];

type Table = BTreeMap<String, String>;

fn commands(domain: &Domain) -> anyhow::Result<()> {
    ensure!(domain.agent("guest-ping", &json!({}))? == json!({}));
    let answer =
        domain.verb("qemu-agent-command", &["--pretty", "--timeout", "20", r#"{"execute":"guest-info"}"#])?;
    ensure!(answer.contains(r#""name": "guest-network-get-interfaces""#), "{answer}");
    let error = domain.agent("guest-no-such-command", &json!({})).unwrap_err().to_string();
    ensure!(error.contains("guest-no-such-command"), "{error}");
    let error = domain.agent("guest-sync", &json!({ "id": "x" })).unwrap_err().to_string();
    ensure!(error.contains("unable to execute QEMU agent command"), "{error}");
    Ok(())
}

fn users(domain: &Domain) -> anyhow::Result<()> {
    let table = domain.table("guestinfo", &["--user"])?;
    // The console's root, and nobody else.
    ensure!(table["user.count"] == "1" && table["user.0.name"] == "root", "{table:?}");
    let milliseconds: u128 = table["user.0.login-time"].parse()?;
    let now = SystemTime::now().duration_since(UNIX_EPOCH)?.as_millis();
    ensure!((now - 600_000..now).contains(&milliseconds), "{milliseconds} is not of the last ten minutes");
    Ok(())
}

fn system(domain: &Domain) -> anyhow::Result<()> {
    let table = domain.table("guestinfo", &["--os"])?;
    ensure!(table["os.id"] == "debian" && table["os.version-id"] == "12", "{table:?}");
    let kernel = domain.run("uname -m; uname -r; uname -v")?;
    let parts = ["os.machine", "os.kernel-release", "os.kernel-version"];
    ensure!(kernel.lines().eq(parts.iter().map(|part| table[*part].as_str())), "{table:?}");
    Ok(())
}

fn time_zone(domain: &Domain) -> anyhow::Result<()> {
    let table = domain.table("guestinfo", &["--timezone"])?;
    let zone = domain.run("date +%Z")?;
    ensure!(table["timezone.name"] == zone.trim() && table["timezone.offset"] == "0", "{table:?}");
    Ok(())
}

fn host_name(domain: &Domain) -> anyhow::Result<()> {
    let table = domain.table("guestinfo", &["--hostname"])?;
    ensure!(table["hostname"] == domain.run("hostname")?.trim(), "{table:?}");
    Ok(())
}

fn domain_host_name(domain: &Domain) -> anyhow::Result<()> {
    let name = domain.verb("domhostname", &["--source", "agent"])?;
    ensure!(name.trim() == domain.run("hostname")?.trim(), "{name}");
    Ok(())
}

/// The entries of a list such as `fs`, each without its prefix.
fn list(table: &Table, name: &str) -> anyhow::Result<Vec<Table>> {
    let count: usize = table.get(&format!("{name}.count")).context("no count")?.parse()?;
    let entry = |number: usize| {
        let prefix = format!("{name}.{number}.");
        let part =
            |(key, value): (&String, &String)| Some((key.strip_prefix(&prefix)?.to_owned(), value.clone()));
        table.iter().filter_map(part).collect()
    };
    Ok((0..count).map(entry).collect())
}

fn file_systems(domain: &Domain) -> anyhow::Result<()> {
    let entries = list(&domain.table("guestinfo", &["--filesystem"])?, "fs")?;
    for (mountpoint, device) in [("/", "vda"), ("/data", "sda")] {
        let entry = entries.iter().find(|entry| entry["mountpoint"] == mountpoint);
        let entry = entry.with_context(|| format!("no {mountpoint} in {entries:?}"))?;
        ensure!(entry["name"] == device && entry["fstype"] == "ext4", "{entry:?}");
        // libvirt finds its own disk by the address that the agent gives.
        ensure!(entry["disk.count"] == "1" && entry["disk.0.alias"] == device, "{entry:?}");
        ensure!(entry["disk.0.device"] == format!("/dev/{device}"), "{entry:?}");
        let sizes = domain.run(&format!("df --block-size 1 --output=used,avail {mountpoint} | tail -n 1"))?;
        let sizes: Vec<u64> = sizes.split_whitespace().map(str::parse).collect::<Result<_, _>>()?;
        let (used, total): (u64, u64) = (entry["used-bytes"].parse()?, entry["total-bytes"].parse()?);
        // The journal of the guest grows meanwhile.
        ensure!(
            used.abs_diff(sizes[0]) < 1 << 22 && total.abs_diff(sizes[0] + sizes[1]) < 1 << 22,
            "{entry:?} {sizes:?}"
        );
    }
    let data = entries.iter().find(|entry| entry["mountpoint"] == "/data").context("no /data")?;
    ensure!(data["disk.0.serial"].ends_with(SERIAL), "{data:?}");
    Ok(())
}

fn disks(domain: &Domain) -> anyhow::Result<()> {
    let entries = list(&domain.table("guestinfo", &["--disk"])?, "disk")?;
    let names: BTreeSet<_> = entries.iter().map(|entry| entry["name"].as_str()).collect();
    let there = domain.run("lsblk --noheadings --paths --output NAME")?;
    ensure!(names == there.lines().map(str::trim).collect(), "{names:?}, but lsblk says {there:?}");
    for (name, bus) in [("vda", "virtio"), ("sda", "scsi")] {
        let entry =
            entries.iter().find(|entry| entry["name"] == format!("/dev/{name}")).context("no disk")?;
        ensure!(
            entry["alias"] == name && entry["guest_bus"] == bus && entry["partition"] == "no",
            "{entry:?}"
        );
        ensure!(name != "sda" || entry["serial"].ends_with(SERIAL), "{entry:?}");
    }
    Ok(())
}

fn interfaces(domain: &Domain) -> anyhow::Result<()> {
    let name = domain.run(&format!("grep -l {CARD} /sys/class/net/*/address | cut -d / -f 5"))?;
    let there = || -> anyhow::Result<Vec<String>> {
        let script = format!("ip -oneline address show dev {} | awk '{{print $3, $4}}'", name.trim());
        let addresses = domain.run(&script)?.replace("inet6", "ipv6").replace("inet ", "ipv4 ");
        let mut addresses: Vec<_> = addresses.lines().map(str::to_owned).collect();
        addresses.sort_unstable();
        Ok(addresses)
    };
    // The kernel adds an address of its own when the network's router answers it.
    let mut before = there()?;
    let (said, there) = loop {
        let entries = list(&domain.table("guestinfo", &["--interface"])?, "if")?;
        let card = entries.iter().find(|entry| entry["hwaddr"] == CARD).context("no network card")?;
        ensure!(card["name"] == name.trim(), "{card:?}");
        let mut said: Vec<_> = list(card, "addr")?
            .iter()
            .map(|address| format!("{} {}/{}", address["type"], address["addr"], address["prefix"]))
            .collect();
        said.sort_unstable();
        let after = there()?;
        if after == before {
            break (said, after);
        }
        before = after;
    };
    ensure!(!said.is_empty() && said == there, "{said:?}, but the guest says {there:?}");
    Ok(())
}

fn addresses(domain: &Domain) -> anyhow::Result<()> {
    let said = domain.verb("domifaddr", &["--source", "agent"])?;
    let words: Vec<Vec<_>> = said.lines().map(|line| line.split_whitespace().collect()).collect();
    ensure!(words.iter().any(|line| line[1..] == [CARD, "ipv4", ADDRESS]), "{said}");
    ensure!(words.iter().any(|line| line[0] == "lo" && line[2..] == ["ipv4", "127.0.0.1/8"]), "{said}");
    Ok(())
}

fn load(domain: &Domain) -> anyhow::Result<()> {
    let table = domain.table("guestinfo", &["--load"])?;
    let there = domain.run("cat /proc/loadavg")?;
    for (name, there) in ["load.1m", "load.5m", "load.15m"].into_iter().zip(there.split_whitespace()) {
        let (said, there): (f64, f64) = (table[name].parse()?, there.parse()?);
        ensure!((said - there).abs() < 0.5, "{name} is {said}, but the guest says {there}");
    }
    Ok(())
}

/// Without a choice, libvirt asks for all that the agent has.
fn everything(domain: &Domain) -> anyhow::Result<()> {
    let table = domain.table("guestinfo", &[])?;
    ensure!(table.contains_key("os.id") && table.contains_key("hostname") && table.contains_key("if.count"));
    Ok(())
}

fn mounts(domain: &Domain) -> anyhow::Result<()> {
    let said = domain.verb("domfsinfo", &[])?;
    let words: Vec<Vec<_>> = said.lines().map(|line| line.split_whitespace().collect()).collect();
    ensure!(words == [["/", "vda", "ext4", "vda"], ["/data", "sda", "ext4", "sda"]], "{said}");
    Ok(())
}
