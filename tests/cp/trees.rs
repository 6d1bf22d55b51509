//! Directories with all that is in them.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink};
use std::path::Path;
use std::time::{Duration, SystemTime};

use crate::lab::{Lab, pattern};

/// What is in a directory, in words that can be compared.
fn what_is(at: &Path, with_times: bool) -> Vec<String> {
    let mut all = Vec::new();
    let mut next = vec![at.to_owned()];
    while let Some(path) = next.pop() {
        let found = fs::symlink_metadata(&path).unwrap();
        let name = path.strip_prefix(at).unwrap().as_os_str().as_bytes().escape_ascii().to_string();
        let mut words = format!("{name} {:o}", found.mode());
        if found.is_symlink() {
            words = format!("{name} -> {}", fs::read_link(&path).unwrap().display());
        } else if found.is_file() {
            words = format!("{words} {:?}", fs::read(&path).unwrap());
        }
        if with_times {
            words = format!("{words} {} {}.{}", found.uid(), found.mtime(), found.mtime_nsec());
        }
        all.push(words);
        if found.is_dir() {
            next.extend(fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path()));
        }
    }
    all.sort();
    all
}

fn make_tree(at: &Path) {
    fs::create_dir_all(at.join("empty")).unwrap();
    fs::create_dir_all(at.join("deep/deeper/deepest")).unwrap();
    fs::write(at.join("deep/deeper/deepest/file"), "deep").unwrap();
    let names: [&[u8]; 7] =
        [b"with space", b"-r", b"a:b", b"line\nfeed", b"\x1b[2Jescape", b"no\xfftext", b".hidden"];
    for name in names {
        fs::write(at.join(OsStr::from_bytes(name)), name).unwrap();
    }
    fs::write(at.join("large"), pattern(700_000, 5)).unwrap();
    symlink("/etc/passwd", at.join("absolute")).unwrap();
    symlink("../../..", at.join("deep/upwards")).unwrap();
    symlink("nowhere", at.join("dangling")).unwrap();
    fs::set_permissions(at.join("deep/deeper"), fs::Permissions::from_mode(0o750)).unwrap();
    fs::set_permissions(at.join("-r"), fs::Permissions::from_mode(0o600)).unwrap();
    std::os::unix::fs::lchown(at.join("dangling"), Some(12), Some(34)).unwrap();
    std::os::unix::fs::chown(at.join("large"), Some(56), Some(78)).unwrap();
    let then = SystemTime::UNIX_EPOCH + Duration::new(1_000_000_000, 5);
    File::open(at.join("deep/deeper")).unwrap().set_modified(then).unwrap();
}

#[test]
fn trees_arrive_each_way_with_all_that_they_are() {
    let lab = Lab::new();
    make_tree(&lab.file("tree"));
    let expected = what_is(&lab.file("tree"), false);
    for (from, to) in [("@/tree", "web:@/"), ("web:@/tree", "@/"), ("web:@/tree", "db:@/")] {
        let at = |name: &str| format!("{to}{name}");
        lab.copies(&["-r", from, &at("copy")]);
        assert_eq!(what_is(&lab.file("copy"), false), expected, "{to}");
        // Into a directory that is there, as cp does it; and once more, over what is there.
        fs::create_dir(lab.file("into")).unwrap();
        lab.copies(&["-r", from, &at("into")]);
        lab.copies(&["-r", from, &at("into")]);
        assert_eq!(what_is(&lab.file("into/tree"), false), expected, "{to}");
        lab.copies(&["-rp", from, &at("kept")]);
        assert_eq!(what_is(&lab.file("kept"), true), what_is(&lab.file("tree"), true), "{to}");
        for name in ["copy", "into", "kept"] {
            fs::remove_dir_all(lab.file(name)).unwrap();
        }
    }
}

#[test]
fn what_cannot_be_copied_is_said_and_the_rest_is_copied() {
    let lab = Lab::new();
    make_tree(&lab.file("tree"));
    nix::unistd::mkfifo(&lab.file("tree/fifo"), nix::sys::stat::Mode::S_IRUSR).unwrap();
    fs::create_dir_all(lab.file("copy/large")).unwrap();
    fs::write(lab.file("copy/empty"), "").unwrap();
    fs::create_dir_all(lab.file("copy/dangling")).unwrap();
    for (from, to) in [("@/tree/.", "web:@/copy"), ("web:@/tree/.", "@/copy")] {
        let words = lab.fails(&["-r", from, to], 1);
        for one in [
            "cannot copy fifo: it is a device, a pipe or a socket",
            "cannot copy large: large is a directory, which a file does not replace",
            "cannot copy empty: empty exists and is not a directory",
            "cannot copy dangling: dangling is a directory, and is not replaced",
        ] {
            assert!(words.contains(one), "{to}: {words}");
        }
        assert_eq!(words.lines().count(), 4, "{words}");
        assert_eq!(fs::read(lab.file("copy/deep/deeper/deepest/file")).unwrap(), b"deep");
        assert!(!lab.file("copy/fifo").exists());
        fs::remove_dir_all(lab.file("copy/deep")).unwrap();
    }
}

#[test]
fn a_directory_is_not_copied_into_itself() {
    let lab = Lab::new();
    make_tree(&lab.file("tree"));
    for to in ["web:@/tree", "web:@/tree/deep", "web:@/tree/deep/new"] {
        let output = lab.cp(&["-r", "web:@/tree", to]);
        assert_eq!(output.status.code(), Some(1), "{to}: {output:?}");
        let words = String::from_utf8_lossy(&output.stderr);
        assert!(words.contains("a directory cannot be copied into itself"), "{to}: {words}");
    }
}

#[test]
fn names_cannot_move_the_cursor_of_a_terminal() {
    let lab = Lab::new();
    fs::create_dir(lab.file("tree")).unwrap();
    let name = OsStr::from_bytes(b"\x1b[2J");
    nix::unistd::mkfifo(&lab.file("tree").join(name), nix::sys::stat::Mode::S_IRUSR).unwrap();
    let words = lab.fails(&["-r", "web:@/tree", "@/copy"], 1);
    assert!(!words.contains('\u{1b}') && words.contains("\\u{1b}[2J"), "{words:?}");
}
