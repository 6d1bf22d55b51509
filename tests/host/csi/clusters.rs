//! Who may do what: clusters do not see each other, and have no more than they may.

use guestlet::transport::http2::ORIGIN;
use guestlet::wire::proto::csi;
use guestlet::wire::proto::v1::WhoAmIRequest;
use guestlet::wire::proto::v1::host_client::HostClient;
use tonic::Code;

use super::{Asking, Machines, USUAL, block, refused, started, wait, wanted};
use crate::hypervisor::Manner;
use crate::lab::{assert_fails, uuid};

const MIB: i64 = 1 << 20;

#[test]
fn clusters_do_not_see_each_other() {
    let vms = started(&USUAL, "");
    let (a, c) = (vms.of("a"), vms.of("c"));
    let (ours, theirs) = (a.create("v", 20 * MIB).unwrap(), c.create("v", 30 * MIB).unwrap());
    assert_ne!(ours.volume_id, theirs.volume_id, "names are each cluster's own");
    a.publish(&ours.volume_id, "a").unwrap();
    for (who, id) in [(&c, &ours.volume_id), (&a, &theirs.volume_id)] {
        let none = format!("there is no volume {id:?}");
        let found = Code::NotFound;
        refused(who.publish(id, "c"), found, &none);
        refused(who.unpublish(id, "a"), found, &none);
        refused(who.unpublish(id, ""), found, &none);
        refused(who.delete(id), found, &none);
        refused(who.expand(id, 50 * MIB), found, &none);
        let volume_id = id.clone();
        refused(who.controller_get_volume(csi::ControllerGetVolumeRequest { volume_id }), found, &none);
        let request = csi::ValidateVolumeCapabilitiesRequest {
            volume_id: id.clone(),
            volume_capabilities: vec![block()],
            ..Default::default()
        };
        refused(who.validate_volume_capabilities(request), found, &none);
    }
    // Nor their VMs, by whatever name.
    for node in ["c".to_owned(), uuid(3)] {
        refused(a.publish(&ours.volume_id, &node), Code::NotFound, "is not on this host");
    }
    for node in ["a".to_owned(), uuid(1)] {
        refused(c.publish(&theirs.volume_id, &node), Code::NotFound, "is not on this host");
    }
    assert_eq!(a.all(), [(ours.volume_id.clone(), vec!["a".to_owned()])]);
    assert_eq!(c.all(), [(theirs.volume_id.clone(), vec![])]);
    assert_eq!((vms.qemu("a").devices().len(), vms.qemu("c").devices().len()), (1, 0));
    // A token that leads behind another's volume shows nothing of it.
    let request =
        csi::ListVolumesRequest { starting_token: format!("after:{}", ours.volume_id), max_entries: 0 };
    let seen = c.list_volumes(request).unwrap();
    assert!(seen.entries.iter().all(|entry| entry.volume.as_ref().unwrap().volume_id == theirs.volume_id));
}

#[test]
fn a_cluster_has_no_more_than_it_may() {
    let mut vms = started(
        &USUAL,
        "[cluster.dev]\nmax-volumes = 2\nmax-bytes = '100M'\nclasses = ['fast']\n[cluster.prod]\nclasses = ['full']",
    );
    let (a, c) = (vms.of("a"), vms.of("c"));
    let full = Code::ResourceExhausted;
    let first = a.create("one", 60 * MIB).unwrap().volume_id;
    refused(a.create("two", 60 * MIB), full, "quota: the volumes of the cluster dev have 62914560 bytes");
    a.create("two", 20 * MIB).unwrap();
    refused(a.create("three", MIB), full, "quota: the cluster dev has 2 volumes, and may have at most 2");
    assert_eq!(a.create("one", 60 * MIB).unwrap().volume_id, first, "what is there is there");
    refused(a.expand(&first, 90 * MIB), full, "quota");
    assert_eq!(a.expand(&first, 80 * MIB).unwrap(), 80 * MIB);
    refused(a.create_in("x", MIB, Some("full")), Code::InvalidArgument, "it may use: fast");
    refused(c.create_in("x", MIB, Some("fast")), Code::InvalidArgument, "it may use: full");
    assert!(c.create("x", MIB).unwrap().volume_id.starts_with("full."), "the only one it may use");
    a.delete(&first).unwrap();
    a.create("three", MIB).unwrap();
    // It holds at once when the settings change.
    vms.lab.edit("max-volumes = 2", "max-volumes = 3");
    vms.lab.until("there may be more", || a.create("four", MIB).is_ok());
}

#[test]
fn who_asks_at_the_same_time_has_no_more_either() {
    let vms = started(&USUAL, "[cluster.dev]\nmax-volumes = 3");
    let made = std::thread::scope(|scope| {
        let create = |number: usize| {
            let asking = vms.of(if number.is_multiple_of(2) { "a" } else { "b" });
            scope.spawn(move || asking.create_in(&format!("v{number}"), 20 * MIB, Some("full")))
        };
        let calls: Vec<_> = (0..12).map(create).collect();
        calls.into_iter().flat_map(|call| call.join().unwrap()).count()
    });
    assert_eq!((made, vms.of("a").all().len(), vms.files("full").len()), (3, 3, 6));
}

#[test]
fn only_those_may_ask_that_the_settings_say() {
    let vms = started(&[USUAL[0], USUAL[1], ("d", 4, "")], "[cluster.dev]\ncontrollers = ['a']");
    let (a, b, d) = (vms.of("a"), vms.of("b"), vms.of("d"));
    let id = a.create("v", 20 * MIB).unwrap().volume_id;
    let denied = Code::PermissionDenied;
    for (who, words) in [(&b, "the VM b may not act for the cluster dev"), (&d, "belongs to no cluster")] {
        refused(who.create("w", MIB), denied, words);
        refused(who.publish(&id, "b"), denied, words);
        refused(who.unpublish(&id, "a"), denied, words);
        refused(who.delete(&id), denied, words);
        refused(who.expand(&id, MIB), denied, words);
        refused(who.list_volumes(csi::ListVolumesRequest::default()), denied, words);
        refused(who.get_capacity(csi::GetCapacityRequest::default()), denied, words);
        refused(who.controller_get_volume(csi::ControllerGetVolumeRequest::default()), denied, words);
    }
    // It may have volumes all the same.
    a.publish(&id, "b").unwrap();
    assert_eq!(vms.qemu("b").devices().len(), 1);
    assert_eq!(vms.guest("a").identity().unwrap().max_volumes, 240);
}

#[test]
fn a_vm_has_no_more_volumes_than_it_may() {
    let mut vms = started(&USUAL, "");
    vms.lab.edit("name = 'a'\n", "name = 'a'\nmax-volumes = 2\n");
    let may = |vms: &Machines, most| vms.guest("a").identity().is_some_and(|known| known.max_volumes == most);
    vms.lab.until("it is told how many it may have", || may(&vms, 2));
    let a = vms.of("a");
    let ids: Vec<_> = (0..4).map(|number| a.create(&format!("v{number}"), MIB).unwrap().volume_id).collect();
    for id in &ids[..2] {
        a.publish(id, "a").unwrap();
    }
    let words = "the node a has 2 volumes, and may have at most 2; see max-volumes of its [[vm]]";
    refused(a.publish(&ids[2], "a"), Code::ResourceExhausted, words);
    assert_fails(&vms.lab.ctl(&["volumes", "attach", &ids[2], "a"]), 1, words);
    assert_eq!(vms.qemu("a").devices().len(), 2);
    a.publish(&ids[0], "a").unwrap();
    a.publish(&ids[2], "b").unwrap();
    a.unpublish(&ids[0], "a").unwrap();
    a.publish(&ids[3], "a").unwrap();
    // 0 is no limit but that of the hypervisor: a SCSI controller.
    vms.lab.edit("max-volumes = 2", "max-volumes = 0");
    vms.lab.until("it is told how many it may have", || may(&vms, 256));
    vms.of("a").publish(&ids[0], "a").unwrap();
}

/// `CSINode`'s count is what kubelet goes by: what it promises has to be there.
#[test]
fn no_more_volumes_are_promised_than_there_are_places() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().display();
    let vms = started(&USUAL, &format!("[[pool]]\nname = 'ports'\npath = '{path}'\nbus = 'virtio'\n"));
    // One root port, though the controller would take more of the other pool.
    vms.lab.until("it is told how many it may have", || {
        vms.guest("a").identity().is_some_and(|known| known.max_volumes == 1)
    });
    let a = vms.of("a");
    let create = |name: &str| {
        let parameters = [("hostStorageClass".to_owned(), "ports".to_owned())].into();
        let request = csi::CreateVolumeRequest { parameters, ..wanted(name, MIB) };
        a.create_volume(request).unwrap().volume.unwrap().volume_id
    };
    let (one, two) = (create("one"), create("two"));
    a.publish(&one, "a").unwrap();
    refused(a.publish(&two, "a"), Code::ResourceExhausted, "no free PCI Express root port");
    a.unpublish(&one, "a").unwrap();
    a.publish(&two, "a").unwrap();
}

/// Issue 17: kubelet gives a driver up for a moment when the number changes, and so it did whenever a disk came or went
/// while places were counted, or QEMU was too busy to say them.
#[test]
fn promises_stay_while_disks_come_and_go_and_while_qemu_does_not_answer() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().display();
    let vms = started(&USUAL, &format!("[[pool]]\nname = 'ports'\npath = '{path}'\nbus = 'virtio'\n"));
    let (a, qemu) = (vms.of("a"), vms.qemu("a"));
    assert_eq!(a.most(), Ok(1));
    let id = a.create_in("one", MIB, Some("ports")).unwrap().volume_id;
    a.publish(&id, "a").unwrap();

    qemu.guest_is(Manner::Slow);
    std::thread::scope(|scope| {
        let gone = scope.spawn(|| a.unpublish(&id, "a"));
        vms.lab.until("the guest is asked for the disk", || qemu.commands().contains(&"device_del".into()));
        qemu.let_go_at_ports();
        vms.lab.until("the guest lets go while places are counted", || {
            assert_eq!(a.most(), Ok(1));
            !qemu.has_devices()
        });
        gone.join().unwrap().unwrap();
    });

    // The guest is asked to come again, and is told anew.
    qemu.be_silent();
    vms.lab.until("the channel is closed", || a.most().is_err());
    vms.lab.until("it is told how many it may have", || {
        let told = vms.of("a").most();
        assert!(matches!(told, Ok(1) | Err(_)), "{told:?}");
        told.is_ok()
    });
}

impl Asking {
    /// How many volumes the guest is told that it may have.
    fn most(&self) -> Result<u32, Code> {
        let mut client = HostClient::with_origin(self.0.clone(), http::Uri::from_static(ORIGIN));
        let told = wait(async move { client.who_am_i(WhoAmIRequest {}).await });
        told.map(|answer| answer.into_inner().max_volumes).map_err(|status| status.code())
    }
}
