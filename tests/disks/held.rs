//! Disks that are held, and that become other ones before, meanwhile and afterwards.

use std::time::Duration;

use guestlet::guest::volumes::Error;
use guestlet::guest::volumes::format::{Format, Kind, format};
use guestlet::guest::volumes::grow::grow;
use guestlet::guest::volumes::held::Held;
use guestlet::guest::volumes::mount::{Mount, Source, mount};

use crate::lab::{Lab, enter, run};
use crate::mount::plain;

const LONG: Duration = Duration::from_secs(60);

fn ext4() -> Format<'static> {
    Format { identity: "data-1", kind: Kind::Ext4, label: None, over_data: false, deadline: LONG }
}

fn file(lab: &Lab, name: &str) -> std::path::PathBuf {
    let file = lab.path(name);
    std::fs::File::create(&file).unwrap().set_len(64 << 20).unwrap();
    file
}

#[test]
fn another_disk_under_the_name_of_the_one_that_was_meant_is_not_held() {
    let Some(lab) = enter() else { return };
    let mut disk = lab.disk("one", 64);
    let known = disk.known("data-1");
    let hold = |known| lab.wait(Held::of(&lab.guest, known, None, "a test holds it"));
    drop(hold(&known).unwrap());
    disk.change_to(&file(&lab, "other"));
    let sum = disk.sum();
    let error = hold(&known).unwrap_err();
    assert!(matches!(error, Error::Another { .. }), "{error:?}");
    assert_eq!(disk.sum(), sum);
    // Its turn is over.
    let known = disk.known("data-1");
    assert!(lab.wait(format(&lab.guest, &hold(&known).unwrap(), &ext4())).unwrap().made);
    // Another partition of the same number, or none.
    run(&format!(
        "wipefs -qa {0}; echo size=8MiB | sfdisk --quiet --no-reread --no-tell-kernel {0}; partx --add {0}",
        disk.name()
    ));
    let known = disk.known("data-1");
    let part = |known| lab.wait(Held::of(&lab.guest, known, Some(1), "a test holds it"));
    assert!(part(&known).unwrap().file().to_str().unwrap().ends_with("p1"));
    disk.forget_partition(1);
    part(&known).unwrap_err();
}

#[test]
fn as_long_as_it_is_held_its_name_is_no_other_disks() {
    let Some(lab) = enter() else { return };
    let (disk, place) = (lab.disk("one", 64), lab.folder("place"));
    let held = lab.hold(&disk.device).unwrap();
    // It goes as soon as nobody has it open any more.
    run(&format!("losetup --detach {}", disk.name()));
    run(&format!("! losetup {} {} 2>&1", disk.name(), file(&lab, "other").display()));
    held.check().unwrap();
    assert!(lab.wait(format(&lab.guest, &held, &ext4())).unwrap().made);
    let wanted = Mount { check: true, ..plain(Source::Device(&held), &place) };
    lab.wait(mount(&lab.guest, &wanted)).unwrap();
    run(&format!("umount {}", place.display()));
    drop(held);
    let end = std::time::Instant::now() + LONG;
    while lab.hold(&disk.device).is_ok() {
        assert!(std::time::Instant::now() < end, "it stays");
    }
}

#[test]
fn what_is_not_the_disk_any_more_is_not_written_to() {
    let Some(lab) = enter() else { return };
    let (disk, place) = (lab.disk("one", 64), lab.folder("place"));
    let held = lab.hold(&disk.device).unwrap();
    run(&format!("mkfs.ext4 -q {}", disk.name()));
    let sum = disk.sum();
    // Its name leads to another one, whoever has done that.
    let other = lab.disk("other", 64);
    run(&format!("mount --bind {} {}", other.name(), disk.name()));
    let others = other.sum();
    let is_another = |error: Error| assert!(matches!(error, Error::Another { .. }), "{error:?}");
    is_another(held.check().unwrap_err());
    is_another(lab.wait(format(&lab.guest, &held, &ext4())).unwrap_err());
    is_another(lab.wait(grow(&lab.guest, &held, LONG)).unwrap_err());
    let wanted = Mount { check: true, ..plain(Source::Device(&held), &place) };
    lab.wait(mount(&lab.guest, &wanted)).unwrap_err();
    let wanted = Mount { source: Source::File(&held), ..wanted };
    lab.wait(mount(&lab.guest, &wanted)).unwrap_err();
    run(&format!("umount {}", disk.name()));
    assert_eq!((disk.sum(), other.sum()), (sum, others));
    held.check().unwrap();
}
