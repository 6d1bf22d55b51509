//! Sends guests the topology of their VMs: when a session begins, and at each change while it lasts.
//!
//! The backend reports the topology of each VM. The fleet keeps it in a watch beside the session, so that a change
//! does not end the session.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use tonic::Code;

use super::contact::Contact;
use super::conversation::Caller;
use super::place::{Outcome, Topology};
use super::report::{Report, Teller};
use super::text;
use crate::wire::proto::v1;

/// Capability that an agent reports if it accepts the topology of its VM.
const CAPABILITY: &str = "topology";
/// Timeout of an agent for accepting the topology.
const DEADLINE: Duration = Duration::from_secs(5);
/// First and longest delay between two attempts.
const AGAIN: Duration = Duration::from_millis(250);
const AGAIN_AT_MOST: Duration = Duration::from_secs(30);

/// Returns whether an agent with these capabilities accepts the topology of its VM.
pub fn is_able(capabilities: &[String]) -> bool {
    capabilities.iter().any(|capability| capability == CAPABILITY)
}

/// Sends the topology to the guest, and again at each change while the session lasts, if the agent is `able` to
/// accept it.
pub async fn keep(caller: &Caller, contact: &Contact, able: bool, teller: &Teller) -> Infallible {
    let mut told = contact.topology.clone();
    let mut again = AGAIN;
    loop {
        let topology = told.borrow_and_update().clone();
        let mut wait = None;
        if let Some(topology) = topology {
            let outcome = if able {
                // Boxed, because the session is long-lived and the call is not.
                let (outcome, passes) = Box::pin(tell(caller.clone(), contact, topology)).await;
                if passes {
                    wait = Some(again);
                    again = (again * 2).min(AGAIN_AT_MOST);
                }
                outcome
            } else {
                Outcome::Problem("cannot send the topology to the agent in this guest".to_owned())
            };
            teller.send(Report::Topology(outcome)).await;
        }
        tokio::select! {
            changed = told.changed() => match changed {
                Ok(()) => again = AGAIN,
                // The fleet has dropped this VM and ends this task.
                Err(_) => std::future::pending().await,
            },
            () = tokio::time::sleep(wait.unwrap_or_default()), if wait.is_some() => {}
        }
    }
}

/// Sends the topology once. Returns the result, and whether another attempt makes sense.
async fn tell(mut caller: Caller, contact: &Contact, topology: Arc<Topology>) -> (Outcome, bool) {
    let request = v1::SetTopologyRequest {
        host_instance_id: contact.half.host.instance_id.clone(),
        topology: Some(Topology::clone(&topology)),
    };
    match tokio::time::timeout(DEADLINE, caller.set_topology(request)).await {
        Ok(Ok(_)) => (Outcome::Acknowledged(topology), false),
        Ok(Err(status)) => {
            // These errors last: the settings of a guest change only with a restart of its agent, which ends the session.
            let lasts = [Code::InvalidArgument, Code::Unimplemented, Code::PermissionDenied];
            let passes = !lasts.contains(&status.code());
            (
                Outcome::Problem(format!("the guest does not accept it: {}", text::clean(status.message()))),
                passes,
            )
        }
        Err(_) => (Outcome::Problem("the guest does not answer".to_owned()), true),
    }
}
