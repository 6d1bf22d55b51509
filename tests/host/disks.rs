//! Disks plugged into a VM through QMP: what QEMU is told, and that every operation can be cut short anywhere and
//! repeated.

use std::process::{Child, Stdio};

use serde_json::{Value, json};

use crate::hypervisor::{Hypervisor, Manner, Moment};
use crate::lab::{DEADLINE, Lab, assert_fails, text, wait};

/// The guests of these tests have no agent: what they say is in `release`.
fn lab() -> Lab {
    let lab = Lab::new();
    let sockets = "unix-socket = '@a.sock'\nqmp = '@a.qmp'";
    lab.vm("a", 1, sockets).vm("b", 2, "unix-socket = '@b.sock'")
}

/// A daemon whose VM `a` can be plugged into.
fn started() -> (Lab, Hypervisor) {
    let lab = lab();
    let qemu = Hypervisor::start(&lab.path("a.qmp"), &["port1", "port2"]);
    let lab = lab.start();
    lab.until_vm("a", |vm| vm["power"] == "running");
    (lab, qemu)
}

fn ask(lab: &Lab, arguments: &[&str]) -> Value {
    serde_json::from_str(&lab.words(&[&["-o", "json", "disk"], arguments].concat())).unwrap()
}

fn managed(lab: &Lab) -> Vec<Value> {
    let disks = ask(lab, &["ls", "a"]);
    disks.as_array().unwrap().iter().filter(|disk| disk["managed"] == true).cloned().collect()
}

fn image(lab: &Lab, name: &str) -> String {
    let path = lab.path(name);
    std::fs::File::create(&path).unwrap().set_len(1 << 20).unwrap();
    text(&path.canonicalize().unwrap())
}

#[test]
fn a_disk_comes_grows_and_goes_on_either_bus() {
    let (lab, qemu) = started();
    let serial = "pvc-0123456789abcdef0123456789abcdef";
    let disk = ask(&lab, &["attach", "a", "--size", "1G", "--serial", serial]);
    let file = text(&lab.path("volumes").canonicalize().unwrap().join(format!("a/{serial}.raw")));
    assert_eq!(std::fs::metadata(&file).unwrap().len(), 1 << 30);
    let device = &qemu.devices()[0];
    let name = device["id"].as_str().unwrap();
    let expected = json!({
        "driver": "scsi-hd", "id": name, "bus": "scsi0.0", "drive": name, "serial": serial, "device_id": serial,
    });
    assert_eq!(*device, expected);
    let expected = json!({
        "serial": serial, "bus": "scsi", "size": 1 << 30, "format": "raw", "file": file, "read_only": false,
        "device": name, "managed": true, "guest_problem": "there is no session with an agent in this guest",
    });
    assert_eq!(disk, expected);

    let image = image(&lab, "data.qcow2");
    let disk =
        ask(&lab, &["attach", "a", "--file", &image, "--serial", "data 2", "--bus", "virtio", "--read-only"]);
    assert_eq!(
        [&disk["bus"], &disk["format"], &disk["read_only"]],
        [&json!("virtio"), &json!("qcow2"), &json!(true)]
    );
    let device = qemu.devices().into_iter().find(|device| device["serial"] == "data 2").unwrap();
    let node = qemu.nodes().into_iter().find(|node| node["node-name"] == device["drive"]).unwrap();
    assert_eq!([&device["driver"], &device["bus"]], ["virtio-blk-pci", "port1"]);
    assert_eq!([&node["driver"], &node["file"]["driver"]], ["qcow2", "file"]);
    assert_eq!([&node["read-only"], &node["file"]["read-only"]], [true, true]);
    let third = self::image(&lab, "third.raw");
    lab.words(&["disk", "attach", "a", "--file", &third, "--serial", "third", "--bus", "virtio"]);
    let buses: Vec<_> = qemu.devices().iter().map(|device| device["bus"].clone()).collect();
    assert!(buses.contains(&json!("port2")), "{buses:?}");

    assert_eq!(ask(&lab, &["resize", "a", "--serial", serial, "--size", "3G"])["size"], 3_u64 << 30);
    let list = lab.words(&["disk", "ls", "a"]);
    let lines: Vec<Vec<_>> = list.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(lines[0], ["SERIAL", "BUS", "SIZE", "FORMAT", "ACCESS", "BY", "FILE"]);
    assert_eq!(lines[1], ["root-disk", "-", "1G", "qcow2", "writable", "others", "/images/root.qcow2"]);
    assert!(lines.contains(&vec![serial, "scsi", "3G", "raw", "writable", "guestlet", &file]), "{list}");

    for serial in [serial, "data 2", "third"] {
        let expected = format!(
            "{serial}: detached\nThe guest had not released it: there is no session with an agent in this guest\n"
        );
        assert_eq!(lab.words(&["disk", "detach", "a", "--force", "--serial", serial]), expected);
    }
    assert_eq!((qemu.devices(), qemu.nodes()), (vec![], vec![]));
    assert!(std::fs::exists(&file).unwrap(), "what is behind a disk stays");
}

#[test]
fn what_is_already_so_is_success() {
    let (lab, qemu) = started();
    let image = image(&lab, "data.raw");
    let attach = ["attach", "a", "--file", &image, "--serial", "data"];
    let first = ask(&lab, &attach);
    qemu.commands();
    assert_eq!(ask(&lab, &attach), first);
    let resize = ["resize", "a", "--serial", "data", "--size", "2M"];
    assert_eq!(ask(&lab, &resize)["size"], 2 << 20);
    assert_eq!(ask(&lab, &resize)["size"], 2 << 20);
    let commands = qemu.commands();
    assert!(!commands.contains(&"blockdev-add".into()) && !commands.contains(&"device_add".into()));
    let detach = ["detach", "a", "--force", "--serial", "data"];
    assert_eq!(ask(&lab, &detach)["was_attached"], true);
    assert_eq!(ask(&lab, &detach)["was_attached"], false);
}

#[test]
fn what_cannot_be_is_refused_in_words_and_changes_nothing() {
    let (lab, qemu) = started();
    let image = image(&lab, "data.raw");
    let other = self::image(&lab, "other.raw");
    let odd = self::image(&lab, "odd");
    for (serial, bus) in [("data", "scsi"), ("v1", "virtio"), ("v2", "virtio")] {
        let file = if serial == "data" { image.clone() } else { self::image(&lab, &format!("{serial}.raw")) };
        lab.words(&["disk", "attach", "a", "--file", &file, "--serial", serial, "--bus", bus]);
    }
    let before = (qemu.devices(), qemu.nodes());
    let long = "x".repeat(65);
    let folder = text(&lab.path("."));
    let nothing = text(&lab.path("nothing.raw"));
    let strange = text(&lab.path("nothing"));
    let new = |rest: &[&'static str]| [&["attach", "a", "--size", "1M", "--serial"], rest].concat();
    let cases: Vec<(Vec<&str>, i32, &str)> = vec![
        (new(&["data"]), 1, "the disk \"data\" is already attached with another file: /"),
        (vec!["attach", "a", "--file", &other, "--serial", "data"], 1, "already attached with another file"),
        (
            vec!["attach", "a", "--file", &image, "--serial", "data", "--bus", "virtio"],
            1,
            "another bus: scsi-hd",
        ),
        (
            vec!["attach", "a", "--file", &image, "--serial", "two"],
            1,
            "data.raw\" is in use: it backs guestlet-",
        ),
        (
            vec!["attach", "a", "--file", &other, "--serial", "root-disk"],
            1,
            "serial \"root-disk\" is in use: /machine/peripheral-anon/device[0]",
        ),
        (new(&["three", "--bus", "virtio"]), 1, "no free PCI Express root port"),
        (
            vec!["attach", "a", "--size", "1M", "--serial", &long],
            1,
            "has 65 bytes, but a guest can read only 64",
        ),
        (
            new(&["123456789012345678901", "--bus", "virtio"]),
            1,
            "has 21 bytes, but a guest can read only 20 of a disk on the virtio bus",
        ),
        (new(&[""]), 1, "serial is empty"),
        (new(&["a\nb"]), 1, "characters that a disk cannot show"),
        (
            vec!["attach", "a", "--size", "1000", "--serial", "s"],
            1,
            "size 1000 is not a multiple of 512 bytes",
        ),
        (vec!["attach", "a", "--file", &odd, "--serial", "s"], 1, "set its format, raw or qcow2"),
        (
            vec!["attach", "a", "--file", &folder, "--format", "raw", "--serial", "s"],
            1,
            "neither a regular file",
        ),
        (vec!["attach", "a", "--file", &nothing, "--serial", "s"], 1, "No such file"),
        (vec!["attach", "a", "--file", &strange, "--serial", "s"], 1, "No such file"),
        (new(&["bad"]), 1, "QEMU refused: it does not like it"),
        (vec!["attach", "a", "--file", &other, "--serial", "bad"], 1, "QEMU refused: it does not like it"),
        (
            vec!["attach", "a", "--file", &other, "--serial", "locked"],
            1,
            "other.raw\" is in use: it backs another VM or program",
        ),
        (vec!["attach", "x", "--file", &other, "--serial", "s"], 4, "knows no VM named \"x\""),
        (vec!["attach", "b", "--file", &other, "--serial", "s"], 1, "has no QMP socket in the settings"),
        (vec!["attach", "a", "--serial", "s"], 2, "<--file <FILE>|--size <SIZE>>"),
        (vec!["attach", "a", "--file", &other, "--size", "1M", "--serial", "s"], 2, "cannot be used with"),
        (vec!["resize", "a", "--serial", "data", "--size", "512"], 1, "cannot shrink"),
        (vec!["resize", "a", "--serial", "nobody", "--size", "1G"], 1, "has no disk with serial \"nobody\""),
        (vec!["resize", "a", "--serial", "root-disk", "--size", "9G"], 1, "was not attached by guestlet"),
        (
            vec!["detach", "a", "--force", "--serial", "root-disk"],
            1,
            "was not attached by guestlet, and is left alone",
        ),
        (vec!["detach", "a", "--force", "--serial", "s", "--wait", "601"], 2, "601"),
    ];
    for (arguments, code, words) in cases {
        assert_fails(&lab.ctl(&[&["disk"], &arguments[..]].concat()), code, words);
    }
    assert_eq!((qemu.devices(), qemu.nodes()), before);
    // Those that were made for what was refused then are gone again.
    let volumes = std::fs::read_dir(lab.path("volumes/a")).unwrap().map(|entry| entry.unwrap().file_name());
    assert_eq!(volumes.collect::<Vec<_>>(), [""; 0]);
    // One that was there before stays.
    lab.words(&["disk", "attach", "a", "--size", "1M", "--serial", "kept"]);
    lab.words(&["disk", "detach", "a", "--force", "--serial", "kept"]);
    let kept = ["disk", "attach", "a", "--file", &other, "--serial", "kept"];
    lab.words(&kept);
    assert_fails(&lab.ctl(&["disk", "attach", "a", "--size", "1M", "--serial", "kept"]), 1, "another file");
    assert!(lab.path("volumes/a/kept.raw").exists());
    drop(qemu);
    lab.until_vm("a", |vm| vm["power"] == "off");
    assert_fails(&lab.ctl(&["disk", "ls", "a"]), 1, "QEMU cannot be asked: the VM is off");
}

/// Lets the connection break at each command in turn, until one run needs fewer.
fn broken_everywhere(lab: &Lab, qemu: &Hypervisor, moment: Moment, work: &[&str], undo: impl Fn()) {
    for at in 0.. {
        assert!(at < 100, "it never ends");
        qemu.break_at(at, moment);
        let outcome = lab.ctl(work);
        if !qemu.has_broken() {
            assert!(outcome.status.success(), "{outcome:?}");
            assert!(at > 5, "it was broken at {at} commands only");
            return;
        }
        // The one that broke may have been one that looks for leftovers, of an operation that had succeeded.
        if !outcome.status.success() {
            assert_fails(&outcome, 1, "QEMU");
        }
        lab.until("it can be repeated", || lab.ctl(work).status.success());
        undo();
    }
}

#[test]
fn an_attach_that_breaks_anywhere_is_repeated() {
    for moment in [Moment::Before, Moment::After] {
        let (lab, qemu) = started();
        let work = ["disk", "attach", "a", "--size", "1M", "--serial", "data"];
        broken_everywhere(&lab, &qemu, moment, &work, || {
            assert_eq!((qemu.devices().len(), qemu.nodes().len()), (1, 1), "{moment:?}");
            assert_eq!(managed(&lab)[0]["serial"], "data");
            lab.words(&["disk", "detach", "a", "--force", "--serial", "data"]);
            assert_eq!((qemu.devices().len(), qemu.nodes().len()), (0, 0));
        });
    }
}

#[test]
fn a_detach_that_breaks_anywhere_is_repeated() {
    for moment in [Moment::Before, Moment::After] {
        let (lab, qemu) = started();
        let attach = ["disk", "attach", "a", "--size", "1M", "--serial", "data"];
        lab.words(&attach);
        broken_everywhere(
            &lab,
            &qemu,
            moment,
            &["disk", "detach", "a", "--force", "--serial", "data"],
            || {
                lab.until("nothing is left", || qemu.devices().is_empty() && qemu.nodes().is_empty());
                lab.words(&attach);
            },
        );
    }
}

#[test]
fn a_daemon_that_is_killed_in_the_middle_is_no_harm() {
    let attach = ["disk", "attach", "a", "--size", "1M", "--serial", "data"];
    let detach = ["disk", "detach", "a", "--force", "--serial", "data"];
    let (mut lab, qemu) = started();
    for moment in [Moment::Before, Moment::After] {
        for command in ["blockdev-add", "device_add"] {
            kill_at(&mut lab, &qemu, command, moment, &attach);
            lab.words(&attach);
            assert_eq!((qemu.devices().len(), qemu.nodes().len()), (1, 1), "{command} {moment:?}");
            lab.words(&detach);
        }
        for command in ["device_del", "blockdev-del"] {
            lab.words(&attach);
            kill_at(&mut lab, &qemu, command, moment, &detach);
            lab.words(&detach);
            assert_eq!((qemu.devices().len(), qemu.nodes().len()), (0, 0), "{command} {moment:?}");
        }
    }
}

/// Kills the daemon while QEMU is at a command, and starts it again.
fn kill_at(lab: &mut Lab, qemu: &Hypervisor, command: &'static str, moment: Moment, work: &[&str]) {
    let (there, go) = qemu.stop_at(command, moment);
    let mut caller = call(lab, work);
    there.recv_timeout(DEADLINE).unwrap();
    lab.kill();
    go.send(()).unwrap();
    assert!(!wait(&mut caller).success());
    lab.again();
    lab.until_vm("a", |vm| vm["power"] == "running");
}

fn call(lab: &Lab, arguments: &[&str]) -> Child {
    lab.ctl_command(arguments).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
}

#[test]
fn a_guest_that_lets_go_late_leaves_nothing_open() {
    let (lab, qemu) = started();
    lab.words(&["disk", "attach", "a", "--size", "1M", "--serial", "data"]);
    qemu.guest_is(Manner::Slow);
    let detach = ["disk", "detach", "a", "--force", "--serial", "data", "--wait", "1"];
    assert_fails(&lab.ctl(&detach), 1, "the guest has not released the disk \"data\" within 1 s");
    assert_fails(&lab.ctl(&detach), 1, "the guest has not released the disk \"data\" within 1 s");
    assert_eq!(managed(&lab).len(), 1);
    qemu.let_go();
    lab.until("the node is closed", || qemu.nodes().is_empty());
    assert_eq!(ask(&lab, &detach[1..])["was_attached"], false);
}

#[test]
fn a_guest_that_refuses_keeps_its_disk() {
    let (lab, qemu) = started();
    lab.words(&["disk", "attach", "a", "--size", "1M", "--serial", "data"]);
    qemu.guest_is(Manner::Stubborn);
    assert_fails(
        &lab.ctl(&["disk", "detach", "a", "--force", "--serial", "data"]),
        1,
        "the guest refuses to release",
    );
    assert_eq!((qemu.devices().len(), qemu.nodes().len()), (1, 1));
}

#[test]
fn one_at_a_time_works_on_a_disk_and_goes_on_without_its_caller() {
    let (lab, qemu) = started();
    let attach = ["disk", "attach", "a", "--size", "1M", "--serial", "data"];
    lab.words(&attach);
    qemu.guest_is(Manner::Slow);
    qemu.commands();
    let mut caller = call(&lab, &["disk", "detach", "a", "--force", "--serial", "data"]);
    let mut seen = Vec::new();
    let asked = std::cell::RefCell::new(&mut seen);
    lab.until("the guest is asked", || {
        asked.borrow_mut().extend(qemu.commands());
        asked.borrow().contains(&"device_del".to_owned())
    });
    assert_fails(&lab.ctl(&attach), 1, "another operation on the disk \"data\" is under way");
    // Others do not wait for it.
    lab.words(&["disk", "attach", "a", "--size", "1M", "--serial", "more"]);
    caller.kill().unwrap();
    wait(&mut caller);
    qemu.let_go();
    lab.until("the disk is gone", || {
        let serials: Vec<_> = managed(&lab).iter().map(|disk| disk["serial"].clone()).collect();
        serials == ["more"] && qemu.nodes().len() == 1
    });
    lab.until("it can be attached again", || lab.ctl(&attach).status.success());
}

#[test]
fn nodes_that_were_left_are_closed_and_others_are_not() {
    let lab = lab();
    let qemu = Hypervisor::start(&lab.path("a.qmp"), &[]);
    qemu.leave_node("guestlet-6e5ba4b5473c64bf6f06");
    qemu.leave_node("guestlet-of-somebody-else");
    let lab = lab.start();
    lab.until("the node is closed", || qemu.nodes().len() == 1);
    assert!(lab.ctl(&["disk", "ls", "a"]).status.success());
    assert_eq!(qemu.nodes().len(), 1);
}

#[test]
fn volumes_that_were_made_with_disks_are_listed_and_removed_once_nobody_has_them() {
    let (mut lab, qemu) = started();
    assert_eq!(ask(&lab, &["volumes"]), json!([]));
    for (serial, format) in [("data 1", "raw"), ("logs", "qcow2")] {
        lab.words(&["disk", "attach", "a", "--size", "1G", "--serial", serial, "--format", format]);
    }
    let folder = lab.path("volumes").canonicalize().unwrap();
    let volume = |name: &str, serial: &str, file: &str, attached: Option<bool>| {
        let (format, file) = (file.rsplit_once('.').unwrap().1, text(&folder.join(file)));
        json!({
            "name": name, "serial": serial, "size": 1 << 30, "format": format, "attached": attached, "file": file,
        })
    };
    let listed = |lab: &Lab, rest: &[&str]| -> Vec<Value> {
        let mut listed = ask(lab, &[&["volumes"], rest].concat()).as_array().unwrap().clone();
        for one in &mut listed {
            let allocated = one.as_object_mut().unwrap().remove("allocated").unwrap();
            assert!(allocated.as_u64().unwrap() < 1 << 20, "they are sparse: {allocated}");
        }
        listed
    };
    let both = |attached| {
        ["data 1", "logs"]
            .into_iter()
            .zip(["a/data%201.raw", "a/logs.qcow2"])
            .map(move |(serial, file)| (serial, file, attached))
    };
    let of_a =
        |attached| both(attached).map(|(serial, file, at)| volume("a", serial, file, at)).collect::<Vec<_>>();
    assert_eq!(listed(&lab, &[]), of_a(Some(true)));
    assert_eq!(listed(&lab, &["b"]), [json!(null); 0]);

    let remove = |serial: &'static str| ["disk", "rm", "a", "--serial", serial];
    assert_fails(&lab.ctl(&remove("logs")), 1, "is attached to the VM a; detach it first");
    for serial in ["data 1", "logs"] {
        lab.words(&["disk", "detach", "a", "--force", "--serial", serial]);
    }
    assert_eq!(listed(&lab, &["a"]), of_a(Some(false)));
    // Another disk of the VM has it, as a file.
    let file = text(&folder.join("a/logs.qcow2"));
    lab.words(&["disk", "attach", "a", "--file", &file, "--serial", "other"]);
    assert_fails(&lab.ctl(&remove("logs")), 1, "is attached to the VM a; detach it first");
    lab.words(&["disk", "detach", "a", "--force", "--serial", "other"]);
    let open = std::fs::File::open(&file).unwrap();
    assert_fails(
        &lab.ctl(&remove("logs")),
        1,
        "is open in another program, and none of the VMs that can be asked has",
    );
    drop(open);
    assert_eq!(lab.words(&remove("logs")), "logs: removed\n");
    assert_eq!(lab.words(&remove("logs")), "logs: there is no such volume\n");
    assert!(!std::fs::exists(&file).unwrap());

    // Nobody says what a QEMU has that does not answer.
    qemu.be_silent();
    lab.until_vm("a", |vm| vm["power_problem"] != "");
    assert_fails(&lab.ctl(&remove("data 1")), 1, "the VM a may have it, but cannot be asked");
    assert_eq!(listed(&lab, &[]), [volume("a", "data 1", "a/data%201.raw", None)]);
    drop(qemu);
    // Its VM is in no list any more.
    lab.edit("name = 'a'", "name = 'c'");
    lab.until("the list is read", || lab.ctl(&["info", "c"]).status.success());
    assert_eq!(ask(&lab, &["rm", "../volumes/a", "--serial", "data 1"])["was_there"], false);
    let words = lab.words(&["disk", "volumes"]);
    let lines: Vec<Vec<_>> = words.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(lines[0], ["VM", "SERIAL", "SIZE", "USED", "FORMAT", "ATTACHED", "FILE"]);
    assert_eq!(lines[1][..4], ["a", "data", "1", "1G"], "{words}");
    assert_eq!(ask(&lab, &["rm", "a", "--serial", "data 1"]), json!({"serial": "data 1", "was_there": true}));
    assert_eq!(listed(&lab, &[]), [json!(null); 0]);
}
