//! Control groups below the one of this process, cgroups(7), version 2. Each program gets its own, so that all
//! processes that it starts can be found and killed, even those that change their session, parent or user.
//!
//! The name of a group begins with the process that made it, so that a later process can recognize the
//! leftover ones.

use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::sys::process::Process;
use crate::sys::root::Root;

/// Prefix of the names of all groups that this program makes.
const PREFIX: &str = "guestlet-exec-";
/// Mount points of version 2, alone or beside version 1.
const MOUNTS: [&str; 2] = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"];
/// Maximum number of passes that kill the processes of a group where the kernel cannot kill all of them at
/// once (before Linux 5.14): a process may start others during a pass.
const ROUNDS: usize = 16;

/// Number of groups that this process has made; part of their names.
static MADE: AtomicU64 = AtomicU64::new(0);

/// Control group, by its path. Dropping it removes the group if no process is left in it.
#[derive(Debug)]
pub struct Cgroup(PathBuf);

/// The directory of this process's own group.
fn own(root: &Root) -> Option<PathBuf> {
    of_process(root, "self")
}

/// The directory of the group of a process, by its name in /proc.
fn of_process(root: &Root, process: &str) -> Option<PathBuf> {
    let groups = root.read(&format!("/proc/{process}/cgroup")).ok()?;
    let groups = String::from_utf8(groups).ok()?;
    let path = groups.lines().find_map(|line| line.strip_prefix("0::/"))?.to_owned();
    let mounted = MOUNTS.into_iter().map(|mount| root.path(mount));
    let mount = mounted.into_iter().find(|mount| mount.join("cgroup.controllers").exists())?;
    Some(mount.join(path))
}

fn read(path: &Path) -> io::Result<String> {
    let mut text = String::new();
    File::open(path)?.read_to_string(&mut text)?;
    Ok(text)
}

impl Cgroup {
    /// A new one for the program with this identifier, and what moves a process that writes `0` to it there.
    ///
    /// # Errors
    /// If this process has none of version 2, or may not make one below it.
    pub fn make(root: &Root, id: &str) -> io::Result<(Self, OwnedFd)> {
        let own = own(root).ok_or(io::ErrorKind::NotFound)?;
        let process = Process::with_number(root, std::process::id()).ok_or(io::ErrorKind::NotFound)?;
        // The same identifier may come again while something of an earlier program is left.
        let count = MADE.fetch_add(1, Ordering::Relaxed);
        let path = own.join(format!("{PREFIX}{}-{}-{count}-{id}", process.number, process.started));
        std::fs::create_dir(&path)?;
        let group = Self(path);
        let procs = File::options().write(true).open(group.0.join("cgroup.procs"));
        match procs {
            Ok(procs) => Ok((group, procs.into())),
            Err(error) => {
                group.remove();
                Err(error)
            }
        }
    }

    /// Returns the leftover groups below the same parent: those whose makers have ended.
    pub fn left_over(root: &Root) -> Vec<Self> {
        let entries = own(root).and_then(|own| std::fs::read_dir(own).ok()).into_iter().flatten().flatten();
        let is_left = |name: &str| {
            let mut numbers = name.strip_prefix(PREFIX)?.split('-');
            let process =
                Process { number: numbers.next()?.parse().ok()?, started: numbers.next()?.parse().ok()? };
            Some(Process::with_number(root, process.number) != Some(process))
        };
        let left = entries.filter(|entry| entry.file_name().to_str().and_then(is_left) == Some(true));
        left.map(|entry| Self(entry.path())).collect()
    }

    /// The numbers of its processes.
    pub fn processes(&self) -> Vec<i32> {
        processes(&self.0)
    }

    /// Kills all of its processes.
    pub fn kill(&self) {
        kill_all(&self.0);
    }

    /// Removes it, if no process is in it.
    pub fn remove(&self) -> bool {
        std::fs::remove_dir(&self.0).is_ok()
    }
}

fn processes(group: &Path) -> Vec<i32> {
    let list = read(&group.join("cgroup.procs")).unwrap_or_default();
    list.lines().filter_map(|line| line.parse().ok()).collect()
}

fn kill_all(group: &Path) {
    let at_once = File::options().write(true).open(group.join("cgroup.kill"));
    if at_once.and_then(|mut file| file.write_all(b"1")).is_ok() {
        return;
    }
    for _ in 0..ROUNDS {
        let processes = processes(group);
        if processes.is_empty() {
            break;
        }
        for process in processes {
            // The process was in the group a moment ago, and process IDs are not reused that soon.
            let _ = kill(Pid::from_raw(process), Signal::SIGKILL);
        }
    }
}

/// The group of a session of logind, which makes and removes it: the session's processes, and no others.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SessionScope(PathBuf);

impl SessionScope {
    /// Returns the scope of the session that process `number` was moved to; `None` if this process belongs to the
    /// same session.
    pub fn of(root: &Root, number: u32) -> Option<Self> {
        let path = of_process(root, &number.to_string())?;
        let name = path.file_name()?.to_str()?;
        let is_session = name.strip_prefix("session-")?.strip_suffix(".scope")?;
        let is_own = own(root).is_none_or(|own| own.starts_with(&path));
        (!is_session.is_empty() && !is_own).then_some(Self(path))
    }

    /// Kills all of its processes.
    pub fn kill(&self) {
        kill_all(&self.0);
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        // Processes that a program left running on purpose stay in the group, which then cannot be removed.
        let _ = self.remove();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[allow(clippy::disallowed_methods, reason = "the test lays out files and needs a process")]
    fn groups_of_processes_that_are_gone_are_left_over() {
        let folder = tempfile::tempdir().unwrap();
        let root = Root::at(folder.path());
        let lay = |path: &str, text: &str| {
            let path = folder.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        let pid = std::process::id();
        let stat = |pid: u32| format!("{pid} (guestlet) S{} 4711 0\n", " 1".repeat(18));
        assert!(Cgroup::make(&root, "a").is_err(), "nothing is known of this process");
        lay("proc/self/cgroup", "3:cpu:/x\n0::/system.slice/guestlet.service\n");
        lay(&format!("proc/{pid}/stat"), &stat(pid));
        lay("sys/fs/cgroup/cgroup.controllers", "");
        let own = "sys/fs/cgroup/system.slice/guestlet.service";
        lay(&format!("{own}/cgroup.procs"), "");
        let names = [
            format!("{PREFIX}{pid}-4711-aa"),
            format!("{PREFIX}{pid}-4710-bb"),
            format!("{PREFIX}1-1-cc"),
            "other".to_owned(),
        ];
        for name in &names {
            lay(&format!("{own}/{name}/cgroup.procs"), "12\n34\n");
        }
        let mut left: Vec<_> =
            Cgroup::left_over(&root).iter().map(|one| one.0.file_name().unwrap().to_owned()).collect();
        left.sort_unstable();
        let mut expected = [names[1].as_str(), names[2].as_str()];
        expected.sort_unstable();
        assert_eq!(left, expected);
        assert_eq!(Cgroup::left_over(&root)[0].processes(), [12, 34]);
    }

    #[test]
    #[allow(clippy::disallowed_methods, reason = "the test lays out files")]
    fn only_the_group_of_a_session_of_its_own_is_one_of_a_session() {
        let folder = tempfile::tempdir().unwrap();
        let root = Root::at(folder.path());
        let lay = |path: &str, text: &str| {
            let path = folder.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        lay("sys/fs/cgroup/cgroup.controllers", "");
        lay("proc/self/cgroup", "0::/user.slice/user-0.slice/session-1.scope/tests\n");
        let scope = "user.slice/user-7.slice/session-c12.scope";
        for (number, group, wanted) in [
            (1, format!("1:name=systemd:/x\n0::/{scope}\n"), true),
            (2, "0::/user.slice/user-0.slice/session-1.scope\n".to_owned(), false),
            (3, "0::/system.slice/guestlet.service/guestlet-exec-1\n".to_owned(), false),
            (4, format!("0::/{scope}/inner\n"), false),
            (5, format!("0::/{scope} (deleted)\n"), false),
            (6, "0::/session-.scope\n".to_owned(), false),
            (7, "0::/\n".to_owned(), false),
            (8, format!("1:name=systemd:/{scope}\n"), false),
        ] {
            lay(&format!("proc/{number}/cgroup"), &group);
            let expected = wanted.then(|| SessionScope(root.path("/sys/fs/cgroup").join(scope)));
            assert_eq!(SessionScope::of(&root, number), expected, "{group}");
        }
        assert_eq!(SessionScope::of(&root, 99), None);
    }

    #[test]
    #[allow(clippy::disallowed_methods, reason = "the test needs a process")]
    fn a_group_has_what_is_started_in_it_and_loses_all_of_it() {
        let root = Root::default();
        // The test needs the permission to make a control group.
        let Ok((group, procs)) = Cgroup::make(&root, &format!("test{}", std::process::id())) else { return };
        let script = "setsid sleep 1000 & exec sleep 1000";
        let mut command = std::process::Command::new("/bin/sh");
        let identity = crate::sys::spawn_manner::Identity { uid: 0, gid: 0, groups: vec![0] };
        let manner =
            crate::sys::spawn_manner::Manner::new(identity, "/".into(), false).in_cgroup(Some(procs));
        manner.apply(command.args(["-c", script])).unwrap();
        let mut child = command.spawn().unwrap();
        while group.processes().len() < 2 {
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        assert!(!group.remove());
        group.kill();
        child.wait().unwrap();
        while !group.remove() {
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
    }
}
