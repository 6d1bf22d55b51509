//! Pools whose file system has no room left.

use guestlet::wire::proto::csi;
use tonic::Code;

use super::{USUAL, refused, started};
use crate::lab::uuid;
use crate::namespace::{is_outside, run};

const MIB: i64 = 1 << 20;

#[test]
fn a_full_file_system_is_told_leaves_nothing_behind_and_can_be_emptied() {
    if is_outside() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let small = folder.path().display();
    run(&format!("mount -t tmpfs -o size=64M,mode=700 small {small}"));
    let pool =
        |name: &str, rest: &str| format!("[[pool]]\nname = '{name}'\npath = '{small}/{name}'\n{rest}\n");
    let pools =
        pool("s-thin", "") + &pool("s-full", "allocation = 'full'") + &pool("s-qcow", "format = 'qcow2'");
    // More than the file system has is for those that say so.
    let pools = pools + "[cluster.dev]\nmax-bytes = '1G'\n";
    let mut vms = started(&USUAL, &pools);
    let names = |name: &str| {
        let names = std::fs::read_dir(folder.path().join(name)).unwrap();
        let names = names.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<_> = names.filter(|name| !name.starts_with('.')).collect();
        names.sort();
        names
    };
    let a = vms.of("a");
    let full = Code::ResourceExhausted;
    // More than there is.
    let c = vms.of("c");
    refused(c.create_in("pvc-large", 96 * MIB, Some("s-thin")), full, "without max-bytes the limit is");
    refused(a.create_in("pvc-large", 96 * MIB, Some("s-full")), full, "s-full has no space");
    let thin = a.create_in("pvc-thin", 64 * MIB, Some("s-thin")).unwrap().volume_id;
    let other = a.create_in("pvc-other", 64 * MIB, Some("s-thin")).unwrap().volume_id;
    let kept = a.create_in("pvc-full", 16 * MIB, Some("s-full")).unwrap().volume_id;
    a.publish(&thin, &uuid(1)).unwrap();
    a.publish(&kept, &uuid(1)).unwrap();
    let before = ["s-thin", "s-full", "s-qcow"].map(names);

    // Guests write until nothing is left, to the last page.
    run(&format!("cat /dev/zero > {small}/data 2> /dev/null || true; [ $(stat -f -c %a {small}) = 0 ]"));
    // What is reserved can still be written.
    let problem = |id: &str| {
        let request = csi::ControllerGetVolumeRequest { volume_id: id.into() };
        a.controller_get_volume(request).unwrap().status.unwrap().volume_condition.unwrap().message
    };
    vms.lab.until("it is told", || problem(&thin).contains("the pool s-thin is full"));
    assert!(!problem(&kept).contains("is full"), "{}", problem(&kept));
    for class in ["s-thin", "s-full", "s-qcow"] {
        refused(a.create_in("pvc-new", MIB, Some(class)), full, class);
    }
    refused(a.expand(&kept, 96 * MIB), full, "s-full has no space");
    assert_eq!(before, ["s-thin", "s-full", "s-qcow"].map(names));
    let listed: Vec<_> = a.all().into_iter().map(|(id, _)| id).collect();
    assert_eq!(listed.len(), 3, "{listed:?}");

    // What makes room works nevertheless: nobody has to look for files by hand.
    a.unpublish(&thin, &uuid(1)).unwrap();
    a.unpublish(&kept, &uuid(1)).unwrap();
    a.delete(&thin).unwrap();
    a.delete(&kept).unwrap();
    assert_eq!(a.all(), [(other.clone(), vec![])]);
    a.create_in("pvc-new", MIB, Some("s-full")).unwrap();
    // And what was noted meanwhile is what a daemon finds that starts now.
    vms.lab.kill();
    vms.lab.again();
    vms.lab.until_vm("a", |vm| vm["callback"] == "open");
    let a = vms.of("a");
    assert_eq!(a.all().len(), 2);
    a.delete(&other).unwrap();
}
