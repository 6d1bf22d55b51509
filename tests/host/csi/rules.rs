//! What the specification's tables of errors say, call by call.

use std::collections::HashMap;

use guestlet::wire::proto::csi::controller_service_capability::{self as capability, rpc::Type};
use guestlet::wire::proto::csi::volume_capability::access_mode::Mode;
use guestlet::wire::proto::csi::{self, VolumeContentSource};
use tonic::{Code, Status};

use super::{Asking, USUAL, block, mount, publishing, refused, serial, started, wanted};
use crate::lab::uuid;
use crate::metrics::ask;

const MIB: i64 = 1 << 20;

fn create(asking: &Asking, change: impl FnOnce(&mut csi::CreateVolumeRequest)) -> Result<(), Status> {
    let mut request = wanted("rules", 20 * MIB);
    change(&mut request);
    asking.create_volume(request).map(drop)
}

#[test]
fn what_this_controller_can_do_is_told() {
    let vms = started(&USUAL[..1], "");
    let answer = vms.of("a").controller_get_capabilities(csi::ControllerGetCapabilitiesRequest {}).unwrap();
    let one = |one: csi::ControllerServiceCapability| match one.r#type.unwrap() {
        capability::Type::Rpc(rpc) => rpc.r#type().as_str_name(),
    };
    let mut names: Vec<_> = answer.capabilities.into_iter().map(one).collect();
    names.sort_unstable();
    let mut expected: Vec<_> = [
        Type::CreateDeleteVolume,
        Type::ExpandVolume,
        Type::GetCapacity,
        Type::GetVolume,
        Type::ListVolumes,
        Type::ListVolumesPublishedNodes,
        Type::PublishReadonly,
        Type::PublishUnpublishVolume,
        Type::SingleNodeMultiWriter,
        Type::VolumeCondition,
    ]
    .map(|one| one.as_str_name())
    .to_vec();
    expected.sort_unstable();
    assert_eq!(names, expected);
}

#[test]
fn a_volume_that_cannot_be_is_refused_and_leaves_nothing() {
    let vms = started(&USUAL, "");
    let a = vms.of("a");
    let range = |required_bytes, limit_bytes| Some(csi::CapacityRange { required_bytes, limit_bytes });
    let invalid = Code::InvalidArgument;
    refused(create(&a, |new| new.name.clear()), invalid, "name is missing");
    refused(create(&a, |new| new.name = "x".repeat(129)), invalid, "name has 129 bytes");
    refused(create(&a, |new| new.name = "a\u{7}".into()), invalid, "name has control characters");
    refused(create(&a, |new| new.volume_capabilities.clear()), invalid, "volume_capabilities is missing");
    refused(
        create(&a, |new| new.volume_capabilities[0].access_type = None),
        invalid,
        "access_type is missing",
    );
    refused(
        create(&a, |new| new.volume_capabilities[0].access_mode = None),
        invalid,
        "access_mode is missing",
    );
    let disks = "volumes of this host are disks, which one node has at a time";
    for (mode, words) in [
        (Mode::Unknown, "access_mode is unknown"),
        (Mode::MultiNodeReaderOnly, disks),
        (Mode::MultiNodeSingleWriter, disks),
        (Mode::MultiNodeMultiWriter, disks),
    ] {
        refused(create(&a, |new| new.volume_capabilities = vec![mount(mode)]), invalid, words);
    }
    refused(create(&a, |new| new.capacity_range = range(-1, 0)), invalid, "negative");
    refused(create(&a, |new| new.capacity_range = range(5, 4)), invalid, "limit_bytes is less");
    refused(create(&a, |new| new.capacity_range = range(0, 4)), Code::OutOfRange, "no size of a volume");
    refused(
        create(&a, |new| new.capacity_range = range(i64::MAX, 0)),
        Code::OutOfRange,
        "no size of a volume",
    );
    let source = || Some(VolumeContentSource::default());
    refused(
        create(&a, |new| new.volume_content_source = source()),
        invalid,
        "volume_content_source is not supported",
    );
    let one = |key: &str, value: &str| HashMap::from([(key.to_owned(), value.to_owned())]);
    refused(
        create(&a, |new| new.mutable_parameters = one("iops", "5")),
        invalid,
        "mutable_parameters is not",
    );
    refused(create(&a, |new| new.parameters = one("speed", "5")), invalid, "unknown parameter \"speed\"");
    refused(
        create(&a, |new| new.parameters = one("hostStorageClass", "gold")),
        invalid,
        "\"gold\" is not a storage class that this cluster may use; it may use: fast, full, qcow",
    );
    refused(
        create(&a, |new| new.parameters = one("hostStorageClass", &"x".repeat(5000))),
        invalid,
        "more than 4096",
    );
    let huge = create(&a, |new| new.secrets = one("key", &"x".repeat(70_000)));
    assert!(huge.is_err(), "more than 64 KiB are not read");
    assert_eq!((a.all(), vms.files("fast")), (vec![], vec![]));
}

#[test]
fn a_name_is_one_volume() {
    let vms = started(&USUAL, "");
    let a = vms.of("a");
    // Any text will do for a name; files are not called so.
    let odd = format!("../{}é\u{1f4a9} 'x'/.", "n".repeat(100));
    let made = a.create(&odd, 20 * MIB).unwrap();
    assert_eq!(a.create(&odd, 20 * MIB).unwrap(), made);
    assert_eq!(a.create(&odd, 5 * MIB).unwrap(), made, "it is large enough");
    assert_eq!(a.create_in(&odd, 0, Some("fast")).unwrap(), made);
    refused(a.create(&odd, 21 * MIB), Code::AlreadyExists, "already exists, with 20971520 bytes");
    refused(a.create_in(&odd, 20 * MIB, Some("full")), Code::AlreadyExists, "of the storage class fast");
    let range = Some(csi::CapacityRange { required_bytes: 0, limit_bytes: 15 * MIB });
    let small = csi::CreateVolumeRequest { capacity_range: range, ..wanted(&odd, 0) };
    refused(a.create_volume(small), Code::AlreadyExists, "already exists, with 20971520 bytes");
    assert_eq!(vms.files("fast").len(), 2, "a record and an image");
    // As large as it has become is good too.
    a.expand(&made.volume_id, 40 * MIB).unwrap();
    assert_eq!(a.create(&odd, 30 * MIB).unwrap().capacity_bytes, 40 * MIB);
    a.delete(&made.volume_id).unwrap();
    assert_ne!(a.create(&odd, 20 * MIB).unwrap().volume_id, made.volume_id, "no identifier is used twice");
}

#[test]
fn sizes_are_rounded_up_within_their_limit() {
    let vms = started(&USUAL[..1], "");
    let a = vms.of("a");
    for (number, required, limit, expected) in [
        (1, 1, 0, 10 * MIB),
        (2, 11 * MIB, 0, 12 * MIB),
        (3, 11 * MIB, 11 * MIB, 11 * MIB),
        (4, 0, 0, 1024 * MIB),
    ] {
        let mut request = wanted(&format!("v{number}"), required);
        request.capacity_range = Some(csi::CapacityRange { required_bytes: required, limit_bytes: limit });
        let made = a.create_volume(request).unwrap().volume.unwrap();
        assert_eq!(made.capacity_bytes, expected, "{required} {limit}");
    }
    let without = csi::CreateVolumeRequest { capacity_range: None, ..wanted("v5", 0) };
    assert_eq!(a.create_volume(without).unwrap().volume.unwrap().capacity_bytes, 1024 * MIB);
}

#[test]
fn what_is_missing_in_other_calls_is_named() {
    let vms = started(&USUAL, "");
    let a = vms.of("a");
    let id = a.create("v", 20 * MIB).unwrap().volume_id;
    let invalid = Code::InvalidArgument;
    let long = "x".repeat(129);
    refused(a.delete(""), invalid, "volume_id is missing");
    refused(a.delete(&long), invalid, "volume_id has 129 bytes");
    refused(a.publish("", "a"), invalid, "volume_id is missing");
    refused(a.publish(&id, ""), invalid, "node_id is missing");
    refused(a.publish(&id, &"n".repeat(257)), invalid, "node_id has 257 bytes");
    let mut request = publishing(&id, "a");
    request.volume_capability = None;
    refused(a.controller_publish_volume(request.clone()), invalid, "volume_capability is missing");
    request.volume_capability = Some(mount(Mode::MultiNodeMultiWriter));
    refused(a.controller_publish_volume(request), invalid, "is a disk, which one node has at a time");
    refused(a.unpublish("", "a"), invalid, "volume_id is missing");
    let request = csi::ControllerExpandVolumeRequest { volume_id: id.clone(), ..Default::default() };
    refused(a.controller_expand_volume(request), invalid, "capacity_range is missing");
    refused(a.expand("", 1), invalid, "volume_id is missing");
    refused(a.expand(&id, i64::MAX), Code::OutOfRange, "no size of a volume");
    refused(
        a.controller_get_volume(csi::ControllerGetVolumeRequest::default()),
        invalid,
        "volume_id is missing",
    );
    let request = csi::ValidateVolumeCapabilitiesRequest::default();
    refused(a.validate_volume_capabilities(request), invalid, "volume_id is missing");
    let request = csi::ValidateVolumeCapabilitiesRequest { volume_id: id.clone(), ..Default::default() };
    refused(a.validate_volume_capabilities(request), invalid, "volume_capabilities is missing");
    let request = csi::ListVolumesRequest { max_entries: -1, ..Default::default() };
    refused(a.list_volumes(request), invalid, "max_entries is negative");
    assert!(vms.qemu("a").devices().is_empty());
}

#[test]
fn what_is_not_there_is_not_found_or_gone_already() {
    let vms = started(&USUAL, "");
    let a = vms.of("a");
    let id = a.create("v", 20 * MIB).unwrap().volume_id;
    let found = Code::NotFound;
    // Of the same pool, so that this host can tell.
    let gone = id.replace(serial(&id), "aaaaaaaaaaaaaaaaaaaa");
    for none in [gone.as_str(), "pvc-11111111-2222-3333-4444-555555555555", "../../etc/passwd", "é\u{0}"] {
        a.delete(none).unwrap();
        a.unpublish(none, "a").unwrap();
        refused(a.publish(none, "a"), found, "there is no volume");
        refused(a.expand(none, MIB), found, "there is no volume");
        let request = csi::ControllerGetVolumeRequest { volume_id: none.into() };
        refused(a.controller_get_volume(request), found, "there is no volume");
        let request = csi::ValidateVolumeCapabilitiesRequest {
            volume_id: none.into(),
            volume_capabilities: vec![block()],
            ..Default::default()
        };
        refused(a.validate_volume_capabilities(request), found, "there is no volume");
    }
    for node in ["x", &uuid(9), "../a"] {
        refused(a.publish(&id, node), found, "is not on this host");
        a.unpublish(&id, node).unwrap();
    }
}

#[test]
fn a_volume_is_on_one_node_in_one_way() {
    let mut vms = started(&USUAL, "");
    let (a, b) = (vms.of("a"), vms.of("b"));
    let id = a.create("v", 20 * MIB).unwrap().volume_id;
    a.publish(&id, &uuid(1).to_uppercase()).unwrap();
    let read_only = csi::ControllerPublishVolumeRequest { readonly: true, ..publishing(&id, "a") };
    refused(
        a.controller_publish_volume(read_only.clone()),
        Code::AlreadyExists,
        "already published to this node, writable",
    );
    refused(b.publish(&id, "b"), Code::FailedPrecondition, "it can be on one at a time");
    // Of a node that does not have it, it is taken away already.
    a.unpublish(&id, "b").unwrap();
    assert_eq!(vms.qemu("a").devices().len(), 1);
    vms.end("a");
    refused(b.publish(&id, "a"), Code::Unavailable, "is off");
    b.publish(&id, "b").unwrap();
    assert_eq!(b.all(), [(id.clone(), vec!["b".to_owned()])]);
    assert_eq!(vms.qemu("b").devices().len(), 1);
    b.unpublish(&id, "b").unwrap();

    let read_only = csi::ControllerPublishVolumeRequest { node_id: "b".into(), ..read_only };
    b.controller_publish_volume(read_only).unwrap();
    assert_eq!(vms.qemu("b").nodes()[0]["read-only"], true);
    refused(b.publish(&id, "b"), Code::AlreadyExists, "already published to this node, read-only");
}

/// An agent asks so for the server of a share that its node has. One from which a volume was taken does not take it back by asking.
#[test]
fn who_asks_where_a_share_is_attaches_nothing() {
    let vms = started(&USUAL, "");
    let a = vms.of("a");
    let id = a.create("v", 20 * MIB).unwrap().volume_id;
    let question = csi::ControllerPublishVolumeRequest {
        volume_context: [("guestlet.io/where".to_owned(), "1".to_owned())].into(),
        volume_capability: None,
        ..publishing(&id, "a")
    };
    refused(a.controller_publish_volume(question.clone()), Code::NotFound, "is not published to the node a");
    assert_eq!(a.all(), [(id, Vec::new())]);
    assert!(vms.qemu("a").devices().is_empty());
    let missing = csi::ControllerPublishVolumeRequest { volume_id: String::new(), ..question };
    refused(a.controller_publish_volume(missing), Code::InvalidArgument, "volume_id is missing");
}

#[test]
fn capabilities_are_confirmed_or_explained() {
    let vms = started(&USUAL, "");
    let a = vms.of("a");
    let id = a.create("v", 20 * MIB).unwrap().volume_id;
    let validate = |volume_capabilities| {
        let volume_id = id.clone();
        let request =
            csi::ValidateVolumeCapabilitiesRequest { volume_id, volume_capabilities, ..Default::default() };
        a.validate_volume_capabilities(request).unwrap()
    };
    let good = vec![mount(Mode::SingleNodeWriter), mount(Mode::SingleNodeMultiWriter), block()];
    assert_eq!(validate(good.clone()).confirmed.unwrap().volume_capabilities, good);
    let bad = validate(vec![block(), mount(Mode::MultiNodeMultiWriter)]);
    assert!(bad.confirmed.is_none() && bad.message.contains("can be on one node at a time"), "{bad:?}");
}

#[test]
fn volumes_are_listed_in_parts() {
    let vms = started(&USUAL, "");
    let a = vms.of("a");
    let mut made: Vec<_> =
        (0..7).map(|number| a.create(&format!("v{number}"), MIB).unwrap().volume_id).collect();
    vms.of("c").create("v0", MIB).unwrap();
    made.sort();
    let list = |starting_token: &str, max_entries| {
        let request = csi::ListVolumesRequest { max_entries, starting_token: starting_token.into() };
        a.list_volumes(request)
    };
    let (mut token, mut seen) = (String::new(), Vec::new());
    loop {
        let part = list(&token, 3).unwrap();
        assert!(part.entries.len() <= 3);
        seen.extend(part.entries.into_iter().map(|entry| entry.volume.unwrap().volume_id));
        token = part.next_token;
        if token.is_empty() {
            break;
        }
        if seen.len() == 3 {
            // What the next part begins behind is gone by then.
            a.delete(&seen[2]).unwrap();
        }
    }
    assert_eq!(seen, made);
    for token in ["x", "3", "after:", "after:../x", &"t".repeat(1000)] {
        refused(list(token, 0), Code::Aborted, "starting_token was not issued by this host");
    }
}

#[test]
fn a_volume_tells_how_it_is() {
    let vms = started(&USUAL, "");
    let a = vms.of("a");
    let id = a.create("v", 20 * MIB).unwrap().volume_id;
    let get = || a.controller_get_volume(csi::ControllerGetVolumeRequest { volume_id: id.clone() }).unwrap();
    a.publish(&id, "a").unwrap();
    let (volume, status) = (get().volume.unwrap(), get().status.unwrap());
    assert_eq!((volume.volume_id.as_str(), volume.capacity_bytes), (id.as_str(), 20 * MIB));
    assert_eq!(status.published_node_ids, ["a"]);
    assert!(!status.volume_condition.unwrap().abnormal);
    std::fs::remove_file(vms.file("fast", &id, "raw")).unwrap();
    // Images are looked at beside the calls, every few seconds.
    vms.lab.until("it is told", || get().status.unwrap().volume_condition.unwrap().abnormal);
    let condition = get().status.unwrap().volume_condition.unwrap();
    assert_eq!(condition.message, "its image is missing");
}

#[test]
fn the_room_in_pools_is_told_to_prometheus() {
    let vms = started(&USUAL[..1], "");
    let bytes = |class: &str, kind: &str| {
        let name = format!("guestlet_host_pool_bytes{{class=\"{class}\",kind=\"{kind}\"}} ");
        let answer = ask(&vms.lab, "GET /metrics HTTP/1.1");
        answer.lines().find_map(|line| line.strip_prefix(&name)?.parse::<u64>().ok())
    };
    // Pools are looked at when something is asked of them.
    vms.of("a").create("v", 20 * MIB).unwrap();
    for class in ["fast", "full", "qcow"] {
        vms.lab.until("it is known", || bytes(class, "size").is_some());
        let (size, free) = (bytes(class, "size").unwrap(), bytes(class, "free").unwrap());
        assert!(size > 0 && free <= size, "{free} of {size}");
    }
}

#[test]
fn room_is_told_within_the_quota() {
    let vms = started(
        &USUAL,
        "[cluster.dev]\nmax-bytes = '100M'\nclasses = ['fast', 'full']\n[cluster.prod]\nmax-volumes = 0",
    );
    let room = |vm: &str, class: Option<&str>| {
        let parameters =
            class.map(|class| ("hostStorageClass".to_owned(), class.to_owned())).into_iter().collect();
        vms.of(vm).get_capacity(csi::GetCapacityRequest { parameters, ..Default::default() })
    };
    let dev = room("a", None).unwrap();
    assert_eq!((dev.available_capacity, dev.maximum_volume_size), (100 * MIB, Some(100 * MIB)));
    assert_eq!(dev.minimum_volume_size, Some(10 * MIB));
    vms.of("a").create_in("v", 60 * MIB, Some("full")).unwrap();
    assert_eq!(room("b", Some("full")).unwrap().available_capacity, 40 * MIB);
    assert_eq!(room("c", None).unwrap().available_capacity, 0);
    refused(room("a", Some("qcow")), Code::InvalidArgument, "it may use: fast, full");
    let many = csi::GetCapacityRequest {
        volume_capabilities: vec![mount(Mode::MultiNodeMultiWriter)],
        ..Default::default()
    };
    assert_eq!(vms.of("a").get_capacity(many).unwrap().available_capacity, 0);
}
