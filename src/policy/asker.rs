//! Client of a command or a verb, kept for as long as the call is carried out. [`Who`] is the same for one
//! decision.

use std::fmt;
use std::sync::Arc;

use crate::policy::audit::{Id, printable};
use crate::policy::rules::Who;
use crate::trust::Peer;

/// Client that makes calls; clones are cheap.
#[derive(Debug, Clone, Default)]
pub enum Asker {
    /// A client of QGA; the rules do not tell these clients apart.
    #[default]
    Qga,
    /// A host half, on its session.
    Host(Arc<HostHalf>),
}

/// The QGA client, for code that needs a reference with the lifetime of the program.
pub static QGA: Asker = Asker::Qga;

/// Host half that makes a call, and the user that it acts for.
#[derive(Debug)]
pub struct HostHalf {
    /// Identity that the host half has proved.
    pub peer: Arc<Peer>,
    /// True if the guest was given keys of host halves.
    pub guest_has_keys: bool,
    /// User that it acts for, in its own words; empty for itself.
    pub caller: String,
    /// Identifier that the host half gave the call, for audit records.
    pub id: Option<Id>,
}

#[cfg(test)]
impl HostHalf {
    /// Creates one that has proved no key, in a guest without keys.
    pub fn unproved(caller: &str) -> Self {
        let peer = Arc::new(Peer::Plain);
        Self { peer, guest_has_keys: false, caller: caller.to_owned(), id: None }
    }
}

impl Asker {
    /// Returns the client as the rules see it.
    pub fn who(&self) -> Who<'_> {
        match self {
            Self::Qga => Who::Qga,
            Self::Host(half) => Who::peer(&half.peer, half.guest_has_keys),
        }
    }

    /// Returns the user that the client acts for; empty if unknown.
    pub fn caller(&self) -> &str {
        match self {
            Self::Qga => "",
            Self::Host(half) => &half.caller,
        }
    }

    /// Returns the identifier of the call, if the host half gave it one.
    pub fn id(&self) -> Option<Id> {
        match self {
            Self::Qga => None,
            Self::Host(half) => half.id,
        }
    }
}

impl fmt::Display for Asker {
    /// Describes the client for users, as in `the host half SHA256:… for uid:0 root`.
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.who() {
            Who::Qga => return formatter.write_str("a QGA client"),
            Who::Plain { .. } => formatter.write_str("the host half")?,
            Who::Keyed(keyed) => write!(formatter, "the host half {}", keyed.fingerprint)?,
        }
        let caller = self.caller();
        if caller.is_empty() { Ok(()) } else { write!(formatter, " for {}", printable(caller)) }
    }
}
