//! Changes to the key files. All of them block, and they run one at a time
//! ([`Keyring::change`](super::Keyring::change)).

use std::fs::DirBuilder;
use std::io;
use std::os::unix::fs::DirBuilderExt as _;

use super::machine::Machine;
use super::replaced::Replaced;
use super::{KEY, MACHINE, MAX_FILE, NEXT, Sources};
use crate::sys::files;
use crate::trust::Fingerprint;
use crate::trust::anchors::Anchor;
use crate::trust::key::{Key, KeyError, PublicKey};
use crate::trust::peer::Keyed;

/// Exclusive access to the key files.
#[derive(Debug)]
pub struct Files<'k> {
    pub(super) sources: &'k Sources,
    /// The keys that were given in other places.
    pub(super) given: &'k [Anchor],
}

impl Files<'_> {
    /// Returns the key that will replace this guest's own, and generates it if there is none.
    ///
    /// # Errors
    /// If it cannot be saved.
    pub fn prepare_next(&self) -> Result<PublicKey, KeyError> {
        let path = self.sources.folder.join(NEXT);
        let own = Key::load(&self.sources.folder.join(KEY))?.map(|key| key.public());
        // One that is in use already was left by a step that was cut off.
        if let Some(key) = Key::load(&path)?.filter(|key| Some(key.public()) != own) {
            return Ok(key.public());
        }
        self.sources.check_writable(&path)?;
        let key = Key::generate()?;
        key.save(&path)?;
        Ok(key.public())
    }

    /// Replaces this guest's own key by the next key, for new connections. Succeeds if this was done already.
    ///
    /// # Errors
    /// If there is no such key, or it cannot be saved.
    pub fn use_next(&self, which: Fingerprint) -> Result<PublicKey, KeyError> {
        let (path, own) = (self.sources.folder.join(NEXT), self.sources.folder.join(KEY));
        let is_it = |key: &Key| key.public().fingerprint() == which;
        if let Some(key) = Key::load(&own)?.filter(is_it) {
            if Key::load(&path)?.is_some_and(|next| is_it(&next)) {
                files::remove(&path);
            }
            return Ok(key.public());
        }
        self.sources.check_writable(&own)?;
        let key = Key::load(&path)?.filter(is_it).ok_or(KeyError::NoSuchKey(which))?;
        key.save(&own)?;
        files::remove(&path);
        tracing::info!("this guest has a new key: {which}");
        Ok(key.public())
    }

    /// Lets in a further key of the host half that came in as `peer`, with the roles of the one that it has, in the place of
    /// one that it has said before.
    ///
    /// # Errors
    /// If it did not come in with a key that the guest was given itself, the key is one of another place, or it cannot be kept.
    pub fn add_host(&self, peer: &Keyed, next: PublicKey) -> Result<(), KeyError> {
        if peer.fingerprint != peer.anchor {
            return Err(KeyError::NotReplaceable);
        }
        self.replace(|replaced| replaced.add(self.given, peer, next))?;
        tracing::info!("audit: {} will be replaced by {}", peer.anchor, next.fingerprint());
        Ok(())
    }

    /// Stops accepting the host half's former key `before`, which the key of `peer` has replaced.
    ///
    /// # Errors
    /// If the key of `peer` has not replaced it, or the change cannot be saved.
    pub fn retire_host(&self, peer: &Keyed, before: Fingerprint) -> Result<(), KeyError> {
        if self.replace(|replaced| replaced.retire(peer, before))? {
            tracing::info!("audit: {before} was replaced by {}, and is no longer accepted", peer.anchor);
        }
        Ok(())
    }

    fn replace(
        &self,
        change: impl FnOnce(&mut Replaced) -> Result<bool, KeyError>,
    ) -> Result<bool, KeyError> {
        let folder = &self.sources.folder;
        let unreadable =
            |problem| KeyError::Io { what: "read", path: folder.clone(), source: io::Error::other(problem) };
        let mut replaced = Replaced::read(folder).map_err(unreadable)?;
        let is_new = change(&mut replaced)?;
        if is_new {
            for (name, text) in replaced.texts() {
                let path = folder.join(name);
                self.sources.check_writable(&path)?;
                let write = |source| KeyError::Io { what: "write", path: path.clone(), source };
                files::replace_synced(&path, text.as_bytes()).map_err(write)?;
            }
        }
        Ok(is_new)
    }
}

/// Returns the guest's own key: the existing one, or a new one if there is none and it is needed, or if the
/// existing one belongs to another machine. The flag is true if it was generated because this is another
/// machine.
pub(super) fn own_key(sources: &Sources, is_needed: bool) -> Result<Option<(Key, bool)>, KeyError> {
    let folder = &sources.folder;
    let (path, beside) = (folder.join(KEY), folder.join(MACHINE));
    let found = Key::load(&path)?;
    if found.is_none() && !is_needed {
        return Ok(None);
    }
    let machine = (sources.machine)();
    // A read error does not mean that this is another machine.
    let read = |source| KeyError::Io { what: "read", path: beside.clone(), source };
    let of = match files::read_at_most(&beside, MAX_FILE).map_err(read)? {
        None => None,
        Some(bytes) => {
            let damaged = || read(io::Error::other("it is damaged; guestlet trust reset creates a new key"));
            Some(Machine::parse(&String::from_utf8_lossy(&bytes)).ok_or_else(damaged)?)
        }
    };
    let write = |source| KeyError::Io { what: "write", path: beside.clone(), source };
    let is_moved = found.is_some();
    if let Some(key) = found {
        if let Some(of) = of.filter(|of| of.may_be(&machine)) {
            let known = of.with(machine);
            if known != of && (sources.is_writable)() {
                files::replace_synced(&beside, known.text().as_bytes()).map_err(write)?;
            }
            return Ok(Some((key, false)));
        }
        tracing::warn!("this machine is not the one that its key was created on, so it creates a new one");
    }
    sources.check_writable(&beside)?;
    DirBuilder::new().recursive(true).mode(0o700).create(folder).map_err(write)?;
    let key = Key::generate()?;
    files::remove(&folder.join(NEXT));
    // The key first: without the other file it counts as that of another machine, and is replaced.
    files::remove_synced(&beside).map_err(write)?;
    key.save(&path)?;
    files::replace_synced(&beside, machine.text().as_bytes()).map_err(write)?;
    tracing::info!("this guest has a new key: {}", key.public().fingerprint());
    Ok(Some((key, is_moved)))
}
