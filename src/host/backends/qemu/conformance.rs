//! Runs the conformance tests of backends on pools and QMP, with a simulated QEMU.

use super::super::Ids;
use super::super::conformance::{Bench, check};
use super::super::disks::Format;
use super::super::volumes::{Place, Volumes};
use super::*;
use pools::{Allocation, PATIENCE, Pool, Pools};

#[path = "../../../../tests/host/hypervisor.rs"]
#[allow(
    dead_code,
    clippy::disallowed_methods,
    reason = "the tests from outside use all of it, and the system freely"
)]
mod hypervisor;

use hypervisor::Hypervisor;

const NAMES: [&str; 2] = ["a", "b"];

struct Made {
    pools: Pools,
    qemus: [Hypervisor; 2],
}

fn place(name: &str) -> Place {
    Place { uuid: format!("uuid-of-{name}"), vm: name.to_owned() }
}

impl Made {
    fn qemu(&self, vm: &str) -> &Hypervisor {
        &self.qemus[NAMES.iter().position(|name| *name == vm).unwrap()]
    }
}

impl Bench for Made {
    fn volumes(&self) -> &dyn Volumes {
        &self.pools
    }

    fn vms(&self) -> [Place; 2] {
        NAMES.map(place)
    }

    fn plugged(&self, vm: &str) -> usize {
        self.qemu(vm).devices().len()
    }

    fn be_silent(&self, vm: &str) {
        self.qemu(vm).be_silent();
    }
}

async fn keeps_its_promises(format: Format, allocation: Allocation) {
    let folder = tempfile::tempdir().unwrap();
    let socket = |name: &str| folder.path().join(format!("{name}.qmp"));
    let qemus = NAMES.map(|name| Hypervisor::start(&socket(name), &["port1"]));
    let machine = |name: &str| Machine {
        vm: Vm { ids: Ids { lasting: place(name).uuid, ..Ids::default() }, ..Vm::at(name, "/nowhere") }
            .into(),
        qmp: Some(socket(name)),
        console: None,
        labels: Arc::default(),
    };
    let (_machines, machines) = watch::channel(NAMES.map(machine).to_vec());
    let (_topology, topology) = watch::channel(Arc::default());
    let backend = Qemu::new(machines, topology, Arc::new(Half::new("host".into())));
    let pool = Pool {
        name: "fast".into(),
        path: folder.path().join("fast"),
        format,
        allocation,
        bus: None,
        is_default: true,
        patience: PATIENCE,
    };
    let (_pools, settings) = watch::channel(vec![pool]);
    let pools =
        Pools::new(settings, folder.path().to_owned(), backend.hotplug(folder.path().join("volumes")));
    let (changes, mut told) = mpsc::channel(16);
    let scope = Scope::new();
    scope.children().spawn(Box::new(backend).watch(changes));
    let mut running = 0;
    while running < NAMES.len() {
        let change = told.recv().await.unwrap();
        running += usize::from(matches!(change, Change::Power { power: PowerState::Running, .. }));
    }
    // Drain the other events, so that the sender never blocks.
    scope.children().spawn(async move { while told.recv().await.is_some() {} });
    check(&Made { pools, qemus }).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn raw_images_are_volumes() {
    keeps_its_promises(Format::Raw, Allocation::Thin).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn qcow2_images_are_volumes() {
    keeps_its_promises(Format::Qcow2, Allocation::Thin).await;
}
