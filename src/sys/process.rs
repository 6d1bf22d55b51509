//! Processes of this machine, identified by their number, which can be reused, and their start time, which
//! tells two processes with the same number apart.

use std::io;

use super::root::Root;

/// Place of the start time among the fields of /proc/*/stat that are behind the name; see proc(5).
const START: usize = 19;
/// The same of the parent's number.
const PARENT: usize = 1;

/// A process. Two that are equal are the same one, though numbers are given again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Process {
    /// Process ID.
    pub number: u32,
    /// When it started, in ticks since the boot.
    pub started: u64,
}

impl Process {
    /// The process that has this number now.
    pub fn with_number(root: &Root, number: u32) -> Option<Self> {
        let stat = root.read(&format!("/proc/{number}/stat")).ok()?;
        Some(Self { number, started: started(&String::from_utf8_lossy(&stat))? })
    }

    /// The number of the parent of the process that has this number now.
    pub fn parent(root: &Root, number: u32) -> Option<u32> {
        let stat = root.read(&format!("/proc/{number}/stat")).ok()?;
        field(&String::from_utf8_lossy(&stat), PARENT)
    }

    /// The numbers of all processes, as they were listed.
    ///
    /// # Errors
    /// If /proc cannot be read.
    pub fn numbers(root: &Root) -> io::Result<Vec<u32>> {
        let entries = std::fs::read_dir(root.path("/proc"))?;
        Ok(entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok()).collect())
    }
}

/// The start time in the contents of a /proc/*/stat. The name before it is in parentheses, and may have any in it.
fn started(stat: &str) -> Option<u64> {
    field(stat, START)
}

fn field<N: std::str::FromStr>(stat: &str, place: usize) -> Option<N> {
    let (_, fields) = stat.rsplit_once(')')?;
    fields.split_ascii_whitespace().nth(place)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_start_time_is_behind_any_name() {
        let rest = "S 1 1 1 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 4711 9 10";
        for name in ["qemu-system-x86", "a) S 1 (b", "a b\nc"] {
            assert_eq!(started(&format!("17 ({name}) {rest}\n")), Some(4711), "{name}");
        }
        for broken in ["", "17 (a", "17 (a) S 1 2", "17 (a) S 1 1 1 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 x"]
        {
            assert_eq!(started(broken), None, "{broken}");
        }
    }

    #[test]
    fn a_process_is_itself() {
        let root = Root::default();
        let own = Process::with_number(&root, std::process::id()).unwrap();
        assert_eq!(Process::with_number(&root, std::process::id()), Some(own));
        assert!(Process::numbers(&root).unwrap().contains(&own.number));
        assert_eq!(Process::with_number(&root, u32::MAX), None);
        assert_eq!(Process::parent(&root, std::process::id()), Some(std::os::unix::process::parent_id()));
    }
}
