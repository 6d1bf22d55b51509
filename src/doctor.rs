//! `guestlet doctor`: reports in plain words what works in this guest, what is missing, and what to do.
//!
//! It examines files below a root and the answer of the running agent, and changes nothing. Each part has one
//! subject: `agent` the program and its settings, `channels` how it is reached, `surroundings` what else
//! matters in the guest. To add a check: a function in one of them, and its line in [`examine`].

mod agent;
mod channels;
mod surroundings;

use std::path::Path;

use crate::config;
use crate::config::agent::AgentSettings;
use crate::status;
use crate::sys::root::Root;
use crate::text::findings::Finding;
use crate::wire::proto::v1::{ListDisksResponse, Status};

/// Answer of the running agent.
#[derive(Debug, Clone, Default)]
pub struct Answer {
    /// Process ID of the agent, as the kernel reports it for the socket.
    pub process: Option<i32>,
    /// Status of the agent.
    pub status: Status,
    /// Disks and their rules.
    pub disks: ListDisksResponse,
}

/// Input of the checks.
#[derive(Debug)]
pub struct Patient<'a> {
    /// Root of the file system that files are read from.
    pub root: &'a Root,
    /// Settings, or the error in them.
    pub settings: Result<&'a AgentSettings, &'a config::Error>,
    /// Answer of the agent, or the reason why there is none.
    pub answer: Result<&'a Answer, String>,
}

/// Calls the agent that serves the socket at `path`.
///
/// # Errors
/// Fails with a message for people, as [`status::ask`] does.
pub async fn ask(path: &Path) -> anyhow::Result<Answer> {
    let status = status::ask(path).await?;
    let disks = status::disks::ask(path).await?;
    let process = tokio::net::UnixStream::connect(path).await.ok();
    let process = process.and_then(|stream| stream.peer_cred().ok()?.pid());
    Ok(Answer { process, status, disks })
}

/// Returns all findings, the most important first.
pub fn examine(patient: &Patient<'_>) -> Vec<Finding> {
    let mut findings = vec![agent::settings(patient), agent::running(patient)];
    findings.extend(agent::namespace(patient));
    findings.extend(agent::privileges(patient));
    findings.extend(channels::qga(patient));
    findings.extend(channels::commands(patient));
    findings.extend(channels::grants(patient));
    findings.extend(channels::vsock(patient));
    findings.extend(channels::host(patient));
    findings.extend(surroundings::freeze(patient));
    findings.extend(surroundings::disk_rules(patient));
    findings.extend(surroundings::other_agent(patient));
    findings.push(surroundings::kubelet(patient));
    findings.push(surroundings::confinement(patient));
    findings
}
