//! `KubeVirt`, the kubelets of its hosts and their storage, played on a real API server by one task. Whoever looks at the API
//! sees what a real cluster shows, and a test says when each [`Step`] is taken, and which fail.
//!
//! | file | plays |
//! |---|---|
//! | [`controller`], [`instance`] | virt-controller: VMs, their instances and launchers |
//! | [`requests`], [`attachers`] | virt-controller: what of a VM's volumes comes to its instance, and into attachment pods |
//! | [`handler`], [`domain`] | virt-handler and libvirt: disks are plugged into a domain |
//! | [`migration`] | both, when a VM is moved |
//! | [`kubelet`] | the scheduler and the kubelets, for these pods |
//! | [`storage`] | the storage of the hosts: provisioner, resizer and attacher |
//! | [`shares`] | Harvester's NFS servers |
//! | [`subresources`], [`consoles`], [`admission`] | virt-api |
//!
//! [`world`] is the task with all objects, [`pace`] what tests have said of steps, [`journal`] what was done. To play one more
//! thing: give it a file with an `impl World`, a line in `World::pass`, and steps of its own.

pub mod admission;
mod attachers;
pub mod consoles;
mod controller;
pub mod domain;
mod handler;
mod instance;
pub mod journal;
mod kubelet;
mod migration;
pub mod objects;
pub mod pace;
pub mod requests;
mod shares;
pub mod storage;
mod subresources;
mod world;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use http::Method;
use serde_json::{Value, json};
use tokio::sync::Notify;
use tokio::task::JoinHandle;

use self::consoles::{Consoles, Ports};
use self::domain::Domain;
use self::journal::Journal;
use self::kubelet::HOSTNAME;
use self::objects::{Kind, name, text};
use self::pace::{Pace, Step};
use self::world::World;
use crate::api::Api;
use crate::client::{JSON, call};
use crate::patience::until;

/// How long a step takes if nothing else is said: so long that whoever watches can see each.
const USUAL: Duration = Duration::from_millis(20);

/// The model, which plays until this is dropped.
pub struct Model {
    shared: Arc<Shared>,
    api: Api,
    task: JoinHandle<()>,
    virt_api: JoinHandle<()>,
}

/// What tests say to the task, and it to them.
struct Shared {
    pace: Mutex<Pace>,
    journal: Mutex<Journal>,
    hosts: Mutex<Hosts>,
    consoles: Consoles,
    changed: Notify,
}

/// Where volumes are served by NFS, unless a test says otherwise.
const SHARES: &str = "192.0.2.10";

/// What is on the hosts, whatever the API says.
#[derive(Default)]
struct Hosts {
    /// Nodes that are off.
    off: BTreeSet<String>,
    /// Nodes that run, but reach nobody.
    cut: BTreeSet<String>,
    /// Domains, by the UID of their instance: the UID of the launcher, and the node.
    domains: BTreeMap<String, (String, String)>,
    numbers: u64,
}

impl Shared {
    fn pace(&self) -> MutexGuard<'_, Pace> {
        self.pace.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn journal(&self) -> MutexGuard<'_, Journal> {
        self.journal.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn hosts(&self) -> MutexGuard<'_, Hosts> {
        self.hosts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a node runs and reaches the API server.
    fn lives(&self, node: &str) -> bool {
        let hosts = self.hosts();
        !hosts.off.contains(node) && !hosts.cut.contains(node)
    }

    fn off(&self) -> Vec<String> {
        self.hosts().off.iter().cloned().collect()
    }

    fn domain_of(&self, instance: &str) -> Option<String> {
        self.hosts().domains.get(instance).map(|(launcher, _)| launcher.clone())
    }

    fn runs_in(&self, launcher: &str) -> bool {
        self.hosts().domains.values().any(|(its, _)| its == launcher)
    }

    /// A domain runs in this launcher from now on.
    fn begin(&self, instance: &str, launcher: &str, node: &str) {
        self.hosts().domains.insert(instance.to_owned(), (launcher.to_owned(), node.to_owned()));
    }

    fn end(&self, instance: &str) {
        self.hosts().domains.remove(instance);
    }

    /// A number that nobody has had.
    fn next(&self) -> u64 {
        let mut hosts = self.hosts();
        hosts.numbers += 1;
        hosts.numbers
    }
}

impl Drop for Model {
    fn drop(&mut self) {
        self.task.abort();
        self.virt_api.abort();
    }
}

impl Model {
    /// Starts one that does all in this cluster, with its virt-api behind the API server.
    pub async fn start(plane: &crate::plane::ControlPlane, domain: Arc<dyn Domain>) -> Self {
        let api = Api::read(plane.folder.path(), "test");
        let shared = Arc::new(Shared {
            pace: Mutex::new(Pace::new(USUAL)),
            journal: Mutex::default(),
            hosts: Mutex::default(),
            consoles: Consoles::default(),
            changed: Notify::new(),
        });
        let (virt_api, world) = tokio::join!(
            subresources::serve(plane, &api, shared.clone()),
            World::new(api.clone(), shared.clone(), domain),
        );
        let task = tokio::spawn(world.run());
        Self { shared, api, task, virt_api }
    }

    /// What was done until now.
    pub fn journal(&self) -> Journal {
        self.shared.journal().clone()
    }

    /// The instance of this name, `NAMESPACE/NAME`, has a serial console from now on.
    pub fn console(&self, name: &str) -> Ports {
        self.shared.consoles.add(name)
    }

    /// How long each step takes.
    pub fn speed(&self, usual: Duration) {
        self.shared.pace().set_usual(usual);
        self.shared.changed.notify_one();
    }

    /// How long a step takes.
    pub fn delay(&self, step: Step, delay: Duration) {
        self.shared.pace().set_delay(step, delay);
        self.shared.changed.notify_one();
    }

    /// Lets the model not take a step of the claim or VM of this name; of all, if there is no name.
    pub fn hold(&self, step: Step, name: &str) {
        self.shared.pace().hold(step, name);
    }

    /// Waits until the model has come to a step that is held for this name.
    pub async fn reaches(&self, step: Step, name: &str) {
        until(&format!("{step:?} of {name} is due"), async || {
            self.shared.pace().has_reached(step, name).then_some(())
        })
        .await;
    }

    /// Lets the model take a step again.
    pub fn release(&self, step: Step, name: &str) {
        self.shared.pace().release(step, name);
        self.shared.changed.notify_one();
    }

    /// Has a step fail, with this message, as often as it is tried.
    pub fn fail(&self, step: Step, name: &str, message: &str) {
        self.shared.pace().fail(step, name, message);
        self.shared.changed.notify_one();
    }

    /// Lets a step succeed again.
    pub fn succeed(&self, step: Step, name: &str) {
        self.shared.pace().succeed(step, name);
        self.shared.changed.notify_one();
    }

    /// Begins to move a VM; returns the name of the migration.
    pub async fn migrate(&self, namespace: &str, vm: &str, node: &str) -> String {
        let migration = json!({
            "apiVersion": "kubevirt.io/v1",
            "kind": "VirtualMachineInstanceMigration",
            "metadata": { "generateName": "migration-", "namespace": namespace },
            "spec": { "vmiName": vm, "addedNodeSelector": { HOSTNAME: node } },
        });
        name(&self.api.create(&Kind::Migration.within(namespace), &migration).await).to_owned()
    }

    /// Takes a pod away at once, as nothing that is in order does.
    pub async fn lose_pod(&self, key: &str) {
        let now = json!({ "gracePeriodSeconds": 0 });
        let _ = call(&self.api, Method::DELETE, &Kind::Pod.path(key), JSON, Some(&now)).await;
    }

    /// The domain of an instance ends by itself, as when its QEMU is killed. The virt-handler of its node sees that.
    pub fn lose_domain(&self, instance: &str) {
        self.shared.end(instance);
        self.shared.changed.notify_one();
    }

    /// A node loses its power, and its domains with it. The cluster learns only that it does not answer.
    pub async fn kill_node(&self, node: &str) {
        {
            let mut hosts = self.shared.hosts();
            hosts.off.insert(node.to_owned());
            hosts.domains.retain(|_, (_, at)| at != node);
        }
        self.say_ready(node, "Unknown").await;
    }

    /// A node loses its network, and its domains run on. The cluster learns that it does not answer.
    pub async fn cut_node(&self, node: &str) {
        self.shared.hosts().cut.insert(node.to_owned());
        self.say_ready(node, "Unknown").await;
    }

    /// A node has power and network again.
    pub async fn restore_node(&self, node: &str) {
        {
            let mut hosts = self.shared.hosts();
            hosts.off.remove(node);
            hosts.cut.remove(node);
        }
        self.say_ready(node, "True").await;
    }

    /// Takes away by force all pods of a node that does not answer, as operators do who know that it is off; those who do not
    /// know it do it too.
    pub async fn evict_node(&self, node: &str) {
        for pod in self.api.list(&Kind::Pod.all()).await {
            if text(&pod["spec"]["nodeName"]) == node {
                self.lose_pod(&objects::key(&pod)).await;
            }
        }
    }

    async fn say_ready(&self, node: &str, status: &str) {
        let change = json!({ "status": { "conditions": [{ "type": "Ready", "status": status }] } });
        self.api.patch(&format!("{}/status", Kind::Node.path(node)), &change).await;
        self.shared.changed.notify_one();
    }

    /// A share has another endpoint from now on; none until the next is said.
    pub async fn move_share(&self, key: &str, endpoint: Option<&str>) {
        let status = match endpoint {
            Some(endpoint) => json!({ "endpoint": endpoint, "status": "Ready" }),
            None => json!({ "status": "Reconciling" }),
        };
        let path = Kind::Share.path(key) + "/status";
        self.api.patch(&path, &json!({ "status": status })).await.expect("the share");
    }

    /// Whether the guest agent of an instance is connected, as its status says.
    pub async fn set_agent(&self, key: &str, is_connected: bool) {
        let path = Kind::Vmi.path(key);
        until("the instance says whether its agent is connected", async || {
            let mut instance: Value = self.api.get(&path).await?;
            let status = if is_connected { "True" } else { "False" };
            instance["status"]["conditions"] =
                objects::with_condition(&instance, "AgentConnected", status, "");
            self.api.replace(&path, &instance).await
        })
        .await;
    }
}
