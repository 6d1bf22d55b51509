//! Grants for host halves: what the agent answers to one that lacks a role, and what it writes down.

use std::path::Path;
use std::time::Instant;

use guestlet::wire::proto::v1::disk_selector::By;
use guestlet::wire::proto::v1::{
    DiskSelector, FindDiskRequest, GetInfoRequest, PingRequest, ReleaseDiskRequest, SetTopologyRequest,
};
use serde_json::Value;
use tokio_util::sync::CancellationToken;
use tonic::{Code, Request};

use crate::agent::{Agent, PATIENCE};
use crate::host::{Callback, Control, next};

fn nobody() -> DiskSelector {
    DiskSelector { by: Some(By::Serial("nobody-has-this-serial-number".to_owned())) }
}

fn release() -> ReleaseDiskRequest {
    ReleaseDiskRequest { disk: Some(nobody()) }
}

/// The records in a file, as soon as there are so many.
async fn records(file: &Path, count: usize) -> Vec<Value> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let text = std::fs::read_to_string(file).unwrap_or_default();
        let records: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        if records.len() >= count {
            return records;
        }
        assert!(Instant::now() < deadline, "{records:#?}");
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    }
}

#[tokio::test]
async fn a_host_half_with_status_alone_has_a_session_and_is_told_what_to_add_for_more() {
    let agent = Agent::start_set(&[], "[[grant]]\nhost = 'plain'\nroles = ['status']\n");
    let folder = agent.folder.path();
    let control = Control::dial(folder).await;
    let mut client = control.client.clone();
    client.get_info(GetInfoRequest {}).await.unwrap();
    client.ping(PingRequest::default()).await.unwrap();
    let mut events = control.watch("first", None).await.unwrap();
    next(&mut events).await;
    let find = FindDiskRequest { disk: Some(nobody()), wait_milliseconds: 0 };
    for (refused, role) in [
        (client.find_disk(find).await.unwrap_err(), "disks"),
        (client.release_disk(release()).await.unwrap_err(), "disks"),
        (client.set_topology(SetTopologyRequest::default()).await.unwrap_err(), "topology"),
    ] {
        assert_eq!(refused.code(), Code::PermissionDenied);
        assert_eq!(
            refused.message(),
            format!(
                "no grant gives the role {role} to a host half without a key; add a [[grant]] with host = \"plain\" and \
                 roles = [\"{role}\"] to /etc/guestlet/agent.d"
            )
        );
    }
    let mut callback = Callback::dial(folder, "first", CancellationToken::new()).await;
    assert_eq!(callback.ended().await, Code::PermissionDenied);
    client.ping(PingRequest::default()).await.unwrap();
    assert!(agent.log().contains("audit: the host half: FindDisk: denied: no grant gives the role disks"));
}

#[tokio::test]
async fn a_grant_for_keys_leaves_a_host_half_without_one_as_it_was() {
    let agent = Agent::start_set(&[], "[[grant]]\nhost = '*'\nroles = ['freeze']\n[trust]\nplain = []\n");
    let control = Control::dial(agent.folder.path()).await;
    control.client.clone().release_disk(release()).await.unwrap();
}

#[tokio::test]
async fn a_record_has_the_number_and_the_caller_that_the_host_half_says() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let agent = Agent::start_set(&[], &format!("[audit]\nfile = '{}'\n", file.path().display()));
    let control = Control::dial(agent.folder.path()).await;
    let mut client = control.client.clone();
    let id = "00112233445566778899aabbccddeeff";
    let mut request = Request::new(release());
    request.metadata_mut().insert("guestlet-caller", "uid:1000 alice".parse().unwrap());
    request.metadata_mut().insert("guestlet-audit-id", id.parse().unwrap());
    client.release_disk(request).await.unwrap();
    let mut request = Request::new(SetTopologyRequest::default());
    request.metadata_mut().insert("guestlet-audit-id", "not a number".parse().unwrap());
    client.set_topology(request).await.unwrap_err();
    client.ping(PingRequest::default()).await.unwrap();
    let records = records(file.path(), 2).await;
    assert_eq!(records.len(), 2, "{records:#?}");
    for (key, value) in [
        ("id", id),
        ("host", "plain"),
        ("caller", "uid:1000 alice"),
        ("role", "disks"),
        ("verb", "ReleaseDisk"),
        ("subject", "the serial number \"nobody-has-this-serial-number\""),
        ("decision", "allowed"),
        ("result", "done"),
    ] {
        assert_eq!(records[0][key], value, "{key}");
    }
    assert!(records[0]["duration_usec"].is_u64());
    assert_ne!(records[1]["id"], "not a number");
    assert_eq!(records[1]["result"], "only the host half that holds this guest may set where it runs");
    assert!(agent.log().contains("audit: the host half for uid:1000 alice: ReleaseDisk (the serial number"));
}

#[tokio::test]
async fn in_the_mode_audit_all_passes_and_what_would_be_denied_is_written_down() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let settings = format!(
        "[policy]\nmode = 'audit'\n[audit]\nfile = '{}'\n[[grant]]\nhost = 'plain'\nroles = ['freeze']\n",
        file.path().display()
    );
    let agent = Agent::start_set(&[], &settings);
    let control = Control::dial(agent.folder.path()).await;
    control.client.clone().release_disk(release()).await.unwrap();
    let records = records(file.path(), 1).await;
    assert_eq!((&records[0]["decision"], &records[0]["result"]), (&"would-deny".into(), &"done".into()));
    assert!(records[0]["reason"].as_str().unwrap().contains("no grant gives the role disks"));
}

/// A caller in words that nobody may use is refused, and nothing is done.
#[tokio::test]
async fn a_caller_that_is_too_long_is_refused() {
    let agent = Agent::start();
    let control = Control::dial(agent.folder.path()).await;
    let mut request = Request::new(PingRequest::default());
    request.metadata_mut().insert("guestlet-caller", "x".repeat(257).parse().unwrap());
    let refused = control.client.clone().ping(request).await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument);
}
