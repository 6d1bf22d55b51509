//! `guestlet doctor`: says in plain words what works in this guest, what is missing, and what to do.
//!
//! It looks at files below a root and at what the running agent answers, and changes nothing. Each part looks at one
//! thing: `agent` the program and its settings, `channels` how it is reached, `surroundings` what else matters in
//! the guest. To add a check: a function in one of them, and its line in [`examine`].

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

/// What the running agent says.
#[derive(Debug, Clone, Default)]
pub struct Answer {
    /// Its process, as the kernel tells it.
    pub process: Option<i32>,
    /// How it is.
    pub status: Status,
    /// Its disks and their rules.
    pub disks: ListDisksResponse,
}

/// What is known before anything is looked at.
#[derive(Debug)]
pub struct Patient<'a> {
    /// Where files are read.
    pub root: &'a Root,
    /// The settings, or why they are wrong.
    pub settings: Result<&'a AgentSettings, &'a config::Error>,
    /// What the agent answers, or why it does not.
    pub answer: Result<&'a Answer, String>,
}

/// Asks the agent that serves the socket at `path`.
///
/// # Errors
/// In words for people, as [`status::ask`].
pub async fn ask(path: &Path) -> anyhow::Result<Answer> {
    let status = status::ask(path).await?;
    let disks = status::disks::ask(path).await?;
    let process = tokio::net::UnixStream::connect(path).await.ok();
    let process = process.and_then(|stream| stream.peer_cred().ok()?.pid());
    Ok(Answer { process, status, disks })
}

/// Everything that is to be said, most important first.
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
