//! The health checks that the agent makes of its own node ports, for a host half of the tests.

use std::net::TcpListener;
use std::time::{Duration, Instant};

use guestlet::transport::{Both, http2};
use guestlet::wire::proto::v1::cloud_server::CloudServer;
use guestlet::wire::proto::v1::health_checks_client::HealthChecksClient;
use guestlet::wire::proto::v1::{
    GetInfoRequest, HealthCheckResult, HealthCheckTarget, IpFamily, ReportHealthChecksRequest,
    SetHealthChecksRequest,
};
use tokio::net::UnixStream;
use tokio_util::sync::CancellationToken;
use tonic::{Code, Status};

use crate::agent::PATIENCE;
use crate::cloud_host::{Fault, Host};
use crate::host::{Callback, host};
use crate::lab::{Lab, is_outside_of, run, wait};

/// The node's addresses; the first ones of each family that node ports answer on.
const V4: &str = "192.0.2.7";
const V6: &str = "2001:db8::7";

/// Runs this test again on a machine with these addresses; false in there.
fn is_outside() -> bool {
    let outside = is_outside_of(&["--mount", "--net"]);
    if !outside {
        run(&format!(
            "ip link set lo up
            ip link add eth0 type veth peer name veth0
            ip address add {V4}/24 dev eth0
            ip address add 192.0.2.8/24 dev eth0
            ip address add {V6}/64 dev eth0 nodad
            ip link set eth0 up
            ip link set veth0 up"
        ));
    }
    outside
}

fn target(id: &str, port: u16, family: IpFamily) -> HealthCheckTarget {
    HealthCheckTarget {
        id: id.to_owned(),
        port: port.into(),
        family: family.into(),
        success_threshold: 1,
        failure_threshold: 2,
        period_seconds: 1,
        timeout_seconds: 1,
    }
}

/// An agent, and the host half that its reports go to.
struct Node {
    lab: Lab,
    model: Host,
}

impl Node {
    fn new() -> Self {
        let lab = Lab::unknown("");
        let model = Host::new(lab.folder.path());
        model.world().reports = Some(Vec::new());
        Self { lab, model }
    }

    async fn introduce(&mut self) {
        let known = host("one", CancellationToken::new());
        self.lab.introduce_by(Both(known, CloudServer::new(self.model.clone()))).await;
    }

    async fn ask(&self, request: SetHealthChecksRequest) -> Result<Vec<HealthCheckResult>, Status> {
        let stream = UnixStream::connect(self.lab.path("control.sock")).await.unwrap();
        let (client, mut connection) = http2::connect(stream).await.unwrap();
        let mut client = HealthChecksClient::with_origin(client, http::Uri::from_static(http2::ORIGIN));
        let asking = client.set_health_checks(request);
        let answer = tokio::select! {
            answer = asking => answer,
            _ = connection.ended() => panic!("the agent has closed the connection"),
        };
        answer.map(|answer| answer.into_inner().results)
    }

    async fn set(
        &self,
        generation: u64,
        checks: &[HealthCheckTarget],
        report_seconds: u32,
    ) -> Result<Vec<HealthCheckResult>, Status> {
        let (host_instance_id, checks) = ("one".to_owned(), checks.to_vec());
        self.ask(SetHealthChecksRequest { host_instance_id, generation, checks, report_seconds }).await
    }

    fn reports(&self) -> Vec<ReportHealthChecksRequest> {
        self.model.world().reports.clone().unwrap()
    }

    /// Waits for a report that is as it should be, later than the first `after`; its place.
    async fn until(
        &self,
        what: &str,
        after: usize,
        holds: impl Fn(&ReportHealthChecksRequest) -> bool,
    ) -> usize {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let reports = self.reports();
            let later = reports.get(after..).unwrap_or_default();
            if let Some(place) = later.iter().position(&holds) {
                return after + place;
            }
            assert!(Instant::now() < deadline, "never: {what}: {reports:#?}");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}

/// What these results say, as `id+` or `id-`.
fn words(results: &[HealthCheckResult]) -> String {
    let word = |one: &HealthCheckResult| format!("{}{}", one.id, if one.healthy { '+' } else { '-' });
    results.iter().map(word).collect::<Vec<_>>().join(" ")
}

fn says(expected: &str) -> impl Fn(&ReportHealthChecksRequest) -> bool {
    move |report| words(&report.results) == expected
}

#[test]
fn ports_that_come_and_go_are_reported_to_whoever_holds_the_guest() {
    if is_outside() {
        return;
    }
    wait(async {
        let mut node = Node::new();
        let web = TcpListener::bind((V4, 0)).unwrap();
        let port = web.local_addr().unwrap().port();
        // It answers on the other family alone, and on an address that is not the node's first one.
        let six = TcpListener::bind((V6, port)).unwrap();
        let second = TcpListener::bind(("192.0.2.8", 0)).unwrap();
        let checks = [
            target("web", port, IpFamily::Ipv4),
            target("six", port, IpFamily::Ipv6),
            target("second", second.local_addr().unwrap().port(), IpFamily::Ipv4),
        ];
        let refused = node.set(1, &checks, 0).await.unwrap_err();
        assert_eq!(refused.code(), Code::FailedPrecondition, "nobody holds the guest: {refused}");

        node.introduce().await;
        let info = node.lab.guest().get_info(GetInfoRequest {}).await.unwrap().into_inner();
        assert!(info.capabilities.iter().any(|one| one == "health-checks"), "{:?}", info.capabilities);
        let answer = node.set(7, &checks, 0).await.unwrap();
        assert_eq!(words(&answer), "web- six- second-");
        let at = node.until("those that listen pass", 0, says("web+ six+ second-")).await;
        let report = &node.reports()[at];
        assert_eq!(report.generation, 7);
        let port_of_second = second.local_addr().unwrap().port();
        assert_eq!(report.results[2].problem, format!("connection to {V4}:{port_of_second} refused"));
        assert_eq!((report.results[0].problem.as_str(), report.results[1].problem.as_str()), ("", ""));

        let (gone, begun) = (node.reports().len(), Instant::now());
        drop(web);
        // The first of two failures is told, and does not count yet.
        let at = node.until("a port has gone", gone, says("web- six+ second-")).await;
        assert!(begun.elapsed() < Duration::from_secs(3), "{:?}", begun.elapsed());
        let before = &node.reports()[at - 1];
        assert_eq!(words(&before.results), "web+ six+ second-");
        assert!(before.results[0].problem.contains("refused"), "{before:?}");
        let _again = TcpListener::bind((V4, port)).unwrap();
        node.until("it is back", at, says("web+ six+ second-")).await;
        drop(six);

        // Nothing more is told, nor tried, when there is nothing to be checked any more.
        node.until("the other family's has gone", at, says("web+ six- second-")).await;
        assert_eq!(node.set(8, &[], 0).await.unwrap(), []);
        tokio::time::sleep(Duration::from_millis(300)).await;
        let (all, calls) = (node.reports().len(), node.model.world().calls["ReportHealthChecks"]);
        tokio::time::sleep(Duration::from_millis(1500)).await;
        assert_eq!((node.reports().len(), node.model.world().calls["ReportHealthChecks"]), (all, calls));
    });
}

#[test]
fn what_is_wrong_or_comes_from_another_changes_nothing() {
    if is_outside() {
        return;
    }
    wait(async {
        let mut node = Node::new();
        node.introduce().await;
        let web = TcpListener::bind((V4, 0)).unwrap();
        let good = [target("web", web.local_addr().unwrap().port(), IpFamily::Ipv4)];
        node.set(1, &good, 0).await.unwrap();
        node.until("it passes", 0, says("web+")).await;

        let other = SetHealthChecksRequest {
            host_instance_id: "two".to_owned(),
            generation: 9,
            checks: Vec::new(),
            report_seconds: 0,
        };
        let refused = node.ask(other).await.unwrap_err();
        assert_eq!(refused.code(), Code::FailedPrecondition);
        assert!(refused.message().contains("only the host half that holds this guest"), "{refused}");
        let bad = HealthCheckTarget { period_seconds: 0, ..target("bad", 80, IpFamily::Ipv4) };
        let refused = node.set(2, &[good[0].clone(), bad], 0).await.unwrap_err();
        assert_eq!(refused.code(), Code::InvalidArgument);
        assert!(refused.message().contains("checks[1].period_seconds is 0"), "{refused}");

        let seen = node.reports().len();
        drop(web);
        let at = node.until("the old one is still made", seen, says("web-")).await;
        assert_eq!(node.reports()[at].generation, 1);
        // The agent writes down what changes what it does, and who was refused.
        let log = node.lab.log();
        assert!(log.contains("SetHealthChecks (1 checks, generation 1)"), "{log}");
    });
}

#[test]
fn checks_go_on_without_a_callback_and_end_with_the_hold() {
    if is_outside() {
        return;
    }
    wait(async {
        let mut node = Node::new();
        let (control, events) = node.lab.hold().await;
        let web = TcpListener::bind((V4, 0)).unwrap();
        let port = web.local_addr().unwrap().port();
        let checks = [target("web", port, IpFamily::Ipv4)];
        node.set(1, &checks, 0).await.unwrap();
        // Nobody can be told; the state is what the next answer has, and the check goes on as it is.
        let deadline = Instant::now() + PATIENCE;
        while words(&node.set(2, &checks, 10).await.unwrap()) != "web+" {
            assert!(Instant::now() < deadline, "it never passes");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        assert!(node.reports().is_empty());

        // A callback that fails first: the results of then are told as soon as it answers.
        node.model.world().fault = Fault::Away;
        let service = || Both(host("one", CancellationToken::new()), CloudServer::new(node.model.clone()));
        let callback = Callback::serve(node.lab.folder.path(), "one", service()).await;
        let tries = || node.model.world().calls.get("ReportHealthChecks").copied().unwrap_or_default();
        while tries() < 2 {
            assert!(Instant::now() < deadline, "it is not tried again");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        node.model.world().fault = Fault::None;
        let at = node.until("it is told", 0, says("web+")).await;
        assert_eq!(node.reports()[at].generation, 2);
        // Although nothing changes, it is told again, every ten seconds.
        let (told, begun) = (node.reports().len(), Instant::now());
        while node.reports().len() == told {
            assert!(begun.elapsed() < Duration::from_secs(12), "it is not told again");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        assert!(begun.elapsed() > Duration::from_secs(8), "{:?}", begun.elapsed());

        // The callback breaks; what happened meanwhile is told on the next one.
        drop(callback);
        let told = node.reports().len();
        drop(web);
        tokio::time::sleep(Duration::from_millis(2500)).await;
        assert_eq!(node.reports().len(), told);
        let callback = Callback::serve(node.lab.folder.path(), "one", service()).await;
        node.until("what happened without a callback", told, says("web-")).await;

        // The same host half comes again: nothing is left of what it wanted before.
        drop((control, events, callback));
        let web = TcpListener::bind((V4, port)).unwrap();
        web.set_nonblocking(true).unwrap();
        tokio::time::sleep(Duration::from_millis(300)).await;
        while web.accept().is_ok() {}
        node.introduce().await;
        let told = node.reports().len();
        tokio::time::sleep(Duration::from_millis(1500)).await;
        assert!(web.accept().is_err(), "the port is still tried");
        assert_eq!(node.reports().len(), told);
        assert_eq!(words(&node.set(1, &checks, 0).await.unwrap()), "web-");
        node.until("it is checked again", told, says("web+")).await;
    });
}
