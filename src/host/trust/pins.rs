//! What the host half remembers of guests' keys: one file for each VM, in a directory of its own, and the same in memory.
//!
//! A file that cannot be read keeps its VM from being talked to, and nothing else: what it said is not known, and so no key is
//! the right one. To add something that is remembered: an optional field of [`Pin`].

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

/// Ends of the names of files.
const PIN: &str = "json";
const TOKEN: &str = "token";
/// Bytes of one.
const MAX_FILE: u64 = 16 * 1024;

/// How a key came to be pinned.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum How {
    /// The guest proved that it has the token which it was given.
    Token,
    /// It was the first that the guest showed: nobody has proved whose it is.
    FirstUse,
    /// Somebody has accepted it.
    Operator,
}

impl How {
    /// As people and files have it.
    pub fn word(self) -> &'static str {
        match self {
            Self::Token => "token",
            Self::FirstUse => "first-use",
            Self::Operator => "operator",
        }
    }
}

/// The key of a guest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Pin {
    /// The VM's name when it was pinned, for people.
    pub name: String,
    /// The key.
    pub key: PublicKey,
    /// How it was pinned.
    pub how: How,
    /// When, in seconds since 1970.
    pub since: u64,
    /// The key that the guest has said it is going to use.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next: Option<PublicKey>,
    /// The key that it had before.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub previous: Option<Previous>,
    /// The name of the next key of this host half, once the guest knows it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub told: Option<String>,
}

/// A key that was replaced.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Previous {
    /// The key.
    pub key: PublicKey,
    /// Until when it is taken all the same, in seconds since 1970.
    pub until: u64,
}

impl Previous {
    /// Whether it is taken now.
    pub fn is_valid(&self, now: SystemTime) -> bool {
        seconds(now) < self.until
    }
}

impl Pin {
    /// That of a guest whose key is pinned now.
    pub fn new(name: &str, key: PublicKey, how: How) -> Self {
        let since = seconds(SystemTime::now());
        Self { name: name.to_owned(), key, how, since, next: None, previous: None, told: None }
    }

    /// After the guest has begun to use its next key.
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

/// What is known of one guest.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Record {
    /// Its key, once one is pinned.
    pub pin: Option<Pin>,
    /// The token that it has to prove at its first contact.
    pub token: Option<Token>,
    /// The key that it showed last and was refused with; not kept in files.
    pub offered: Option<PublicKey>,
    /// Why what is remembered cannot be used.
    pub unreadable: Option<String>,
}

/// Why pins cannot be used or changed.
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
    /// There is no key to accept.
    #[error("no key of this guest has been refused since guestlet-host started")]
    NothingOffered,
    /// The kernel gives no random bytes.
    #[error("the kernel provides no random bytes")]
    Random,
    /// The system's refusal.
    #[error("cannot write {path}")]
    Io {
        /// The file.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
}

/// All pins.
#[derive(Debug)]
pub struct Pins {
    folder: PathBuf,
    records: Mutex<BTreeMap<String, Record>>,
    /// Held while a file is written, so that files and memory say the same.
    writing: AsyncMutex<()>,
}

impl Pins {
    /// Reads what is in `folder`, which is made if need be. Blocks.
    ///
    /// # Errors
    /// If the directory cannot be made or listed.
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

    /// What is known of the guest of one VM.
    pub fn record(&self, vm: &str) -> Record {
        self.records().get(vm).cloned().unwrap_or_default()
    }

    /// What is known of all.
    pub fn all(&self) -> Vec<(String, Record)> {
        self.records().iter().map(|(vm, record)| (vm.clone(), record.clone())).collect()
    }

    /// The VM, and its name, for which a key is pinned, or whose disk may be restored to when it had that key.
    pub fn owner(&self, key: &PublicKey) -> Option<(String, String)> {
        let (records, now) = (self.records(), SystemTime::now());
        records.iter().find_map(|(vm, record)| {
            let pin = record.pin.as_ref()?;
            let was =
                pin.previous.as_ref().is_some_and(|previous| previous.key == *key && previous.is_valid(now));
            // One that a guest has only announced is not its own before it has shown it.
            (pin.key == *key || was).then(|| (vm.clone(), pin.name.clone()))
        })
    }

    /// Remembers, until the end of the program, which key a guest was refused with.
    pub fn offered(&self, vm: &str, key: PublicKey) {
        self.records().entry(vm.to_owned()).or_default().offered = Some(key);
    }

    /// Changes what is pinned for a VM.
    ///
    /// # Errors
    /// If it cannot be written; then it is as it was.
    pub async fn change(
        &self,
        vm: &str,
        change: impl FnOnce(Option<Pin>) -> Option<Pin>,
    ) -> Result<(), Error> {
        let _writing = self.writing.lock().await;
        let before = self.record(vm).pin;
        let Some(pin) = change(before.clone()) else { return Ok(()) };
        // One key is that of one guest, whoever was first.
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

    /// The token of a VM, which is made if there is none.
    ///
    /// # Errors
    /// If it cannot be written.
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

    /// Forgets the token of a VM: it was used.
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

    /// The file of a VM: lasting identifiers are UUIDs, and no part of a path.
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
        // Each step leaves them whole.
        self.records.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn text(path: &Path) -> Result<String, String> {
    let bytes =
        files::read_at_most(path, MAX_FILE).map_err(|error| format!("{}: {error}", path.display()))?;
    let bytes = bytes.ok_or_else(|| format!("{}: it is gone", path.display()))?;
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

    /// It would be refused otherwise when its disk is restored: as a copy of the other one.
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
