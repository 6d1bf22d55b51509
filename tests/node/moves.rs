//! Where guests run: the labels of the node, and another node after a migration.

use serde_json::json;

use crate::bench::{Bench, NODE, guest, host, install, names, until_names};
use crate::cluster::{HOSTS, Lab as Cluster, wait};
use crate::model::objects::text;
use crate::model::pace::Step;

/// harvester/harvester#3142: a new zone reached a guest only with another event of its VM, and some guests never.
#[test]
fn labels_of_the_node_reach_its_guests_at_each_edit() {
    wait(async {
        let bench = Bench::start().await;
        let web = bench.instance("web", NODE).await;
        let lab = bench.host().set("kubevirt.node-labels = ['example.com/rack']").start();
        let guest = guest(&lab, &web);
        lab.until_session("default/web", "connected");
        let knows = |zone: &str| guest.places().told.last().is_some_and(|told| told.zone == zone);
        lab.until("the guest knows its zone", || knows("zone-1"));
        let told = guest.places().told.last().cloned().unwrap();
        assert_eq!((told.region.as_str(), told.host.as_str()), ("region", NODE));
        assert_eq!(told.labels, [("example.com/rack".to_owned(), "r7".to_owned())].into());
        let labels = json!({ "topology.kubernetes.io/zone": "zone-9", "example.com/rack": null });
        bench.api.patch(&format!("/api/v1/nodes/{NODE}"), &json!({ "metadata": { "labels": labels } })).await;
        lab.until("the guest knows the other zone", || knows("zone-9"));
        assert_eq!(guest.places().told.last().unwrap().labels, [].into());
        assert_eq!(lab.info("default/web")["sessions"], 1);
        let shown = lab.words(&["topology"]);
        assert!(shown.contains("zone-9"), "{shown}");
    });
}

#[test]
fn a_migrated_vm_is_first_the_sources_and_then_the_targets() {
    wait(async {
        let cluster = Cluster::start().await;
        install(&cluster.api).await;
        let instance = cluster.running("web").await;
        let from = text(&instance["status"]["nodeName"]).to_owned();
        let to = HOSTS.into_iter().find(|host| *host != from).unwrap();
        let [source, target] = [from.as_str(), to].map(|node| host(cluster.turn.plane(), node).start());
        let before = guest(&source, &instance);
        let after = guest(&target, &instance);
        source.until_session("default/web", "connected");
        assert_eq!(names(&target), [""; 0]);

        cluster.model.hold(Step::HandOver, "web");
        cluster.model.migrate("default", "web", to).await;
        cluster.model.reaches(Step::HandOver, "web").await;
        assert_eq!((names(&source), names(&target)), (vec!["default/web".to_owned()], vec![]));
        assert_eq!((before.open(), after.open()), (1, 0));

        cluster.model.release(Step::HandOver, "web");
        until_names(&source, &[]);
        until_names(&target, &["default/web"]);
        target.until_session("default/web", "connected");
        source.until("it has let go", || before.open() == 0);
        let zone = if to == "host-1" { "zone-1" } else { "zone-2" };
        target.until("the guest knows where it is", || {
            after.places().told.last().is_some_and(|told| told.zone == zone && told.host == to)
        });
    });
}

#[test]
fn a_migration_that_fails_changes_nothing() {
    wait(async {
        let cluster = Cluster::start().await;
        install(&cluster.api).await;
        let instance = cluster.running("web").await;
        let from = text(&instance["status"]["nodeName"]).to_owned();
        let to = HOSTS.into_iter().find(|host| *host != from).unwrap();
        let [source, target] = [from.as_str(), to].map(|node| host(cluster.turn.plane(), node).start());
        let guest = guest(&source, &instance);
        source.until_session("default/web", "connected");
        cluster.model.fail(Step::HandOver, "web", "the memory changes too fast");
        let migration = cluster.model.migrate("default", "web", to).await;
        let path =
            format!("/apis/kubevirt.io/v1/namespaces/default/virtualmachineinstancemigrations/{migration}");
        crate::patience::until("the migration has failed", async || {
            let migration = cluster.api.get(&path).await?;
            (migration["status"]["phase"] == "Failed").then_some(())
        })
        .await;
        assert_eq!((names(&source), names(&target)), (vec!["default/web".to_owned()], vec![]));
        assert_eq!((source.info("default/web")["sessions"].clone(), guest.open()), (json!(1), 1));
    });
}
