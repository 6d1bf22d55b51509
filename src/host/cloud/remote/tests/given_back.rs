//! Load balancers of deleted clusters.

use super::*;

const AFTER: Duration = Duration::from_secs(100);

impl Bench {
    /// Builds a registry that releases leftovers after some time. The cluster has two load balancers, one of which
    /// shares the other's address.
    async fn with_two() -> Self {
        let mut bench = Self::new();
        bench.settings.send_replace(Arc::new(Settings { release_after: Some(AFTER), ..Settings::default() }));
        bench.ensured("web", wanted()).await;
        bench.pool("p", "192.0.2.7");
        bench.allocate("web", "192.0.2.7");
        bench.rest().await;
        let ports = vec![super::super::super::wanted::Port { port: 81, ..wanted().ports[0].clone() }];
        bench.ensured("db", Wanted { ports, share: Some(service("web")), ..wanted() }).await;
        // An object of Harvester's cloud provider that has not been taken over.
        bench.heard(&json!({
            "metadata": {
                "name": "dev-shop-theirs-1", "namespace": "ns", "resourceVersion": "1",
                "labels": {
                    "cloudprovider.harvesterhci.io/cluster": "dev",
                    "cloudprovider.harvesterhci.io/serviceNamespace": "shop",
                    "cloudprovider.harvesterhci.io/serviceName": "theirs",
                },
            },
            "spec": { "workloadType": "cluster" },
        }));
        bench.rest().await;
        bench.server.objects().changes.clear();
        bench
    }

    async fn look(&mut self) {
        self.registry.look_for_abandoned();
        self.rest().await;
    }
}

#[tokio::test(start_paused = true)]
async fn what_a_cluster_leaves_goes_when_none_of_its_vms_has_existed_for_long_enough() {
    let mut bench = Bench::with_two().await;
    bench.lose("a", "dev", true);
    bench.look().await;
    tokio::time::advance(Duration::from_secs(95)).await;
    bench.look().await;
    assert_eq!(bench.changes(), [] as [String; 0], "not yet");
    tokio::time::advance(Duration::from_secs(5)).await;
    bench.look().await;
    assert_eq!(bench.changes(), ["DELETE web"], "with whoever shares its address, and nothing of others");
    assert_eq!(bench.registry.balancers.keys(Some("ns/dev")).len(), 1, "what guestlet has not made stays");
    tokio::time::advance(AFTER * 2).await;
    bench.look().await;
    assert_eq!(bench.changes().len(), 1);
}

/// Missing reports about a VM prove nothing.
#[tokio::test(start_paused = true)]
async fn nothing_goes_as_long_as_the_api_has_a_vm_of_the_cluster_or_does_not_say() {
    let mut bench = Bench::with_two().await;
    bench.lose("a", "dev", false);
    for _ in 0..4 {
        bench.look().await;
        tokio::time::advance(AFTER).await;
    }
    assert_eq!(bench.changes(), [] as [String; 0], "the API has it");
    // Only the label of the VirtualMachine itself names the cluster.
    let labels = json!({ "guestcluster.harvesterhci.io/name": "dev" });
    bench.server.objects().vms =
        vec![json!({ "metadata": { "namespace": "ns", "name": "a", "labels": labels }, "spec": {} })];
    for _ in 0..4 {
        bench.look().await;
        tokio::time::advance(AFTER).await;
    }
    assert_eq!(bench.changes(), [] as [String; 0], "the API has one, of which nothing else is known");
    bench.server.objects().vms.clear();
    bench.look().await;
    bench.server.objects().is_away = true;
    tokio::time::advance(AFTER * 2).await;
    bench.look().await;
    assert_eq!(bench.changes(), [] as [String; 0], "it is not known now");
    bench.server.objects().is_away = false;
    bench.look().await;
    assert_eq!(bench.changes(), ["DELETE web"]);
}

#[tokio::test(start_paused = true)]
async fn a_vm_in_between_begins_the_time_anew() {
    let mut bench = Bench::with_two().await;
    bench.lose("a", "dev", true);
    bench.look().await;
    tokio::time::advance(AFTER / 2).await;
    bench.vm("b", "dev", "ns/lan");
    bench.lose("b", "dev", true);
    bench.look().await;
    tokio::time::advance(AFTER / 2).await;
    bench.look().await;
    assert_eq!(bench.changes(), [] as [String; 0]);
    tokio::time::advance(AFTER / 2).await;
    bench.look().await;
    assert_eq!(bench.changes(), ["DELETE web"]);
}

#[tokio::test(start_paused = true)]
async fn where_it_is_left_to_people_nothing_goes() {
    let mut bench = Bench::with_two().await;
    bench.settings.send_replace(Arc::default());
    bench.lose("a", "dev", true);
    for _ in 0..3 {
        bench.look().await;
        tokio::time::advance(AFTER).await;
    }
    assert_eq!(bench.changes(), [] as [String; 0]);
}
