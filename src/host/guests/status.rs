//! Status of a guest's object, from what is known of the guest; and the changes that become events. Pure.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use k8s_openapi::jiff::Timestamp;

use crate::host::fleet::Known;
use crate::wire::guest_object::{Freeze, READY, Status};
use crate::wire::proto::v1::{GuestState, IoError, PowerState, SessionState, VirtualMachine};

/// Limits on the number of problems and on the bytes of a text, because guests influence both.
const MOST_PROBLEMS: usize = 8;
const LONGEST: usize = 256;
/// Limit on the failed units that are named.
const MOST_UNITS: usize = 5;

/// Event of Kubernetes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Notice {
    /// True for an event of type `Warning`.
    pub is_warning: bool,
    /// Reason of the event: one word, such as `GuestRefused`.
    pub reason: &'static str,
    /// Message of the event.
    pub message: String,
}

/// Builds the status of a guest on the node `host`, without its conditions and volumes.
pub fn status(host: &str, known: &Known) -> Status {
    let Known { view, state, .. } = known;
    let (session, guest) = (session(view), view.guest.as_ref());
    // The last state that a guest has reported remains valid while it has no session.
    let state = state.as_deref();
    let node = state.and_then(|state| state.node.as_ref());
    let problems = problems(view, state);
    Status {
        conditions: Vec::new(),
        reason: if session == "Connected" { String::new() } else { short(&view.reason) },
        session: session.to_owned(),
        host: host.to_owned(),
        cluster: view.cluster.clone(),
        node_name: node.map(|node| short(&node.name)).unwrap_or_default(),
        node_ready: node.map(|node| short(&node.ready)).unwrap_or_default(),
        agent_version: guest.map(|guest| short(&guest.agent_version)).unwrap_or_default(),
        host_name: guest.map(|guest| short(&guest.host_name)).unwrap_or_default(),
        operating_system: guest
            .and_then(|guest| guest.operating_system.as_ref())
            .map(|system| short(&system.pretty_name))
            .unwrap_or_default(),
        volumes: None,
        disks: state.map(|state| u32::try_from(state.disks.len()).unwrap_or(u32::MAX)),
        last_freeze: state.and_then(last_freeze),
        problems,
    }
}

/// Completes a status with its conditions; `before` has the times of their last transitions. A guest without an
/// agent is dialled again and again, possibly with a different reason for each failure; the first reason is kept.
pub fn settled(mut status: Status, before: Option<&Status>, now: Timestamp) -> Status {
    if let Some(before) =
        before.filter(|before| before.session == status.session && status.session == "Connecting")
        && !before.reason.is_empty()
    {
        status.reason.clone_from(&before.reason);
    }
    status.conditions.push(ready(&status));
    for condition in &mut status.conditions {
        let known =
            before.and_then(|before| before.conditions.iter().find(|known| known.type_ == condition.type_));
        condition.last_transition_time = match known {
            Some(known) if known.status == condition.status => known.last_transition_time.clone(),
            _ => Time(now),
        };
    }
    status
}

/// Returns the events for a change of status.
pub fn notices(before: Option<&Status>, now: &Status) -> Vec<Notice> {
    let mut notices = Vec::new();
    let was = |session: &str| before.is_some_and(|before| before.session == session);
    if now.session == "Refused"
        && before.is_none_or(|before| (&before.session, &before.reason) != (&now.session, &now.reason))
    {
        let message = format!("the agent in this guest is refused: {}", now.reason);
        notices.push(Notice { is_warning: true, reason: "GuestRefused", message });
    }
    if now.session == "Connected" && was("Refused") {
        let message = "the agent in this guest is no longer refused".to_owned();
        notices.push(Notice { is_warning: false, reason: "GuestConnected", message });
    }
    if let (Some(before), Some(freeze)) = (before, &now.last_freeze)
        && before.last_freeze.as_ref() != Some(freeze)
        && !matches!(freeze.end.as_str(), "asked" | "person")
    {
        let problem = if freeze.problem.is_empty() { String::new() } else { format!(": {}", freeze.problem) };
        let (reason, what) = match freeze.end.as_str() {
            "failed" => ("FreezeFailed", "a freeze failed".to_owned()),
            end => ("FreezeEnded", format!("a freeze ended by {end}")),
        };
        let message = format!("{what}, so its snapshot may not be consistent{problem}");
        notices.push(Notice { is_warning: true, reason, message });
    }
    notices
}

fn session(view: &VirtualMachine) -> &'static str {
    match view.session() {
        SessionState::Connected => "Connected",
        SessionState::Refused => "Refused",
        SessionState::Gone => "Off",
        _ if view.power() == PowerState::Off => "Off",
        SessionState::NoVsock => "NoVsock",
        SessionState::Connecting | SessionState::Elsewhere | SessionState::Unspecified => "Connecting",
    }
}

fn ready(status: &Status) -> Condition {
    let is_ready = status.session == "Connected" && status.problems.is_empty();
    let message = match status.session.as_str() {
        // Kubernetes 1.20 treats an empty text as missing, and then rejects the object.
        "Connected" if is_ready => "the session is open and healthy".to_owned(),
        "Connected" => status.problems.join("; "),
        _ if status.reason.is_empty() => "there is no session yet".to_owned(),
        _ => status.reason.clone(),
    };
    let reason = if status.session == "Connected" && !is_ready { "Problems" } else { &status.session };
    Condition {
        type_: READY.to_owned(),
        status: if is_ready { "True" } else { "False" }.to_owned(),
        reason: reason.to_owned(),
        message,
        last_transition_time: Time(Timestamp::UNIX_EPOCH),
        observed_generation: None,
    }
}

fn last_freeze(state: &GuestState) -> Option<Freeze> {
    let freeze = state.freeze.as_ref()?;
    let ended = freeze.ended.as_ref()?;
    Some(Freeze {
        // In seconds, which is the resolution of the API.
        ended: Timestamp::from_second(ended.seconds).ok().map(Time),
        end: short(&freeze.end),
        holder: short(&freeze.holder),
        problem: short(&freeze.problem),
        receipt: short(&freeze.receipt),
        level: short(&freeze.level),
    })
}

fn problems(view: &VirtualMachine, state: Option<&GuestState>) -> Vec<String> {
    let some = |text: &str| (!text.is_empty()).then(|| text.to_owned());
    let mut problems: Vec<String> = view.io_errors.iter().map(disk).collect();
    problems.extend(some(&view.power_problem));
    if view.session() == SessionState::Connected {
        problems.extend(some(&view.callback_reason));
        let topology = view.topology.as_ref().map(|standing| standing.problem.as_str()).unwrap_or_default();
        problems.extend(some(topology));
        problems.extend(state.into_iter().flat_map(inside));
    }
    problems.truncate(MOST_PROBLEMS);
    problems.iter().map(|problem| short(problem)).collect()
}

/// Returns the problems that the guest itself reports.
fn inside(state: &GuestState) -> Vec<String> {
    let mut problems = Vec::new();
    if let Some(node) = state.node.as_ref().filter(|node| node.state == "failed") {
        problems.push(format!("its Node's labels: {}", node.reason));
    }
    if let Some(health) = &state.health {
        if health.cloud_init == "error" {
            problems.push(format!("cloud-init: {}", health.cloud_init_errors.join("; ")));
        }
        if !health.failed_units.is_empty() {
            let more = if health.failed_units.len() > MOST_UNITS { " and others" } else { "" };
            let units: Vec<_> = health.failed_units.iter().take(MOST_UNITS).map(String::as_str).collect();
            problems.push(format!("failed units: {}{more}", units.join(", ")));
        }
    }
    problems
}

fn disk(error: &IoError) -> String {
    let why = if error.no_space { "there is no space left on the host" } else { &error.reason };
    let stopped = if error.stopped { ", and the VM is paused until it is resumed" } else { "" };
    format!("the disk {} could not be read or written: {why}{stopped}", error.disk)
}

/// Cuts a text to the length of a line.
fn short(text: &str) -> String {
    let mut end = text.len().min(LONGEST);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    if end < text.len() { format!("{}…", &text[..end]) } else { text.to_owned() }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tokio::time::Instant;

    use super::*;
    use crate::wire::proto::v1::{GuestInfo, Health, LastFreeze, Node, OperatingSystem, TopologyStanding};

    fn view(session: SessionState) -> VirtualMachine {
        let system = OperatingSystem { pretty_name: "Debian".into(), ..OperatingSystem::default() };
        VirtualMachine {
            name: "ns/a".into(),
            cluster: "ns/dev".into(),
            session: session.into(),
            reason: "why".into(),
            guest: Some(GuestInfo {
                agent_version: "0.1.0".into(),
                host_name: "a.example".into(),
                operating_system: Some(system),
                ..GuestInfo::default()
            }),
            ..VirtualMachine::default()
        }
    }

    fn seen(view: VirtualMachine, state: Option<GuestState>) -> Status {
        let vm = Arc::new(crate::host::backends::Vm::at("a", "/nowhere"));
        let known = Known { vm, view: Arc::new(view), state: state.map(Arc::new), since: Instant::now() };
        settled(status("n1", &known), None, Timestamp::UNIX_EPOCH)
    }

    fn freeze(end: &str) -> GuestState {
        let ended = Some(prost_types::Timestamp { seconds: 7, nanos: 5 });
        let freeze = LastFreeze { end: end.into(), ended, problem: "late".into(), ..LastFreeze::default() };
        GuestState { freeze: Some(freeze), ..GuestState::default() }
    }

    #[test]
    fn sessions_are_told_with_why() {
        let off = VirtualMachine { power: PowerState::Off.into(), ..view(SessionState::Connecting) };
        for (case, session, reason, ready) in [
            (view(SessionState::Connected), "Connected", "", "True"),
            (view(SessionState::Connecting), "Connecting", "why", "False"),
            (view(SessionState::Refused), "Refused", "why", "False"),
            (view(SessionState::Gone), "Off", "why", "False"),
            (view(SessionState::NoVsock), "NoVsock", "why", "False"),
            (off, "Off", "why", "False"),
        ] {
            let status = seen(case, None);
            assert_eq!((status.session.as_str(), status.reason.as_str()), (session, reason));
            let condition = &status.conditions[0];
            assert_eq!((condition.status.as_str(), condition.reason.as_str()), (ready, session));
            assert!(
                condition.message == reason
                    || reason.is_empty() && condition.message.contains("open and healthy")
            );
        }
    }

    #[test]
    fn what_is_wrong_makes_a_guest_unready() {
        let place = TopologyStanding { problem: "no zone".into(), ..TopologyStanding::default() };
        let view = VirtualMachine { topology: Some(place), ..view(SessionState::Connected) };
        let units = (0..7).map(|number| format!("u{number}")).collect();
        let state = GuestState {
            node: Some(Node {
                name: "a".into(),
                ready: "False".into(),
                state: "failed".into(),
                reason: "x".into(),
                ..Node::default()
            }),
            health: Some(Health { cloud_init: "error".into(), failed_units: units, ..Health::default() }),
            ..GuestState::default()
        };
        let status = seen(view, Some(state));
        let units = "failed units: u0, u1, u2, u3, u4 and others";
        assert_eq!(status.problems, ["no zone", "its Node's labels: x", "cloud-init: ", units]);
        assert_eq!((status.node_name.as_str(), status.node_ready.as_str()), ("a", "False"));
        assert_eq!(
            (status.conditions[0].status.as_str(), status.conditions[0].reason.as_str()),
            ("False", "Problems")
        );
    }

    #[test]
    fn what_guests_say_is_bounded() {
        let mut view = view(SessionState::Connected);
        view.guest.as_mut().unwrap().host_name = "ä".repeat(400);
        view.io_errors =
            (0..20).map(|disk| IoError { disk: disk.to_string(), ..IoError::default() }).collect();
        let status = seen(view, None);
        assert_eq!(status.host_name.chars().count(), LONGEST / 2 + 1);
        assert_eq!(status.problems.len(), MOST_PROBLEMS);
    }

    #[test]
    fn times_and_reasons_stay_while_nothing_else_changes() {
        let at = |second| Timestamp::from_second(second).unwrap();
        let known = |session, reason: &str| {
            let view = VirtualMachine { reason: reason.into(), ..view(session) };
            let vm = Arc::new(crate::host::backends::Vm::at("a", "/nowhere"));
            status("n1", &Known { vm, view: Arc::new(view), state: None, since: Instant::now() })
        };
        let first = settled(known(SessionState::Connecting, "one"), None, at(1));
        let second = settled(known(SessionState::Connecting, "two"), Some(&first), at(2));
        assert_eq!(first, second);
        let third = settled(known(SessionState::Refused, "three"), Some(&second), at(3));
        assert_eq!(
            (third.reason.as_str(), &third.conditions[0].last_transition_time),
            ("three", &Time(at(1)))
        );
        let fourth = settled(known(SessionState::Connected, ""), Some(&third), at(4));
        assert_eq!(fourth.conditions[0].last_transition_time, Time(at(4)));
    }

    #[test]
    fn people_hear_of_what_they_should() {
        let reasons = |before: Option<&Status>, now: &Status| {
            notices(before, now).into_iter().map(|notice| notice.reason).collect::<Vec<_>>()
        };
        let (connected, refused) =
            (seen(view(SessionState::Connected), None), seen(view(SessionState::Refused), None));
        assert_eq!(reasons(None, &connected), [""; 0]);
        assert_eq!(reasons(None, &refused), ["GuestRefused"]);
        assert_eq!(reasons(Some(&connected), &refused), ["GuestRefused"]);
        assert_eq!(reasons(Some(&refused), &refused), [""; 0]);
        assert_eq!(reasons(Some(&refused), &connected), ["GuestConnected"]);
        for (end, told) in [
            ("asked", &[][..]),
            ("person", &[]),
            ("deadline", &["FreezeEnded"]),
            ("crash", &["FreezeEnded"]),
            ("failed", &["FreezeFailed"]),
        ] {
            let ended = seen(view(SessionState::Connected), Some(freeze(end)));
            assert_eq!(reasons(Some(&connected), &ended), told, "{end}");
            assert_eq!(reasons(None, &ended), [""; 0], "what was before is old");
        }
        let late = notices(Some(&connected), &seen(view(SessionState::Connected), Some(freeze("deadline"))));
        assert_eq!(
            late[0].message,
            "a freeze ended by deadline, so its snapshot may not be consistent: late"
        );
    }
}
