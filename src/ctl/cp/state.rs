//! What of a copy outlives its connections.

use std::collections::{BTreeSet, HashMap};

use super::Job;
use super::place::{Place, shown};
use super::progress::Progress;
use super::standard;
use crate::copies::Digest;
use crate::wire::proto::v1::{FileEntry, FileFailed};

/// It.
#[allow(clippy::struct_excessive_bools, reason = "what has happened so far, in any order")]
pub struct State {
    /// Names the copy to the end that writes: the same whenever the same is typed.
    pub id: String,
    /// Both ends were open once.
    pub was_begun: bool,
    /// A connection was lost.
    pub was_lost: bool,
    /// Something was written that the same command would go on with.
    pub can_go_on: bool,
    /// The destination is what is copied, and not a directory into which it is copied.
    pub is_entry: bool,
    /// Counts what was done.
    pub steps: u64,
    /// What was copied, and is there as far as is known: what the writing end said of it.
    pub done: HashMap<Vec<u8>, FileEntry>,
    /// Directories that were made.
    pub made: BTreeSet<Vec<u8>>,
    /// The file that is being given its name, with the SHA-256 of its content.
    pub finishing: Option<(Vec<u8>, Vec<u8>)>,
    failed: BTreeSet<Vec<u8>>,
    /// How far it has come.
    pub progress: Progress,
    /// Files that were copied.
    pub files: u64,
    /// Bytes that were copied.
    pub bytes: u64,
    /// How far standard input was read.
    pub standard_input: standard::Progress,
    /// How far standard output was written.
    pub standard_output: standard::Progress,
}

impl State {
    /// Nothing was done.
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

    /// Something was copied.
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

    /// Something cannot be copied; a person is told.
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

    /// Whether that was so.
    pub fn has_failed(&self, target: &[u8]) -> bool {
        self.failed.contains(target)
    }

    /// How much has failed.
    pub fn failures(&self) -> u64 {
        self.failed.len() as u64
    }

    /// Tells a person something.
    #[allow(clippy::print_stderr, reason = "errors of a command line tool")]
    pub fn say(&mut self, words: &str) {
        self.progress.clear();
        eprintln!("guestctl: {words}");
    }
}

/// The identifier of a copy from here to there.
fn id(source: &Place, destination: &Place) -> String {
    use std::fmt::Write as _;

    let mut digest = Digest::default();
    for place in [source, destination] {
        // A path here is another one in another directory.
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
