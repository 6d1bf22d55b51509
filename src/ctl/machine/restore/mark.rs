//! Marks of receipts whose snapshots were tested: one file on this host for each, which a later test
//! replaces.

use std::io::{self, Read as _};
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};

use super::Trial;
use crate::ctl::json::rfc3339;
use crate::receipt::{Receipt, is_id};
use crate::sys::files;

/// Directory of the marks.
const DIRECTORY: &str = "/var/lib/guestlet-host/verified";
/// Longest mark in bytes.
const MOST_BYTES: u64 = 64 * 1024;
/// Age limit of marks, the same as that of receipts.
const KEPT: Duration = Duration::from_secs(90 * 24 * 60 * 60);
/// Limit of the files that are examined for their age.
const MOST_FILES: usize = 100_000;

/// Mark that a clone came up with the content that a receipt describes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mark {
    /// Identifier of the receipt.
    pub id: String,
    /// Time of the trial, RFC 3339.
    pub time: String,
    /// User ID of the user who ran the test on this host.
    pub uid: u32,
    /// Images that the clone was started from.
    pub from: Vec<PathBuf>,
    /// State of the receipt's signature: `signed` or `unsigned`.
    pub signature: String,
    /// Comparisons that succeeded.
    pub compared: Vec<String>,
}

impl Mark {
    /// Creates the mark of a trial that has just succeeded.
    pub fn now(receipt: &Receipt, signature: &str, trial: &Trial, compared: Vec<String>) -> Self {
        let from = trial.disks.iter().map(|disk| disk.file.clone()).collect();
        let uid = nix::unistd::Uid::current().as_raw();
        let (id, signature) = (receipt.id.clone(), signature.to_owned());
        Self { id, time: rfc3339(SystemTime::now().into()), uid, from, signature, compared }
    }

    /// Describes the mark in one line.
    pub fn words(&self) -> String {
        let from: Vec<_> = self.from.iter().map(|file| file.display().to_string()).collect();
        let (time, uid, signature) = (&self.time, self.uid, &self.signature);
        format!("verified at {time} by uid {uid}, from {}; the receipt was {signature}", from.join(", "))
    }

    fn path(id: &str) -> PathBuf {
        Path::new(DIRECTORY).join(format!("{id}.json"))
    }

    /// Writes the mark.
    ///
    /// # Errors
    /// Fails if it cannot be written.
    pub fn keep(&self) -> Result<(), String> {
        let path = Self::path(&self.id);
        let write = || -> io::Result<()> {
            if !is_id(&self.id) {
                return Err(io::ErrorKind::InvalidInput.into());
            }
            std::fs::DirBuilder::new().recursive(true).mode(0o700).create(DIRECTORY)?;
            files::replace_synced(&path, &serde_json::to_vec(self)?)
        };
        write().map_err(|error| format!("its mark cannot be kept in {}: {error}", path.display()))?;
        forget();
        Ok(())
    }

    /// Returns the mark of a receipt, if there is one that this user may read.
    pub fn of(id: &str) -> Option<Self> {
        let mut text = Vec::new();
        let file = is_id(id).then(|| std::fs::File::open(Self::path(id)))?.ok()?;
        file.take(MOST_BYTES).read_to_end(&mut text).ok()?;
        serde_json::from_slice(&text).ok().filter(|mark: &Self| mark.id == id)
    }
}

/// Removes marks that are so old that their receipts no longer exist, and files left by a killed program.
fn forget() {
    let files = std::fs::read_dir(DIRECTORY).into_iter().flatten().take(MOST_FILES).flatten();
    for file in files {
        let age =
            file.metadata().and_then(|about| about.modified()).ok().and_then(|time| time.elapsed().ok());
        if age.is_some_and(|age| age > KEPT) {
            // A failure is harmless: the next mark tries again.
            let _ = std::fs::remove_file(file.path());
        }
    }
}
