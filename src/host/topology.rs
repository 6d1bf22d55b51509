//! Tells guests where they run: at each connect, and at each change while a session lasts.
//!
//! The backend says it of each VM; the fleet keeps it in a watch beside the session, so that a change ends none.

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

/// The capability of an agent that can be told.
const CAPABILITY: &str = "topology";
/// How long an agent may take to take it.
const DEADLINE: Duration = Duration::from_secs(5);
/// Between two tries, at first and at most.
const AGAIN: Duration = Duration::from_millis(250);
const AGAIN_AT_MOST: Duration = Duration::from_secs(30);

/// Whether an agent that can do these can be told.
pub fn is_able(capabilities: &[String]) -> bool {
    capabilities.iter().any(|capability| capability == CAPABILITY)
}

/// Tells the guest for as long as the session lasts, if it is `able` to be told.
pub async fn keep(caller: &Caller, contact: &Contact, able: bool, teller: &Teller) -> Infallible {
    let mut told = contact.topology.clone();
    let mut again = AGAIN;
    loop {
        let topology = told.borrow_and_update().clone();
        let mut wait = None;
        if let Some(topology) = topology {
            let outcome = if able {
                // Boxed, because the session lives for long, and the call does not.
                let (outcome, passes) = Box::pin(tell(caller.clone(), contact, topology)).await;
                if passes {
                    wait = Some(again);
                    again = (again * 2).min(AGAIN_AT_MOST);
                }
                outcome
            } else {
                Outcome::Problem("the agent in this guest cannot be told where it runs".to_owned())
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

/// Tells it once; whether it makes sense to try again.
async fn tell(mut caller: Caller, contact: &Contact, topology: Arc<Topology>) -> (Outcome, bool) {
    let request = v1::SetTopologyRequest {
        host_instance_id: contact.half.host.instance_id.clone(),
        topology: Some(Topology::clone(&topology)),
    };
    match tokio::time::timeout(DEADLINE, caller.set_topology(request)).await {
        Ok(Ok(_)) => (Outcome::Acknowledged(topology), false),
        Ok(Err(status)) => {
            // The settings of a guest change with a restart of its agent.
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
