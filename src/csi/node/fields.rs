//! Validation of the fields of requests. A missing or invalid field is `INVALID_ARGUMENT`, with the field's
//! name. Pure.

use std::collections::HashMap;

use tonic::Status;

use crate::csi::status::missing;
use crate::guest::disks::location::Bus;
use crate::guest::pod_volumes::share::{self, Share};
use crate::guest::pod_volumes::{Access, disk};
use crate::guest::volumes::format::Kind;
use crate::wire::proto::csi::volume_capability::access_mode::Mode;
use crate::wire::proto::csi::volume_capability::{AccessMode, AccessType};
use crate::wire::proto::csi::{CapacityRange, VolumeCapability};

/// Longest name of a volume in bytes; CSI allows 128.
const LONGEST_NAME: usize = 256;
/// Keys of the context that the host half returns for an attached disk.
const SERIAL: &str = "guestlet.io/serial";
const BUS: &str = "guestlet.io/bus";
/// Keys of the context for a share: its server, and how it is to be mounted.
const NFS_SERVER: &str = "guestlet.io/nfs-server";
const NFS_PATH: &str = "guestlet.io/nfs-path";
const NFS_OPTIONS: &str = "guestlet.io/nfs-options";
/// File system types that volumes may have.
const KINDS: [Kind; 3] = [Kind::Ext4, Kind::Xfs, Kind::Btrfs];

fn wrong(words: impl Into<String>) -> Status {
    Status::invalid_argument(words)
}

/// Returns the name of the volume.
pub fn volume(id: &str) -> Result<String, Status> {
    if id.is_empty() {
        return Err(missing("volume_id"));
    }
    if id.len() > LONGEST_NAME || id.contains(char::is_control) {
        return Err(wrong("volume_id is too long, or has control characters in it"));
    }
    Ok(id.to_owned())
}

/// Returns a path that must be present.
pub fn path(field: &'static str, path: String) -> Result<String, Status> {
    if path.is_empty() { Err(missing(field)) } else { Ok(path) }
}

/// Returns the properties by which the disk of a volume is found.
pub fn disk(volume: String, context: &mut HashMap<String, String>) -> Result<disk::Wanted, Status> {
    let serial = context.remove(SERIAL).filter(|serial| !serial.is_empty());
    let bus = match context.remove(BUS).as_deref() {
        None | Some("") => None,
        Some("scsi") => Some(Bus::Scsi),
        Some("virtio") => Some(Bus::Virtio),
        Some(other) => {
            return Err(wrong(format!("publish_context: {BUS} is {other:?}; use scsi or virtio")));
        }
    };
    Ok(disk::Wanted { volume, serial, bus })
}

/// Returns where the share of a volume is served; `None` if the volume is a disk.
pub fn share(volume: &str, context: &mut HashMap<String, String>) -> Result<Option<Share>, Status> {
    let Some(server) = context.remove(NFS_SERVER).filter(|server| !server.is_empty()) else {
        return Ok(None);
    };
    let server = server.parse().map_err(|_| {
        wrong(format!("publish_context: {NFS_SERVER} is {server:?}, which is not an IP address"))
    })?;
    let path = context.remove(NFS_PATH).unwrap_or_default();
    let is_odd = |part: &str| matches!(part, "." | "..");
    if !path.starts_with('/') || path.contains(char::is_control) || path.split('/').any(is_odd) {
        return Err(wrong(format!(
            "publish_context: {NFS_PATH} is {path:?}, which is not the path of an export"
        )));
    }
    let options = context.remove(NFS_OPTIONS).unwrap_or_default();
    let options = options.split(',').map(str::trim).filter(|option| !option.is_empty());
    let options = options.map(str::to_owned).collect();
    Ok(Some(Share { volume: volume.to_owned(), server, path, options }))
}

/// Returns how a share is to be used.
pub fn share_usage(capability: Option<VolumeCapability>) -> Result<share::Usage, Status> {
    let capability = capability.ok_or_else(|| missing("volume_capability"))?;
    let mode = capability.access_mode.ok_or_else(|| missing("volume_capability.access_mode"))?;
    let access = capability.access_type.ok_or_else(|| missing("volume_capability.access_type"))?;
    let mode = Mode::try_from(mode.mode).unwrap_or(Mode::Unknown);
    if mode == Mode::Unknown {
        return Err(wrong("volume_capability.access_mode is unknown"));
    }
    // The file system type is up to the server, and so is the ownership of files.
    let AccessType::Mount(mount) = access else {
        return Err(wrong("volume_capability: a share is a file system, not a block device"));
    };
    let read_only = matches!(mode, Mode::SingleNodeReaderOnly | Mode::MultiNodeReaderOnly);
    let single = mode == Mode::SingleNodeSingleWriter;
    Ok(share::Usage { options: mount.mount_flags, read_only, single })
}

/// Usage of a volume.
#[derive(Debug, PartialEq, Eq)]
pub struct Usage {
    pub access: Access,
    pub read_only: bool,
    /// True if only one pod may use the volume at a time.
    pub single: bool,
}

/// Returns how a volume is to be used.
pub fn usage(capability: Option<VolumeCapability>) -> Result<Usage, Status> {
    let capability = capability.ok_or_else(|| missing("volume_capability"))?;
    let mode = capability.access_mode.ok_or_else(|| missing("volume_capability.access_mode"))?;
    let access = capability.access_type.ok_or_else(|| missing("volume_capability.access_type"))?;
    let AccessMode { mode } = mode;
    let mode = Mode::try_from(mode).unwrap_or(Mode::Unknown);
    let several = matches!(mode, Mode::MultiNodeSingleWriter | Mode::MultiNodeMultiWriter);
    let access = match access {
        _ if mode == Mode::Unknown => {
            return Err(wrong("volume_capability.access_mode is unknown"));
        }
        AccessType::Block(_) => Access::Block,
        AccessType::Mount(_) if several => {
            let words = "volume_capability: a file system on a disk cannot be written by several nodes";
            return Err(wrong(words));
        }
        AccessType::Mount(mount) => Access::Mount {
            kind: kind(mount.fs_type)?,
            options: mount.mount_flags,
            group: group(&mount.volume_mount_group)?,
        },
    };
    let read_only = matches!(mode, Mode::SingleNodeReaderOnly | Mode::MultiNodeReaderOnly);
    Ok(Usage { access, read_only, single: mode == Mode::SingleNodeSingleWriter })
}

fn kind(name: String) -> Result<Option<String>, Status> {
    if name.is_empty() {
        return Ok(None);
    }
    if KINDS.iter().any(|kind| kind.name() == name) {
        return Ok(Some(name));
    }
    Err(wrong(format!("volume_capability.mount.fs_type is {name:?}; use ext4, xfs or btrfs")))
}

fn group(number: &str) -> Result<Option<u32>, Status> {
    if number.is_empty() {
        return Ok(None);
    }
    // The largest number means that no group is set.
    let plain = number.bytes().all(|byte| byte.is_ascii_digit());
    match number.parse::<u32>() {
        Ok(group) if plain && group != u32::MAX => Ok(Some(group)),
        _ => Err(wrong("volume_capability.mount.volume_mount_group is not a group number")),
    }
}

/// Returns the required size and the limit in bytes; 0 for no bound.
pub fn range(range: Option<CapacityRange>) -> Result<(u64, u64), Status> {
    let CapacityRange { required_bytes, limit_bytes } = range.unwrap_or_default();
    let bytes = |bytes: i64| u64::try_from(bytes).map_err(|_| wrong("capacity_range has a size below 0"));
    let (required, limit) = (bytes(required_bytes)?, bytes(limit_bytes)?);
    if limit != 0 && required > limit {
        return Err(wrong("capacity_range: required_bytes is more than limit_bytes"));
    }
    Ok((required, limit))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::wire::proto::csi::volume_capability::{BlockVolume, MountVolume};

    fn mount(kind: &str, group: &str) -> AccessType {
        AccessType::Mount(MountVolume {
            fs_type: kind.to_owned(),
            mount_flags: vec!["noatime".to_owned()],
            volume_mount_group: group.to_owned(),
        })
    }

    fn used(access: Option<AccessType>, mode: i32) -> Result<Usage, String> {
        let access_mode = Some(AccessMode { mode });
        let capability = VolumeCapability { access_type: access, access_mode };
        usage(Some(capability)).map_err(|status| status.message().to_owned())
    }

    #[test]
    fn capabilities() {
        let block = || Some(AccessType::Block(BlockVolume {}));
        let writer = Mode::SingleNodeWriter.into();
        assert!(usage(None).unwrap_err().message().contains("volume_capability is missing"));
        assert!(used(None, writer).unwrap_err().contains("access_type is missing"));
        for mode in [0, 8, -1] {
            assert!(used(block(), mode).unwrap_err().contains("access_mode"), "{mode}");
        }
        let expected = Usage { access: Access::Block, read_only: false, single: false };
        assert_eq!(used(block(), Mode::MultiNodeMultiWriter.into()).unwrap(), expected);
        assert!(
            used(Some(mount("", "")), Mode::MultiNodeMultiWriter.into())
                .unwrap_err()
                .contains("several nodes")
        );
        let access = Access::Mount {
            kind: Some("xfs".to_owned()),
            options: vec!["noatime".to_owned()],
            group: Some(4711),
        };
        let expected = Usage { access, read_only: true, single: false };
        assert_eq!(used(Some(mount("xfs", "4711")), Mode::MultiNodeReaderOnly.into()).unwrap(), expected);
        assert!(used(Some(mount("", "")), Mode::SingleNodeSingleWriter.into()).unwrap().single);
        for (kind, number) in
            [("ext3", ""), ("../x", ""), ("", "wheel"), ("", "-1"), ("", "+5"), ("", "4294967295")]
        {
            used(Some(mount(kind, number)), writer).unwrap_err();
        }
    }

    #[test]
    fn what_is_said_of_shares() {
        let told = |pairs: &[(&str, &str)]| {
            let mut context =
                pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
            share("v", &mut context).map_err(|status| status.message().to_owned())
        };
        assert_eq!(told(&[(SERIAL, "a")]).unwrap(), None);
        let options = vec!["vers=4.1".to_owned(), "soft".to_owned()];
        let expected =
            Share { volume: "v".into(), server: [10, 0, 0, 1].into(), path: "/pvc-1".into(), options };
        let all = [(NFS_SERVER, "10.0.0.1"), (NFS_PATH, "/pvc-1"), (NFS_OPTIONS, "vers=4.1, soft,")];
        assert_eq!(told(&all).unwrap(), Some(expected));
        for (server, path, words) in [
            ("nfs.example.org", "/a", "is not an IP address"),
            ("10.0.0.1 -o x", "/a", "is not an IP address"),
            ("10.0.0.1", "", "is not the path of an export"),
            ("10.0.0.1", "/../a", "is not the path of an export"),
            ("10.0.0.1", "/a\nb", "is not the path of an export"),
        ] {
            let error = told(&[(NFS_SERVER, server), (NFS_PATH, path)]).unwrap_err();
            assert!(error.contains(words), "{error}");
        }
        let used = |access, mode: Mode| {
            let access_mode = Some(AccessMode { mode: mode.into() });
            share_usage(Some(VolumeCapability { access_type: Some(access), access_mode }))
        };
        assert!(used(mount("ext4", ""), Mode::MultiNodeReaderOnly).unwrap().read_only);
        assert!(!used(mount("", "7"), Mode::MultiNodeMultiWriter).unwrap().read_only);
        let error = used(AccessType::Block(BlockVolume {}), Mode::MultiNodeMultiWriter).unwrap_err();
        assert!(error.message().contains("not a block device"), "{error}");
    }

    #[test]
    fn what_is_said_of_disks() {
        let told = |pairs: &[(&str, &str)]| {
            let mut context =
                pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
            disk("v".to_owned(), &mut context).map(|wanted| (wanted.serial, wanted.bus))
        };
        assert_eq!(told(&[]).unwrap(), (None, None));
        assert_eq!(
            told(&[(SERIAL, "a"), (BUS, "scsi"), ("x", "y")]).unwrap(),
            (Some("a".to_owned()), Some(Bus::Scsi))
        );
        told(&[(BUS, "floppy")]).unwrap_err();
    }

    proptest! {
        #[test]
        fn only_sizes_that_make_sense_are_taken(required_bytes: i64, limit_bytes: i64) {
            match range(Some(CapacityRange { required_bytes, limit_bytes })) {
                Ok((required, limit)) => prop_assert!(limit == 0 || required <= limit),
                Err(_) => prop_assert!(
                    required_bytes < 0 || limit_bytes < 0 || (limit_bytes != 0 && required_bytes > limit_bytes)
                ),
            }
        }

        #[test]
        fn names_that_are_taken_can_be_logged(name: String) {
            if let Ok(name) = volume(&name) {
                prop_assert!(!name.is_empty() && !name.contains(char::is_control));
            }
        }

        #[test]
        fn any_group_and_kind_will_do(text: String) {
            let _ = (group(&text), kind(text.clone()));
        }
    }
}
