//! Suspends this machine, through logind or, where it is missing, /sys/power/state.
//!
//! ```text
//! logind there? ──yes──▶ can it? ──yes──▶ called, with inhibitors overridden
//!       │                   └──no──▶ unsupported
//!       no
//!       ▼
//! /sys/power/state has it? ──yes──▶ written; returns when the machine resumes
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

/// Storage for the state of the machine while it is suspended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Disk; the machine is switched off.
    Disk,
    /// Memory only.
    Ram,
    /// Memory, and a disk in case the contents of memory are lost.
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
    /// Returns the name of logind's method for this mode.
    fn method(self) -> &'static str {
        match self {
            Self::Disk => "Hibernate",
            Self::Ram => "Suspend",
            Self::Hybrid => "HybridSleep",
        }
    }
}

/// Reason why the machine was not suspended.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The machine does not support this mode.
    #[error("this guest cannot be suspended to {mode}: {why}")]
    Unsupported {
        /// Requested mode.
        mode: Mode,
        /// Answer of logind, or the word that the kernel's file lacks.
        why: String,
    },
    /// The machine supports this mode, but suspending failed.
    #[error("this guest was not suspended to {mode}: {why}")]
    Failed {
        /// Requested mode.
        mode: Mode,
        /// Error of logind or of the kernel.
        why: String,
    },
}

/// Suspends the machine. Through logind, returns when logind has accepted the request; through the kernel, when
/// the machine has resumed.
///
/// # Errors
/// If the machine does not support this mode, or suspending fails.
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
    // Includes the answer "challenge", because root is never asked for a password.
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

/// Returns whether a word is in one of the kernel's lists, whether or not it is the selected one (in brackets).
fn has(root: &Root, file: &str, word: &str) -> bool {
    root.line(file).split_ascii_whitespace().any(|known| known.trim_matches(['[', ']']) == word)
}

/// Returns the selected word, which is in brackets.
fn chosen(line: &str) -> Option<String> {
    let word = line.split_ascii_whitespace().find(|word| word.starts_with('['))?;
    Some(word.trim_matches(['[', ']']).to_owned())
}
