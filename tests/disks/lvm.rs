//! Which room of a volume group a logical volume takes, with LVM's programs played by scripts: the kernel of a machine that
//! tests run on may have no device mapper.

use std::os::unix::fs::symlink;

use guestlet::guest::Guest;
use guestlet::sys::root::Root;

use crate::lab::{enter, run};

/// A volume group of one physical volume, whose extents of 4 MiB are counted in files.
const PROGRAMS: [(&str, &str); 6] = [
    ("pvs", "read pe < $S/pe; case \"$*\" in *vg_name*) echo \"  $((pe << 22))|group|$pe|Ab1-x\";; *) echo \"  $((pe << 22))|$pe\"; esac"),
    // A line for each segment.
    (
        "lvs",
        "read le < $S/le; read volume < $S/volume
         echo \"  data|$volume|Lv1-x|linear|10\"; [ $le = 10 ] || echo \"  data|$volume|Lv1-x|linear|$((le - 10))\"",
    ),
    ("vgs", "cat $S/free"),
    (
        "pvresize",
        "for last; do :; done; read pe < $S/pe; read free < $S/free; new=$(($(blockdev --getsize64 $last) / 4194304 - 1))
         echo $((free + new - pe)) > $S/free; echo $new > $S/pe",
    ),
    (
        "lvextend",
        "[ ! -e $S/fails ] || exit 5
         echo \"$*\" >> $S/log; read le < $S/le; read free < $S/free
         case $3 in +*) to=$((le + $3));; *) to=$3;; esac
         echo $to > $S/le; echo $((free - to + le)) > $S/free
         [ ! -e $S/dies ] || exit 5",
    ),
    (
        "blkid",
        "for last; do :; done; [ $last != $(cat $S/physical) ] || { echo TYPE=LVM2_member; exit; }; exec /usr/sbin/blkid \"$@\"",
    ),
];

#[test]
fn a_logical_volume_takes_what_the_disk_brought_and_no_more() {
    let Some(mut lab) = enter() else { return };
    let (disk, volume, root) = (lab.disk("physical", 64), lab.disk("volume", 32), lab.folder("root"));
    for folder in ["dev", "etc", "proc", "sys", "var"] {
        symlink(format!("/{folder}"), root.join(folder)).unwrap();
    }
    std::fs::create_dir_all(root.join("usr/sbin")).unwrap();
    let state = root.display();
    for (name, script) in PROGRAMS {
        let path = root.join("usr/sbin").join(name);
        std::fs::write(&path, format!("#!/bin/sh -e\nS={state}\n{script}\n")).unwrap();
        run(&format!("chmod 755 {}", path.display()));
    }
    lab.guest = Guest { root: Root::at(&root), ..Guest::default() };
    run(&format!(
        "mkfs.ext4 -q {1}; echo 15 > {state}/pe; echo 5 > {state}/free; echo 10 > {state}/le; echo {0} > {state}/physical; echo {1} > {state}/volume",
        disk.name(),
        volume.name()
    ));
    disk.put(0, b"something");
    let last = || {
        let steps = lab.grow(&disk.device).unwrap();
        format!("{:?}", steps.last().unwrap())
    };
    let log = || std::fs::read_to_string(root.join("log")).unwrap_or_default();
    // There is room, which the disk has not brought.
    let steps = last();
    assert!(steps.contains(volume.name()) && steps.contains("NotNeeded"), "{steps}");
    assert_eq!(log(), "");
    disk.resize(128);
    last();
    assert_eq!(log(), format!("--quiet -l 26 group/data {}\n", disk.name()));
    last();
    assert_eq!(log().lines().count(), 1);
    // What was interrupted is finished the next time.
    let (fails, dies) = (root.join("fails"), root.join("dies"));
    std::fs::write(&fails, "").unwrap();
    disk.resize(192);
    let steps = last();
    assert!(steps.contains("logical volume group/data") && steps.contains("Refused"), "{steps}");
    std::fs::remove_file(&fails).unwrap();
    last();
    assert_eq!(log().lines().last(), Some(format!("--quiet -l 42 group/data {}", disk.name()).as_str()));
    last();
    assert_eq!(log().lines().count(), 2);
    // It was extended, and that was not noted any more: it is not extended once more, for which there would be room.
    std::fs::write(root.join("free"), "40\n").unwrap();
    std::fs::write(&dies, "").unwrap();
    disk.resize(256);
    let steps = last();
    assert!(steps.contains("Refused"), "{steps}");
    std::fs::remove_file(&dies).unwrap();
    let steps = last();
    assert!(steps.contains(volume.name()) && !steps.contains("Refused"), "{steps}");
    assert_eq!(log().lines().count(), 3, "{}", log());
    // Nor if the disk has grown meanwhile: then by the rest.
    std::fs::write(&dies, "").unwrap();
    disk.resize(320);
    last();
    disk.resize(384);
    std::fs::remove_file(&dies).unwrap();
    last();
    assert_eq!(log().lines().last(), Some(format!("--quiet -l 90 group/data {}", disk.name()).as_str()));
    last();
    assert_eq!(log().lines().count(), 5);
    assert_eq!(std::fs::read_dir(root.join("var/lib/guestlet/growths")).unwrap().count(), 0);
}
