//! Last known state of a guest, which its events update within limits. Pure.
//!
//! In the guest the state has no limits. On a host, too many entries end the guest's session. (A single event with
//! that many entries is refused before it is decoded.) Entries that together take more bytes than allowed are left
//! out, and the state says how many were.

use std::sync::Arc;

use prost_types::Timestamp;

use super::{Kind, happening};
use crate::wire::heap::{self, Heap};
use crate::wire::proto::v1;
use crate::wire::weigh::List;

/// Limits on the state of a guest.
pub trait Bounds {
    /// Returns the maximum number of entries of a list.
    fn of(&self, list: List) -> usize;

    /// Returns the bytes of memory that the state may take; entries beyond that are left out.
    fn state_bytes(&self) -> usize;
}

/// No limits, for the guest, which keeps all of its own state.
#[derive(Debug, Clone, Copy)]
pub struct Unbounded;

impl Bounds for Unbounded {
    fn of(&self, _: List) -> usize {
        usize::MAX
    }

    fn state_bytes(&self) -> usize {
        usize::MAX
    }
}

/// Error: the guest has more entries in a list than allowed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the guest has more than {limit} {what}; limits.{what} in the settings allows more", what = key(*.list))]
pub struct Excess {
    list: List,
    limit: usize,
}

impl Excess {
    /// Creates the error for a list that has more entries than `bounds` allow.
    pub fn new(list: List, bounds: &dyn Bounds) -> Self {
        Self { list, limit: bounds.of(list) }
    }
}

/// Returns the name of the list in the settings.
fn key(list: List) -> &'static str {
    match list {
        List::Interfaces => "interfaces",
        List::Addresses => "addresses",
        List::FileSystems => "file-systems",
        List::Users => "users",
        List::Disks => "disks",
    }
}

/// State of a guest as it is kept, with its memory use.
#[derive(Debug, Default)]
pub struct Kept {
    /// State after all events so far, shared with its readers. None before the first event.
    pub state: Option<Arc<v1::GuestState>>,
    /// Parts of the state that are left out because they would take too many bytes.
    pub cut: v1::StateCut,
    /// Memory that the state takes, and the most that it may.
    room: Room,
}

/// Memory budget of a state.
#[derive(Debug, Default, Clone, Copy)]
pub struct Room {
    used: usize,
    most: usize,
}

impl Room {
    /// Reserves memory for an entry, and returns whether there was enough.
    pub fn take(&mut self, bytes: usize) -> bool {
        let fits = self.used.saturating_add(bytes) <= self.most;
        if fits {
            self.used += bytes;
        }
        fits
    }

    /// Returns the bytes of something that was removed from the state.
    pub fn give_back(&mut self, bytes: usize) {
        self.used = self.used.saturating_sub(bytes);
    }

    /// Keeps the entries of a list that fit into the room, and returns the number of the others.
    pub fn keep<T: Heap>(&mut self, list: &mut Vec<T>) -> u32 {
        let before = list.len();
        list.retain(|one| self.take(heap::entry(one)));
        let cut = before - list.len();
        if cut > 0 {
            list.shrink_to_fit();
        }
        u32::try_from(cut).unwrap_or(u32::MAX)
    }

    /// Adds an entry to a list if it fits, and otherwise counts it as left out.
    pub fn add<T: Heap + Clone>(&mut self, list: &mut Vec<T>, one: &T, cut: &mut u32) {
        if self.take(heap::entry(one)) {
            list.push(one.clone());
        } else {
            *cut = cut.saturating_add(1);
        }
    }

    /// Removes entries from a list. If none matches, the entry is taken to be one of those that were left out.
    pub fn remove<T: Heap>(&mut self, list: &mut Vec<T>, gone: impl Fn(&T) -> bool, cut: &mut u32) {
        let before = list.len();
        list.retain(|one| {
            let gone = gone(one);
            if gone {
                self.give_back(heap::entry(one));
            }
            !gone
        });
        if list.len() == before {
            *cut = cut.saturating_sub(1);
        }
    }

    /// Replaces a value, and returns whether the new one was left out.
    pub fn replace<T: Heap + Clone>(&mut self, place: &mut Option<T>, new: Option<&T>) -> bool {
        self.give_back(place.heap());
        *place = new.filter(|new| self.take(new.heap())).cloned();
        place.is_none() && new.is_some()
    }
}

impl Kept {
    /// Updates the state with `event`. The state in an `AgentReady` replaces the whole of it, and is taken out of the
    /// event.
    ///
    /// # Errors
    /// If the state would have more entries than allowed; it stays unchanged then.
    pub fn fold(&mut self, event: &mut v1::Event, bounds: &dyn Bounds) -> Result<(), Excess> {
        let Some(kind) = &mut event.kind else { return Ok(()) };
        self.room.most = bounds.state_bytes();
        if let Kind::AgentReady(ready) = kind {
            if let Some(whole) = ready.state.take() {
                check(&whole, bounds)?;
                self.begin(*whole);
            }
            return Ok(());
        }
        self.apply(kind, event.time, bounds)
    }

    /// Updates the state with an event of this kind and time.
    ///
    /// # Errors
    /// If the state would have more entries than allowed; it stays unchanged then.
    pub fn apply(&mut self, kind: &Kind, at: Option<Timestamp>, bounds: &dyn Bounds) -> Result<(), Excess> {
        self.room.most = bounds.state_bytes();
        happening(kind).apply(&mut Change { kept: self, bounds, at })
    }

    /// Replaces the whole state. Parts that say most in few bytes get memory first. The last freeze is always kept,
    /// because it is small.
    fn begin(&mut self, mut whole: v1::GuestState) {
        let mut room = Room { used: 0, ..self.room };
        let cut = v1::StateCut {
            node: whole.node.take_if(|node| !room.take(node.heap())).is_some(),
            health: whole.health.take_if(|health| !room.take(health.heap())).is_some(),
            topology: whole.topology.take_if(|topology| !room.take(topology.heap())).is_some(),
            disks: room.keep(&mut whole.disks),
            file_systems: room.keep(&mut whole.file_systems),
            interfaces: room.keep(&mut whole.interfaces),
            users: room.keep(&mut whole.users),
        };
        *self = Self { state: Some(Arc::new(whole)), cut, room };
    }
}

/// Access to the state for an event that updates it.
pub struct Change<'k> {
    kept: &'k mut Kept,
    bounds: &'k dyn Bounds,
    at: Option<Timestamp>,
}

impl Change<'_> {
    /// Returns the time of the event, by the guest's clock.
    pub fn at(&self) -> Option<Timestamp> {
        self.at
    }

    /// Returns the state, the record of what is left out, and the room. Only for events that change something: the
    /// whole state is copied if it still has another reader.
    pub fn parts(&mut self) -> (&mut v1::GuestState, &mut v1::StateCut, &mut Room) {
        let Kept { state, cut, room } = &mut *self.kept;
        (Arc::make_mut(state.get_or_insert_default()), cut, room)
    }

    /// Adds an entry to one of the lists.
    ///
    /// # Errors
    /// If the list already has as many entries as allowed.
    pub fn add<T: Heap + Clone>(
        &mut self,
        list: List,
        one: &T,
        place: impl for<'p> Fn(&'p mut v1::GuestState, &'p mut v1::StateCut) -> (&'p mut Vec<T>, &'p mut u32),
    ) -> Result<(), Excess> {
        let bounds = self.bounds;
        let (state, cut, room) = self.parts();
        let (entries, cut) = place(state, cut);
        within(list, entries.len() + 1, bounds)?;
        room.add(entries, one, cut);
        Ok(())
    }

    /// Checks a complete list of interfaces.
    ///
    /// # Errors
    /// If there are more interfaces than allowed, or more addresses.
    pub fn check_interfaces(&self, interfaces: &[v1::NetworkInterface]) -> Result<(), Excess> {
        check_interfaces(interfaces, self.bounds)
    }
}

fn check(state: &v1::GuestState, bounds: &dyn Bounds) -> Result<(), Excess> {
    check_interfaces(&state.interfaces, bounds)?;
    within(List::FileSystems, state.file_systems.len(), bounds)?;
    within(List::Users, state.users.len(), bounds)?;
    within(List::Disks, state.disks.len(), bounds)
}

fn check_interfaces(interfaces: &[v1::NetworkInterface], bounds: &dyn Bounds) -> Result<(), Excess> {
    within(List::Interfaces, interfaces.len(), bounds)?;
    let most = interfaces.iter().map(|interface| interface.addresses.len()).max().unwrap_or(0);
    within(List::Addresses, most, bounds)
}

fn within(list: List, found: usize, bounds: &dyn Bounds) -> Result<(), Excess> {
    if found > bounds.of(list) { Err(Excess::new(list, bounds)) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Clone, Copy)]
    struct Limits {
        interfaces: usize,
        addresses: usize,
        file_systems: usize,
        users: usize,
        disks: usize,
        state_bytes: usize,
    }

    impl Default for Limits {
        fn default() -> Self {
            let [interfaces, addresses, file_systems, users, disks] = [1024; 5];
            Self { interfaces, addresses, file_systems, users, disks, state_bytes: 1 << 20 }
        }
    }

    impl Bounds for Limits {
        fn of(&self, list: List) -> usize {
            match list {
                List::Interfaces => self.interfaces,
                List::Addresses => self.addresses,
                List::FileSystems => self.file_systems,
                List::Users => self.users,
                List::Disks => self.disks,
            }
        }

        fn state_bytes(&self) -> usize {
            self.state_bytes
        }
    }

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
        event(Kind::AgentReady(v1::AgentReady { state: state.map(Box::new), ..v1::AgentReady::default() }))
    }

    #[test]
    fn events_make_the_state() {
        let mut kept = Kept::default();
        let mut apply = |mut event| kept.fold(&mut event, &Limits::default()).unwrap();
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
        assert_eq!(kept.cut, v1::StateCut::default());
        let state = kept.state.unwrap();
        assert_eq!(state.file_systems, [file_system("/"), file_system("/a")]);
        assert_eq!(state.users.iter().map(|user| user.id.as_str()).collect::<Vec<_>>(), ["2"]);
        assert_eq!(state.interfaces.len(), 2);
        assert_eq!(state.disks, [disk(2, 5)]);
    }

    #[test]
    fn the_last_freeze_and_its_end_are_part_of_the_state() {
        let mut kept = Kept::default();
        let at = |seconds| Some(Timestamp { seconds, nanos: 0 });
        let mut frozen = event(Kind::Frozen(v1::Frozen {
            file_systems: 3,
            holder: "libvirt".into(),
            deadline_seconds: 120,
        }));
        frozen.time = at(100);
        kept.fold(&mut frozen, &Limits::default()).unwrap();
        let freeze = kept.state.as_ref().unwrap().freeze.clone().unwrap();
        assert_eq!((freeze.since, freeze.ended, freeze.file_systems), (at(100), None, 3));
        let mut thawed = event(Kind::Thawed(v1::Thawed {
            by_itself: true,
            holder: "libvirt".into(),
            end: "deadline".into(),
            problem: "the freeze ended by itself after 120 s".into(),
            ..v1::Thawed::default()
        }));
        thawed.time = at(220);
        kept.fold(&mut thawed, &Limits::default()).unwrap();
        let freeze = kept.state.as_ref().unwrap().freeze.clone().unwrap();
        assert_eq!((freeze.since, freeze.ended, freeze.file_systems), (at(100), at(220), 3));
        assert_eq!((freeze.end.as_str(), freeze.holder.as_str()), ("deadline", "libvirt"));
        // A thaw whose freeze was not reported to the state.
        kept.fold(&mut thawed, &Limits::default()).unwrap();
        let freeze = kept.state.unwrap().freeze.clone().unwrap();
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
            let mut kept = Kept::default();
            for mut allowed in [mounted("/a"), login("a", false), added(1), interfaces(2, 3)] {
                kept.fold(&mut allowed, &limits).unwrap();
            }
            let before = kept.state.clone();
            let error = kept.fold(&mut event, &limits).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
            assert_eq!(kept.state, before);
        }
    }

    fn large(generation: u64) -> v1::Disk {
        let holder = v1::DiskHolder { name: "x".repeat(256), ..v1::DiskHolder::default() };
        v1::Disk { generation, holders: vec![holder; 64], ..v1::Disk::default() }
    }

    /// Counts the bytes of the parts of the state afresh.
    fn counted(state: &v1::GuestState) -> usize {
        let lists = state.disks.iter().map(heap::entry).sum::<usize>()
            + state.file_systems.iter().map(heap::entry).sum::<usize>()
            + state.interfaces.iter().map(heap::entry).sum::<usize>()
            + state.users.iter().map(heap::entry).sum::<usize>();
        lists + state.topology.heap() + state.node.heap() + state.health.heap()
    }

    #[test]
    fn what_takes_too_many_bytes_is_left_out_and_counted() {
        let limits = Limits { state_bytes: 3 * heap::entry(&large(1)), ..Limits::default() };
        let mut kept = Kept::default();
        let add = |disk| event(Kind::DiskAdded(v1::DiskAdded { disk: Some(disk) }));
        let remove = |disk| event(Kind::DiskRemoved(v1::DiskRemoved { disk: Some(disk), in_use: vec![] }));
        let change = |disk| event(Kind::DiskChanged(v1::DiskChanged { disk: Some(disk) }));
        let disks = |kept: &Kept| {
            let state = kept.state.as_ref().unwrap();
            assert_eq!(kept.room.used, counted(state), "it is counted as it comes and goes");
            assert!(kept.room.used <= limits.state_bytes);
            (state.disks.iter().map(|disk| disk.generation).collect::<Vec<_>>(), kept.cut.disks)
        };
        for generation in 1..=5 {
            kept.fold(&mut add(large(generation)), &limits).unwrap();
        }
        assert_eq!(disks(&kept), (vec![1, 2, 3], 2));
        kept.fold(&mut remove(large(2)), &limits).unwrap();
        assert_eq!(disks(&kept), (vec![1, 3], 2), "there is room again");
        kept.fold(&mut remove(large(5)), &limits).unwrap();
        assert_eq!(disks(&kept), (vec![1, 3], 1), "one of those that were left out is gone");
        kept.fold(&mut add(large(6)), &limits).unwrap();
        kept.fold(&mut change(disk(6, 1)), &limits).unwrap();
        kept.fold(&mut add(disk(7, 1)), &limits).unwrap();
        kept.fold(&mut change(large(7)), &limits).unwrap();
        assert_eq!(disks(&kept), (vec![1, 3, 6], 2), "one that has grown too large");
        // A whole state again, in which each disk is as small as possible on the wire.
        let whole = v1::GuestState {
            disks: (1..=10).map(large).collect(),
            node: Some(v1::Node { name: "n".into(), ..v1::Node::default() }),
            users: vec![v1::UserSession::default()],
            ..v1::GuestState::default()
        };
        kept.fold(&mut ready(Some(whole)), &limits).unwrap();
        assert_eq!(disks(&kept), (vec![1, 2], 8));
        assert_eq!((kept.cut.users, kept.cut.node), (0, false), "what is small still has room");
        let labels = (0..2000).map(|number| (number.to_string(), "x".repeat(256))).collect();
        let topology = Some(v1::Topology { labels, ..v1::Topology::default() });
        kept.fold(&mut event(Kind::TopologyChanged(v1::TopologyChanged { topology })), &limits).unwrap();
        assert_eq!((kept.cut.topology, disks(&kept).1), (true, 8));
        let none = Kind::TopologyChanged(v1::TopologyChanged { topology: None });
        kept.fold(&mut event(none), &limits).unwrap();
        assert!(!kept.cut.topology);
        kept.fold(&mut ready(Some(v1::GuestState::default())), &limits).unwrap();
        assert_eq!((disks(&kept), kept.cut), ((vec![], 0), v1::StateCut::default()));
    }

    #[test]
    fn no_state_within_the_other_limits_takes_more_than_it_may() {
        let limits = Limits::default();
        let mut kept = Kept::default();
        for generation in 0..1024 {
            let mut added = event(Kind::DiskAdded(v1::DiskAdded { disk: Some(large(generation)) }));
            kept.fold(&mut added, &limits).unwrap();
        }
        let state = kept.state.as_ref().unwrap();
        assert!(state.heap() <= limits.state_bytes, "{}", state.heap());
        assert_eq!(state.disks.len() + usize::try_from(kept.cut.disks).unwrap(), 1024);
        assert!(kept.cut.disks > 0);
    }
}
