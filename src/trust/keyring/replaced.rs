//! Replacements of host halves' keys: a list of successors, and a list of fingerprints that are no longer
//! accepted.
//!
//! A successor is valid only as long as the key that it replaces, or the first key of such a chain, and it has
//! the same roles. Removing a key therefore removes its successors as well, and a host half cannot change
//! through this list what was given elsewhere.

use std::path::Path;

use super::{MAX_FILE, RETIRED, ROTATED};
use crate::sys::files;
use crate::trust::Fingerprint;
use crate::trust::anchors::{self, Anchor, MAX_KEYS, Problem};
use crate::trust::key::{KeyError, PublicKey};
use crate::trust::peer::Keyed;

/// Prefix of the comment that contains the fingerprint of the replaced key.
const IN_PLACE_OF: &str = "in place of ";

/// Successors and retired keys.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Replaced {
    /// Successors, in the order in which they were announced.
    successors: Vec<Anchor>,
    retired: Vec<Fingerprint>,
}

/// The key whose place this one has taken.
fn predecessor(anchor: &Anchor) -> Option<Fingerprint> {
    anchor.comment.strip_prefix(IN_PLACE_OF)?.parse().ok()
}

impl Replaced {
    /// Reads both lists. Blocks.
    ///
    /// # Errors
    /// A description of the list that cannot be used.
    pub fn read(folder: &Path) -> Result<Self, String> {
        let text = |name: &str| {
            let path = folder.join(name);
            let wrong = |problem: String| format!("{}: {problem}", path.display());
            let bytes = files::read_at_most(&path, MAX_FILE).map_err(|error| wrong(error.to_string()))?;
            if let Some(link) = bytes.is_none().then(|| files::dangling(&path)).flatten() {
                return Err(wrong(format!("{} is a dangling symbolic link", link.display())));
            }
            String::from_utf8(bytes.unwrap_or_default()).map_err(|_| wrong("it is not UTF-8".to_owned()))
        };
        let successors = match anchors::parse(&folder.join(ROTATED).display().to_string(), &text(ROTATED)?) {
            Ok(anchors) => anchors,
            Err(error) if error.problem == Problem::Empty => Vec::new(),
            Err(error) => return Err(error.to_string()),
        };
        let retired = text(RETIRED)?;
        let retired: Result<Vec<_>, _> = retired.lines().map(str::parse).collect();
        let retired = retired.map_err(|error| format!("{}: {error}", folder.join(RETIRED).display()))?;
        Ok(Self { successors, retired })
    }

    /// The keys that count, of those that were given and their successors.
    pub fn apply(&self, given: &[Anchor]) -> Vec<Anchor> {
        let mut counted = given.to_vec();
        for successor in &self.successors {
            let Some(before) = predecessor(successor) else { continue };
            let is_known = counted.iter().any(|anchor| anchor.public_key == successor.public_key);
            let before = counted.iter().find(|anchor| anchor.fingerprint == before && !anchor.is_ca);
            if let (false, Some(before)) = (is_known, before) {
                let roles = before.roles.clone();
                counted.push(Anchor { roles, is_ca: false, ..successor.clone() });
            }
        }
        counted.retain(|anchor| !self.retired.contains(&anchor.fingerprint));
        counted
    }

    /// Puts `next` beside the key of `peer`, of the keys that were given, in the place of what it had put there before.
    ///
    /// # Errors
    /// If that is a key of somebody else, or there is no room.
    pub fn add(&mut self, given: &[Anchor], peer: &Keyed, next: PublicKey) -> Result<bool, KeyError> {
        let is_next = |anchor: &&Anchor| anchor.public_key == next;
        if let Some(known) = self.successors.iter().find(is_next) {
            return if predecessor(known) == Some(peer.anchor) {
                Ok(false)
            } else {
                Err(KeyError::NotReplaceable)
            };
        }
        if given.iter().any(|anchor| is_next(&anchor)) || self.retired.contains(&next.fingerprint()) {
            return Err(KeyError::NotReplaceable);
        }
        self.successors.retain(|anchor| predecessor(anchor) != Some(peer.anchor));
        if self.successors.len() + given.len() >= MAX_KEYS {
            return Err(KeyError::NotReplaceable);
        }
        let line = anchors::line(&next, false, &[] as &[&str], &format!("{IN_PLACE_OF}{}", peer.anchor));
        if let Ok(added) = anchors::parse(ROTATED, &line) {
            self.successors.extend(added);
        }
        Ok(true)
    }

    /// Retires the key `before`, which the key of `peer` has replaced, directly or through others.
    ///
    /// # Errors
    /// If the key of `peer` has not replaced it.
    pub fn retire(&mut self, peer: &Keyed, before: Fingerprint) -> Result<bool, KeyError> {
        let mut at = peer.anchor;
        for _ in 0..=self.successors.len() {
            let one = self.successors.iter().find(|anchor| anchor.fingerprint == at).and_then(predecessor);
            match one {
                Some(one) if one == before => {
                    let is_new = !self.retired.contains(&before);
                    if is_new {
                        self.retired.push(before);
                    }
                    return Ok(is_new);
                }
                Some(one) => at = one,
                None => break,
            }
        }
        Err(KeyError::NotReplaceable)
    }

    /// Both as files have them.
    pub fn texts(&self) -> [(&'static str, String); 2] {
        let spki = |anchor: &Anchor| {
            anchors::line(&anchor.public_key, false, &[] as &[&str], &anchor.comment) + "\n"
        };
        let retired = self.retired.iter().map(|name| format!("{name}\n")).collect::<Vec<_>>();
        [(ROTATED, self.successors.iter().map(spki).collect()), (RETIRED, retired.concat())]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trust::key::Key;

    fn given(roles: &str) -> (Anchor, Keyed) {
        let line = format!("{} {roles}", Key::generate().unwrap().public());
        let anchor = anchors::parse("a", line.trim()).unwrap().remove(0);
        (anchor.clone(), peer(&anchor))
    }

    fn peer(anchor: &Anchor) -> Keyed {
        let fingerprint = anchor.fingerprint;
        Keyed {
            fingerprint,
            anchor: fingerprint,
            names: Vec::new(),
            roles: anchor.roles.clone(),
            until: None,
        }
    }

    #[test]
    fn a_successor_has_the_roles_of_the_key_whose_place_it_took_and_goes_with_it() {
        let ((one, of_one), (other, of_other)) = (given("role=disks"), given(""));
        let both = [one.clone(), other.clone()];
        let mut replaced = Replaced::default();
        let next = Key::generate().unwrap().public();
        assert!(replaced.add(&both, &of_one, next).unwrap());
        assert!(!replaced.add(&both, &of_one, next).unwrap());
        let counted = replaced.apply(&both);
        assert_eq!((counted.len(), &counted[2].roles), (3, &one.roles));
        assert_eq!(replaced.apply(&[other]), both[1..], "it counts without the key whose place it took");
        // Keys of other host halves can be neither added nor retired.
        assert!(replaced.add(&both, &of_other, next).is_err());
        assert!(replaced.add(&both, &of_other, one.public_key).is_err());
        assert!(replaced.retire(&of_other, one.fingerprint).is_err());
        assert!(replaced.retire(&of_one, one.fingerprint).is_err());
        let of_next = peer(&counted[2]);
        assert!(replaced.retire(&of_next, one.fingerprint).unwrap());
        let counted = replaced.apply(&both);
        assert!(counted.iter().all(|anchor| anchor.fingerprint != one.fingerprint) && counted.len() == 2);
        // And once more, with the one in between left out.
        let third = Key::generate().unwrap().public();
        replaced.add(&both, &of_next, third).unwrap();
        let last = replaced.apply(&both).pop().unwrap();
        assert_eq!(last.roles, one.roles);
        assert!(replaced.retire(&peer(&last), of_next.anchor).unwrap());
        assert!(!replaced.retire(&peer(&last), one.fingerprint).unwrap());
        assert_eq!(replaced.apply(&both).len(), 2);
    }

    #[test]
    fn a_host_half_has_one_successor_however_often_it_asks() {
        let (one, of_one) = given("");
        let mut replaced = Replaced::default();
        for _ in 0..200 {
            replaced.add(std::slice::from_ref(&one), &of_one, Key::generate().unwrap().public()).unwrap();
        }
        assert_eq!(replaced.apply(&[one]).len(), 2);
    }

    #[test]
    fn both_lists_are_read_as_they_were_written() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(Replaced::read(folder.path()), Ok(Replaced::default()));
        let (one, of_one) = given("role=disks");
        let mut replaced = Replaced::default();
        replaced.add(std::slice::from_ref(&one), &of_one, Key::generate().unwrap().public()).unwrap();
        let of_next = peer(&replaced.apply(std::slice::from_ref(&one))[1]);
        replaced.retire(&of_next, one.fingerprint).unwrap();
        for (name, text) in replaced.texts() {
            files::replace(&folder.path().join(name), text.as_bytes()).unwrap();
        }
        let again = Replaced::read(folder.path()).unwrap();
        assert_eq!(again.apply(std::slice::from_ref(&one)).len(), 1);
        assert_eq!(again.texts(), replaced.texts());
        files::replace(&folder.path().join(RETIRED), b"nonsense\n").unwrap();
        assert!(Replaced::read(folder.path()).is_err());
    }
}
