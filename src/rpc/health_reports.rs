//! Tells the host half what its health checks say: `Cloud.ReportHealthChecks`, on the callback.
//!
//! ```text
//!            results change, or it is time
//!  waits ─────────────────────────────────▶ calls ──answered──▶ waits
//!                                           ▲   │ not answered, or refused
//!                                           └───┘ after a while, with the results of then
//! ```
//!
//! There is at most one call under way. Nothing waits for it but the next report.

use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{sleep, timeout};
use tonic::Request;

use crate::guest::probes::Standing;
use crate::rpc::health_checks::results;
use crate::rpc::holder::{Holder, Tenure};
use crate::transport::http2::ORIGIN;
use crate::wire::proto::v1::ReportHealthChecksRequest;
use crate::wire::proto::v1::cloud_client::CloudClient;

/// Timeout for the answer of the host half.
const DEADLINE: Duration = Duration::from_secs(5);
/// Time during which successive changes are collected into one report.
const SETTLED: Duration = Duration::from_millis(50);
/// Between two tries, at first and at most.
const AGAIN: Duration = Duration::from_millis(250);
const AGAIN_AT_MOST: Duration = Duration::from_secs(5);

/// Reports results until the sender of `standing` is dropped. They are sent to the host half that owns the
/// checks, for as long as it holds the guest according to `holder`. While there are no checks, the task does
/// not wake up.
pub async fn report(holder: Holder, mut standing: watch::Receiver<Standing>) {
    let mut again = AGAIN;
    loop {
        let (owner, has_any) = {
            let now = standing.borrow_and_update();
            (now.owner, !now.outcomes.is_empty())
        };
        let tenure = has_any.then(|| holder.tenure(owner)).flatten();
        let mut report_every = None;
        if let Some(tenure) = tenure {
            let told = tokio::select! {
                told = tell(tenure.clone(), &mut standing) => told,
                () = tenure.clone().ended() => Ok(None),
            };
            match told {
                Ok(every) => (report_every, again) = (every, AGAIN),
                Err(problem) => {
                    tracing::debug!("results of health checks cannot be reported, retrying: {problem}");
                    tokio::select! {
                        () = sleep(again) => again = (again * 2).min(AGAIN_AT_MOST),
                        () = tenure.ended() => again = AGAIN,
                    }
                    continue;
                }
            }
        }
        let changed = match report_every {
            Some(every) => match timeout(every, standing.changed()).await {
                Ok(changed) => changed,
                Err(_) => continue,
            },
            None => standing.changed().await,
        };
        if changed.is_err() {
            return;
        }
        sleep(SETTLED).await;
    }
}

/// Makes one call, as soon as there is a callback for it, with the results of then. When it is to be repeated, though nothing
/// changes.
async fn tell(
    mut tenure: Tenure,
    standing: &mut watch::Receiver<Standing>,
) -> Result<Option<Duration>, String> {
    // Else the hold has ended, and the checks with it.
    let Some(caller) = tenure.caller().await else { return Ok(None) };
    // Results that belong to another hold are left for the next call.
    if standing.borrow().owner != tenure.number() {
        return Ok(None);
    }
    let Standing { generation, report_every, outcomes, .. } = standing.borrow_and_update().clone();
    let mut client = CloudClient::with_origin(caller, http::Uri::from_static(ORIGIN));
    let request = ReportHealthChecksRequest { generation, results: results(outcomes) };
    match timeout(DEADLINE, client.report_health_checks(Request::new(request))).await {
        Ok(Ok(_)) => Ok(report_every),
        Ok(Err(status)) => Err(status.message().to_owned()),
        Err(_) => Err("it does not answer".to_owned()),
    }
}
