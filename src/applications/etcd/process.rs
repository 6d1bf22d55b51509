//! Process of an etcd, examined as far as a process of the same user may: its sockets, its files, and its command
//! line.

use std::fs::File;
use std::io::Read as _;
use std::net::SocketAddr;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::Instant;

use nix::unistd::Uid;

use super::Problem;
use super::listeners::{self, Listener};
use crate::applications::connection::left;

/// Maximum number of bytes read from a file.
const MOST: u64 = 4 * 1024 * 1024;
/// Option with which etcd acknowledges data that is not on the disk yet.
const UNSAFE: &str = "unsafe-no-fsync";

/// Returns the listening sockets of this network namespace.
fn listening() -> Result<Vec<Listener>, Problem> {
    let mut found = Vec::new();
    for path in ["/proc/net/tcp", "/proc/net/tcp6"] {
        match read(Path::new(path)) {
            Ok(bytes) => found.extend(listeners::parse(&String::from_utf8_lossy(&bytes))),
            // Without IPv6 in the kernel the second file does not exist.
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            Err(error) => return Err(cannot_read(path, &error)),
        }
    }
    Ok(found)
}

/// Returns the loopback addresses at which a process listens.
///
/// # Errors
/// If its descriptors cannot be read.
pub fn addresses(process: u32) -> Result<Vec<SocketAddr>, Problem> {
    let sockets = sockets(process).map_err(|error| cannot_read(&format!("/proc/{process}/fd"), &error))?;
    let listening = listening()?;
    Ok(listening.iter().filter(|one| sockets.contains(&one.inode)).filter_map(Listener::local).collect())
}

/// Checks that a process of this process's user listens at an address.
///
/// # Errors
/// If none does, one of another user does, or this cannot be determined.
pub fn is_own(address: SocketAddr) -> Result<(), Problem> {
    own(address).map(drop)
}

/// Returns the sockets that listen at an address, all of which must belong to this process's user.
fn own(address: SocketAddr) -> Result<Vec<Listener>, Problem> {
    let own = Uid::effective().as_raw();
    let there: Vec<_> = listening()?.into_iter().filter(|one| one.takes(address)).collect();
    match there.iter().map(|one| one.user).find(|user| *user != own) {
        Some(other) => Err(Problem::new(format_args!(
            "a process of the user {other} listens at {address}, not one of {own}"
        ))),
        None if there.is_empty() => Err(Problem::new(format_args!("no process listens on {address}"))),
        None => Ok(there),
    }
}

/// Returns the process that listens at an address, which must belong to this process's user.
///
/// # Errors
/// If it belongs to another user, or cannot be found.
pub fn at(address: SocketAddr, until: Instant) -> Result<u32, Problem> {
    let own_number = Uid::effective().as_raw();
    let there = own(address)?;
    let failed = |error| cannot_read("/proc", &error);
    for entry in std::fs::read_dir("/proc").map_err(failed)? {
        left(until)?;
        let entry = entry.map_err(failed)?;
        let Some(process) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        // Skip a process that has ended in the meantime, or belongs to another user.
        if !entry.metadata().is_ok_and(|about| about.uid() == own_number) {
            continue;
        }
        let sockets = sockets(process).unwrap_or_default();
        if there.iter().any(|one| sockets.contains(&one.inode)) {
            return Ok(process);
        }
    }
    Err(Problem::new(format_args!("cannot find out which process listens at {address}")))
}

/// Returns the inode numbers of the sockets of a process.
fn sockets(process: u32) -> std::io::Result<Vec<u64>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(format!("/proc/{process}/fd"))? {
        let Ok(link) = std::fs::read_link(entry?.path()) else { continue };
        let number: Option<u64> =
            link.to_str().and_then(|link| link.strip_prefix("socket:[")?.strip_suffix(']')?.parse().ok());
        found.extend(number);
    }
    Ok(found)
}

/// Returns the directories of the data and the log of an etcd, which keeps files of both open as long as it runs.
/// Empty if they are not known, for example because the same paths lead to other files here, as with a process in
/// a container.
pub fn directories(process: u32) -> Vec<PathBuf> {
    let (mut data, mut log) = (None, None);
    let Ok(entries) = std::fs::read_dir(format!("/proc/{process}/fd")) else { return Vec::new() };
    for entry in entries.flatten() {
        let Ok(path) = std::fs::read_link(entry.path()) else { continue };
        let place = match (
            path.ends_with("member/snap/db"),
            path.extension().is_some_and(|extension| extension == "wal"),
        ) {
            (true, _) => &mut data,
            (_, true) => &mut log,
            _ => continue,
        };
        let same = |one: std::fs::Metadata, other: std::fs::Metadata| {
            (one.dev(), one.ino()) == (other.dev(), other.ino())
        };
        let is_here = std::fs::metadata(entry.path())
            .and_then(|open| Ok(same(open, std::fs::metadata(&path)?)))
            .unwrap_or(false);
        if is_here && let Some(directory) = path.parent().and_then(|path| path.canonicalize().ok()) {
            *place = Some(directory);
        }
    }
    match (data, log) {
        (Some(data), Some(log)) => vec![data, log],
        _ => Vec::new(),
    }
}

/// Checks that etcd was not started with the option not to wait for its disk.
///
/// # Errors
/// If it was, or if its settings cannot be read.
pub fn is_safe(process: u32) -> Result<(), Problem> {
    let words = |name: &str| {
        let path = format!("/proc/{process}/{name}");
        read(Path::new(&path)).map_err(|error| cannot_read(&path, &error))
    };
    let (arguments, environment) = (words("cmdline")?, words("environ")?);
    let mut told = is_told(arguments.split(|byte| *byte == 0), b"--")
        || is_told(environment.split(|byte| *byte == 0), b"ETCD_");
    if let Some(file) = settings_file(&arguments, &environment) {
        let directory = format!("/proc/{process}/cwd");
        let path = Path::new(&directory).join(std::ffi::OsStr::from_bytes(&file));
        let text = read(&path).map_err(|error| cannot_read(&path.display().to_string(), &error))?;
        told |= String::from_utf8_lossy(&text).lines().any(is_told_in_line);
    }
    if told {
        return Err(Problem::new(format_args!(
            "etcd was started with {UNSAFE}: what it acknowledges may not be on the disk"
        )));
    }
    Ok(())
}

/// Returns whether one of these words, after its prefix, turns fsync off. The prefix `--` may also be `-`.
fn is_told<'a>(mut words: impl Iterator<Item = &'a [u8]>, before: &[u8]) -> bool {
    words.any(|word| {
        let Some(rest) = after(word, before) else { return false };
        let (name, value) = rest.split_at(rest.iter().position(|byte| *byte == b'=').unwrap_or(rest.len()));
        let name = String::from_utf8_lossy(name).to_lowercase().replace('_', "-");
        name == UNSAFE && !is_false(&String::from_utf8_lossy(value))
    })
}

fn is_told_in_line(line: &str) -> bool {
    line.trim().strip_prefix(UNSAFE).is_some_and(|value| value.trim().starts_with(':') && !is_false(value))
}

/// Returns whether the value of the option is false, which leaves fsync on. Separators around the value are
/// ignored.
fn is_false(value: &str) -> bool {
    let value = value.trim_matches(|character: char| !character.is_ascii_alphanumeric()).to_lowercase();
    ["false", "f", "0"].contains(&&*value)
}

fn after<'a>(word: &'a [u8], before: &[u8]) -> Option<&'a [u8]> {
    word.strip_prefix(before).or_else(|| if before == b"--" { word.strip_prefix(b"-") } else { None })
}

/// Returns the configuration file that etcd was started with, if any.
fn settings_file(arguments: &[u8], environment: &[u8]) -> Option<Vec<u8>> {
    let mut words = arguments.split(|byte| *byte == 0);
    while let Some(word) = words.next() {
        let Some(rest) = after(word, b"--").and_then(|word| word.strip_prefix(b"config-file")) else {
            continue;
        };
        match rest.first() {
            None => return words.next().map(<[u8]>::to_vec),
            Some(b'=') => return Some(rest[1..].to_vec()),
            _ => {}
        }
    }
    let mut words = environment.split(|byte| *byte == 0);
    words
        .find_map(|word| word.strip_prefix(b"ETCD_CONFIG_FILE="))
        .filter(|file| !file.is_empty())
        .map(<[u8]>::to_vec)
}

fn read(path: &Path) -> std::io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let read = File::open(path)?.take(MOST).read_to_end(&mut bytes)?;
    if read as u64 == MOST {
        return Err(std::io::Error::other("it is too long"));
    }
    Ok(bytes)
}

fn cannot_read(path: &str, error: &std::io::Error) -> Problem {
    Problem::new(format_args!("cannot find out about the process of etcd: {path}: {error}"))
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::time::Duration;

    use super::*;

    #[test]
    fn who_listens_is_found_by_the_address() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let until = Instant::now() + Duration::from_secs(30);
        assert_eq!(at(address, until).unwrap(), std::process::id());
        assert!(addresses(std::process::id()).unwrap().contains(&address));
        drop(listener);
        assert!(at(address, until).is_err());
    }

    #[test]
    #[allow(clippy::disallowed_methods)]
    fn directories_are_those_of_open_files() {
        let directory = tempfile::tempdir().unwrap();
        let top = directory.path().canonicalize().unwrap();
        std::fs::create_dir_all(top.join("member/snap")).unwrap();
        std::fs::create_dir_all(top.join("log")).unwrap();
        let own = std::process::id();
        let _data = File::create(top.join("member/snap/db")).unwrap();
        assert_eq!(directories(own), [""; 0].map(PathBuf::from));
        let _log = File::create(top.join("log/0-0.wal")).unwrap();
        assert_eq!(directories(own), [top.join("member/snap"), top.join("log")]);
        // Replace the file: the path now leads to a different one than the open descriptor.
        std::fs::remove_file(top.join("log/0-0.wal")).unwrap();
        std::fs::write(top.join("log/0-0.wal"), "").unwrap();
        assert_eq!(directories(own), [""; 0].map(PathBuf::from));
    }

    #[test]
    fn an_etcd_that_does_not_wait_for_its_disk_is_told_from_others() {
        let words = |text: &'static str| text.split(' ').map(str::as_bytes);
        for told in ["etcd --unsafe-no-fsync", "etcd -unsafe-no-fsync=true", "etcd --unsafe-no-fsync=1"] {
            assert!(is_told(words(told), b"--"), "{told}");
        }
        assert!(is_told(words("A=1 ETCD_UNSAFE_NO_FSYNC=true"), b"ETCD_"));
        for not_told in ["etcd --unsafe-no-fsync=false", "etcd --name unsafe-no-fsync", "etcd"] {
            assert!(!is_told(words(not_told), b"--"), "{not_told}");
        }
        assert!(is_told_in_line("unsafe-no-fsync: true") && !is_told_in_line("unsafe-no-fsync: false"));
        assert!(!is_told_in_line("# unsafe-no-fsync: true"));
        assert_eq!(settings_file(b"etcd\0--config-file\0/etc/x\0", b""), Some(b"/etc/x".to_vec()));
        assert_eq!(settings_file(b"etcd\0--config-file=/etc/x\0", b""), Some(b"/etc/x".to_vec()));
        assert_eq!(settings_file(b"etcd\0", b"ETCD_CONFIG_FILE=/etc/y\0"), Some(b"/etc/y".to_vec()));
        assert_eq!(settings_file(b"etcd\0", b"ETCD_CONFIG_FILE=\0"), None);
    }
}
