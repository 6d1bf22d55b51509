//! The Node follows where the guest runs, by kubelet's own credential, whatever its API server does: what a real one cannot be
//! made to do, or to tell. All else is in `tests/cluster`.

use std::time::{Duration, Instant};

use guestlet::wire::proto::v1::Node;
use guestlet::wire::proto::v1::event::Kind;
use serde_json::json;

use crate::agent::{Agent, PATIENCE};
use crate::api_server::{Cluster, Fault};
use crate::lab::{Holder, zone};

const ZONE: &str = "topology.kubernetes.io/zone";
/// The Node is called otherwise than the guest.
const NODE: &str = "worker-7.example";

struct Lab {
    cluster: Cluster,
    agent: Agent,
    holder: Holder,
}

impl Lab {
    /// A guest that knows that it runs in zone `a`, with further settings of `[topology]`, and no credential yet.
    async fn start(settings: &str) -> Self {
        let cluster = Cluster::start().await;
        let kubeconfig = cluster.kubeconfig();
        let settings = format!("[topology]\nkubeconfig = '{}'\n{settings}", kubeconfig.display());
        let agent = Agent::start_set(&["-v"], &settings);
        let holder = Holder::take(&agent, "one").await;
        holder.tell(zone("a")).await.unwrap();
        Self { cluster, agent, holder }
    }

    /// The same, and its Node has joined and has the labels.
    async fn joined(settings: &str) -> Self {
        let mut lab = Self::start(settings).await;
        lab.cluster.join(NODE, json!({ "kubernetes.io/hostname": NODE }));
        lab.cluster.admit(NODE);
        lab.until_zone("a").await;
        lab.until_state("current").await;
        lab
    }

    async fn until(&self, what: &str, wanted: impl Fn() -> bool) {
        let end = Instant::now() + PATIENCE;
        while !wanted() {
            assert!(Instant::now() < end, "never: {what}; {:#}", self.cluster.node(NODE));
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    async fn until_zone(&self, zone: &str) {
        self.until(&format!("zone {zone}"), || self.label(ZONE).as_deref() == Some(zone)).await;
    }

    fn label(&self, key: &str) -> Option<String> {
        self.cluster.label(NODE, key)
    }

    /// The next Node in this state that the host half is told of.
    async fn until_state(&mut self, state: &str) -> Node {
        let wanted = |kind: &Kind| match kind {
            Kind::NodeChanged(changed) => changed.node.clone().filter(|node| node.state == state),
            _ => None,
        };
        self.holder.until(wanted).await
    }
}

/// kubelet makes a label of what the driver says, and drops a driver that says something else: the label comes first.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_label_of_the_host_follows_before_kubelet_is_told() {
    const HOST: &str = "guestlet.io/host";
    let mut lab = Lab::start("[csi]\nenabled = true\ntopology = ['guestlet.io/host']\n").await;
    lab.cluster.join(NODE, json!({ "guestlet.io/host": "h-before" }));
    lab.cluster.admit(NODE);
    lab.until("the label follows", || lab.label(HOST).as_deref() == Some("h-a")).await;
    lab.until_state("current").await;
    // Another has it in hand now, but for this label.
    lab.cluster.edit(NODE, |node| node["spec"]["providerID"] = json!("harvester://1"));
    lab.until_state("reported").await;
    lab.holder.tell(zone("b")).await.unwrap();
    lab.until("the label follows", || lab.label(HOST).as_deref() == Some("h-b")).await;
    assert_eq!(lab.label(ZONE).as_deref(), Some("a"), "that is the other's");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn conflicts_expiry_and_restarts_of_the_api_server() {
    let mut lab = Lab::joined("").await;
    lab.cluster.rivals(3);
    lab.holder.tell(zone("b")).await.unwrap();
    lab.until_zone("b").await;

    lab.until("it watches", || lab.cluster.watchers() == 1).await;
    lab.cluster.bookmark();
    lab.cluster.expire();
    lab.until("it watches again", || lab.cluster.watchers() == 1).await;
    lab.cluster.edit(NODE, |node| node["metadata"]["labels"][ZONE] = json!("x"));
    lab.until_zone("b").await;

    lab.cluster.stop();
    lab.until_state("failed").await;
    // What changes meanwhile on both sides is made up for.
    lab.holder.tell(zone("c")).await.unwrap();
    lab.cluster.edit(NODE, |node| node["metadata"]["labels"]["theirs"] = json!("y"));
    lab.cluster.serve().await;
    lab.until_zone("c").await;
    let node = lab.until_state("current").await;
    assert_eq!(node.labels["theirs"], "y");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_asked_while_nothing_changes() {
    let lab = Lab::joined("").await;
    lab.until("it watches", || lab.cluster.watchers() == 1).await;
    lab.cluster.requests();
    lab.holder.tell(zone("a")).await.unwrap();
    // kubelet says that the Node is well, as it does every 5 minutes.
    lab.cluster.edit(NODE, |node| node["status"]["heartbeat"] = json!(1));
    lab.cluster.bookmark();
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(lab.cluster.requests(), Vec::<String>::new());
    // A server that ends every watch at once is not asked more often for that.
    lab.cluster.end_watches();
    lab.until("it watches again", || lab.cluster.watchers() == 1).await;
    lab.cluster.end_watches();
    lab.cluster.requests();
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(lab.cluster.requests(), Vec::<String>::new());
    // What is wanted anew is done nevertheless.
    lab.holder.tell(zone("b")).await.unwrap();
    lab.until_zone("b").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn credentials_come_rotate_expire_and_belong_to_others() {
    let mut lab = Lab::start("").await;
    lab.cluster.join(NODE, json!({}));
    lab.cluster.admit_as("system:kube-proxy", Duration::from_secs(3600));
    let node = lab.until_state("failed").await;
    assert!(node.reason.contains("\"system:kube-proxy\", which is not a kubelet"), "{}", node.reason);
    std::fs::write(lab.cluster.kubeconfig(), "{").unwrap();
    let node = lab.until_state("failed").await;
    assert!(node.reason.contains("kubelet.kubeconfig: "), "{}", node.reason);
    lab.cluster.admit(NODE);
    lab.until_zone("a").await;

    // Rotated: the connection of the one before is given up.
    lab.until_state("current").await;
    lab.until("it watches", || lab.cluster.watchers() == 1).await;
    lab.cluster.requests();
    lab.cluster.admit(NODE);
    lab.until("it begins anew", || lab.cluster.requests().contains(&"list".to_owned())).await;
    lab.holder.tell(zone("b")).await.unwrap();
    lab.until_zone("b").await;
    lab.until("only the new one watches", || lab.cluster.watchers() == 1).await;

    // Expired: the server lets nobody in with it.
    lab.cluster.admit_as(&format!("system:node:{NODE}"), Duration::ZERO);
    loop {
        let node = lab.until_state("failed").await;
        if node.reason.contains("has expired") {
            break;
        }
    }
    lab.holder.tell(zone("c")).await.unwrap();
    lab.cluster.admit(NODE);
    lab.until_zone("c").await;

    // Of another machine.
    lab.cluster.join("other", json!({}));
    lab.cluster.edit("other", |node| {
        node["status"]["nodeInfo"]["systemUUID"] = json!("00000000-0000-0000-0000-000000000001");
    });
    let has_uuid =
        !std::fs::read_to_string("/sys/class/dmi/id/product_uuid").unwrap_or_default().trim().is_empty();
    lab.cluster.admit("other");
    if has_uuid {
        let node = lab.until_state("failed").await;
        assert!(node.reason.contains("Node of another machine"), "{}", node.reason);
        assert_eq!(lab.cluster.label("other", ZONE), None);
    }
    // Gone: the guest is no node any more.
    std::fs::remove_dir_all(lab.cluster.kubeconfig().parent().unwrap()).unwrap();
    let gone =
        |kind: &Kind| matches!(kind, Kind::NodeChanged(changed) if changed.node.is_none()).then_some(());
    lab.holder.until(gone).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hostile_or_overloaded_api_server() {
    let mut lab = Lab::joined("").await;
    let deep = "[".repeat(100_000).into_bytes();
    let other = json!({ "metadata": { "resourceVersion": "5" }, "items": [{ "metadata": { "name": "x", "labels": {} } }] });
    let faults = [
        (Fault::Say(200, b"\x00\x1b[2J garbage".to_vec()), "failed"),
        (Fault::Say(200, deep), "failed"),
        (Fault::Say(200, vec![b'x'; 3 << 20]), "failed"),
        (Fault::Say(200, b"{\"items\": 5}".to_vec()), "failed"),
        (Fault::Say(500, b"<html>".to_vec()), "failed"),
        (Fault::Refuse(503), "failed"),
        (Fault::Refuse(401), "failed"),
        (Fault::Say(200, other.to_string().into_bytes()), "waiting"),
    ];
    for (fault, state) in faults {
        lab.cluster.fault(fault.clone());
        lab.cluster.expire();
        let node = lab.until_state(state).await;
        assert!(!node.reason.contains(char::is_control) && node.reason.len() < 1000, "{:?}", node.reason);
        lab.cluster.fault(Fault::None);
        // A new credential is tried at once.
        lab.cluster.admit(NODE);
        lab.until_state("current").await;
    }
    assert!(!lab.agent.log().contains("garbage"), "what a server says is not logged as it is");

    lab.until("it watches", || lab.cluster.watchers() == 1).await;
    let stranger =
        json!({ "type": "MODIFIED", "object": { "metadata": { "name": "x", "resourceVersion": "1" } } });
    lab.cluster.fault(Fault::Tell(stranger.to_string()));
    lab.cluster.fault(Fault::None);
    lab.holder.tell(zone("b")).await.unwrap();
    lab.until_zone("b").await;
    lab.cluster.fault(Fault::Tell("{\"type\": \"NONSENSE\"}".to_owned()));
    // It may be resting, after so many watches that were short.
    lab.cluster.admit(NODE);
    lab.until_state("failed").await;
    lab.cluster.fault(Fault::None);
    lab.cluster.admit(NODE);
    lab.until_state("current").await;

    // Too many requests: it is asked no sooner than it should be.
    lab.cluster.fault(Fault::RefusePatches(429));
    lab.cluster.requests();
    lab.holder.tell(zone("c")).await.unwrap();
    let node = lab.until_state("failed").await;
    assert!(node.reason.contains("429"), "{}", node.reason);
    lab.holder.tell(zone("d")).await.unwrap();
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(lab.cluster.requests().iter().filter(|verb| *verb == "patch").count(), 1);
    // A label that an admission plugin forbids is not tried again and again.
    lab.cluster.fault(Fault::RefusePatches(403));
    lab.cluster.admit(NODE);
    loop {
        let node = lab.until_state("failed").await;
        if node.reason.contains("403") {
            break;
        }
    }
    lab.until("it watches", || lab.cluster.watchers() == 1).await;
    lab.cluster.requests();
    lab.cluster.edit(NODE, |node| node["status"]["heartbeat"] = json!(1));
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(lab.cluster.requests(), Vec::<String>::new());
    assert!(lab.agent.footprint().0 < 64 * 1024, "{} KiB", lab.agent.footprint().0);
}
