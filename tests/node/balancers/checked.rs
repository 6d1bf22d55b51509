//! Health checks of load balancers on Harvester.

use guestlet::wire::proto::v1::load_balancer::State;
use guestlet::wire::proto::v1::{self, EnsureLoadBalancerRequest, LoadBalancer};

use super::{LAN, Site, wanted};
use crate::cluster::wait;
use crate::clusters::{Calls, vm};
use crate::patience::until;

/// The agents of nodes check the port that a Service names; which node announces is kube-vip's choice.
#[test]
fn agents_are_given_health_checks_and_what_they_report_is_told() {
    wait(async {
        let site = Site::start().await;
        let health_check =
            Some(v1::HealthCheck { port: 80, period_seconds: 1, ..v1::HealthCheck::default() });
        let checked = EnsureLoadBalancerRequest { health_check, ..wanted("web", "u1", 80) };
        site.dev.ensure(checked).await.unwrap();
        let told = site.dev.becomes("u1", "is ready", |one| one.state() == State::Ready).await;
        assert_eq!(told.healthy, 0);
        let [web, other] = &site.vms;
        let given = until("its agent is given the check", async || {
            web.guest.checks().pop().filter(|given| given.checks.len() == 1)
        })
        .await;
        let check = &given.checks[0];
        assert_eq!((check.port, check.period_seconds, check.failure_threshold), (30080, 1, 3));
        assert!(other.guest.checks().is_empty(), "another cluster's");
        let report = |healthy: bool| v1::ReportHealthChecksRequest {
            generation: given.generation,
            results: vec![v1::HealthCheckResult {
                id: check.id.clone(),
                healthy,
                problem: if healthy { String::new() } else { "connection to port 30080 refused".into() },
            }],
        };
        site.prod.report_health_checks(report(true)).await.unwrap();
        site.dev.report_health_checks(report(true)).await.unwrap();
        let told = site.dev.becomes("u1", "passes", |one| one.healthy == 1).await;
        assert_eq!(told.failing, []);
        site.dev.report_health_checks(report(false)).await.unwrap();
        let told = site.dev.becomes("u1", "fails", |one| one.failing.len() == 1).await;
        assert_eq!(
            (told.state(), told.addresses.len(), told.healthy),
            (State::Ready, 1, 0),
            "the address stays"
        );
        let failing = &told.failing[0];
        assert_eq!(failing.vm_name, "default/web");
        assert!(
            failing.problem.ends_with("refused") || failing.problem == "it was not tried yet",
            "{failing:?}"
        );
        // Of two Nodes the cluster has excluded one from load balancers: what that says is told to nobody.
        let db = vm(&site.whole, "db", "dev", LAN, "db").await;
        let checked = |backends: Vec<String>| EnsureLoadBalancerRequest {
            health_check,
            backends,
            ..wanted("web", "u1", 80)
        };
        site.dev.ensure(checked(vec![db.uid.clone()])).await.unwrap();
        let about_db = |one: &LoadBalancer| one.failing.len() == 1 && one.failing[0].vm_name == "default/db";
        let told = site.dev.becomes("u1", "is about the other", about_db).await;
        assert_eq!((told.state(), told.healthy, told.addresses.len()), (State::Ready, 0, 1));
        let of_db = Calls::of(&db).await;
        let given = until("its agent is given the check, too", async || {
            db.guest.checks().pop().filter(|given| given.checks.len() == 1)
        })
        .await;
        let results = vec![v1::HealthCheckResult {
            id: given.checks[0].id.clone(),
            healthy: true,
            problem: String::new(),
        }];
        let request = v1::ReportHealthChecksRequest { generation: given.generation, results };
        of_db.report_health_checks(request).await.unwrap();
        let told = site.dev.becomes("u1", "passes", |one| one.healthy == 1).await;
        assert_eq!(told.failing, [], "the excluded one fails, and takes no traffic");
        // All that are Nodes take it again.
        site.dev.ensure(checked(Vec::new())).await.unwrap();
        let is_both = |one: &LoadBalancer| one.healthy == 1 && one.failing.len() == 1;
        let told = site.dev.becomes("u1", "is about both", is_both).await;
        assert_eq!(told.failing[0].vm_name, "default/web");
        // It is to be checked no more.
        site.dev.ensure(wanted("web", "u1", 80)).await.unwrap();
        until("its agent checks nothing", async || {
            web.guest.checks().pop().filter(|given| given.checks.is_empty())
        })
        .await;
    });
}
