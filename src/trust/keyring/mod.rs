//! Keys of a guest: those that it was given, and its own. The files and the firmware are read again for each
//! connection, so that an edited file takes effect without a restart.
//!
//! ```text
//!  hosts.d/*.pub ─┐                         ┌─ none, ever ─────────▶ plain
//!  rotated.pub  ──┼─▶ texts ──▶ anchors ────┤
//!  the platform ──┘  (a wrong one counts    └─ one, now or before ─▶ keyed, with a key of this guest's own
//!                     as it was before)
//! ```
//!
//! The guest's own key, in `folder`, records that a key was given once: from then on no peer is accepted
//! without one, until [`Keyring::forget`], which root in the guest can call. The key belongs to one machine: a
//! copy of the disk that boots in another machine generates a new key before any peer is accepted.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustls::pki_types::UnixTime;
use tokio::sync::{Mutex as AsyncMutex, watch};

use crate::sys::{blocking, error_chain, files};
use crate::trust::anchors::Anchor;
use crate::trust::guest::{Clock, Keys, Standing};
use crate::trust::key::{Key, KeyError, PublicKey};
use crate::trust::peer::Keyed;
use crate::trust::{Fingerprint, Peer};

mod changes;
mod gather;
mod machine;
mod replaced;
#[cfg(test)]
mod tests;

pub use changes::Files;
use changes::own_key;
use gather::{Good, gather};
pub use machine::Machine;

/// Bytes of a file with keys.
const MAX_FILE: u64 = 64 * 1024;
/// Timeout for reading the sources. After it a disk is assumed to hang, and the previous result is used.
const PATIENCE: Duration = Duration::from_secs(2);
/// Time before another attempt to save a key that could not be written.
const UNKEPT: Duration = Duration::from_secs(5);
/// The guest's own key, and the machine that it belongs to.
const KEY: &str = "guest.key";
const MACHINE: &str = "guest.machine";
/// A key that takes the place of the guest's own as soon as a host half has used it.
const NEXT: &str = "guest.key.next";
/// Files with the keys that host halves have announced in place of their own, and with the fingerprints of the
/// keys that they have retired.
const ROTATED: &str = "rotated.pub";
const RETIRED: &str = "retired";

/// Source of keys: its display name, and its lines or the reason why it cannot be read.
pub type Text = (String, Result<String, String>);

/// Sources of keys.
pub struct Sources {
    /// The directory of the files that root in the guest, or cloud-init, writes.
    pub hosts: PathBuf,
    /// The directory that the agent owns, on a disk of the guest.
    pub folder: PathBuf,
    /// Function that returns the keys from the platform. May block.
    pub platform: Box<dyn Fn() -> Vec<Text> + Send + Sync>,
    /// Function that returns the identity of this machine. May block.
    pub machine: Box<dyn Fn() -> Machine + Send + Sync>,
    /// Function that returns whether the guest's disks can be written to; false while they are frozen.
    pub is_writable: Box<dyn Fn() -> bool + Send + Sync>,
    /// Function that returns the clock and whether it is reliable.
    pub clock: fn() -> Clock,
    /// Peers without a key may come in even beside keys.
    pub plain: bool,
}

impl Sources {
    /// Returns an error if `path` cannot be written to, because disks are frozen.
    fn check_writable(&self, path: &Path) -> Result<(), KeyError> {
        if (self.is_writable)() { Ok(()) } else { Err(KeyError::Frozen(path.to_owned())) }
    }
}

impl std::fmt::Debug for Sources {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { hosts, folder, .. } = self;
        formatter
            .debug_struct("Sources")
            .field("hosts", hosts)
            .field("folder", folder)
            .finish_non_exhaustive()
    }
}

/// The keys; clones share them.
#[derive(Debug, Clone)]
pub struct Keyring(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    sources: Sources,
    /// State of the reader. Its lock allows only one reader at a time, so that a disk that hangs blocks a single
    /// thread, however many peers connect.
    good: Arc<AsyncMutex<Good>>,
    /// Result of the last read.
    standing: Mutex<Option<Standing>>,
    /// Peers that may stay connected now.
    welcome: watch::Sender<Welcome>,
    /// The guest was given a key, now or before.
    is_keyed: Arc<AtomicBool>,
}

/// Rules for which peers may stay connected.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Welcome {
    /// Host halves with one of these keys, or of these CAs.
    anchors: Arc<[Anchor]>,
    /// True if only peers with a key may stay.
    keyed_only: bool,
    /// Number of times that this machine has turned out to be different from the one that the key was made on.
    /// Peers that the other machine had accepted are disconnected.
    machines: u64,
    /// Current time, if the clock is reliable; certificates that have expired before it are not accepted.
    now: Option<UnixTime>,
}

/// Reason why an accepted peer may not stay.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Loss {
    /// Peer without a key.
    #[error("this guest has been given keys")]
    Plain,
    /// Peer whose key, or that of its CA, was removed or has other roles now.
    #[error("its key {0} has changed here")]
    Key(Fingerprint),
    /// The certificate that its CA has given it.
    #[error("its certificate has expired")]
    Expired,
    /// Peer that was accepted by the machine that this one is a copy of.
    #[error("this machine's identity has changed")]
    Machine,
}

impl Welcome {
    /// Returns why `peer`, which was accepted at this value of `machines`, may not stay; `None` if it may.
    fn refuses(&self, peer: &Peer, machines: u64) -> Option<Loss> {
        match peer {
            Peer::Keyed(peer) => self.refuses_keyed(peer, machines),
            Peer::Plain if self.machines != machines => Some(Loss::Machine),
            Peer::Plain => self.keyed_only.then_some(Loss::Plain),
        }
    }

    fn refuses_keyed(&self, peer: &Keyed, machines: u64) -> Option<Loss> {
        if self.machines != machines {
            return Some(Loss::Machine);
        }
        let is_ca = peer.anchor != peer.fingerprint;
        let lets_in = |anchor: &Anchor| {
            anchor.fingerprint == peer.anchor && anchor.roles == peer.roles && anchor.is_ca == is_ca
        };
        if !self.anchors.iter().any(lets_in) {
            return Some(Loss::Key(peer.anchor));
        }
        let has_ended = peer.until.zip(self.now).is_some_and(|(until, now)| until < now);
        has_ended.then_some(Loss::Expired)
    }
}

/// Contents of a keyring, for display.
#[derive(Debug, Clone, Default)]
pub struct Listing {
    /// The guest's own key; `None` if it has none.
    pub own: Option<PublicKey>,
    /// The keys that it was given.
    pub anchors: Vec<Anchor>,
    /// Descriptions of all problems.
    pub problems: Vec<String>,
    /// True if the guest was given a key, now or before, so that no peer is accepted without one.
    pub is_keyed: bool,
}

impl Keyring {
    /// A keyring of these sources. Reads nothing yet.
    pub fn new(sources: Sources) -> Self {
        let welcome = watch::Sender::default();
        Self(Arc::new(Shared {
            sources,
            good: Arc::default(),
            standing: Mutex::default(),
            welcome,
            is_keyed: Arc::default(),
        }))
    }

    /// One that is never given a key, for guests that are simulated.
    pub fn empty() -> Self {
        Self::new(Sources {
            hosts: PathBuf::new(),
            folder: PathBuf::new(),
            platform: Box::new(Vec::new),
            machine: Box::new(Machine::default),
            is_writable: Box::new(|| false),
            clock: || Clock::Unset,
            plain: false,
        })
    }

    /// Returns the keys for a new connection. If the sources do not respond in time, the previous result is used.
    pub async fn standing(&self) -> Standing {
        if let Ok(standing) = tokio::time::timeout(PATIENCE, self.read()).await {
            return standing;
        }
        let before = self.last().clone();
        before.unwrap_or_else(|| {
            Standing::Unusable("the files of the keys cannot be read: their disk does not answer".to_owned())
        })
    }

    /// Reads everything, makes the guest's own key if it is needed, and says what is wrong. There is no deadline.
    pub async fn read(&self) -> Standing {
        let mut good = Arc::clone(&self.0.good).lock_owned().await;
        let keyring = self.clone();
        blocking::run(move || keyring.read_now(&mut good)).await
    }

    fn read_now(&self, good: &mut Good) -> Standing {
        let Sources { clock, plain, .. } = &self.0.sources;
        let gathered = gather(&self.0.sources, good);
        for problem in gathered.problems.iter().filter(|problem| !good.problems.contains(problem)) {
            tracing::error!("a key is not accepted: {problem}");
        }
        good.problems = gathered.problems;
        let anchors: Arc<[Anchor]> = gathered.anchors.into();
        let mut machines = self.0.welcome.borrow().machines;
        let clock = clock();
        let now = match clock {
            Clock::Set(now) => Some(now),
            Clock::Unset => None,
        };
        let standing = match self.own_key(good, gathered.is_there) {
            Ok(None) => Standing::Plain,
            Ok(Some((key, is_moved))) => {
                machines += u64::from(is_moved);
                let anchors = Arc::clone(&anchors);
                Standing::Keyed(Keys { key: Arc::new(key), anchors, clock, plain: *plain })
            }
            Err(words) => Standing::Unusable(words),
        };
        let is_keyed = !matches!(standing, Standing::Plain);
        self.0.is_keyed.store(is_keyed, Ordering::Relaxed);
        let keyed_only = is_keyed && !plain;
        let welcome = Welcome { anchors, keyed_only, machines, now };
        self.0.welcome.send_if_modified(|before| {
            let changed = *before != welcome;
            *before = welcome;
            changed
        });
        *self.last() = Some(standing.clone());
        standing
    }

    /// The guest's own key, as [`own_key`]. One that could not be written is not made anew for each connection, which anybody can
    /// open: that is tried again after a while.
    fn own_key(&self, good: &mut Good, is_needed: bool) -> Result<Option<(Key, bool)>, String> {
        if let Some((since, words)) = good.unkept.as_ref().filter(|(since, _)| since.elapsed() < UNKEPT) {
            tracing::debug!("{words} (tried {} s ago)", since.elapsed().as_secs());
            return Err(words.clone());
        }
        let before = good.unkept.take();
        own_key(&self.0.sources, is_needed).map_err(|error| {
            let words = error_chain::words(&error);
            let words = format!("this guest was given keys, but cannot use its own: {words}");
            if matches!(error, KeyError::Io { what: "write", .. }) {
                if before.is_none_or(|(_, before)| before != words) {
                    tracing::error!("{words}");
                }
                good.unkept = Some((Instant::now(), words.clone()));
            }
            words
        })
    }

    /// Changes the files of keys for the host half that came in as `peer`, one change at a time, and nobody reads the files
    /// meanwhile. They are read anew before, so that a request that was under way when root took the keys away brings none back.
    ///
    /// # Errors
    /// [`KeyError::NoLongerTrusted`] if `peer` would not be let in now; those of `change`.
    pub async fn change<T: Send + 'static>(
        &self,
        peer: Keyed,
        change: impl FnOnce(&Files<'_>, &Keyed) -> Result<T, KeyError> + Send + 'static,
    ) -> Result<T, KeyError> {
        let mut good = Arc::clone(&self.0.good).lock_owned().await;
        let keyring = self.clone();
        let changed = blocking::run(move || {
            let machines = keyring.0.welcome.borrow().machines;
            drop(keyring.read_now(&mut good));
            if keyring.0.welcome.borrow().refuses_keyed(&peer, machines).is_some() {
                return Err(KeyError::NoLongerTrusted);
            }
            change(&Files { sources: &keyring.0.sources, given: &good.merged }, &peer)
        });
        changed.await
    }

    /// Resets the keys, as [`Self::forget`] does, in the running agent: it waits for a read in progress, and when
    /// it returns, the keys that exist now are in force. Returns whether a source of keys remains.
    ///
    /// # Errors
    /// If file systems are frozen, or a file cannot be removed.
    pub async fn reset(&self) -> Result<bool, KeyError> {
        let mut good = Arc::clone(&self.0.good).lock_owned().await;
        let keyring = self.clone();
        let reset = blocking::run(move || {
            let path = keyring.0.sources.folder.join(KEY);
            keyring.0.sources.check_writable(&path)?;
            keyring.forget().map_err(|source| KeyError::Io { what: "remove", path, source })?;
            good.unkept = None;
            Ok(!matches!(keyring.read_now(&mut good), Standing::Plain))
        });
        reset.await
    }

    /// Signs a message with this guest's own key, and returns the signature with the public key; `None` if there
    /// is no usable key. Blocks, and so must not run on a thread of the event loop.
    pub fn sign(&self, message: &[u8]) -> Option<(PublicKey, Vec<u8>)> {
        let mut good = Arc::clone(&self.0.good).blocking_lock_owned();
        match self.read_now(&mut good) {
            Standing::Keyed(keys) => Some((keys.key.public(), keys.key.sign(message)?)),
            Standing::Plain | Standing::Unusable(_) => None,
        }
    }

    /// Returns the contents for display. Blocks; changes nothing.
    pub fn list(&self) -> Listing {
        let gathered = gather(&self.0.sources, &mut Good::default());
        let mut problems = gathered.problems;
        let own = Key::load(&self.0.sources.folder.join(KEY)).unwrap_or_else(|error| {
            problems.push(error_chain::words(&error));
            None
        });
        let is_keyed = gathered.is_there || self.0.sources.folder.join(KEY).exists();
        Listing { own: own.map(|key| key.public()), anchors: gathered.anchors, problems, is_keyed }
    }

    /// Deletes the guest's own key, the record that there was one, and the replacements that host halves have
    /// announced. Blocks.
    ///
    /// # Errors
    /// If a file cannot be removed.
    pub fn forget(&self) -> io::Result<()> {
        // The key last: it is what remembers.
        for name in [NEXT, MACHINE, ROTATED, RETIRED, KEY] {
            let path = self.0.sources.folder.join(name);
            files::remove_synced(&path).or_else(|error| match error.kind() {
                io::ErrorKind::NotFound => Ok(()),
                _ => Err(error),
            })?;
        }
        Ok(())
    }

    /// Detects that this machine has become another one: a copy that resumes from a saved memory image.
    pub async fn tick(&self) {
        if self.0.is_keyed.load(Ordering::Relaxed) {
            drop(self.standing().await);
        }
    }

    /// Returns a flag that shows whether the guest was given a key, as of the last read. It is set before any peer
    /// is accepted because of that key.
    pub fn is_keyed(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.0.is_keyed)
    }

    /// Waits until `peer` would no longer be accepted, or not with its present roles, and returns the reason.
    pub async fn lost(&self, peer: &Peer) -> Loss {
        let mut welcome = self.0.welcome.subscribe();
        let machines = welcome.borrow().machines;
        loop {
            if let Some(loss) = welcome.borrow_and_update().refuses(peer, machines) {
                return loss;
            }
            if welcome.changed().await.is_err() {
                // The sender is part of this keyring.
                std::future::pending::<()>().await;
            }
        }
    }

    /// The directory of the files that root writes.
    pub fn hosts(&self) -> &Path {
        &self.0.sources.hosts
    }

    fn last(&self) -> MutexGuard<'_, Option<Standing>> {
        // Ignores poisoning: the value is only ever replaced as a whole.
        self.0.standing.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
