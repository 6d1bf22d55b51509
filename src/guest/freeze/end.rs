//! How a freeze ended, for those who were not there: whoever only looks at the status never learns it from the protocol.

use serde::{Deserialize, Serialize};

/// What ended a freeze.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum End {
    /// A client asked for the thaw.
    Asked,
    /// Nobody had asked for it until the deadline.
    Deadline,
    /// A person in the guest: `guestlet thaw`.
    Person,
    /// The agent ended before the freeze did.
    Crash,
    /// The agent did not thaw at the deadline, and its guardian did.
    Hang,
    /// Not everything was frozen at one time: a hook or the kernel refused, it took too long, or somebody thawed meanwhile.
    Failed,
}

impl End {
    /// One word, as the API and the files have it.
    pub fn word(self) -> &'static str {
        match self {
            Self::Asked => "asked",
            Self::Deadline => "deadline",
            Self::Person => "person",
            Self::Crash => "crash",
            Self::Hang => "hang",
            Self::Failed => "failed",
        }
    }
}

/// Why a freeze is no ground for a consistent snapshot, until somebody who asks for a thaw is told.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Spoiled {
    /// What ended it.
    pub end: End,
    /// Who had asked for it.
    pub holder: String,
    /// The same in words, such as `the freeze ended by itself after 120 s`.
    pub reason: String,
    /// The agent has told everybody who watches its events.
    #[serde(default)]
    pub told: bool,
    /// The id of its receipt; empty if there is none.
    #[serde(default)]
    pub receipt: String,
}
