//! Programs that work on a disk that is held: each gets the disk as its standard input, and not by its name.
//!
//! ```text
//! checked ──▶ started: input = the disk, output = a locked file in memory ──▶ ended, its output is read
//!                                      │
//!                                      └─ the agent is killed: the program keeps the lock for as long as it runs
//! ```
//! A program that repairs must not be killed halfway. It gets a scope of its own, beside the agent's unit, and
//! outlives the agent, its update, and its own deadline. No other operation on the disk is begun until it has
//! ended.

use std::fs::{File, TryLockError};
use std::io::{self, Read as _, Seek as _, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::guest::Guest;
use crate::guest::volumes::held::Held;
use crate::guest::volumes::{Error, PATIENCE, holding, programs};
use crate::sys::block_device;
use crate::sys::program::{self, Ended};
use crate::sys::root::Root;

/// Path by which a program finds the disk, for its arguments.
pub(super) const ITSELF: &str = "/proc/self/fd/0";
/// Directory of the output files of programs.
const FOLDER: &str = "/run/guestlet/at-work";
/// Limit on the bytes that are read of such a file.
const MOST: u64 = 64 * 1024;
/// Directory that exists if systemd is running.
const SYSTEMD: &str = "/run/systemd/system";
/// Program that moves itself out of the agent's unit and then executes the other program. At shutdown systemd
/// waits for it, because the first signal that it sends has no effect.
const SCOPE: &str = "systemd-run";
const IN_SCOPE: [&str; 5] =
    ["--scope", "--collect", "--property=KillSignal=SIGCONT", "--property=TimeoutStopSec=600", "--"];

/// Fate of a program when its deadline has passed, or the agent ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fate {
    /// Killed: it has written nothing, or will be run again.
    Killed,
    /// Left to finish.
    Finishes,
}

/// Runs a program on a disk to its end, whatever its exit status. In its `arguments` the disk is called
/// [`ITSELF`].
///
/// # Errors
/// If it is not installed, the disk is a different one by now, it cannot be started, or takes longer than
/// `deadline`.
pub(super) async fn run(
    guest: &Guest,
    held: &Held,
    name: &'static str,
    arguments: &[&str],
    fate: Fate,
    deadline: Duration,
) -> Result<Ended, Error> {
    let root = &guest.root;
    let path = programs::find(root, name).ok_or(Error::NotInstalled { program: name })?;
    let scope = (fate == Fate::Finishes && root.path(SYSTEMD).is_dir()).then(|| programs::find(root, SCOPE));
    if let Some(scope) = scope.flatten() {
        let scoped: Vec<_> =
            IN_SCOPE.iter().copied().chain([path.as_str()]).chain(arguments.iter().copied()).collect();
        let ended = run_once(guest, held, name, &scope, &scoped, fate, deadline).await?;
        // systemd-run prints this before it executes the program.
        let (first, rest) = ended.output.split_once('\n').unwrap_or((&ended.output, ""));
        if first.starts_with("Running ") && first.contains(".scope") {
            return Ok(Ended { output: rest.to_owned(), ..ended });
        }
        let said = ended.output.trim();
        tracing::warn!("{name} is run without a scope of its own, and ends with the agent: {said}");
    }
    run_once(guest, held, name, &path, arguments, fate, deadline).await
}

async fn run_once(
    guest: &Guest,
    held: &Held,
    name: &'static str,
    path: &str,
    arguments: &[&str],
    fate: Fate,
    deadline: Duration,
) -> Result<Ended, Error> {
    let (root, copy) = (guest.root.clone(), held.clone());
    let begin = move || {
        let noted = |source| Error::Note { device: copy.file().to_owned(), source };
        let said = Said::begin(&root, copy.generation(), name).map_err(noted)?;
        let output = said.file.try_clone().map_err(noted)?;
        let unreadable = |source| Error::unreadable(copy.file(), source);
        let input = block_device::reopen(copy.device(), false).map_err(unreadable)?;
        // From here on nothing blocks.
        copy.check()?;
        Ok::<_, Error>((said, input, output))
    };
    let (said, input, output) = holding(held, PATIENCE, begin).await??;
    let kill = fate == Fate::Killed;
    let status = program::run_on(path, arguments, input, output, kill, deadline).await?;
    let (file, end) = (held.file().display().to_string(), move || said.end());
    let output = holding(held, PATIENCE, end).await?;
    let output = output.map_err(|source| Error::Note { device: held.file().to_owned(), source })?;
    Ok(Ended { status, output: output.replace(ITSELF, &file), errors: String::new() })
}

/// Returns whether a program is working on the disk with this generation.
///
/// # Errors
/// The errors of open(2) and flock(2).
pub(super) fn at_work(root: &Root, generation: u64) -> io::Result<bool> {
    let said = match File::open(file(root, generation)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        said => said?,
    };
    match said.try_lock() {
        Ok(()) => Ok(false),
        Err(TryLockError::WouldBlock) => Ok(true),
        Err(TryLockError::Error(error)) => Err(error),
    }
}

fn file(root: &Root, generation: u64) -> PathBuf {
    root.path(&format!("{FOLDER}/{generation}"))
}

/// Output of a program, in a file whose lock it holds.
struct Said {
    file: File,
    path: PathBuf,
    /// Length of the header that precedes the output.
    before: u64,
}

impl Said {
    fn begin(root: &Root, generation: u64, name: &str) -> io::Result<Self> {
        std::fs::DirBuilder::new().recursive(true).mode(0o700).create(root.path(FOLDER))?;
        let path = file(root, generation);
        let mut file = File::options();
        // Opened for appending, so that processes that share it do not overwrite each other's output.
        let mut file = file.read(true).append(true).create(true).mode(0o600).open(&path)?;
        file.try_lock()?;
        file.set_len(0)?;
        let before = format!("{name}\n");
        file.write_all(before.as_bytes())?;
        Ok(Self { file, path, before: before.len() as u64 })
    }

    fn end(mut self) -> io::Result<String> {
        self.file.seek(io::SeekFrom::Start(self.before))?;
        let mut said = Vec::new();
        (&mut self.file).take(MOST).read_to_end(&mut said)?;
        remove(&self.path)?;
        Ok(String::from_utf8_lossy(&said).into_owned())
    }
}

fn remove(path: &Path) -> io::Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}
