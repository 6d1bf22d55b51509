//! `guestlet.v1.HealthChecks`: which of its own node ports this guest checks for the host half that holds it.

use std::collections::BTreeSet;
use std::time::Duration;

use prost::Message as _;
use tonic::{Request, Response, Status};

use crate::guest::probes::{Check, Family, Outcome, Probes, Refusal, Wanted};
use crate::rpc::holder::{Holder, Tenure};
use crate::rpc::{guard, introduced};
use crate::wire::proto::v1;
use crate::wire::proto::v1::health_checks_server::{self, HealthChecksServer};

/// Bytes of one request: 256 checks with long identifiers have 40 KB.
const MAX_REQUEST: usize = 64 * 1024;
/// Checks of one guest.
const MOST_CHECKS: usize = 256;
/// Characters of an identifier.
const LONGEST_ID: usize = 128;
/// Characters of a problem, and what it is cut down to where all results together are too long.
const LONGEST_PROBLEM: usize = 256;
const SHORT_PROBLEM: usize = 80;
/// Bytes of all results, in an answer or a report, which is at most 64 KiB long.
const MOST_BYTES: usize = 64 * 1024 - 64;

/// The service, for one connection after the other.
#[derive(Debug, Clone)]
pub struct Service {
    probes: Probes,
    holder: Holder,
}

impl Service {
    /// Creates a service that runs checks in `probes`, on behalf of the host half that holds the guest according
    /// to `holder`.
    pub fn new(probes: Probes, holder: Holder) -> Self {
        Self { probes, holder }
    }

    /// The service as HTTP/2 serves it.
    pub fn into_server(self) -> HealthChecksServer<Self> {
        HealthChecksServer::new(self).max_decoding_message_size(MAX_REQUEST)
    }
}

#[tonic::async_trait]
impl health_checks_server::HealthChecks for Service {
    async fn set_health_checks(
        &self,
        request: Request<v1::SetHealthChecksRequest>,
    ) -> Result<Response<v1::SetHealthChecksResponse>, Status> {
        guard::concerns(&request, || {
            format!("{} checks, generation {}", request.get_ref().checks.len(), request.get_ref().generation)
        });
        let peer = introduced::peer(&request);
        let request = request.into_inner();
        let tenure = self.holder.tenure_of(&request.host_instance_id, &peer).ok_or_else(stranger)?;
        let wanted = wanted(request, &tenure)?;
        match self.probes.set(wanted, tenure.ended()).await {
            Ok(outcomes) => Ok(Response::new(v1::SetHealthChecksResponse { results: results(outcomes) })),
            Err(Refusal::Ended) => Err(stranger()),
            Err(refusal @ Refusal::Stopping) => Err(Status::unavailable(refusal.to_string())),
        }
    }
}

fn stranger() -> Status {
    Status::failed_precondition("only the host half that holds this guest may request health checks")
}

fn bounded(value: u32, least: u32, most: u32, field: impl FnOnce() -> String) -> Result<u32, Status> {
    if (least..=most).contains(&value) {
        return Ok(value);
    }
    let field = field();
    Err(Status::invalid_argument(format!("{field} is {value}; it must be from {least} to {most}")))
}

fn wanted(request: v1::SetHealthChecksRequest, tenure: &Tenure) -> Result<Wanted, Status> {
    let v1::SetHealthChecksRequest { generation, checks, report_seconds, .. } = request;
    if generation == 0 {
        return Err(Status::invalid_argument("generation is 0; it must be 1 or more"));
    }
    if report_seconds != 0 {
        bounded(report_seconds, 10, 3600, || "report_seconds, if it is not 0,".to_owned())?;
    }
    if checks.len() > MOST_CHECKS {
        let count = checks.len();
        return Err(Status::invalid_argument(format!(
            "there are {count} checks; at most {MOST_CHECKS} are allowed"
        )));
    }
    let checks = checks.into_iter().enumerate().map(|(place, target)| check(target, place));
    let checks = checks.collect::<Result<Vec<_>, _>>()?;
    let mut ids = BTreeSet::new();
    if let Some(place) = checks.iter().position(|check| !ids.insert(&check.id)) {
        return Err(Status::invalid_argument(format!("checks[{place}].id is used by another check")));
    }
    let report_every = (report_seconds != 0).then(|| Duration::from_secs(report_seconds.into()));
    Ok(Wanted { owner: tenure.number(), generation, report_every, checks })
}

fn check(target: v1::HealthCheckTarget, place: usize) -> Result<Check, Status> {
    let field = |name: &'static str| move || format!("checks[{place}].{name}");
    let family = match target.family() {
        v1::IpFamily::Ipv4 => Family::V4,
        v1::IpFamily::Ipv6 => Family::V6,
        v1::IpFamily::Unspecified => {
            let words = format!("checks[{place}].family is neither IPv4 nor IPv6");
            return Err(Status::invalid_argument(words));
        }
    };
    let v1::HealthCheckTarget { id, port, success_threshold, failure_threshold, .. } = target;
    if id.is_empty() || id.chars().count() > LONGEST_ID {
        let words = format!("checks[{place}].id is empty or has more than {LONGEST_ID} characters");
        return Err(Status::invalid_argument(words));
    }
    let port = bounded(port, 1, u16::MAX.into(), field("port"))?;
    let period = bounded(target.period_seconds, 1, 3600, field("period_seconds"))?;
    let timeout = bounded(target.timeout_seconds, 1, period, field("timeout_seconds"))?;
    Ok(Check {
        id,
        port: u16::try_from(port).unwrap_or(u16::MAX),
        family,
        success_threshold: bounded(success_threshold, 1, 100, field("success_threshold"))?,
        failure_threshold: bounded(failure_threshold, 1, 100, field("failure_threshold"))?,
        period: Duration::from_secs(period.into()),
        timeout: Duration::from_secs(timeout.into()),
    })
}

/// The results as messages have them, with problems so long that all of them fit into one.
pub(super) fn results(outcomes: Vec<Outcome>) -> Vec<v1::HealthCheckResult> {
    let result = |Outcome { id, healthy, problem }| v1::HealthCheckResult { id, healthy, problem };
    let mut results: Vec<_> = outcomes.into_iter().map(result).collect();
    for most in [LONGEST_PROBLEM, SHORT_PROBLEM, 0] {
        for result in &mut results {
            if let Some((end, _)) = result.problem.char_indices().nth(most) {
                result.problem.truncate(end);
            }
        }
        let bytes: usize = results.iter().map(|result| result.encoded_len() + 4).sum();
        if bytes <= MOST_BYTES {
            break;
        }
    }
    results
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::health_checks_server::HealthChecks as _;
    use super::*;
    use crate::guest::probes::probes;
    use crate::trust::Peer;

    fn target(id: &str) -> v1::HealthCheckTarget {
        v1::HealthCheckTarget {
            id: id.to_owned(),
            port: 30_080,
            family: v1::IpFamily::Ipv4.into(),
            success_threshold: 1,
            failure_threshold: 3,
            period_seconds: 3600,
            timeout_seconds: 3,
        }
    }

    fn request(checks: Vec<v1::HealthCheckTarget>) -> v1::SetHealthChecksRequest {
        let host_instance_id = "one".to_owned();
        v1::SetHealthChecksRequest { host_instance_id, generation: 1, checks, report_seconds: 20 }
    }

    type Change = fn(&mut v1::SetHealthChecksRequest);

    #[tokio::test]
    #[allow(clippy::disallowed_methods)]
    async fn what_is_out_of_bounds_is_named_and_changes_nothing() {
        let (probes, owner) = probes(Arc::default());
        tokio::spawn(owner.run());
        let holder = Holder::default();
        let service = Service::new(probes.clone(), holder.clone());
        let ask = |request| service.set_health_checks(Request::new(request));
        assert_eq!(ask(request(vec![])).await.unwrap_err().code(), tonic::Code::FailedPrecondition);
        let half = v1::HostHalf { instance_id: "one".to_owned(), ..v1::HostHalf::default() };
        let hold = holder.take(half, Arc::new(Peer::Plain), true).await.unwrap();
        let answer = ask(request(vec![target("a"), target("b")])).await.unwrap().into_inner();
        assert_eq!(answer.results.iter().map(|one| one.id.as_str()).collect::<Vec<_>>(), ["a", "b"]);
        let ids = || {
            let standing = probes.standing();
            let standing = standing.borrow();
            standing.outcomes.iter().map(|one| one.id.clone()).collect::<Vec<_>>()
        };
        let changes: [(Change, &str); 18] = [
            (|it| it.generation = 0, "generation is 0"),
            (|it| it.report_seconds = 9, "report_seconds"),
            (|it| it.report_seconds = 3601, "report_seconds"),
            (|it| it.checks = (0..257).map(|id| target(&id.to_string())).collect(), "at most 256"),
            (|it| it.checks[2].id = "a".to_owned(), "checks[2].id is used by another check"),
            (|it| it.checks[1].id = String::new(), "checks[1].id"),
            (|it| it.checks[0].id = "ä".repeat(129), "checks[0].id"),
            (|it| it.checks[1].port = 0, "checks[1].port"),
            (|it| it.checks[1].port = 65_536, "checks[1].port"),
            (|it| it.checks[1].family = 0, "checks[1].family"),
            (|it| it.checks[1].family = 3, "checks[1].family"),
            (|it| it.checks[1].success_threshold = 0, "checks[1].success_threshold"),
            (|it| it.checks[1].success_threshold = 101, "checks[1].success_threshold"),
            (|it| it.checks[1].failure_threshold = 101, "checks[1].failure_threshold"),
            (|it| it.checks[1].period_seconds = 0, "checks[1].period_seconds"),
            (|it| it.checks[1].period_seconds = 3601, "checks[1].period_seconds"),
            (|it| it.checks[1].timeout_seconds = 0, "checks[1].timeout_seconds"),
            (|it| (it.checks[1].period_seconds, it.checks[1].timeout_seconds) = (2, 3), "from 1 to 2"),
        ];
        for (change, words) in changes {
            let mut wrong = request(vec![target("a"), target("b"), target("c")]);
            change(&mut wrong);
            let status = ask(wrong).await.unwrap_err();
            assert_eq!(status.code(), tonic::Code::InvalidArgument, "{words}");
            assert!(status.message().contains(words), "{words}: {status}");
            assert_eq!(ids(), ["a", "b"], "{words}");
        }
        // The largest request within the limits is accepted.
        let mut most = request((0..256).map(|id| target(&format!("{id:ä>128}"))).collect());
        most.report_seconds = 0;
        assert_eq!(ask(most).await.unwrap().into_inner().results.len(), 256);
        let other = v1::SetHealthChecksRequest { host_instance_id: "two".to_owned(), ..request(vec![]) };
        assert_eq!(ask(other).await.unwrap_err().code(), tonic::Code::FailedPrecondition);
        assert_eq!(ids().len(), 256);
        drop(hold);
        let mut standing = probes.standing();
        standing.wait_for(|standing| standing.outcomes.is_empty()).await.unwrap();
    }

    #[test]
    fn results_fit_into_a_message_whatever_the_problems_are() {
        let outcome = |id: usize, length: usize, problem: usize| {
            let id = format!("{id:x>length$}");
            Outcome { id, healthy: false, problem: "ü".repeat(problem) }
        };
        for (count, length, problem, expected) in
            [(1, 3, 300, 256), (256, 40, 50, 50), (256, 40, 200, 80), (256, 128, 80, 0)]
        {
            let results = results((0..count).map(|id| outcome(id, length, problem)).collect());
            assert!(results.iter().all(|result| result.problem.chars().count() == expected), "{problem}");
            let report = v1::ReportHealthChecksRequest { generation: u64::MAX, results };
            assert!(report.encoded_len() <= 64 * 1024, "{}", report.encoded_len());
        }
    }
}
