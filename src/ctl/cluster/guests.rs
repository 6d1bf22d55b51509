//! Guests of a cluster: their list, where each runs, and their form in `guestctl ls`.

use kube::api::{Api, ListParams};
use prost_types::Timestamp;
use strsim::levenshtein;
use tonic::Code;

use super::Error;
use super::access::ApiServer;
use super::api::Asked;
use crate::ctl::Error as Failure;
use crate::labels::selector::Selector;
use crate::wire::guest_object::{Guest, READY, Status};
use crate::wire::proto::v1::{
    GuestInfo, GuestState, Node, OperatingSystem, PowerState, SessionState, VirtualMachine,
};

/// Role that permits to read Guests.
const ROLE: &str = "the ClusterRole guestlet-viewer has it (docs/kubevirt.md)";
/// Limit of the names that are suggested, and of the edits by which one may differ from the typed name.
const MOST_SIMILAR: usize = 5;
const FARTHEST: usize = 2;

/// Lists the Guests of a namespace, or of all namespaces, sorted by name.
///
/// # Errors
/// Fails if they cannot be listed.
pub async fn list(server: &ApiServer, namespace: Option<&str>) -> Result<Vec<Guest>, Error> {
    selected(server, namespace, &Selector::default()).await
}

/// Lists those of these Guests that the API server selects by their labels.
///
/// # Errors
/// Fails if they cannot be listed.
pub async fn selected(
    server: &ApiServer,
    namespace: Option<&str>,
    selector: &Selector,
) -> Result<Vec<Guest>, Error> {
    let asked =
        Asked { what: "list guests", verb: "list", resource: "guests.guestlet.io", namespace, role: ROLE };
    let label_selector = (!selector.is_empty()).then(|| selector.to_string());
    let parameters = ListParams { label_selector, ..ListParams::default() };
    let mut guests: Vec<Guest> = server.list(asked, parameters).await.map_err(no_kind)?;
    guests.sort_by_cached_key(name);
    Ok(guests)
}

/// Finds the Guest of this namespace and name, which names the node that it runs on.
///
/// # Errors
/// Fails if the Guest does not exist, does not name a node, or cannot be read.
pub async fn find(server: &ApiServer, namespace: &str, name: &str) -> Result<Guest, Error> {
    let guests: Api<Guest> = Api::namespaced(server.client.clone(), namespace);
    let asked = Asked {
        what: "read a guest",
        verb: "get",
        resource: "guests.guestlet.io",
        namespace: Some(namespace),
        role: ROLE,
    };
    let full = format!("{namespace}/{name}");
    let found = server.ask(asked, guests.get_opt(name)).await.map_err(no_kind)?;
    let Some(guest) = found else {
        // If the whole kind is missing, the object seems to be missing, too. A list distinguishes these cases.
        let everywhere = match list(server, None).await {
            Err(Error::Forbidden { .. }) => list(server, Some(namespace)).await,
            listed => listed,
        };
        let names: Vec<_> = everywhere?.iter().map(self::name).collect();
        return Err(Error::UnknownGuest { similar: similar(&full, &names), name: full });
    };
    if guest.status.host.is_empty() { Err(Error::NoHost(full)) } else { Ok(guest) }
}

/// Adds the reason from the guest's object to the failure of a call that needs a session, if this guest has
/// none.
pub fn explained(error: Failure, guest: &Guest) -> Failure {
    let Status { session, reason, .. } = &guest.status;
    match error {
        Failure::Call(status) if status.code() == Code::FailedPrecondition && session != "Connected" => {
            Error::NoSession {
                message: status.message().to_owned(),
                session: session.clone(),
                reason: if reason.is_empty() { String::new() } else { format!(": {reason}") },
            }
            .into()
        }
        error => error,
    }
}

/// Converts the error about an unknown path: the API server does not have the kind.
fn no_kind(error: Error) -> Error {
    match error {
        Error::Refused { message, .. } if message.contains("could not find the requested resource") => {
            Error::NoKind
        }
        Error::Refused { message, .. } if message.starts_with("404 page not found") => Error::NoKind,
        error => error,
    }
}

/// Returns namespace and name in the form in which VMs are named.
pub fn name(guest: &Guest) -> String {
    let part = |part: &Option<String>| part.clone().unwrap_or_default();
    format!("{}/{}", part(&guest.metadata.namespace), part(&guest.metadata.name))
}

/// Returns the names that may have been meant: the same name in another namespace, or one that is a few
/// letters off.
fn similar(wanted: &str, names: &[String]) -> Vec<String> {
    let last = |name: &str| name.rsplit('/').next().unwrap_or_default().to_owned();
    let distance = |name: &String| if last(name) == last(wanted) { 0 } else { levenshtein(name, wanted) };
    let mut near: Vec<_> =
        names.iter().map(|name| (distance(name), name)).filter(|(far, _)| *far <= FARTHEST).collect();
    near.sort();
    near.into_iter().take(MOST_SIMILAR).map(|(_, name)| name.clone()).collect()
}

/// Converts a Guest to a VM, as far as it has the information.
pub fn vm(guest: &Guest) -> VirtualMachine {
    let status = &guest.status;
    let session = session(&status.session);
    let power = match (status.session.as_str(), session) {
        ("Off", _) => PowerState::Off,
        (_, SessionState::Connected) => PowerState::Running,
        _ => PowerState::Unspecified,
    };
    let reason = if status.reason.is_empty() { status.problems.join("; ") } else { status.reason.clone() };
    let dial = if status.host.is_empty() { String::new() } else { format!("node {}", status.host) };
    VirtualMachine {
        name: name(guest),
        cluster: status.cluster.clone(),
        labels: guest.metadata.labels.clone().unwrap_or_default(),
        power: power.into(),
        session: session.into(),
        reason,
        dial,
        since: since(status),
        guest: info(status),
        state: state(status),
        ..VirtualMachine::default()
    }
}

fn session(word: &str) -> SessionState {
    match word {
        "Connected" => SessionState::Connected,
        "Refused" => SessionState::Refused,
        "NoVsock" => SessionState::NoVsock,
        "Connecting" => SessionState::Connecting,
        "Off" => SessionState::Gone,
        _ => SessionState::Unspecified,
    }
}

/// Returns since when the guest has been ready, or has not been: the closest time in the Guest.
fn since(status: &Status) -> Option<Timestamp> {
    let ready = status.conditions.iter().find(|condition| condition.type_ == READY)?;
    let time = ready.last_transition_time.0;
    Some(Timestamp { seconds: time.as_second(), nanos: time.subsec_nanosecond() })
}

fn info(status: &Status) -> Option<GuestInfo> {
    let Status { agent_version, host_name, operating_system, .. } = status;
    let system = OperatingSystem { pretty_name: operating_system.clone(), ..OperatingSystem::default() };
    (!agent_version.is_empty()).then(|| GuestInfo {
        agent_version: agent_version.clone(),
        host_name: host_name.clone(),
        operating_system: Some(system),
        ..GuestInfo::default()
    })
}

fn state(status: &Status) -> Option<Box<GuestState>> {
    let Status { node_name, node_ready, .. } = status;
    let node = Node { name: node_name.clone(), ready: node_ready.clone(), ..Node::default() };
    (!node_name.is_empty()).then(|| Box::new(GuestState { node: Some(node), ..GuestState::default() }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_may_have_been_meant() {
        let names = ["shop/web-1", "shop/web-2", "shop/database", "test/web-1", "test/web-11"];
        let names: Vec<_> = names.map(str::to_owned).into();
        for (wanted, expected) in [
            ("prod/web-1", &["shop/web-1", "test/web-1"][..]),
            ("shop/wbe-1", &["shop/web-1"]),
            ("shop/databse", &["shop/database"]),
            ("shop/mail", &[]),
        ] {
            assert_eq!(similar(wanted, &names), expected, "{wanted}");
        }
        for (one, other, expected) in [("", "", 0), ("", "ab", 2), ("kitten", "sitting", 3), ("ä", "a", 1)] {
            assert_eq!(
                (levenshtein(one, other), levenshtein(other, one)),
                (expected, expected),
                "{one} {other}"
            );
        }
    }

    #[test]
    fn a_guest_is_shown_as_far_as_it_says() {
        let guest = |status: serde_json::Value| -> VirtualMachine {
            let metadata =
                serde_json::json!({ "name": "web-1", "namespace": "shop", "labels": { "tier": "web" } });
            let guest = serde_json::json!({ "metadata": metadata, "status": status });
            vm(&serde_json::from_value(guest).unwrap())
        };
        let bare = guest(serde_json::json!({}));
        assert_eq!((bare.name.as_str(), bare.dial.as_str()), ("shop/web-1", ""));
        assert_eq!(bare.labels["tier"], "web");
        assert!(bare.guest.is_none() && bare.state.is_none() && bare.since.is_none());
        let full = guest(serde_json::json!({
            "session": "Connected", "host": "n1", "agentVersion": "0.1.0", "operatingSystem": "Debian", "nodeName": "w",
            "problems": ["a", "b"],
            "conditions": [{ "type": "Ready", "status": "False", "reason": "Problems", "message": "a; b",
                             "lastTransitionTime": "2026-11-23T12:00:00Z" }],
        }));
        assert_eq!((full.session(), full.power()), (SessionState::Connected, PowerState::Running));
        assert_eq!((full.reason.as_str(), full.dial.as_str()), ("a; b", "node n1"));
        assert_eq!(full.since.unwrap().to_string(), "2026-11-23T12:00:00Z");
        assert_eq!(full.state.unwrap().node.unwrap().name, "w");
        let off = guest(serde_json::json!({ "session": "Off", "host": "n1" }));
        assert_eq!(off.power(), PowerState::Off);
    }
}
