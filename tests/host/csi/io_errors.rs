//! Disks that QEMU cannot write: who is told, and until when.

use guestlet::wire::proto::csi;
use serde_json::Value;

use super::machine::Machine;
use super::{Asking, serial};
use crate::guest::{Door, Guest, Manner, info};
use crate::lab::{Lab, Watch, text, uuid};
use crate::metrics;
use crate::namespace::{is_outside, run};

const MIB: i64 = 1 << 20;

/// A QEMU that writes to a volume of a pool that has no room for it.
#[test]
fn a_vm_that_stands_still_for_want_of_room_is_told_of_until_it_goes_on() {
    if is_outside() {
        return;
    }
    let mut lab = Lab::new();
    let pool = lab.path("small");
    std::fs::create_dir(&pool).unwrap();
    let small = text(&pool);
    run(&format!("mount -t tmpfs -o size=16M,mode=700 small {small}"));
    lab = lab.set(&format!("[[pool]]\nname = 'thin'\npath = '{small}'\n[cluster.dev]\nmax-bytes = '1G'\n"));
    let sockets = "unix-socket = '@a.sock'\nqmp = '@a.qmp'\ncluster = 'dev'";
    let beside = "unix-socket = '@b.sock'\ncluster = 'dev'";
    let mut lab = lab.vm("a", 1, sockets).vm("b", 2, beside).start();
    let other = Guest::start(&lab.path("b.sock"), Door::Unix, Manner::Good, info(&uuid(2), "boot-2"));
    let mut said = info(&uuid(1), "boot-1");
    said.capabilities.push("disks".to_owned());
    let guest = Guest::start(&lab.path("a.sock"), Door::Unix, Manner::Good, said);
    let machine = Machine::start_writing(&lab.path("a.qmp"));
    lab.until_vm("a", |vm| vm["power"] == "running" && vm["callback"] == "open");
    lab.until_vm("b", |vm| vm["callback"] == "open");
    let asking = Asking(guest.client());
    let id = asking.create("v", 48 * MIB).unwrap().volume_id;
    asking.publish(&id, "a").unwrap();
    assert_eq!(lab.info("a")["io_errors"], Value::Array(vec![]));
    let problem = |lab: &Lab| {
        let listed: Value = serde_json::from_str(&lab.words(&["-o", "json", "volumes", "ls"])).unwrap();
        listed[0]["problem"].as_str().unwrap().to_owned()
    };

    // Its firmware finds the disk then.
    let watch = Watch::start(&lab, &["-o", "json"]);
    machine.ask("system_reset");
    let fails = |vm: &Value| vm["power"] == "paused" && vm["io_errors"][0]["stopped"] == true;
    let vm = lab.until_vm("a", fails);
    let error = &vm["io_errors"][0];
    assert_eq!((&error["operation"], &error["no_space"]), (&"write".into(), &true.into()), "{error}");
    assert_eq!(error["disk"], serial(&id));
    let image = pool.join(format!("{}.raw", serial(&id))).canonicalize().unwrap();
    assert_eq!(error["file"], text(&image));
    assert_eq!(watch.event("a", "disk-error")["disk"], serial(&id));
    let words = "cannot be written: No space left on device; the VM is paused until it is resumed";
    for command in [["ls", "a"], ["info", "a"], ["watch", "a"]] {
        let shown = match command {
            ["ls", _] => lab.words(&["ls"]),
            ["watch", _] => Watch::quiet(&lab, &["--since", "1h"]).until(|line| line.contains("cannot be")),
            command => lab.words(&command),
        };
        assert!(shown.contains(&format!("disk {} {words}", serial(&id))), "{command:?}: {shown}");
    }
    let expected = "there is no space left on the host for what its guest writes (No space left on device); \
                    the VM a is paused";
    assert!(problem(&lab).starts_with(expected), "{}", problem(&lab));
    // The guest of a VM that stands still asks nothing; another one of its cluster does.
    let request = csi::ControllerGetVolumeRequest { volume_id: id.clone() };
    let condition = Asking(other.client())
        .controller_get_volume(request)
        .unwrap()
        .status
        .unwrap()
        .volume_condition
        .unwrap();
    assert!(
        condition.abnormal && condition.message.starts_with(expected),
        "its cluster is told: {condition:?}"
    );
    let counted =
        |lab: &Lab, line: &str| metrics::ask(lab, "GET /metrics HTTP/1.1").contains(&format!("\n{line}\n"));
    assert!(counted(&lab, "guestlet_host_virtual_machines_stopped 1"));
    assert!(!counted(&lab, "guestlet_host_disk_errors_total{reason=\"no-space\"} 0"));
    assert!(counted(&lab, "guestlet_host_disk_errors_total{reason=\"other\"} 0"));

    // A daemon that was not there when it happened finds it.
    lab.kill();
    lab.again();
    let vm = lab.until_vm("a", fails);
    assert_eq!(
        (&vm["io_errors"][0]["disk"], &vm["io_errors"][0]["no_space"]),
        (&serial(&id).into(), &true.into())
    );

    run(&format!("mount -o remount,size=256M {small}"));
    machine.ask("cont");
    let vm = lab.until_vm("a", |vm| vm["power"] == "running" && vm["io_errors"] == Value::Array(vec![]));
    assert_eq!(vm["reason"], "", "{vm}");
    lab.until("the volume is well", || problem(&lab).is_empty());
    assert!(counted(&lab, "guestlet_host_virtual_machines_stopped 0"));
}
