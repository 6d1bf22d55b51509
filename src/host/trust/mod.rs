//! Whom the host half takes for the guest of a VM: the key of each guest is pinned when it is first seen, and no other one
//! opens a session of that VM from then on.
//!
//! [`judge`] decides, purely; [`pins`] remembers. What this host half shows to guests is in [`Trust::shown`].

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

/// How long the key that a guest had before is still taken, for disks that are restored to before a rotation.
pub const PREVIOUS: Duration = Duration::from_secs(30 * 24 * 3600);

/// How long the files of this host half's key may take.
const PATIENCE: Duration = Duration::from_secs(2);

/// The keys of the guests, and this host half's own.
#[derive(Debug)]
pub struct Trust {
    identity: Identity,
    pins: Pins,
    changes: watch::Sender<u64>,
    /// How often this host half has begun to use another key.
    switches: AtomicU64,
    /// Why guests do not take what they are told of this host half's keys, by the lasting identifiers of their VMs: so that it is
    /// said once, and not in each session.
    complaints: Mutex<HashMap<String, String>>,
}

impl Trust {
    /// With these pins, as the host half of this identity.
    pub fn new(identity: Identity, pins: Pins) -> Self {
        Self {
            identity,
            pins,
            changes: watch::Sender::new(0),
            switches: AtomicU64::new(0),
            complaints: Mutex::default(),
        }
    }

    /// Those of nobody, of a host half that is gone with the test.
    #[cfg(test)]
    #[allow(clippy::missing_panics_doc)]
    pub fn for_tests() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let files = crate::trust::host::Files { key: folder.path().join("host.key"), certificate: None };
        Self::new(Identity::load(files).unwrap(), Pins::open(folder.path().join("guests")).unwrap())
    }

    /// What this host half shows to guests now. Looks at files.
    pub async fn shown(self: &Arc<Self>) -> Shown {
        let trust = Arc::clone(self);
        let looking = blocking::run(move || trust.identity.refresh());
        // A disk that hangs keeps nobody from the key that is known.
        drop(tokio::time::timeout(PATIENCE, looking).await);
        self.identity.shown()
    }

    /// What is known of the guest of the VM with this lasting identifier.
    pub fn record(&self, vm: &str) -> Record {
        self.pins.record(vm)
    }

    /// What is known of all guests, by the lasting identifiers of their VMs.
    pub fn records(&self) -> Vec<(String, Record)> {
        self.pins.all()
    }

    /// Judges the key that the guest of a VM has shown.
    ///
    /// # Errors
    /// If it is not to be talked to. What it has shown is remembered, so that people can accept it.
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

    /// Pins the key of a guest that is seen for the first time.
    ///
    /// # Errors
    /// If that cannot be remembered.
    pub async fn pin(&self, vm: &Vm, key: PublicKey, how: How) -> Result<(), Refusal> {
        self.change(vm, |_| Some(Pin::new(&vm.name, key, how))).await?;
        if how == How::Token {
            self.pins.forget_token(&vm.ids.lasting).await?;
        }
        tracing::info!(vm = vm.name, key = %key.fingerprint(), how = how.word(), "the guest's key is pinned");
        Ok(())
    }

    /// Remembers the key that the guest of a VM was refused with, so that people can accept it.
    pub fn offered(&self, vm: &Vm, key: PublicKey) {
        self.pins.offered(&vm.ids.lasting, key);
    }

    /// Takes this key of the guest of a VM in the place of the one that is pinned.
    ///
    /// # Errors
    /// If that cannot be remembered.
    pub async fn accept(&self, vm: &Vm, offered: PublicKey) -> Result<PublicKey, Error> {
        self.change(vm, |_| Some(Pin::new(&vm.name, offered, How::Operator))).await?;
        self.changes.send_modify(|count| *count += 1);
        Ok(offered)
    }

    /// Forgets all that is known of the guest of a VM. Returns whether anything was.
    ///
    /// # Errors
    /// If that cannot be remembered.
    pub async fn forget(&self, vm: &str) -> Result<bool, Error> {
        let was_there = self.pins.forget(vm).await?;
        self.complains(vm, None);
        self.changes.send_modify(|count| *count += 1);
        Ok(was_there)
    }

    /// Remembers the key that a guest is going to use.
    ///
    /// # Errors
    /// If it cannot be remembered, or none is pinned.
    pub async fn promise(&self, vm: &Vm, next: PublicKey) -> Result<(), Error> {
        if self.record(&vm.ids.lasting).pin.is_none() {
            return Err(Error::NoPin);
        }
        self.change(vm, |pin| pin.map(|pin| Pin { next: Some(next), ..pin })).await
    }

    /// A token by which the guest of a VM can prove at its first contact that it is the one which was set up for that.
    ///
    /// # Errors
    /// If it cannot be remembered.
    pub async fn token(&self, vm: &str) -> Result<Token, Error> {
        self.pins.token(vm).await
    }

    /// What guests are to be told of this host half's keys. Looks at files.
    ///
    /// # Errors
    /// If one cannot be used.
    pub async fn rotation(self: &Arc<Self>) -> Result<Rotation, Unusable> {
        let trust = Arc::clone(self);
        blocking::run(move || trust.identity.rotation()).await
    }

    /// Makes the next key of this host half, if there is none, and has guests told.
    ///
    /// # Errors
    /// If there can be none.
    pub async fn prepare(self: &Arc<Self>) -> Result<PublicKey, Unusable> {
        let trust = Arc::clone(self);
        let next = blocking::run(move || trust.identity.prepare()).await?;
        self.changes.send_modify(|count| *count += 1);
        Ok(next)
    }

    /// Begins to use the next key of this host half.
    ///
    /// # Errors
    /// If there is none.
    pub async fn switch(self: &Arc<Self>) -> Result<PublicKey, Unusable> {
        let trust = Arc::clone(self);
        let key = blocking::run(move || trust.identity.switch()).await?;
        self.switches.fetch_add(1, Ordering::Relaxed);
        self.changes.send_modify(|count| *count += 1);
        Ok(key)
    }

    /// Remembers what the guest of a VM knows of this host half's keys.
    ///
    /// # Errors
    /// If it cannot be remembered.
    pub async fn told(&self, vm: &Vm, next: PublicKey) -> Result<(), Error> {
        let told = Some(next.fingerprint().to_string());
        self.change(vm, |pin| pin.map(|pin| Pin { told, ..pin })).await
    }

    /// Remembers why the guest of a VM does not take what it is told of this host half's keys, or that it does. Returns whether
    /// that is a problem which was not there before.
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

    /// How often this host half has begun to use another key.
    pub fn switches(&self) -> u64 {
        self.switches.load(Ordering::Relaxed)
    }

    /// A watch of what people change.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    /// Completes when people have changed something, after which a guest that was refused may not be.
    pub async fn changed(&self) {
        let mut changes = self.changes.subscribe();
        // The sender is part of this.
        let _ = changes.changed().await;
    }

    async fn change(&self, vm: &Vm, change: impl FnOnce(Option<Pin>) -> Option<Pin>) -> Result<(), Error> {
        self.pins.change(&vm.ids.lasting, change).await
    }
}
