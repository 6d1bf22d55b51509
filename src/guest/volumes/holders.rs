//! Finds the users of a file system: processes that have something on it open, mapped or as their working
//! directory, and mounts on it or devices backed by its files.
//!
//! Processes may start and end during the search, and those that cannot be inspected are skipped. Nothing here
//! waits for the file system itself.

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::sys::mountinfo::Mount;
use crate::sys::root::Root;

/// Limit on the users that are reported.
const MOST: usize = 32;
/// Time limit for the search: on a busy guest it takes some seconds to list the open files of all processes.
const PATIENCE: Duration = Duration::from_secs(10);
/// Limit on the bytes that are read of a list of mapped files.
const LONGEST: usize = 1 << 20;

/// Users of a file system.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Holders {
    /// Users that were found; 32 at most.
    found: Vec<Holder>,
    /// True if not all processes could be inspected in time.
    is_cut: bool,
}

/// One user of a file system.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Holder {
    /// Process that uses it.
    Process {
        /// Process ID.
        id: u32,
        /// Name of the process (`comm`).
        name: String,
        /// Kind of use.
        how: Use,
        /// File or directory that it uses.
        path: PathBuf,
    },
    /// Mount on top of it, at this mount point.
    Mount(PathBuf),
    /// Device backed by one of its files.
    Device {
        /// Device name, such as `loop0`.
        name: String,
        /// Backing file.
        file: PathBuf,
    },
}

/// Ways in which a process uses a file or directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Use {
    /// As its working directory.
    Folder,
    /// As its root directory.
    Root,
    /// As its program.
    Program,
    /// As an open file.
    Open,
    /// As a memory-mapped file.
    Mapped,
}

impl fmt::Display for Holder {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Process { id, name, how, path } => {
                let path = path.display();
                match how {
                    Use::Folder => {
                        write!(formatter, "{name} (process {id}) has its working directory in {path}")
                    }
                    Use::Root => write!(formatter, "{name} (process {id}) has its root at {path}"),
                    Use::Program => write!(formatter, "{name} (process {id}) runs {path}"),
                    Use::Open => write!(formatter, "{name} (process {id}) has {path} open"),
                    Use::Mapped => write!(formatter, "{name} (process {id}) has mapped {path}"),
                }
            }
            Self::Mount(path) => write!(formatter, "{} is mounted on it", path.display()),
            Self::Device { name, file } => write!(formatter, "{name} is built on {}", file.display()),
        }
    }
}

impl Holders {
    /// Returns whether no user was found and all processes could be inspected.
    pub fn are_none(&self) -> bool {
        self.found.is_empty() && !self.is_cut
    }
}

/// Formats all users as one sentence.
impl fmt::Display for Holders {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        /// Limit on the users that are named; nobody reads more.
        const TOLD: usize = 8;

        if self.found.is_empty() && self.is_cut {
            return write!(formatter, "not all processes could be checked within {} s", PATIENCE.as_secs());
        }
        if self.found.is_empty() {
            return formatter.write_str("no process was found that uses it");
        }
        for (place, holder) in self.found.iter().take(TOLD).enumerate() {
            let separator = if place == 0 { "" } else { "; " };
            write!(formatter, "{separator}{holder}")?;
        }
        match self.found.len().saturating_sub(TOLD) {
            0 => Ok(()),
            more => write!(formatter, "; and {more} more"),
        }
    }
}

/// Returns the users of `mount`, given the list of all mounts. The newest processes are inspected first: the
/// oldest belong to the kernel and the system.
pub fn holders(root: &Root, mount: &Mount, mounts: &[Mount]) -> Holders {
    let place = Path::new(&mount.mount_point);
    let below = |other: &&Mount| other.id != mount.id && Path::new(&other.mount_point).starts_with(place);
    let mut found: Vec<_> =
        mounts.iter().filter(below).map(|other| Holder::Mount(other.mount_point.clone().into())).collect();
    found.extend(loops(root, place));
    let search = Search { root, mount, place, until: Instant::now() + PATIENCE };
    let mut ids: Vec<u32> = names(root, "/proc").filter_map(|name| name.parse().ok()).collect();
    ids.sort_unstable();
    let mut newest_first = ids.into_iter().rev();
    let mut is_cut = false;
    while found.len() < MOST
        && !is_cut
        && let Some(id) = newest_first.next()
    {
        found.extend(search.process(id));
        is_cut = Instant::now() > search.until;
    }
    found.truncate(MOST);
    Holders { found, is_cut }
}

struct Search<'a> {
    root: &'a Root,
    mount: &'a Mount,
    place: &'a Path,
    until: Instant,
}

impl Search<'_> {
    /// Returns the first use that is found: one is enough to report.
    fn process(&self, id: u32) -> Option<Holder> {
        let found = |how, path| {
            let name = self.root.line(&format!("/proc/{id}/comm"));
            Some(Holder::Process { id, name, how, path })
        };
        for (link, how) in [("cwd", Use::Folder), ("root", Use::Root), ("exe", Use::Program)] {
            // "/" is the root directory of every process.
            let here =
                |path: &PathBuf| path.starts_with(self.place) && (how != Use::Root || path != Path::new("/"));
            if let Some(path) = self.link(&format!("/proc/{id}/{link}")).filter(here) {
                return found(how, path);
            }
        }
        for number in names(self.root, &format!("/proc/{id}/fd")) {
            if Instant::now() > self.until {
                return None;
            }
            // The kernel reports on which mount the file was opened; paths may be those of another namespace.
            let information = self.root.line(&format!("/proc/{id}/fdinfo/{number}"));
            let on = information.lines().find_map(|line| line.strip_prefix("mnt_id:")?.trim().parse().ok());
            // One that has just been closed has no path, and the process may have others.
            if on == Some(self.mount.id)
                && let Some(path) = self.link(&format!("/proc/{id}/fd/{number}"))
            {
                return found(Use::Open, path);
            }
        }
        found(Use::Mapped, self.mapped(id)?)
    }

    fn link(&self, path: &str) -> Option<PathBuf> {
        std::fs::read_link(self.root.path(path)).ok()
    }

    fn mapped(&self, id: u32) -> Option<PathBuf> {
        use std::io::Read as _;

        let file = std::fs::File::open(self.root.path(&format!("/proc/{id}/maps"))).ok()?;
        let mut text = Vec::new();
        file.take(LONGEST as u64).read_to_end(&mut text).ok()?;
        String::from_utf8_lossy(&text).lines().find_map(|line| mapped_file(line, self.place))
    }
}

/// Returns the file of a line of `/proc/<process>/maps`, if it is below `place`.
fn mapped_file(line: &str, place: &Path) -> Option<PathBuf> {
    let path = &line[line.find(" /")? + 1..];
    let path = Path::new(path.strip_suffix(" (deleted)").unwrap_or(path));
    path.starts_with(place).then(|| path.to_owned())
}

/// Returns the loop devices backed by files below `place`.
fn loops(root: &Root, place: &Path) -> Vec<Holder> {
    let device = |name: String| {
        let file = root.line(&format!("/sys/block/{name}/loop/backing_file"));
        let file = PathBuf::from(file.strip_suffix(" (deleted)").unwrap_or(&file));
        file.starts_with(place).then_some(Holder::Device { name, file })
    };
    names(root, "/sys/block").filter(|name| name.starts_with("loop")).filter_map(device).collect()
}

fn names(root: &Root, folder: &str) -> impl Iterator<Item = String> + use<> {
    let entries = std::fs::read_dir(root.path(folder)).ok();
    entries.into_iter().flatten().flatten().filter_map(|entry| entry.file_name().into_string().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mapped_files() {
        let line = "7f0000000000-7f0000001000 r--p 00000000 fd:01 12 /data/a file (deleted)";
        assert_eq!(mapped_file(line, Path::new("/data")), Some("/data/a file".into()));
        assert_eq!(mapped_file(line, Path::new("/dat")), None);
        assert_eq!(
            mapped_file("7f0000000000-7f0000001000 rw-p 00000000 00:00 0 [stack]", Path::new("/")),
            None
        );
    }

    #[test]
    fn words_for_people() {
        let process =
            |id| Holder::Process { id, name: "vi".to_owned(), how: Use::Open, path: "/data/x".into() };
        let words = |found, is_cut| Holders { found, is_cut }.to_string();
        assert_eq!(words(vec![process(7)], false), "vi (process 7) has /data/x open");
        assert_eq!(words(vec![process(7)], true), "vi (process 7) has /data/x open");
        let many = words((0..10).map(process).collect(), false);
        assert!(many.ends_with("vi (process 7) has /data/x open; and 2 more"), "{many}");
        assert_eq!(words(Vec::new(), false), "no process was found that uses it");
        assert_eq!(words(Vec::new(), true), "not all processes could be checked within 10 s");
        assert!(Holders::default().are_none() && !Holders { found: Vec::new(), is_cut: true }.are_none());
    }
}
