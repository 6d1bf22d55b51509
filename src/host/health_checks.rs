//! Sends an agent the health checks that it has to make: when a session begins, and at each change while it lasts.

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

/// Capability that an agent reports if it makes health checks.
pub const CAPABILITY: &str = "health-checks";
/// Timeout of the call to the agent.
const DEADLINE: Duration = Duration::from_secs(5);
/// First and longest delay between two attempts.
const AGAIN: Duration = Duration::from_millis(250);
const AGAIN_AT_MOST: Duration = Duration::from_secs(30);

/// Returns whether an agent with these capabilities makes health checks.
pub fn is_able(capabilities: &[String]) -> bool {
    capabilities.iter().any(|capability| capability == CAPABILITY)
}

/// Keeps the health checks of an agent up to date while the session lasts. Never completes.
pub async fn keep(client: &http2::Client, contact: &Contact, able: bool) -> Infallible {
    if let Some(cloud) = &contact.cloud
        && able
    {
        // Boxed to keep the sessions small, most of which have no health checks.
        Box::pin(give(client.clone(), contact, &**cloud)).await;
    }
    std::future::pending().await
}

/// Sends the checks at each change. Completes only if there are none, now or later.
async fn give(client: http2::Client, contact: &Contact, cloud: &dyn Cloud) {
    let Some(mut wanted) = cloud.checks(&contact.vm).await else { return };
    let mut client = HealthChecksClient::with_origin(client, http::Uri::from_static(http2::ORIGIN))
        .max_decoding_message_size(contact.vm.limits.message_bytes);
    let mut again = AGAIN;
    // Checks from an earlier session end with the hold of the guest, so an empty list need not be sent first.
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
