//! Service `guestlet.v1.Local`: information of the agent for users in the guest.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::sync::watch;
use tokio::time::timeout;
use tonic::{Request, Response, Status};

use crate::copies::records::{Left, Records};
use crate::guest::disks::identity::KnownDisk;
use crate::guest::disks::uses;
use crate::guest::topology::{Standing, drop_ins};
use crate::guest::{Guest, disk_rules, freeze};
use crate::rpc::guest;
use crate::rpc::holder::Holder;
use crate::rpc::keys::Keys;
use crate::rpc::{convert, exec};
use crate::sys::{blocking, error_chain, files};
use crate::wire::proto::v1;
use crate::wire::proto::v1::local_server::{self, LocalServer};

/// Disks that a rule does not mean, with the reason: the first so many.
const MOST_OTHERS: usize = 64;

/// Timeout for listing the leftover files of interrupted copies, because a disk may hang.
const PARTIAL_FILES: Duration = Duration::from_secs(2);
/// Milliseconds for which a topology is waited for.
const MAX_WAIT: u32 = 600_000;

/// Descriptions of where the agent listens for QGA clients and for the host half.
#[derive(Debug, Clone)]
pub struct Channels {
    /// Channel for QGA clients.
    pub qga: String,
    /// The control channel, as it is now.
    pub control: watch::Receiver<String>,
}

/// Saves the identity that the host half assigns to this guest, for programs in the guest, in `identity.json`
/// in `folder`.
///
/// # Errors
/// If the file cannot be written.
pub fn remember(identity: &v1::WhoAmIResponse, folder: &Path) -> io::Result<()> {
    let text = serde_json::json!({
        "vm_name": identity.vm_name,
        "namespace": identity.namespace,
        "vm_uid": identity.vm_uid,
        "cluster": identity.cluster,
        "provider_id": identity.provider_id,
        "max_volumes": identity.max_volumes,
        "host_name": identity.host.as_ref().map(|host| host.host_name.as_str()),
    });
    files::replace(&folder.join("identity.json"), format!("{text:#}\n").as_bytes())
}

/// Reads the identity that [`remember`] has saved in `folder`, if there is one; it has only the name of the
/// host half.
pub fn remembered(folder: &Path) -> Option<v1::WhoAmIResponse> {
    let kept: serde_json::Value =
        serde_json::from_slice(&files::read(&folder.join("identity.json"))?).ok()?;
    let text = |key: &str| kept.get(key).and_then(serde_json::Value::as_str).unwrap_or_default().to_owned();
    let host_name = text("host_name");
    let max_volumes = kept.get("max_volumes").and_then(serde_json::Value::as_u64).unwrap_or_default();
    Some(v1::WhoAmIResponse {
        host: (!host_name.is_empty()).then(|| v1::HostHalf { host_name, ..v1::HostHalf::default() }),
        vm_name: text("vm_name"),
        namespace: text("namespace"),
        vm_uid: text("vm_uid"),
        cluster: text("cluster"),
        provider_id: text("provider_id"),
        max_volumes: u32::try_from(max_volumes).unwrap_or(u32::MAX),
    })
}

/// Implementation of the gRPC service.
#[derive(Debug, Clone)]
pub struct Service {
    guest: Guest,
    api: guest::Service,
    holder: Holder,
    channels: Channels,
    keys: Keys,
    /// Records of interrupted copies.
    records: Records,
    started: SystemTime,
}

impl Service {
    /// A service of an agent that has started now.
    pub fn new(
        guest: Guest,
        api: guest::Service,
        holder: Holder,
        channels: Channels,
        keys: Keys,
        records: Records,
    ) -> Self {
        Self { guest, api, holder, channels, keys, records, started: SystemTime::now() }
    }

    /// The service as HTTP/2 serves it.
    pub fn into_server(self) -> LocalServer<Self> {
        LocalServer::new(self)
    }
}

fn partial_file(left: Left) -> v1::PartialFile {
    let path = left.path.to_string_lossy().into_owned();
    v1::PartialFile { path, size: left.size, since: Some(left.since.into()), id: left.id }
}

#[tonic::async_trait]
impl local_server::Local for Service {
    async fn get_status(&self, _: Request<v1::GetStatusRequest>) -> Result<Response<v1::Status>, Status> {
        let held = self.holder.held();
        let (position, state) = self.guest.events.state();
        let records = self.records.clone();
        let left = timeout(PARTIAL_FILES, blocking::run(move || records.list())).await;
        Ok(Response::new(v1::Status {
            guest: Some(self.api.info().await?),
            started: Some(self.started.into()),
            qga_channel: self.channels.qga.clone(),
            control_channel: self.channels.control.borrow().clone(),
            host: held.as_ref().map(|held| held.host.clone()),
            held_since: held.as_ref().map(|held| held.since.into()),
            identity: held.and_then(|held| held.identity),
            position: Some(convert::position(position)),
            state: Some(convert::state(state)),
            freeze: Some(freeze_status(self.guest.freezer.status())),
            programs: self.guest.programs.list(None).into_iter().map(exec::program).collect(),
            forwarded: self.guest.forwards.standing().into_iter().map(forwarded).collect(),
            partial_files: left.unwrap_or_default().into_iter().map(partial_file).collect(),
        }))
    }

    async fn list_disks(
        &self,
        _: Request<v1::ListDisksRequest>,
    ) -> Result<Response<v1::ListDisksResponse>, Status> {
        guest::may_work()?;
        let (disks, root) = (self.guest.disks.all(), self.guest.root.clone());
        let list = move || {
            let local = |disk: &Arc<KnownDisk>| v1::LocalDisk {
                disk: Some(convert::disk(disk)),
                uses: uses::of(&root, disk).iter().map(ToString::to_string).collect(),
            };
            disks.iter().map(local).collect()
        };
        let told = self.guest.disk_rules.told();
        Ok(Response::new(v1::ListDisksResponse {
            disks: blocking::run(list).await,
            rules: told.rules.iter().map(disk_rule).collect(),
            rules_problem: told.problem.clone().unwrap_or_default(),
        }))
    }

    async fn get_topology(
        &self,
        request: Request<v1::GetTopologyRequest>,
    ) -> Result<Response<v1::GetTopologyResponse>, Status> {
        let wait = Duration::from_millis(request.into_inner().wait_milliseconds.min(MAX_WAIT).into());
        let mut changes = self.guest.topology.changes();
        if !wait.is_zero() && timeout(wait, changes.wait_for(Standing::is_settled)).await.is_err() {
            return Err(Status::deadline_exceeded("no host half has told this guest in time where it runs"));
        }
        let Standing { known, problem, files, node, .. } = self.guest.topology.standing();
        let file = |file: &drop_ins::Outcome| v1::NodeLabelFile {
            path: file.path.display().to_string(),
            problem: file.problem.clone().unwrap_or_default(),
        };
        Ok(Response::new(v1::GetTopologyResponse {
            topology: known.as_ref().map(|known| convert::topology(&known.topology)),
            host_half: known.as_ref().map(|known| known.host_half.clone()).unwrap_or_default(),
            since: known.as_ref().map(|known| known.since.into()),
            problem: problem.unwrap_or_default(),
            files: files.iter().map(file).collect(),
            node: node.as_deref().map(convert::node),
        }))
    }

    async fn thaw(&self, _: Request<v1::ThawRequest>) -> Result<Response<v1::ThawResponse>, Status> {
        tracing::info!("audit: a person in the guest: thaw");
        match freeze::thaw(&self.guest, freeze::By::Person).await {
            Ok(thawed) => Ok(Response::new(v1::ThawResponse { thawed })),
            Err(error) => Err(Status::internal(error_chain::words(&error))),
        }
    }

    async fn reset_keys(
        &self,
        _: Request<v1::ResetKeysRequest>,
    ) -> Result<Response<v1::ResetKeysResponse>, Status> {
        Ok(Response::new(v1::ResetKeysResponse { keyed: self.keys.reset().await? }))
    }
}

fn disk_rule(rule: &disk_rules::Standing) -> v1::DiskRule {
    let other =
        |(disk, reason): &(String, String)| v1::DiskMismatch { disk: disk.clone(), reason: reason.clone() };
    v1::DiskRule {
        origin: rule.origin.clone(),
        r#match: rule.wanted.clone(),
        mount_point: rule.mount_point.display().to_string(),
        state: rule.state.to_owned(),
        disk: rule.disk.clone().unwrap_or_default(),
        file: rule.file.clone().unwrap_or_default(),
        reason: rule.reason.clone(),
        others: rule.others.iter().take(MOST_OTHERS).map(other).collect(),
    }
}

fn forwarded((caller, count): (String, usize)) -> v1::Forwarded {
    v1::Forwarded { caller, connections: u32::try_from(count).unwrap_or(u32::MAX) }
}

fn freeze_status(status: freeze::Status) -> v1::FreezeStatus {
    match status {
        freeze::Status::Thawed { spoiled } => v1::FreezeStatus {
            stage: "thawed".to_owned(),
            spoiled: spoiled.unwrap_or_default(),
            ..v1::FreezeStatus::default()
        },
        freeze::Status::Busy { holder, since, stage, file_systems, left } => v1::FreezeStatus {
            stage,
            holder,
            since: Some(since.into()),
            file_systems,
            seconds_left: left.map(|left| u32::try_from(left.as_secs()).unwrap_or(u32::MAX)),
            spoiled: String::new(),
        },
    }
}
