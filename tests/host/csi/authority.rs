//! Who holds a volume: a VM that does not say so, or is in no list, may hold it all the same.

use std::time::{Duration, Instant};

use tonic::Code;

use super::{Asking, Machines, USUAL, refused, serial, started};
use crate::lab::uuid;

const MIB: i64 = 1 << 20;
const UNTOLD: &str = "it is not known whether the node that had the volume still has it";

fn published() -> (Machines, Asking, String) {
    let vms = started(&USUAL, "");
    let id = vms.of("a").create("v", 20 * MIB).unwrap().volume_id;
    vms.of("a").publish(&id, "a").unwrap();
    let b = vms.of("b");
    (vms, b, id)
}

impl Machines {
    /// Takes the VM `a` out of the settings; the returned text puts it there again.
    fn forget_a(&mut self) -> String {
        let folder = self.lab.path("");
        let folder = folder.display();
        let table = format!(
            "[[vm]]\nname = 'a'\nuuid = '{}'\nunix-socket = '{folder}a.sock'\n\
             qmp = '{folder}a.qmp'\ncluster = 'dev'\n",
            uuid(1)
        );
        self.lab.edit(&table, "# a\n");
        self.lab.until("it is in no list", || !self.lab.words(&["ls"]).contains("\na "));
        table
    }
}

#[test]
fn a_vm_that_has_ended_has_no_volumes() {
    let (mut vms, b, id) = published();
    vms.end("a");
    refused(b.delete(&id), Code::FailedPrecondition, "is published to the node a");
    b.unpublish(&id, "a").unwrap();
    assert_eq!(b.all(), [(id.clone(), vec![])]);
    vms.boot("a", 1);
    b.publish(&id, "a").unwrap();
    // It ends, and its table is taken out of the settings.
    vms.end("a");
    vms.forget_a();
    b.publish(&id, "b").unwrap();
    assert_eq!(b.all(), [(id.clone(), vec!["b".to_owned()])]);
    b.unpublish(&id, "a").unwrap();
    assert_eq!(b.all(), [(id, vec!["b".to_owned()])], "of the node that has it not");
}

#[test]
fn a_vm_that_is_in_no_list_keeps_its_volumes_while_its_qemu_has_them() {
    let (mut vms, b, id) = published();
    let image = vms.file("fast", &id, "raw");
    let table = vms.forget_a();
    refused(b.publish(&id, "b"), Code::Unavailable, UNTOLD);
    refused(b.unpublish(&id, "a"), Code::Unavailable, UNTOLD);
    refused(b.delete(&id), Code::Unavailable, UNTOLD);
    refused(b.expand(&id, 40 * MIB), Code::Unavailable, UNTOLD);
    let told = vms.lab.ctl(&["volumes", "rm", &id]);
    let words = String::from_utf8_lossy(&told.stderr).into_owned();
    assert!(!told.status.success() && words.contains("is open in another program"), "{words}");
    assert_eq!(b.all(), [(id.clone(), vec!["a".to_owned()])]);

    // Somebody answers for it, and is wrong: its bytes stay, and nobody else gets them.
    let forced = vms.lab.ctl(&["volumes", "detach", &id, "--force"]);
    assert!(forced.status.success(), "{forced:?}");
    assert!(std::fs::read_to_string(vms.lab.path("log")).unwrap().contains("is removed by force"));
    refused(b.delete(&id), Code::Unavailable, "the volume is in use");
    assert!(image.exists());

    // It is found again, and taken away from where it is not to be.
    vms.lab.edit("# a\n", &table);
    vms.lab.until("it is taken away", || vms.qemu("a").nodes().is_empty());
    vms.lab.until("it is forgotten", || b.all() == [(id.clone(), vec![])]);
    b.publish(&id, "b").unwrap();
    b.unpublish(&id, "b").unwrap();
    b.delete(&id).unwrap();
    assert!(!image.exists());
}

#[test]
fn a_qemu_that_does_not_answer_keeps_its_volumes() {
    let (mut vms, b, id) = published();
    vms.qemu("a").be_silent();
    vms.lab
        .until_vm("a", |vm| vm["power_problem"].as_str().is_some_and(|why| why.contains("does not answer")));
    refused(b.unpublish(&id, "a"), Code::Unavailable, UNTOLD);
    refused(b.publish(&id, "b"), Code::Unavailable, UNTOLD);
    refused(b.delete(&id), Code::Unavailable, UNTOLD);
    assert_eq!(b.all(), [(id.clone(), vec!["a".to_owned()])]);
    vms.end("a");
    b.unpublish(&id, "a").unwrap();
    b.delete(&id).unwrap();
}

#[test]
fn a_guest_that_has_shut_down_keeps_its_volumes_while_its_qemu_is_there() {
    let (vms, b, id) = published();
    vms.qemu("a").status_is("shutdown");
    vms.lab.until_vm("a", |vm| vm["power"] == "off");
    refused(b.publish(&id, "b"), Code::FailedPrecondition, "is published to the node a");
    refused(b.delete(&id), Code::FailedPrecondition, "is published to the node a");
    assert_eq!(vms.qemu("a").devices().len(), 1);
    b.unpublish(&id, "a").unwrap();
    assert!(vms.qemu("a").devices().is_empty() && vms.qemu("a").nodes().is_empty());
    b.publish(&id, "b").unwrap();
}

#[test]
fn a_volume_whose_image_qemu_has_under_another_name_is_not_detached() {
    let (vms, b, id) = published();
    vms.qemu("a").was_started_with("drive0", &vms.file("fast", &id, "raw"));
    refused(b.unpublish(&id, "a"), Code::FailedPrecondition, "the volume is in use elsewhere");
    let told = vms.lab.ctl(&["volumes", "detach", &id]);
    let words = String::from_utf8_lossy(&told.stderr).into_owned();
    assert!(!told.status.success() && words.contains("open as the block node drive0"), "{words}");
    let forced = vms.lab.ctl(&["volumes", "detach", &id, "--force"]);
    assert!(!forced.status.success(), "QEMU says that it has it: {forced:?}");
    assert_eq!(b.all(), [(id.clone(), vec!["a".to_owned()])], "it is remembered");
    refused(b.publish(&id, "b"), Code::FailedPrecondition, "is published to the node a");
    refused(b.delete(&id), Code::FailedPrecondition, "is published to the node a");
    assert_eq!(vms.qemu("a").nodes().len(), 1, "it is left alone");

    vms.qemu("a").close_node("drive0");
    b.unpublish(&id, "a").unwrap();
    b.publish(&id, "b").unwrap();
    b.unpublish(&id, "b").unwrap();

    // The same where it is not remembered.
    vms.qemu("a").was_started_with("drive0", &vms.file("fast", &id, "raw"));
    refused(b.unpublish(&id, "a"), Code::FailedPrecondition, "the volume is in use elsewhere");
    vms.qemu("a").close_node("drive0");
    b.unpublish(&id, "a").unwrap();
    b.delete(&id).unwrap();
}

#[test]
fn a_volume_that_another_program_has_open_is_not_removed() {
    let vms = started(&USUAL, "");
    let a = vms.of("a");
    let id = a.create("v", 20 * MIB).unwrap().volume_id;
    let image = vms.file("fast", &id, "raw");
    let backup = std::fs::File::open(&image).unwrap();
    refused(a.delete(&id), Code::Unavailable, "the volume is in use");
    assert!(image.exists() && vms.file("fast", &id, "json").exists());
    drop(backup);
    a.delete(&id).unwrap();
    assert!(!image.exists());
}

/// As where a command to open the image was carried out late, when nobody was remembered to have the volume.
#[test]
fn a_block_node_that_no_disk_uses_keeps_no_volume_from_being_removed() {
    let (vms, b, id) = published();
    let name = vms.qemu("a").devices()[0]["id"].as_str().unwrap().to_owned();
    b.unpublish(&id, "a").unwrap();
    let image = vms.file("fast", &id, "raw");
    for vm in ["a", "b"] {
        vms.qemu(vm).was_started_with(&name, &image);
    }
    b.delete(&id).unwrap();
    assert!(!image.exists());
    assert_eq!((vms.qemu("a").nodes().len(), vms.qemu("b").nodes().len()), (0, 0));
    // One that was not opened for a volume is somebody else's.
    let id = b.create("w", 20 * MIB).unwrap().volume_id;
    let image = vms.file("fast", &id, "raw");
    vms.qemu("a").was_started_with("other", &image);
    refused(b.delete(&id), Code::Unavailable, "the volume is in use");
    assert!(image.exists() && vms.qemu("a").nodes().len() == 1);
}

#[test]
fn qemus_that_hang_are_asked_at_once_who_has_a_volume() {
    let vms = started(&USUAL, "");
    let a = vms.of("a");
    let id = a.create("v", 20 * MIB).unwrap().volume_id;
    let backup = std::fs::File::open(vms.file("fast", &id, "raw")).unwrap();
    for (name, ..) in USUAL {
        vms.qemu(name).hang();
    }
    let began = Instant::now();
    // Nobody is remembered to have it, and somebody has it open: all are asked whether it is they.
    refused(a.unpublish(&id, "a"), Code::Unavailable, UNTOLD);
    assert!(began.elapsed() < Duration::from_secs(15), "{:?}", began.elapsed());
    drop(backup);
    a.delete(&id).unwrap();
}

#[test]
fn qemu_locks_images_and_opens_no_base_of_them() {
    let vms = started(&USUAL, "");
    let a = vms.of("a");
    let id = a.create_in("v", 20 * MIB, Some("qcow")).unwrap().volume_id;
    a.publish(&id, "a").unwrap();
    let node = &vms.qemu("a").nodes()[0];
    assert_eq!(
        (&node["file"]["locking"], node.get("backing")),
        (&"on".into(), Some(&serde_json::Value::Null))
    );
    assert!(vms.qemu("a").devices()[0]["serial"] == serial(&id));
}
