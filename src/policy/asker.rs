//! Who asks for a command or a verb, held for as long as that is carried out. [`Who`] is the same for one decision.

use std::fmt;
use std::sync::Arc;

use crate::policy::audit::{Id, printable};
use crate::policy::rules::Who;
use crate::trust::Peer;

/// Asks for something; clones are cheap.
#[derive(Debug, Clone, Default)]
pub enum Asker {
    /// A client of QGA. All of them are one to the rules.
    #[default]
    Qga,
    /// A host half, on its session.
    Host(Arc<HostHalf>),
}

/// A client of QGA, for whoever needs one for long.
pub static QGA: Asker = Asker::Qga;

/// A host half that asks, and for whom.
#[derive(Debug)]
pub struct HostHalf {
    /// What it has proved.
    pub peer: Arc<Peer>,
    /// The guest was given keys of host halves.
    pub guest_has_keys: bool,
    /// For whom it asks, in its words; empty for itself.
    pub caller: String,
    /// Its number of the call in audit records.
    pub id: Option<Id>,
}

#[cfg(test)]
impl HostHalf {
    /// One that has proved nothing, in a guest without keys.
    pub fn unproved(caller: &str) -> Self {
        let peer = Arc::new(Peer::Plain);
        Self { peer, guest_has_keys: false, caller: caller.to_owned(), id: None }
    }
}

impl Asker {
    /// As the rules know it.
    pub fn who(&self) -> Who<'_> {
        match self {
            Self::Qga => Who::Qga,
            Self::Host(half) => Who::peer(&half.peer, half.guest_has_keys),
        }
    }

    /// For whom it asks; empty where nobody says.
    pub fn caller(&self) -> &str {
        match self {
            Self::Qga => "",
            Self::Host(half) => &half.caller,
        }
    }

    /// The number of the call, if the host half gave it one.
    pub fn id(&self) -> Option<Id> {
        match self {
            Self::Qga => None,
            Self::Host(half) => half.id,
        }
    }
}

impl fmt::Display for Asker {
    /// For people, as in `the host half SHA256:… for uid:0 root`.
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
