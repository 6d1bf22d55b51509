//! How the settings are, as people are told. Who reads and applies them is the assembly.

use std::path::PathBuf;
use std::time::SystemTime;

/// The settings in force, and what keeps newer ones from it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Standing {
    /// Their main file.
    pub file: PathBuf,
    /// Since when they are in force.
    pub since: SystemTime,
    /// Why the newest are not, or what of them waits for a restart.
    pub problem: Option<String>,
}

impl Standing {
    /// In force from now on.
    pub fn new(file: PathBuf) -> Self {
        Self { file, since: SystemTime::now(), problem: None }
    }
}
