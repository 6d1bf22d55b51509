//! Tests of the admin API with a real fleet: a watcher that cannot keep up gets `DATA_LOSS`.

use tokio_util::sync::CancellationToken;

use super::*;
use crate::host::backends::{Change, Kind, Vm};
use crate::host::fleet::Fleet;
use crate::host::peer::Peer;
use crate::host::volumes::policy::Policies;
use crate::wire::proto::v1::PowerState;

#[tokio::test]
async fn a_watcher_that_is_too_slow_is_told_so() {
    let half = Arc::new(Half::new("host".into()));
    let (fleet, changes, handle) = Fleet::new(Arc::clone(&half));
    let shutdown = CancellationToken::new();
    let watching = async {
        changes.send(Change::Present(Vm::at("a", "/nowhere/a").into())).await.unwrap();
        changes.send(Change::Synced).await.unwrap();
        let (_standing, settings) = watch::channel(Standing::new("/nowhere".into()));
        let (machines, pools) = (watch::channel(Vec::new()).1, watch::channel(Vec::new()).1);
        let topology = watch::channel(Arc::default()).1;
        let place = topology.clone();
        let built =
            Kind::Qemu { machines, topology, volumes: "/nowhere".into(), pools, state: "/nowhere".into() }
                .build(&half);
        let policies = watch::channel(Policies::new()).1;
        let volumes = Keeper::new(built.volumes, handle.clone(), policies, Arc::clone(&half));
        let (fleet, disks, rules) = (handle.clone(), built.disks, watch::channel(Arc::default()).1);
        let (keeper, counts) = (volumes.clone(), Arc::clone(&half));
        let admission = Admission { rules, fleet: handle.clone(), volumes: keeper, half: counts };
        let trust = Arc::new(Trust::for_tests());
        let backend = backends::Standing::default();
        let consoles = console::Desk::new(built.consoles, Arc::clone(&half));
        let (cloud, listed) = (None, None);
        let topology = place;
        let api = Api {
            admission,
            fleet,
            disks,
            volumes,
            trust,
            half,
            topology,
            settings,
            backend,
            desks: Desks::default(),
            consoles,
            cloud,
            listed,
        };
        let mut request = Request::new(WatchVirtualMachinesRequest::default());
        request.extensions_mut().insert(Peer::new(0, 0));
        let mut events = api.watch_virtual_machines(request).await.unwrap().into_inner();
        for power in [PowerState::Paused, PowerState::Running].into_iter().cycle().take(2000) {
            let change = Change::Power { name: "a".into(), power, problem: String::new() };
            changes.send(change).await.unwrap();
        }
        // The fleet has processed all changes once their inbox is empty.
        while changes.capacity() < changes.max_capacity() {
            tokio::task::yield_now().await;
        }
        let lost = events.next().await.unwrap().unwrap_err();
        assert_eq!(lost.code(), tonic::Code::DataLoss);
        shutdown.cancel();
    };
    tokio::join!(fleet.run(shutdown.clone()), watching);
}
