//! Who uses a file system: processes with something open, mapped or as their folder on it, and what is mounted on it or
//! made of its files.
//!
//! Processes come and go while they are looked at, and what cannot be looked at is passed over. Nothing here waits for
//! the file system itself.

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::sys::mountinfo::Mount;
use crate::sys::root::Root;

/// How many are told.
const MOST: usize = 32;
/// How long they are searched for: a busy guest takes some seconds to say what its processes have open.
const PATIENCE: Duration = Duration::from_secs(10);
/// Bytes of a list of mapped files that are looked at.
const LONGEST: usize = 1 << 20;

/// Who uses a file system.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Holders {
    /// Who was found; 32 at most.
    found: Vec<Holder>,
    /// Not all processes were looked at in time.
    is_cut: bool,
}

/// Somebody who uses a file system.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Holder {
    /// A process.
    Process {
        /// Its number.
        id: u32,
        /// Its name.
        name: String,
        /// What it does with it.
        how: Use,
        /// With what of it.
        path: PathBuf,
    },
    /// Another mount, on it.
    Mount(PathBuf),
    /// A device that is made of one of its files.
    Device {
        /// Such as `loop0`.
        name: String,
        /// The file.
        file: PathBuf,
    },
}

/// What a process does with a file or folder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Use {
    /// It is its working folder.
    Folder,
    /// It is its root.
    Root,
    /// It is its program.
    Program,
    /// It has it open.
    Open,
    /// It has it in its memory.
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
    /// Whether nobody uses it, as far as all could be looked at.
    pub fn are_none(&self) -> bool {
        self.found.is_empty() && !self.is_cut
    }
}

/// All of them in one sentence.
impl fmt::Display for Holders {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        /// More would not be read.
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

/// Who uses the mount, of all these. The newest processes are looked at first: the oldest are the kernel's and the system's.
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
    /// The first use that is found: one says enough.
    fn process(&self, id: u32) -> Option<Holder> {
        let found = |how, path| {
            let name = self.root.line(&format!("/proc/{id}/comm"));
            Some(Holder::Process { id, name, how, path })
        };
        for (link, how) in [("cwd", Use::Folder), ("root", Use::Root), ("exe", Use::Program)] {
            // "/" is everybody's root.
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
            // On which mount it was opened is the kernel's word; paths may be those of another namespace.
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

/// The file of a line of `/proc/<process>/maps`, if it is at this place.
fn mapped_file(line: &str, place: &Path) -> Option<PathBuf> {
    let path = &line[line.find(" /")? + 1..];
    let path = Path::new(path.strip_suffix(" (deleted)").unwrap_or(path));
    path.starts_with(place).then(|| path.to_owned())
}

/// Loop devices made of files at this place.
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
