//! Labels of VMs: on their Guests, and as what VMs are selected by.

use serde_json::{Value, json};

use crate::api::Api;
use crate::bench::{Bench, GUESTS, INSTANCES, NODE};
use crate::cluster::wait;
use crate::kubectl::{Desk, ctl, names, value, words};
use crate::lab::assert_fails;
use crate::patience::until;

/// The label that all instances have.
const CLUSTER: &str = "guestcluster.harvesterhci.io/name";

async fn set(api: &Api, path: &str, labels: &Value) {
    api.patch(path, &json!({ "metadata": { "labels": labels } })).await.unwrap();
}

/// Waits until a Guest has these labels, and the one that all have.
async fn until_labels(api: &Api, name: &str, labels: &Value) {
    let mut wanted = labels.clone();
    wanted[CLUSTER] = json!("dev");
    until(&format!("the Guest {name} has the labels {wanted}"), async || {
        let guest = api.get(&format!("{GUESTS}/{name}")).await?;
        (guest["metadata"]["labels"] == wanted).then_some(())
    })
    .await;
}

#[test]
fn a_guest_has_the_labels_of_its_vm_and_those_of_others() {
    wait(async {
        let bench = Bench::start().await;
        let api = &bench.api;
        let (instance, guest) = (format!("{INSTANCES}/web"), format!("{GUESTS}/web"));
        bench
            .instance_with("web", NODE, |instance| {
                let labels = &mut instance["metadata"]["labels"];
                labels["tier"] = json!("web");
                labels["gpu"] = json!("");
                labels["vm.kubevirt.io/name"] = json!("web");
            })
            .await;
        let lab = bench.host().start();
        until_labels(api, "web", &json!({ "gpu": "", "tier": "web" })).await;
        let list = async |selector: &str| api.list(&format!("{GUESTS}?labelSelector={selector}")).await.len();
        assert_eq!((list("tier%3Dweb").await, list("tier%3Ddb").await), (1, 0), "kubectl get guests -l");

        // Somebody changes one, and adds another one. The VM's do not replace them.
        set(api, &guest, &json!({ "team": "a", "tier": "mine" })).await;
        set(api, &instance, &json!({ "rack": "7", "tier": "db" })).await;
        until_labels(api, "web", &json!({ "gpu": "", "rack": "7", "team": "a", "tier": "mine" })).await;
        assert_eq!(lab.info("default/web")["labels"]["tier"], "db");
        // What the VM no longer has is removed, and nothing else.
        set(api, &instance, &json!({ "gpu": null, "rack": null })).await;
        until_labels(api, "web", &json!({ "team": "a", "tier": "mine" })).await;
        // What they no longer claim is the VM's again.
        set(api, &guest, &json!({ "tier": null })).await;
        set(api, &instance, &json!({ "tier": "cache" })).await;
        until_labels(api, "web", &json!({ "team": "a", "tier": "cache" })).await;

        // The VM is made again, with other labels.
        bench.delete("web").await;
        bench.instance("web", NODE).await;
        until_labels_are_only_its_own(api).await;
    });
}

/// The Guest may be that of the VM before, which the garbage collector has not deleted yet, with what others have set on it.
async fn until_labels_are_only_its_own(api: &Api) {
    until("the labels of the VM before are gone", async || {
        let guest = api.get(&format!("{GUESTS}/web")).await?;
        let labels = &guest["metadata"]["labels"];
        (labels["tier"].is_null() && labels[CLUSTER] == "dev").then_some(())
    })
    .await;
}

#[test]
fn vms_of_a_cluster_are_selected_by_the_api_server_and_those_of_a_node_by_guestctl() {
    wait(async {
        let desk = Desk::start().await;
        let (api, admin) = (&desk.bench.api, &desk.admin);
        for name in ["web", "mail"] {
            set(api, &format!("{INSTANCES}/{name}"), &json!({ "tier": name })).await;
            until_labels(api, name, &json!({ "tier": name })).await;
        }
        let list = async |arguments: &[&str]| value(admin, &[&["ls"], arguments].concat()).await;
        let web = list(&["-l", "tier=web"]).await;
        assert_eq!((names(&web), &web[0]["labels"]["tier"]), (vec!["default/web"], &json!("web")));
        let both = list(&["-l", "tier in (web, mail),guestcluster.harvesterhci.io/name"]).await;
        assert_eq!(names(&both), ["default/mail", "default/web"]);
        assert_eq!(names(&list(&["-l", "!tier"]).await), [""; 0]);
        assert_eq!(names(&list(&["-l", "tier!=web", "-n", "default", "m*"]).await), ["default/mail"]);
        let table = words(admin, &["ls", "-l", "tier=web", "--show-labels"]).await;
        assert!(table.contains("LABELS\n") && table.contains("=dev,tier=web\n"), "{table}");

        // The node knows the labels of its VMs, and the API server what else is on their Guests.
        assert_eq!(value(admin, &["info", "web"]).await["labels"]["tier"], "web");
        set(api, &format!("{GUESTS}/web"), &json!({ "team": "a" })).await;
        assert_eq!(names(&list(&["-l", "team=a"]).await), ["default/web"]);
        assert_eq!(names(&list(&["-l", "tier", "--node", NODE]).await), ["default/web"]);
        assert_eq!(names(&list(&["-l", "team=a", "--node", NODE]).await), [""; 0]);

        let none = ctl(admin, &["ls", "-l", "tier=web", "mail"]).await;
        assert_fails(&none, 4, "no VM with the labels tier=web matches \"*/mail\"");
        let wrong = ctl(admin, &["ls", "-l", "tier in web"]).await;
        assert_fails(&wrong, 2, "at character 9: expected values in parentheses");
        drop(desk.guests);
    });
}
