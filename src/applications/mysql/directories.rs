//! Directories with the data of a server: those that its variables name, and those that links lead to. If one of
//! them is missing in a snapshot, the server does not start with its former data.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::Read as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::Instant;

use nix::fcntl::{FcntlArg, fcntl};
use nix::libc;

use super::Problem;
use crate::applications::MOST_DIRECTORIES;
use crate::applications::connection::left;

/// Query for the variables that [`of`] needs, and for how the log is written.
pub const VARIABLES: &str = "SHOW GLOBAL VARIABLES WHERE variable_name IN ('aria_log_dir_path', 'datadir', \
    'innodb_data_file_path', 'innodb_data_home_dir', 'innodb_doublewrite_dir', \
    'innodb_flush_log_at_trx_commit', 'innodb_log_group_home_dir', 'innodb_undo_directory', 'log_bin_basename', 'relay_log_basename')";

/// Variables that name a directory, and may be absent or empty.
const DIRECTORIES: [&str; 5] = [
    "aria_log_dir_path",
    "innodb_data_home_dir",
    "innodb_doublewrite_dir",
    "innodb_log_group_home_dir",
    "innodb_undo_directory",
];
/// Variables that are prefixes of file paths.
const BEGINNINGS: [&str; 2] = ["log_bin_basename", "relay_log_basename"];
/// Maximum number of directories that are examined before those on the same file system are merged.
const MOST_FOUND: usize = 16 * 1024;
/// Maximum length of the path in an `.isl` file.
const LONGEST: u64 = 4096;

#[allow(clippy::cast_possible_truncation, reason = "as struct flock has them; the numbers are below 3")]
const F_WRLCK: libc::c_short = libc::F_WRLCK as libc::c_short;
#[allow(clippy::cast_possible_truncation, reason = "the same")]
const F_UNLCK: libc::c_short = libc::F_UNLCK as libc::c_short;
#[allow(clippy::cast_possible_truncation, reason = "the same")]
const SEEK_SET: libc::c_short = libc::SEEK_SET as libc::c_short;

type Variables = BTreeMap<String, String>;

/// Returns the directories, with all links followed. Checks that the process `server` has locked a file in them,
/// because for a server in a container, or with mounts of its own, the same paths may lead to other directories
/// here.
///
/// # Errors
/// If a directory cannot be examined, belongs to another process, or it takes too long: then none is known.
pub fn of(variables: &Variables, server: i32, until: Instant) -> Result<Vec<PathBuf>, Problem> {
    let home = home(variables)?;
    let value = |name: &str| variables.get(name).map(String::as_str).filter(|value| !value.is_empty());
    let mut found = BTreeSet::from([resolve(home)?]);
    for name in DIRECTORIES {
        if let Some(path) = value(name) {
            found.insert(resolve(&home.join(path))?);
        }
    }
    for name in BEGINNINGS {
        if let Some(path) = value(name) {
            found.insert(resolve(parent(&home.join(path)))?);
        }
    }
    let base = home.join(value("innodb_data_home_dir").unwrap_or_default());
    let files = value("innodb_data_file_path").unwrap_or_default().split(';');
    let files: Vec<_> =
        files.filter_map(|file| file.split(':').next()).filter(|name| !name.is_empty()).collect();
    for name in &files {
        found.insert(resolve(parent(&base.join(name)))?);
    }
    // Without InnoDB, check the control file of Aria.
    let logs = home.join(value("aria_log_dir_path").unwrap_or_default());
    is_locked(&files.first().map_or_else(|| logs.join("aria_log_control"), |name| base.join(name)), server)?;
    links(home, 1, &mut found, until)?;
    bounded(found)
}

/// Checks that the process has locked a file.
fn is_locked(path: &Path, server: i32) -> Result<(), Problem> {
    let file = File::open(path).map_err(|error| cannot_look(path, &error))?;
    // A start and length of 0 mean the whole file.
    let mut lock = libc::flock { l_type: F_WRLCK, l_whence: SEEK_SET, l_start: 0, l_len: 0, l_pid: 0 };
    fcntl(&file, FcntlArg::F_GETLK(&mut lock)).map_err(|error| cannot_look(path, &error.into()))?;
    if lock.l_type == F_UNLCK || lock.l_pid != server {
        return Err(Problem::new(format_args!(
            "{} does not belong to the server that answers (process {server}): does it run in a container?",
            path.display()
        )));
    }
    Ok(())
}

/// Adds the directories of these files.
///
/// # Errors
/// The errors of [`of`].
pub fn add_files(
    directories: &mut Vec<PathBuf>,
    variables: &Variables,
    files: impl Iterator<Item = String>,
) -> Result<(), Problem> {
    let home = home(variables)?;
    let mut found: BTreeSet<_> = directories.drain(..).collect();
    for file in files {
        found.insert(resolve(parent(&home.join(file)))?);
    }
    *directories = bounded(found)?;
    Ok(())
}

fn home(variables: &Variables) -> Result<&Path, Problem> {
    let home = variables.get("datadir").map(Path::new).filter(|path| path.is_absolute());
    home.ok_or_else(|| Problem::new("the server does not report its data directory (datadir)"))
}

/// Adds the targets of databases and tables that are symbolic links, and of `.isl` files, which contain the path
/// of a table elsewhere.
fn links(
    directory: &Path,
    deeper: u32,
    found: &mut BTreeSet<PathBuf>,
    until: Instant,
) -> Result<(), Problem> {
    let failed = |error| cannot_look(directory, &error);
    for entry in std::fs::read_dir(directory).map_err(failed)? {
        left(until)?;
        let entry = entry.map_err(failed)?;
        let (path, kind) = (entry.path(), entry.file_type().map_err(failed)?);
        if kind.is_dir() && deeper > 0 {
            links(&path, deeper - 1, found, until)?;
        } else if kind.is_symlink() {
            let target = resolve(&path)?;
            // A database in another directory may contain links itself.
            if target.is_dir() && deeper > 0 {
                links(&target, deeper - 1, found, until)?;
            }
            found.insert(if target.is_dir() { target } else { parent(&target).to_owned() });
        } else if path.extension().is_some_and(|extension| extension == "isl") {
            let mut text = String::new();
            let read = File::open(&path).and_then(|file| file.take(LONGEST).read_to_string(&mut text));
            read.map_err(|error| cannot_look(&path, &error))?;
            found.insert(resolve(parent(&directory.join(text.trim_end())))?);
        }
        if found.len() > MOST_FOUND {
            return Err(too_many());
        }
    }
    Ok(())
}

/// Keeps one directory for each file system if there are more than the maximum.
fn bounded(found: BTreeSet<PathBuf>) -> Result<Vec<PathBuf>, Problem> {
    if found.len() <= MOST_DIRECTORIES {
        return Ok(found.into_iter().collect());
    }
    let mut devices = BTreeMap::new();
    for path in found {
        let about = std::fs::metadata(&path).map_err(|error| cannot_look(&path, &error))?;
        devices.entry(about.dev()).or_insert(path);
    }
    if devices.len() > MOST_DIRECTORIES {
        return Err(too_many());
    }
    Ok(devices.into_values().collect())
}

fn resolve(path: &Path) -> Result<PathBuf, Problem> {
    path.canonicalize().map_err(|error| cannot_look(path, &error))
}

fn parent(path: &Path) -> &Path {
    path.parent().unwrap_or(path)
}

fn cannot_look(path: &Path, error: &std::io::Error) -> Problem {
    Problem::new(format_args!(
        "cannot find out where the data of the server are: {}: {error}",
        path.display()
    ))
}

fn too_many() -> Problem {
    Problem::new("the data of the server are in too many directories")
}

#[cfg(test)]
#[allow(clippy::disallowed_methods)]
mod tests {
    use std::os::unix::fs::symlink;
    use std::time::Duration;

    use super::*;

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(30)
    }

    /// Starts a process that has locked a file.
    fn locking(path: &Path) -> std::process::Child {
        let program = "use Fcntl qw(:DEFAULT :flock F_SETLK F_WRLCK); open(my $file, '+<', $ARGV[0]) or die; \
                       my $lock = pack('s s x4 q q l x4', F_WRLCK, 0, 0, 0, 0); fcntl($file, F_SETLK, $lock) or die; \
                       $| = 1; print \"locked\\n\"; sleep 1000";
        let mut command = std::process::Command::new("perl");
        let command = command.args(["-e", program]).arg(path).stdout(std::process::Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut line = [0; 7];
        child.stdout.as_mut().unwrap().read_exact(&mut line).unwrap();
        child
    }

    #[test]
    fn every_place_with_data_is_found() {
        let directory = tempfile::tempdir().unwrap();
        let top = directory.path().canonicalize().unwrap();
        for name in ["data/a", "data/b", "redo", "undo", "log", "elsewhere/c", "table/d", "linked", "more"] {
            std::fs::create_dir_all(top.join(name)).unwrap();
        }
        for name in ["linked/t.MYD", "data/a/t.ibd", "table/d/x.ibd"] {
            std::fs::write(top.join(name), "").unwrap();
        }
        symlink(top.join("data"), top.join("link")).unwrap();
        symlink(top.join("elsewhere/c"), top.join("data/c")).unwrap();
        symlink(top.join("linked/t.MYD"), top.join("data/a/t.MYD")).unwrap();
        std::fs::write(top.join("data/b/x.isl"), format!("{}\n", top.join("table/d/x.ibd").display()))
            .unwrap();
        let text = |path: &str| top.join(path).display().to_string();
        let mut variables = Variables::from([
            ("datadir".to_owned(), text("link/")),
            ("innodb_log_group_home_dir".to_owned(), "../redo/".to_owned()),
            ("innodb_undo_directory".to_owned(), text("undo")),
            ("innodb_data_home_dir".to_owned(), String::new()),
            (
                "innodb_data_file_path".to_owned(),
                format!("ibdata1:12M;{}:10M:autoextend", text("more/ibdata2")),
            ),
            ("log_bin_basename".to_owned(), text("log/binlog")),
        ]);
        std::fs::write(top.join("data/ibdata1"), "").unwrap();
        std::fs::write(top.join("more/ibdata2"), "").unwrap();
        let unlocked = of(&variables, 1, soon()).unwrap_err();
        assert!(unlocked.to_string().contains("does not belong to the server"), "{unlocked}");
        // F_GETLK does not report a process's own locks, so another process has to hold this one.
        let mut server = locking(&top.join("data/ibdata1"));
        let number = server.id().cast_signed();
        let found = of(&variables, number, soon()).unwrap();
        assert!(of(&variables, number + 1, soon()).is_err());
        let expected = ["data", "elsewhere/c", "linked", "log", "more", "redo", "table/d", "undo"];
        assert_eq!(found, expected.map(|name| top.join(name)));
        // A directory that is missing, or takes too long, is an error: it must not be left out silently.
        assert!(of(&variables, number, Instant::now()).is_err());
        variables.insert("innodb_undo_directory".to_owned(), text("nowhere"));
        assert!(of(&variables, number, soon()).unwrap_err().to_string().contains("nowhere"));
        variables.remove("datadir");
        assert!(of(&variables, number, soon()).unwrap_err().to_string().contains("datadir"));
        server.kill().unwrap();
        server.wait().unwrap();
    }

    #[test]
    fn of_many_places_one_for_each_file_system_is_kept() {
        let directory = tempfile::tempdir().unwrap();
        let many: BTreeSet<_> =
            (0..=MOST_DIRECTORIES).map(|number| directory.path().join(number.to_string())).collect();
        for path in &many {
            std::fs::create_dir(path).unwrap();
        }
        assert_eq!(bounded(many).unwrap().len(), 1);
    }
}
