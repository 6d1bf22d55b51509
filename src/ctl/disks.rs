//! `guestctl disks NAME`: the disks of one VM, as last reported by its guest.

use super::client::{Client, answer};
use super::print::Printer;
use super::{Error, json, words};
use crate::text;
use crate::wire::proto::v1::{
    Disk, ListVirtualMachineDisksRequest, ListVirtualMachineDisksResponse, SessionState,
};

/// Shows the disks, and warns if they were reported in an earlier session.
///
/// # Errors
/// Fails if the VM is unknown, its guest never reported its disks, the daemon does not answer, or standard
/// output cannot be written.
pub async fn run(mut client: Client, printer: &mut Printer, name: String) -> Result<(), Error> {
    let request = ListVirtualMachineDisksRequest { name: name.clone() };
    let told = answer(client.list_disks(request), &name).await?;
    let disks: Vec<_> = told.disks.iter().cloned().map(json::Disk::from).collect();
    printer.value(&disks, || rows(&told))?;
    if told.session() != SessionState::Connected {
        let time = words::time(told.last_heard.as_ref());
        printer.warn(&format!("there is no session with {name} now; these are its disks as of {time}"));
    }
    Ok(())
}

fn rows(told: &ListVirtualMachineDisksResponse) -> String {
    let mut rows = vec![["NAME", "SIZE", "BUS", "AT", "SERIAL", "PARTITIONS", "MOUNTED"].map(str::to_owned)];
    for disk in &told.disks {
        let partitions: Vec<_> = disk.partitions.iter().map(|partition| partition.name.as_str()).collect();
        let mounted: Vec<_> = told
            .file_systems
            .iter()
            .filter(|mounted| is_on(disk, &mounted.source))
            .map(|mounted| mounted.mount_point.as_str())
            .collect();
        rows.push([
            disk.name.clone(),
            text::size(disk.bytes),
            if disk.read_only { format!("{}, read-only", disk.bus) } else { disk.bus.clone() },
            text::or_dash(if disk.scsi_address.is_empty() { &disk.pci_address } else { &disk.scsi_address }),
            match disk.serials.first() {
                Some(serial) => serial.value.clone(),
                None if disk.silent => "(the disk does not answer)".to_owned(),
                None => "-".to_owned(),
            },
            text::or_dash(&partitions.join(" ")),
            text::or_dash(&mounted.join(" ")),
        ]);
    }
    text::table(&rows)
}

/// Returns whether `source`, such as `/dev/vda1` or `/dev/mapper/group-volume`, is the disk, a partition of
/// it, or a device on top of it.
fn is_on(disk: &Disk, source: &str) -> bool {
    let is_part = |name: &str| source.strip_prefix("/dev/") == Some(name);
    let is_alias = |alias: &str| !alias.is_empty() && source.strip_prefix("/dev/mapper/") == Some(alias);
    source == disk.file
        || disk.partitions.iter().any(|partition| is_part(&partition.name))
        || disk.holders.iter().any(|holder| is_part(&holder.name) || is_alias(&holder.alias))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::proto::v1::{DiskHolder, MountedFileSystem, Partition, SerialNumber};

    #[test]
    fn what_is_mounted_from_a_disk() {
        let disk = Disk {
            name: "sda".into(),
            file: "/dev/sda".into(),
            bus: "scsi".into(),
            scsi_address: "0:0:0:3".into(),
            bytes: 10 << 30,
            read_only: true,
            serials: vec![SerialNumber { value: "data-1".into(), source: "vpd80".into() }],
            partitions: vec![Partition { name: "sda1".into(), ..Partition::default() }],
            holders: vec![DiskHolder { name: "dm-0".into(), alias: "group-volume".into(), of: "sda".into() }],
            ..Disk::default()
        };
        let mounted = |source: &str, mount_point: &str| MountedFileSystem {
            source: source.into(),
            mount_point: mount_point.into(),
            r#type: "ext4".into(),
        };
        let told = ListVirtualMachineDisksResponse {
            disks: vec![disk],
            file_systems: vec![
                mounted("/dev/sda1", "/a"),
                mounted("/dev/mapper/group-volume", "/b"),
                mounted("/dev/sda11", "/c"),
                mounted("/dev/mapper/", "/d"),
            ],
            ..ListVirtualMachineDisksResponse::default()
        };
        assert_eq!(
            rows(&told),
            "NAME  SIZE    BUS              AT       SERIAL  PARTITIONS  MOUNTED\n\
             sda   10 GiB  scsi, read-only  0:0:0:3  data-1  sda1        /a /b\n"
        );
    }
}
