//! What tests of volumes begin with: a cluster with `KubeVirt`, controllers, and the programs of its nodes.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use guestlet::host::backends::kubevirt::node::identity::{self, NodeKey};
use guestlet::transport::http2;
use guestlet::wire::proto::v1::controller_client::ControllerClient;
use guestlet::wire::proto::v1::{GuestInfo, JoinRequest};
use serde_json::{Value, json};
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::ClientConfig;
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName};
use tonic::{Code, Status};

use crate::api::{Api, collection};
use crate::bench::{host_of, install, packaged, socket};
use crate::client::{JSON, call};
use crate::cluster::{HOSTS, Lab as Cluster};
use crate::guest::{Door, Guest, Manner, info};
use crate::lab::{DEADLINE, Lab};
use crate::model::domain::{Disk, Domain};
use crate::patience::until;
use crate::sidecar::Asking;

pub const MIB: i64 = 1 << 20;
const NAMESPACE: &str = "guestlet-system";
pub const LEASE: &str = "/apis/coordination.k8s.io/v1/namespaces/guestlet-system/leases/guestlet-controller";
/// Whom the API server takes the roles for.
const NODE_ACCOUNT: &str = "system:serviceaccount:guestlet-system:guestlet-node";
const CONTROLLER_ACCOUNT: &str = "system:serviceaccount:guestlet-system:guestlet-controller";
const ACCOUNTS: &str = "system:serviceaccounts";

/// The guests' side of hot-plugging: what is plugged into a VM, its guest sees, unless it is blind.
#[derive(Default)]
pub struct Domains {
    guests: Mutex<BTreeMap<String, Arc<Guest>>>,
    pub blind: Mutex<bool>,
    /// All that was plugged.
    pub plugged: Mutex<Vec<Disk>>,
}

#[tonic::async_trait]
impl Domain for Domains {
    async fn plug(&self, disk: &Disk) -> Result<(), String> {
        self.plugged.lock().unwrap().push(disk.clone());
        if let Some(guest) = self.guests.lock().unwrap().get(&disk.vm)
            && !*self.blind.lock().unwrap()
        {
            guest.disks().seen.insert(disk.device_id(), "sdb".to_owned());
        }
        Ok(())
    }

    async fn unplug(&self, disk: &Disk) -> Result<(), String> {
        if let Some(guest) = self.guests.lock().unwrap().get(&disk.vm) {
            guest.disks().seen.remove(&disk.device_id());
        }
        Ok(())
    }
}

/// A cluster with `KubeVirt`, a program of the node role for each host, and controllers. What is first here ends first.
pub struct Whole<D = Domains> {
    pub nodes: BTreeMap<&'static str, Lab>,
    pub controllers: Vec<Lab>,
    pub domains: Arc<D>,
    pub cluster: Cluster,
    /// That of the controllers.
    address: IpAddr,
}

/// Makes every object of a file of packaging/kubernetes/host that says who may do what.
async fn allow(api: &Api, file: &str) {
    for object in packaged(file) {
        if let "ClusterRole" | "ClusterRoleBinding" | "Role" | "RoleBinding" =
            object["kind"].as_str().unwrap()
        {
            api.ensure(&collection(&object), &object).await;
        }
    }
}

impl<D: Domain> Whole<D> {
    /// One where disks are plugged into these domains.
    pub async fn with(replicas: usize, domains: Arc<D>) -> Self {
        Self::with_at(replicas, domains, Ipv4Addr::LOCALHOST.into()).await
    }

    /// The same, where controllers have this address.
    async fn with_at(replicas: usize, domains: Arc<D>, address: IpAddr) -> Self {
        Self::with_settings(replicas, domains, address, "").await
    }

    /// The same, where these are further settings of controllers.
    async fn with_settings(replicas: usize, domains: Arc<D>, address: IpAddr, more: &str) -> Self {
        let hook = Arc::clone(&domains) as Arc<dyn Domain>;
        let cluster = Cluster::with("v1.8.4", &["DeclarativeHotplugVolumes"], hook).await;
        let api = &cluster.api;
        install(api).await;
        api.ensure("/api/v1/namespaces", &json!({ "metadata": { "name": NAMESPACE } })).await;
        for file in ["node.yaml", "controller-role.yaml"] {
            allow(api, file).await;
        }
        let accounts = format!("/api/v1/namespaces/{NAMESPACE}/serviceaccounts");
        api.ensure(&accounts, &json!({ "metadata": { "name": "guestlet-node" } })).await;
        // As the last one that led has given it back: nobody waits for one that may still believe that it leads.
        api.delete(LEASE).await;
        let lease = json!({
            "metadata": { "name": "guestlet-controller" },
            "spec": { "holderIdentity": "", "leaseDurationSeconds": 1 },
        });
        api.create(LEASE.rsplit_once('/').unwrap().0, &lease).await;
        let mut whole = Self { nodes: BTreeMap::new(), controllers: Vec::new(), domains, cluster, address };
        for number in 0..replicas {
            whole.controllers.push(whole.controller(number).set(more).start());
        }
        for host in HOSTS {
            let lab = whole.node(host).await.start();
            whole.nodes.insert(host, lab);
        }
        whole
    }

    fn controller(&self, number: usize) -> Lab {
        let plane = self.cluster.turn.plane();
        self.controller_as(&plane.kubeconfig("controller", CONTROLLER_ACCOUNT, ACCOUNTS), number)
    }

    /// A controller that asks as this kubeconfig says, not started.
    pub fn controller_as(&self, kubeconfig: &Path, number: usize) -> Lab {
        let name = format!("controller-{number}");
        let address = self.address.to_string();
        let arguments = [
            "controller",
            "--kubeconfig",
            kubeconfig.to_str().unwrap(),
            "--name",
            &name,
            "--address",
            &address,
        ];
        let listens = format!("kubevirt.controller = '{}'", SocketAddr::new(self.address, 0));
        Lab::new().with_arguments(&arguments).set(&listens)
    }

    /// The program of a host, with the token of its pod.
    async fn node(&self, host: &str) -> Lab {
        let kubeconfig =
            self.cluster.turn.plane().kubeconfig(&format!("node-{host}"), NODE_ACCOUNT, ACCOUNTS);
        let lab = host_of(&kubeconfig, host);
        let file = lab.path("token");
        std::fs::write(&file, self.token(host).await).unwrap();
        lab.with_arguments(&["--token", file.to_str().unwrap()])
    }

    /// The token that a pod of the node role on this host has for the controller.
    async fn token(&self, host: &str) -> String {
        let api = &self.cluster.api;
        let name = format!("guestlet-node-{host}");
        let pod = json!({
            "metadata": { "name": name },
            "spec": {
                "nodeName": host,
                "serviceAccountName": "guestlet-node",
                "containers": [{ "name": "guestlet-host", "image": "registry.test/guestlet-host" }],
            },
        });
        let pods = format!("/api/v1/namespaces/{NAMESPACE}/pods");
        api.ensure(&pods, &pod).await;
        let uid = api.get(&format!("{pods}/{name}")).await.unwrap()["metadata"]["uid"].clone();
        let request = json!({
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": {
                "audiences": ["guestlet-controller"],
                "boundObjectRef": { "apiVersion": "v1", "kind": "Pod", "name": name, "uid": uid },
            },
        });
        let path = format!("/api/v1/namespaces/{NAMESPACE}/serviceaccounts/guestlet-node/token");
        let (status, answer) = call(api, http::Method::POST, &path, JSON, Some(&request)).await.unwrap();
        assert!(status.is_success(), "{answer}");
        answer["status"]["token"].as_str().unwrap().to_owned()
    }

    /// The controller that leads, once one does.
    pub async fn leader(&self) -> usize {
        until("a controller leads", async || {
            let lease = self.cluster.api.get(LEASE).await?;
            let holder = lease["spec"]["holderIdentity"].as_str()?.to_owned();
            (0..self.controllers.len()).find(|number| holder.starts_with(&format!("controller-{number}")))
        })
        .await
    }

    pub fn logs(&self) -> String {
        self.controllers.iter().chain(self.nodes.values()).map(Lab::log).collect::<Vec<_>>().join("\n---\n")
    }
}

impl Whole {
    /// One with simulated guests.
    pub async fn start(replicas: usize) -> Self {
        Self::with(replicas, Arc::default()).await
    }

    /// The same, where these are further settings of controllers.
    pub async fn start_with(replicas: usize, more: &str) -> Self {
        Self::with_settings(replicas, Arc::default(), Ipv4Addr::LOCALHOST.into(), more).await
    }

    /// The same, where controllers have this address.
    pub async fn start_at(replicas: usize, address: IpAddr) -> Self {
        Self::with_at(replicas, Arc::default(), address).await
    }

    /// Makes a VM of the cluster `default/dev`, and waits until its node has a session with its guest.
    pub async fn vm(&self, name: &str) -> Vm {
        self.vm_of("dev", name).await
    }

    /// The same of another cluster.
    pub async fn vm_of(&self, cluster: &str, name: &str) -> Vm {
        self.cluster
            .vm_with(name, |vm| {
                let labels = &mut vm["spec"]["template"]["metadata"]["labels"];
                labels["guestcluster.harvesterhci.io/name"] = json!(cluster);
            })
            .await;
        let instance = self.cluster.runs(name).await;
        self.boot(name, &instance)
    }

    /// A guest in an instance.
    pub fn boot(&self, name: &str, instance: &Value) -> Vm {
        self.boot_with(name, instance, &["disks", "topology"])
    }

    /// The same, whose agent has these capabilities beside those that all have.
    pub fn boot_with(&self, name: &str, instance: &Value, more: &[&str]) -> Vm {
        let node = instance["status"]["nodeName"].as_str().unwrap();
        let lab = &self.nodes[node];
        let dmi = instance["spec"]["domain"]["firmware"]["uuid"].as_str().unwrap_or_default();
        let info = info(dmi, "boot-1");
        let capabilities =
            [info.capabilities.clone(), more.iter().map(|&one| one.to_owned()).collect()].concat();
        let info = GuestInfo { capabilities, ..info };
        let guest = Arc::new(Guest::start(&socket(lab, instance), Door::Hybrid, Manner::Good, info));
        let full = format!("default/{name}");
        self.domains.guests.lock().unwrap().insert(full.clone(), Arc::clone(&guest));
        lab.until_vm(&full, |vm| vm["session"] == "connected" && vm["callback"] == "open");
        let owners = &instance["metadata"]["ownerReferences"];
        let uid = owners[0]["uid"].as_str().unwrap().to_owned();
        Vm { name: name.to_owned(), uid, guest }
    }

    /// Ends the guest of a VM, whose machine runs on.
    pub fn shut(&self, name: &str, guest: Arc<Guest>) {
        self.domains.guests.lock().unwrap().remove(&format!("default/{name}"));
        drop(Arc::into_inner(guest).expect("nobody else has it"));
    }
}

/// A connection with the controller that leads.
pub struct Connected {
    pub calls: ControllerClient<http2::Client>,
    /// Ends with it.
    pub connection: tokio::task::JoinHandle<()>,
}

impl<D: Domain> Whole<D> {
    async fn lease(&self) -> Value {
        until("a controller leads", async || {
            let lease = self.cluster.api.get(LEASE).await?;
            lease["metadata"]["annotations"]["guestlet.io/address"].is_string().then_some(lease)
        })
        .await
    }

    /// Where nodes reach the controller that leads.
    pub async fn address(&self) -> String {
        self.lease().await["metadata"]["annotations"]["guestlet.io/address"].as_str().unwrap().to_owned()
    }

    /// The certificate of the CA that vouches for the controller, PEM.
    pub async fn authority(&self) -> String {
        let lease = self.lease().await;
        lease["metadata"]["annotations"]["guestlet.io/certificate-authority"].as_str().unwrap().to_owned()
    }

    /// As a node that shows this certificate, if any.
    pub async fn connect(&self, own: Option<(&NodeKey, &CertificateDer<'static>)>) -> Connected {
        let config = identity::client_config(&self.authority().await, own).unwrap();
        self.connect_with(config).await
    }

    /// As this configuration of TLS says.
    pub async fn connect_with(&self, config: Arc<ClientConfig>) -> Connected {
        let stream = tokio::net::TcpStream::connect(self.address().await).await.unwrap();
        let name = ServerName::try_from("guestlet-controller").unwrap();
        let stream = TlsConnector::from(config).connect(name, stream).await.unwrap();
        let (calls, mut connection) = http2::connect(stream).await.unwrap();
        let calls = ControllerClient::with_origin(calls, http::Uri::from_static(http2::ORIGIN));
        let connection = tokio::spawn(async move { drop(connection.ended().await) });
        Connected { calls, connection }
    }

    /// As the program of a host, by the token of its pod.
    pub async fn join(&self, host: &str) -> Connected {
        let key = NodeKey::generate().unwrap();
        let request = JoinRequest {
            token: self.token(host).await,
            certificate_signing_request: key.request().unwrap(),
        };
        let joined = self.connect(None).await.calls.join(request).await.unwrap();
        let certificate = CertificateDer::from(joined.into_inner().certificate);
        self.connect(Some((&key, &certificate))).await
    }
}

/// A VM that runs.
pub struct Vm {
    pub name: String,
    /// Of its VirtualMachine, which is its node's identifier in its cluster.
    pub uid: String,
    pub guest: Arc<Guest>,
}

impl Vm {
    pub async fn sidecar(&self) -> Asking {
        let guest = Arc::clone(&self.guest);
        Asking(ask(move || guest.client()).await)
    }

    /// Gives it a volume of its own; its identifier.
    pub async fn with_volume(&self) -> String {
        let (sidecar, node) = (self.sidecar().await, self.uid.clone());
        ask(move || {
            let id = sidecar.create("pvc-1", 64 * MIB).unwrap().volume_id;
            sidecar.publish(&id, &node).unwrap();
            id
        })
        .await
    }
}

/// Repeats a call while it is not known what has become of it, as sidecars do.
pub fn again<T>(call: impl Fn() -> Result<T, Status>) -> T {
    let end = Instant::now() + DEADLINE;
    loop {
        match call() {
            Ok(answer) => return answer,
            Err(status) => {
                assert!(status.code() == Code::Unavailable && Instant::now() < end, "{status:?}");
                std::thread::sleep(Duration::from_millis(200));
            }
        }
    }
}

/// Asks from outside of the test's runtime.
pub async fn ask<T: Send + 'static>(asking: impl FnOnce() -> T + Send + 'static) -> T {
    tokio::task::spawn_blocking(asking).await.unwrap()
}
