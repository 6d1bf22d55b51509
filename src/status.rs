//! `guestlet status`: requests the status of the running agent, and shows it to people or programs. [`disks`]
//! is `guestlet disks`, [`topology`] `guestlet topology`.

pub mod disks;
pub mod topology;

use std::fmt::Write as _;
use std::io;
use std::path::Path;
use std::time::{Duration, SystemTime};

use anyhow::{Context as _, bail};
use prost_types::Timestamp;
use serde_json::{Value, json};
use tokio::net::UnixStream;
use tonic::Code;

use crate::text;
use crate::transport::http2::{self, ORIGIN};
use crate::wire::proto::v1::local_client::LocalClient;
use crate::wire::proto::v1::{FreezeStatus, GetStatusRequest, ResetKeysRequest, Status, ThawRequest};

/// Timeout for the agent's answer.
const DEADLINE: Duration = Duration::from_secs(5);

/// Timeout for a thaw and its hooks.
const THAW_DEADLINE: Duration = Duration::from_secs(180);

/// Timeout for the removal of the agent's key files, each of which has to be removed from the disk as well.
const RESET_DEADLINE: Duration = Duration::from_secs(60);

/// Requests the status of the agent that serves the socket at `path`.
///
/// # Errors
/// Fails with a message for people: the agent is not running, the caller is not root, or there is no answer.
pub async fn ask(path: &Path) -> anyhow::Result<Status> {
    call(path, DEADLINE, async |mut client| Ok(client.get_status(GetStatusRequest {}).await?.into_inner()))
        .await
}

/// Requests the agent that serves the socket at `path` to thaw all file systems; returns how many were
/// frozen.
///
/// # Errors
/// Fails with a message for people, as [`ask`] does, or with the message of the agent.
pub async fn thaw(path: &Path) -> anyhow::Result<u64> {
    call(path, THAW_DEADLINE, async |mut client| match client.thaw(ThawRequest {}).await {
        Ok(answer) => Ok(answer.into_inner().thawed),
        Err(status) => bail!("{}", status.message()),
    })
    .await
}

/// Requests the agent that serves the socket at `path` to forget its keys. Returns whether something still
/// supplies it with keys; `None` if no agent is running.
///
/// # Errors
/// Fails with a message for people, as [`ask`] does, or with the message of the agent.
pub async fn reset_keys(path: &Path) -> anyhow::Result<Option<bool>> {
    match UnixStream::connect(path).await {
        Err(error) if is_not_running(&error) => return Ok(None),
        // The call reports any other error.
        _ => {}
    }
    let reset = call(path, RESET_DEADLINE, async |mut client| {
        match client.reset_keys(ResetKeysRequest {}).await {
            Ok(answer) => Ok(answer.into_inner().keyed),
            Err(status) if status.code() == Code::Unimplemented => bail!(
                "the running agent is of an earlier version; restart it (systemctl restart guestlet) and try again"
            ),
            Err(status) => bail!("{}", status.message()),
        }
    });
    reset.await.map(Some)
}

fn is_not_running(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused)
}

async fn call<T>(
    path: &Path,
    deadline: Duration,
    ask: impl AsyncFnOnce(LocalClient<http2::Client>) -> anyhow::Result<T>,
) -> anyhow::Result<T> {
    let (client, mut connection) = dial(path).await?;
    let asking = async {
        tokio::select! {
            answer = ask(client) => answer,
            _ = connection.ended() => bail!("the agent closed the connection"),
        }
    };
    tokio::time::timeout(deadline, asking)
        .await
        .with_context(|| format!("the agent does not answer within {} s", deadline.as_secs()))?
}

/// Connects to the agent. Separate from [`call`], so that this code is not compiled once for each kind of
/// answer.
async fn dial(path: &Path) -> anyhow::Result<(LocalClient<http2::Client>, http2::Connection)> {
    let stream = match UnixStream::connect(path).await {
        Ok(stream) => stream,
        Err(error) => match error.kind() {
            _ if is_not_running(&error) => bail!(
                "the agent is not running (nobody answers at {}); start it with: systemctl start guestlet",
                path.display()
            ),
            io::ErrorKind::PermissionDenied => bail!("{}: only root may ask the agent", path.display()),
            _ => return Err(error).with_context(|| format!("cannot connect to {}", path.display())),
        },
    };
    // The agent's part of the handshake is not awaited here.
    let (client, connection) = http2::connect(stream).await?;
    Ok((LocalClient::with_origin(client, http::Uri::from_static(ORIGIN)), connection))
}

/// Formats the answer for people.
pub fn table(status: &Status) -> String {
    let mut lines: Vec<(&str, String)> = Vec::new();
    let guest = status.guest.clone().unwrap_or_default();
    lines.push(("agent", format!("guestlet {}, up {}", guest.agent_version, age(status.started))));
    lines.push(("guest", format!("{} (machine id {})", guest.host_name, guest.machine_id)));
    lines.push(("QGA clients", status.qga_channel.clone()));
    lines.push(("control", status.control_channel.clone()));
    lines.push((
        "host",
        match &status.host {
            None => "no host half holds this guest".to_owned(),
            Some(host) => format!("{}, for {}", host.host_name, age(status.held_since)),
        },
    ));
    if let Some(identity) = &status.identity {
        let mut name = identity.vm_name.clone();
        if !identity.namespace.is_empty() {
            name = format!("{}/{name}", identity.namespace);
        }
        lines.push(("known there as", format!("{name} ({})", identity.provider_id)));
        if !identity.cluster.is_empty() {
            lines.push(("cluster", identity.cluster.clone()));
        }
    } else if status.host.is_some() {
        let why = "not known: this host half accepts no requests from this guest (it is of an earlier \
                   release, or the guest's grants give it no role for them)";
        lines.push(("known there as", why.to_owned()));
    }
    lines.push(("freeze", freeze_words(&status.freeze.clone().unwrap_or_default())));
    for program in &status.programs {
        let state = if program.ended.is_some() { "ended" } else { "runs" };
        let words = format!("{} {state} as {}: {}", program.id, program.user, program.command);
        lines.push(("program", words));
    }
    for forwarded in &status.forwarded {
        let count = forwarded.connections;
        let connections = if count == 1 { "connection" } else { "connections" };
        lines.push(("forwarding", format!("{count} {connections} of {}", forwarded.caller)));
    }
    for file in &status.partial_files {
        let words = format!("{}: {} so far", file.path.escape_debug(), text::size(file.size));
        lines.push(("partial file", words));
    }
    let position = status.position.clone().unwrap_or_default();
    lines.push(("events", position.sequence.to_string()));
    let state = status.state.clone().unwrap_or_default();
    for interface in &state.interfaces {
        let running = if interface.running { "" } else { " (down)" };
        lines.push(("interface", format!("{}{running} {}", interface.name, interface.addresses.join(" "))));
    }
    for mounted in &state.file_systems {
        lines
            .push(("mounted", format!("{} on {} ({})", mounted.source, mounted.mount_point, mounted.r#type)));
    }
    for user in &state.users {
        lines.push(("user", format!("{} {}", user.user, user.terminal)));
    }
    let mut text = String::new();
    for (name, value) in lines {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{name:<15} {}", value.trim_end());
    }
    text
}

fn freeze_words(freeze: &FreezeStatus) -> String {
    if freeze.stage == "thawed" && freeze.spoiled.is_empty() {
        return "nothing is frozen".to_owned();
    }
    if freeze.stage == "thawed" {
        return format!("nothing is frozen; {}, which its client has not been told yet", freeze.spoiled);
    }
    let mut words = format!("{}, for {}, since {}", freeze.stage, freeze.holder, age(freeze.since));
    if let Some(left) = freeze.seconds_left {
        // Writing to a string cannot fail.
        let _ = write!(words, "; thaws by itself in {left}s (guestlet thaw does it now)");
    }
    if !freeze.file_systems.is_empty() {
        words = words + ": " + &freeze.file_systems.join(" ");
    }
    words
}

/// Converts the answer to JSON for programs.
pub fn json(status: &Status) -> Value {
    let guest = status.guest.clone().unwrap_or_default();
    let state = status.state.clone().unwrap_or_default();
    let position = status.position.clone().unwrap_or_default();
    json!({
        "agent_version": guest.agent_version,
        "started": time(status.started),
        "machine_id": guest.machine_id,
        "boot_id": guest.boot_id,
        "dmi_uuid": guest.dmi_uuid,
        "host_name": guest.host_name,
        "channels": {
            "qga": status.qga_channel,
            "control": status.control_channel,
        },
        "host": status.host.as_ref().map(|host| json!({
            "instance_id": host.instance_id,
            "host_name": host.host_name,
            "since": time(status.held_since),
        })),
        "identity": status.identity.as_ref().map(|identity| json!({
            "vm_name": identity.vm_name,
            "namespace": identity.namespace,
            "vm_uid": identity.vm_uid,
            "cluster": identity.cluster,
            "provider_id": identity.provider_id,
        })),
        "programs": status.programs.iter().map(|program| json!({
            "id": program.id,
            "process_id": program.process_id,
            "user": program.user,
            "command": program.command,
            "is_attached": program.is_attached,
            "has_ended": program.ended.is_some(),
        })).collect::<Vec<_>>(),
        "forwarding": status.forwarded.iter().map(|forwarded| json!({
            "caller": forwarded.caller,
            "connections": forwarded.connections,
        })).collect::<Vec<_>>(),
        "partial_files": status.partial_files.iter().map(|file| json!({
            "id": file.id,
            "path": file.path,
            "size": file.size,
            "since": time(file.since),
        })).collect::<Vec<_>>(),
        "freeze": status.freeze.as_ref().map(|freeze| json!({
            "stage": freeze.stage,
            "holder": freeze.holder,
            "since": time(freeze.since),
            "file_systems": freeze.file_systems,
            "seconds_left": freeze.seconds_left,
            "spoiled": freeze.spoiled,
        })),
        "events": { "run_id": position.run_id, "sequence": position.sequence },
        "interfaces": state.interfaces.iter().map(|interface| json!({
            "name": interface.name,
            "hardware_address": interface.hardware_address,
            "running": interface.running,
            "addresses": interface.addresses,
        })).collect::<Vec<_>>(),
        "file_systems": state.file_systems.iter().map(|mounted| json!({
            "mount_point": mounted.mount_point,
            "source": mounted.source,
            "type": mounted.r#type,
        })).collect::<Vec<_>>(),
        "users": state.users.iter().map(|user| json!({
            "id": user.id,
            "user": user.user,
            "terminal": user.terminal,
            "remote_host": user.remote_host,
        })).collect::<Vec<_>>(),
    })
}

/// Formats a time by RFC 3339; `None` becomes null.
fn time(time: Option<Timestamp>) -> Option<String> {
    time.map(|time| time.to_string())
}

/// Returns how long ago a time was, such as `3m12s`.
fn age(time: Option<Timestamp>) -> String {
    let time = time.and_then(|time| SystemTime::try_from(time).ok());
    let Some(age) = time.and_then(|time| time.elapsed().ok()) else { return "an unknown time".to_owned() };
    let seconds = age.as_secs();
    match (seconds / 86400, seconds / 3600 % 24, seconds / 60 % 60, seconds % 60) {
        (0, 0, 0, seconds) => format!("{seconds}s"),
        (0, 0, minutes, seconds) => format!("{minutes}m{seconds:02}s"),
        (0, hours, minutes, _) => format!("{hours}h{minutes:02}m"),
        (days, hours, ..) => format!("{days}d{hours:02}h"),
    }
}
