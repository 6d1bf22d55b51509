//! Judges whether a guest is the expected one by the key that it presents. Pure.
//!
//! ```text
//!  the key is pinned for another VM ────────────────────▶ refused: a copy, or the wrong VM
//!  no key is pinned ────────────────────────────────────▶ first contact
//!  the pinned key ──────────────────────────────────────▶ known
//!  the key that the guest has announced as its next ────▶ known, and pinned from now on
//!  the previous key, not too long ago ──────────────────▶ known: its disk was restored
//!  any other key ───────────────────────────────────────▶ refused until an administrator accepts it
//! ```

use std::time::SystemTime;

use crate::host::trust::pins::{self, Record};
use crate::trust::Fingerprint;
use crate::trust::enrollment::Token;
use crate::trust::key::PublicKey;

/// Verdict on the identity of a guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// The expected guest, with its pinned key.
    Known,
    /// The expected guest, with the next key that it had announced.
    Next,
    /// The expected guest, with its previous key.
    Previous,
    /// First contact: the identity is unknown. If there is a token, the guest has to prove that it has it.
    First(Option<Token>),
}

/// Reason why a guest is refused.
#[derive(Debug, thiserror::Error)]
pub enum Refusal {
    /// The guest presents another key than the pinned one.
    #[error(
        "the guest's key has changed: it is {found}, but {expected} is pinned; if the guest was reinstalled \
         or restored, accept it: guestctl trust accept {vm}"
    )]
    Changed {
        /// Name of the VM.
        vm: String,
        /// Fingerprint of the pinned key.
        expected: Fingerprint,
        /// Fingerprint of the presented key.
        found: Fingerprint,
    },
    /// The guest presents the key of another VM.
    #[error(
        "the guest presents the key {found}, which is that of VM {owner}: it is a clone of that VM, or the \
         agent's address in the settings is wrong"
    )]
    Owned {
        /// Fingerprint of the presented key.
        found: Fingerprint,
        /// Name of the other VM.
        owner: String,
    },
    /// The guest speaks without keys although a key is pinned for it.
    #[error(
        "the guest uses no keys, but {expected} is pinned: its agent is an older one, or its keys were \
         reset; if that is intended: guestctl trust forget {vm}"
    )]
    Downgraded {
        /// Name of the VM.
        vm: String,
        /// Fingerprint of the pinned key.
        expected: Fingerprint,
    },
    /// The guest does not know this host half.
    #[error(
        "the guest does not know this host half's key {own}; guestctl trust bootstrap {vm} says how to give it to the guest"
    )]
    Stranger {
        /// Name of the VM.
        vm: String,
        /// Fingerprint of this host half's key.
        own: Fingerprint,
    },
    /// The guest does not accept the certificate of this host half, for this reason.
    #[error("the guest does not accept the certificate of this host half: {0}")]
    Certificate(&'static str),
    /// The guest does not prove that it has the token.
    #[error(
        "the guest does not prove that it was given the token of guestctl trust bootstrap --token: {problem}; give it the token, or \
         accept its key as it is: guestctl trust accept {vm}"
    )]
    Token {
        /// Name of the VM.
        vm: String,
        /// Reason why the proof is missing or wrong.
        problem: String,
    },
    /// The guest has no keys yet, although a token was made for it.
    #[error(
        "the guest uses no keys, and is refused until it proves the token of guestctl trust bootstrap \
         --token: give it this host half's key and the token, or forget the token: guestctl trust forget \
         {vm}"
    )]
    TokenWaits {
        /// Name of the VM.
        vm: String,
    },
    /// The stored keys cannot be read or changed.
    #[error(transparent)]
    Pins(#[from] pins::Error),
}

/// Judges the key `found` of a guest with this `record`. `owner` is the name of another VM that the key is pinned
/// for, if any.
///
/// # Errors
/// If the guest is to be refused.
pub fn judge(
    record: &Record,
    found: PublicKey,
    owner: Option<String>,
    now: SystemTime,
) -> Result<Verdict, Refusal> {
    if let Some(problem) = &record.unreadable {
        return Err(pins::Error::Unreadable(problem.clone()).into());
    }
    if let Some(owner) = owner {
        return Err(Refusal::Owned { found: found.fingerprint(), owner });
    }
    let Some(pin) = &record.pin else { return Ok(Verdict::First(record.token.clone())) };
    if pin.key == found {
        return Ok(Verdict::Known);
    }
    if pin.next == Some(found) {
        return Ok(Verdict::Next);
    }
    match &pin.previous {
        Some(previous) if previous.key == found && previous.is_valid(now) => Ok(Verdict::Previous),
        _ => Err(Refusal::Changed {
            vm: pin.name.clone(),
            expected: pin.key.fingerprint(),
            found: found.fingerprint(),
        }),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::host::trust::PREVIOUS;
    use crate::host::trust::pins::{How, Pin};
    use crate::trust::key::Key;

    fn key() -> PublicKey {
        Key::generate().unwrap().public()
    }

    fn pinned(pin: Pin) -> Record {
        Record { pin: Some(pin), ..Record::default() }
    }

    #[test]
    fn only_the_pinned_key_the_next_and_for_a_while_the_one_before_open_a_session() {
        let now = SystemTime::now();
        let (old, new, other) = (key(), key(), key());
        let pin = Pin::new("web", old, How::FirstUse);
        assert_eq!(judge(&pinned(pin.clone()), old, None, now).unwrap(), Verdict::Known);
        assert!(matches!(judge(&pinned(pin.clone()), new, None, now), Err(Refusal::Changed { .. })));
        let promised = Pin { next: Some(new), ..pin };
        assert_eq!(judge(&pinned(promised.clone()), old, None, now).unwrap(), Verdict::Known);
        assert_eq!(judge(&pinned(promised.clone()), new, None, now).unwrap(), Verdict::Next);
        let rotated = pinned(promised.rotated(now));
        assert_eq!(judge(&rotated, new, None, now).unwrap(), Verdict::Known);
        assert_eq!(judge(&rotated, old, None, now).unwrap(), Verdict::Previous);
        let late = now + PREVIOUS + Duration::from_secs(1);
        assert!(matches!(judge(&rotated, old, None, late), Err(Refusal::Changed { .. })));
        assert!(matches!(judge(&rotated, other, None, now), Err(Refusal::Changed { .. })));
    }

    #[test]
    fn a_key_of_another_vm_opens_nothing_even_where_nothing_is_pinned() {
        let found = key();
        let refused = judge(&Record::default(), found, Some("db".to_owned()), SystemTime::now()).unwrap_err();
        assert!(refused.to_string().contains("that of VM db"), "{refused}");
        assert_eq!(judge(&Record::default(), found, None, SystemTime::now()).unwrap(), Verdict::First(None));
    }

    #[test]
    fn what_cannot_be_read_opens_nothing() {
        let record = Record { unreadable: Some("/x: damaged".to_owned()), ..Record::default() };
        let refused = judge(&record, key(), None, SystemTime::now()).unwrap_err().to_string();
        assert!(refused.contains("/x: damaged"), "{refused}");
    }
}
