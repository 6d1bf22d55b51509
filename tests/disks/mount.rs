//! Mounts: repeated, refused, of copies, bound, and let go of.

use std::io::{Read as _, Write as _};
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use guestlet::guest::volumes::Error;
use guestlet::guest::volumes::fsck::Checked;
use guestlet::guest::volumes::mount::{Mount, Mounted, Propagation, Source, mount};
use guestlet::guest::volumes::unmount::unmount;
use guestlet::guest::volumes::usage::{trim, usage};
use guestlet::sys::superblock;

use crate::lab::{Disk, Lab, enter, run};

const LONG: Duration = Duration::from_secs(60);

pub fn plain<'a>(source: Source<'a>, target: &'a Path) -> Mount<'a> {
    Mount {
        source,
        target,
        kind: None,
        options: &[],
        read_only: false,
        make_target: false,
        over_contents: false,
        propagation: None,
        check: false,
        deadline: LONG,
    }
}

fn do_mount(lab: &Lab, wanted: &Mount<'_>) -> Result<Mounted, Error> {
    let before = mounts();
    let done = lab.wait(mount(&lab.guest, wanted));
    let new = done.as_ref().is_ok_and(|mounted| !mounted.already);
    assert_eq!(mounts(), before + usize::from(new), "{done:?}");
    done
}

fn let_go(lab: &Lab, target: &Path) -> Result<usize, Error> {
    lab.wait(unmount(&lab.guest, target, LONG))
}

fn mounts() -> usize {
    std::fs::read_to_string("/proc/self/mountinfo").unwrap().lines().count()
}

/// How a place is mounted: its own options and those of the file system.
fn options(target: &Path) -> String {
    run(&format!("findmnt -n -o VFS-OPTIONS,FS-OPTIONS,PROPAGATION {}", target.display()))
}

fn ext4(lab: &Lab, name: &str) -> Disk {
    let disk = lab.disk(name, 64);
    run(&format!("mkfs.ext4 -q {}", disk.name()));
    disk
}

fn reason(error: &Error) -> String {
    std::error::Error::source(error).map(ToString::to_string).unwrap_or_default()
}

#[test]
fn a_mount_may_be_repeated_and_another_is_refused() {
    let Some(lab) = enter() else { return };
    let (disk, other, target) = (ext4(&lab, "disk"), ext4(&lab, "other"), lab.path("deep/target"));
    let wanted = plain(Source::Device(disk.held(&lab)), &target);
    let missing = do_mount(&lab, &wanted).unwrap_err();
    assert!(matches!(missing, Error::Target { .. }), "{missing:?}");
    let made = Mount { make_target: true, ..wanted.clone() };
    do_mount(&lab, &made).unwrap_err();
    lab.folder("deep");
    let options_wanted = ["noatime,data=ordered".to_owned(), "nosuid".to_owned()];
    let made = Mount { options: &options_wanted, kind: Some("ext4"), check: true, ..made };
    let mounted = do_mount(&lab, &made).unwrap();
    let expected = Mounted {
        target: target.clone(),
        kind: "ext4".to_owned(),
        already: false,
        checked: Some(Checked::Clean),
    };
    assert_eq!(mounted, expected);
    let found = options(&target);
    assert!(found.contains("nosuid,noatime") && found.contains("rw"), "{found}");
    std::fs::write(target.join("file"), "kept").unwrap();

    // Again; in another way; another disk; another kind.
    assert_eq!(do_mount(&lab, &made).unwrap(), Mounted { already: true, checked: None, ..expected });
    for different in [
        Mount { read_only: true, ..made.clone() },
        Mount { options: &[], ..made.clone() },
        Mount { source: Source::Device(other.held(&lab)), ..made.clone() },
        Mount { kind: Some("xfs"), ..made.clone() },
        Mount { source: Source::Bind(Path::new("/usr")), ..made.clone() },
    ] {
        let error = do_mount(&lab, &different).unwrap_err();
        assert!(matches!(error, Error::Otherwise { .. }), "{error:?}");
        assert!(error.to_string().contains(disk.name()), "{error}");
    }
    // At a second place it is the same file system, and not checked while it is mounted.
    let second = lab.folder("second");
    let again = do_mount(&lab, &Mount { target: &second, ..made.clone() }).unwrap();
    assert_eq!((again.already, again.checked), (false, None));
    assert_eq!(std::fs::read(second.join("file")).unwrap(), b"kept");
    assert_eq!(let_go(&lab, &second).unwrap(), 1);

    let full = lab.wait(usage(&lab.guest, &target)).unwrap();
    assert!(full.used > 0 && full.available > 0 && full.total > full.used && full.inodes > full.inodes_free);
    assert!(lab.wait(trim(&lab.guest, &target, 0, LONG)).unwrap().bytes > 0);
    lab.wait(usage(&lab.guest, &lab.path("nowhere"))).unwrap_err();

    assert_eq!(let_go(&lab, &target).unwrap(), 1);
    assert_eq!(let_go(&lab, &target).unwrap(), 0);
    assert_eq!(let_go(&lab, &lab.path("no/such")).unwrap(), 0);
    let wrong = Mount { kind: Some("xfs"), ..made };
    assert!(
        do_mount(&lab, &wrong)
            .unwrap_err()
            .to_string()
            .ends_with("cannot be mounted as this type: it holds ext4")
    );
}

#[test]
fn only_an_empty_place_is_mounted_on_and_never_through_a_link() {
    let Some(lab) = enter() else { return };
    let (disk, target) = (ext4(&lab, "disk"), lab.folder("target"));
    let link = lab.path("link");
    symlink(&target, &link).unwrap();
    let error = do_mount(&lab, &plain(Source::Device(disk.held(&lab)), &link)).unwrap_err();
    assert!(reason(&error).contains("symbolic links"), "{error:?}");
    let_go(&lab, &link).unwrap_err();
    let file = target.join("file");
    std::fs::write(&file, "seen").unwrap();
    let wanted = plain(Source::Device(disk.held(&lab)), &target);
    assert!(reason(&do_mount(&lab, &wanted).unwrap_err()).contains("not empty"));
    let on_file = do_mount(&lab, &plain(Source::Device(disk.held(&lab)), &file)).unwrap_err();
    assert!(reason(&on_file).contains("Not a directory"), "{on_file:?}");
    do_mount(&lab, &Mount { over_contents: true, ..wanted.clone() }).unwrap();
    // However many are on top of each other.
    run(&format!("mount -t tmpfs over {}", target.display()));
    assert!(matches!(do_mount(&lab, &wanted), Err(Error::Otherwise { .. })));
    assert_eq!(let_go(&lab, &target).unwrap(), 2);
    assert!(file.exists());

    // What cannot be mounted at all.
    std::fs::remove_file(&file).unwrap();
    let blank = lab.disk("blank", 16);
    let error = do_mount(&lab, &plain(Source::Device(blank.held(&lab)), &target)).unwrap_err();
    assert!(error.to_string().ends_with("it holds nothing that is known"), "{error}");
    let wrong = ["no-such-option=1".to_owned()];
    let error = do_mount(&lab, &Mount { options: &wrong, ..wanted.clone() }).unwrap_err();
    assert!(matches!(error, Error::Mount { .. }) && reason(&error).contains("Invalid argument"), "{error:?}");
    let bind = ["bind".to_owned()];
    do_mount(&lab, &Mount { options: &bind, ..wanted.clone() }).unwrap_err();
    // Whose making was interrupted.
    let note = format!(r#"{{"identity":"x","bytes":1,"kind":"ext4","uuid":"{}"}}"#, disk.blkid("UUID"));
    std::fs::create_dir_all("/var/lib/guestlet/formats").unwrap();
    std::fs::write("/var/lib/guestlet/formats/78.json", note).unwrap();
    assert!(matches!(do_mount(&lab, &wanted), Err(Error::Unfinished { .. })));
    std::fs::remove_file("/var/lib/guestlet/formats/78.json").unwrap();
    do_mount(&lab, &wanted).unwrap();
}

#[test]
fn copies_are_told_apart_or_refused() {
    let Some(lab) = enter() else { return };
    for (kind, size) in [("xfs", 320), ("btrfs", 128)] {
        let disk = lab.disk(kind, size);
        run(&format!("mkfs.{kind} -q {}; sync", disk.name()));
        let file = lab.path(&format!("{kind}-copy"));
        run(&format!("cp --sparse=always {} {}", disk.file.display(), file.display()));
        let copy = Disk::of(file, "");
        let (one, other) = (lab.folder(&format!("{kind}-1")), lab.folder(&format!("{kind}-2")));
        let (wanted, wanted_copy) =
            (plain(Source::Device(disk.held(&lab)), &one), plain(Source::Device(copy.held(&lab)), &other));
        assert!(!do_mount(&lab, &wanted).unwrap().already);
        assert!(!options(&one).contains("nouuid"));
        assert!(do_mount(&lab, &wanted).unwrap().already);
        if kind == "xfs" {
            assert!(!do_mount(&lab, &wanted_copy).unwrap().already);
            assert!(options(&other).contains("nouuid"));
            assert!(do_mount(&lab, &wanted_copy).unwrap().already);
            std::fs::write(other.join("file"), "").unwrap();
            assert!(!one.join("file").exists());
            let_go(&lab, &other).unwrap();
        } else {
            let error = do_mount(&lab, &wanted_copy).unwrap_err().to_string();
            assert!(error.contains(&format!("copy of the file system on {}", disk.name())), "{error}");
        }
        let_go(&lab, &one).unwrap();
        // Alone it is nobody's copy.
        if kind == "xfs" {
            do_mount(&lab, &wanted_copy).unwrap();
            assert!(!options(&other).contains("nouuid"));
            let_go(&lab, &other).unwrap();
        }
    }
}

#[test]
fn folders_and_devices_are_bound() {
    let Some(lab) = enter() else { return };
    let (disk, staged, target) = (ext4(&lab, "disk"), lab.folder("staged"), lab.path("target"));
    do_mount(&lab, &plain(Source::Device(disk.held(&lab)), &staged)).unwrap();
    std::fs::create_dir(staged.join("folder")).unwrap();
    let source = staged.join("folder");
    let wanted = Mount {
        read_only: true,
        make_target: true,
        propagation: Some(Propagation::Slave),
        ..plain(Source::Bind(&source), &target)
    };
    assert_eq!(do_mount(&lab, &wanted).unwrap().kind, "ext4");
    assert!(do_mount(&lab, &wanted).unwrap().already);
    std::fs::write(target.join("file"), "").unwrap_err();
    std::fs::write(source.join("file"), "").unwrap();
    assert!(target.join("file").exists());
    let error = do_mount(&lab, &Mount { read_only: false, ..wanted.clone() }).unwrap_err();
    assert!(matches!(error, Error::Otherwise { .. }), "{error:?}");
    let error = do_mount(&lab, &Mount { source: Source::Bind(&staged), ..wanted.clone() }).unwrap_err();
    assert!(matches!(error, Error::Otherwise { .. }), "{error:?}");
    let_go(&lab, &target).unwrap();
    let shared = Mount { propagation: Some(Propagation::Shared), read_only: false, ..wanted };
    do_mount(&lab, &shared).unwrap();
    assert!(options(&target).ends_with("shared"), "{}", options(&target));
    let_go(&lab, &target).unwrap();

    // A device, for those who want no file system.
    let file = lab.path("device");
    let wanted = Mount { make_target: true, ..plain(Source::File(disk.held(&lab)), &file) };
    do_mount(&lab, &wanted).unwrap();
    assert!(do_mount(&lab, &wanted).unwrap().already);
    let mut magic = [0; 2];
    let mut device = std::fs::File::open(&file).unwrap();
    std::io::Seek::seek(&mut device, std::io::SeekFrom::Start(1024 + 0x38)).unwrap();
    device.read_exact(&mut magic).unwrap();
    assert_eq!(magic, [0x53, 0xef]);
    drop(device);
    assert_eq!(let_go(&lab, &file).unwrap(), 1);
    let error = do_mount(&lab, &plain(Source::Bind(&disk.device), &source)).unwrap_err();
    assert!(reason(&error).contains("Is a directory"), "{error:?}");
    let gone = lab.path("gone");
    do_mount(&lab, &plain(Source::Bind(&gone), &source)).unwrap_err();
}

/// A socket has its place in use, and no process has that open: so it is with what the kernel itself holds for a moment.
#[test]
fn what_is_in_use_for_a_moment_by_nobody_who_is_found_is_waited_for() {
    let Some(lab) = enter() else { return };
    let (disk, target) = (ext4(&lab, "disk"), lab.folder("target"));
    let wanted = plain(Source::Device(disk.held(&lab)), &target);
    do_mount(&lab, &wanted).unwrap();
    let socket = UnixListener::bind(target.join("first")).unwrap();
    let error = let_go(&lab, &target).unwrap_err();
    assert!(error.to_string().contains("is in use: no process was found that uses it"), "{error}");
    drop(socket);
    let socket = UnixListener::bind(target.join("second")).unwrap();
    let gone = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(200));
        drop(socket);
    });
    assert_eq!(let_go(&lab, &target).unwrap(), 1);
    gone.join().unwrap();
}

#[test]
fn who_is_in_the_way_is_told() {
    let Some(lab) = enter() else { return };
    let (disk, target) = (ext4(&lab, "disk"), lab.folder("target"));
    let wanted = plain(Source::Device(disk.held(&lab)), &target);
    do_mount(&lab, &wanted).unwrap();
    let file = target.join("a file");
    std::fs::write(&file, "text").unwrap();
    let in_use = |expected: &str| {
        let error = let_go(&lab, &target).unwrap_err();
        let Error::InUse { holders, .. } = &error else { panic!("{error:?}") };
        assert!(holders.to_string().contains(expected), "{expected}: {holders}");
        assert!(error.to_string().contains("is in use: "), "{error}");
        assert!(file.exists());
    };
    for (script, expected) in [
        ("exec 5< 'a file'; cd /; echo; read end".to_owned(), "has TARGET/a file open"),
        ("echo; read end".to_owned(), "has its working directory in TARGET"),
        (
            format!(
                "cp $(readlink -f /bin/sh) {}/shell; cd /; exec {0}/shell -c 'echo; read end'",
                target.display()
            ),
            "runs TARGET/shell",
        ),
    ] {
        let mut child = Command::new("sh")
            .args(["-ec", &script])
            .current_dir(&target)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        child.stdout.as_mut().unwrap().read_exact(&mut [0]).unwrap();
        in_use(&format!("(process {}) {}", child.id(), expected.replace("TARGET", target.to_str().unwrap())));
        child.stdin.take().unwrap().write_all(b"end\n").unwrap();
        child.wait().unwrap();
    }
    let inner = target.join("inner");
    std::fs::create_dir(&inner).unwrap();
    run(&format!("mount -t tmpfs inner {}", inner.display()));
    in_use(&format!("{} is mounted on it", inner.display()));
    run(&format!("umount {}", inner.display()));
    run(&format!("truncate -s 1M {}/image", target.display()));
    let image = Disk::of(target.join("image"), "");
    in_use(&format!("is built on {}", target.join("image").display()));
    drop(image);
    // A disk whose device lets go of it a moment later.
    let deadline = std::time::Instant::now() + LONG;
    while let_go(&lab, &target).is_err() {
        assert!(std::time::Instant::now() < deadline);
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn a_file_system_that_is_gone_is_unmounted_all_the_same() {
    let Some(lab) = enter() else { return };
    let (disk, target) = (lab.disk("disk", 320), lab.folder("target"));
    run(&format!("mkfs.xfs -q {}", disk.name()));
    do_mount(&lab, &plain(Source::Device(disk.held(&lab)), &target)).unwrap();
    std::fs::write(target.join("file"), "lost").unwrap();
    run(&format!("xfs_io -x -c 'shutdown' {}", target.display()));
    std::fs::read_dir(&target).unwrap_err();
    assert_eq!(let_go(&lab, &target).unwrap(), 1);
}

/// What only looks at an ext4 has to come to the same as e2fsck(8), or leave it to that.
#[test]
fn a_check_is_left_out_only_where_it_would_do_nothing() {
    let Some(lab) = enter() else { return };
    let image = lab.path("image");
    let name = image.display();
    for (changes, clean) in [
        ("true", true),
        ("tune2fs -C 5 -c 20", true),
        ("tune2fs -C 20 -c 20", false),
        ("tune2fs -i 1d -T 20200101", false),
        ("tune2fs -O ^metadata_csum", false),
        ("tune2fs -E force_fsck", false),
        ("debugfs -w -R 'ssv state 0'", false),
        ("debugfs -w -R 'ssv last_orphan 12'", false),
        ("debugfs -w -R 'ssv error_count 1'", false),
        ("debugfs -w -R 'feature needs_recovery'", false),
        ("sh -c 'printf x | dd of=$0 bs=1 seek=1300 conv=notrunc'", false),
    ] {
        run(&format!("truncate -s 0 {name}; truncate -s 16M {name}; mkfs.ext4 -q -F {name}"));
        run(&format!("{changes} {name} > /dev/null 2>&1"));
        let found = superblock::read(&std::fs::File::open(&image).unwrap()).unwrap().unwrap();
        assert_eq!(found.clean, clean, "{changes}");
        if clean {
            assert!(run(&format!("e2fsck -n {name} 2> /dev/null")).contains(": clean,"), "{changes}");
        }
    }
}

#[test]
fn a_damaged_file_system_is_repaired_or_refused() {
    let Some(lab) = enter() else { return };
    let (disk, target) = (ext4(&lab, "disk"), lab.folder("target"));
    let wanted = Mount { check: true, ..plain(Source::Device(disk.held(&lab)), &target) };
    // Said to have faults, and has none.
    run(&format!("debugfs -w -R 'ssv state 2' {} 2> /dev/null", disk.name()));
    let mounted = do_mount(&lab, &wanted).unwrap();
    assert!(matches!(mounted.checked, Some(Checked::Repaired | Checked::Clean)), "{mounted:?}");
    let_go(&lab, &target).unwrap();
    // A root that is no folder needs a decision.
    run(&format!("debugfs -w -R 'sif <2> mode 0100644' {} 2> /dev/null", disk.name()));
    run(&format!("debugfs -w -R 'ssv state 2' {} 2> /dev/null", disk.name()));
    let before = disk.sum();
    let error = do_mount(&lab, &wanted).unwrap_err();
    assert!(matches!(error, Error::Damaged { .. }), "{error:?}");
    assert!(error.to_string().to_uppercase().contains("MANUALLY"), "{error}");
    let _: (u64, PathBuf) = (before, target);
}
