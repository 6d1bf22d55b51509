//! `guestlet topology`: where this guest runs, and the state of its Node's labels, for people or programs.

use std::ffi::OsString;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::bail;
use lexopt::prelude::ValueExt as _;
use prost_types::Timestamp;
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};
use tonic::Code;

use super::{DEADLINE, age, call};
use crate::text;
use crate::wire::proto::v1::{GetTopologyRequest, GetTopologyResponse, Node};

/// Pause between two attempts to reach an agent that is starting.
const AGAIN: Duration = Duration::from_millis(200);
/// Longest pause between two attempts.
const LONGEST: Duration = Duration::from_secs(600);

/// Options of the request.
#[derive(Debug, Default)]
pub struct Asked {
    /// Settings file that was named.
    pub settings: Option<PathBuf>,
    /// True for output as JSON.
    pub json: bool,
    /// Time to wait until the topology is known.
    pub wait: Option<Duration>,
    /// True to remove the labels from the configuration files of nodes that have yet to join.
    pub remove: bool,
}

/// Parses the arguments after `topology`.
///
/// # Errors
/// Fails at an unknown argument.
pub fn parse(words: &[OsString]) -> Result<Asked, lexopt::Error> {
    use lexopt::Arg::{Long, Short};
    let mut parser = lexopt::Parser::from_args(words);
    let mut asked = Asked::default();
    while let Some(word) = parser.next()? {
        match word {
            Long("settings") => asked.settings = Some(parser.value()?.into()),
            Long("remove") => asked.remove = true,
            Long("wait") => asked.wait = Some(parser.value()?.parse_with(span)?),
            Short('o') | Long("output") => {
                asked.json = match parser.value()?.string()?.as_str() {
                    "json" => true,
                    "table" => false,
                    other => return Err(format!("unknown output format {other:?}; use table or json").into()),
                }
            }
            other => return Err(other.unexpected()),
        }
    }
    Ok(asked)
}

/// Parses seconds, also as `30s` or `2min`.
fn span(text: &str) -> Result<Duration, String> {
    let seconds = match text.strip_suffix("min") {
        Some(minutes) => minutes.trim().parse::<u64>().ok().and_then(|minutes| minutes.checked_mul(60)),
        None => text.strip_suffix('s').unwrap_or(text).trim().parse().ok(),
    };
    let span =
        seconds.map(Duration::from_secs).filter(|span| (Duration::from_secs(1)..=LONGEST).contains(span));
    span.ok_or_else(|| "give a time from 1s to 10min, such as 30s".to_owned())
}

/// Requests the topology from the agent that serves the socket at `path`. With `wait`, the agent may still be
/// starting.
///
/// # Errors
/// The errors of [`ask`](super::ask); also if the topology was not known in time.
pub async fn ask(path: &Path, wait: Option<Duration>) -> anyhow::Result<GetTopologyResponse> {
    let end = wait.map(|wait| Instant::now() + wait);
    loop {
        let left = end.map(|end| end.saturating_duration_since(Instant::now()));
        let wait_milliseconds =
            left.map_or(0, |left| u32::try_from(left.as_millis()).unwrap_or(u32::MAX).max(1));
        let deadline = DEADLINE + left.unwrap_or_default();
        let asking = call(path, deadline, async |mut client| {
            match client.get_topology(GetTopologyRequest { wait_milliseconds }).await {
                Ok(answer) => Ok(Ok(answer.into_inner())),
                Err(status) => Ok(Err(status)),
            }
        });
        match asking.await {
            Ok(Ok(answer)) => return Ok(answer),
            Ok(Err(status)) if status.code() == Code::DeadlineExceeded => bail!("{}", status.message()),
            // The agent is not running yet, or is being restarted.
            _ if left.is_some_and(|left| left > AGAIN) => sleep(AGAIN).await,
            Ok(Err(status)) => bail!("the agent's answer: {}", status.message()),
            Err(error) => return Err(error),
        }
    }
}

/// Formats the answer for people.
pub fn table(answer: &GetTopologyResponse) -> String {
    let mut lines: Vec<(&str, String)> = Vec::new();
    match &answer.topology {
        None => {
            lines.push(("topology", "not known: no host half has reported it since this boot".to_owned()));
        }
        Some(topology) => {
            lines.push(("region", text::or_dash(&topology.region)));
            lines.push(("zone", text::or_dash(&topology.zone)));
            lines.push(("host", text::or_dash(&topology.host)));
            let mut labels: Vec<_> = topology.labels.iter().collect();
            labels.sort_unstable();
            lines.extend(labels.into_iter().map(|(key, value)| ("label", format!("{key}={value}"))));
            lines.push(("reported by", format!("{}, {} ago", answer.host_half, age(answer.since))));
        }
    }
    if !answer.problem.is_empty() {
        lines.push(("problem", answer.problem.clone()));
    }
    for file in &answer.files {
        let problem = if file.problem.is_empty() { String::new() } else { format!(": {}", file.problem) };
        lines.push(("written to", format!("{}{problem}", file.path)));
    }
    if let Some(node) = &answer.node {
        let reason = if node.reason.is_empty() { String::new() } else { format!(": {}", node.reason) };
        lines.push(("node", text::or_dash(&node.name)));
        lines.push(("node's labels", format!("{}{reason}", node.state)));
    }
    let mut text = String::new();
    for (name, value) in lines {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{name:<15} {value}");
    }
    text
}

/// Converts the answer to JSON for programs.
pub fn json(answer: &GetTopologyResponse) -> Value {
    let topology = answer.topology.as_ref();
    let files = answer.files.iter().map(|file| json!({ "path": file.path, "problem": file.problem }));
    json!({
        "topology": topology.map(|topology| json!({
            "region": topology.region,
            "zone": topology.zone,
            "host": topology.host,
            "labels": topology.labels,
        })),
        "host_half": answer.host_half,
        "since": answer.since.map(|since: Timestamp| since.to_string()),
        "problem": answer.problem,
        "files": files.collect::<Value>(),
        "node": answer.node.as_ref().map(node),
    })
}

fn node(node: &Node) -> Value {
    json!({
        "name": node.name,
        "state": node.state,
        "reason": node.reason,
        "ready": node.ready,
        "ready_reason": node.ready_reason,
        "labels": node.labels,
        "taints": node.taints,
        "addresses": node.addresses,
        "provider_id": node.provider_id,
        "kubelet_version": node.kubelet_version,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words() {
        let asked_of = |words: &[&str]| parse(&words.iter().map(OsString::from).collect::<Vec<_>>());
        let asked = asked_of(&["--wait", "2min", "-o", "json"]).unwrap();
        assert_eq!((asked.wait, asked.json, asked.remove), (Some(Duration::from_secs(120)), true, false));
        assert!(asked_of(&["--remove"]).unwrap().remove);
        for wrong in [&["--wait", "0"][..], &["--wait", "11min"], &["--wait", "x"], &["-o", "yaml"], &["now"]]
        {
            assert!(asked_of(wrong).is_err(), "{wrong:?}");
        }
    }
}
