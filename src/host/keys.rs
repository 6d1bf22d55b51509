//! Management of keys for the admin API: list, accept, forget, rotate and bootstrap.

use std::collections::BTreeMap;
use std::error::Error as _;
use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

use prost_types::Timestamp;
use tokio::sync::watch;
use tonic::Status;

use super::trust::pins::Previous;
use super::trust::{Error, Record, Trust};
use crate::host::backends::Vm;
use crate::host::backends::qemu::Machine;
use crate::host::caller::Behalf;
use crate::host::calls::{Agent, Calls};
use crate::host::fleet::{Handle, Identity, Reach};
use crate::host::text;
use crate::sys::error_chain;
use crate::trust::anchors;
use crate::trust::host::Unusable;
use crate::trust::key::PublicKey;
use crate::wire::proto::v1;

/// Timeout of a guest for generating a key.
const ANSWER: Duration = Duration::from_secs(10);

impl From<Error> for Status {
    fn from(error: Error) -> Self {
        let words = error_chain::words(&error);
        match error {
            Error::NothingOffered | Error::NoPin | Error::Owned(_) | Error::Unreadable(_) => {
                Self::failed_precondition(words)
            }
            Error::Random | Error::Io { .. } => Self::internal(words),
        }
    }
}

/// Lists the keys of one guest or of all guests, and of this host half.
///
/// # Errors
/// If the VM is not known, or the fleet has stopped.
pub async fn list(
    trust: &Arc<Trust>,
    fleet: &Handle,
    request: v1::ListKeysRequest,
) -> Result<v1::ListKeysResponse, Status> {
    let shown = trust.shown().await;
    let mut guests = Vec::new();
    if request.name.is_empty() {
        let mut rest: BTreeMap<_, _> = trust.records().into_iter().collect();
        for known in fleet.list().await? {
            let record = rest.remove(&known.view.uuid).unwrap_or_default();
            guests.push(v1::GuestKey {
                session: session_words(&known.view).to_owned(),
                ..told(&known.view.name, &known.view.uuid, record)
            });
        }
        for (uuid, record) in rest {
            let name = record.pin.as_ref().map(|pin| pin.name.clone()).unwrap_or_default();
            guests.push(v1::GuestKey { no_vm: true, ..told(&name, &uuid, record) });
        }
        guests.sort_by(|one, other| one.name.cmp(&other.name));
    } else {
        let vm = vm(fleet, request.name).await?;
        guests.push(one(trust, fleet, &vm).await?);
    }
    Ok(v1::ListKeysResponse {
        host_key: shown.key.fingerprint().to_string(),
        ca_key: shown.ca.map(|key| key.fingerprint().to_string()).unwrap_or_default(),
        guests,
    })
}

/// Accepts the key that a guest was refused with.
///
/// # Errors
/// `FAILED_PRECONDITION` if the guest has presented none, or another one; `INTERNAL` if the key cannot be stored.
pub async fn accept(
    trust: &Arc<Trust>,
    fleet: &Handle,
    request: v1::AcceptKeyRequest,
) -> Result<v1::GuestKey, Status> {
    let vm = vm(fleet, request.name).await?;
    let key = trust.record(&vm.ids.lasting).offered.ok_or(Error::NothingOffered)?;
    let offered = key.fingerprint().to_string();
    if !request.key.is_empty() && offered != request.key {
        return Err(Status::failed_precondition(format!(
            "the guest last presented the key {offered}, not {}",
            text::clean(&request.key)
        )));
    }
    let key = trust.accept(&vm, key).await?;
    tracing::info!(vm = vm.name, key = %key.fingerprint(), "audit: the guest's key was accepted");
    one(trust, fleet, &vm).await
}

/// Forgets what is known of the keys of one guest, or of those of all VMs that `listed` no longer contains.
///
/// # Errors
/// If the VM does not exist, if no list of VMs is available, or if a file cannot be removed.
pub async fn forget(
    trust: &Trust,
    fleet: &Handle,
    listed: Option<&watch::Receiver<Vec<Machine>>>,
    request: v1::ForgetKeyRequest,
) -> Result<v1::ForgetKeyResponse, Status> {
    match (listed, request.unlisted) {
        (_, false) => {}
        (_, true) if !request.name.is_empty() => {
            return Err(Status::invalid_argument(
                "unlisted applies to all VMs that are not listed, and cannot be combined with name",
            ));
        }
        (Some(listed), true) => return forget_unlisted(trust, listed).await,
        (None, true) => {
            return Err(Status::unimplemented(
                "the VMs of this host half are not listed in settings, so it cannot tell which are gone; give their UUIDs",
            ));
        }
    }
    let known = trust.records().into_iter().any(|(uuid, _)| uuid == request.name);
    let uuid = match vm(fleet, request.name.clone()).await {
        Ok(vm) => vm.ids.lasting.clone(),
        Err(_) if known => request.name,
        Err(unknown) => return Err(unknown),
    };
    let was_there = trust.forget(&uuid).await?;
    tracing::info!(uuid, was_there, "audit: the guest's key was forgotten");
    Ok(v1::ForgetKeyResponse { was_there, forgotten: Vec::new() })
}

async fn forget_unlisted(
    trust: &Trust,
    listed: &watch::Receiver<Vec<Machine>>,
) -> Result<v1::ForgetKeyResponse, Status> {
    let mut forgotten = Vec::new();
    for (uuid, record) in trust.records() {
        // The settings may list the VM again meanwhile.
        if listed.borrow().iter().any(|machine| machine.vm.ids.lasting == uuid) {
            continue;
        }
        let name = record.pin.as_ref().map(|pin| pin.name.clone()).unwrap_or_default();
        trust.forget(&uuid).await?;
        tracing::info!(uuid, name, "audit: the key of a guest whose VM is not listed any more was forgotten");
        forgotten.push(v1::GuestKey { no_vm: true, ..told(&name, &uuid, record) });
    }
    Ok(v1::ForgetKeyResponse { was_there: !forgotten.is_empty(), forgotten })
}

/// Rotates the key of a guest.
///
/// # Errors
/// `FAILED_PRECONDITION` without a session with keys; the agent's errors; `INTERNAL` if the key cannot be stored.
pub async fn rotate(
    trust: &Arc<Trust>,
    fleet: &Handle,
    behalf: &Behalf,
    request: v1::RotateGuestKeyRequest,
) -> Result<v1::GuestKey, Status> {
    let vm = vm(fleet, request.name).await?;
    let mut calls = session(fleet, &vm).await?.on_behalf_of(behalf.clone());
    let key = rotate_step(&mut calls, String::new()).await?;
    // The key is recorded before the guest uses it, so that the guest is not refused if this program ends in between.
    trust.promise(&vm, key).await?;
    rotate_step(&mut calls, key.fingerprint().to_string()).await?;
    tracing::info!(vm = vm.name, key = %key.fingerprint(), "audit: the guest has a new key");
    one(trust, fleet, &vm).await
}

/// Rotates the key of this host half.
///
/// # Errors
/// `FAILED_PRECONDITION` if a CA certifies the key, if there is no next key, or if guests do not know it;
/// `INTERNAL` if a file cannot be used.
pub async fn rotate_host(
    trust: &Arc<Trust>,
    request: v1::RotateHostKeyRequest,
) -> Result<v1::RotateHostKeyResponse, Status> {
    let unusable = |error: Unusable| match error {
        Unusable::OfAuthority | Unusable::NoKey(_) => Status::failed_precondition(error.to_string()),
        error => Status::internal(error_chain::words(&error)),
    };
    let next = if request.finish {
        let rotation = trust.rotation().await.map_err(unusable)?;
        rotation.next.ok_or_else(|| {
            Status::failed_precondition("there is no next key; start with guestctl trust rotate --host")
        })?
    } else {
        trust.prepare().await.map_err(unusable)?
    };
    let name = next.fingerprint().to_string();
    let (mut known_to, mut unknown_to) = (Vec::new(), Vec::new());
    for pin in trust.records().into_iter().filter_map(|(_, record)| record.pin) {
        let list = if pin.told.as_ref() == Some(&name) { &mut known_to } else { &mut unknown_to };
        list.push(pin.name);
    }
    if request.finish {
        if !unknown_to.is_empty() && !request.force {
            return Err(Status::failed_precondition(format!(
                "the guests of these VMs do not know the next key yet: {}; wait until they have had a \
                 session, or use --force and give it to them by hand (guestctl trust bootstrap); for VMs that \
                 are gone for good, run guestctl trust forget --unlisted",
                unknown_to.join(", ")
            )));
        }
        trust.switch().await.map_err(unusable)?;
        tracing::info!(key = name, "audit: this host half uses another key");
    }
    Ok(v1::RotateHostKeyResponse { key: name, known_to, unknown_to })
}

async fn rotate_step(calls: &mut Calls, which: String) -> Result<PublicKey, Status> {
    let call = calls.rotate_key(v1::RotateKeyRequest { r#use: which });
    let answer = tokio::time::timeout(ANSWER, call).await;
    let answer = answer.unwrap_or_else(|_| Err(Status::deadline_exceeded("the guest does not answer")));
    let answer = answer.map_err(|status| match status.source() {
        Some(_) => Status::unavailable("the session with the agent ended; repeat the command"),
        None => Status::new(status.code(), text::clean(status.message())),
    })?;
    PublicKey::from_spki(&answer.into_inner().public_key)
        .map_err(|_| Status::internal("the guest's next key is not an Ed25519 key"))
}

/// Returns the line and the token that a guest must be given to trust this host half.
///
/// # Errors
/// If the VM does not exist, or if a token cannot be stored.
pub async fn bootstrap(
    trust: &Arc<Trust>,
    fleet: &Handle,
    host_name: &str,
    request: v1::GetTrustBootstrapRequest,
) -> Result<v1::TrustBootstrap, Status> {
    let vm = vm(fleet, request.name).await?;
    let shown = trust.shown().await;
    let key = shown.ca.unwrap_or(shown.key);
    if let Some(role) = request.roles.iter().find(|role| !anchors::ROLES.contains(&role.as_str())) {
        let role = text::clean(role);
        return Err(Status::invalid_argument(format!(
            "there is no role {role:?}; the roles are {}",
            anchors::ROLES.join(", ")
        )));
    }
    let comment = match shown.ca {
        Some(_) => format!("CA of the host half on {host_name}"),
        None => format!("host half on {host_name}"),
    };
    let key_line = anchors::line(&key, shown.ca.is_some(), &request.roles, &comment);
    let token = if request.with_token { trust.token(&vm.ids.lasting).await?.reveal() } else { String::new() };
    Ok(v1::TrustBootstrap { key_line, token })
}

async fn vm(fleet: &Handle, name: String) -> Result<Arc<Vm>, Status> {
    let found = fleet.find(Identity::Name(name)).await?;
    found.map(|machine| machine.vm).ok_or_else(|| Status::not_found("there is no such VM"))
}

/// Returns the agent of a guest with a session.
async fn session(fleet: &Handle, vm: &Vm) -> Result<Agent, Status> {
    match fleet.caller(vm.name.clone()).await? {
        Some(Reach::Session { agent, .. }) => Ok(agent),
        Some(Reach::Untold) => Err(Status::unavailable("the node of this guest cannot be reached now")),
        Some(Reach::Paused) => Err(Status::failed_precondition("the VM is paused: its guest cannot answer")),
        _ => Err(Status::failed_precondition("there is no session with this guest now")),
    }
}

async fn one(trust: &Trust, fleet: &Handle, vm: &Vm) -> Result<v1::GuestKey, Status> {
    let known = fleet.get(vm.name.clone()).await?;
    let session = known.map_or("", |known| session_words(&known.view)).to_owned();
    Ok(v1::GuestKey { session, ..told(&vm.name, &vm.ids.lasting, trust.record(&vm.ids.lasting)) })
}

/// Returns the kind of the open session of a VM, `keyed` or `plain`; empty without a session.
fn session_words(view: &v1::VirtualMachine) -> &'static str {
    match view.session() {
        v1::SessionState::Connected if view.guest_key.is_empty() => "plain",
        v1::SessionState::Connected => "keyed",
        _ => "",
    }
}

fn told(name: &str, uuid: &str, record: Record) -> v1::GuestKey {
    let Record { pin, token, offered, unreadable } = record;
    let name = name.to_owned();
    let mut told = v1::GuestKey {
        name,
        uuid: uuid.to_owned(),
        offered: offered.map(|key| key.fingerprint().to_string()).unwrap_or_default(),
        has_token: token.is_some(),
        problem: unreadable.unwrap_or_default(),
        ..v1::GuestKey::default()
    };
    if let Some(pin) = pin {
        told.key = named(pin.key);
        pin.how.word().clone_into(&mut told.how);
        told.since = Some(time(pin.since));
        told.next = pin.next.map(named).unwrap_or_default();
        if let Some(Previous { key, until }) = &pin.previous {
            told.previous = named(*key);
            told.previous_until = Some(time(*until));
        }
    }
    told
}

fn named(key: PublicKey) -> String {
    key.fingerprint().to_string()
}

fn time(seconds: u64) -> Timestamp {
    (UNIX_EPOCH + Duration::from_secs(seconds)).into()
}
