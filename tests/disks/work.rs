//! Programs that repair: they are not interrupted, whatever becomes of the agent, and are known while they run.

use std::io::Write as _;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::time::{Duration, Instant};

use guestlet::guest::Guest;
use guestlet::guest::volumes::Error;
use guestlet::guest::volumes::fsck::Checked;
use guestlet::guest::volumes::held::Held;
use guestlet::guest::volumes::mount::{Mount, Mounted, Source, mount};
use guestlet::sys::root::Root;

use crate::lab::{Disk, Lab, enter, run};
use crate::mount::plain;

const LONG: Duration = Duration::from_secs(60);

async fn mount_at(guest: &Guest, disk: &Disk, place: &Path, deadline: Duration) -> Result<Mounted, Error> {
    let held = Held::called(guest, &disk.device, "it is mounted").await?;
    let wanted = Mount { check: true, deadline, ..plain(Source::Device(&held), place) };
    mount(guest, &wanted).await
}

/// A file system that says that it has to be checked.
fn unclean(lab: &Lab, name: &str) -> Disk {
    let disk = lab.disk(name, 64);
    run(&format!("mkfs.ext4 -q {0}; debugfs -w -R 'ssv state 2' {0} 2> /dev/null", disk.name()));
    disk
}

/// Waits until nothing is at work on the disk any more.
fn until_done(lab: &Lab, disk: &Disk) {
    let end = Instant::now() + LONG;
    while let Err(error) = lab.hold(&disk.device) {
        assert!(
            error.to_string().ends_with("a program that was started earlier is still working on it"),
            "{error}"
        );
        assert!(Instant::now() < end);
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn a_repair_outlives_the_agent_and_its_deadline() {
    let Some(lab) = enter() else { return };
    let place = lab.folder("place");
    // It says something, which somebody has to take.
    let gate = lab.path("gate");
    run(&format!("mkfifo {}", gate.display()));
    let script = format!("read go < {}; yes said | head -c 100000 && exec $REAL \"$@\"", gate.display());
    let script = lab.replace("e2fsck", &script);
    for killed in [false, true] {
        let disk = unclean(&lab, &format!("disk-{killed}"));
        if killed {
            // SAFETY: the child only runs the agent's code until it is killed.
            let child = match unsafe { nix::unistd::fork() }.unwrap() {
                nix::unistd::ForkResult::Child => {
                    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
                    let _ = runtime.block_on(mount_at(&lab.guest, &disk, &place, LONG));
                    std::process::exit(1);
                }
                nix::unistd::ForkResult::Parent { child } => child,
            };
            let end = Instant::now() + LONG;
            while std::fs::read_dir("/run/guestlet/at-work").map_or(0, Iterator::count) == 0 {
                assert!(Instant::now() < end);
            }
            // It is at it as soon as somebody reads there.
            let gate = std::fs::File::options().write(true).open(&gate).unwrap();
            nix::sys::signal::kill(child, nix::sys::signal::Signal::SIGKILL).unwrap();
            nix::sys::wait::waitpid(child, None).unwrap();
            let busy = lab.hold(&disk.device).unwrap_err().to_string();
            assert!(busy.ends_with("a program that was started earlier is still working on it"), "{busy}");
            (&gate).write_all(b"go\n").unwrap();
        } else {
            let work = mount_at(&lab.guest, &disk, &place, Duration::from_millis(300));
            let error = lab.wait(work).unwrap_err();
            assert!(matches!(error, Error::Program(_) | Error::Silent { .. }), "{error:?}");
            let busy = lab.wait(mount_at(&lab.guest, &disk, &place, LONG)).unwrap_err();
            assert!(matches!(busy, Error::Busy { .. }), "{busy:?}");
            std::fs::write(&gate, "go\n").unwrap();
        }
        until_done(&lab, &disk);
        // It came to its end.
        assert!(run(&format!("dumpe2fs -h {} 2> /dev/null", disk.name())).contains("state:         clean\n"));
        run(&format!("{} -n {}", lab.path("real-e2fsck").display(), disk.name()));
    }
    drop(script);
}

#[test]
fn a_repair_has_a_scope_of_its_own_where_there_are_any() {
    let Some(mut lab) = enter() else { return };
    let (root, place, log) = (lab.folder("root"), lab.folder("place"), lab.path("log"));
    for folder in ["bin", "dev", "etc", "proc", "sbin", "sys", "var"] {
        symlink(format!("/{folder}"), root.join(folder)).unwrap();
    }
    std::fs::create_dir_all(root.join("run/systemd/system")).unwrap();
    std::fs::create_dir_all(root.join("usr/bin")).unwrap();
    symlink("/usr/sbin", root.join("usr/sbin")).unwrap();
    lab.guest = Guest { root: Root::at(&root), ..Guest::default() };
    let program = root.join("usr/bin/systemd-run");
    let says = |script: &str| {
        let script = format!("#!/bin/sh\necho \"$@\" >> {}\n{script}\n", log.display());
        std::fs::write(&program, script).unwrap();
        run(&format!("chmod 755 {}", program.display()));
    };
    let becomes = "echo 'Running as unit: run-r1.scope; invocation ID: 1' >&2
        while [ \"$1\" != -- ]; do shift; done; shift; exec \"$@\"";
    // Where it cannot have one it is run all the same, and what the other program says is not taken for its word.
    for (name, script) in [("scope", becomes), ("none", "echo Failed to connect to bus >&2; exit 1")] {
        says(script);
        let disk = unclean(&lab, name);
        let mounted = lab.wait(mount_at(&lab.guest, &disk, &place, LONG)).unwrap();
        assert_eq!(mounted.checked, Some(Checked::Repaired), "{name}");
        run(&format!("umount {}", place.display()));
    }
    let asked = std::fs::read_to_string(&log).unwrap();
    let lines: Vec<_> = asked.lines().collect();
    assert_eq!(lines.len(), 2, "{asked}");
    assert!(lines[0].starts_with("--scope ") && lines[0].ends_with("e2fsck -p /proc/self/fd/0"), "{asked}");
}
