//! State of the settings, for display. The assembly reads and applies them.

use std::path::PathBuf;
use std::time::SystemTime;

/// Settings in force, and any problem with newer ones.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Standing {
    /// Main file of the settings.
    pub file: PathBuf,
    /// Time since which they are in force.
    pub since: SystemTime,
    /// Reason why newer settings are not in force, or which of them take effect only after a restart.
    pub problem: Option<String>,
}

impl Standing {
    /// Creates the state of settings that are in force from now on.
    pub fn new(file: PathBuf) -> Self {
        Self { file, since: SystemTime::now(), problem: None }
    }
}
