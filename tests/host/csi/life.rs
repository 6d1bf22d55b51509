//! The life of a volume.

use std::os::unix::fs::MetadataExt as _;

use tonic::Code;

use super::{USUAL, block, refused, serial, started};
use crate::lab::uuid;

const MIB: i64 = 1 << 20;

#[test]
fn a_volume_is_made_plugged_unplugged_and_removed() {
    let vms = started(&USUAL, "");
    let a = vms.of("a");
    let made = a.create("pvc-1", 100 * MIB).unwrap();
    let id = made.volume_id.as_str();
    assert!(id.starts_with("fast.") && serial(id).len() == 20, "{id}");
    assert_eq!(made.capacity_bytes, 100 * MIB);
    assert_eq!(a.create("pvc-1", 100 * MIB).unwrap(), made);
    let image = vms.file("fast", id, "raw");
    let found = image.metadata().unwrap();
    assert_eq!((found.len(), found.mode() & 0o777), (100 << 20, 0o600));
    assert!(found.blocks() < 64, "it is thin");

    let context = a.publish(id, &uuid(1)).unwrap();
    assert_eq!(context["guestlet.io/serial"], serial(id));
    assert_eq!(context["guestlet.io/bus"], "scsi");
    assert_eq!(context.len(), 2);
    let device = &vms.qemu("a").devices()[0];
    assert_eq!([&device["driver"], &device["serial"]], ["scsi-hd", serial(id)]);
    assert_eq!(a.publish(id, &uuid(1)).unwrap(), context);
    assert_eq!(a.all(), [(id.to_owned(), vec![uuid(1)])]);
    refused(a.delete(id), Code::FailedPrecondition, "is published to the node");
    refused(a.publish(id, &uuid(2)), Code::FailedPrecondition, &format!("published to the node {}", uuid(1)));

    assert_eq!(a.expand(id, 150 * MIB).unwrap(), 150 * MIB);
    assert_eq!(vms.qemu("a").nodes()[0]["size"], 150 << 20);

    a.unpublish(id, &uuid(1)).unwrap();
    assert!(vms.qemu("a").devices().is_empty() && vms.qemu("a").nodes().is_empty());
    assert_eq!(vms.guest("a").disks().asked, [format!("release {}", serial(id))]);
    a.unpublish(id, &uuid(1)).unwrap();
    assert_eq!(a.all(), [(id.to_owned(), vec![])]);
    // By the other VM, under its name, and asked for by that.
    let b = vms.of("b");
    b.publish(id, "b").unwrap();
    assert_eq!(a.all(), [(id.to_owned(), vec!["b".to_owned()])]);
    b.unpublish(id, "").unwrap();

    b.delete(id).unwrap();
    b.delete(id).unwrap();
    assert_eq!(vms.files("fast"), [""; 0]);
    assert_eq!(a.all(), []);
}

#[test]
fn each_pool_keeps_its_volumes_in_its_own_way() {
    let vms = started(&USUAL, "");
    let a = vms.of("a");
    let full = a.create_in("full", 20 * MIB, Some("full")).unwrap().volume_id;
    let found = vms.file("full", &full, "raw").metadata().unwrap();
    assert!(found.len() == 20 << 20 && found.blocks() * 512 >= 20 << 20, "{found:?}");
    a.expand(&full, 30 * MIB).unwrap();
    let found = vms.file("full", &full, "raw").metadata().unwrap();
    assert!(found.len() == 30 << 20 && found.blocks() * 512 >= 30 << 20, "{found:?}");

    let qcow = a.create_in("qcow", 20 * MIB, Some("qcow")).unwrap().volume_id;
    assert_eq!(&std::fs::read(vms.file("qcow", &qcow, "qcow2")).unwrap()[..4], b"QFI\xfb");
    // While no VM has it, nobody is there who could make it larger: that is done when it is plugged.
    a.expand(&qcow, 30 * MIB).unwrap();
    a.publish(&qcow, "a").unwrap();
    assert_eq!(vms.qemu("a").nodes()[0]["driver"], "qcow2");
    assert_eq!(vms.qemu("a").nodes()[0]["size"], 30 << 20);
    let request = guestlet::wire::proto::csi::ControllerExpandVolumeRequest {
        volume_id: qcow,
        capacity_range: Some(guestlet::wire::proto::csi::CapacityRange { required_bytes: 1, limit_bytes: 0 }),
        volume_capability: Some(block()),
        ..Default::default()
    };
    let answer = a.controller_expand_volume(request).unwrap();
    assert_eq!((answer.capacity_bytes, answer.node_expansion_required), (30 * MIB, false));
}
