//! Disks that have grown, and what is on them.

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use guestlet::guest::volumes::Error;
use guestlet::guest::volumes::grow::{Outcome, Step};

use crate::lab::{Disk, Lab, enter, run};

const MIB: u64 = 1 << 20;

fn do_grow(lab: &Lab, device: &Path) -> Result<Vec<Step>, Error> {
    lab.grow(device)
}

/// A disk with a table that `sfdisk` makes; the kernel knows its partitions. They go with it: to forget them earlier may
/// fail while another program looks at all disks.
fn parted(lab: &Lab, name: &str, mebibytes: u64, table: &str) -> Disk {
    let disk = lab.disk(name, mebibytes);
    run(&format!(
        "printf '{table}' | sfdisk --quiet --no-reread --no-tell-kernel {0}; partx --add {0}",
        disk.name()
    ));
    disk
}

fn partition(disk: &Disk, number: u32) -> String {
    format!("{}p{number}", disk.name())
}

/// The size of a partition for the kernel, in bytes.
fn size(partition: &str) -> u64 {
    run(&format!("blockdev --getsize64 {partition}")).parse().unwrap()
}

/// What became of each layer, with all sizes left out but those of the last.
fn words(steps: &[Step]) -> Vec<String> {
    let word = |step: &Step| match &step.outcome {
        Outcome::Grown { from, to } => {
            assert!(to > from, "{step:?}");
            format!("{}: grown", step.what)
        }
        Outcome::NotNeeded => format!("{}: not needed", step.what),
        Outcome::Refused(why) => format!("{}: {why}", step.what),
    };
    steps.iter().map(word).collect()
}

/// ext4 takes all of its device.
fn blocks(device: &str) -> u64 {
    let told = run(&format!("dumpe2fs -h {device} 2> /dev/null"));
    let number = |name: &str| -> u64 {
        let line = told.lines().find(|line| line.starts_with(name)).unwrap();
        line.rsplit(' ').next().unwrap().parse().unwrap()
    };
    number("Block count:") * number("Block size:")
}

#[test]
fn a_partition_and_its_file_system_take_the_new_room() {
    let Some(lab) = enter() else { return };
    for (name, table) in [
        ("gpt", "label: gpt\\nsize=8MiB, name=boot\\nsize=40MiB, name=data\\n"),
        ("mbr", "label: dos\\nsize=8MiB, type=83\\nsize=40MiB, type=83\\n"),
    ] {
        let disk = parted(&lab, name, 64, table);
        let (first, last) = (partition(&disk, 1), partition(&disk, 2));
        run(&format!("mkfs.ext4 -q {last}; mkfs.ext4 -q {first}"));
        let before = run(&format!("sfdisk --dump {} | grep {first}", disk.name()));
        disk.resize(128);
        let steps = do_grow(&lab, &disk.device).unwrap();
        let expected = [format!("partition 2 of {}: grown", disk.name()), format!("ext4 on {last}: grown")];
        assert_eq!(words(&steps), expected, "{name}");
        run(&format!("sfdisk --verify {}", disk.name()));
        run(&format!("e2fsck -fn {last}"));
        // The last MiB of a GPT is the table's.
        let end = if name == "gpt" { 127 } else { 128 };
        assert_eq!(size(&last), (end - 9) * MIB, "{name}");
        assert_eq!(blocks(&last), size(&last));
        assert_eq!(run(&format!("sfdisk --dump {} | grep {first}", disk.name())), before);
        // Again there is nothing to do, and nothing is written.
        let sum = disk.sum();
        for device in [&disk.device, Path::new(&last)] {
            let expected = [
                format!("partition 2 of {}: not needed", disk.name()),
                format!("ext4 on {last}: not needed"),
            ];
            assert_eq!(words(&do_grow(&lab, device).unwrap()), expected);
        }
        assert_eq!(disk.sum(), sum);
        // What is not at the end stays.
        disk.resize(160);
        let steps = words(&do_grow(&lab, Path::new(&first)).unwrap());
        assert_eq!(
            steps,
            [format!("{}: partition 1 is not the last one on the disk; the last one is 2", disk.name())]
        );
        // The table was written, and then the agent was killed.
        run(&format!("echo ', +' | sfdisk --quiet --no-reread --no-tell-kernel -N 2 {} 2>&1", disk.name()));
        let kernel = size(&last);
        let steps = do_grow(&lab, &disk.device).unwrap();
        assert_eq!(words(&steps)[1], format!("ext4 on {last}: grown"));
        assert!(size(&last) > kernel);
        // It was written and the kernel told, and then it was killed.
        disk.resize(192);
        run(&format!("echo ', +' | sfdisk --quiet --no-reread --no-tell-kernel -N 2 {} 2>&1", disk.name()));
        run(&format!("partx --update {} 2>&1", disk.name()));
        assert_eq!(words(&do_grow(&lab, &disk.device).unwrap())[1], format!("ext4 on {last}: grown"));
        assert_eq!(blocks(&last) / 4096, size(&last) / 4096);
        run(&format!("e2fsck -fn {last}"));
    }
}

#[test]
fn file_systems_without_a_table() {
    let Some(lab) = enter() else { return };
    for (kind, before) in [("ext4", 32), ("xfs", 320), ("btrfs", 128)] {
        let disk = lab.disk(kind, before);
        run(&format!("mkfs.{kind} -q {}", disk.name()));
        let what = format!("{kind} on {}", disk.name());
        assert_eq!(words(&do_grow(&lab, &disk.device).unwrap()), [format!("{what}: not needed")]);
        disk.resize(before + 256);
        if kind == "ext4" {
            assert_eq!(words(&do_grow(&lab, &disk.device).unwrap()), [format!("{what}: grown")]);
            assert_eq!(blocks(disk.name()), (before + 256) * MIB);
            // Not smaller, whatever the disk became.
            disk.resize(before);
            let steps = words(&do_grow(&lab, &disk.device).unwrap());
            assert_eq!(steps, [format!("{what}: the device is smaller than the file system")]);
            continue;
        }
        assert_eq!(
            words(&do_grow(&lab, &disk.device).unwrap()),
            [format!("{what}: it can be grown only while it is mounted")]
        );
        let place = lab.folder(&format!("{kind}-place"));
        run(&format!("mount -o ro {} {}", disk.name(), place.display()));
        assert_eq!(
            words(&do_grow(&lab, &disk.device).unwrap()),
            [format!("{what}: it is mounted read-only")]
        );
        run(&format!("mount -o remount,rw {}; echo kept > {0}/file", place.display()));
        let steps = do_grow(&lab, &disk.device).unwrap();
        assert_eq!(words(&steps), [format!("{what}: grown")]);
        let Outcome::Grown { to, .. } = steps[0].outcome else { panic!() };
        assert!(to > (before + 150) * MIB, "{steps:?}");
        assert_eq!(words(&do_grow(&lab, &disk.device).unwrap()), [format!("{what}: not needed")]);
        assert_eq!(std::fs::read(place.join("file")).unwrap(), b"kept\n");
        run(&format!("umount {}", place.display()));
    }
}

#[test]
fn what_cannot_grow_is_left_alone() {
    let Some(lab) = enter() else { return };
    // A mounted partition in front keeps the disk in use, and that is no hindrance.
    let disk = parted(&lab, "disk", 400, "label: gpt\\nsize=8MiB\\nsize=320MiB\\n");
    let (first, last) = (partition(&disk, 1), partition(&disk, 2));
    let place = lab.folder("place");
    run(&format!("mkfs.ext4 -q {first}; mount {first} {0}; mkfs.xfs -q {last}", place.display()));
    disk.resize(500);
    let other = lab.folder("other");
    run(&format!("mount {last} {}", other.display()));
    let expected = [format!("partition 2 of {}: grown", disk.name()), format!("xfs on {last}: grown")];
    assert_eq!(words(&do_grow(&lab, &disk.device).unwrap()), expected);
    run(&format!("umount {} {}; xfs_repair -n {last} 2>&1", place.display(), other.display()));

    let swap = parted(&lab, "swap", 32, "label: gpt\\nsize=8MiB\\n");
    let only = partition(&swap, 1);
    run(&format!("mkswap {only}"));
    swap.resize(64);
    let sum = swap.sum();
    let expected = [format!("partition 1 of {}: it holds swap, which cannot be grown", swap.name())];
    assert_eq!(words(&do_grow(&lab, &swap.device).unwrap()), expected);
    assert_eq!(swap.sum(), sum);
    // A disk that has become smaller than its table.
    swap.resize(8);
    let steps = words(&do_grow(&lab, &swap.device).unwrap());
    assert!(steps[0].contains("smaller") || steps[0].contains("damaged"), "{steps:?}");

    let blank = lab.disk("blank", 16);
    assert_eq!(do_grow(&lab, &blank.device).unwrap(), []);
    blank.put(0, b"LUKS\xba\xbe\0\x01");
    let steps = words(&do_grow(&lab, &blank.device).unwrap());
    assert!(steps.len() == 1 && !steps[0].ends_with(": grown"), "{steps:?}");
}

#[test]
fn a_table_that_another_tool_changes_meanwhile_is_not_overwritten() {
    let Some(lab) = enter() else { return };
    let disk = parted(&lab, "disk", 64, "label: gpt\\nsize=8MiB\\nsize=40MiB\\n");
    run(&format!("mkfs.ext4 -q {}", partition(&disk, 2)));
    disk.resize(128);
    // It has the disk's lock, as tools have that keep to the rule, and adds a partition.
    let append = "echo size=20MiB | sfdisk --quiet --no-reread --no-tell-kernel --append $0 > /dev/null 2>&1";
    let script = format!("exec 9< $0; flock 9; echo locked; read go; {append}");
    let mut other = Command::new("sh")
        .args(["-ec", &script, disk.name()])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(other.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let mut go = other.stdin.take().unwrap();
    let later = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_secs(1));
        go.write_all(b"go\n").unwrap();
    });
    let steps = words(&do_grow(&lab, &disk.device).unwrap());
    later.join().unwrap();
    assert!(other.wait().unwrap().success());
    let why = format!("partition 3 of {}: the kernel's partition table differs from the disk's", disk.name());
    assert_eq!(steps, [why]);
    let table = run(&format!("sfdisk --dump {}", disk.name()));
    assert!(table.contains(&partition(&disk, 3)), "{table}");
    assert_eq!(size(&partition(&disk, 2)), 40 * MIB);
}

#[test]
fn what_the_kernel_refuses_is_not_written() {
    let Some(lab) = enter() else { return };
    for (name, label) in [("gpt", "gpt"), ("mbr", "dos")] {
        let disk = parted(&lab, name, 64, &format!("label: {label}\\nsize=8MiB\\nsize=40MiB\\n"));
        run(&format!("mkfs.ext4 -q {}", partition(&disk, 2)));
        disk.resize(128);
        // The kernel knows of a partition there that the table does not have.
        run(&format!("addpart {} 3 {} {}", disk.name(), 60 * 2048, 10 * 2048));
        let before = disk.sum();
        let steps = words(&do_grow(&lab, &disk.device).unwrap());
        let what = format!("partition 2 of {}: the kernel refuses to grow it: ", disk.name());
        assert!(steps.len() == 1 && steps[0].starts_with(&what), "{steps:?}");
        assert_eq!(disk.sum(), before, "{name}");
        disk.forget_partition(3);
        assert_eq!(words(&do_grow(&lab, &disk.device).unwrap()).len(), 2);
        assert_eq!(blocks(&partition(&disk, 2)), size(&partition(&disk, 2)));
        run(&format!("sfdisk --verify {}", disk.name()));
    }
}
