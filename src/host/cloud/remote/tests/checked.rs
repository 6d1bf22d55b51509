//! Health checks that agents of a cluster make.

use super::super::super::wanted::Check;
use super::*;

#[tokio::test(start_paused = true)]
async fn agents_are_given_checks_and_what_they_report_is_told() {
    let mut bench = Bench::new();
    let check = Check {
        node_port: 30080,
        success_threshold: 1,
        failure_threshold: 3,
        period_seconds: 5,
        timeout_seconds: 3,
    };
    let report = Report { name: "ns/a".into(), run: "run-a".into(), node: "node-a".into() };
    let news = bench.registry.members.hear_reports(Heard::There(report));
    bench.registry.tell(news);
    bench.ensured("web", Wanted { check: Some(check), ..wanted() }).await;
    bench.pool("p", "192.0.2.7");
    bench.allocate("web", "192.0.2.7");
    bench.rest().await;
    let (reply, answer) = oneshot::channel();
    bench.registry.take(super::super::super::Request::Checks("ns/dev".into(), reply));
    let mut given = answer.await.unwrap();
    let first = given.borrow_and_update().clone();
    assert_eq!((first.targets.len(), first.targets[0].port), (1, 30080));
    let key = ("ns/dev".to_owned(), "u-web".to_owned());
    let told = |bench: &Bench| {
        let told = bench.registry.message(&key).unwrap();
        (told.healthy, told.failing.first().map(|one| one.problem.clone()).unwrap_or_default())
    };
    assert_eq!(told(&bench).0, 0);
    let say = |bench: &mut Bench, who: &str, healthy: bool| {
        let asker = Asker { uid: who.into(), ..asker("ns/dev") };
        let result =
            v1::HealthCheckResult { id: first.targets[0].id.clone(), healthy, problem: "refused".into() };
        bench.registry.take(super::super::super::Request::Reported(asker, first.generation, vec![result]));
    };
    // A report of another VM does not count.
    say(&mut bench, "vm-other", true);
    assert_eq!(told(&bench).0, 0);
    say(&mut bench, "vm-a", true);
    assert_eq!(told(&bench), (1, String::new()));
    say(&mut bench, "vm-a", false);
    assert_eq!(told(&bench), (0, "refused".to_owned()));
    // It takes no traffic while another VM is named; then all Nodes do.
    let wants = |backends: Vec<String>| Wanted { check: Some(check), backends, ..wanted() };
    bench.ensured("web", wants(vec!["vm-b".into()])).await;
    assert_eq!(told(&bench), (0, String::new()));
    bench.ensured("web", wants(Vec::new())).await;
    assert_eq!(told(&bench), (0, "refused".to_owned()));
    assert_eq!(bench.changes().len(), 2, "none of it is in the object");
    // Without a check, agents get no targets, and no result is reported.
    bench.ensured("web", wanted()).await;
    assert!(given.has_changed().unwrap() && given.borrow().targets.is_empty());
    assert!(given.borrow().generation > first.generation);
    assert_eq!(told(&bench), (0, String::new()));
    assert_eq!(bench.registry.message(&key).unwrap().state(), State::Ready);
}
