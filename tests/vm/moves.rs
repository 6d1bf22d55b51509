//! Guests with keys whose memory goes on in another QEMU: moved to another host, or restored.
//!
//! The vsock device is unplugged before and another one is plugged after that: see [`Vm::move_to`](crate::harness::vm::Vm::move_to).
//! All else is carried from one QEMU to another as in any migration, with the disk on storage that both hosts reach.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::certificates::Authority;
use crate::harness::host::{HostHalf, Listed};
use crate::harness::images::text;
use crate::harness::process::RunFolder;
use crate::harness::tools::run;
use crate::harness::vm::SOON;
use crate::harness::wait_for;
use crate::images;
use crate::trust::{Firmware, Guest, Lab, until_refused, vouched};

/// A VM that is known by this name at all hosts.
const WEB: &str = "web";

/// The name of a host half's key.
fn own_key(host: &HostHalf) -> String {
    let listed: Value = serde_json::from_str(&host.ctl(&["trust", "ls", "-o", "json"]).unwrap()).unwrap();
    listed["host_key"].as_str().unwrap().to_owned()
}

/// Which run of the guest's kernel and of its agent this is.
fn run_of(guest: &Guest) -> (String, String) {
    (guest.vm.boot_id().unwrap(), guest.vm.run("pidof guestlet").unwrap())
}

/// Moves the guest to the host of `to`, and returns it once its agent answers there.
fn moved(mut guest: Guest, to: &Lab, disk: &Path) -> Guest {
    let (before, key) = (run_of(&guest), guest.own());
    let there = to.await_guest(WEB, disk, &[]);
    guest.vm.move_to(&there.vm).unwrap();
    wait_for("the guest", SOON, || there.vm.run("guestlet status").ok()).unwrap();
    assert_eq!((run_of(&there), there.own()), (before, key), "it went on, with its key");
    there
}

/// What people at this host see of the VM that is refused.
fn refused(lab: &Lab) -> String {
    let reason = lab.until_refused(WEB);
    for command in [&["ls"][..], &["info", WEB]] {
        let shown = lab.host.ctl(command).unwrap();
        assert!(shown.contains("refused") && shown.contains(&reason), "{reason}: {shown}");
    }
    reason
}

#[test]
fn a_guest_that_moves_is_served_by_the_hosts_of_its_ca_and_by_no_other() {
    let (ours, theirs) = (Authority::new(), Authority::new());
    let one = Lab::with(&[WEB], |folder| vouched(&ours, "one", folder));
    let two = one.beside(|folder| vouched(&ours, "two", folder));
    let foreign = one.beside(|folder| vouched(&theirs, "foreign", folder));
    let disk = one.disk("web.raw");
    let guest = one.start(WEB, &disk, Firmware::Key, &[]);
    one.until_speaks(WEB, "keyed");
    let key = guest.own();
    assert_eq!(
        guest.keys()["hosts"].as_array().map(Vec::len),
        Some(1),
        "it was given its CA: {}",
        guest.keys()
    );

    // To a host of the same CA: nobody does anything.
    let guest = moved(guest, &two, &disk);
    two.until_speaks(WEB, "keyed");
    let pinned = two.key(WEB);
    assert_eq!((&pinned["key"], &pinned["how"]), (&json!(key), &json!("first-use")), "{pinned}");
    assert!(two.host.ctl(&["ping", WEB, "-c", "3"]).unwrap().contains("3 pings"));
    one.host.wait(WEB, "gone from the first host", SOON, |vm| vm["session"] != "connected").unwrap();
    guest.said_tls_alone();

    // To one of another CA, and one with a key that nobody vouches for.
    let guest = moved(guest, &foreign, &disk);
    let of_foreign = own_key(&foreign.host);
    let reason = refused(&foreign);
    assert!(
        reason.contains(&format!("the guest does not know this host half's key {of_foreign};")),
        "{reason}"
    );
    guest.until_logs(&format!(
        "its key {of_foreign} is not among those that this guest was given (guestlet trust ls)"
    ));
    let bare = HostHalf::start(&[Listed::at(WEB, one.uuid(WEB), guest.vm.vsock_socket())]).unwrap();
    let reason = until_refused(&bare, WEB);
    let of_bare = own_key(&bare);
    assert!(reason.contains(&format!("the guest does not know this host half's key {of_bare};")), "{reason}");
    assert_eq!(foreign.key(WEB)["key"], "", "nothing is pinned by who is not let in");
    guest.said_tls_alone();

    // Back to where it was: its key is that which is pinned there. One that was made elsewhere is not.
    let guest = moved(guest, &one, &disk);
    one.until_shows(WEB, &key);
    let guest = moved(guest, &two, &disk);
    two.until_shows(WEB, &key);
    two.host.ctl(&["trust", "rotate", WEB]).unwrap();
    guest.restart_agent();
    let rotated = || (two.key(WEB)["key"] == guest.own() && guest.own() != key).then(|| guest.own());
    let rotated = wait_for("the new key", SOON, rotated).unwrap();
    two.until_shows(WEB, &rotated);
    let guest = moved(guest, &one, &disk);
    let reason = refused(&one);
    assert!(
        reason.contains(&format!("the guest's key has changed: it is {rotated}, but {key} is pinned")),
        "{reason}"
    );
    one.host.ctl(&["trust", "accept", WEB, &rotated]).unwrap();
    one.until_shows(WEB, &rotated);
    guest.said_tls_alone();
}

/// A file system with the kernel module by which guests read what QEMU says of their generation. Real guests load it.
fn module(folder: &RunFolder) -> PathBuf {
    let modules = images().kernel().with_file_name("lib").join("modules");
    let release = std::fs::read_dir(modules).unwrap().next().unwrap().unwrap().path();
    let disk = folder.file("module.iso");
    let graft = format!("/module={}", text(&release.join("kernel/drivers/firmware/qemu_fw_cfg.ko")).unwrap());
    let arguments = ["-quiet", "-rock", "-graft-points", "-output", text(&disk).unwrap(), &graft];
    run(Path::new("genisoimage"), &arguments).unwrap();
    disk
}

#[test]
fn memory_that_is_restored_with_another_vmgenid_has_another_key_before_anybody_is_let_in() {
    let lab = Lab::new(&[WEB]);
    let folder = RunFolder::new().unwrap();
    let drive = format!("if=none,id=module,format=raw,readonly=on,file={}", module(&folder).display());
    let of_generation = |number: u32| {
        let generation = format!("vmgenid,guid=324e6eaf-d1d1-4bf6-bf41-{number:012}");
        let module = "virtio-blk-pci,drive=module,bus=pcie.0,addr=7".to_owned();
        ["-device".to_owned(), generation, "-drive".to_owned(), drive.clone(), "-device".to_owned(), module]
    };
    let disk = lab.disk("web.raw");
    let mut guest = lab.start(WEB, &disk, Firmware::Key, &of_generation(1).each_ref().map(String::as_str));
    lab.until_speaks(WEB, "keyed");
    let key = guest.own();
    guest
        .vm
        .run("mkdir -p /mnt && mount -t iso9660 /dev/vdb /mnt && insmod /mnt/module && umount /mnt")
        .unwrap();
    let known = || guest.vm.run("grep '^vmgenid SHA256:' /var/lib/guestlet/guest.machine").ok();
    wait_for("the generation beside the key", SOON, known).unwrap();
    assert_eq!(guest.own(), key, "a driver that comes late makes no other machine");
    let memory = folder.file("memory");
    guest.vm.unplug_vsock().unwrap();
    guest.vm.run("sync").unwrap();
    guest.vm.save(&memory).unwrap();
    let restored = |number: u32| {
        let copy = folder.file(&format!("{number}.raw"));
        std::fs::copy(&disk, &copy).unwrap();
        let guest = lab.await_guest(WEB, &copy, &of_generation(number).each_ref().map(String::as_str));
        guest.vm.restore(&memory).unwrap();
        guest
    };
    let other = "this machine is not the one that its key was created on";
    let log = |guest: &Guest| std::fs::read_to_string(guest.vm.file("agent.log")).unwrap();

    // Of the same generation, as when it moves: the guest is the one that it was.
    let guest = restored(1);
    lab.until_shows(WEB, &key);
    assert_eq!(guest.own(), key);
    assert!(!log(&guest).contains(other), "{}", log(&guest));
    guest.end();

    let sessions = lab.host.info(WEB).unwrap()["sessions"].clone();
    let guest = restored(2);
    let reason = refused(&lab);
    let new = guest.own();
    assert_ne!(new, key);
    assert!(
        reason.contains(&format!("the guest's key has changed: it is {new}, but {key} is pinned")),
        "{reason}"
    );
    assert!(reason.contains("guestctl trust accept web"), "{reason}");
    guest.until_logs(other);
    assert_eq!(lab.host.info(WEB).unwrap()["sessions"], sessions, "nobody was let in with the old key");
    lab.host.ctl(&["trust", "accept", WEB, &new]).unwrap();
    lab.until_shows(WEB, &new);
    guest.said_tls_alone();
}
