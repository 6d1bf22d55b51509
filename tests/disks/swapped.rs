//! Rules for disks, whose names other disks take: while something waits, and before anybody says so. And one thing at a
//! time that is done to a disk.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

use guestlet::guest::Guest;
use guestlet::guest::disk_rules::keep;
use guestlet::guest::disks::lookup::Selector;
use guestlet::guest::disks::release::{self as whole, ReleaseError, Released};
use guestlet::guest::freeze::{By, Freezer, Settings, freeze, thaw};
use guestlet::guest::volumes::held::Held;
use guestlet::receipt::Caller;
use guestlet::sys::effects::{self, Effects};
use guestlet::sys::mounting::{How as Way, Place, What};
use guestlet::sys::uevents::Action;

use crate::lab::enter;
use crate::rules::{Machine, made_new, mounted, run_umount};

/// This machine, but for its file systems: that they are frozen is only said.
#[derive(Debug)]
struct NothingFreezes;

impl Effects for NothingFreezes {
    fn open_mount(&self, _: &guestlet::sys::mountinfo::Mount) -> io::Result<OwnedFd> {
        Ok(std::fs::File::open("/dev/null")?.into())
    }

    fn freeze(&self, _: BorrowedFd<'_>) -> io::Result<()> {
        Ok(())
    }

    fn thaw(&self, _: BorrowedFd<'_>) -> io::Result<()> {
        Ok(())
    }

    fn mount(&self, what: &What<'_>, place: &Place, how: Way) -> io::Result<()> {
        effects::Machine.mount(what, place, how)
    }
}

#[test]
fn a_disk_that_took_the_name_of_another_during_a_freeze_is_not_formatted() {
    let Some(lab) = enter() else { return };
    let machine = Machine::new(&lab);
    let mut disk = lab.disk("first", 64);
    let other = lab.path("second");
    std::fs::File::create(&other).unwrap().set_len(64 << 20).unwrap();
    let settings = Settings { folder: lab.folder("marker"), ..Settings::default() };
    let guest =
        Guest { effects: Arc::new(NothingFreezes), freezer: Freezer::new(settings), ..Guest::default() };
    let point = lab.path("point");
    machine.run_as(guest, &[made_new("data-1", &point, "ext4")], async |run| {
        run.until(&point, "no-disk").await;
        freeze(&run.guest, None, &Caller::new("a test", "qga")).await.unwrap();
        // The disk of the rule comes, and is waited with.
        let name = machine.plug_loop(&disk, "data-1");
        run.say(Action::Add, &name);
        run.until(&point, "working").await;
        // It goes, and another one has its name.
        machine.unplug(&name);
        disk.change_to(&other);
        let sum = disk.sum();
        machine.plug_loop(&disk, "data-2");
        run.say(Action::Remove, &name);
        run.say(Action::Add, &name);
        run.disk("data-2").await;
        thaw(&run.guest, By::Client).await.unwrap();
        run.until(&point, "no-disk").await;
        assert_eq!((disk.sum(), mounted(&point).as_str()), (sum, ""));
        // What there is to do then is done.
        freeze(&run.guest, None, &Caller::new("a test", "qga")).await.unwrap();
        run.write(&[made_new("data-2", &point, "ext4")]);
        run.until(&point, "working").await;
        assert_eq!(disk.sum(), sum);
        thaw(&run.guest, By::Client).await.unwrap();
        run.until(&point, "mounted").await;
        run_umount(&point);
    });
}

#[test]
fn a_disk_that_became_another_one_before_anybody_said_so_is_not_formatted() {
    let Some(lab) = enter() else { return };
    let machine = Machine::new(&lab);
    let mut disk = lab.disk("first", 64);
    let other = lab.path("second");
    std::fs::File::create(&other).unwrap().set_len(64 << 20).unwrap();
    let point = lab.path("point");
    machine.run(&[], async |run| {
        let name = machine.plug_loop(&disk, "data-1");
        run.say(Action::Add, &name);
        run.disk("data-1").await;
        disk.change_to(&other);
        let sum = disk.sum();
        run.write(&[made_new("data-1", &point, "ext4")]);
        let standing = run.until(&point, "failed").await;
        assert!(standing.reason.contains("is not the expected disk"), "{standing:?}");
        assert_eq!((disk.sum(), mounted(&point).as_str()), (sum, ""));
    });
}

#[test]
fn one_thing_at_a_time_is_done_to_a_disk() {
    let Some(lab) = enter() else { return };
    let machine = Machine::new(&lab);
    let (disk, point) = (lab.disk("disk", 64), lab.path("point"));
    let by = Selector::Serial("data-1".to_owned());
    machine.run(&[made_new("data-1", &point, "ext4")], async |run| {
        let name = machine.plug_loop(&disk, "data-1");
        run.say(Action::Add, &name);
        run.until(&point, "mounted").await;
        let known = run.disk("data-1").await;
        let held = Held::of(&run.guest, &known, None, "a test holds it").await.unwrap();
        let error = whole::release(&run.guest, &by).await.unwrap_err();
        assert!(matches!(error, ReleaseError::Busy(_)), "{error:?}");
        assert!(error.to_string().ends_with("is busy: a test holds it"), "{error}");
        // It stays, and is mounted again once nothing else is done to it.
        drop(held);
        run.until(&point, "mounted").await;
        assert_eq!(
            whole::release(&run.guest, &by).await.unwrap(),
            Released::Unused(run.disk("data-1").await)
        );
        assert_eq!(mounted(&point), "");
        // By whatever name, and also what is not done by rules.
        let _held = Held::of(&run.guest, &known, None, "a test holds it").await.unwrap();
        let error = Held::called(&run.guest, &disk.device, "another test").await.unwrap_err().to_string();
        assert!(error.ends_with("is busy: a test holds it"), "{error}");
        keep(&run.guest, &known);
        let standing = run.until(&point, "failed").await;
        assert!(standing.reason.contains("is busy: a test holds it"), "{standing:?}");
    });
}
