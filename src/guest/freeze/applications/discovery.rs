//! Which applications there are: those of the settings, and those whose sockets are at their usual places.
//!
//! What is at a socket is spoken with as the user that owns it. So it has to be a socket, not a link to one, in a directory where
//! nobody else can put one; and whoever listens there is looked at once more by the process that connects.

use std::fs::Metadata;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use super::{Commands, Listed, MOST, Settings};
use crate::sys::root::Root;
use crate::sys::spawn_manner::Identity;
use crate::sys::user_identity;

/// Names that are looked at in one directory.
const MOST_NAMES: usize = 64;

/// Finds the sockets of a kind at their usual places.
type Find = fn(&Root) -> Vec<String>;

/// The kinds that are looked for.
const AUTO: &[(&str, Find)] = &[("postgresql", postgresql)];

/// What was found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Candidate {
    /// Such as `postgresql`.
    pub name: String,
    /// Such as the path of its socket.
    pub instance: String,
    /// How it is held; or why it cannot be.
    pub way: Result<Way, String>,
}

/// How an application is held.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Way {
    /// By a process of this program, which runs as this user.
    Process(Identity),
    /// By its commands.
    Commands(Commands),
}

/// All of them. May wait for a disk, or for the name service.
pub fn find(root: &Root, settings: &Settings) -> Vec<Candidate> {
    let mut found = Vec::new();
    for listed in &settings.listed {
        found.push(match listed {
            Listed::Kind { kind, target, user } => Candidate {
                name: kind.clone(),
                instance: target.clone(),
                way: owner(root, target, Trust::of(user.as_deref())).map(Way::Process),
            },
            Listed::Commands(commands) => Candidate {
                name: commands.name.clone(),
                instance: commands.user.clone(),
                way: Ok(Way::Commands(commands.clone())),
            },
        });
    }
    let listed = found.clone();
    for (kind, sockets) in AUTO.iter().filter(|_| settings.auto) {
        for socket in sockets(root) {
            let is_it = |one: &Candidate| one.name == *kind && same(root, &one.instance, &socket);
            if !listed.iter().any(is_it) {
                let way = owner(root, &socket, Trust::Nobody).map(Way::Process);
                found.push(Candidate { name: (*kind).to_owned(), instance: socket, way });
            }
        }
    }
    if found.len() > MOST {
        found.truncate(MOST - 1);
        let way = Err(format!("there are more than {MOST} applications, and the others are not held"));
        found.push(Candidate { name: "others".to_owned(), instance: String::new(), way });
    }
    found
}

/// Whether two names are of one socket.
fn same(root: &Root, one: &str, other: &str) -> bool {
    let numbers =
        |path: &str| std::fs::metadata(root.path(path)).ok().map(|about| (about.dev(), about.ino()));
    one == other || numbers(one).is_some_and(|found| numbers(other) == Some(found))
}

/// Such as `/run/postgresql/.s.PGSQL.5432`.
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

/// What the settings say of a socket.
#[derive(Debug, Clone, Copy)]
enum Trust<'a> {
    /// Nothing: it was only found.
    Nobody,
    /// They name it.
    Socket,
    /// They name the user that it belongs to as well.
    User(&'a str),
}

impl<'a> Trust<'a> {
    fn of(user: Option<&'a str>) -> Self {
        user.map_or(Self::Socket, Self::User)
    }
}

/// The user whose socket it is.
fn owner(root: &Root, socket: &str, trust: Trust<'_>) -> Result<Identity, String> {
    let path = root.path(socket);
    let about =
        std::fs::symlink_metadata(&path).map_err(|error| format!("cannot look at {socket}: {error}"))?;
    if !about.file_type().is_socket() {
        return Err(format!("{socket} is no socket"));
    }
    let account = user_identity::with_number(about.uid())
        .map_err(|error| format!("who the user {} is cannot be found out: {error}", about.uid()))?
        .ok_or_else(|| format!("{socket} belongs to the user {}, who has no account", about.uid()))?;
    match trust {
        Trust::User(user) if user != account.name => {
            return Err(format!("{socket} belongs to {}, and the settings say {user}", account.name));
        }
        Trust::Nobody | Trust::Socket if about.uid() == 0 => {
            return Err(format!(
                "{socket} belongs to root, whom the settings have to name (freeze.application.user)"
            ));
        }
        Trust::User(_) | Trust::Socket | Trust::Nobody => {}
    }
    let is_named = !matches!(trust, Trust::Nobody);
    let directory = path.parent().unwrap_or(Path::new("/"));
    let directory = directory.canonicalize().map_err(|error| format!("cannot look at {socket}: {error}"))?;
    for above in directory.ancestors() {
        let found = std::fs::metadata(above).map_err(|error| format!("cannot look at {socket}: {error}"))?;
        if !is_guarded(&found, &account.identity, is_named) {
            let above: PathBuf = above.into();
            return Err(format!(
                "others may put a socket at {socket}, because they may write to {}",
                above.display()
            ));
        }
    }
    Ok(account.identity)
}

/// Whether only root and this user put something into a directory, or take it away; where the settings name the socket, also one in
/// which nobody takes away what belongs to others.
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
        /// With a server of `nobody`.
        fn new() -> Self {
            let machine = Self(tempfile::tempdir().unwrap());
            // A machine's root is nobody else's.
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

        /// Why it is not spoken with; empty if it is.
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

    /// The temporary directory has others above it, in which everybody may write: what is asked here is said of what is below.
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
        // One that is listed is not found once more.
        std::fs::create_dir(machine.path("var")).unwrap();
        symlink("../run", machine.path("var/run")).unwrap();
        let target = "/var/run/postgresql/.s.PGSQL.5432".to_owned();
        let listed = Listed::Kind { kind: "postgresql".to_owned(), target, user: None };
        assert_eq!(machine.found(true, vec![listed]).len(), 2);
        // Nor does a link to one take its place.
        symlink(".s.PGSQL.5432", machine.path("run/postgresql/.s.PGSQL.1")).unwrap();
        assert_eq!(machine.found(true, Vec::new()).len(), 3);
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
        assert!(machine.why_not(Some("root")).contains("belongs to nobody, and the settings say root"));
        // As Debian has it: of the server's user and its group.
        chown(&directory, Some(65534), Some(65534)).unwrap();
        mode(0o2775);
        assert_eq!(machine.why_not(Some("")), "");
        for (mode_, gid) in [(0o777, 65534), (0o775, 12)] {
            chown(&directory, Some(65534), Some(gid)).unwrap();
            mode(mode_);
            assert!(machine.why_not(None).contains("others may put"), "{mode_:o}");
            assert!(machine.why_not(Some("")).contains("others may put"), "{mode_:o}");
        }
        mode(0o1777);
        assert!(machine.why_not(None).contains("others may put a socket"));
        assert_eq!(machine.why_not(Some("")), "");
        mode(0o755);
        chown(&directory, Some(12), None).unwrap();
        assert!(machine.why_not(Some("")).contains("others may put"));
        chown(&directory, Some(0), None).unwrap();
        // Whose it is.
        chown(&socket, Some(0), None).unwrap();
        assert!(machine.why_not(None).contains("belongs to root"));
        assert!(machine.why_not(Some("")).contains("belongs to root"));
        assert_eq!(machine.why_not(Some("root")), "");
        chown(&socket, Some(4_000_000), None).unwrap();
        assert!(machine.why_not(None).contains("no account"));
        std::fs::remove_file(&socket).unwrap();
        machine.listen("run/real", 65534);
        symlink("../real", &socket).unwrap();
        assert!(machine.why_not(None).contains("is no socket"));
        std::fs::remove_file(&socket).unwrap();
        assert!(machine.why_not(Some("")).contains("cannot look at"));
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
