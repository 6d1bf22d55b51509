//! State of this run of the host half: its identity, its counters, and its audit log.

use std::io;
use std::path::Path;
use std::time::SystemTime;

use super::audit::Audit;
use super::intake::Intake;
use super::metrics::Metrics;
use super::recent::Recents;
use crate::wire::proto::v1::HostHalf;

/// State that all sessions share.
#[derive(Debug)]
pub struct Half {
    /// Identity of this run, by which guests distinguish it from other runs and other host halves.
    pub host: HostHalf,
    /// Time at which this run began.
    pub started: SystemTime,
    /// Counters of this run.
    pub metrics: Metrics,
    /// Recent metrics of guests.
    pub recent: Recents,
    /// Audit log.
    pub audit: Audit,
    /// Intake for the events of guests.
    pub intake: Intake,
}

impl Half {
    /// Creates the state of a new run on the host with this name.
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

    /// Adds a file to the audit log.
    ///
    /// # Errors
    /// If the file cannot be opened.
    pub fn with_audit_file(self, path: &Path) -> io::Result<Self> {
        let audit = Audit::with_file(&self.host.host_name, path)?;
        Ok(Self { audit, ..self })
    }
}
