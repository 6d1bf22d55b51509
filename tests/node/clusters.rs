//! What a guest's cluster is told of its VMs: by its node and the controller, as the API of the host cluster has it.

use std::sync::Arc;
use std::time::Duration;

use guestlet::transport::callback::Caller;
use guestlet::transport::http2;
use guestlet::wire::proto::v1::cloud_client::CloudClient;
use guestlet::wire::proto::v1::get_instance_response::Existence;
use guestlet::wire::proto::v1::instance::Power;
use guestlet::wire::proto::v1::{self, GetInstanceRequest, Instance, WatchBounds, WatchInstancesRequest};
use serde_json::{Value, json};
use tonic::{Code, Status};

use crate::bench::socket;
use crate::cluster::{HOSTS, wait};
use crate::guest::{Door, Guest, Manner, info};
use crate::model::objects::{Kind, text};
use crate::patience::{PATIENCE, until};
use crate::sidecar::refused;
use crate::whole::{Vm, Whole, ask};

/// A guest's end of the callback.
#[derive(Clone)]
pub struct Calls(pub Caller);

macro_rules! methods {
    ($($name:ident: $request:ident => $response:ident;)*) => {
        impl Calls {
            $(pub async fn $name(&self, request: v1::$request) -> Result<v1::$response, Status> {
                let mut client = self.client();
                let call = async move { client.$name(request).await.map(tonic::Response::into_inner) };
                tokio::time::timeout(PATIENCE, call).await.expect("the host half answers")
            })*
        }
    };
}

each_cloud_call!(methods);

impl Calls {
    fn client(&self) -> CloudClient<Caller> {
        CloudClient::with_origin(self.0.clone(), http::Uri::from_static(http2::ORIGIN))
    }

    /// That of a VM's guest.
    pub async fn of(vm: &Vm) -> Self {
        let guest = Arc::clone(&vm.guest);
        Self(ask(move || guest.client()).await)
    }

    /// What has changed of the VMs since a position.
    async fn watch(&self, position: &str, wait_seconds: u32) -> Result<v1::WatchInstancesResponse, Status> {
        let bounds = Some(WatchBounds { position: position.into(), wait_seconds });
        self.watch_instances(WatchInstancesRequest { bounds }).await
    }

    /// All VMs, once they are so.
    async fn until(&self, what: &str, is: impl Fn(&[Instance]) -> bool) -> (String, Vec<Instance>) {
        let begun = std::time::Instant::now();
        loop {
            let told = self.watch("", 0).await;
            match &told {
                Ok(told) if is(&told.instances) => {
                    return (told.position.clone(), told.instances.clone());
                }
                _ => assert!(begun.elapsed() < PATIENCE, "never: {what}: {told:?}"),
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    async fn get(&self, uid: &str) -> Result<v1::GetInstanceResponse, Status> {
        self.get_instance(GetInstanceRequest { vm_uid: uid.to_owned() }).await
    }
}

/// Makes a VM of a cluster that is attached to this network, with a guest that says that it is this Node there.
pub async fn vm(whole: &Whole, name: &str, cluster: &str, network: &str, node: &str) -> Vm {
    whole
        .cluster
        .vm_with(name, |vm| {
            let template = &mut vm["spec"]["template"];
            template["metadata"]["labels"]["guestcluster.harvesterhci.io/name"] = json!(cluster);
            template["spec"]["networks"] = json!([{ "name": "nic", "multus": { "networkName": network } }]);
            template["spec"]["domain"]["devices"]["interfaces"] = json!([{ "name": "nic", "bridge": {} }]);
        })
        .await;
    let instance = whole.cluster.runs(name).await;
    boot(whole, name, &instance, node)
}

/// Its guest.
fn boot(whole: &Whole, name: &str, instance: &Value, node: &str) -> Vm {
    let lab = &whole.nodes[text(&instance["status"]["nodeName"])];
    let mut info = info(text(&instance["spec"]["domain"]["firmware"]["uuid"]), "boot-1");
    info.capabilities.push("health-checks".to_owned());
    let told = Some(v1::Node { name: node.into(), ..v1::Node::default() });
    let state = v1::GuestState { node: told, ..v1::GuestState::default() };
    let guest = Guest::start_in(&socket(lab, instance), Door::Hybrid, Manner::Good, info, state);
    lab.until_vm(&format!("default/{name}"), |vm| vm["session"] == "connected" && vm["callback"] == "open");
    let uid = text(&instance["metadata"]["ownerReferences"][0]["uid"]).to_owned();
    Vm { name: name.to_owned(), uid, guest: Arc::new(guest) }
}

/// What the agent in a VM tells virt-handler of its network.
async fn report(whole: &Whole, vm: &str, addresses: &[&str]) {
    let interface = json!({
        "name": "nic", "mac": "52:54:00:00:00:01", "interfaceName": "enp1s0", "ipAddresses": addresses,
        "infoSource": "domain, guest-agent",
    });
    let change = json!({ "status": { "interfaces": [interface] } });
    whole.cluster.api.patch(&Kind::Vmi.path(&format!("default/{vm}")), &change).await.unwrap();
    whole.cluster.model.set_agent(&format!("default/{vm}"), true).await;
}

/// Lets a VM run, or not.
async fn set_strategy(whole: &Whole, vm: &str, strategy: &str) {
    let change = json!({ "spec": { "runStrategy": strategy } });
    whole.cluster.api.patch(&Kind::Vm.path(&format!("default/{vm}")), &change).await.unwrap();
}

fn of<'i>(all: &'i [Instance], vm: &Vm) -> &'i Instance {
    all.iter().find(|one| one.vm_uid == vm.uid).unwrap_or_else(|| panic!("{all:?}"))
}

/// harvester/harvester#4947, #11580: a Node was looked for under the name of its VM.
#[test]
fn a_cluster_is_told_of_all_its_vms_and_each_by_the_name_of_its_node() {
    wait(async {
        let whole = Whole::start(1).await;
        let web = vm(&whole, "web", "dev", "default/lan", "node-of-web").await;
        let db = vm(&whole, "db", "dev", "infra/wan", "web").await;
        let other = vm(&whole, "other", "prod", "default/lan", "other").await;
        report(&whole, "web", &["192.0.2.7", "fe80::1"]).await;
        let calls = Calls::of(&web).await;
        let named = |all: &[Instance]| all.len() == 2 && all.iter().all(|one| !one.node_name.is_empty());
        let (position, all) = calls.until("both VMs are told with their Nodes", named).await;
        let one = of(&all, &web);
        assert_eq!((one.name.as_str(), one.node_name.as_str()), ("default/web", "node-of-web"));
        assert_eq!(of(&all, &db).node_name, "web");
        assert_eq!(one.provider_id, format!("guestlet://{}", web.uid));
        assert_eq!((one.power(), one.addresses_current), (Power::Running, true));
        let interface = &one.interfaces[0];
        assert_eq!(interface.addresses, ["192.0.2.7"]);
        assert_eq!((interface.network.as_str(), interface.name.as_str()), ("default/lan", "enp1s0"));
        assert_eq!(of(&all, &db).interfaces[0].network, "infra/wan");
        let instance = whole.cluster.instance("web").await.unwrap();
        let from = text(&instance["status"]["nodeName"]).to_owned();
        let zone = |host: &str| if host == HOSTS[0] { "zone-1" } else { "zone-2" };
        let place = one.topology.clone().unwrap();
        assert_eq!(
            (place.region.as_str(), place.zone.as_str(), place.host.as_str()),
            ("region", zone(&from), from.as_str())
        );
        // What is asked on one session is known on all of the cluster, and on no others.
        let (_, theirs) = Calls::of(&other).await.until("the other cluster", |all| all.len() == 1).await;
        assert_eq!(theirs[0].vm_uid, other.uid);

        // Nothing happens, and then a host is given another zone.
        let begun = std::time::Instant::now();
        let nothing = calls.watch(&position, 1).await.unwrap();
        assert!(begun.elapsed() >= Duration::from_secs(1) && nothing.instances.is_empty(), "{nothing:?}");
        let waiting = {
            let (calls, position) = (calls.clone(), nothing.position);
            tokio::spawn(async move { calls.watch(&position, 20).await.unwrap() })
        };
        let labels = json!({ "metadata": { "labels": { "topology.kubernetes.io/zone": "zone-9" } } });
        whole.cluster.api.patch(&Kind::Node.path(&from), &labels).await.unwrap();
        let news = waiting.await.unwrap();
        assert!(!news.complete && of(&news.instances, &web).topology.as_ref().unwrap().zone == "zone-9");
    });
}

#[test]
fn what_becomes_of_a_vm_is_told_and_only_what_the_api_proves_is_gone() {
    wait(async {
        let whole = Whole::start(1).await;
        let web = vm(&whole, "web", "dev", "default/lan", "web").await;
        let db = vm(&whole, "db", "dev", "default/lan", "db").await;
        let other = vm(&whole, "other", "prod", "default/lan", "other").await;
        let calls = Calls::of(&web).await;
        let (position, _) = calls.until("both VMs are told", |all| all.len() == 2).await;
        let found = calls.get(&db.uid).await.unwrap();
        assert_eq!((found.existence(), found.instance.unwrap().power()), (Existence::Exists, Power::Running));
        // Another cluster's VM is not told of, and not said to be gone.
        let others = calls.get(&other.uid).await.unwrap();
        assert_eq!((others.existence(), others.instance.clone()), (Existence::Unknown, None));
        assert!(!others.reason.contains("other"), "{}", others.reason);
        // What was never there is in no host half's settings, as it would be elsewhere: all VMs of the cluster are in this API.
        let never = calls.get("00000000-0000-4000-8000-000000000000").await.unwrap();
        assert_eq!(never.existence(), Existence::Gone);

        set_strategy(&whole, "db", "Halted").await;
        let stopped = |all: &[Instance]| of(all, &db).power() == Power::Stopped;
        calls.until("it is off", stopped).await;
        let found = calls.get(&db.uid).await.unwrap();
        assert_eq!((found.existence(), found.instance.unwrap().power()), (Existence::Exists, Power::Stopped));
        whole.cluster.api.delete(&Kind::Vm.path("default/db")).await;
        let (_, left) = calls.until("it is told of no more", |all| all.len() == 1).await;
        assert_eq!(left[0].vm_uid, web.uid);
        let missed = calls.watch(&position, 0).await.unwrap();
        assert_eq!((missed.complete, missed.withdrawn), (false, vec![db.uid.clone()]));
        assert_eq!(calls.get(&db.uid).await.unwrap().existence(), Existence::Gone);
        // Made again under its name it is another VM.
        whole.cluster.running("db").await;
        assert_eq!(calls.get(&db.uid).await.unwrap().existence(), Existence::Gone);
    });
}

/// An unknown answer is an error: from "does not exist" it follows that a Node is deleted.
#[test]
fn while_the_api_is_away_nothing_is_said_to_be_gone() {
    wait(async {
        let mut whole = Whole::start(1).await;
        let web = vm(&whole, "web", "dev", "default/lan", "web").await;
        let calls = Calls::of(&web).await;
        let (position, _) = calls.until("the VM is told", |all| all.len() == 1).await;
        whole.cluster.turn.kill_api_server();
        for uid in [web.uid.as_str(), "00000000-0000-4000-8000-000000000000"] {
            refused(calls.get(uid).await.map(drop), Code::Unavailable, "");
        }
        refused(calls.watch("", 0).await.map(drop), Code::Unavailable, "");
        whole.cluster.turn.start_api_server();
        // A controller whose Lease has expired before the API server answered has ended.
        let controller = &mut whole.controllers[0];
        let back = until("it is said again", async || {
            controller.revive();
            calls.get(&web.uid).await.ok()
        });
        let back = back.await;
        assert_eq!(back.existence(), Existence::Exists);
        // What was known is known: nothing was taken back.
        let since = until("news can be heard", async || calls.watch(&position, 0).await.ok()).await;
        assert!(since.withdrawn.is_empty(), "{since:?}");
    });
}

#[test]
fn a_vm_without_a_cluster_is_told_nothing() {
    wait(async {
        let whole = Whole::start(1).await;
        drop(vm(&whole, "web", "dev", "default/lan", "web").await);
        whole.cluster.running("lone").await;
        let instance = whole.cluster.instance("lone").await.unwrap();
        let lone = whole.boot("lone", &instance);
        let calls = Calls::of(&lone).await;
        let words = "this VM belongs to no cluster";
        refused(calls.watch("", 0).await.map(drop), Code::PermissionDenied, words);
        refused(calls.get(&lone.uid).await.map(drop), Code::PermissionDenied, words);
        // A VM may have two polls of a kind; a third one does not wait.
        let front = vm(&whole, "front", "dev", "default/lan", "front").await;
        let web = Calls::of(&front).await;
        let (mut position, _) = web.until("both VMs", |all| all.len() == 2).await;
        // A poll ends with news, of which there may be some for as long as VMs and API server settle: then it is tried again.
        for tried in 0.. {
            assert!(tried < 20, "there is news all the time");
            let polls: Vec<_> = (0..2)
                .map(|_| {
                    let (web, position) = (web.clone(), position.clone());
                    tokio::spawn(async move { web.watch(&position, 8).await })
                })
                .collect();
            tokio::time::sleep(Duration::from_secs(1)).await;
            let third = web.watch(&position, 8).await;
            let mut news = position.clone();
            for poll in polls {
                news = poll.await.unwrap().unwrap().position;
            }
            if news != position {
                position = news;
                continue;
            }
            refused(third.map(drop), Code::ResourceExhausted, "are already waiting for the same");
            break;
        }
    });
}
