//! Receipts of freezes of this node's guests. Each receipt is read from its guest, its window is converted to the
//! clock of the node, and the controller is asked to annotate the snapshots that were taken in the window with
//! their consistency.
//!
//! Nothing is stored: if the VM leaves the node within these minutes, or the node half ends, the receipt remains
//! in its guest only.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::sync::Semaphore;
use tokio::sync::broadcast::error::RecvError;
use tokio::time::Instant;
use tonic::{Code, Status};

use super::window::{Difference, Heard, window};
use super::{MEETING, Relay};
use crate::host::backends::kubevirt::node::Instance;
use crate::host::fleet::{Handle, Reach};
use crate::host::handed_on::HandedOn as _;
use crate::receipt::envelope::{Check, open};
use crate::receipt::is_id;
use crate::supervise::{Children, Scope};
use crate::wire::proto::v1::virtual_machine_event::Kind;
use crate::wire::proto::v1::{
    AttachReceiptRequest, AttachReceiptResponse, GetReceiptRequest, GetReceiptResponse,
    RunningVirtualMachine, VirtualMachineEvent, event,
};

/// Times of the requests to the controller, in seconds after the thaw. Snapshots may be created, or known to be
/// taken, later.
const AT: &[u64] = &[0, 3, 10, 30, 120, 300];
/// Times of the requests after a failed freeze, which may be repeated every few seconds.
const AT_OF_FAILED: &[u64] = &[10];
/// Limit on the receipts in progress. Further ones are not attached.
const MOST: usize = 512;
/// Limit on the freezes in progress whose beginning is remembered.
const MOST_FROZEN: usize = 4096;
/// Number of requests to a guest for one receipt, and the delay after a failed one.
const ASKS: usize = 6;
const AGAIN: Duration = Duration::from_secs(2);
/// Timeout of each answer.
const PATIENCE: Duration = Duration::from_secs(60);
/// Uncertainty of the clock difference at which no further comparison is made.
const CLOSE: Duration = Duration::from_millis(20);

/// Freeze that has ended.
struct Over {
    vm: String,
    receipt: String,
    has_failed: bool,
    heard: Heard,
}

/// Attaches receipts until the future is dropped or the fleet has stopped.
pub async fn attach(relay: Relay, fleet: Handle) {
    let Ok(Some(watched)) = fleet.watch(None, None).await else { return };
    let mut coming = watched.coming;
    let scope = Scope::new();
    let places = Arc::new(Semaphore::new(MOST));
    // Time at which each freeze was reported, by VM.
    let mut frozen = BTreeMap::new();
    loop {
        match coming.recv().await {
            Ok(event) => {
                if let Some(over) = hear(&mut frozen, &event) {
                    begin(&relay, &fleet, &scope.children(), &places, over);
                }
            }
            // Events were lost, so a remembered freeze may have been replaced by another one.
            Err(RecvError::Lagged(_)) => frozen.clear(),
            Err(RecvError::Closed) => return,
        }
    }
}

/// Returns the freeze that this event ends, if it has a receipt.
fn hear(frozen: &mut BTreeMap<String, SystemTime>, event: &VirtualMachineEvent) -> Option<Over> {
    let Some(Kind::GuestEvent(of_guest)) = &event.kind else { return None };
    let at = SystemTime::try_from(event.time?).ok()?;
    match of_guest.kind.as_ref()? {
        event::Kind::Frozen(_) => {
            if frozen.len() < MOST_FROZEN {
                frozen.insert(event.name.clone(), at);
            }
            None
        }
        event::Kind::Thawed(thawed) => {
            let heard = Heard { frozen: frozen.remove(&event.name), thawed: at };
            is_id(&thawed.receipt).then(|| Over {
                vm: event.name.clone(),
                receipt: thawed.receipt.clone(),
                has_failed: thawed.end == "failed",
                heard,
            })
        }
        // The agent or its guest was restarted, so the freeze is no longer the same one.
        event::Kind::AgentStarted(_) => {
            frozen.remove(&event.name);
            None
        }
        _ => None,
    }
}

fn begin(relay: &Relay, fleet: &Handle, tasks: &Children, places: &Arc<Semaphore>, over: Over) {
    let Some(instance) = relay.roster.get(&over.vm) else { return };
    let Ok(place) = Arc::clone(places).try_acquire_owned() else {
        let Over { vm, receipt, .. } = over;
        tracing::warn!(
            vm,
            receipt,
            "its snapshots will not show their consistency: too many freezes at a time"
        );
        return;
    };
    let (relay, fleet) = (relay.clone(), fleet.clone());
    tasks.spawn(async move {
        one(&relay, &fleet, instance, &over).await;
        drop(place);
    });
}

/// Attaches one receipt to the snapshots of its VM.
async fn one(relay: &Relay, fleet: &Handle, instance: Instance, over: &Over) {
    let begun = Instant::now();
    let Over { vm, receipt, has_failed, heard } = over;
    let mut request = match read(fleet, over).await {
        Ok(request) => request,
        Err(why) => {
            tracing::warn!(vm, receipt, "its snapshots will not show their consistency: {why}");
            return;
        }
    };
    let Instance { namespace, name, uid, .. } = instance;
    request.vm = Some(RunningVirtualMachine { namespace, name, uid });
    request.ended = Some(heard.thawed.into());
    let mut problem = None;
    for after in if *has_failed { AT_OF_FAILED } else { AT } {
        tokio::time::sleep_until(begun + Duration::from_secs(*after)).await;
        match ask(relay, request.clone()).await {
            Ok(AttachReceiptResponse { attached, pending: false }) if attached > 0 => return,
            Ok(AttachReceiptResponse { pending, .. }) => {
                problem = pending.then(|| Status::unavailable("some snapshots are still being made"));
            }
            // The same request would get the same answer again.
            Err(status) if matches!(status.code(), Code::Unimplemented | Code::InvalidArgument) => {
                tracing::info!(vm, receipt, "the controller cannot attach the receipt: {}", status.message());
                return;
            }
            Err(status) => problem = Some(status),
        }
    }
    if let Some(status) = problem {
        let words = status.message();
        tracing::warn!(vm, receipt, "not all of its snapshots show their consistency: {words}");
    }
}

async fn ask(relay: &Relay, request: AttachReceiptRequest) -> Result<AttachReceiptResponse, Status> {
    let asked = async {
        let mut controller = relay.meet(MEETING).await?;
        controller.attach_receipt(request).await.map(tonic::Response::into_inner)
    };
    let late = |_| Status::unavailable("the controller does not answer");
    tokio::time::timeout(PATIENCE, asked).await.map_err(late)?
}

/// Reads the receipt from its guest, and builds the request for the controller with the window in which the guest
/// was frozen.
async fn read(fleet: &Handle, over: &Over) -> Result<AttachReceiptRequest, String> {
    let mut envelope = None;
    let mut difference: Option<Difference> = None;
    let mut why = "the guest does not answer".to_owned();
    for _ in 0..ASKS {
        let asked = SystemTime::now();
        let answer = match get(fleet, over).await {
            Ok(answer) => answer,
            Err(status) if status.code() == Code::Unavailable => {
                status.message().clone_into(&mut why);
                tokio::time::sleep(AGAIN).await;
                continue;
            }
            Err(status) => return Err(format!("cannot read the receipt: {}", status.message())),
        };
        // The first answer may have waited until the receipt was written. It then says little about the clocks.
        let found = Difference::of(asked, answer.boottime_ms, SystemTime::now());
        difference = match (difference, found) {
            (Some(before), Some(found)) => before.and(found).or(Some(found)),
            (before, found) => before.or(found),
        };
        let has_no_clock = answer.boottime_ms == 0;
        envelope = Some(answer.envelope);
        if has_no_clock || difference.is_some_and(|difference| difference.width() <= CLOSE) {
            break;
        }
    }
    let envelope = envelope.ok_or(why)?;
    let opened = open(&envelope, Some(&over.receipt), |_, _, _| Check::Bad);
    let receipt = opened.receipt.filter(|receipt| receipt.id == over.receipt);
    let receipt = receipt.ok_or("the guest has sent something other than this receipt")?;
    let unknown = "the clocks of the guest and the node cannot be compared";
    let window = difference.ok_or(unknown).and_then(|difference| window(&receipt, difference, over.heard));
    let mut request = AttachReceiptRequest { envelope, ..AttachReceiptRequest::default() };
    match window {
        Ok((from, until)) => {
            request.frozen_from = Some(from.into());
            request.frozen_until = Some(until.into());
        }
        Err(why) => why.clone_into(&mut request.problem),
    }
    Ok(request)
}

async fn get(fleet: &Handle, over: &Over) -> Result<GetReceiptResponse, Status> {
    let stopped = |_| Status::unavailable("guestlet-host is stopping");
    let reach = fleet.meet(&over.vm, MEETING).await.map_err(stopped)?;
    let Some(Reach::Session { agent, .. }) = reach else {
        return Err(Status::unavailable("there is no session with the guest"));
    };
    let request = GetReceiptRequest { id: over.receipt.clone(), ..GetReceiptRequest::default() };
    let calls = agent.on_behalf_of_any(None);
    let late = |_| Status::unavailable("the guest does not answer");
    let answer = tokio::time::timeout(PATIENCE, calls.hand_on(request)).await.map_err(late)??;
    GetReceiptRequest::clean(answer.into_inner())
}

#[cfg(test)]
mod tests {
    use prost_types::Timestamp;

    use super::*;
    use crate::wire::proto::v1;

    #[test]
    fn only_a_freeze_whose_beginning_was_heard_has_one() {
        let mut frozen = BTreeMap::new();
        let event = |seconds, kind| VirtualMachineEvent {
            time: Some(Timestamp { seconds, nanos: 0 }),
            name: "ns/a".to_owned(),
            kind: Some(Kind::GuestEvent(v1::Event { kind: Some(kind), ..v1::Event::default() })),
        };
        let began = || event::Kind::Frozen(v1::Frozen::default());
        let over = |receipt: &str| {
            event::Kind::Thawed(v1::Thawed { receipt: receipt.to_owned(), ..v1::Thawed::default() })
        };
        let at = |seconds| SystemTime::UNIX_EPOCH + Duration::from_secs(seconds);
        let id = "0123456789abcdef0123456789abcdef";
        assert!(hear(&mut frozen, &event(7, began())).is_none());
        let heard = hear(&mut frozen, &event(9, over(id))).unwrap().heard;
        assert_eq!((heard.frozen, heard.thawed), (Some(at(7)), at(9)));
        assert_eq!(hear(&mut frozen, &event(10, over(id))).unwrap().heard.frozen, None);
        assert!(hear(&mut frozen, &event(11, over("../x"))).is_none(), "it has none");
        // An agent that has begun anew.
        assert!(hear(&mut frozen, &event(12, began())).is_none());
        let started = event::Kind::AgentStarted(v1::AgentStarted::default());
        assert!(hear(&mut frozen, &event(13, started)).is_none());
        assert_eq!(hear(&mut frozen, &event(14, over(id))).unwrap().heard.frozen, None);
    }
}
