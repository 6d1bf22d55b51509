//! Volumes, from a guest through its node and the controller to `KubeVirt`, and back.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use guestlet::host::backends::kubevirt::node::identity::{self, NodeKey};
use guestlet::transport::http2;
use guestlet::wire::proto::v1::controller_client::ControllerClient;
use guestlet::wire::proto::v1::{AskRequest, GuestInfo, JoinRequest, RunningVirtualMachine};
use serde_json::{Value, json};
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName};
use tonic::{Code, Status};

use crate::api::Api;
use crate::bench::{host_of, install, packaged, socket};
use crate::client::{JSON, call};
use crate::cluster::{HOSTS, Lab as Cluster, wait};
use crate::guest::{Door, Guest, Manner, info};
use crate::lab::{DEADLINE, Lab};
use crate::model::domain::{Disk, Domain};
use crate::patience::until;
use crate::sidecar::{Asking, refused};

const MIB: i64 = 1 << 20;
const NAMESPACE: &str = "guestlet-system";
const LEASE: &str = "/apis/coordination.k8s.io/v1/namespaces/guestlet-system/leases/guestlet-controller";
/// Whom the API server takes the roles for.
const NODE_ACCOUNT: &str = "system:serviceaccount:guestlet-system:guestlet-node";
const CONTROLLER_ACCOUNT: &str = "system:serviceaccount:guestlet-system:guestlet-controller";
const ACCOUNTS: &str = "system:serviceaccounts";

/// The guests' side of hot-plugging: what is plugged into a VM, its guest sees, unless it is blind.
#[derive(Default)]
struct Domains {
    guests: Mutex<BTreeMap<String, Arc<Guest>>>,
    blind: Mutex<bool>,
    /// All that was plugged.
    plugged: Mutex<Vec<Disk>>,
}

#[tonic::async_trait]
impl Domain for Domains {
    async fn plug(&self, disk: &Disk) -> Result<(), String> {
        self.plugged.lock().unwrap().push(disk.clone());
        if let Some(guest) = self.guests.lock().unwrap().get(&disk.vm)
            && !*self.blind.lock().unwrap()
        {
            guest.disks().seen.insert(disk.serial.clone(), "sdb".to_owned());
        }
        Ok(())
    }

    async fn unplug(&self, disk: &Disk) -> Result<(), String> {
        if let Some(guest) = self.guests.lock().unwrap().get(&disk.vm) {
            guest.disks().seen.remove(&disk.serial);
        }
        Ok(())
    }
}

/// A cluster with `KubeVirt`, a program of the node role for each host, and controllers. What is first here ends first.
struct Whole {
    nodes: BTreeMap<&'static str, Lab>,
    controllers: Vec<Lab>,
    domains: Arc<Domains>,
    cluster: Cluster,
}

/// Makes every object of a file of packaging/kubernetes/host that says who may do what.
async fn allow(api: &Api, file: &str) {
    for object in packaged(file) {
        let place = match object["kind"].as_str().unwrap() {
            "ClusterRole" => "/apis/rbac.authorization.k8s.io/v1/clusterroles".to_owned(),
            "ClusterRoleBinding" => "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings".to_owned(),
            "Role" => format!("/apis/rbac.authorization.k8s.io/v1/namespaces/{NAMESPACE}/roles"),
            "RoleBinding" => {
                format!("/apis/rbac.authorization.k8s.io/v1/namespaces/{NAMESPACE}/rolebindings")
            }
            _ => continue,
        };
        api.ensure(&place, &object).await;
    }
}

impl Whole {
    async fn start(replicas: usize) -> Self {
        let domains = Arc::new(Domains::default());
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
        let mut whole = Self { nodes: BTreeMap::new(), controllers: Vec::new(), domains, cluster };
        for number in 0..replicas {
            whole.controllers.push(whole.controller(number).start());
        }
        for host in HOSTS {
            let lab = whole.node(host).await.start();
            whole.nodes.insert(host, lab);
        }
        whole
    }

    fn controller(&self, number: usize) -> Lab {
        let plane = self.cluster.turn.plane();
        let kubeconfig = plane.kubeconfig("controller", CONTROLLER_ACCOUNT, ACCOUNTS);
        let name = format!("controller-{number}");
        let arguments = [
            "controller",
            "--kubeconfig",
            kubeconfig.to_str().unwrap(),
            "--name",
            &name,
            "--address",
            "127.0.0.1",
        ];
        Lab::new().with_arguments(&arguments).set("kubevirt.controller = '127.0.0.1:0'")
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

    /// Makes a VM of the cluster `default/dev`, and waits until its node has a session with its guest.
    async fn vm(&self, name: &str) -> Vm {
        self.cluster
            .vm_with(name, |vm| {
                let labels = &mut vm["spec"]["template"]["metadata"]["labels"];
                labels["guestcluster.harvesterhci.io/name"] = json!("dev");
            })
            .await;
        let instance = self.cluster.runs(name).await;
        self.boot(name, &instance)
    }

    /// A guest in an instance.
    fn boot(&self, name: &str, instance: &Value) -> Vm {
        let node = instance["status"]["nodeName"].as_str().unwrap();
        let lab = &self.nodes[node];
        let dmi = instance["spec"]["domain"]["firmware"]["uuid"].as_str().unwrap_or_default();
        let info = info(dmi, "boot-1");
        let capabilities = [info.capabilities.clone(), vec!["disks".into(), "topology".into()]].concat();
        let info = GuestInfo { capabilities, ..info };
        let guest = Arc::new(Guest::start(&socket(lab, instance), Door::Hybrid, Manner::Good, info));
        let full = format!("default/{name}");
        self.domains.guests.lock().unwrap().insert(full.clone(), Arc::clone(&guest));
        lab.until_vm(&full, |vm| vm["session"] == "connected" && vm["callback"] == "open");
        let owners = &instance["metadata"]["ownerReferences"];
        let uid = owners[0]["uid"].as_str().unwrap().to_owned();
        Vm { name: name.to_owned(), uid, guest }
    }

    /// The controller that leads, once one does.
    async fn leader(&self) -> usize {
        until("a controller leads", async || {
            let lease = self.cluster.api.get(LEASE).await?;
            let holder = lease["spec"]["holderIdentity"].as_str()?.to_owned();
            (0..self.controllers.len()).find(|number| holder.starts_with(&format!("controller-{number}")))
        })
        .await
    }

    fn logs(&self) -> String {
        self.controllers.iter().chain(self.nodes.values()).map(Lab::log).collect::<Vec<_>>().join("\n---\n")
    }
}

/// A connection with the controller that leads.
struct Connected {
    calls: ControllerClient<http2::Client>,
    _connection: tokio::task::JoinHandle<()>,
}

impl Whole {
    async fn lease(&self) -> Value {
        until("a controller leads", async || {
            let lease = self.cluster.api.get(LEASE).await?;
            lease["metadata"]["annotations"]["guestlet.io/address"].is_string().then_some(lease)
        })
        .await
    }

    /// Where nodes reach the controller that leads.
    async fn address(&self) -> String {
        self.lease().await["metadata"]["annotations"]["guestlet.io/address"].as_str().unwrap().to_owned()
    }

    /// As a node that shows this certificate, if any.
    async fn connect(&self, own: Option<(&NodeKey, &CertificateDer<'static>)>) -> Connected {
        let lease = self.lease().await;
        let authority =
            lease["metadata"]["annotations"]["guestlet.io/certificate-authority"].as_str().unwrap();
        let config = identity::client_config(authority, own).unwrap();
        let stream = tokio::net::TcpStream::connect(self.address().await).await.unwrap();
        let name = ServerName::try_from("guestlet-controller").unwrap();
        let stream = TlsConnector::from(config).connect(name, stream).await.unwrap();
        let (calls, mut connection) = http2::connect(stream).await.unwrap();
        let calls = ControllerClient::with_origin(calls, http::Uri::from_static(http2::ORIGIN));
        let connection = tokio::spawn(async move { drop(connection.ended().await) });
        Connected { calls, _connection: connection }
    }

    /// As the program of a host, by the token of its pod.
    async fn join(&self, host: &str) -> Connected {
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
struct Vm {
    name: String,
    /// Of its VirtualMachine, which is its node's identifier in its cluster.
    uid: String,
    guest: Arc<Guest>,
}

impl Vm {
    async fn sidecar(&self) -> Asking {
        let guest = Arc::clone(&self.guest);
        Asking(ask(move || guest.client()).await)
    }
}

/// Repeats a call while it is not known what has become of it, as sidecars do.
fn again<T>(call: impl Fn() -> Result<T, Status>) -> T {
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
async fn ask<T: Send + 'static>(asking: impl FnOnce() -> T + Send + 'static) -> T {
    tokio::task::spawn_blocking(asking).await.unwrap()
}

#[test]
fn a_volume_comes_to_a_guest_by_its_node_and_the_controller_and_goes_again() {
    wait(async {
        let whole = Whole::start(1).await;
        let (web, db) = (whole.vm("web").await, whole.vm("db").await);
        let (sidecar, other) = (web.sidecar().await, db.sidecar().await);
        let (node, logs) = (db.uid.clone(), whole.logs());
        let (volume, context) = ask(move || {
            let volume =
                sidecar.create("pvc-1", 64 * MIB).unwrap_or_else(|status| panic!("{status:?}\n{logs}"));
            // Whichever guest of the cluster asks.
            let context =
                sidecar.publish(&volume.volume_id, &node).unwrap_or_else(|status| panic!("{status:?}"));
            assert_eq!(other.all(), [(volume.volume_id.clone(), vec![node])]);
            (volume, context)
        })
        .await;
        assert_eq!(volume.accessible_topology, [], "any node of the cluster may have it");
        let serial = &context["guestlet.io/serial"];
        assert_eq!(context["guestlet.io/bus"], "scsi");
        assert_eq!(db.guest.disks().seen.keys().collect::<Vec<_>>(), [serial]);
        let instance = whole.cluster.instance("db").await.unwrap();
        let status = instance["status"]["volumeStatus"].as_array().unwrap();
        assert!(
            status.iter().any(|one| one["phase"] == "Ready" && one["hotplugVolume"].is_object()),
            "{status:?}"
        );

        let (sidecar, id, node) = (web.sidecar().await, volume.volume_id.clone(), db.uid.clone());
        ask(move || sidecar.unpublish(&id, &node).unwrap()).await;
        assert!(
            db.guest.disks().asked.contains(&format!("release {serial}")),
            "{:?}",
            db.guest.disks().asked
        );
        assert!(db.guest.disks().seen.is_empty());
        let behalf = format!("vm:default/{}", web.name);
        let released = db.guest.behalves().into_iter().rfind(|one| one.method == "ReleaseDisk").unwrap();
        assert_eq!(released.caller, Some(behalf), "the guest is told who asks");
        let (sidecar, id) = (web.sidecar().await, volume.volume_id);
        ask(move || sidecar.delete(&id).unwrap()).await;
        let claims = whole.cluster.api.list("/api/v1/namespaces/default/persistentvolumeclaims").await;
        assert_eq!(claims, [] as [Value; 0]);
    });
}

#[test]
fn a_volume_that_its_guest_does_not_see_is_not_published() {
    wait(async {
        let whole = Whole::start(1).await;
        let web = whole.vm("web").await;
        *whole.domains.blind.lock().unwrap() = true;
        let (sidecar, node) = (web.sidecar().await, web.uid.clone());
        let id = ask(move || {
            let id = sidecar.create("pvc-1", 64 * MIB).unwrap().volume_id;
            let words = "the volume is plugged, and its guest does not say that it sees it";
            refused(sidecar.publish(&id, &node), Code::Unavailable, words);
            id
        })
        .await;
        let serial = whole.domains.plugged.lock().unwrap()[0].serial.clone();
        web.guest.disks().seen.insert(serial.clone(), "sdb".to_owned());
        let (sidecar, node) = (web.sidecar().await, web.uid.clone());
        let context = ask(move || sidecar.publish(&id, &node).unwrap()).await;
        assert_eq!(context["guestlet.io/serial"], serial);
    });
}

#[test]
fn another_replica_takes_over_when_the_one_that_leads_is_killed() {
    wait(async {
        let mut whole = Whole::start(2).await;
        let web = whole.vm("web").await;
        let first = whole.leader().await;
        let sidecar = web.sidecar().await;
        let id = ask(move || sidecar.create("pvc-1", 64 * MIB).unwrap().volume_id).await;

        // A standby knows what there is, and changes nothing.
        let standby = &whole.controllers[1 - first];
        standby.until("it lists the volume", || standby.words(&["volumes", "ls"]).contains("pvc-1"));
        let refused = standby.ctl(&["volumes", "rm", &id]);
        let words = String::from_utf8(refused.stderr).unwrap();
        assert!(words.contains("this replica of the controller does not lead"), "{words}");

        whole.controllers[first].kill();
        let (sidecar, node, volume) = (web.sidecar().await, web.uid.clone(), id.clone());
        // It says that nobody can be asked, for as long as the Lease is valid, and is repeated.
        ask(move || again(|| sidecar.publish(&volume, &node))).await;
        assert_eq!(whole.leader().await, 1 - first);

        // One that is told to end gives the Lease back, and nobody waits for long.
        whole.controllers[first].again();
        assert!(whole.controllers[1 - first].stop().success());
        let (sidecar, node) = (web.sidecar().await, web.uid.clone());
        ask(move || {
            again(|| sidecar.unpublish(&id, &node));
            again(|| sidecar.delete(&id));
        })
        .await;
        assert_eq!(whole.leader().await, first);
        // With nobody to take it, it stays as it was given back.
        assert!(whole.controllers[first].stop().success());
        let lease = whole.cluster.api.get(LEASE).await.unwrap();
        assert_eq!(lease["spec"]["holderIdentity"].as_str().unwrap_or_default(), "", "{lease}");
    });
}

#[test]
fn a_node_can_do_nothing_for_vms_of_other_nodes() {
    wait(async {
        let whole = Whole::start(1).await;
        let web = whole.vm("web").await;
        let instance = whole.cluster.instance("web").await.unwrap();
        let own = instance["status"]["nodeName"].as_str().unwrap();
        let other = HOSTS.into_iter().find(|host| *host != own).unwrap();
        let request = |uid: &Value| AskRequest {
            vm: Some(RunningVirtualMachine {
                namespace: "default".into(),
                name: "web".into(),
                uid: uid.as_str().unwrap().into(),
            }),
            method: "/csi.v1.Controller/ListVolumes".into(),
            request: Vec::new(),
        };
        let uid = &instance["metadata"]["uid"];
        let ask = async |client: &mut Connected, request: AskRequest| {
            client.calls.ask(request).await.map(|answer| answer.into_inner().answer)
        };

        // One that shows no certificate, whatever it says.
        let mut nobody = whole.connect(None).await;
        refused(ask(&mut nobody, request(uid)).await, Code::Unauthenticated, "join first");
        for token in ["", "a.b.c", "not a token at all"] {
            let join = JoinRequest { token: token.into(), certificate_signing_request: vec![0; 64] };
            let joined = nobody.calls.join(join).await.map(drop);
            refused(joined, Code::Unauthenticated, "the token of the node is refused");
        }

        let mut stranger = whole.join(other).await;
        let words = format!("does not run on the node {other}");
        refused(ask(&mut stranger, request(uid)).await, Code::Unavailable, &words);
        let mut owner = whole.join(own).await;
        assert_eq!(ask(&mut owner, request(uid)).await.unwrap(), Vec::<u8>::new(), "there are no volumes");
        // Nor for one that is no more, by the name of one that is.
        let gone = json!("00000000-0000-4000-8000-000000000000");
        refused(ask(&mut owner, request(&gone)).await, Code::Unavailable, "does not run on the node");
        let mut bad = request(uid);
        bad.vm.as_mut().unwrap().name = "../../../api/v1/secrets".into();
        refused(ask(&mut owner, bad).await, Code::InvalidArgument, "vm has no namespace, or no name");
        let method = "/guestlet.v1.Admin/RemoveVolume".to_owned();
        let bad = AskRequest { method, ..request(uid) };
        refused(ask(&mut owner, bad).await, Code::PermissionDenied, "is not answered for guests of nodes");
        drop(web);
    });
}

#[test]
fn who_says_nothing_or_nonsense_to_the_controller_holds_up_nobody() {
    wait(async {
        let whole = Whole::start(1).await;
        let address = whole.address().await;
        let mut silent = Vec::new();
        for number in 0..200 {
            // From the address of another pod.
            let socket = tokio::net::TcpSocket::new_v4().unwrap();
            socket.bind("127.0.0.2:0".parse().unwrap()).unwrap();
            let stream = socket.connect(address.parse().unwrap()).await.unwrap();
            if number % 2 == 0 {
                let nonsense = vec![u8::try_from(number).unwrap(); 4096];
                // It may be closed already.
                drop(stream.try_write(&nonsense));
            }
            silent.push(stream);
        }
        let web = whole.vm("web").await;
        let sidecar = web.sidecar().await;
        ask(move || sidecar.create("pvc-1", 64 * MIB).unwrap()).await;
    });
}

#[test]
fn a_vm_that_is_migrated_keeps_its_volumes_and_is_served_by_its_new_node() {
    wait(async {
        let whole = Whole::start(1).await;
        let web = whole.vm("web").await;
        let (sidecar, node) = (web.sidecar().await, web.uid.clone());
        let id = ask(move || {
            let id = sidecar.create("pvc-1", 64 * MIB).unwrap().volume_id;
            sidecar.publish(&id, &node).unwrap();
            id
        })
        .await;
        let instance = whole.cluster.instance("web").await.unwrap();
        let from = instance["status"]["nodeName"].as_str().unwrap().to_owned();
        let to = HOSTS.into_iter().find(|host| *host != from).unwrap();
        whole.cluster.model.migrate("default", "web", to).await;
        let moved = until("it has moved", async || {
            let now = whole.cluster.instance("web").await?;
            (now["status"]["nodeName"] == to).then_some(now)
        })
        .await;
        let seen = web.guest.disks().seen.clone();
        let web = whole.boot("web", &moved);
        web.guest.disks().seen = seen;
        let (sidecar, node, volume) = (web.sidecar().await, web.uid.clone(), id.clone());
        ask(move || {
            // Repeated, as a sidecar does that was started again.
            again(|| sidecar.publish(&volume, &node));
            again(|| sidecar.unpublish(&volume, &node));
        })
        .await;
        let asked = web.guest.disks().asked.clone();
        assert!(asked.iter().any(|one| one.starts_with("release ")), "by way of {to}: {asked:?}");
        let sidecar = web.sidecar().await;
        ask(move || sidecar.delete(&id).unwrap()).await;
    });
}

#[test]
fn a_guest_whose_node_cannot_be_asked_keeps_its_disk() {
    wait(async {
        let mut whole = Whole::start(1).await;
        let web = whole.vm("web").await;
        let (sidecar, node) = (web.sidecar().await, web.uid.clone());
        let id = ask(move || {
            let id = sidecar.create("pvc-1", 64 * MIB).unwrap().volume_id;
            sidecar.publish(&id, &node).unwrap();
            id
        })
        .await;
        let instance = whole.cluster.instance("web").await.unwrap();
        let host = instance["status"]["nodeName"].as_str().unwrap().to_owned();
        let node = whole.nodes.get_mut(host.as_str()).unwrap();
        node.kill();
        let leader = &whole.controllers[0];
        leader.until("the node attends no more", || leader.log().contains("a node attends no more"));
        let detached = leader.ctl(&["volumes", "detach", &id]);
        let words = String::from_utf8(detached.stderr).unwrap();
        assert!(words.contains("the node of this guest cannot be asked now"), "{words}");
        let status = whole.cluster.instance("web").await.unwrap()["status"]["volumeStatus"].clone();
        assert!(status.as_array().unwrap().iter().any(|one| one["phase"] == "Ready"), "{status}");
        assert_eq!(web.guest.disks().asked.iter().filter(|one| one.starts_with("release")).count(), 0);

        // As soon as its node is there again, it is asked, however soon after that its session comes.
        whole.nodes.get_mut(host.as_str()).unwrap().again();
        let leader = &whole.controllers[0];
        leader.until("the volume is detached", || leader.ctl(&["volumes", "detach", &id]).status.success());
        let asked = web.guest.disks().asked.clone();
        assert!(asked.iter().any(|one| one.starts_with("release ")), "{asked:?}");
    });
}
