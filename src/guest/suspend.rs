//! Suspends this machine, through logind or, where there is none, the kernel's own switch.
//!
//! ```text
//! logind there? ──yes──▶ can it? ──yes──▶ asked to, with inhibitors overridden
//!       │                   └──no──▶ unsupported
//!       no
//!       ▼
//! /sys/power/state knows it? ──yes──▶ written, and back when the machine goes on
//!                    └──no──▶ unsupported
//! ```

use std::fmt;
use std::io;

use crate::guest::Guest;
use crate::guest::logind::{self, Logind};
use crate::sys::root::Root;
use crate::sys::{blocking, sysfs};

const STATE: &str = "/sys/power/state";
const DISK: &str = "/sys/power/disk";

/// Where the state of the machine is kept meanwhile.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// On a disk; the machine is off.
    Disk,
    /// In memory.
    Ram,
    /// In memory, and on a disk in case that memory is lost.
    Hybrid,
}

impl fmt::Display for Mode {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Disk => "disk",
            Self::Ram => "ram",
            Self::Hybrid => "hybrid",
        })
    }
}

impl Mode {
    /// logind's method.
    fn method(self) -> &'static str {
        match self {
            Self::Disk => "Hibernate",
            Self::Ram => "Suspend",
            Self::Hybrid => "HybridSleep",
        }
    }
}

/// Why the machine goes on.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// It cannot be suspended so.
    #[error("this guest cannot be suspended to {mode}: {why}")]
    Unsupported {
        /// How.
        mode: Mode,
        /// Who says so.
        why: String,
    },
    /// It can, but was not.
    #[error("this guest was not suspended to {mode}: {why}")]
    Failed {
        /// How.
        mode: Mode,
        /// What went wrong.
        why: String,
    },
}

/// Suspends. Returns when logind has accepted it; through the kernel, when the machine goes on.
///
/// # Errors
/// If the machine cannot be suspended so, or is not.
pub async fn suspend(guest: &Guest, mode: Mode) -> Result<(), Error> {
    match Logind::find(&guest.root).await {
        Ok(logind) => through_logind(&logind, mode).await,
        Err(absent) => {
            tracing::debug!("there is no logind to suspend with: {absent}");
            let root = guest.root.clone();
            blocking::run(move || through_kernel(&root, mode)).await
        }
    }
}

async fn through_logind(logind: &Logind, mode: Mode) -> Result<(), Error> {
    let method = mode.method();
    let failed = |error: logind::Error| Error::Failed { mode, why: format!("logind: {error}") };
    let can: String = logind.call(&format!("Can{method}"), &()).await.map_err(failed)?;
    if can == "yes" {
        return logind.overriding_inhibitors(method).await.map_err(failed);
    }
    // Also "challenge", which root is not asked.
    Err(Error::Unsupported { mode, why: format!("logind says {can:?}") })
}

fn through_kernel(root: &Root, mode: Mode) -> Result<(), Error> {
    let state = if mode == Mode::Ram { "mem" } else { "disk" };
    let unsupported =
        |file: &str, word: &str| Error::Unsupported { mode, why: format!("{file} does not have {word}") };
    if !has(root, STATE, state) {
        return Err(unsupported(STATE, state));
    }
    let failed = |source: io::Error| Error::Failed { mode, why: format!("{STATE}: {source}") };
    if mode != Mode::Hybrid {
        return sysfs::write(root, STATE, state).map_err(failed);
    }
    if !has(root, DISK, "suspend") {
        return Err(unsupported(DISK, "suspend"));
    }
    let before = chosen(&root.line(DISK));
    sysfs::write(root, DISK, "suspend").map_err(failed)?;
    let suspended = sysfs::write(root, STATE, state).map_err(failed);
    if let Some(before) = before
        && let Err(error) = sysfs::write(root, DISK, &before)
    {
        tracing::warn!("cannot write {before} back to {DISK}: {error}");
    }
    suspended
}

/// Whether a word is in a list of the kernel's, chosen or not.
fn has(root: &Root, file: &str, word: &str) -> bool {
    root.line(file).split_ascii_whitespace().any(|known| known.trim_matches(['[', ']']) == word)
}

/// The word in brackets.
fn chosen(line: &str) -> Option<String> {
    let word = line.split_ascii_whitespace().find(|word| word.starts_with('['))?;
    Some(word.trim_matches(['[', ']']).to_owned())
}
