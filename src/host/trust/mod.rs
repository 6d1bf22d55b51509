//! Trust in guests: the key of each guest is pinned at first contact, and from then on no other key opens a
//! session of its VM.
//!
//! [`judge`] decides, purely; [`pins`] stores the keys. [`Trust::shown`] has what this host half presents to
//! guests.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use tokio::sync::watch;

use crate::host::backends::Vm;
use crate::sys::blocking;
use crate::trust::enrollment::Token;
use crate::trust::host::{Identity, Rotation, Shown, Unusable};
use crate::trust::key::PublicKey;

pub mod judge;
pub mod pins;

pub use judge::{Refusal, Verdict};
pub use pins::{Error, How, Pin, Pins, Record};

/// Time for which the previous key of a guest is still accepted: its disk may be restored to a state before a
/// rotation.
pub const PREVIOUS: Duration = Duration::from_secs(30 * 24 * 3600);

/// Timeout for reading the files of this host half's key.
const PATIENCE: Duration = Duration::from_secs(2);

/// Keys of the guests, and of this host half.
#[derive(Debug)]
pub struct Trust {
    identity: Identity,
    pins: Pins,
    changes: watch::Sender<u64>,
    /// Number of times that this host half has begun to use another key.
    switches: AtomicU64,
    /// Problems of guests in accepting this host half's keys, by the lasting identifiers of their VMs. They are kept
    /// so that each problem is logged once, and not in each session.
    complaints: Mutex<HashMap<String, String>>,
}

impl Trust {
    /// Creates the trust of the host half with this identity, with these pins.
    pub fn new(identity: Identity, pins: Pins) -> Self {
        Self {
            identity,
            pins,
            changes: watch::Sender::new(0),
            switches: AtomicU64::new(0),
            complaints: Mutex::default(),
        }
    }

    /// Creates the trust of a host half for a test, with a new key and no pins; its files are temporary.
    #[cfg(test)]
    #[allow(clippy::missing_panics_doc)]
    pub fn for_tests() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let files = crate::trust::host::Files { key: folder.path().join("host.key"), certificate: None };
        Self::new(Identity::load(files).unwrap(), Pins::open(folder.path().join("guests")).unwrap())
    }

    /// Returns the key or certificate that this host half presents to guests now. Checks the files for changes first.
    pub async fn shown(self: &Arc<Self>) -> Shown {
        let trust = Arc::clone(self);
        let looking = blocking::run(move || trust.identity.refresh());
        // If a disk hangs, the last known key is used.
        drop(tokio::time::timeout(PATIENCE, looking).await);
        self.identity.shown()
    }

    /// Returns what is known of the guest of the VM with this lasting identifier.
    pub fn record(&self, vm: &str) -> Record {
        self.pins.record(vm)
    }

    /// Returns what is known of all guests, by the lasting identifiers of their VMs.
    pub fn records(&self) -> Vec<(String, Record)> {
        self.pins.all()
    }

    /// Judges the key that the guest of a VM has presented.
    ///
    /// # Errors
    /// If the guest is to be refused. Its key is remembered, so that an administrator can accept it.
    pub async fn judge(&self, vm: &Vm, shown: PublicKey) -> Result<Verdict, Refusal> {
        let id = &vm.ids.lasting;
        let record = self.pins.record(id);
        let owner = self.pins.owner(&shown).filter(|(owner, _)| owner != id);
        let verdict = judge::judge(&record, shown, owner.map(|(_, name)| name), SystemTime::now());
        match &verdict {
            Ok(Verdict::Next) => self.change(vm, |pin| pin.map(|pin| pin.rotated(SystemTime::now()))).await?,
            Ok(Verdict::Previous) => {
                let key = shown.fingerprint();
                tracing::warn!(vm = vm.name, %key, "the guest uses its previous key: was its disk restored?");
            }
            Ok(_) => {}
            Err(_) => self.pins.offered(id, shown),
        }
        verdict
    }

    /// Pins the key of a guest at its first contact.
    ///
    /// # Errors
    /// If the pin cannot be stored.
    pub async fn pin(&self, vm: &Vm, key: PublicKey, how: How) -> Result<(), Refusal> {
        self.change(vm, |_| Some(Pin::new(&vm.name, key, how))).await?;
        if how == How::Token {
            self.pins.forget_token(&vm.ids.lasting).await?;
        }
        tracing::info!(vm = vm.name, key = %key.fingerprint(), how = how.word(), "the guest's key is pinned");
        Ok(())
    }

    /// Remembers the key that the guest of a VM was refused with, so that an administrator can accept it.
    pub fn offered(&self, vm: &Vm, key: PublicKey) {
        self.pins.offered(&vm.ids.lasting, key);
    }

    /// Pins this key of the guest of a VM in place of the pinned one.
    ///
    /// # Errors
    /// If the pin cannot be stored.
    pub async fn accept(&self, vm: &Vm, offered: PublicKey) -> Result<PublicKey, Error> {
        self.change(vm, |_| Some(Pin::new(&vm.name, offered, How::Operator))).await?;
        self.changes.send_modify(|count| *count += 1);
        Ok(offered)
    }

    /// Forgets everything that is known of the guest of a VM. Returns whether there was anything.
    ///
    /// # Errors
    /// If a file cannot be removed.
    pub async fn forget(&self, vm: &str) -> Result<bool, Error> {
        let was_there = self.pins.forget(vm).await?;
        self.complains(vm, None);
        self.changes.send_modify(|count| *count += 1);
        Ok(was_there)
    }

    /// Stores the next key of a guest, which it is going to use.
    ///
    /// # Errors
    /// If the key cannot be stored, or none is pinned.
    pub async fn promise(&self, vm: &Vm, next: PublicKey) -> Result<(), Error> {
        if self.record(&vm.ids.lasting).pin.is_none() {
            return Err(Error::NoPin);
        }
        self.change(vm, |pin| pin.map(|pin| Pin { next: Some(next), ..pin })).await
    }

    /// Returns a token with which the guest of a VM can prove its identity at its first contact.
    ///
    /// # Errors
    /// If the token cannot be generated or stored.
    pub async fn token(&self, vm: &str) -> Result<Token, Error> {
        self.pins.token(vm).await
    }

    /// Returns the keys of this host half that guests have to learn or to drop. Reads files.
    ///
    /// # Errors
    /// If a file cannot be used.
    pub async fn rotation(self: &Arc<Self>) -> Result<Rotation, Unusable> {
        let trust = Arc::clone(self);
        blocking::run(move || trust.identity.rotation()).await
    }

    /// Generates the next key of this host half, unless there is one, and has guests informed of it.
    ///
    /// # Errors
    /// If a next key is not possible or cannot be stored.
    pub async fn prepare(self: &Arc<Self>) -> Result<PublicKey, Unusable> {
        let trust = Arc::clone(self);
        let next = blocking::run(move || trust.identity.prepare()).await?;
        self.changes.send_modify(|count| *count += 1);
        Ok(next)
    }

    /// Begins to use the next key of this host half.
    ///
    /// # Errors
    /// If there is no next key, or the files cannot be changed.
    pub async fn switch(self: &Arc<Self>) -> Result<PublicKey, Unusable> {
        let trust = Arc::clone(self);
        let key = blocking::run(move || trust.identity.switch()).await?;
        self.switches.fetch_add(1, Ordering::Relaxed);
        self.changes.send_modify(|count| *count += 1);
        Ok(key)
    }

    /// Records that the guest of a VM knows the next key of this host half.
    ///
    /// # Errors
    /// If the record cannot be written.
    pub async fn told(&self, vm: &Vm, next: PublicKey) -> Result<(), Error> {
        let told = Some(next.fingerprint().to_string());
        self.change(vm, |pin| pin.map(|pin| Pin { told, ..pin })).await
    }

    /// Records the problem of a guest in accepting this host half's keys; `None` if it has accepted them. Returns
    /// whether the problem is a new one.
    pub fn complains(&self, vm: &str, problem: Option<&String>) -> bool {
        let mut complaints = self.complaints.lock().unwrap_or_else(PoisonError::into_inner);
        match problem {
            None => {
                complaints.remove(vm);
                false
            }
            Some(problem) => complaints.insert(vm.to_owned(), problem.clone()).as_ref() != Some(problem),
        }
    }

    /// Returns how many times this host half has begun to use another key.
    pub fn switches(&self) -> u64 {
        self.switches.load(Ordering::Relaxed)
    }

    /// Returns a watch of the changes that administrators make.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    /// Completes when an administrator has made a change, after which a refused guest may be accepted.
    pub async fn changed(&self) {
        let mut changes = self.changes.subscribe();
        // No error can occur: `self` owns the sender.
        let _ = changes.changed().await;
    }

    async fn change(&self, vm: &Vm, change: impl FnOnce(Option<Pin>) -> Option<Pin>) -> Result<(), Error> {
        self.pins.change(&vm.ids.lasting, change).await
    }
}
