//! Owns the cache of built images: `$XDG_CACHE_HOME/guestlet/<kind>/<key>/`, where the key is a hash of all
//! that the entry is made of. An entry is built under a lock in a folder of its own and renamed when it is
//! complete, so that two test runs at once share it and a killed one leaves nothing half made.

use std::fs::{File, FileTimes, OpenOptions};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Instant, SystemTime};

use anyhow::{Context as _, bail};
use nix::fcntl::{Flock, FlockArg};

/// Entries of one kind that are kept: the newest ones, by last use.
const KEPT: usize = 3;

/// The folder of all entries.
pub fn root() -> anyhow::Result<PathBuf> {
    let base = match std::env::var_os("XDG_CACHE_HOME") {
        Some(path) if !path.is_empty() => PathBuf::from(path),
        _ => PathBuf::from(std::env::var_os("HOME").context("HOME is not set")?).join(".cache"),
    };
    Ok(base.join("guestlet"))
}

/// What an entry is made of.
#[derive(Debug, Clone, Copy)]
pub enum Input<'a> {
    /// Some words, such as a version or the key of another entry.
    Words(&'a str),
    /// The contents of a file.
    File(&'a Path),
}

/// The folder of the entry of `kind` made of `inputs`; builds it if there is none.
pub fn entry(
    kind: &str,
    inputs: &[Input<'_>],
    build: impl FnOnce(&Path) -> anyhow::Result<()>,
) -> anyhow::Result<PathBuf> {
    let folder = root()?.join(kind);
    std::fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
    let path = folder.join(hash(inputs)?);
    if path.exists() {
        touch(&path);
        return Ok(path);
    }
    let lock = OpenOptions::new().create(true).append(true).open(folder.join("lock"))?;
    let _lock = Flock::lock(lock, FlockArg::LockExclusive).map_err(|(_, error)| error)?;
    if path.exists() {
        return Ok(path);
    }
    let partial = folder.join("partial");
    if partial.exists() {
        std::fs::remove_dir_all(&partial)?;
    }
    std::fs::create_dir(&partial)?;
    let started = Instant::now();
    eprintln!("  building {kind} …");
    build(&partial).with_context(|| format!("cannot build {kind}"))?;
    std::fs::rename(&partial, &path)?;
    eprintln!("  built {kind} in {:.0} s", started.elapsed().as_secs_f32());
    prune(&folder);
    Ok(path)
}

/// The last part of an entry's path, as an input for entries made of it.
pub fn key(entry: &Path) -> &str {
    entry.file_name().and_then(std::ffi::OsStr::to_str).unwrap_or_default()
}

fn hash(inputs: &[Input<'_>]) -> anyhow::Result<String> {
    let mut sum = Command::new("sha256sum")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .context("sha256sum")?;
    let mut pipe = sum.stdin.take().context("no pipe")?;
    for input in inputs {
        match input {
            Input::Words(words) => pipe.write_all(words.as_bytes())?,
            Input::File(path) => {
                let mut file = File::open(path).with_context(|| format!("cannot read {}", path.display()))?;
                std::io::copy(&mut file, &mut pipe)?;
            }
        }
        pipe.write_all(&[0])?;
    }
    drop(pipe);
    let output = sum.wait_with_output()?;
    if !output.status.success() || output.stdout.len() < 16 {
        bail!("sha256sum failed");
    }
    Ok(String::from_utf8_lossy(&output.stdout[..16]).into_owned())
}

fn touch(path: &Path) {
    let now = FileTimes::new().set_modified(SystemTime::now());
    drop(File::open(path).and_then(|folder| folder.set_times(now)));
}

/// An entry that a running VM still uses stays on the disk until that VM ends: its files are open.
fn prune(folder: &Path) {
    let mut entries: Vec<_> = std::fs::read_dir(folder)
        .into_iter()
        .flatten()
        .flatten()
        .filter(|entry| entry.path().is_dir())
        .filter_map(|entry| Some((entry.metadata().ok()?.modified().ok()?, entry.path())))
        .collect();
    entries.sort();
    entries.reverse();
    for (_, path) in entries.into_iter().skip(KEPT) {
        drop(std::fs::remove_dir_all(path));
    }
}
