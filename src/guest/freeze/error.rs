//! Errors of freezes and thaws, with hints on how to solve them.

use std::io;
use std::path::PathBuf;
use std::process::ExitStatus;
use std::time::Duration;

use nix::errno::Errno;

use crate::sys::root::Root;

/// Limit on the characters of a hook's output that an error quotes.
const TOLD: usize = 240;

/// Reasons why a freeze or a thaw failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Another freeze has not ended yet.
    #[error("{0}")]
    Busy(String),
    /// The agent is stopping.
    #[error("the agent is stopping; nothing can be frozen any more")]
    Stopping,
    /// A mount point that the caller named is not mounted.
    #[error("\"mountpoints\": {0:?} is not a mount point")]
    NotMounted(String),
    /// A hook failed.
    #[error("the hook {} {failure}", hook.display())]
    Hook {
        /// Path of the hook.
        hook: PathBuf,
        /// Failure of the hook.
        failure: Failure,
    },
    /// The settings require applications, and none or not all of them are held, for this reason.
    #[error("an application-consistent freeze is required (freeze.require): {0}")]
    Application(String),
    /// The kernel refused to open or freeze a file system.
    #[error("cannot {verb} {path}: {}{hint}", errno(error))]
    FileSystem {
        /// Operation that was refused: `open` or `freeze`.
        verb: &'static str,
        /// Mount point of the file system.
        path: String,
        /// Error returned by the kernel.
        error: io::Error,
        /// Hint on the remedy, if one is known, including the separator before it.
        hint: String,
    },
    /// The list of mounts cannot be read.
    #[error("cannot read what is mounted")]
    Mounts(#[source] io::Error),
    /// The marker, which records what is frozen, cannot be written, so nothing is frozen.
    #[error("nothing is frozen, because {} cannot be written", path.display())]
    Marker {
        /// Path of the marker.
        path: PathBuf,
        /// Error returned by the kernel.
        source: io::Error,
    },
    /// A thread cannot be started.
    #[error("cannot start a thread")]
    Thread(#[source] io::Error),
    /// A thaw was requested before everything was frozen.
    #[error("a thaw was requested before everything was frozen; nothing is frozen")]
    Cancelled,
    /// The freeze did not complete within its deadline.
    #[error("freezing took longer than {} s ({waiting}); everything is thawed again", after.as_secs())]
    TooLong {
        /// Deadline of the freeze.
        after: Duration,
        /// Step or mount point that it was waiting for.
        waiting: String,
    },
    /// The freeze had already ended when its thaw was requested.
    #[error("{0}: the snapshot is not consistent")]
    Spoiled(String),
    /// The file systems are thawed, but a later step failed.
    #[error("the file systems are thawed, but {0}")]
    AfterThaw(String),
    /// Some file systems cannot be thawed so far.
    #[error("still thawing: {0}; the disk does not answer")]
    Stuck(String),
}

/// Ways in which a hook fails.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// The hook cannot be run.
    #[error("cannot be used: {0}")]
    Unusable(io::Error),
    /// The hook cannot be run, with a hint on the remedy.
    #[error("cannot be used: {0}{1}")]
    Denied(io::Error, String),
    /// The hook ended with a failure status.
    #[error("failed ({0}){1}")]
    Failed(ExitStatus, String),
    /// The hook was killed at its deadline.
    #[error("did not end within {} s and was killed{}", .0.as_secs(), .1)]
    TimedOut(Duration, String),
    /// The hook was killed at the common deadline of all hooks.
    #[error("did not end before all hooks had taken {} s together (qga.freeze.hooks-deadline), and was killed{}", .0.as_secs(), .1)]
    TimedOutTogether(Duration, String),
    /// The common deadline of all hooks had passed before the hook was started.
    #[error("was not run, because the hooks before it used up the {} s for all hooks \
             (qga.freeze.hooks-deadline)", .0.as_secs())]
    NoTime(Duration),
}

fn errno(error: &io::Error) -> String {
    match error.raw_os_error() {
        // Gives the name and the message, such as `EIO: I/O error`.
        Some(number) => Errno::from_raw(number).to_string(),
        None => error.to_string(),
    }
}

/// Returns the end of a hook's output, to be appended to the description of its failure.
pub fn last_words(tail: &str) -> String {
    let skipped = tail.char_indices().rev().nth(TOLD - 1).map_or(0, |(at, _)| at);
    match tail[skipped..].trim() {
        "" => String::new(),
        tail => format!(": {}{}", if skipped > 0 { "…" } else { "" }, tail.replace('\n', " | ")),
    }
}

/// Returns a hint on a denied operation where `SELinux` enforces its policy. `setting` is the boolean that allows
/// the operation.
pub fn denial_hint(root: &Root, error: &io::Error, setting: &str) -> String {
    let denied = error.kind() == io::ErrorKind::PermissionDenied;
    if !denied || root.line("/sys/fs/selinux/enforce") != "1" {
        return String::new();
    }
    let context = root.line("/proc/self/attr/current");
    let context = context.trim_end_matches('\0');
    let domain = context.split(':').nth(2).unwrap_or("unknown");
    // The booleans apply to this domain only.
    let boolean =
        if domain == "virt_qemu_ga_t" { format!("setsebool -P {setting} on; or: ") } else { String::new() };
    format!(
        "; SELinux confines the agent ({domain}): {boolean}ausearch -m avc -ts recent | audit2allow -M guestlet-freeze \
         && semodule -i guestlet-freeze.pp"
    )
}

#[cfg(test)]
#[allow(clippy::disallowed_methods)]
mod tests {
    use super::*;

    fn selinux(enforce: &str, context: &str) -> (tempfile::TempDir, Root) {
        let folder = tempfile::tempdir().unwrap();
        let root = Root::at(folder.path());
        for (path, text) in [("/sys/fs/selinux/enforce", enforce), ("/proc/self/attr/current", context)] {
            let path = root.path(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        (folder, root)
    }

    #[test]
    fn a_denial_names_what_helps() {
        let denied = || io::Error::from(Errno::EACCES);
        let boolean = "virt_qemu_ga_read_nonsecurity_files";
        let (_folder, root) = selinux("1", "system_u:system_r:virt_qemu_ga_t:s0\0");
        let error = Error::FileSystem {
            verb: "open",
            path: "/data".to_owned(),
            hint: denial_hint(&root, &denied(), boolean),
            error: denied(),
        };
        let words = error.to_string();
        assert!(words.starts_with("cannot open /data: EACCES: Permission denied; SELinux"), "{words}");
        assert!(words.contains("setsebool -P virt_qemu_ga_read_nonsecurity_files on"), "{words}");
        let (_folder, root) = selinux("1", "system_u:system_r:guestlet_t:s0");
        let words = denial_hint(&root, &denied(), boolean);
        assert!(words.contains("(guestlet_t): ausearch"), "{words}");
        assert_eq!(denial_hint(&root, &Errno::EIO.into(), boolean), "");
        let (_folder, root) = selinux("0", "x");
        assert_eq!(denial_hint(&root, &denied(), boolean), "");
    }

    #[test]
    fn last_words_are_short_and_one_line() {
        assert_eq!(last_words(" \n"), "");
        assert_eq!(last_words("cannot lock\ntables"), ": cannot lock | tables");
        let long = last_words(&"ä".repeat(1000));
        assert_eq!(long.chars().count(), 3 + TOLD);
    }
}
