//! A guest cluster that used Harvester's CSI driver, from its sidecars to the host cluster: what its cluster knows
//! of them, which names claims, stays as it is.

use serde_json::Value;
use tonic::Code;

use crate::cluster::wait;
use crate::sidecar::refused;
use crate::whole::{MIB, Vm, Whole, again, ask};

const CLAIM: &str = "pvc-6f0c2a0e-0b7a-4b8e-9a55-0a1b2c3d4e5f";
const ALIAS: &str = "drive-ua-pvc-6f0c2a0e-0b7a-4b8e-9a55-0a1b2c3d4e5f";

/// Harvester's driver has made a claim for the cluster `default/dev`, and plugs it into this VM.
async fn harvester_has_plugged(whole: &Whole, vm: &str) {
    whole.cluster.harvester_claim(CLAIM, 64, "dev").await;
    whole.cluster.harvester_plugs(vm, CLAIM).await;
    whole.cluster.is_in(vm, CLAIM, "Ready").await;
}

/// What a sidecar asks of the volume, for the node that a VM is.
async fn publish(by: &Vm, node: &Vm) -> std::collections::HashMap<String, String> {
    let (sidecar, node) = (by.sidecar().await, node.uid.clone());
    ask(move || again(|| sidecar.publish(CLAIM, &node))).await
}

async fn unpublish(by: &Vm, node: &Vm) {
    let (sidecar, node) = (by.sidecar().await, node.uid.clone());
    ask(move || again(|| sidecar.unpublish(CLAIM, &node))).await;
}

async fn is_refused(by: &Vm, node: &Vm, code: Code, words: &'static str) {
    let (sidecar, node) = (by.sidecar().await, node.uid.clone());
    ask(move || {
        refused(sidecar.publish(CLAIM, &node), code, words);
        refused(sidecar.unpublish(CLAIM, &node), code, words);
        refused(sidecar.expand(CLAIM, 128 * MIB), code, words);
        refused(sidecar.delete(CLAIM), code, words);
    })
    .await;
}

async fn is_plugged(whole: &Whole, vm: &str) -> bool {
    whole.cluster.entry(vm, CLAIM).await.is_some_and(|entry| entry["phase"] == "Ready")
}

#[test]
fn a_cluster_goes_on_with_the_volumes_of_harvesters_driver() {
    wait(async {
        let whole = Whole::start(1).await;
        let (web, db, foreign) =
            (whole.vm("web").await, whole.vm("db").await, whole.vm_of("prod", "foreign").await);
        harvester_has_plugged(&whole, "web").await;
        is_refused(
            &db,
            &web,
            Code::FailedPrecondition,
            "is not assigned to guestlet: in the host cluster, kubectl",
        )
        .await;
        is_refused(&foreign, &foreign, Code::NotFound, "there is no volume").await;
        whole.cluster.give(CLAIM).await;
        is_refused(&foreign, &foreign, Code::NotFound, "there is no volume").await;

        let context = publish(&db, &web).await;
        assert_eq!(
            (context["guestlet.io/serial"].as_str(), context["guestlet.io/bus"].as_str()),
            (ALIAS, "scsi")
        );
        let (sidecar, others, node) = (db.sidecar().await, foreign.sidecar().await, web.uid.clone());
        ask(move || {
            // The external attacher compares this with its own PersistentVolumes.
            assert_eq!(sidecar.all(), [(CLAIM.to_owned(), vec![node])]);
            assert_eq!(others.all(), []);
            assert_eq!(sidecar.expand(CLAIM, 128 * MIB).unwrap(), 128 * MIB);
        })
        .await;
        let asked = web.guest.disks().asked.clone();
        assert_eq!(asked, [format!("find {ALIAS}")]);
        let listed = whole.controllers[0].words(&["volumes", "ls", "-o", "json"]);
        let listed: Value = serde_json::from_str(&listed).unwrap();
        assert_eq!(listed[0]["id"], format!("default.{CLAIM}"), "{listed}");

        unpublish(&db, &web).await;
        assert!(web.guest.disks().asked.contains(&format!("release {ALIAS}")));
        assert!(web.guest.disks().seen.is_empty() && !is_plugged(&whole, "web").await);
        // A node that has it no more may be asked again.
        unpublish(&db, &web).await;
        let context = publish(&db, &db).await;
        assert_eq!(context["guestlet.io/serial"].len(), 36);
        assert_eq!(db.guest.disks().seen.keys().collect::<Vec<_>>(), [&context["guestlet.io/serial"]]);
        unpublish(&web, &db).await;
        let sidecar = web.sidecar().await;
        ask(move || again(|| sidecar.delete(CLAIM))).await;
        let claims = whole.cluster.api.list("/api/v1/namespaces/default/persistentvolumeclaims").await;
        assert_eq!(claims, [] as [Value; 0]);
    });
}

/// The pod ends before anybody has told guestlet that the node has its volume.
#[test]
fn what_a_node_was_given_before_guestlet_came_is_taken_from_that_node_alone() {
    wait(async {
        let whole = Whole::start(1).await;
        let (web, db) = (whole.vm("web").await, whole.vm("db").await);
        harvester_has_plugged(&whole, "web").await;
        whole.cluster.give(CLAIM).await;
        // Another node does not have it, and may say so.
        unpublish(&db, &db).await;
        assert!(is_plugged(&whole, "web").await && web.guest.disks().asked.is_empty());
        unpublish(&db, &web).await;
        assert!(web.guest.disks().asked.contains(&format!("release {ALIAS}")));
        assert!(!is_plugged(&whole, "web").await);

        // It comes to a second node behind guestlet's back: that one cannot say that it has it no more.
        publish(&db, &web).await;
        whole.cluster.harvester_plugs("db", CLAIM).await;
        whole.cluster.is_in("db", CLAIM, "Ready").await;
        let (sidecar, other) = (web.sidecar().await, db.uid.clone());
        ask(move || {
            let words = "a program other than guestlet has plugged the volume";
            refused(sidecar.unpublish(CLAIM, &other), Code::FailedPrecondition, words);
        })
        .await;
        assert!(is_plugged(&whole, "db").await);
        whole.cluster.unplug("db", &[CLAIM]).await;
        whole.cluster.has_left("db", CLAIM).await;
        unpublish(&db, &db).await;
        unpublish(&db, &web).await;

        // People need not say which node it is.
        whole.cluster.harvester_plugs("web", CLAIM).await;
        whole.cluster.is_in("web", CLAIM, "Ready").await;
        let id = format!("default.{CLAIM}");
        ask(move || {
            whole.controllers[0].words(&["volumes", "detach", &id]);
            whole
        })
        .await
        .cluster
        .has_left("web", CLAIM)
        .await;
    });
}

/// Programs of such a guest may have mounted the disk: what its agent does not know is not there is never taken for that.
#[test]
fn a_guest_that_cannot_say_that_it_lets_go_keeps_what_others_have_plugged() {
    wait(async {
        let whole = Whole::start(1).await;
        let db = whole.vm("db").await;
        let labelled = whole.cluster.vm_with("web", |vm| {
            let labels = &mut vm["spec"]["template"]["metadata"]["labels"];
            labels["guestcluster.harvesterhci.io/name"] = "dev".into();
        });
        labelled.await;
        let instance = whole.cluster.runs("web").await;
        let web = whole.boot_with("web", &instance, &["topology"]);
        harvester_has_plugged(&whole, "web").await;
        whole.cluster.give(CLAIM).await;
        let attempts = async |web: &Vm, words: &'static str| {
            let (sidecar, node) = (db.sidecar().await, web.uid.clone());
            ask(move || {
                refused(sidecar.publish(CLAIM, &node), Code::Unavailable, words);
                refused(sidecar.unpublish(CLAIM, &node), Code::FailedPrecondition, words);
                refused(
                    sidecar.unpublish(CLAIM, &node),
                    Code::FailedPrecondition,
                    "upgrade the agent of that guest",
                );
            })
            .await;
            assert!(is_plugged(&whole, "web").await);
        };
        // Before it is published there it is the other program's, and stays that.
        let (sidecar, node) = (db.sidecar().await, web.uid.clone());
        ask(move || {
            let words = "upgrade the agent of that guest";
            refused(sidecar.unpublish(CLAIM, &node), Code::FailedPrecondition, words);
        })
        .await;
        let path = format!("/api/v1/namespaces/default/persistentvolumeclaims/{CLAIM}");
        let claim = whole.cluster.api.get(&path).await.unwrap();
        assert!(claim["metadata"]["annotations"]["guestlet.io/published"].is_null(), "{claim}");
        attempts(&web, "it lacks the capability \"disks\"").await;
        whole.shut("web", web.guest);
        let lab = &whole.nodes[instance["status"]["nodeName"].as_str().unwrap()];
        lab.until_vm("default/web", |vm| vm["session"] == "connecting");
        let web = whole.boot("web", &instance);
        // It knows the disk by something else, or not at all.
        web.guest.disks().seen.clear();
        attempts(&web, "it has not done so within 10 s").await;
        assert!(!web.guest.disks().asked.iter().any(|one| one.starts_with("release")));
        web.guest.disks().seen.insert(ALIAS.to_owned(), "sdb".to_owned());
        unpublish(&db, &web).await;
        assert!(!is_plugged(&whole, "web").await);
    });
}

/// Its pod has moved behind guestlet's back: the node that had the volume is left when the cluster says so, and the one that has it is
/// given it.
#[test]
fn a_node_that_has_lost_a_volume_to_another_one_is_left_and_the_other_one_has_it() {
    wait(async {
        let whole = Whole::start(1).await;
        let (web, db) = (whole.vm("web").await, whole.vm("db").await);
        harvester_has_plugged(&whole, "web").await;
        whole.cluster.give(CLAIM).await;
        publish(&db, &web).await;
        // In this order, because repair would plug what nobody has.
        whole.cluster.harvester_plugs("db", CLAIM).await;
        whole.cluster.unplug("web", &[CLAIM]).await;
        whole.cluster.has_left("web", CLAIM).await;
        whole.cluster.is_in("db", CLAIM, "Ready").await;
        let (sidecar, node) = (web.sidecar().await, db.uid.clone());
        ask(move || {
            refused(sidecar.publish(CLAIM, &node), Code::FailedPrecondition, "it can be on one at a time");
        })
        .await;
        unpublish(&db, &web).await;
        assert!(is_plugged(&whole, "db").await && !is_plugged(&whole, "web").await);
        whole.cluster.is_attached_for(CLAIM, "db").await;
        let context = publish(&web, &db).await;
        assert_eq!(context["guestlet.io/serial"], ALIAS);
        assert!(!db.guest.disks().asked.iter().any(|one| one.starts_with("release")));
        unpublish(&web, &db).await;
        assert!(!is_plugged(&whole, "db").await);
    });
}
