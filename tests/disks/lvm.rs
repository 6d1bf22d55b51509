//! Which room of a volume group a logical volume takes, with LVM's programs played by scripts: the kernel of a machine that
//! tests run on may have no device mapper.

use std::os::unix::fs::symlink;

use guestlet::guest::Guest;
use guestlet::sys::root::Root;

use crate::lab::{enter, run};

/// A volume group of one physical volume, whose extents of 4 MiB are counted in files.
const PROGRAMS: [(&str, &str); 6] = [
    ("pvs", "read pe < $S/pe; case \"$*\" in *vg_name*) echo \"  $((pe << 22))|group|$pe|Ab1-x\";; *) echo \"  $((pe << 22))|$pe\"; esac"),
    ("lvs", "echo \"  data|$(cat $S/volume)|linear\""),
    ("vgs", "cat $S/free"),
    (
        "pvresize",
        "for last; do :; done; read pe < $S/pe; read free < $S/free; new=$(($(blockdev --getsize64 $last) / 4194304 - 1))
         echo $((free + new - pe)) > $S/free; echo $new > $S/pe",
    ),
    ("lvextend", "[ ! -e $S/fails ] || exit 5; echo \"$*\" >> $S/log"),
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
        "mkfs.ext4 -q {1}; echo 15 > {state}/pe; echo 5 > {state}/free; echo {0} > {state}/physical; echo {1} > {state}/volume",
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
    assert_eq!(log(), format!("--quiet -l +16 group/data {}\n", disk.name()));
    last();
    assert_eq!(log().lines().count(), 1);
    // What was interrupted is finished the next time.
    std::fs::write(root.join("fails"), "").unwrap();
    disk.resize(192);
    let steps = last();
    assert!(steps.contains("logical volume group/data") && steps.contains("Refused"), "{steps}");
    std::fs::remove_file(root.join("fails")).unwrap();
    last();
    assert_eq!(log().lines().last(), Some(format!("--quiet -l +16 group/data {}", disk.name()).as_str()));
    last();
    assert_eq!(log().lines().count(), 2);
}
