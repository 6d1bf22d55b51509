//! End of a freeze, for clients that did not see it: one that only reads the status cannot learn it from the
//! protocol.

use serde::{Deserialize, Serialize};

/// Ways in which a freeze ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum End {
    /// A client requested the thaw.
    Asked,
    /// No thaw was requested until the deadline.
    Deadline,
    /// A person in the guest ran `guestlet thaw`.
    Person,
    /// The agent ended before the freeze did.
    Crash,
    /// The agent did not thaw at the deadline, so its guardian did.
    Hang,
    /// The file systems were never all frozen at one time: a hook or the kernel refused, the time was up, or a thaw
    /// was requested meanwhile.
    Failed,
}

impl End {
    /// Returns the end in one word, as used in the API and in files.
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

/// Reason why a freeze is no basis for a consistent snapshot. Kept until a client that requests a thaw has been
/// told.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Spoiled {
    /// End of the freeze.
    pub end: End,
    /// Client that had requested the freeze.
    pub holder: String,
    /// Description of the end, such as `the freeze ended by itself after 120 s`.
    pub reason: String,
    /// True once the agent has sent the event about it.
    #[serde(default)]
    pub told: bool,
    /// ID of the receipt; empty if there is none.
    #[serde(default)]
    pub receipt: String,
}
