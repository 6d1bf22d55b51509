//! `guestlet disks`: the disks of this guest and the rules for them, for people or programs.

use crate::text;
use std::fmt::Write as _;
use std::path::Path;

use serde_json::{Value, json};

use super::{DEADLINE, call};
use crate::wire::proto::v1::{Disk, DiskRule, ListDisksRequest, ListDisksResponse, LocalDisk};

/// Requests the disks from the agent that serves the socket at `path`.
///
/// # Errors
/// The errors of [`ask`](super::ask).
pub async fn ask(path: &Path) -> anyhow::Result<ListDisksResponse> {
    call(path, DEADLINE, async |mut client| Ok(client.list_disks(ListDisksRequest {}).await?.into_inner()))
        .await
}

/// Formats the answer for people.
pub fn table(answer: &ListDisksResponse) -> String {
    let mut rows = vec![["NAME", "SIZE", "BUS", "AT", "SERIAL", "PARTITIONS", "USED FOR"].map(str::to_owned)];
    for LocalDisk { disk, uses } in &answer.disks {
        let disk = disk.clone().unwrap_or_default();
        let partitions: Vec<_> = disk.partitions.iter().map(|partition| partition.name.as_str()).collect();
        rows.push([
            disk.name.clone(),
            text::size(disk.bytes),
            if disk.read_only { format!("{}, read-only", disk.bus) } else { disk.bus.clone() },
            text::or_dash(&at(&disk)),
            match disk.serials.first() {
                Some(serial) => serial.value.clone(),
                None if disk.silent => "(the disk does not answer)".to_owned(),
                None => "-".to_owned(),
            },
            text::or_dash(&partitions.join(" ")),
            text::or_dash(&uses.join(", ")),
        ]);
    }
    let mut text = text::table(&rows);
    if !answer.rules.is_empty() {
        text.push('\n');
        text += &rules(&answer.rules);
    }
    if !answer.rules_problem.is_empty() {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "\nThe newest rules are invalid and not in force: {}", answer.rules_problem);
    }
    text
}

/// Formats the rules, and below each without a disk the reasons why no disk matches.
fn rules(rules: &[DiskRule]) -> String {
    let mut rows = vec![["MOUNT POINT", "STATE", "DISK", "MATCH", "RULE", "REASON"].map(str::to_owned)];
    for rule in rules {
        rows.push([
            rule.mount_point.clone(),
            rule.state.clone(),
            text::or_dash(if rule.file.is_empty() { &rule.disk } else { &rule.file }),
            text::or_dash(&rule.r#match),
            text::or_dash(&rule.origin),
            rule.reason.clone(),
        ]);
    }
    let table = text::table(&rows);
    let mut lines = table.lines();
    let mut text = lines.next().unwrap_or_default().to_owned() + "\n";
    for (line, rule) in lines.zip(rules) {
        text += line;
        text.push('\n');
        if rule.state == "no-disk" {
            for other in &rule.others {
                // Writing to a string cannot fail.
                let _ = writeln!(text, "    not {}: {}", other.disk, other.reason);
            }
        }
    }
    text
}

/// Converts the answer to JSON for programs.
pub fn json(answer: &ListDisksResponse) -> Value {
    json!({
        "disks": answer.disks.iter().map(one).collect::<Value>(),
        "rules": answer.rules.iter().map(rule).collect::<Value>(),
        "rules_problem": Some(&answer.rules_problem).filter(|problem| !problem.is_empty()),
    })
}

fn rule(rule: &DiskRule) -> Value {
    json!({
        "origin": rule.origin,
        "match": rule.r#match,
        "mount_point": rule.mount_point,
        "state": rule.state,
        "disk": rule.disk,
        "file": rule.file,
        "reason": rule.reason,
        "others": rule.others.iter().map(|other| json!({
            "disk": other.disk,
            "reason": other.reason,
        })).collect::<Value>(),
    })
}

fn one(LocalDisk { disk, uses }: &LocalDisk) -> Value {
    let disk = disk.clone().unwrap_or_default();
    json!({
        "name": disk.name,
        "file": disk.file,
        "generation": disk.generation,
        "bus": disk.bus,
        "pci_address": disk.pci_address,
        "scsi_address": disk.scsi_address,
        "serials": disk.serials.iter().map(|serial| json!({
            "value": serial.value,
            "source": serial.source,
        })).collect::<Value>(),
        "alias": disk.alias,
        "world_wide_name": disk.world_wide_name,
        "bytes": disk.bytes,
        "sector_bytes": disk.sector_bytes,
        "read_only": disk.read_only,
        "rotational": disk.rotational,
        "silent": disk.silent,
        "partitions": disk.partitions.iter().map(|partition| json!({
            "name": partition.name,
            "number": partition.number,
            "start_bytes": partition.start_bytes,
            "bytes": partition.bytes,
        })).collect::<Value>(),
        "holders": disk.holders.iter().map(|holder| json!({
            "name": holder.name,
            "alias": holder.alias,
            "of": holder.of,
        })).collect::<Value>(),
        "uses": uses,
    })
}

/// Returns the address of a disk: on SCSI below its controller, otherwise that of its controller.
fn at(disk: &Disk) -> String {
    if disk.scsi_address.is_empty() { disk.pci_address.clone() } else { disk.scsi_address.clone() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::proto::v1::{DiskMismatch, Partition, SerialNumber};

    #[test]
    fn tables_and_values() {
        let serial = SerialNumber { value: "data 1".into(), source: "virtio".into() };
        let partition = Partition { name: "vdb1".into(), number: 1, ..Partition::default() };
        let disk = Disk {
            name: "vdb".into(),
            bus: "virtio".into(),
            pci_address: "0000:00:06.0".into(),
            bytes: 3 << 29,
            serials: vec![serial],
            partitions: vec![partition],
            ..Disk::default()
        };
        let silent = Disk { name: "vdc".into(), bus: "virtio".into(), silent: true, ..Disk::default() };
        let answer = ListDisksResponse {
            disks: vec![
                LocalDisk { disk: Some(disk), uses: vec!["/data".into(), "swap on /dev/vdb2".into()] },
                LocalDisk { disk: Some(silent), uses: Vec::new() },
            ],
            rules: vec![
                DiskRule {
                    origin: "/etc/guestlet/disks.d/a.toml:1".into(),
                    r#match: "serial data 1".into(),
                    mount_point: "/data".into(),
                    state: "mounted".into(),
                    disk: "vdb".into(),
                    file: "/dev/vdb1".into(),
                    ..DiskRule::default()
                },
                DiskRule {
                    origin: "a.toml:9".into(),
                    r#match: "bus nvme".into(),
                    mount_point: "/fast".into(),
                    state: "no-disk".into(),
                    reason: "no disk has bus nvme".into(),
                    others: vec![DiskMismatch { disk: "vdb".into(), reason: "its bus is virtio".into() }],
                    ..DiskRule::default()
                },
            ],
            rules_problem: "b.toml:1: unknown field `x`".into(),
        };
        assert_eq!(
            table(&answer),
            "NAME  SIZE     BUS     AT            SERIAL                      PARTITIONS  USED FOR\n\
             vdb   1.5 GiB  virtio  0000:00:06.0  data 1                      vdb1        /data, swap on /dev/vdb2\n\
             vdc   0 B      virtio  -             (the disk does not answer)  -           -\n\
             \n\
             MOUNT POINT  STATE    DISK       MATCH          RULE                            REASON\n\
             /data        mounted  /dev/vdb1  serial data 1  /etc/guestlet/disks.d/a.toml:1\n\
             /fast        no-disk  -          bus nvme       a.toml:9                        no disk has bus nvme\n    \
             not vdb: its bus is virtio\n\
             \n\
             The newest rules are invalid and not in force: b.toml:1: unknown field `x`\n"
        );
        let all = json(&answer);
        assert_eq!(
            (&all["rules"][0]["state"], &all["rules_problem"]),
            (&json!("mounted"), &json!(answer.rules_problem))
        );
        let value = &all["disks"];
        assert_eq!(value[0]["serials"][0]["value"], "data 1");
        assert_eq!(value[0]["partitions"][0]["number"], 1);
        assert_eq!((&value[0]["bytes"], &value[1]["silent"]), (&json!(3_u64 << 29), &json!(true)));
    }
}
