//! Interruptions at random points: what was promised is there, and no name has half of a file.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::host::wait;
use crate::hostile::assert_nothing_beside;
use crate::lab::{Lab, pattern};
use crate::soak::steps;

/// Bytes of the file.
fn length() -> usize {
    steps(96 << 20, 1 << 30)
}

/// Numbers by chance; the seed is printed by a test that fails.
struct Chance(u64);

impl Chance {
    fn new() -> Self {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
        let seed = std::env::var("SEED").ok().and_then(|seed| seed.parse().ok());
        let seed = seed.unwrap_or(u64::from(now.subsec_nanos()));
        eprintln!("SEED={seed}");
        Self(seed)
    }

    fn below(&mut self, most: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % most
    }
}

/// Looks at a name all the time: what it has is either what it had, or everything.
struct Observer {
    is_over: Arc<AtomicBool>,
    thread: Option<JoinHandle<u64>>,
}

impl Observer {
    fn of(path: PathBuf, before: Option<u64>, after: u64) -> Self {
        let is_over = Arc::new(AtomicBool::new(false));
        let flag = Arc::clone(&is_over);
        let thread = std::thread::spawn(move || {
            let mut looked = 0;
            while !flag.load(Ordering::Relaxed) {
                let size = fs::metadata(&path).ok().map(|found| found.size());
                assert!(size == before || size == Some(after), "it has {size:?} bytes");
                looked += 1;
            }
            looked
        });
        Self { is_over, thread: Some(thread) }
    }

    fn end(mut self) {
        self.is_over.store(true, Ordering::Relaxed);
        assert!(self.thread.take().unwrap().join().unwrap() > 0);
    }
}

impl Drop for Observer {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
    }
}

/// The largest file beside in a directory.
fn beside(directory: &Path) -> u64 {
    let entries = fs::read_dir(directory).unwrap().flatten();
    let parts = entries.filter(|entry| entry.file_name().to_string_lossy().contains(".guestlet-"));
    parts.filter_map(|entry| Some(entry.metadata().ok()?.len())).max().unwrap_or(0)
}

/// Waits until so much is beside, or the copy has ended; whether it has.
fn until_beside(child: &mut Child, directory: &Path, bytes: u64) -> bool {
    let end = Instant::now() + Duration::from_secs(60);
    while beside(directory) < bytes {
        assert!(Instant::now() < end, "nothing is copied");
        if child.try_wait().unwrap().is_some() {
            return true;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    false
}

fn lab_with_source() -> Lab {
    let lab = Lab::new();
    fs::write(lab.file("source"), pattern(length(), 11)).unwrap();
    fs::create_dir(lab.file("to")).unwrap();
    lab
}

const WAYS: [(&str, &str); 2] = [("@/source", "web:@/to/file"), ("web:@/source", "@/to/file")];

#[test]
fn guestctl_that_is_killed_goes_on_where_it_was() {
    let lab = lab_with_source();
    let mut chance = Chance::new();
    for (from, to) in WAYS {
        let observer = Observer::of(lab.file("to/file"), None, length() as u64);
        let mut killed = 0;
        let mut furthest = 0;
        for round in 0..6 {
            let mut child = lab.command(&[from, to]).stderr(Stdio::piped()).spawn().unwrap();
            let wanted = furthest + 1 + chance.below(length() as u64 / 8);
            if until_beside(&mut child, &lab.file("to"), wanted) {
                break;
            }
            child.kill().unwrap();
            child.wait().unwrap();
            killed += 1;
            // What was there before was gone on with: the first round aside, it is never less.
            let there = beside(&lab.file("to"));
            assert!(there >= furthest, "round {round}: {there} after {furthest}");
            furthest = there;
        }
        assert!(killed >= 2, "it was interrupted {killed} times");
        if to.starts_with("web") {
            crate::lab::until("status shows it", || lab.status().contains("partial file"));
        }
        lab.copies(&[from, to]);
        observer.end();
        assert!(fs::read(lab.file("to/file")).unwrap() == pattern(length(), 11));
        assert_nothing_beside(&lab, "to");
        assert!(!lab.status().contains("partial file"));
        fs::remove_file(lab.file("to/file")).unwrap();
    }
}

#[test]
fn a_host_half_and_an_agent_that_are_killed_are_waited_for() {
    let mut lab = lab_with_source();
    let mut chance = Chance::new();
    fs::write(lab.file("to/file"), "old").unwrap();
    for (from, to) in WAYS.into_iter().chain([("web:@/source", "db:@/to/file")]) {
        let observer = Observer::of(lab.file("to/file"), Some(3), length() as u64);
        let mut child = lab.command(&[from, to]).stderr(Stdio::piped()).spawn().unwrap();
        let mut killed = 0;
        for round in 0..4_u64 {
            let wanted = (round * 2 + 1) * (length() as u64 / 16) + chance.below(length() as u64 / 32);
            if until_beside(&mut child, &lab.file("to"), wanted) {
                break;
            }
            if chance.below(2) == 0 {
                lab.host.kill();
                lab.host.again();
            } else {
                lab.kill_agent();
                lab.start_agent();
            }
            killed += 1;
        }
        let status = wait(&mut child);
        let words = std::io::read_to_string(child.stderr.take().unwrap()).unwrap();
        assert!(status.success(), "{to}: {words}");
        assert!(killed >= 2, "it was interrupted {killed} times");
        observer.end();
        assert!(fs::read(lab.file("to/file")).unwrap() == pattern(length(), 11), "{to}");
        assert_nothing_beside(&lab, "to");
        fs::write(lab.file("to/file"), "old").unwrap();
    }
}

#[test]
fn a_tree_is_complete_whatever_was_killed() {
    let mut lab = Lab::new();
    let mut chance = Chance::new();
    fs::create_dir(lab.file("tree")).unwrap();
    for number in 0..300 {
        let directory = lab.file(&format!("tree/{}", number % 10));
        fs::create_dir_all(&directory).unwrap();
        let length = usize::try_from(chance.below(200_000)).unwrap();
        fs::write(directory.join(number.to_string()), pattern(length, number)).unwrap();
    }
    for (from, to) in [("@/tree", "web:@/copy"), ("web:@/tree", "@/copy")] {
        let mut child = lab.command(&["-r", from, to]).stderr(Stdio::piped()).spawn().unwrap();
        let calls = |lab: &Lab| lab.agent_log().matches("Files (").count();
        let mut removed_at = None;
        for round in 0..3 {
            let directory = lab.file(&format!("copy/{}", round * 3));
            let end = Instant::now() + Duration::from_secs(60);
            while !directory.exists() && child.try_wait().unwrap().is_none() {
                assert!(Instant::now() < end, "it does not come to {}", directory.display());
                std::thread::sleep(Duration::from_millis(1));
            }
            let kills_agent = chance.below(2) == 0;
            if kills_agent {
                lab.kill_agent();
            } else {
                lab.host.kill();
            }
            if round == 1 && kills_agent {
                // A guest that is put back to what it was has lost what it had.
                removed_at = Some(calls(&lab));
                drop(fs::remove_dir_all(lab.file("copy/0")));
            }
            if kills_agent {
                lab.start_agent();
            } else {
                lab.host.again();
            }
        }
        let status = wait(&mut child);
        let words = std::io::read_to_string(child.stderr.take().unwrap()).unwrap();
        assert!(status.success(), "{to}: {words}");
        if removed_at == Some(calls(&lab)) {
            // It had ended before: what was lost after that is nothing to it.
            fs::remove_dir_all(lab.file("copy")).unwrap();
            lab.copies(&["-r", from, to]);
        }
        for number in 0..300 {
            let name = format!("{}/{number}", number % 10);
            let [source, copy] = ["tree", "copy"].map(|top| fs::read(lab.file(&format!("{top}/{name}"))));
            assert!(source.unwrap() == copy.unwrap(), "{to}: {name}");
        }
        assert_eq!(fs::read_dir(lab.file("copy")).unwrap().count(), 10, "{to}");
        fs::remove_dir_all(lab.file("copy")).unwrap();
    }
}

#[test]
fn a_tree_whose_copy_was_killed_goes_where_it_was_going() {
    let lab = Lab::new();
    fs::create_dir(lab.file("tree")).unwrap();
    for number in 0..20 {
        fs::write(lab.file(&format!("tree/{number:02}")), pattern(3 << 20, number)).unwrap();
    }
    for (from, to) in [("@/tree", "web:@/copy"), ("web:@/tree", "@/copy")] {
        let mut child = lab.command(&["-r", from, to]).stderr(Stdio::null()).spawn().unwrap();
        crate::lab::until("it has come so far", || lab.file("copy/03").exists());
        child.kill().unwrap();
        if child.wait().unwrap().success() {
            // It was too quick for us.
            fs::remove_dir_all(lab.file("copy")).unwrap();
        }
        lab.copies(&["-r", from, to]);
        assert_eq!(fs::read_dir(lab.file("copy")).unwrap().count(), 20, "{to}");
        for number in 0..20 {
            assert!(fs::read(lab.file(&format!("copy/{number:02}"))).unwrap() == pattern(3 << 20, number));
        }
        // Once more is into it.
        lab.copies(&["-r", from, to]);
        assert!(lab.file("copy/tree/19").exists());
        fs::remove_dir_all(lab.file("copy")).unwrap();
    }
}

#[test]
fn what_is_left_of_an_earlier_source_is_not_taken_for_this_one() {
    let lab = lab_with_source();
    for (from, to) in WAYS {
        let mut child = lab.command(&[from, to]).stderr(Stdio::null()).spawn().unwrap();
        assert!(!until_beside(&mut child, &lab.file("to"), 1 << 20));
        child.kill().unwrap();
        child.wait().unwrap();
        // As long, and something else.
        fs::write(lab.file("source"), pattern(length(), 12)).unwrap();
        lab.copies(&[from, to]);
        assert!(fs::read(lab.file("to/file")).unwrap() == pattern(length(), 12), "{to}");
        fs::write(lab.file("source"), pattern(length(), 11)).unwrap();
        fs::remove_file(lab.file("to/file")).unwrap();
    }
}

#[test]
fn an_interrupted_guestctl_says_how_to_go_on() {
    let lab = lab_with_source();
    let mut child = lab.command(&[WAYS[0].0, WAYS[0].1]).stderr(Stdio::piped()).spawn().unwrap();
    assert!(!until_beside(&mut child, &lab.file("to"), 1 << 20));
    let pid = nix::unistd::Pid::from_raw(i32::try_from(child.id()).unwrap());
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGINT).unwrap();
    let status = wait(&mut child);
    let words = std::io::read_to_string(child.stderr.take().unwrap()).unwrap();
    assert_eq!(status.code(), Some(130), "{words}");
    assert!(words.contains("run the same command again to resume"), "{words}");
    assert!(!lab.file("to/file").exists());
}
