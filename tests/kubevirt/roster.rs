//! What the controller knows of the VMs of the cluster, with the role that it is installed with.

use std::sync::{Arc, Mutex};

use guestlet::host::backends::kubevirt::controller::listing::Listing;
use guestlet::host::backends::kubevirt::controller::{Options, Roster, Site};
use guestlet::host::backends::{Backend as _, Problems};
use guestlet::host::fleet::{Handle, Identity, Reach, Reaches, Remote, Watched};
use guestlet::host::half::Half;
use guestlet::supervise::Scope;
use guestlet::wire::proto::v1::virtual_machine_event::Kind as Happened;
use guestlet::wire::proto::v1::{PowerState, SessionState, VirtualMachine};
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::lab::{HOSTS, Lab, NAMESPACE, wait};
use crate::model::objects::{Kind, text, uid};
use crate::patience::until;
use crate::role;

/// The guest cluster of the VMs.
const CLUSTER: &str = "guestcluster.harvesterhci.io/name";

/// Remembers for whom it was asked at last.
#[derive(Debug, Default)]
struct Asked(Mutex<String>);

impl Reaches for Asked {
    fn reach(&self, vm: &str, node: &str, instance: &str) -> Reach {
        *self.0.lock().unwrap() = format!("{vm} {node} {instance}");
        Reach::NoSession
    }
}

/// What the controller knows.
pub struct Known {
    handle: Handle,
    asked: Arc<Asked>,
    problems: watch::Receiver<Problems>,
    _options: watch::Sender<Options>,
    _tasks: Scope,
}

impl Known {
    /// Of the VMs of the lab.
    async fn of(lab: &Lab) -> Self {
        role::install(&lab.api).await;
        Self::with(lab, watch::Sender::new(Problems::new())).await
    }

    /// The same, as far as the account may do it now; what cannot be followed is told there.
    pub async fn with(lab: &Lab, problems: watch::Sender<Problems>) -> Self {
        let told = problems.subscribe();
        let (options, set) =
            watch::channel(Options { max_volumes: 64, limits: Arc::default(), node_labels: Vec::new() });
        let site = Site {
            cluster: role::config(lab.turn.plane()).await,
            options: set,
            problems,
            listing: Listing::default(),
            heard: None,
        };
        let (asked, tasks) = (Arc::new(Asked::default()), Scope::new());
        let (remote, changes, handle) = Remote::new(Arc::clone(&asked) as Arc<dyn Reaches>);
        let roster = Roster::new(site, Arc::new(Half::new("controller".into())));
        tasks.children().spawn(remote.run(CancellationToken::new()));
        tasks.children().spawn(Box::new(roster).watch(changes));
        Self { handle, asked, problems: told, _options: options, _tasks: tasks }
    }

    async fn get(&self, vm: &str) -> Option<VirtualMachine> {
        Some(self.handle.get(format!("{NAMESPACE}/{vm}")).await.unwrap()?.told(true))
    }

    /// Waits until a VM is in this state.
    async fn until(&self, vm: &str, power: PowerState) -> VirtualMachine {
        until(&format!("{vm} is {power:?}"), async || {
            self.get(vm).await.filter(|known| known.power() == power)
        })
        .await
    }

    /// Who is asked for a way to the guest of a VM.
    async fn asked_for(&self, vm: &str) -> String {
        self.asked.0.lock().unwrap().clear();
        let reach = self.handle.caller(format!("{NAMESPACE}/{vm}")).await.unwrap();
        assert!(matches!(reach, Some(Reach::NoSession)), "{reach:?}");
        self.asked.0.lock().unwrap().clone()
    }
}

fn of_cluster(vm: &mut Value) {
    vm["spec"]["template"]["metadata"]["labels"][CLUSTER] = json!("shop");
}

async fn set_strategy(lab: &Lab, vm: &str, strategy: &str) {
    let change = json!({ "spec": { "runStrategy": strategy } });
    lab.api.patch(&Kind::Vm.path(&format!("{NAMESPACE}/{vm}")), &change).await.unwrap();
}

#[test]
fn the_controller_knows_every_vm_and_where_it_runs() {
    wait(async {
        let lab = Lab::start().await;
        let web = lab.vm_with("web", of_cluster).await;
        let instance = lab.runs("web").await;
        let idle = |vm: &mut Value| {
            of_cluster(vm);
            vm["spec"]["runStrategy"] = json!("Halted");
        };
        let idle = lab.vm_with("idle", idle).await;
        let known = Known::of(&lab).await;

        let running = known.get("web").await.unwrap();
        assert_eq!((running.power(), running.session()), (PowerState::Running, SessionState::Elsewhere));
        assert_eq!((running.uuid.as_str(), running.cluster.as_str()), (uid(&web), "default/shop"));
        let node = text(&instance["status"]["nodeName"]);
        assert_eq!(running.dial, format!("node {node}"));
        assert_eq!(known.asked_for("web").await, format!("default/web {node} {}", uid(&instance)));
        let off = known.get("idle").await.unwrap();
        assert_eq!((off.power(), off.session()), (PowerState::Off, SessionState::Gone));
        assert_eq!((off.uuid.as_str(), off.cluster.as_str()), (uid(&idle), "default/shop"));
        assert_eq!(known.asked_for("idle").await, "", "it is off");
        let cluster_node = Identity::Node { cluster: "default/shop".into(), node: uid(&web).to_owned() };
        let found = known.handle.find(cluster_node).await.unwrap().unwrap();
        assert_eq!((found.vm.name.as_str(), found.vm.max_volumes), ("default/web", 64));

        let to = HOSTS.into_iter().find(|host| *host != node).unwrap();
        lab.model.migrate(NAMESPACE, "web", to).await;
        let expected = format!("default/web {to} {}", uid(&instance));
        until("it has moved", async || (known.asked_for("web").await == expected).then_some(())).await;
        assert_eq!(known.get("web").await.unwrap().dial, format!("node {to}"));
        assert_eq!(*known.problems.borrow(), Problems::new());
    });
}

#[test]
fn what_becomes_of_vms_is_told() {
    wait(async {
        let lab = Lab::start().await;
        let known = Known::of(&lab).await;
        let Watched { mut coming, .. } = known.handle.watch(None, None).await.unwrap().unwrap();
        let instance = lab.running("web").await;
        known.until("web", PowerState::Running).await;
        set_strategy(&lab, "web", "Halted").await;
        let off = known.until("web", PowerState::Off).await;
        assert_eq!(known.asked_for("web").await, "");
        set_strategy(&lab, "web", "Always").await;
        let again = lab.until_other("web", &instance).await;
        let running = known.until("web", PowerState::Running).await;
        assert_eq!(off.uuid, running.uuid, "it is the same VM");
        assert!(known.asked_for("web").await.ends_with(uid(&again)));
        lab.api.delete(&Kind::Vm.path("default/web")).await;
        until("it is gone", async || known.get("web").await.is_none().then_some(())).await;
        let mut powers = Vec::new();
        while let Ok(event) = coming.try_recv() {
            let Some(Happened::PowerChanged(changed)) = &event.kind else { panic!("{event:?}") };
            powers.push(changed.power());
        }
        assert!(powers.starts_with(&[PowerState::Off, PowerState::Running, PowerState::Off]), "{powers:?}");
        assert!(powers[3..].starts_with(&[PowerState::Running]), "{powers:?}");
    });
}

#[test]
fn an_instance_without_a_virtual_machine_is_one_by_itself() {
    wait(async {
        let lab = Lab::start().await;
        let known = Known::of(&lab).await;
        let alone = json!({
            "apiVersion": "kubevirt.io/v1",
            "kind": "VirtualMachineInstance",
            "metadata": { "name": "alone" },
            "spec": { "domain": { "devices": {}, "memory": { "guest": "1Gi" } } },
        });
        let alone = lab.api.create(&Kind::Vmi.within(NAMESPACE), &alone).await;
        let told = known.until("alone", PowerState::Running).await;
        assert_eq!((told.uuid.as_str(), told.cluster.as_str()), (uid(&alone), ""));
        lab.api.delete(&Kind::Vmi.path("default/alone")).await;
        until("it is gone", async || known.get("alone").await.is_none().then_some(())).await;
    });
}
