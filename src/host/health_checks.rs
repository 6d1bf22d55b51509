//! Gives an agent the health checks that it is to make: at each connect, and at each change while a session lasts.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use tonic::Code;

use super::contact::Contact;
use super::for_guests::{Checks, Cloud};
use super::text;
use crate::transport::http2;
use crate::wire::proto::v1;
use crate::wire::proto::v1::health_checks_client::HealthChecksClient;

/// The capability of an agent that makes them.
pub const CAPABILITY: &str = "health-checks";
/// How long an agent may take to answer.
const DEADLINE: Duration = Duration::from_secs(5);
/// Between two tries, at first and at most.
const AGAIN: Duration = Duration::from_millis(250);
const AGAIN_AT_MOST: Duration = Duration::from_secs(30);

/// Whether an agent with these capabilities makes health checks.
pub fn is_able(capabilities: &[String]) -> bool {
    capabilities.iter().any(|capability| capability == CAPABILITY)
}

/// Gives the agent what it is to check for as long as the session lasts. Never completes.
pub async fn keep(client: &http2::Client, contact: &Contact, able: bool) -> Infallible {
    if let Some(cloud) = &contact.cloud
        && able
    {
        // Boxed, because most sessions have none of it.
        Box::pin(give(client.clone(), contact, &**cloud)).await;
    }
    std::future::pending().await
}

/// Completes only where there is nothing to give, now or later.
async fn give(client: http2::Client, contact: &Contact, cloud: &dyn Cloud) {
    let Some(mut wanted) = cloud.checks(&contact.vm).await else { return };
    let mut client = HealthChecksClient::with_origin(client, http::Uri::from_static(http2::ORIGIN))
        .max_decoding_message_size(contact.vm.limits.message_bytes);
    let mut again = AGAIN;
    // Whatever the agent had from before ends with the hold of its guest: nothing has to be told as long as there is nothing.
    let mut has_any = false;
    loop {
        let checks = Arc::clone(&wanted.borrow_and_update());
        let mut wait = None;
        if has_any || !checks.targets.is_empty() {
            has_any = true;
            match tell(&mut client, contact, &checks).await {
                Ok(results) => {
                    again = AGAIN;
                    cloud.checked(&contact.vm, checks.generation, results).await;
                }
                Err(problem) => {
                    tracing::debug!(
                        vm = contact.vm.name,
                        problem,
                        "the guest does not accept its health checks"
                    );
                    wait = Some(again);
                    again = (again * 2).min(AGAIN_AT_MOST);
                }
            }
        }
        tokio::select! {
            changed = wanted.changed() => if changed.is_err() { return },
            () = tokio::time::sleep(wait.unwrap_or_default()), if wait.is_some() => {}
        }
    }
}

async fn tell(
    client: &mut HealthChecksClient<http2::Client>,
    contact: &Contact,
    checks: &Checks,
) -> Result<Vec<v1::HealthCheckResult>, String> {
    let request = v1::SetHealthChecksRequest {
        host_instance_id: contact.half.host.instance_id.clone(),
        generation: checks.generation,
        checks: checks.targets.clone(),
        report_seconds: checks.report_seconds,
    };
    match tokio::time::timeout(DEADLINE, client.set_health_checks(request)).await {
        Ok(Ok(answer)) => Ok(answer.into_inner().results),
        Ok(Err(status)) if status.code() == Code::Unimplemented => {
            Err("its agent does not support them".to_owned())
        }
        Ok(Err(status)) => Err(text::clean(status.message())),
        Err(_) => Err("it does not answer".to_owned()),
    }
}
