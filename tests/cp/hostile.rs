//! What changes while it is copied: nothing is written outside of what was named, and nothing is half written.

use std::fs;
use std::os::unix::fs::symlink;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::lab::{Lab, pattern};

/// Ends what goes on, also after a panic.
struct Ending<'e>(&'e AtomicBool);

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Exchanges a directory and a link to another one, again and again, while `work` is done.
fn while_a_link_is_swapped_in(lab: &Lab, directory: &str, work: impl Fn()) -> u64 {
    let [at, beside, link, outside] =
        [directory, &format!("{directory}-beside"), &format!("{directory}-link"), "outside"]
            .map(|name| lab.file(name));
    symlink(&outside, &link).unwrap();
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let swapping = scope.spawn(|| {
            let mut count = 0;
            while !is_over.load(Ordering::Relaxed) {
                // A copy makes the directory where it is missing for a moment.
                if fs::rename(&at, &beside).is_ok() {
                    drop(fs::rename(&link, &at));
                    std::thread::yield_now();
                    drop(fs::rename(&at, &link));
                    drop(fs::rename(&beside, &at));
                    drop(fs::remove_dir_all(&beside));
                    count += 1;
                }
                drop(fs::create_dir_all(&at));
            }
            count
        });
        let _ending = Ending(&is_over);
        work();
        is_over.store(true, Ordering::Relaxed);
        swapping.join().unwrap()
    })
}

#[test]
fn a_link_that_is_swapped_in_leads_nobody_out() {
    let lab = Lab::new();
    fs::create_dir_all(lab.file("tree/sub")).unwrap();
    for number in 0..8 {
        fs::write(lab.file(&format!("tree/sub/{number}")), "x").unwrap();
    }
    for (from, to) in [("@/tree", "web:@/copy"), ("web:@/tree", "@/copy")] {
        fs::create_dir_all(lab.file("outside")).unwrap();
        fs::create_dir_all(lab.file("copy/tree/sub")).unwrap();
        let swapped = while_a_link_is_swapped_in(&lab, "copy/tree/sub", || {
            for _ in 0..8 {
                let output = lab.cp(&["-r", from, to]);
                assert!(matches!(output.status.code(), Some(0 | 1)), "{output:?}");
            }
        });
        assert!(swapped > 8, "{swapped}");
        let outside: Vec<_> = fs::read_dir(lab.file("outside")).unwrap().collect();
        assert!(outside.is_empty(), "{to}: {outside:?}");
        fs::remove_dir_all(lab.file("copy")).unwrap();
    }
}

#[test]
fn a_link_that_is_swapped_in_gives_nothing_away() {
    let lab = Lab::new();
    fs::create_dir_all(lab.file("outside")).unwrap();
    for number in 0..8 {
        fs::write(lab.file(&format!("outside/{number}")), "secret").unwrap();
    }
    fs::create_dir_all(lab.file("tree/sub")).unwrap();
    let swapped = while_a_link_is_swapped_in(&lab, "tree/sub", || {
        for round in 0..8 {
            let to = format!("@/copy-{round}");
            let output = lab.cp(&["-r", "web:@/tree", &to]);
            assert!(matches!(output.status.code(), Some(0 | 1)), "{output:?}");
            // A link is copied as a link; what it leads to is not.
            let sub = lab.file(&format!("copy-{round}/sub"));
            if !sub.is_symlink() && sub.exists() {
                assert_eq!(fs::read_dir(&sub).unwrap().count(), 0, "{output:?}");
            }
        }
    });
    assert!(swapped > 8, "{swapped}");
}

#[test]
fn a_file_that_changes_while_it_is_copied_fails_and_leaves_what_was_there() {
    let lab = Lab::new();
    fs::write(lab.file("log"), pattern(40 << 20, 3)).unwrap();
    fs::write(lab.file("there"), "old").unwrap();
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let log = fs::File::options().append(true).open(lab.file("log")).unwrap();
            while !is_over.load(Ordering::Relaxed) {
                std::io::Write::write_all(&mut &log, b"more\n").unwrap();
            }
        });
        let _ending = Ending(&is_over);
        for (from, to) in [("web:@/log", "@/there"), ("@/log", "web:@/there")] {
            let output = lab.cp(&[from, to]);
            let words = String::from_utf8_lossy(&output.stderr).into_owned();
            assert_eq!(output.status.code(), Some(1), "{to}: {words}");
            assert!(words.contains("changed while it was being copied"), "{words}");
        }
        is_over.store(true, Ordering::Relaxed);
    });
    assert_eq!(fs::read(lab.file("there")).unwrap(), b"old");
    assert_nothing_beside(&lab, "");
}

#[test]
fn a_disk_that_is_full_stays_as_it_was() {
    let mount = "mkdir -p @/small; mount -t tmpfs -o size=8m small @/small";
    let lab = Lab::with_mounts(crate::lab::ALL, Some(mount));
    fs::write(lab.file("large"), pattern(20 << 20, 1)).unwrap();
    fs::write(lab.file("fits"), pattern(1 << 20, 2)).unwrap();
    lab.copies(&["@/fits", "web:@/small/file"]);
    let words = lab.fails(&["@/large", "web:@/small/file"], 1);
    assert!(words.contains("not enough space for file"), "{words}");
    // A stream does not say how much comes.
    let stream = fs::File::open(lab.file("large")).unwrap();
    let output = lab.command(&["-", "web:@/small/file"]).stdin(stream).output().unwrap();
    let words = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(1) && words.contains("No space left"), "{words}");
    lab.copies(&["web:@/small/file", "@/back"]);
    assert!(fs::read(lab.file("back")).unwrap() == pattern(1 << 20, 2));
    // Nothing of it is left: there is room again.
    fs::write(lab.file("room"), pattern(6 << 20, 3)).unwrap();
    lab.copies(&["@/room", "web:@/small/other"]);
}

pub fn assert_nothing_beside(lab: &Lab, directory: &str) {
    let names = fs::read_dir(lab.file(directory)).unwrap().map(|entry| entry.unwrap().file_name());
    let left: Vec<_> = names.filter(|name| name.to_string_lossy().contains(".guestlet-")).collect();
    assert!(left.is_empty(), "{left:?}");
}
