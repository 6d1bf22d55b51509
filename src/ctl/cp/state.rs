//! State of a copy that outlives its connections.

use std::collections::{BTreeSet, HashMap};

use super::Job;
use super::place::{Place, shown};
use super::progress::Progress;
use super::standard;
use crate::copies::Digest;
use crate::wire::proto::v1::{FileEntry, FileFailed};

/// State of a copy.
#[allow(clippy::struct_excessive_bools, reason = "what has happened so far, in any order")]
pub struct State {
    /// Identifier of the copy for the writing end: the same whenever the same command is typed.
    pub id: String,
    /// True if both ends were open before.
    pub was_begun: bool,
    /// True if a connection was lost.
    pub was_lost: bool,
    /// True if something was written that a repetition of the command would continue.
    pub can_go_on: bool,
    /// True if the destination is the copy itself, and not a directory that receives it.
    pub is_entry: bool,
    /// Counter of completed steps, which shows progress.
    pub steps: u64,
    /// Files that were copied and presumably still exist, as the writing end has reported them.
    pub done: HashMap<Vec<u8>, FileEntry>,
    /// Directories that were created.
    pub made: BTreeSet<Vec<u8>>,
    /// Path and SHA-256 of the file that is just being renamed to its final name.
    pub finishing: Option<(Vec<u8>, Vec<u8>)>,
    failed: BTreeSet<Vec<u8>>,
    /// Display of the progress.
    pub progress: Progress,
    /// Number of files that were copied.
    pub files: u64,
    /// Number of bytes that were copied.
    pub bytes: u64,
    /// Position in standard input.
    pub standard_input: standard::Progress,
    /// Position in standard output.
    pub standard_output: standard::Progress,
}

impl State {
    /// Returns the state before anything was copied.
    pub fn new(job: &Job, source: &Place) -> Self {
        let wants = !job.options.no_progress && !job.options.quiet && job.destination != Place::Standard;
        Self {
            id: id(source, &job.destination),
            was_begun: false,
            was_lost: false,
            can_go_on: false,
            is_entry: false,
            steps: 0,
            done: HashMap::new(),
            made: BTreeSet::new(),
            finishing: None,
            failed: BTreeSet::new(),
            progress: Progress::new(wants),
            files: 0,
            bytes: 0,
            standard_input: standard::Progress::default(),
            standard_output: standard::Progress::default(),
        }
    }

    /// Records that a file was copied.
    pub fn is_done(&mut self, target: &[u8], entry: Option<FileEntry>, bytes: u64) {
        self.steps += 1;
        self.finishing = None;
        self.can_go_on = true;
        if let Some(entry) = entry
            && self.done.insert(target.to_vec(), entry).is_none()
        {
            self.files += 1;
            self.bytes += bytes;
        }
    }

    /// Records that a file cannot be copied, and shows a message.
    pub fn fails(&mut self, target: &[u8], source: &[u8], failed: &FileFailed) {
        self.steps += 1;
        if self.failed.insert(target.to_vec()) {
            let words = shown(failed.message.as_bytes());
            if source.is_empty() {
                self.say(&words);
            } else {
                self.say(&format!("cannot copy {}: {words}", shown(source)));
            }
        }
    }

    /// Returns whether a file was recorded as failed.
    pub fn has_failed(&self, target: &[u8]) -> bool {
        self.failed.contains(target)
    }

    /// Returns the number of failures.
    pub fn failures(&self) -> u64 {
        self.failed.len() as u64
    }

    /// Shows a message to the user.
    #[allow(clippy::print_stderr, reason = "errors of a command line tool")]
    pub fn say(&mut self, words: &str) {
        self.progress.clear();
        eprintln!("guestctl: {words}");
    }
}

/// Returns the identifier of a copy from a source to a destination.
fn id(source: &Place, destination: &Place) -> String {
    use std::fmt::Write as _;

    let mut digest = Digest::default();
    for place in [source, destination] {
        // A relative path means something else in another working directory.
        let mut from = Vec::new();
        if let Place::Here(path) = place
            && !path.starts_with(b"/")
        {
            let current = std::env::current_dir().unwrap_or_default();
            from = current.into_os_string().into_encoded_bytes();
        }
        for part in [place.vm().unwrap_or_default().as_bytes(), &from, place.path()] {
            digest.update(&(part.len() as u64).to_be_bytes());
            digest.update(part);
        }
    }
    let mut id = String::new();
    for byte in digest.value().iter().take(8) {
        // Writing to a String cannot fail.
        let _ = write!(id, "{byte:02x}");
    }
    id
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_copy_has_the_same_identifier() {
        let guest = |vm: &str, path: &[u8]| Place::Guest { vm: vm.into(), path: path.to_vec() };
        let here = Place::Here(b"/a".to_vec());
        let one = id(&here, &guest("web", b"/b"));
        assert!(crate::copies::aside::is_id(one.as_bytes()), "{one}");
        assert_eq!(one, id(&here, &guest("web", b"/b")));
        assert_ne!(one, id(&here, &guest("we", b"b/b")));
        assert_ne!(one, id(&guest("web", b"/b"), &here));
    }
}
