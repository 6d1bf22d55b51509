//! The last known state of a guest: what its events have made of it. Pure.

use std::fmt;
use std::sync::Arc;

use super::limits::Limits;
use crate::wire::proto::v1::{self, event::Kind};

/// A state that is larger than allowed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the guest has more than {limit} {what}; limits.{what} in the settings allows more")]
pub struct Excess {
    what: What,
    limit: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum What {
    Interfaces,
    Addresses,
    FileSystems,
    Users,
    Disks,
}

impl fmt::Display for What {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Interfaces => "interfaces",
            Self::Addresses => "addresses",
            Self::FileSystems => "file-systems",
            Self::Users => "users",
            Self::Disks => "disks",
        })
    }
}

/// Makes of `state` what `event` says, and takes the state out of `AgentReady`.
///
/// # Errors
/// If the state would become larger than allowed; it stays as it was.
pub fn fold(
    state: &mut Option<Arc<v1::GuestState>>,
    event: &mut v1::Event,
    limits: &Limits,
) -> Result<(), Excess> {
    let Some(kind) = &mut event.kind else { return Ok(()) };
    if let Kind::AgentReady(ready) = kind {
        if let Some(whole) = ready.state.take() {
            check(&whole, limits)?;
            *state = Some(Arc::new(whole));
        }
        return Ok(());
    }
    // Most events: whoever still reads the state must not make them dear.
    if matches!(kind, Kind::Heartbeat(_)) {
        return Ok(());
    }
    let state = Arc::make_mut(state.get_or_insert_default());
    match kind {
        Kind::InterfacesChanged(change) => {
            check_interfaces(&change.interfaces, limits)?;
            state.interfaces.clone_from(&change.interfaces);
        }
        Kind::FileSystemMounted(v1::FileSystemMounted { file_system: Some(mounted) }) => {
            within(What::FileSystems, state.file_systems.len() + 1, limits.file_systems)?;
            state.file_systems.push(mounted.clone());
        }
        Kind::FileSystemUnmounted(v1::FileSystemUnmounted { file_system: Some(unmounted) }) => {
            // The one mounted last goes first, as umount(2) has it.
            if let Some(place) = state.file_systems.iter().rposition(|known| known == unmounted) {
                state.file_systems.remove(place);
            }
        }
        Kind::UserLoggedIn(v1::UserLoggedIn { session: Some(session) }) => {
            within(What::Users, state.users.len() + 1, limits.users)?;
            state.users.push(session.clone());
        }
        Kind::UserLoggedOut(v1::UserLoggedOut { session: Some(session) }) => {
            state.users.retain(|known| known.id != session.id);
        }
        Kind::DiskAdded(v1::DiskAdded { disk: Some(disk) }) => {
            within(What::Disks, state.disks.len() + 1, limits.disks)?;
            state.disks.push(disk.clone());
        }
        Kind::DiskRemoved(v1::DiskRemoved { disk: Some(disk), .. }) => {
            state.disks.retain(|known| known.generation != disk.generation);
        }
        Kind::DiskResized(v1::DiskResized { disk: Some(disk), .. })
        | Kind::DiskChanged(v1::DiskChanged { disk: Some(disk) }) => {
            let known = state.disks.iter_mut().find(|known| known.generation == disk.generation);
            if let Some(known) = known {
                known.clone_from(disk);
            }
        }
        Kind::TopologyChanged(changed) => state.topology.clone_from(&changed.topology),
        Kind::NodeChanged(changed) => state.node.clone_from(&changed.node),
        Kind::HealthChanged(changed) => state.health.clone_from(&changed.health),
        Kind::Frozen(frozen) => {
            state.freeze = Some(v1::LastFreeze {
                holder: frozen.holder.clone(),
                file_systems: frozen.file_systems,
                since: event.time,
                ..v1::LastFreeze::default()
            });
        }
        Kind::Thawed(thawed) => {
            let begun = state.freeze.take().filter(|freeze| freeze.ended.is_none()).unwrap_or_default();
            state.freeze = Some(v1::LastFreeze {
                holder: thawed.holder.clone(),
                // A guest's event may be without a time.
                ended: Some(event.time.unwrap_or_default()),
                end: match thawed.end.as_str() {
                    // An agent that does not say more.
                    "" if thawed.by_itself => "deadline",
                    "" => "asked",
                    end => end,
                }
                .to_owned(),
                problem: thawed.problem.clone(),
                ..begun
            });
        }
        _ => {}
    }
    Ok(())
}

fn check(state: &v1::GuestState, limits: &Limits) -> Result<(), Excess> {
    check_interfaces(&state.interfaces, limits)?;
    within(What::FileSystems, state.file_systems.len(), limits.file_systems)?;
    within(What::Users, state.users.len(), limits.users)?;
    within(What::Disks, state.disks.len(), limits.disks)
}

fn check_interfaces(interfaces: &[v1::NetworkInterface], limits: &Limits) -> Result<(), Excess> {
    within(What::Interfaces, interfaces.len(), limits.interfaces)?;
    let most = interfaces.iter().map(|interface| interface.addresses.len()).max().unwrap_or(0);
    within(What::Addresses, most, limits.addresses)
}

fn within(what: What, found: usize, limit: usize) -> Result<(), Excess> {
    if found > limit { Err(Excess { what, limit }) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(kind: Kind) -> v1::Event {
        v1::Event { kind: Some(kind), ..v1::Event::default() }
    }

    fn file_system(mount_point: &str) -> v1::MountedFileSystem {
        v1::MountedFileSystem {
            mount_point: mount_point.into(),
            source: "/dev/vda1".into(),
            r#type: "ext4".into(),
        }
    }

    fn mounted(mount_point: &str) -> v1::Event {
        event(Kind::FileSystemMounted(v1::FileSystemMounted { file_system: Some(file_system(mount_point)) }))
    }

    fn unmounted(mount_point: &str) -> v1::Event {
        let file_system = Some(file_system(mount_point));
        event(Kind::FileSystemUnmounted(v1::FileSystemUnmounted { file_system }))
    }

    fn login(id: &str, out: bool) -> v1::Event {
        let session = Some(v1::UserSession { id: id.into(), ..v1::UserSession::default() });
        event(if out {
            Kind::UserLoggedOut(v1::UserLoggedOut { session })
        } else {
            Kind::UserLoggedIn(v1::UserLoggedIn { session })
        })
    }

    fn disk(generation: u64, bytes: u64) -> v1::Disk {
        v1::Disk { generation, bytes, ..v1::Disk::default() }
    }

    fn added(generation: u64) -> v1::Event {
        event(Kind::DiskAdded(v1::DiskAdded { disk: Some(disk(generation, 1)) }))
    }

    fn interfaces(count: usize, addresses: usize) -> v1::Event {
        let one = v1::NetworkInterface {
            addresses: vec!["192.0.2.7/24".into(); addresses],
            ..v1::NetworkInterface::default()
        };
        event(Kind::InterfacesChanged(v1::InterfacesChanged { interfaces: vec![one; count] }))
    }

    fn ready(state: Option<v1::GuestState>) -> v1::Event {
        event(Kind::AgentReady(v1::AgentReady { state, ..v1::AgentReady::default() }))
    }

    #[test]
    fn events_make_the_state() {
        let mut state = None;
        let mut apply = |mut event| fold(&mut state, &mut event, &Limits::default()).unwrap();
        apply(ready(Some(v1::GuestState {
            file_systems: vec![file_system("/")],
            ..v1::GuestState::default()
        })));
        apply(mounted("/a"));
        apply(mounted("/a"));
        apply(unmounted("/a"));
        apply(unmounted("/never"));
        apply(login("1", false));
        apply(login("2", false));
        apply(login("1", true));
        apply(interfaces(2, 1));
        apply(added(1));
        apply(added(2));
        apply(event(Kind::DiskRemoved(v1::DiskRemoved { disk: Some(disk(1, 1)), in_use: vec![] })));
        apply(event(Kind::DiskResized(v1::DiskResized { disk: Some(disk(2, 5)), bytes_before: 1 })));
        apply(event(Kind::DiskChanged(v1::DiskChanged { disk: Some(disk(3, 1)) })));
        apply(ready(None));
        let state = state.unwrap();
        assert_eq!(state.file_systems, [file_system("/"), file_system("/a")]);
        assert_eq!(state.users.iter().map(|user| user.id.as_str()).collect::<Vec<_>>(), ["2"]);
        assert_eq!(state.interfaces.len(), 2);
        assert_eq!(state.disks, [disk(2, 5)]);
    }

    #[test]
    fn the_last_freeze_and_its_end_are_part_of_the_state() {
        let mut state = None;
        let at = |seconds| Some(prost_types::Timestamp { seconds, nanos: 0 });
        let mut frozen = event(Kind::Frozen(v1::Frozen {
            file_systems: 3,
            holder: "libvirt".into(),
            deadline_seconds: 120,
        }));
        frozen.time = at(100);
        fold(&mut state, &mut frozen, &Limits::default()).unwrap();
        let freeze = state.as_ref().unwrap().freeze.clone().unwrap();
        assert_eq!((freeze.since, freeze.ended, freeze.file_systems), (at(100), None, 3));
        let mut thawed = event(Kind::Thawed(v1::Thawed {
            by_itself: true,
            holder: "libvirt".into(),
            end: "deadline".into(),
            problem: "the freeze ended by itself after 120 s".into(),
        }));
        thawed.time = at(220);
        fold(&mut state, &mut thawed, &Limits::default()).unwrap();
        let freeze = state.as_ref().unwrap().freeze.clone().unwrap();
        assert_eq!((freeze.since, freeze.ended, freeze.file_systems), (at(100), at(220), 3));
        assert_eq!((freeze.end.as_str(), freeze.holder.as_str()), ("deadline", "libvirt"));
        // One whose beginning was not heard of.
        fold(&mut state, &mut thawed, &Limits::default()).unwrap();
        let freeze = state.unwrap().freeze.clone().unwrap();
        assert_eq!((freeze.since, freeze.ended, freeze.file_systems), (None, at(220), 0));
    }

    #[test]
    fn a_state_beyond_its_bounds_is_refused_and_stays_as_it_was() {
        let limits =
            Limits { interfaces: 2, addresses: 3, file_systems: 1, users: 1, disks: 1, ..Limits::default() };
        let cases = [
            (interfaces(3, 0), "more than 2 interfaces"),
            (interfaces(1, 4), "more than 3 addresses"),
            (mounted("/b"), "more than 1 file-systems"),
            (login("b", false), "more than 1 users"),
            (added(2), "more than 1 disks"),
            (
                ready(Some(v1::GuestState {
                    file_systems: vec![file_system("/"); 2],
                    ..v1::GuestState::default()
                })),
                "more than 1 file-systems",
            ),
        ];
        for (mut event, expected) in cases {
            let mut state = None;
            for mut allowed in [mounted("/a"), login("a", false), added(1), interfaces(2, 3)] {
                fold(&mut state, &mut allowed, &limits).unwrap();
            }
            let before = state.clone();
            let error = fold(&mut state, &mut event, &limits).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
            assert_eq!(state, before);
        }
    }
}
