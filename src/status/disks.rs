//! `guestlet disks`: the disks of this guest, for people or programs.

use std::path::Path;

use serde_json::{Value, json};

use super::{DEADLINE, call};
use crate::wire::proto::v1::{Disk, ListDisksRequest, ListDisksResponse, LocalDisk};

/// Asks the agent that serves the socket at `path`.
///
/// # Errors
/// As [`ask`](super::ask).
pub async fn ask(path: &Path) -> anyhow::Result<ListDisksResponse> {
    call(path, DEADLINE, async |mut client| Ok(client.list_disks(ListDisksRequest {}).await?.into_inner()))
        .await
}

/// The answer for people.
pub fn table(answer: &ListDisksResponse) -> String {
    let mut rows = vec![["NAME", "SIZE", "BUS", "AT", "SERIAL", "PARTITIONS", "USED FOR"].map(str::to_owned)];
    for LocalDisk { disk, uses } in &answer.disks {
        let disk = disk.clone().unwrap_or_default();
        let partitions: Vec<_> = disk.partitions.iter().map(|partition| partition.name.as_str()).collect();
        rows.push([
            disk.name.clone(),
            size(disk.bytes),
            if disk.read_only { format!("{}, read-only", disk.bus) } else { disk.bus.clone() },
            or_dash(at(&disk)),
            match disk.serials.first() {
                Some(serial) => serial.value.clone(),
                None if disk.silent => "(the disk does not answer)".to_owned(),
                None => "-".to_owned(),
            },
            or_dash(partitions.join(" ")),
            or_dash(uses.join(", ")),
        ]);
    }
    let mut widths = [0; 7];
    for row in &rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let mut text = String::new();
    for row in &rows {
        let cells: Vec<_> = row.iter().zip(widths).map(|(cell, width)| format!("{cell:width$}")).collect();
        text += cells.join("  ").trim_end();
        text.push('\n');
    }
    text
}

/// The answer for programs.
pub fn json(answer: &ListDisksResponse) -> Value {
    answer.disks.iter().map(one).collect()
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

/// Where it is: on SCSI below its controller, else its controller.
fn at(disk: &Disk) -> String {
    if disk.scsi_address.is_empty() { disk.pci_address.clone() } else { disk.scsi_address.clone() }
}

fn or_dash(text: String) -> String {
    if text.is_empty() { "-".to_owned() } else { text }
}

/// Such as `10 GiB` or `1.5 TiB`.
fn size(bytes: u64) -> String {
    const UNITS: [&str; 6] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
    let (mut whole, mut tenths, mut unit) = (bytes, 0, 0);
    while whole >= 1024 && unit + 1 < UNITS.len() {
        tenths = whole % 1024 * 10 / 1024;
        whole /= 1024;
        unit += 1;
    }
    let name = UNITS.get(unit).copied().unwrap_or_default();
    if tenths == 0 { format!("{whole} {name}") } else { format!("{whole}.{tenths} {name}") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::proto::v1::{Partition, SerialNumber};

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
        };
        assert_eq!(
            table(&answer),
            "NAME  SIZE     BUS     AT            SERIAL                      PARTITIONS  USED FOR\n\
             vdb   1.5 GiB  virtio  0000:00:06.0  data 1                      vdb1        /data, swap on /dev/vdb2\n\
             vdc   0 B      virtio  -             (the disk does not answer)  -           -\n"
        );
        let value = json(&answer);
        assert_eq!(value[0]["serials"][0]["value"], "data 1");
        assert_eq!(value[0]["partitions"][0]["number"], 1);
        assert_eq!((&value[0]["bytes"], &value[1]["silent"]), (&json!(3_u64 << 29), &json!(true)));
    }

    #[test]
    fn sizes() {
        for (bytes, words) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (10 << 30, "10 GiB"),
            ((1 << 40) - 1, "1023.9 GiB"),
            (u64::MAX, "16383.9 PiB"),
        ] {
            assert_eq!(size(bytes), words);
        }
    }
}
