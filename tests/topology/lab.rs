//! An agent, and the host half that holds it.

use std::path::PathBuf;
use std::process::{Command, Output};

use guestlet::wire::proto::v1::{Event, SetTopologyRequest, Topology, event::Kind};
use serde_json::Value;
use tonic::{Status, Streaming};

use crate::agent::{Agent, PATIENCE};
use crate::host::{Control, next};

/// A host half that holds the guest.
pub struct Holder {
    control: Control,
    instance: String,
    events: Streaming<Event>,
}

impl Holder {
    /// Takes the guest.
    pub async fn take(agent: &Agent, instance: &str) -> Self {
        let control = Control::dial(agent.folder.path()).await;
        let events = control.watch(instance, None).await.unwrap();
        let mut holder = Self { control, instance: instance.to_owned(), events };
        holder.until(|kind| matches!(kind, Kind::AgentReady(_)).then_some(())).await;
        holder
    }

    /// Says where the guest runs.
    pub async fn tell(&self, topology: Topology) -> Result<(), Status> {
        self.tell_as(&self.instance, topology).await
    }

    /// The same, as some host half.
    pub async fn tell_as(&self, instance: &str, topology: Topology) -> Result<(), Status> {
        let request = SetTopologyRequest { host_instance_id: instance.to_owned(), topology: Some(topology) };
        self.control.client.clone().set_topology(request).await.map(drop)
    }

    /// The next event that is wanted; others may come for ever.
    pub async fn until<T>(&mut self, wanted: impl Fn(&Kind) -> Option<T>) -> T {
        let found = async {
            loop {
                let event = next(&mut self.events).await;
                if let Some(found) = event.kind.as_ref().and_then(&wanted) {
                    return found;
                }
            }
        };
        tokio::time::timeout(PATIENCE, found).await.expect("the event comes")
    }
}

/// Region `eu` and this zone, on the host `h-<zone>`.
pub fn zone(zone: &str) -> Topology {
    Topology { region: "eu".into(), zone: zone.into(), host: format!("h-{zone}"), ..Topology::default() }
}

/// `guestlet topology` with these words.
pub fn ask_command(agent: &Agent, words: &[&str]) -> Command {
    let mut command = crate::agent::launch::guestlet();
    command.arg("topology").args(words).arg("--settings").arg(agent.folder.path().join("agent.toml"));
    command
}

pub fn ask(agent: &Agent, words: &[&str]) -> Output {
    ask_command(agent, words).output().unwrap()
}

/// What `guestlet topology` tells programs.
pub fn told(agent: &Agent) -> Value {
    let output = ask(agent, &["-o", "json"]);
    assert!(output.status.success(), "{output:?}");
    serde_json::from_slice(&output.stdout).unwrap()
}

pub fn file(agent: &Agent) -> PathBuf {
    agent.folder.path().join("topology.json")
}
