//! Health checks: what agents are given, and what they report.

use guestlet::wire::proto::v1::load_balancer::State;
use guestlet::wire::proto::v1::{self, HealthCheck, HealthCheckResult, ReportHealthChecksRequest};

use super::{Machines, SMALL, USUAL, started, wanted};

fn checked(name: &str) -> v1::EnsureLoadBalancerRequest {
    let health_check = Some(HealthCheck { port: 80, period_seconds: 1, ..HealthCheck::default() });
    v1::EnsureLoadBalancerRequest { health_check, ..wanted(name) }
}

impl Machines {
    /// The newest checks of a guest, once it has so many.
    fn until_checks(&self, vm: &str, count: usize) -> v1::SetHealthChecksRequest {
        let newest = || self.guests[vm].checks().pop();
        self.lab.until("the guest has its checks", || newest().is_some_and(|one| one.checks.len() == count));
        newest().unwrap()
    }

    fn report(&self, vm: &str, generation: u64, ids: &[&str], healthy: bool) {
        let result = |id: &&str| HealthCheckResult {
            id: (*id).into(),
            healthy,
            problem: if healthy { String::new() } else { "connection to port 30080 refused".into() },
        };
        let results = ids.iter().map(result).collect();
        self.of(vm).report_health_checks(ReportHealthChecksRequest { generation, results }).unwrap();
    }
}

#[test]
fn agents_are_given_checks_and_decide_about_their_own_vm() {
    let mut vms = started(&USUAL, SMALL);
    let a = vms.of("a");
    let made = a.ensure(checked("web")).unwrap();
    // The address is given whether or not a node passes.
    assert_eq!((made.state(), made.healthy), (State::Ready, 0));
    let given = vms.until_checks("a", 1);
    let check = given.checks[0].clone();
    assert_eq!(
        (check.port, check.family(), check.period_seconds, check.timeout_seconds),
        (30080, v1::IpFamily::Ipv4, 1, 1)
    );
    assert_eq!((check.success_threshold, check.failure_threshold, given.report_seconds), (1, 3, 20));
    assert_eq!(vms.until_checks("b", 1).checks, given.checks);
    assert!(vms.guests["c"].checks().is_empty(), "another cluster's");
    // The other cluster's VM reports, too, and what it says of another's check says nothing.
    let id = check.id.as_str();
    vms.report("c", given.generation, &[id], true);
    vms.report("a", given.generation, &[id, "unknown"], true);
    let told = a.until(&vms.lab, "web", |one| one.healthy == 1);
    assert_eq!((told.failing.len(), told.failing[0].vm_name.as_str()), (1, "b"));
    assert_eq!(told.failing[0].problem, "it was not tried yet");
    vms.report("b", given.generation, &[id], true);
    a.until(&vms.lab, "web", |one| one.healthy == 2 && one.failing.is_empty());
    vms.report("b", given.generation, &[id], false);
    let told = a.until(&vms.lab, "web", |one| one.healthy == 1);
    assert_eq!(told.failing[0].problem, "connection to port 30080 refused");

    // A report of checks of before is ignored.
    a.ensure(checked("more")).unwrap();
    let newer = vms.until_checks("b", 2);
    assert!(newer.generation > given.generation);
    vms.report("b", given.generation, &[id], true);
    std::thread::sleep(std::time::Duration::from_millis(200));
    assert_eq!(a.until(&vms.lab, "web", |_| true).healthy, 0, "of the new ones nothing was reported yet");

    // A VM whose session is lost takes no traffic, and is given its checks anew when it is there again.
    let both: Vec<_> = newer.checks.iter().map(|check| check.id.as_str()).collect();
    vms.report("a", newer.generation, &both, true);
    vms.report("b", newer.generation, &both, true);
    a.until(&vms.lab, "web", |one| one.healthy == 2);
    drop(vms.guests.remove("b"));
    let told = a.until(&vms.lab, "web", |one| one.healthy == 1);
    assert_eq!(told.failing[0].problem, "the agent does not answer");
    let b = super::start_guest(&vms.lab, "b", 2);
    vms.guests.insert("b".into(), b);
    vms.until_connected();
    vms.until_checks("b", 2);
    assert_eq!(a.until(&vms.lab, "web", |_| true).healthy, 1, "it has not passed yet");
    let newest = vms.until_checks("b", 2);
    vms.report("b", newest.generation, &both, true);
    a.until(&vms.lab, "web", |one| one.healthy == 2);

    // Without checks they are taken away.
    a.ensure(wanted("web")).unwrap();
    a.release("more").unwrap();
    vms.until_checks("a", 0);
}
