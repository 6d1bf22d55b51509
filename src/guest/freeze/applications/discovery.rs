//! Finds the applications: those of the settings, and those whose sockets are at their usual paths.
//!
//! The agent talks to a socket as the user that owns it. So it has to be a socket, not a link to one, in a
//! directory where no other user can place one; and the process that connects checks once more who listens there.
//! The agent talks to an etcd, which listens on the network, as the user of its unit's process, or as the one that
//! the settings name.

use std::fs::Metadata;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use super::{Commands, Listed, MOST, Settings};
use crate::applications::HELD_LAST;
use crate::sys::root::Root;
use crate::sys::spawn_manner::Identity;
use crate::sys::user_identity;

/// Limit on the names that are read in one directory.
const MOST_NAMES: usize = 64;

/// Function that finds the targets of a kind at their usual paths.
type Find = fn(&Root) -> Vec<String>;
/// Function that finds the user of such a target.
type Whose = fn(&Root, &str, Trust<'_>) -> Result<Identity, String>;

/// Kinds that are searched for, each with its functions.
const AUTO: &[(&str, Find, Whose)] =
    &[("postgresql", postgresql, owner), ("mysql", mysql, owner), (ETCD, etcd, user_of_etcd)];
const ETCD: &str = "etcd";
/// Prefix of a process ID in a target.
const PROCESS: &str = "process:";

/// Application that was found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Candidate {
    /// Kind of the application, such as `postgresql`.
    pub name: String,
    /// Instance of the kind, such as the path of its socket.
    pub instance: String,
    /// Way in which it is held, or the reason why it cannot be.
    pub way: Result<Way, String>,
}

impl Candidate {
    /// Returns whether it is held last, because its users have to wait while it is held.
    pub fn is_held_last(&self) -> bool {
        matches!(self.way, Ok(Way::Process(_))) && HELD_LAST.contains(&&*self.name)
    }
}

/// Ways in which an application is held.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Way {
    /// Held by a process of this program that runs as this user.
    Process(Identity),
    /// Held by its pair of commands.
    Commands(Commands),
}

/// Finds all applications. May block on a disk or on the name service.
pub fn find(root: &Root, settings: &Settings) -> Vec<Candidate> {
    let mut found = Vec::new();
    for listed in &settings.listed {
        found.push(match listed {
            Listed::Kind { kind, target, user } => Candidate {
                name: kind.clone(),
                instance: target.clone(),
                way: whose(kind)(root, target, Trust::of(user.as_deref())).map(Way::Process),
            },
            Listed::Commands(commands) => Candidate {
                name: commands.name.clone(),
                instance: commands.user.clone(),
                way: Ok(Way::Commands(commands.clone())),
            },
        });
    }
    let listed = found.clone();
    for (kind, targets, whose) in AUTO.iter().filter(|_| settings.auto) {
        for target in targets(root) {
            let is_it = |one: &Candidate| one.name == *kind && same(root, &one.instance, &target);
            if !listed.iter().any(is_it) {
                let way = whose(root, &target, Trust::Nobody).map(Way::Process);
                found.push(Candidate { name: (*kind).to_owned(), instance: target, way });
            }
        }
    }
    if found.len() > MOST {
        found.truncate(MOST - 1);
        let way = Err(format!("there are more than {MOST} applications; the rest are not held"));
        found.push(Candidate { name: "others".to_owned(), instance: String::new(), way });
    }
    found
}

fn whose(kind: &str) -> Whose {
    AUTO.iter().find(|(name, ..)| *name == kind).map_or(owner, |(.., whose)| *whose)
}

/// Returns whether two names mean the same socket. An etcd in the settings is the same as the one of the unit, as
/// no machine has two.
fn same(root: &Root, one: &str, other: &str) -> bool {
    if other.starts_with(PROCESS) {
        return true;
    }
    let numbers =
        |path: &str| std::fs::metadata(root.path(path)).ok().map(|about| (about.dev(), about.ino()));
    one == other || numbers(one).is_some_and(|found| numbers(other) == Some(found))
}

/// Returns the sockets of PostgreSQL, such as `/run/postgresql/.s.PGSQL.5432`.
fn postgresql(root: &Root) -> Vec<String> {
    const DIRECTORY: &str = "/run/postgresql";

    let is_port = |name: &str| {
        let port = name.strip_prefix(".s.PGSQL.");
        port.is_some_and(|port| !port.is_empty() && port.bytes().all(|byte| byte.is_ascii_digit()))
    };
    let Ok(entries) = std::fs::read_dir(root.path(DIRECTORY)) else { return Vec::new() };
    let names = entries.take(MOST_NAMES).flatten().filter_map(|entry| entry.file_name().into_string().ok());
    let mut found: Vec<_> =
        names.filter(|name| is_port(name)).map(|name| format!("{DIRECTORY}/{name}")).collect();
    found.sort_unstable();
    found
}

/// Returns the sockets of MariaDB and MySQL at the paths that the packages of Debian, of Fedora and its relatives,
/// and of SUSE use.
fn mysql(root: &Root) -> Vec<String> {
    let usual = ["/run/mysqld/mysqld.sock", "/var/lib/mysql/mysql.sock", "/run/mysql/mysql.sock"];
    let is_socket = |path: &str| {
        std::fs::symlink_metadata(root.path(path)).is_ok_and(|about| about.file_type().is_socket())
    };
    usual.into_iter().filter(|path| is_socket(path)).map(str::to_owned).collect()
}

/// Returns the main process of the unit, from its control group of either version.
fn etcd(root: &Root) -> Vec<String> {
    let groups = ["/sys/fs/cgroup/system.slice", "/sys/fs/cgroup/systemd/system.slice"];
    let processes = groups.map(|group| root.line(&format!("{group}/etcd.service/cgroup.procs")));
    let mut numbers = processes.iter().flat_map(|lines| lines.lines()).take(MOST_NAMES);
    let is_it =
        |number: &&str| number.parse::<u32>().is_ok() && root.line(&format!("/proc/{number}/comm")) == ETCD;
    numbers.find(is_it).map(|number| format!("{PROCESS}{number}")).into_iter().collect()
}

/// Returns the user of the process, or the one that the settings name.
fn user_of_etcd(root: &Root, target: &str, trust: Trust<'_>) -> Result<Identity, String> {
    let Some(number) = target.strip_prefix(PROCESS) else {
        let Trust::User(user) = trust else {
            return Err(format!("set the user of {target} in the settings (freeze.application.user)"));
        };
        let account =
            user_identity::find(user).map_err(|error| format!("cannot look up the user {user}: {error}"))?;
        return account.map(|account| account.identity).ok_or_else(|| format!("there is no user {user}"));
    };
    let about = std::fs::metadata(root.path(&format!("/proc/{number}")));
    let user = about.map_err(|error| format!("cannot examine the process {number}: {error}"))?.uid();
    if user == 0 && !matches!(trust, Trust::User("root")) {
        return Err(
            "etcd runs as root, which must be allowed in the settings (freeze.application.user)".to_owned()
        );
    }
    let account = user_identity::with_number(user)
        .map_err(|error| format!("cannot look up the user {user}: {error}"))?;
    account
        .map(|account| account.identity)
        .ok_or_else(|| format!("etcd runs as the user {user}, which has no account"))
}

/// Statement of the settings about a socket.
#[derive(Debug, Clone, Copy)]
enum Trust<'a> {
    /// None: the socket was only found.
    Nobody,
    /// The settings name the socket.
    Socket,
    /// The settings also name the user that owns it.
    User(&'a str),
}

impl<'a> Trust<'a> {
    fn of(user: Option<&'a str>) -> Self {
        user.map_or(Self::Socket, Self::User)
    }
}

/// Returns the user that owns the socket, after checking that no other user could replace it.
fn owner(root: &Root, socket: &str, trust: Trust<'_>) -> Result<Identity, String> {
    let path = root.path(socket);
    let about =
        std::fs::symlink_metadata(&path).map_err(|error| format!("cannot examine {socket}: {error}"))?;
    if !about.file_type().is_socket() {
        return Err(format!("{socket} is not a socket"));
    }
    let account = user_identity::with_number(about.uid())
        .map_err(|error| format!("cannot look up the user {}: {error}", about.uid()))?
        .ok_or_else(|| format!("{socket} belongs to the user {}, which has no account", about.uid()))?;
    match trust {
        Trust::User(user) if user != account.name => {
            return Err(format!("{socket} belongs to {}, but the settings have {user}", account.name));
        }
        Trust::Nobody | Trust::Socket if about.uid() == 0 => {
            return Err(format!(
                "{socket} belongs to root, which must be allowed in the settings (freeze.application.user)"
            ));
        }
        Trust::User(_) | Trust::Socket | Trust::Nobody => {}
    }
    let is_named = !matches!(trust, Trust::Nobody);
    let directory = path.parent().unwrap_or(Path::new("/"));
    let directory = directory.canonicalize().map_err(|error| format!("cannot examine {socket}: {error}"))?;
    for above in directory.ancestors() {
        let found = std::fs::metadata(above).map_err(|error| format!("cannot examine {socket}: {error}"))?;
        if !is_guarded(&found, &account.identity, is_named) {
            let above: PathBuf = above.into();
            return Err(format!(
                "other users could replace the socket {socket}, because they may write to {}",
                above.display()
            ));
        }
    }
    Ok(account.identity)
}

/// Returns whether only root and this user can add or remove entries of a directory. If the settings name the
/// socket, a directory in which users cannot remove the entries of others (sticky bit) is accepted as well.
fn is_guarded(directory: &Metadata, user: &Identity, is_named: bool) -> bool {
    const STICKY: u32 = 0o1000;
    const BY_GROUP: u32 = 0o020;
    const BY_OTHERS: u32 = 0o002;

    let mode = directory.mode();
    let is_own = directory.uid() == 0 || directory.uid() == user.uid;
    let group = mode & BY_GROUP == 0 || directory.gid() == 0 || directory.gid() == user.gid;
    is_own && ((mode & BY_OTHERS == 0 && group) || (is_named && mode & STICKY != 0))
}

#[cfg(test)]
mod tests {
    use std::fs::Permissions;
    use std::os::unix::fs::{PermissionsExt as _, chown, symlink};
    use std::os::unix::net::UnixListener;

    use super::*;

    struct Machine(tempfile::TempDir);

    impl Machine {
        /// Creates the tree, with a server that runs as `nobody`.
        fn new() -> Self {
            let machine = Self(tempfile::tempdir().unwrap());
            // The root directory of a machine is not writable for others.
            std::fs::set_permissions(machine.0.path(), Permissions::from_mode(0o755)).unwrap();
            std::fs::create_dir_all(machine.path("run/postgresql")).unwrap();
            machine.listen("run/postgresql/.s.PGSQL.5432", 65534);
            machine
        }

        fn path(&self, path: &str) -> PathBuf {
            self.0.path().join(path)
        }

        fn listen(&self, path: &str, uid: u32) {
            drop(UnixListener::bind(self.path(path)).unwrap());
            chown(self.path(path), Some(uid), None).unwrap();
        }

        fn found(&self, auto: bool, listed: Vec<Listed>) -> Vec<Candidate> {
            find(&Root::at(self.0.path()), &Settings { auto, listed, ..Settings::default() })
        }

        /// Returns why the agent does not talk to it; empty if it does.
        fn why_not(&self, listed: Option<&str>) -> String {
            let kind = |user: &str| Listed::Kind {
                kind: "postgresql".to_owned(),
                target: "/run/postgresql/.s.PGSQL.5432".to_owned(),
                user: Some(user.to_owned()).filter(|user| !user.is_empty()),
            };
            let found = self.found(listed.is_none(), listed.map(kind).into_iter().collect());
            let [one] = &found[..] else { panic!("{found:?}") };
            one.way.clone().err().unwrap_or_default()
        }
    }

    /// Returns whether a problem is about the directories above the temporary one, which are writable for
    /// everybody. The tests only concern what is below.
    fn is_about_what_is_above(words: &str) -> bool {
        words.ends_with("may write to /tmp") || words.is_empty()
    }

    #[test]
    fn sockets_at_their_usual_places_are_found() {
        if !nix::unistd::Uid::effective().is_root() {
            return;
        }
        let machine = Machine::new();
        for other in [".s.PGSQL.5432.lock", ".s.PGSQL.", ".s.PGSQL.x", "other"] {
            machine.listen(&format!("run/postgresql/{other}"), 65534);
        }
        machine.listen("run/postgresql/.s.PGSQL.5433", 65534);
        let names =
            |auto| machine.found(auto, Vec::new()).into_iter().map(|one| one.instance).collect::<Vec<_>>();
        assert_eq!(names(true), ["/run/postgresql/.s.PGSQL.5432", "/run/postgresql/.s.PGSQL.5433"]);
        assert_eq!(names(false), [""; 0]);
        let empty = tempfile::tempdir().unwrap();
        assert_eq!(find(&Root::at(empty.path()), &Settings { auto: true, ..Settings::default() }), []);
        // A socket that is listed is not found a second time.
        std::fs::create_dir(machine.path("var")).unwrap();
        symlink("../run", machine.path("var/run")).unwrap();
        let target = "/var/run/postgresql/.s.PGSQL.5432".to_owned();
        let listed = Listed::Kind { kind: "postgresql".to_owned(), target, user: None };
        assert_eq!(machine.found(true, vec![listed]).len(), 2);
        // A link to a socket does not count.
        symlink(".s.PGSQL.5432", machine.path("run/postgresql/.s.PGSQL.1")).unwrap();
        assert_eq!(machine.found(true, Vec::new()).len(), 3);
    }

    #[test]
    #[allow(clippy::disallowed_methods)]
    fn other_databases_are_found_at_their_usual_places() {
        if !nix::unistd::Uid::effective().is_root() {
            return;
        }
        let machine = Machine::new();
        std::fs::remove_dir_all(machine.path("run/postgresql")).unwrap();
        std::fs::create_dir_all(machine.path("run/mysqld")).unwrap();
        std::fs::create_dir_all(machine.path("var/lib/mysql")).unwrap();
        machine.listen("run/mysqld/mysqld.sock", 65534);
        std::fs::write(machine.path("var/lib/mysql/mysql.sock"), "").unwrap();
        let group = machine.path("sys/fs/cgroup/system.slice/etcd.service");
        std::fs::create_dir_all(&group).unwrap();
        std::fs::write(group.join("cgroup.procs"), "7\n8\n").unwrap();
        for (number, name) in [("7", "sh\n"), ("8", "etcd\n")] {
            std::fs::create_dir_all(machine.path("proc").join(number)).unwrap();
            std::fs::write(machine.path("proc").join(number).join("comm"), name).unwrap();
        }
        let names = |listed| {
            let found = machine.found(true, listed).into_iter();
            found.map(|one| (one.name, one.instance, one.way.err())).collect::<Vec<_>>()
        };
        let found = names(Vec::new());
        assert_eq!((&*found[0].0, &*found[0].1), ("mysql", "/run/mysqld/mysqld.sock"));
        let (kind, process, why_not) = &found[1];
        assert_eq!((found.len(), &**kind, &**process), (2, "etcd", "process:8"));
        assert!(why_not.as_ref().unwrap().contains("runs as root"), "{why_not:?}");
        chown(machine.path("proc/8"), Some(65534), None).unwrap();
        assert_eq!(names(Vec::new())[1].2, None);
        // A listed process is the same one, and its user has to be given.
        let listed = |user: Option<&str>| {
            let (kind, target) = ("etcd".to_owned(), "http://127.0.0.1:2379".to_owned());
            names(vec![Listed::Kind { kind, target, user: user.map(str::to_owned) }])
        };
        assert_eq!(listed(Some("nobody")).len(), 2);
        assert_eq!(listed(Some("nobody"))[0].2, None);
        assert!(listed(None)[0].2.as_ref().unwrap().contains("set the user of"));
        assert!(listed(Some("nobody of that name"))[0].2.as_ref().unwrap().contains("there is no user"));
    }

    #[test]
    fn whose_socket_it_may_be() {
        if !nix::unistd::Uid::effective().is_root() {
            return;
        }
        let machine = Machine::new();
        let (socket, directory) =
            (machine.path("run/postgresql/.s.PGSQL.5432"), machine.path("run/postgresql"));
        let mode = |mode| std::fs::set_permissions(&directory, Permissions::from_mode(mode)).unwrap();
        assert!(is_about_what_is_above(&machine.why_not(None)), "{}", machine.why_not(None));
        assert_eq!(machine.why_not(Some("")), "");
        assert_eq!(machine.why_not(Some("nobody")), "");
        assert!(machine.why_not(Some("root")).contains("belongs to nobody, but the settings have root"));
        // As on Debian: owned by the server's user and its group.
        chown(&directory, Some(65534), Some(65534)).unwrap();
        mode(0o2775);
        assert_eq!(machine.why_not(Some("")), "");
        for (mode_, gid) in [(0o777, 65534), (0o775, 12)] {
            chown(&directory, Some(65534), Some(gid)).unwrap();
            mode(mode_);
            assert!(machine.why_not(None).contains("other users could replace"), "{mode_:o}");
            assert!(machine.why_not(Some("")).contains("other users could replace"), "{mode_:o}");
        }
        mode(0o1777);
        assert!(machine.why_not(None).contains("other users could replace the socket"));
        assert_eq!(machine.why_not(Some("")), "");
        mode(0o755);
        chown(&directory, Some(12), None).unwrap();
        assert!(machine.why_not(Some("")).contains("other users could replace"));
        chown(&directory, Some(0), None).unwrap();
        // The socket's owner matters, too.
        chown(&socket, Some(0), None).unwrap();
        assert!(machine.why_not(None).contains("belongs to root"));
        assert!(machine.why_not(Some("")).contains("belongs to root"));
        assert_eq!(machine.why_not(Some("root")), "");
        chown(&socket, Some(4_000_000), None).unwrap();
        assert!(machine.why_not(None).contains("no account"));
        std::fs::remove_file(&socket).unwrap();
        machine.listen("run/real", 65534);
        symlink("../real", &socket).unwrap();
        assert!(machine.why_not(None).contains("is not a socket"));
        std::fs::remove_file(&socket).unwrap();
        assert!(machine.why_not(Some("")).contains("cannot examine"));
    }

    #[test]
    fn there_is_an_end_to_them() {
        let commands = |number: usize| {
            let words = || vec!["/bin/true".to_owned()];
            let (name, user) = (number.to_string(), "root".to_owned());
            Listed::Commands(Commands { name, user, freeze: words(), thaw: words(), data: Vec::new() })
        };
        let folder = tempfile::tempdir().unwrap();
        let listed = (0..MOST + 5).map(commands).collect();
        let found = find(&Root::at(folder.path()), &Settings { listed, ..Settings::default() });
        assert_eq!(found.len(), MOST);
        assert!(found[MOST - 1].way.clone().unwrap_err().contains("not held"));
    }
}
