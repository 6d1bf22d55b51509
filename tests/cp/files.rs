//! Single files, each way, and what they keep.

use std::fs::{self, File};
use std::io::Write as _;
use std::os::unix::fs::{FileExt as _, MetadataExt as _, PermissionsExt as _, symlink};
use std::process::Stdio;
use std::time::{Duration, SystemTime};

use nix::libc;

use crate::lab::{Lab, pattern};

const MEBI: usize = 1 << 20;

#[test]
fn content_arrives_each_way_whatever_its_length() {
    let lab = Lab::new();
    for (number, length) in
        [0, 1, 4095, MEBI / 4 - 1, MEBI / 4, MEBI / 4 + 1, 5 * MEBI + 3].into_iter().enumerate()
    {
        let content = pattern(length, number as u64);
        fs::write(lab.file("source"), &content).unwrap();
        lab.copies(&["@/source", "web:@/there"]);
        assert!(fs::read(lab.file("there")).unwrap() == content, "{length} to the guest");
        lab.copies(&["web:@/there", "@/back"]);
        assert!(fs::read(lab.file("back")).unwrap() == content, "{length} from the guest");
        lab.copies(&["web:@/there", "db:@/other"]);
        assert!(fs::read(lab.file("other")).unwrap() == content, "{length} between guests");
    }
    // Nothing is left beside, and nothing is known any more.
    let names: Vec<_> = fs::read_dir(lab.file("")).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert!(!names.iter().any(|name| name.to_string_lossy().contains(".guestlet-")), "{names:?}");
    assert_eq!(fs::read_dir(lab.file("web/trust/copies")).unwrap().count(), 0);
}

#[test]
fn names_of_directories_and_slashes_mean_what_they_mean_to_cp() {
    let lab = Lab::new();
    fs::write(lab.file("a"), "a").unwrap();
    fs::write(lab.file("b"), "b").unwrap();
    fs::create_dir(lab.file("dir")).unwrap();
    lab.copies(&["@/a", "@/b", "web:@/dir"]);
    assert_eq!(fs::read(lab.file("dir/a")).unwrap(), b"a");
    lab.copies(&["web:@/dir/a", "web:@/dir/b", "@/dir/"]);
    assert!(lab.fails(&["@/a", "@/b", "web:@/nothing"], 1).contains("is not a directory"));
    assert!(lab.fails(&["@/a", "web:@/nothing/"], 1).contains("is not a directory"));
    assert!(lab.fails(&["@/a", "web:@/no/such"], 1).contains("No such file or directory"));
    assert!(lab.fails(&["web:@/nothing", "@/x"], 1).contains("No such file or directory"));
    assert!(lab.fails(&["@/dir", "web:@/y"], 1).contains("copy it with -r"));
    assert!(lab.fails(&["web:@/dir", "@/y"], 1).contains("copy it with -r"));
    assert!(lab.fails(&["@/a/", "web:@/y"], 1).contains("Not a directory"));
    assert!(lab.fails(&["web:@/a", "web:@/a"], 1).contains("are the same"));
    assert!(lab.fails(&["@/a", "@/y"], 1).contains("the source or the destination must be in a guest"));
    assert!(lab.fails(&["@/a", "nosuch:@/y"], 4).contains("knows no VM"));
    assert!(!lab.file("y").exists() && !lab.file("nothing").exists());
    // What is there is kept where that is wanted.
    assert!(lab.fails(&["--no-clobber", "@/b", "web:@/a"], 1).contains("already exists"));
    assert_eq!(fs::read(lab.file("a")).unwrap(), b"a");
    lab.copies(&["--no-clobber", "@/b", "web:@/c"]);
    assert_eq!(fs::read(lab.file("c")).unwrap(), b"b");
    lab.copies(&["@/b", "web:@/a"]);
    assert_eq!(fs::read(lab.file("a")).unwrap(), b"b");
    // A name with a colon.
    fs::write(lab.file("x:y"), "colon").unwrap();
    lab.copies(&["@/x:y", "web:@/z:z"]);
    assert_eq!(fs::read(lab.file("z:z")).unwrap(), b"colon");
}

#[test]
fn modes_owners_and_times_are_kept_where_that_is_wanted() {
    let lab = Lab::new();
    let then = SystemTime::UNIX_EPOCH + Duration::new(1_234_567_890, 123_456_789);
    let source = lab.file("source");
    fs::write(&source, "x").unwrap();
    std::os::unix::fs::chown(&source, Some(1234), Some(567)).unwrap();
    fs::set_permissions(&source, fs::Permissions::from_mode(0o4751)).unwrap();
    File::options().write(true).open(&source).unwrap().set_modified(then).unwrap();
    for (from, to, name) in [("@/source", "web:@/there", "there"), ("web:@/source", "@/here", "here")] {
        lab.copies(&["-p", from, to]);
        let found = fs::metadata(lab.file(name)).unwrap();
        assert_eq!((found.mode() & 0o7777, found.uid(), found.gid()), (0o4751, 1234, 567), "{to}");
        assert_eq!(found.modified().unwrap(), then, "{to}");
        // Without it: no rights but the usual ones, and a file that is replaced keeps its own.
        fs::remove_file(lab.file(name)).unwrap();
        lab.copies(&[from, to]);
        let found = fs::metadata(lab.file(name)).unwrap();
        assert_eq!((found.mode() & 0o7777, found.uid(), found.gid()), (0o751, 0, 0), "{to}");
        assert!(found.modified().unwrap() > then);
        fs::set_permissions(lab.file(name), fs::Permissions::from_mode(0o600)).unwrap();
        std::os::unix::fs::chown(lab.file(name), Some(42), None).unwrap();
        lab.copies(&[from, to]);
        let found = fs::metadata(lab.file(name)).unwrap();
        assert_eq!((found.mode() & 0o7777, found.uid()), (0o600, 42), "{to}");
    }
}

#[test]
fn holes_stay_holes() {
    let lab = Lab::new();
    let file = File::create(lab.file("source")).unwrap();
    file.write_all_at(&pattern(MEBI, 1), 30 << 20).unwrap();
    file.write_all_at(b"end", 60 << 20).unwrap();
    file.set_len(100 << 20).unwrap();
    drop(file);
    let expected = fs::read(lab.file("source")).unwrap();
    for (from, to, name) in [("@/source", "web:@/there", "there"), ("web:@/source", "@/here", "here")] {
        lab.copies(&[from, to]);
        let found = fs::metadata(lab.file(name)).unwrap();
        assert_eq!(found.len(), 100 << 20, "{to}");
        assert!(found.blocks() * 512 < 4 << 20, "{to} takes {} blocks", found.blocks());
        assert!(fs::read(lab.file(name)).unwrap() == expected, "{to}");
    }
}

fn attribute(path: &std::path::Path, set: Option<&[u8]>) -> Option<Vec<u8>> {
    use std::os::unix::ffi::OsStrExt as _;

    let path = std::ffi::CString::new(path.as_os_str().as_bytes()).unwrap();
    let name = c"user.guestlet-test";
    if let Some(value) = set {
        // SAFETY: two strings of C, and as many bytes as there are.
        let done =
            unsafe { libc::setxattr(path.as_ptr(), name.as_ptr(), value.as_ptr().cast(), value.len(), 0) };
        return (done == 0).then(Vec::new);
    }
    let mut value = vec![0_u8; 256];
    // SAFETY: as above; the kernel writes at most as many bytes as the buffer has.
    let length =
        unsafe { libc::getxattr(path.as_ptr(), name.as_ptr(), value.as_mut_ptr().cast(), value.len()) };
    value.truncate(usize::try_from(length).ok()?);
    Some(value)
}

#[test]
fn attributes_are_kept_where_that_is_wanted() {
    let lab = Lab::new();
    fs::write(lab.file("source"), "x").unwrap();
    let has_some = attribute(&lab.file("source"), Some(b"a\0b")).is_some();
    for (from, to, name) in [("@/source", "web:@/there", "there"), ("web:@/source", "@/here", "here")] {
        lab.copies(&[from, to]);
        assert_eq!(attribute(&lab.file(name), None), None);
        lab.copies(&["--xattrs", from, to]);
        assert_eq!(attribute(&lab.file(name), None), has_some.then(|| b"a\0b".to_vec()), "{to}");
    }
}

#[test]
fn standard_streams_and_what_the_kernel_makes_up_are_read_to_their_end() {
    let lab = Lab::new();
    let content = pattern(3 * MEBI + 7, 9);
    let mut child = lab.command(&["-", "web:@/there"]).stdin(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(&content).unwrap();
    assert!(child.wait().unwrap().success());
    assert!(fs::read(lab.file("there")).unwrap() == content);
    for name in ["there", "small", "empty"] {
        let content = match name {
            "there" => &content[..],
            "small" => &content[..100],
            _ => b"",
        };
        fs::write(lab.file(name), content).unwrap();
        let output = lab.cp(&[&format!("web:@/{name}"), "-"]);
        assert!(output.status.success() && output.stdout == content, "{name}: {:?}", output.stderr);
    }
    assert!(lab.fails(&["-", "web:@/"], 1).contains("name the file in it"));
    let version = fs::read("/proc/version").unwrap();
    assert_eq!(lab.cp(&["web:/proc/version", "-"]).stdout, version);
    lab.copies(&["/proc/version", "web:@/version"]);
    assert_eq!(fs::read(lab.file("version")).unwrap(), version);
    assert!(!fs::read("/sys/kernel/mm/transparent_hugepage/enabled").unwrap_or(vec![1]).is_empty());
}

#[test]
fn nothing_is_written_through_a_link_or_to_a_device() {
    let lab = Lab::new();
    fs::write(lab.file("source"), "new").unwrap();
    fs::write(lab.file("kept"), "kept").unwrap();
    symlink("kept", lab.file("link")).unwrap();
    for to in ["web:@/link", "@/link"] {
        let from = if to.starts_with("web") { "@/source" } else { "web:@/source" };
        assert!(lab.fails(&[from, to], 1).contains("is a symbolic link"), "{to}");
    }
    assert_eq!(fs::read(lab.file("kept")).unwrap(), b"kept");
    // What was named is read through a link, as cp does it.
    lab.copies(&["web:@/link", "@/copy"]);
    assert_eq!(fs::read(lab.file("copy")).unwrap(), b"kept");
    nix::unistd::mkfifo(&lab.file("fifo"), nix::sys::stat::Mode::S_IRUSR).unwrap();
    for name in ["@/fifo", "/dev/zero"] {
        assert!(lab.fails(&[&format!("web:{name}"), "@/x"], 1).contains("a device, a pipe or a socket"));
        assert!(lab.fails(&["@/source", &format!("web:{name}")], 1).contains("a device, a pipe or a socket"));
        assert!(lab.fails(&[name, "web:@/x"], 1).contains("a device, a pipe or a socket"));
    }
}
