//! How a freeze ended, for those who were not there: whoever only looks at the status never learns it from the protocol.

use std::time::SystemTime;

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

/// The last freeze; it may not be over.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LastFreeze {
    /// Who asked for it.
    pub holder: String,
    /// How many file systems were frozen; 0 if that is not known.
    pub file_systems: usize,
    /// Since when they were all frozen; absent if an earlier run of the agent had frozen them.
    pub since: Option<SystemTime>,
    /// Absent as long as they are frozen.
    pub ended: Option<Ended>,
}

/// The end of a freeze.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ended {
    /// When.
    pub at: SystemTime,
    /// What ended it.
    pub end: End,
    /// Why a snapshot of that time is not consistent, or what else is wrong; empty if all is well.
    pub problem: String,
    /// The id of its receipt, and the level in one word; empty if there is none.
    pub receipt: String,
    /// The same.
    pub level: &'static str,
}
