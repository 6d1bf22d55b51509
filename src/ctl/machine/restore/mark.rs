//! The mark of a receipt whose snapshot was tried: a file of this host for each, which a later trial replaces.

use std::io::{self, Read as _};
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};

use super::Trial;
use crate::ctl::json::rfc3339;
use crate::receipt::{Receipt, is_id};
use crate::sys::files;

/// Where marks are.
const DIRECTORY: &str = "/var/lib/guestlet-host/verified";
/// Bytes of the longest one.
const MOST_BYTES: u64 = 64 * 1024;
/// As long as receipts are kept.
const KEPT: Duration = Duration::from_secs(90 * 24 * 60 * 60);
/// Files that are looked at for one that is too old.
const MOST_FILES: usize = 100_000;

/// That a clone came up with what a receipt says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mark {
    /// The receipt.
    pub id: String,
    /// When, RFC 3339.
    pub time: String,
    /// The user of this host that had it done, by number.
    pub uid: u32,
    /// The images that the clone was started from.
    pub from: Vec<PathBuf>,
    /// What the signature of the receipt was worth: `signed` or `unsigned`.
    pub signature: String,
    /// What was compared.
    pub compared: Vec<String>,
}

impl Mark {
    /// Of a trial that has just succeeded.
    pub fn now(receipt: &Receipt, signature: &str, trial: &Trial, compared: Vec<String>) -> Self {
        let from = trial.disks.iter().map(|disk| disk.file.clone()).collect();
        let uid = nix::unistd::Uid::current().as_raw();
        let (id, signature) = (receipt.id.clone(), signature.to_owned());
        Self { id, time: rfc3339(SystemTime::now().into()), uid, from, signature, compared }
    }

    /// In one line.
    pub fn words(&self) -> String {
        let from: Vec<_> = self.from.iter().map(|file| file.display().to_string()).collect();
        let (time, uid, signature) = (&self.time, self.uid, &self.signature);
        format!("verified at {time} by uid {uid}, from {}; the receipt was {signature}", from.join(", "))
    }

    fn path(id: &str) -> PathBuf {
        Path::new(DIRECTORY).join(format!("{id}.json"))
    }

    /// Writes it.
    ///
    /// # Errors
    /// If it cannot be kept.
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

    /// That of a receipt, if there is one that this user may read.
    pub fn of(id: &str) -> Option<Self> {
        let mut text = Vec::new();
        let file = is_id(id).then(|| std::fs::File::open(Self::path(id)))?.ok()?;
        file.take(MOST_BYTES).read_to_end(&mut text).ok()?;
        serde_json::from_slice(&text).ok().filter(|mark: &Self| mark.id == id)
    }
}

/// Removes those whose receipts are gone by now, and what a killed program has left.
fn forget() {
    let files = std::fs::read_dir(DIRECTORY).into_iter().flatten().take(MOST_FILES).flatten();
    for file in files {
        let age =
            file.metadata().and_then(|about| about.modified()).ok().and_then(|time| time.elapsed().ok());
        if age.is_some_and(|age| age > KEPT) {
            // It is looked at again with the next mark.
            let _ = std::fs::remove_file(file.path());
        }
    }
}
