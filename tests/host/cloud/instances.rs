//! What a cluster learns of its VMs.

use std::time::{Duration, Instant};

use guestlet::wire::proto::v1::event::Kind;
use guestlet::wire::proto::v1::get_instance_response::Existence;
use guestlet::wire::proto::v1::instance::Power;
use guestlet::wire::proto::v1::{self, GetInstanceRequest, WatchBounds, WatchInstancesRequest};
use tonic::Code;

use super::{Asking, USUAL, started};
use crate::csi::refused;
use crate::lab::uuid;

fn watch(asking: &Asking, position: &str, wait_seconds: u32) -> v1::WatchInstancesResponse {
    let bounds = Some(WatchBounds { position: position.into(), wait_seconds });
    asking.watch_instances(WatchInstancesRequest { bounds }).unwrap()
}

#[test]
fn a_cluster_sees_its_own_vms_and_no_others() {
    let networks = "[[address-pool]]\nname = 'p'\nranges = ['192.0.2.1']";
    let vms = started(&USUAL, networks);
    let (a, c) = (vms.of("a"), vms.of("c"));
    let all = watch(&a, "", 0);
    assert!(all.complete && all.withdrawn.is_empty());
    let names: Vec<_> = all.instances.iter().map(|one| (one.name.as_str(), one.node_name.as_str())).collect();
    assert_eq!(names, [("a", "node-a"), ("b", "node-b")]);
    let one = &all.instances[0];
    assert_eq!((&one.vm_uid, &one.provider_id), (&uuid(1), &format!("guestlet://{}", uuid(1))));
    assert_eq!(
        (one.power(), one.addresses_current, one.system_uuid.clone()),
        (Power::Running, true, uuid(1))
    );
    assert_eq!(one.interfaces[0].hardware_address, "52:54:00:00:00:01");
    assert_eq!(one.interfaces[0].addresses, ["10.77.0.1/24", "fd00:77::1/64"]);
    assert_eq!(watch(&c, "", 0).instances.len(), 1);

    let get = |asking: &Asking, vm_uid: String| asking.get_instance(GetInstanceRequest { vm_uid }).unwrap();
    let found = get(&a, uuid(2));
    assert_eq!((found.existence(), found.instance.unwrap().name.as_str()), (Existence::Exists, "b"));
    // Another's VM and one that never was are told in the same words.
    let (others, nobodys) = (get(&a, uuid(3)), get(&a, uuid(9)));
    assert_eq!((others.existence(), others.instance.as_ref()), (Existence::Unknown, None));
    assert_eq!(others, nobodys);
    let upper = a.get_instance(GetInstanceRequest { vm_uid: "ABC".into() });
    refused(upper, Code::InvalidArgument, "vm_uid");
}

#[test]
fn what_changes_is_told_as_soon_as_it_does_and_nothing_else() {
    let mut vms = started(&USUAL, "");
    let a = vms.of("a");
    let first = watch(&a, "", 0);
    // Nothing happens.
    let begun = Instant::now();
    let none = watch(&a, &first.position, 1);
    assert!(begun.elapsed() >= Duration::from_secs(1));
    assert_eq!((none.position.as_str(), none.instances.len()), (first.position.as_str(), 0));
    // Another cluster's VM, and then one of its own.
    let polling = {
        let (a, position) = (a.clone(), first.position.clone());
        std::thread::spawn(move || watch(&a, &position, 20))
    };
    let happen = |vm: &str, node: &str| {
        let told = Some(v1::Node { name: node.into(), ..v1::Node::default() });
        vms.guests[vm].happen(Kind::NodeChanged(v1::NodeChanged { node: told }));
    };
    happen("c", "other");
    vms.lab.until_vm("c", |vm| vm["state"]["node"]["name"] == "other");
    assert!(!polling.is_finished());
    happen("b", "renamed");
    let news = polling.join().unwrap();
    assert_eq!((news.complete, news.instances.len()), (false, 1));
    assert_eq!(news.instances[0].node_name, "renamed");

    // Its session is lost: what was known last is told as such, and nobody says that it has stopped.
    drop(vms.guests.remove("b"));
    let lost = watch(&a, &news.position, 20);
    let b = &lost.instances[0];
    assert_eq!((b.power(), b.addresses_current, b.interfaces.len()), (Power::Unknown, false, 1));

    // Its table is taken out of the settings: nothing is known of it any more, which does not say that it is gone.
    let folder = vms.lab.path("");
    let table = format!(
        "[[vm]]\nname = 'b'\nuuid = '{}'\nunix-socket = '{}b.sock'\ncluster = 'dev'\n",
        uuid(2),
        folder.display()
    );
    vms.lab.edit(&table, "");
    let gone = watch(&a, &lost.position, 20);
    assert_eq!((gone.withdrawn, gone.instances.len()), (vec![uuid(2)], 0));
    let get = a.get_instance(GetInstanceRequest { vm_uid: uuid(2) }).unwrap();
    assert_eq!(get.existence(), Existence::Unknown);

    // Another run of the host half: a position of before means nothing, and everything is told anew.
    vms.restart();
    let again = watch(&vms.of("a"), &gone.position, 20);
    assert!(again.complete && again.instances.len() == 1, "{again:?}");
}

#[test]
fn a_vm_has_few_polls_that_wait_and_others_go_on_meanwhile() {
    let vms = started(&USUAL, "");
    let a = vms.of("a");
    let position = watch(&a, "", 0).position;
    let polls: Vec<_> = (0..2)
        .map(|_| {
            let (a, position) = (a.clone(), position.clone());
            let bounds = Some(WatchBounds { position, wait_seconds: 4 });
            // The one that looks below may be first.
            std::thread::spawn(move || {
                loop {
                    match a.watch_instances(WatchInstancesRequest { bounds: bounds.clone() }) {
                        Err(status) if status.code() == Code::ResourceExhausted => {}
                        answer => return answer.unwrap(),
                    }
                }
            })
        })
        .collect();
    let further = || {
        let bounds = Some(WatchBounds { position: position.clone(), wait_seconds: 0 });
        a.watch_instances(WatchInstancesRequest { bounds })
    };
    vms.lab.until("a third one is refused", || {
        further().is_err_and(|status| status.code() == Code::ResourceExhausted)
    });
    // Those of other VMs, and its other calls, are answered.
    assert_eq!(watch(&vms.of("b"), "", 0).instances.len(), 2);
    a.get_instance(GetInstanceRequest { vm_uid: uuid(1) }).unwrap();
    for poll in polls {
        assert_eq!(poll.join().unwrap().instances.len(), 0);
    }
    further().unwrap();
}

#[test]
fn a_vm_without_a_cluster_gets_nothing() {
    let vms = started(&[("a", 1, "")], super::SMALL);
    let a = vms.of("a");
    let get = a.get_instance(GetInstanceRequest { vm_uid: uuid(1) });
    refused(get, Code::PermissionDenied, "belongs to no cluster");
    refused(a.ensure(super::wanted("web")), Code::PermissionDenied, "belongs to no cluster");
}

#[test]
fn where_the_settings_name_interfaces_no_others_are_told() {
    let mut lab = crate::lab::Lab::new();
    lab = lab.vm(
        "a",
        1,
        "unix-socket = '@a.sock'\ncluster = 'dev'\nnetworks = { '52:54:00:00:00:01' = 'lan', '52:54:00:00:00:99' = 'wan' }",
    );
    let guest = super::start_guest(&lab, "a", 1);
    let lab = lab.start();
    lab.until_vm("a", |vm| vm["callback"] == "open");
    let a = Asking(guest.client());
    let bridge = v1::NetworkInterface {
        name: "cni0".into(),
        hardware_address: "0a:58:00:00:00:01".into(),
        running: true,
        addresses: vec!["10.42.0.1/24".into()],
    };
    let position = watch(&a, "", 0).position;
    let mut interfaces = vec![bridge];
    interfaces.push(v1::NetworkInterface {
        name: "eth0".into(),
        hardware_address: "52:54:00:00:00:01".into(),
        running: true,
        addresses: vec!["10.77.0.8/24".into()],
    });
    guest.happen(Kind::InterfacesChanged(v1::InterfacesChanged { interfaces }));
    let news = watch(&a, &position, 20);
    let told = &news.instances[0].interfaces;
    assert_eq!((told.len(), told[0].network.as_str()), (1, "lan"));
    assert_eq!(told[0].addresses, ["10.77.0.8/24"]);
}
