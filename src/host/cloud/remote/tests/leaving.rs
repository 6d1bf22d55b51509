//! Load balancers that are released before Harvester has taken them up.

use super::*;

const PATIENCE: Duration = Duration::from_secs(30);

impl Bench {
    /// Releases the load balancer of a Service, and returns whether nothing is reported to be left of it.
    async fn released(&mut self, name: &str) -> bool {
        let answer = self.release(name);
        self.rest().await;
        answer.await.unwrap().unwrap()
    }

    async fn wait(&mut self, time: Duration) {
        tokio::time::advance(time).await;
        self.registry.look_at_leaving();
        self.rest().await;
    }

    async fn listed(&mut self) -> Vec<v1::LoadBalancer> {
        let (reply, answer) = oneshot::channel();
        self.registry.take(super::super::super::Request::List(asker("ns/dev"), reply));
        self.rest().await;
        answer.await.unwrap().unwrap()
    }

    fn removed(&mut self, name: &str) -> oneshot::Receiver<Result<(), Problem>> {
        let (reply, answer) = oneshot::channel();
        let uid = service(name).uid;
        self.registry.take(super::super::super::Request::Remove("ns/dev".into(), uid, reply));
        answer
    }
}

#[tokio::test(start_paused = true)]
async fn its_service_waits_for_some_time_and_its_object_for_ever() {
    let mut bench = Bench::new();
    bench.ensured("web", wanted()).await;
    assert!(!bench.released("web").await);
    assert_eq!(bench.listed().await[0].state(), State::Releasing);
    bench.wait(PATIENCE / 2).await;
    assert!(!bench.released("web").await, "the time does not begin anew");
    bench.wait(PATIENCE / 2).await;
    assert!(bench.released("web").await);
    assert_eq!(bench.listed().await, []);
    assert_eq!(bench.registry.clusters["ns/dev"].balancers.all().count(), 0);
    // People still see it.
    let key = ("ns/dev".to_owned(), "u-web".to_owned());
    let told = bench.registry.message(&key).unwrap();
    assert_eq!((told.state(), told.reason.as_str()), (State::Releasing, "NotTakenUp"));
    bench.wait(PATIENCE * 1000).await;
    assert_eq!(bench.changes(), ["POST web"]);
    // It still counts, so the cluster cannot exceed its limit this way.
    assert_eq!(bench.registry.balancers.book.count("ns/dev"), 1);
    bench.allocate("web", "192.0.2.7");
    bench.rest().await;
    assert_eq!(bench.changes(), ["POST web", "DELETE web"], "somebody has taken it up");
    assert!(bench.registry.balancers.leaving.is_empty());
}

#[tokio::test(start_paused = true)]
async fn what_is_asked_for_again_stays() {
    let mut bench = Bench::new();
    bench.pool("p", "192.0.2.7");
    for is_late in [false, true] {
        let before = bench.changes().len();
        bench.ensured("web", wanted()).await;
        assert!(!bench.released("web").await);
        if is_late {
            bench.wait(PATIENCE).await;
            assert_eq!(bench.listed().await, []);
        }
        assert_eq!(bench.ensured("web", wanted()).await.state(), State::Pending);
        assert_eq!(bench.listed().await.len(), 1);
        bench.wait(PATIENCE).await;
        bench.allocate("web", "192.0.2.7");
        bench.rest().await;
        assert_eq!(bench.ensured("web", wanted()).await.state(), State::Ready);
        assert!(!bench.changes()[before..].contains(&"DELETE web".to_owned()));
        assert!(bench.released("web").await);
    }
}

/// No Service may begin to share the address of a load balancer that is about to be deleted.
#[tokio::test(start_paused = true)]
async fn what_leaves_is_shared_by_nobody() {
    let mut bench = Bench::new();
    bench.ensured("web", wanted()).await;
    assert!(!bench.released("web").await);
    let ports = vec![super::super::super::wanted::Port { port: 81, ..wanted().ports[0].clone() }];
    let sharing = Wanted { ports, share: Some(service("web")), ..wanted() };
    assert_eq!(bench.ensured("db", sharing).await.reason, "NoPrimary");
}

#[tokio::test(start_paused = true)]
async fn a_person_has_it_deleted_once_it_was_waited_for() {
    let mut bench = Bench::new();
    bench.ensured("web", wanted()).await;
    let answer = bench.removed("web");
    bench.rest().await;
    assert_eq!(answer.await.unwrap(), Ok(()));
    assert_eq!(bench.changes(), ["POST web"], "not at once");
    bench.wait(PATIENCE).await;
    let answer = bench.removed("web");
    bench.rest().await;
    assert_eq!(answer.await.unwrap(), Ok(()));
    assert_eq!(bench.changes(), ["POST web", "DELETE web"]);
    assert!(bench.registry.balancers.leaving.is_empty());
}
