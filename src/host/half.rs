//! This run of the host half: its name to guests, its counters, and where it is recorded who did what.

use std::io;
use std::path::Path;
use std::time::SystemTime;

use super::audit::Audit;
use super::intake::Intake;
use super::metrics::Metrics;
use super::recent::Recents;
use crate::wire::proto::v1::HostHalf;

/// What every session shares.
#[derive(Debug)]
pub struct Half {
    /// How guests know this run from any other.
    pub host: HostHalf,
    /// When it began.
    pub started: SystemTime,
    /// What it counts.
    pub metrics: Metrics,
    /// What is kept of what guests have measured.
    pub recent: Recents,
    /// Where it records who did what.
    pub audit: Audit,
    /// Lets in what guests say.
    pub intake: Intake,
}

impl Half {
    /// A new run on the host of this name.
    pub fn new(host_name: String) -> Self {
        let instance_id = format!("{:032x}", fastrand::u128(..));
        Self {
            audit: Audit::new(&host_name),
            host: HostHalf { instance_id, host_name },
            started: SystemTime::now(),
            metrics: Metrics::default(),
            recent: Recents::default(),
            intake: Intake::default(),
        }
    }

    /// The same run, which records who did what in a file as well.
    ///
    /// # Errors
    /// If that cannot be opened.
    pub fn with_audit_file(self, path: &Path) -> io::Result<Self> {
        let audit = Audit::with_file(&self.host.host_name, path)?;
        Ok(Self { audit, ..self })
    }
}
