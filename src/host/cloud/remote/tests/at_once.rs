//! Several load balancers of a cluster that are written concurrently.

use super::super::queue::AT_ONCE;
use super::*;

impl Bench {
    /// Asserts how many requested changes the API server has not answered yet.
    async fn reaches(&mut self, count: usize) {
        self.rest().await;
        assert_eq!(self.server.objects().waiting, count);
    }
}

#[tokio::test(start_paused = true)]
async fn several_are_written_beside_each_other_and_no_more_than_may_be() {
    let mut bench = Bench::new();
    bench.hold(true);
    let names: Vec<_> = (0..3 * AT_ONCE).map(|number| format!("s{number}")).collect();
    let answers: Vec<_> = names.iter().map(|name| bench.ensure("ns/dev", name, wanted())).collect();
    bench.reaches(AT_ONCE).await;
    bench.hold(false);
    bench.rest().await;
    for answer in answers {
        assert_eq!(answer.await.unwrap().unwrap().state(), State::Pending);
    }
    let mut changes = bench.changes();
    changes.sort_unstable();
    changes.dedup();
    assert_eq!(changes.len(), 3 * AT_ONCE, "each was made once: {changes:?}");
}

/// Load balancers that are being created count. A request that exceeds the limit because of them is decided once
/// they have ended.
#[tokio::test(start_paused = true)]
async fn a_cluster_gets_as_many_as_it_may_have_however_many_are_made_at_once() {
    for most in [1, 3, 10] {
        let mut bench = Bench::new();
        let policy = Policy { load_balancers: Some(most), ..Policy::default() };
        let clusters = [("ns/dev".to_owned(), policy)].into();
        bench.settings.send_replace(Arc::new(Settings { clusters, ..Settings::default() }));
        bench.hold(true);
        let names: Vec<_> = (0..2 * AT_ONCE).map(|number| format!("s{number}")).collect();
        let answers: Vec<_> = names.iter().map(|name| bench.ensure("ns/dev", name, wanted())).collect();
        bench.rest().await;
        bench.hold(false);
        bench.rest().await;
        let mut got = 0;
        for answer in answers {
            match answer.await.unwrap() {
                Ok(_) => got += 1,
                Err(problem) => assert!(matches!(problem, Problem::Exhausted(_)), "{problem}"),
            }
        }
        assert_eq!(got, most);
        assert_eq!(bench.server.objects().balancers.len(), usize::try_from(most).unwrap());
    }
}

/// A deleted Service releases its load balancer before the next Service of its name gets one.
#[tokio::test(start_paused = true)]
async fn what_is_of_one_service_is_done_in_order() {
    let mut bench = Bench::new();
    bench.pool("p", "192.0.2.7");
    bench.ensured("web", wanted()).await;
    bench.allocate("web", "192.0.2.7");
    bench.rest().await;
    bench.server.objects().changes.clear();
    bench.hold(true);
    let released = bench.release("web");
    let again = Service { uid: "u-again".into(), ..service("web") };
    let (reply, mut ensured) = oneshot::channel();
    let request = super::super::super::Request::Ensure(asker("ns/dev"), again, Box::new(wanted()), reply);
    bench.registry.take(request);
    let other = bench.ensure("ns/dev", "other", wanted());
    bench.reaches(2).await;
    assert!(ensured.try_recv().is_err());
    bench.hold(false);
    bench.rest().await;
    assert_eq!(released.await.unwrap(), Ok(true));
    assert!(ensured.await.unwrap().is_ok() && other.await.unwrap().is_ok());
    let changes = bench.changes();
    assert_eq!(changes.iter().filter(|change| change.ends_with(" web")).count(), 2, "{changes:?}");
    assert!(
        changes.iter().position(|one| one == "DELETE web") < changes.iter().position(|one| one == "POST web"),
        "{changes:?}"
    );
}

/// Harvester writes a new object several times.
#[tokio::test(start_paused = true)]
async fn that_it_has_an_address_is_said_once_harvester_has_taken_it_up() {
    let mut bench = Bench::new();
    bench.pool("p", "192.0.2.7");
    bench.ensured("web", wanted()).await;
    let mut object = bench.server.objects().balancers.values().next().unwrap().clone();
    object["status"]["allocatedAddress"] = json!({ "ip": "192.0.2.7", "ipPool": "p" });
    object["metadata"]["resourceVersion"] = json!("90");
    bench.heard(&object);
    bench.rest().await;
    assert_eq!(bench.ensured("web", wanted()).await.state(), State::Ready, "it is told at once");
    assert_eq!(bench.changes(), ["POST web"]);
    bench.allocate("web", "192.0.2.7");
    let version =
        bench.server.objects().balancers.values().next().unwrap()["metadata"]["resourceVersion"].clone();
    assert_ne!(version, "90");
}

/// A step that conflicts with another writer is repeated at once if the other change has been reported meanwhile.
#[tokio::test(start_paused = true)]
async fn what_somebody_else_has_changed_is_looked_at_again() {
    let mut bench = Bench::new();
    bench.ensured("web", wanted()).await;
    bench.hold(true);
    let port = super::super::super::wanted::Port { port: 81, ..wanted().ports[0].clone() };
    let changed = bench.ensure("ns/dev", "web", Wanted { ports: vec![port], ..wanted() });
    bench.reaches(1).await;
    // Another writer is faster, and its change is reported.
    let object = {
        let mut objects = bench.server.objects();
        objects.version += 1;
        let version = objects.version.to_string();
        let object = objects.balancers.values_mut().next().unwrap();
        object["metadata"]["labels"]["a"] = json!("b");
        object["metadata"]["resourceVersion"] = json!(version);
        object.clone()
    };
    bench.heard(&object);
    let begun = tokio::time::Instant::now();
    bench.hold(false);
    while bench.changes().iter().filter(|change| *change == "PATCH web").count() < 2 {
        let done = bench.registry.dones.recv().await.unwrap();
        bench.registry.take_in(done);
    }
    assert!(begun.elapsed() < Duration::from_millis(100), "{:?}", begun.elapsed());
    bench.rest().await;
    assert_eq!(changed.await.unwrap().unwrap().state(), State::Pending);
    assert_eq!(bench.wanted_of("web").ports[0].port, 81);
}
