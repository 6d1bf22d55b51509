//! QEMU on this machine, without libvirt or Kubernetes: the VMs come from a list, and each VM's QMP socket, if
//! it has one, shows whether the VM runs.
//!
//! QEMU serves one client on a QMP socket at a time: give this program a socket of its own.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;

use tokio::sync::{mpsc, watch};

use super::super::half::Half;
use super::{Backend, Change, Vm};
use crate::labels::Labels;
use crate::supervise::Scope;
use crate::wire::proto::v1::{PowerState, Topology};

pub mod claim;
#[cfg(test)]
mod conformance;
pub mod console;
pub mod failed;
pub mod hotplug;
pub mod link;
pub mod meters;
pub mod monitor;
pub mod pools;
pub mod power;
mod worker;

use hotplug::{Hotplug, Vms};

/// VM of the list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Machine {
    /// Identity and limits of the VM.
    pub vm: Arc<Vm>,
    /// Path of its QMP socket.
    pub qmp: Option<PathBuf>,
    /// Device that is its console, if the settings say so.
    pub console: Option<console::Wish>,
    /// Labels, which do not affect its session.
    pub labels: Arc<Labels>,
}

/// VMs with their labels, by name, as they were last reported.
type Listed = BTreeMap<String, (Arc<Vm>, Arc<Labels>)>;

/// Backend for VMs of this machine.
#[derive(Debug)]
pub struct Qemu {
    machines: watch::Receiver<Vec<Machine>>,
    topology: watch::Receiver<Arc<Topology>>,
    vms: watch::Sender<Vms>,
    consoles: watch::Sender<console::Targets>,
    half: Arc<Half>,
}

impl Qemu {
    /// Creates a backend for these VMs, on a machine at this location.
    pub fn new(
        machines: watch::Receiver<Vec<Machine>>,
        topology: watch::Receiver<Arc<Topology>>,
        half: Arc<Half>,
    ) -> Self {
        let (vms, consoles) = (watch::Sender::default(), watch::Sender::default());
        Self { machines, topology, vms, consoles, half }
    }

    /// Returns the hot-plugging of these VMs, which works while the backend watches them. Volumes are stored in
    /// that directory.
    pub fn hotplug(&self, volumes: PathBuf) -> Hotplug {
        Hotplug::new(self.vms.subscribe(), volumes)
    }

    /// Returns the meters of these VMs, which work while the backend watches them.
    pub fn meters(&self) -> meters::Qmp {
        meters::Qmp::new(self.vms.subscribe())
    }

    /// Returns the consoles of these VMs, which work while the backend watches them.
    pub fn serials(&self) -> console::Serials {
        console::Serials::new(self.consoles.subscribe())
    }
}

/// Monitor of one QMP socket of one VM, until it is dropped.
struct Monitor {
    /// Name and lasting identifier of the VM, and path of the socket: if one of them changes, a new monitor is
    /// started.
    of: (String, String, PathBuf),
    /// Plugs disks into the VM.
    vm: Arc<hotplug::Vm>,
    /// Sends commands through the monitor's connection.
    link: link::Link,
    _scope: Scope,
}

impl Monitor {
    fn start(of: (String, String, PathBuf), changes: mpsc::Sender<Change>, half: &Arc<Half>) -> Self {
        let scope = Scope::new();
        let (link, inbox) = link::new(Arc::clone(half));
        let vm = Arc::new(hotplug::Vm::new(of.0.clone(), of.1.clone(), link.clone(), scope.children()));
        scope.children().spawn(Arc::clone(&vm).sweep());
        scope.children().spawn(Arc::clone(&vm).watch_io(changes.clone()));
        scope.children().spawn(monitor::run(of.0.clone(), of.2.clone(), changes, inbox));
        Self { of, vm, link, _scope: scope }
    }
}

impl Backend for Qemu {
    fn watch(mut self: Box<Self>, changes: mpsc::Sender<Change>) -> Pin<Box<dyn Future<Output = ()> + Send>> {
        Box::pin(async move {
            let (mut told, mut monitors) = (None, BTreeMap::new());
            loop {
                let machines = self.machines.borrow_and_update().clone();
                let names: Vec<_> = machines.iter().map(|machine| machine.vm.name.clone()).collect();
                let wishes: Vec<_> = machines.iter().map(|machine| machine.console.clone()).collect();
                if list(&machines, &mut told, &changes).await.is_err()
                    || monitor_all(machines, &mut monitors, &changes, &self.half).await.is_err()
                {
                    return;
                }
                let topology = Arc::clone(&self.topology.borrow_and_update());
                if tell(&names, &topology, &changes).await.is_err() {
                    return;
                }
                let vm = |name: &String| monitors.get(name).map(|monitor| Arc::clone(&monitor.vm));
                self.vms.send_replace(names.iter().map(|name| (name.clone(), vm(name))).collect());
                let console = |(name, wish): (&String, Option<console::Wish>)| {
                    let link = monitors.get(name).map(|monitor: &Monitor| monitor.link.clone());
                    (name.clone(), link.map(|link| console::Target { link, wish }))
                };
                self.consoles.send_replace(names.iter().zip(wishes).map(console).collect());
                loop {
                    tokio::select! {
                        () = changes.closed() => return,
                        Ok(()) = self.machines.changed() => break,
                        Ok(()) = self.topology.changed() => {}
                    }
                    let topology = Arc::clone(&self.topology.borrow_and_update());
                    if tell(&names, &topology, &changes).await.is_err() {
                        return;
                    }
                }
            }
        })
    }
}

/// Reports the location of the VMs.
async fn tell(
    names: &[String],
    topology: &Arc<Topology>,
    changes: &mpsc::Sender<Change>,
) -> Result<(), mpsc::error::SendError<Change>> {
    for name in names {
        changes.send(Change::Topology { name: name.clone(), topology: Arc::clone(topology) }).await?;
    }
    Ok(())
}

/// Reports the changes of the list since the last report, which is `None` at first.
async fn list(
    machines: &[Machine],
    told: &mut Option<Listed>,
    changes: &mpsc::Sender<Change>,
) -> Result<(), mpsc::error::SendError<Change>> {
    let is_first = told.is_none();
    let mut before = told.take().unwrap_or_default();
    let mut now = BTreeMap::new();
    let (mut present, mut relabelled) = (Vec::new(), Vec::new());
    for Machine { vm, labels, .. } in machines {
        let (known, labels_before) = before.remove(&vm.name).unzip();
        if known.as_ref() != Some(vm) {
            present.push(Arc::clone(vm));
        }
        // Another VM under the name of one before has no labels yet.
        let is_same = known.is_some_and(|known| known.ids.lasting == vm.ids.lasting);
        if *labels != labels_before.filter(|_| is_same).unwrap_or_default() {
            relabelled.push((vm.name.clone(), Arc::clone(labels)));
        }
        now.insert(vm.name.clone(), (Arc::clone(vm), Arc::clone(labels)));
    }
    // Removals come first, because a removed VM's identifiers may be in use by another VM.
    for name in before.into_keys() {
        changes.send(Change::Removed { name }).await?;
    }
    for vm in present {
        changes.send(Change::Present(vm)).await?;
    }
    for (name, labels) in relabelled {
        changes.send(Change::Labels { name, labels }).await?;
    }
    if is_first {
        changes.send(Change::Synced).await?;
    }
    *told = Some(now);
    Ok(())
}

/// Ensures that every QMP socket of the list has a monitor.
async fn monitor_all(
    machines: Vec<Machine>,
    monitors: &mut BTreeMap<String, Monitor>,
    changes: &mpsc::Sender<Change>,
    half: &Arc<Half>,
) -> Result<(), mpsc::error::SendError<Change>> {
    let mut before = std::mem::take(monitors);
    for Machine { vm, qmp, .. } in machines {
        let known = before.remove(&vm.name);
        let wanted = qmp.map(|path| (vm.name.clone(), vm.ids.lasting.clone(), path));
        let monitor = match (known, wanted) {
            (Some(known), Some(wanted)) if known.of == wanted => known,
            (known, wanted) => {
                if known.is_some() {
                    // What the previous monitor reported about the VM is no longer known.
                    drop(known);
                    let (power, problem) = (PowerState::Unspecified, String::new());
                    changes.send(Change::Power { name: vm.name.clone(), power, problem }).await?;
                    changes.send(Change::IoErrors { name: vm.name.clone(), errors: Vec::new() }).await?;
                }
                let Some(wanted) = wanted else { continue };
                Monitor::start(wanted, changes.clone(), half)
            }
        };
        monitors.insert(vm.name.clone(), monitor);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::backends::Ids;

    fn machine(name: &str, qmp: Option<&str>) -> Machine {
        machine_at(name, "/nowhere", qmp)
    }

    fn machine_at(name: &str, socket: &str, qmp: Option<&str>) -> Machine {
        let (vm, qmp) = (Vm::at(name, socket).into(), qmp.map(PathBuf::from));
        Machine { vm, qmp, console: None, labels: Arc::default() }
    }

    #[tokio::test]
    async fn labels_are_told_when_they_change_and_with_a_vm_that_is_new() {
        let machine = |uuid: &str, labels: &[&str]| {
            let vm = Vm { ids: Ids { lasting: uuid.into(), ..Ids::default() }, ..Vm::at("a", "/nowhere") };
            let labels: Labels = labels.iter().map(|key| ((*key).to_owned(), "x".to_owned())).collect();
            Machine { vm: vm.into(), labels: labels.into(), ..machine("a", None) }
        };
        let (changes, mut heard) = mpsc::channel(16);
        let mut told = None;
        for (machine, expected) in [
            (machine("1", &["tier"]), &["present", "tier", "synced"][..]),
            (machine("1", &["tier"]), &[]),
            (machine("1", &["rack", "tier"]), &["rack tier"]),
            (machine("2", &["rack", "tier"]), &["present", "rack tier"]),
            (machine("2", &[]), &[""]),
            (machine("3", &[]), &["present"]),
        ] {
            list(&[machine], &mut told, &changes).await.unwrap();
            let mut words = Vec::new();
            while let Ok(change) = heard.try_recv() {
                words.push(match change {
                    Change::Present(_) => "present".to_owned(),
                    Change::Synced => "synced".to_owned(),
                    Change::Labels { labels, .. } => labels.keys().cloned().collect::<Vec<_>>().join(" "),
                    change => format!("{change:?}"),
                });
            }
            assert_eq!(words, expected);
        }
    }

    #[tokio::test]
    async fn a_new_list_keeps_the_monitors_of_sockets_that_are_the_same() {
        let folder = tempfile::tempdir().unwrap();
        let left = |name: &str| {
            let path = folder.path().join(name);
            drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
            path.to_str().unwrap().to_owned()
        };
        let (a, b, other) = (left("a"), left("b"), left("other"));
        let (list, machines) = watch::channel(vec![machine("a", Some(&a)), machine("b", None)]);
        let (changes, mut told) = mpsc::channel(16);
        let scope = Scope::new();
        let (move_to, topology) = watch::channel(Arc::default());
        scope.children().spawn(
            Box::new(Qemu::new(machines, topology, Arc::new(Half::new("host".into())))).watch(changes),
        );
        let power = |name: &str, power| Change::Power { name: name.into(), power, problem: String::new() };
        let off = |name: &str| power(name, PowerState::Off);
        let unknown = |name: &str| power(name, PowerState::Unspecified);
        // Topology events are interleaved with the others, and are only counted.
        let mut places = 0;
        let mut next = async || loop {
            match told.recv().await.unwrap() {
                Change::Topology { .. } => places += 1,
                Change::IoErrors { errors, .. } => assert_eq!(errors, []),
                change => return change,
            }
        };
        assert_eq!(next().await, Change::Present(machine("a", None).vm));
        assert_eq!(next().await, Change::Present(machine("b", None).vm));
        assert_eq!(next().await, Change::Synced);
        assert_eq!(next().await, off("a"));

        list.send_replace(vec![machine("a", Some(&a)), machine("b", Some(&b))]);
        assert_eq!(next().await, off("b"), "a's has told already");

        list.send_replace(vec![machine("a", None), machine("b", Some(&other))]);
        assert_eq!(next().await, unknown("a"));
        assert_eq!(next().await, unknown("b"));
        assert_eq!(next().await, off("b"));

        let moved = machine_at("c", "/elsewhere", None);
        list.send_replace(vec![machine("a", None), machine("b", Some(&other)), moved.clone()]);
        assert_eq!(next().await, Change::Present(moved.vm), "the others were told");
        let altered = machine_at("a", "/elsewhere", None);
        list.send_replace(vec![machine("b", Some(&other)), altered.clone()]);
        assert_eq!(next().await, Change::Removed { name: "c".into() });
        assert_eq!(next().await, Change::Present(altered.vm));

        let elsewhere = Arc::new(Topology { zone: "b".into(), ..Topology::default() });
        move_to.send_replace(Arc::clone(&elsewhere));
        let moved =
            |change: &Change| matches!(change, Change::Topology { topology, .. } if *topology == elsewhere);
        let mut heard = 0;
        while heard < 2 {
            heard += usize::from(moved(&told.recv().await.unwrap()));
        }
    }
}
