//! What a cluster leaves whose VMs are gone.

use std::time::Duration;

use guestlet::wire::proto::v1::load_balancer::State;
use serde_json::json;

use super::{Site, allow, harvesters_of, wanted};
use crate::cluster::wait;
use crate::harvester::{of_pool, path};
use crate::lab::Watch;
use crate::model::objects::Kind;
use crate::patience::until;
use crate::whole::Whole;

/// A VM that is off, or whose agent nobody has a session with, is one of its cluster all the same.
#[test]
fn what_a_deleted_cluster_leaves_goes_when_the_api_has_none_of_its_vms_for_long_enough() {
    wait(async {
        let whole = Whole::start_with(1, "[load-balancers]\nrelease-after-seconds = 3").await;
        allow(&whole).await;
        let site = Site::of(whole).await;
        for (calls, uid) in [(&site.dev, "u1"), (&site.prod, "u2")] {
            calls.ensure(wanted("web", uid, 80)).await.unwrap();
            calls.ready(uid).await;
        }
        let watch = Watch::quiet(&site.whole.controllers[0], &["-o", "json"]);
        // One of Harvester's cloud provider, which nobody has taken over.
        let theirs = harvesters_of(&site, "prod", "prod-shop-db-00000000", "db").await;
        let api = &site.whole.cluster.api;
        let off = json!({ "spec": { "runStrategy": "Halted" } });
        api.patch(&Kind::Vm.path("default/other"), &off).await.unwrap();
        tokio::time::sleep(Duration::from_secs(7)).await;
        assert_eq!(site.objects().await.len(), 3, "its VM exists");
        api.delete(&Kind::Vm.path("default/other")).await;
        until("the cluster's is given back", async || (site.objects().await.len() == 2).then_some(())).await;
        let gone = watch.until(|line| line.contains("load-balancer-changed") && line.contains("\"gone\""));
        assert!(gone.contains("default/prod") && gone.contains("198.51.100.2"), "{gone}");
        let log = site.whole.controllers[0].log();
        assert!(log.contains("no VM of the cluster has existed for 3 s"), "{log}");
        tokio::time::sleep(Duration::from_secs(4)).await;
        let left: Vec<_> = site.objects().await.iter().map(path).collect();
        assert!(left.contains(&path(&theirs)) && left.len() == 2, "{left:?}");
        assert_eq!(site.dev.all().await.unwrap()[0].state(), State::Ready);
        let pool = of_pool(api, "prod").await;
        assert!(pool["status"]["allocated"]["198.51.100.2"].is_null(), "{pool}");
    });
}
