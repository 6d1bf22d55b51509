//! Records of guests' keys: one file for each VM, in a directory of their own, and a copy in memory.
//!
//! A file that cannot be read makes its VM refused, but affects no other VM. The pinned key is then unknown, so no
//! key can be accepted as the right one. To record something else: an optional field of [`Pin`].

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use tokio::sync::Mutex as AsyncMutex;

use super::PREVIOUS;
use crate::sys::{blocking, files};
use crate::trust::enrollment::Token;
use crate::trust::key::PublicKey;

/// Extensions of the files.
const PIN: &str = "json";
const TOKEN: &str = "token";
/// Limit on the size of a file, in bytes.
const MAX_FILE: u64 = 16 * 1024;

/// Basis on which a key was pinned.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum How {
    /// The guest has proved that it has the token that was made for it.
    Token,
    /// The key was the first that the guest presented. Its owner is not proved.
    FirstUse,
    /// An administrator has accepted the key.
    Operator,
}

impl How {
    /// Returns the word for it in files and in output.
    pub fn word(self) -> &'static str {
        match self {
            Self::Token => "token",
            Self::FirstUse => "first-use",
            Self::Operator => "operator",
        }
    }
}

/// Pinned key of a guest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Pin {
    /// Name of the VM when the key was pinned, for display.
    pub name: String,
    /// Public key that is pinned.
    pub key: PublicKey,
    /// Basis on which it was pinned.
    pub how: How,
    /// Time at which it was pinned, in seconds since 1970.
    pub since: u64,
    /// Next key, which the guest has announced.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next: Option<PublicKey>,
    /// Previous key of the guest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub previous: Option<Previous>,
    /// Fingerprint of the next key of this host half, once the guest knows it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub told: Option<String>,
}

/// Key that was replaced.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Previous {
    /// Public key that was replaced.
    pub key: PublicKey,
    /// End of the time for which it is still accepted, in seconds since 1970.
    pub until: u64,
}

impl Previous {
    /// Returns whether the key is still accepted.
    pub fn is_valid(&self, now: SystemTime) -> bool {
        seconds(now) < self.until
    }
}

impl Pin {
    /// Creates the pin of a guest's key, as of now.
    pub fn new(name: &str, key: PublicKey, how: How) -> Self {
        let since = seconds(SystemTime::now());
        Self { name: name.to_owned(), key, how, since, next: None, previous: None, told: None }
    }

    /// Returns the pin after the guest has begun to use its next key.
    #[must_use]
    pub fn rotated(self, now: SystemTime) -> Self {
        match self.next {
            None => self,
            Some(next) => Self {
                previous: Some(Previous { key: self.key, until: seconds(now + PREVIOUS) }),
                key: next,
                since: seconds(now),
                next: None,
                ..self
            },
        }
    }
}

fn seconds(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO).as_secs()
}

/// Everything that is known of one guest.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Record {
    /// Pinned key, if there is one.
    pub pin: Option<Pin>,
    /// Token that the guest has to prove at its first contact.
    pub token: Option<Token>,
    /// Key with which the guest was last refused; not stored in files.
    pub offered: Option<PublicKey>,
    /// Problem that makes the stored record unusable.
    pub unreadable: Option<String>,
}

/// Reason why pins cannot be used or changed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file is damaged.
    #[error(
        "the record of this guest's key cannot be used: {0}; repair or remove the file (guestctl trust forget)"
    )]
    Unreadable(String),
    /// The key is pinned for another VM.
    #[error("this key is that of VM {0}; if that VM is gone for good: guestctl trust forget {0}")]
    Owned(String),
    /// No key is pinned.
    #[error("no key of this guest is pinned; it is pinned at its next session")]
    NoPin,
    /// No key was refused, so there is none to accept.
    #[error("no key of this guest has been refused since guestlet-host started")]
    NothingOffered,
    /// The kernel provides no random bytes.
    #[error("the kernel provides no random bytes")]
    Random,
    /// A file cannot be written.
    #[error("cannot write {path}")]
    Io {
        /// Path of the file.
        path: PathBuf,
        /// Error of the operating system.
        source: io::Error,
    },
}

/// Pins of all VMs, in memory and in files.
#[derive(Debug)]
pub struct Pins {
    folder: PathBuf,
    records: Mutex<BTreeMap<String, Record>>,
    /// Held while a file is written, so that files and memory stay consistent.
    writing: AsyncMutex<()>,
}

impl Pins {
    /// Reads the records in `folder`, which is created if it does not exist. Blocks.
    ///
    /// # Errors
    /// If the directory cannot be created or listed.
    pub fn open(folder: PathBuf) -> Result<Self, Error> {
        let io = |source| Error::Io { path: folder.clone(), source };
        std::fs::create_dir_all(&folder).map_err(io)?;
        let mut records: BTreeMap<String, Record> = BTreeMap::new();
        for entry in std::fs::read_dir(&folder).map_err(io)? {
            let path = entry.map_err(io)?.path();
            let Some(vm) = path.file_stem().and_then(|stem| stem.to_str()).map(str::to_owned) else {
                continue;
            };
            match path.extension().and_then(|end| end.to_str()) {
                Some(PIN) => match read_pin(&path) {
                    Ok(pin) => records.entry(vm).or_default().pin = Some(pin),
                    Err(problem) => {
                        tracing::error!("{problem}");
                        records.entry(vm).or_default().unreadable = Some(problem);
                    }
                },
                Some(TOKEN) => {
                    let token = text(&path).and_then(|text| {
                        text.parse().map_err(|error| format!("{}: {error}", path.display()))
                    });
                    match token {
                        Ok(token) => records.entry(vm).or_default().token = Some(token),
                        Err(problem) => {
                            tracing::error!("{problem}");
                            records.entry(vm).or_default().unreadable = Some(problem);
                        }
                    }
                }
                _ => {}
            }
        }
        Ok(Self { folder, records: Mutex::new(records), writing: AsyncMutex::new(()) })
    }

    /// Returns the record of the guest of one VM; empty if nothing is known.
    pub fn record(&self, vm: &str) -> Record {
        self.records().get(vm).cloned().unwrap_or_default()
    }

    /// Returns the records of all guests, with the lasting identifiers of their VMs.
    pub fn all(&self) -> Vec<(String, Record)> {
        self.records().iter().map(|(vm, record)| (vm.clone(), record.clone())).collect()
    }

    /// Returns the lasting identifier and the name of the VM that a key is pinned for. A previous key counts while it
    /// is valid, because the VM's disk may be restored to a state with that key.
    pub fn owner(&self, key: &PublicKey) -> Option<(String, String)> {
        let (records, now) = (self.records(), SystemTime::now());
        records.iter().find_map(|(vm, record)| {
            let pin = record.pin.as_ref()?;
            let was =
                pin.previous.as_ref().is_some_and(|previous| previous.key == *key && previous.is_valid(now));
            // An announced key does not count: it belongs to the guest only once the guest has presented it.
            (pin.key == *key || was).then(|| (vm.clone(), pin.name.clone()))
        })
    }

    /// Remembers the key with which a guest was refused, until the end of the program.
    pub fn offered(&self, vm: &str, key: PublicKey) {
        self.records().entry(vm.to_owned()).or_default().offered = Some(key);
    }

    /// Changes the pin of a VM.
    ///
    /// # Errors
    /// If it cannot be written; it is then unchanged. Also if the key is pinned for another VM.
    pub async fn change(
        &self,
        vm: &str,
        change: impl FnOnce(Option<Pin>) -> Option<Pin>,
    ) -> Result<(), Error> {
        let _writing = self.writing.lock().await;
        let before = self.record(vm).pin;
        let Some(pin) = change(before.clone()) else { return Ok(()) };
        // A key identifies one guest only: the first VM that it was pinned for keeps it.
        if let Some((_, name)) = self.owner(&pin.key).filter(|(owner, _)| owner != vm) {
            return Err(Error::Owned(name));
        }
        if before.as_ref() != Some(&pin) {
            let bytes = serde_json::to_vec_pretty(&pin).unwrap_or_default();
            self.write(vm, PIN, bytes).await?;
        }
        let mut records = self.records();
        let record = records.entry(vm.to_owned()).or_default();
        *record = Record { pin: Some(pin), token: record.token.take(), ..Record::default() };
        Ok(())
    }

    /// Returns the token of a VM, and generates it if there is none.
    ///
    /// # Errors
    /// If the token cannot be generated or written.
    pub async fn token(&self, vm: &str) -> Result<Token, Error> {
        let _writing = self.writing.lock().await;
        if let Some(token) = self.record(vm).token {
            return Ok(token);
        }
        let token = Token::generate().ok_or(Error::Random)?;
        self.write(vm, TOKEN, token.reveal().into_bytes()).await?;
        self.records().entry(vm.to_owned()).or_default().token = Some(token.clone());
        Ok(token)
    }

    /// Forgets the token of a VM, because it was used.
    ///
    /// # Errors
    /// If its file cannot be removed.
    pub async fn forget_token(&self, vm: &str) -> Result<(), Error> {
        let _writing = self.writing.lock().await;
        self.remove(vm, TOKEN).await?;
        if let Some(record) = self.records().get_mut(vm) {
            record.token = None;
        }
        Ok(())
    }

    /// Forgets everything of a VM. Returns whether there was anything.
    ///
    /// # Errors
    /// If a file cannot be removed.
    pub async fn forget(&self, vm: &str) -> Result<bool, Error> {
        let _writing = self.writing.lock().await;
        self.remove(vm, PIN).await?;
        self.remove(vm, TOKEN).await?;
        Ok(self.records().remove(vm).is_some_and(|record| record != Record::default()))
    }

    async fn write(&self, vm: &str, end: &str, bytes: Vec<u8>) -> Result<(), Error> {
        let path = self.path(vm, end)?;
        let written = {
            let path = path.clone();
            blocking::run(move || files::replace_synced(&path, &bytes)).await
        };
        written.map_err(|source| Error::Io { path, source })
    }

    async fn remove(&self, vm: &str, end: &str) -> Result<(), Error> {
        let path = self.path(vm, end)?;
        let removed = {
            let path = path.clone();
            blocking::run(move || files::remove_synced(&path)).await
        };
        removed.map_err(|source| Error::Io { path, source })
    }

    /// Returns the path of a VM's file. Only letters, digits and hyphens are allowed in the lasting identifier, a
    /// UUID, so that it cannot leave the directory.
    fn path(&self, vm: &str, end: &str) -> Result<PathBuf, Error> {
        let path = self.folder.join(format!("{vm}.{end}"));
        let is_name = !vm.is_empty() && vm.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-');
        let wrong = || Error::Io {
            path: path.clone(),
            source: io::Error::other("the VM's identifier is not the name of a file"),
        };
        is_name.then(|| path.clone()).ok_or_else(wrong)
    }

    fn records(&self) -> MutexGuard<'_, BTreeMap<String, Record>> {
        // A panic under the lock cannot leave the records half changed.
        self.records.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn text(path: &Path) -> Result<String, String> {
    let bytes =
        files::read_at_most(path, MAX_FILE).map_err(|error| format!("{}: {error}", path.display()))?;
    let bytes = bytes.ok_or_else(|| format!("{}: it no longer exists", path.display()))?;
    String::from_utf8(bytes).map_err(|_| format!("{}: it is not UTF-8", path.display()))
}

fn read_pin(path: &Path) -> Result<Pin, String> {
    serde_json::from_str(&text(path)?).map_err(|error| format!("{}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trust::key::Key;

    const VM: &str = "6f1c0a52-5c0f-4a8e-9d1b-0d7a2f3b4c5d";

    #[tokio::test]
    async fn what_is_pinned_is_known_to_the_next_run() {
        let folder = tempfile::tempdir().unwrap();
        let pins = Pins::open(folder.path().to_owned()).unwrap();
        let (key, other) = (Key::generate().unwrap().public(), Key::generate().unwrap().public());
        let token = pins.token(VM).await.unwrap();
        assert_eq!(pins.token(VM).await.unwrap(), token);
        pins.change(VM, |_| Some(Pin::new("web", key, How::Token))).await.unwrap();
        assert_eq!(pins.record(VM).token, Some(token.clone()));
        pins.change(VM, |pin| pin.map(|pin| Pin { next: Some(other), ..pin })).await.unwrap();
        pins.offered(VM, other);
        let again = Pins::open(folder.path().to_owned()).unwrap();
        assert_eq!(Record { offered: Some(other), ..again.record(VM) }, pins.record(VM));
        assert_eq!(again.owner(&key), Some((VM.to_owned(), "web".to_owned())));
        assert_eq!(again.owner(&other), None, "it was only announced");
        assert!(pins.forget(VM).await.unwrap() && !pins.forget(VM).await.unwrap());
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    /// Otherwise the guest would be refused as a copy of the other VM when its disk is restored.
    #[tokio::test]
    async fn the_key_that_a_guest_had_before_is_pinned_for_no_other_one_as_long_as_it_is_taken() {
        let folder = tempfile::tempdir().unwrap();
        let pins = Pins::open(folder.path().to_owned()).unwrap();
        let (before, after) = (Key::generate().unwrap().public(), Key::generate().unwrap().public());
        let rotated = |now| Pin { next: Some(after), ..Pin::new("web", before, How::FirstUse) }.rotated(now);
        pins.change(VM, |_| Some(rotated(SystemTime::now()))).await.unwrap();
        assert_eq!(pins.owner(&before), Some((VM.to_owned(), "web".to_owned())));
        let copy = |_| Some(Pin::new("copy", before, How::Operator));
        let refused = pins.change("other", copy).await.unwrap_err();
        assert!(matches!(&refused, Error::Owned(name) if name == "web"), "{refused}");
        // Itself, and after that time others, may have it.
        assert!(pins.change(VM, |pin| pin.map(|pin| Pin { told: None, ..pin })).await.is_ok());
        pins.change(VM, |_| Some(rotated(SystemTime::now() - PREVIOUS - Duration::from_secs(1))))
            .await
            .unwrap();
        assert!(pins.change("other", copy).await.is_ok());
    }

    #[tokio::test]
    #[allow(clippy::disallowed_methods)]
    async fn a_damaged_file_concerns_its_vm_alone_and_is_not_taken_for_none() {
        let folder = tempfile::tempdir().unwrap();
        for text in ["", "{}", "{\"name\":\"a\",\"key\":\"ed25519:AA\",\"how\":\"token\",\"since\":1}", "\0"]
        {
            std::fs::write(folder.path().join(format!("{VM}.json")), text).unwrap();
            let pins = Pins::open(folder.path().to_owned()).unwrap();
            assert!(pins.record(VM).unreadable.is_some(), "{text}");
            assert_eq!(pins.record("other"), Record::default());
        }
        let pins = Pins::open(folder.path().to_owned()).unwrap();
        assert!(pins.forget(VM).await.unwrap());
        assert_eq!(pins.record(VM), Record::default());
    }

    #[tokio::test]
    async fn an_identifier_that_leaves_the_directory_is_no_name() {
        let folder = tempfile::tempdir().unwrap();
        let pins = Pins::open(folder.path().join("pins")).unwrap();
        for vm in ["../x", "", "a/b", "."] {
            assert!(pins.forget(vm).await.is_err(), "{vm}");
        }
    }
}
