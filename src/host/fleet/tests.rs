use super::*;
use crate::host::backends::Ids;
use crate::host::conversation::Channel;
use crate::host::limits::Limits;
use crate::labels::Labels;
use crate::transport::dial::Dial;
use std::time::Duration;

fn half() -> Arc<Half> {
    Arc::new(Half::new("host".into()))
}

/// Reports a complete list of VMs, as a backend does.
fn list(fleet: &mut Fleet, vms: Vec<Vm>) {
    let gone = |name: &&String| vms.iter().all(|vm| vm.name != **name);
    for name in fleet.vms.keys().filter(gone).cloned().collect::<Vec<_>>() {
        fleet.change(Change::Removed { name });
    }
    for vm in vms {
        fleet.change(Change::Present(vm.into()));
    }
}

fn ids(lasting: &str) -> Ids {
    Ids { lasting: lasting.into(), ..Ids::default() }
}

/// Creates a channel for calls that are never made.
async fn channel() -> Box<Channel> {
    let (near, _far) = tokio::io::duplex(64);
    let (client, _connection) = crate::transport::http2::connect(near).await.unwrap();
    Box::new(Channel::new(client, 1 << 20))
}

fn sessions(fleet: &Fleet) -> Vec<(&str, u64)> {
    fleet.vms.iter().map(|(name, entry)| (name.as_str(), entry.running.session)).collect()
}

#[tokio::test]
async fn a_new_list_keeps_what_is_the_same_and_ends_the_rest() {
    let (mut fleet, _changes, _handle) = Fleet::new(half());
    list(&mut fleet, vec![Vm::at("b", "/nowhere/b"), Vm::at("a", "/nowhere/a"), Vm::at("c", "/nowhere/c")]);
    assert_eq!(sessions(&fleet), [("a", 2), ("b", 1), ("c", 3)]);
    list(&mut fleet, vec![Vm::at("a", "/nowhere/a"), Vm::at("b", "/nowhere/other")]);
    assert_eq!(sessions(&fleet), [("a", 2), ("b", 4)]);
    fleet.report(1, Report::Refused("from the session that has ended".into()));
    assert_eq!(fleet.vms["b"].view.session(), SessionState::Connecting);
    fleet.report(4, Report::Refused("from the one that lives".into()));
    assert_eq!(fleet.vms["b"].view.session(), SessionState::Refused);
}

#[tokio::test]
async fn a_boot_id_that_changed_is_a_reboot_and_the_first_is_not() {
    let (mut fleet, _changes, _handle) = Fleet::new(half());
    list(&mut fleet, vec![Vm::at("a", "/nowhere/a")]);
    let mut events = fleet.events.subscribe();
    for (boot_id, expected) in [("one", false), ("one", false), ("two", true)] {
        let info = Box::new(v1::GuestInfo { boot_id: boot_id.into(), ..v1::GuestInfo::default() });
        let (after, channel) = (Duration::from_millis(1500), channel().await);
        fleet.report(1, Report::Opened { info, after, channel, key: None });
        let Some(Kind::SessionOpened(opened)) = events.try_recv().unwrap().kind.clone() else { panic!() };
        assert_eq!((opened.rebooted, opened.after_milliseconds), (expected, 1500));
    }
    assert_eq!(fleet.vms["a"].view.sessions, 3);
}

#[tokio::test(start_paused = true)]
async fn resets_that_are_one_are_told_once() {
    let (mut fleet, _changes, _handle) = Fleet::new(half());
    list(&mut fleet, vec![Vm::at("a", "/nowhere/a")]);
    let reset = || Change::Reset { name: "a".into() };
    let heard = || Report::Heard(v1::Event::default().into());
    let resets = |fleet: &Fleet| fleet.vms["a"].running.machine.borrow().resets;
    fleet.change(reset());
    fleet.report(1, heard());
    tokio::time::advance(Duration::from_millis(50)).await;
    fleet.change(reset());
    assert_eq!(resets(&fleet), 1, "QEMU tells it twice");
    tokio::time::advance(Duration::from_secs(1)).await;
    fleet.change(reset());
    tokio::time::advance(Duration::from_secs(60)).await;
    fleet.change(reset());
    assert_eq!(resets(&fleet), 2, "nothing ran in between");
    fleet.report(1, heard());
    fleet.change(reset());
    assert_eq!(resets(&fleet), 3);
    let past = fleet.watch(None, Some(&Timestamp { seconds: 0, nanos: 0 })).unwrap().past;
    let told = |event: &&Arc<VirtualMachineEvent>| matches!(event.kind, Some(Kind::GuestReset(_)));
    assert_eq!(past.iter().filter(told).count(), 3);
}

#[tokio::test]
async fn a_vm_that_changes_keeps_what_is_known_of_it_and_gets_a_new_session() {
    let (mut fleet, _changes, _handle) = Fleet::new(half());
    list(&mut fleet, vec![Vm::at("a", "/nowhere/a")]);
    let (power, problem) = (PowerState::Paused, String::new());
    fleet.change(Change::Power { name: "a".into(), power, problem });
    fleet.report(1, Report::Refused("why".into()));
    let changed = Vm { limits: Arc::new(Limits { users: 1, ..Limits::default() }), ..Vm::at("a", "/other") };
    list(&mut fleet, vec![changed]);
    let entry = &fleet.vms["a"];
    assert_eq!((entry.running.session, entry.view.power()), (2, PowerState::Paused));
    assert_eq!(entry.running.machine.borrow().power, PowerState::Paused);
    assert_eq!((entry.view.session(), entry.view.dial.as_str()), (SessionState::Connecting, "unix:/other"));
    let since = Some(Timestamp { seconds: 0, nanos: 0 });
    let past = |name: &str| fleet.watch(Some(&name.to_owned()), since.as_ref()).unwrap().past.len();
    assert_eq!(past("a"), 1, "the change of power is remembered");
    assert!(fleet.watch(Some(&"b".to_owned()), None).is_none());
    let other = Vm { ids: ids("other"), ..Vm::at("a", "/other") };
    list(&mut fleet, vec![other]);
    assert_eq!(fleet.vms["a"].view.power(), PowerState::Unspecified, "another VM of the same name");
}

#[tokio::test]
async fn labels_change_without_a_new_session_and_stay_with_the_vm() {
    let (mut fleet, _changes, _handle) = Fleet::new(half());
    list(&mut fleet, vec![Vm::at("a", "/nowhere/a")]);
    let labels = Labels::from([("tier".to_owned(), "db".to_owned())]);
    for name in ["a", "b"] {
        fleet.change(Change::Labels { name: name.into(), labels: labels.clone().into() });
    }
    assert_eq!((sessions(&fleet), &fleet.vms["a"].view.labels), (vec![("a", 1)], &labels));
    list(&mut fleet, vec![Vm::at("a", "/other")]);
    assert_eq!((sessions(&fleet), &fleet.vms["a"].view.labels), (vec![("a", 2)], &labels));
    list(&mut fleet, vec![Vm { ids: ids("other"), ..Vm::at("a", "/other") }]);
    assert_eq!(fleet.vms["a"].view.labels, Labels::new(), "another VM of the same name");
}

#[tokio::test]
async fn a_state_that_is_too_large_is_told_to_the_session() {
    let (mut fleet, _changes, _handle) = Fleet::new(half());
    let limits = Arc::new(Limits { users: 0, ..Limits::default() });
    list(&mut fleet, vec![Vm { limits, ..Vm::at("a", "/nowhere/a") }]);
    let session = Some(v1::UserSession::default());
    let kind = Some(event::Kind::UserLoggedIn(v1::UserLoggedIn { session }));
    fleet.report(1, Report::Heard(v1::Event { kind, ..v1::Event::default() }.into()));
    let excess = fleet.vms["a"].running.machine.borrow().excess;
    assert!(excess.unwrap().1.to_string().contains("more than 0 users"));
}

#[tokio::test]
async fn a_vm_is_found_by_what_it_is_known_by() {
    let (mut fleet, _changes, _handle) = Fleet::new(half());
    let vm = |name: &str, uuid: &str, cluster: &str| Vm {
        ids: ids(uuid),
        cluster: cluster.into(),
        ..Vm::at(name, "/nowhere")
    };
    // The name of one VM is the UUID of another.
    list(
        &mut fleet,
        vec![vm("a", "0a", "dev"), vm("b", "0b", "dev"), vm("c", "0c", "prod"), vm("0b", "0d", "dev")],
    );
    let node = |cluster: &str, node: &str| Identity::Node { cluster: cluster.into(), node: node.into() };
    let cases = [
        (Identity::Name("a".into()), Some("a")),
        (Identity::Name("0a".into()), None),
        (Identity::Uuid("0c".into()), Some("c")),
        (Identity::Uuid("c".into()), None),
        (node("dev", "0A"), Some("a")),
        (node("dev", "a"), Some("a")),
        (node("dev", "0b"), Some("b")),
        (node("dev", "0d"), Some("0b")),
        (node("dev", "c"), None),
        (node("dev", "0c"), None),
        (node("prod", "c"), Some("c")),
        (node("prod", "A"), None),
    ];
    for (identity, expected) in cases {
        let found = fleet.find(&identity).map(|entry| entry.vm.name.as_str());
        assert_eq!(found, expected, "{identity:?}");
    }
    list(&mut fleet, vec![vm("a", "0e", "dev")]);
    let found = |fleet: &Fleet, uuid: &str| {
        fleet.find(&Identity::Uuid(uuid.into())).map(|entry| entry.vm.name.clone()).unwrap_or_default()
    };
    let all = |fleet: &Fleet| ["0a", "0b", "0e"].map(|uuid| found(fleet, uuid));
    assert_eq!(all(&fleet), ["", "", "a"], "the index follows the list");
    // The VM gets another name, and its old name is removed late. Then two VMs swap theirs.
    fleet.change(Change::Present(vm("z", "0e", "dev").into()));
    fleet.change(Change::Removed { name: "a".into() });
    assert_eq!(all(&fleet), ["", "", "z"]);
    fleet.change(Change::Present(vm("y", "0a", "dev").into()));
    fleet.change(Change::Present(vm("y", "0e", "dev").into()));
    fleet.change(Change::Present(vm("z", "0a", "dev").into()));
    assert_eq!(all(&fleet), ["z", "", "y"]);
    assert_eq!((fleet.names.len(), fleet.uuids.0.len()), (2, 2));
}

#[tokio::test]
async fn what_is_known_is_shared_with_whoever_asks_and_stays_as_they_were_told() {
    let (mut fleet, _changes, _handle) = Fleet::new(half());
    list(&mut fleet, vec![Vm::at("a", "/nowhere/a")]);
    let disk = |generation| Some(v1::Disk { generation, ..v1::Disk::default() });
    let added = |generation| {
        let kind = Some(event::Kind::DiskAdded(v1::DiskAdded { disk: disk(generation) }));
        Report::Heard(v1::Event { kind, ..v1::Event::default() }.into())
    };
    fleet.report(1, added(1));
    let entry = &fleet.vms["a"];
    let (known, again) = (entry.known(), entry.known());
    assert!(Arc::ptr_eq(&known.view, &again.view), "nothing is copied for a second one who asks");
    assert!(Arc::ptr_eq(known.state.as_ref().unwrap(), again.state.as_ref().unwrap()));
    let machine = entry.machine();
    assert!(Arc::ptr_eq(&machine.vm, &entry.vm));
    let state = Arc::as_ptr(entry.kept.state.as_ref().unwrap());
    fleet.report(
        1,
        Report::Heard(
            v1::Event { kind: Some(event::Kind::Heartbeat(v1::Heartbeat {})), ..v1::Event::default() }.into(),
        ),
    );
    assert_eq!(
        Arc::as_ptr(fleet.vms["a"].kept.state.as_ref().unwrap()),
        state,
        "a heartbeat copies no state"
    );
    fleet.report(1, added(2));
    let disks = |state: &Option<Arc<v1::GuestState>>| state.as_ref().unwrap().disks.len();
    assert_eq!((disks(&known.state), disks(&fleet.vms["a"].kept.state)), (1, 2));
}

#[derive(Debug)]
struct Faulty;

impl std::fmt::Display for Faulty {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("faulty")
    }
}

impl Dial for Faulty {
    fn dial(&self, _: crate::transport::dial::Source) -> crate::transport::dial::Dialing<'_> {
        panic!("a fault that this test makes")
    }

    fn is_same(&self, _: &dyn Dial) -> bool {
        false
    }
}

#[tokio::test(start_paused = true)]
async fn a_session_that_panics_is_begun_anew_after_a_while() {
    let (mut fleet, _changes, _handle) = Fleet::new(half());
    list(&mut fleet, vec![Vm::at("a", "/nowhere/a")]);
    let known = report::Machine { power: PowerState::Running, resets: 3, excess: None };
    let faulty = Arc::new(Vm { dial: Faulty.into(), ..Vm::at("a", "") });
    let running = fleet.begin(fleet.contact(&faulty, place::channel().1), known);
    let session = running.session;
    fleet.vms.get_mut("a").unwrap().running = running;
    fleet.names = [(session, "a".to_owned())].into();
    let mut states = Vec::new();
    while states.len() < 2 {
        let (reporter, report) = fleet.reports.1.recv().await.unwrap();
        if reporter == session {
            fleet.report(reporter, report);
            states.push(fleet.vms["a"].view.session());
        }
    }
    assert_eq!(states, [SessionState::Refused, SessionState::Connecting]);
    let entry = &fleet.vms["a"];
    assert_eq!((entry.running.session, *entry.running.machine.borrow()), (session + 1, known));
}

#[tokio::test]
async fn nobody_is_answered_before_all_vms_were_told() {
    let (fleet, changes, handle) = Fleet::new(half());
    let shutdown = CancellationToken::new();
    let running = fleet.run(shutdown.clone());
    let asking = async {
        let mut early = std::pin::pin!(handle.list());
        let mut waits = async || tokio::time::timeout(Duration::from_millis(20), &mut early).await.is_err();
        assert!(waits().await);
        changes.send(Change::Present(Vm::at("a", "/nowhere/a").into())).await.unwrap();
        assert!(waits().await);
        changes.send(Change::Synced).await.unwrap();
        assert_eq!(early.await.unwrap().len(), 1);
        shutdown.cancel();
    };
    tokio::join!(running, asking);
    assert_eq!(handle.tally().await, Err(Stopped));
}
