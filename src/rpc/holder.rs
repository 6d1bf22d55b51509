//! Ownership of this guest by a host half: at most one holds it.
//!
//! ```text
//!          take                    take by the same           take by another
//!  free ────────▶ held ─────────▶ held (old stream ends)    ┌─ the holder answers ──▶ refused
//!   ▲              │ ▲                                   ───┤
//!   └─stream ends──┘ └──────── taken over ◀─────────────────┴─ it does not
//! ```
//!
//! A holder answers on its callback, which it opens right after it has taken the guest. A holder without a
//! callback after five seconds counts as not answering, for a rival that may open a callback itself. Among
//! host halves that may not open one, because their grants allow them only to read, the first one stays until
//! its connection ends. A host half with a key immediately takes the guest from one without, which has proved
//! nothing and may only read (`trust.plain`), and never the other way round.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use tokio::sync::watch;
use tonic::Status;

use crate::rpc::callback::Callback;
use crate::transport::callback::Caller;
use crate::trust::Peer;
use crate::wire::proto::v1::{HostHalf, WhoAmIResponse};

/// Time that a holder may be without a callback before another host half may replace it.
const CALLBACK_GRACE: Duration = Duration::from_secs(5);

/// Holder of this guest; clones share it.
#[derive(Debug, Clone, Default)]
pub struct Holder(Arc<Mutex<Slot>>);

#[derive(Debug, Default)]
struct Slot {
    current: Option<Current>,
    holds: u64,
}

#[derive(Debug)]
struct Current {
    number: u64,
    host: HostHalf,
    /// Proved identity of the holder.
    peer: Arc<Peer>,
    since: SystemTime,
    taken: Instant,
    callback: watch::Sender<Option<Callback>>,
    /// Reason why the hold has ended; empty while it lasts.
    over: watch::Sender<Option<String>>,
}

impl Current {
    /// Returns whether the holder is this host half. Its instance ID alone can be forged, so the proved identity
    /// must match as well.
    fn is(&self, host: &HostHalf, peer: &Peer) -> bool {
        self.host.instance_id == host.instance_id && self.peer.is_same(peer)
    }

    fn callback(&self) -> Option<Callback> {
        self.callback.borrow().clone()
    }

    fn tenure(&self) -> Tenure {
        Tenure { number: self.number, over: self.over.subscribe(), callback: self.callback.subscribe() }
    }
}

/// One hold of the guest, for work that is to end with it.
#[derive(Debug, Clone)]
pub struct Tenure {
    number: u64,
    over: watch::Receiver<Option<String>>,
    callback: watch::Receiver<Option<Callback>>,
}

impl Tenure {
    /// Tells this hold from all others of this run of the agent.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// Completes when the hold has ended, also if the same host half has begun another one.
    pub async fn ended(mut self) {
        // An error means that the hold has ended by itself.
        let _ = self.over.wait_for(Option::is_some).await;
    }

    /// Waits until the holder has opened a callback; none when the hold has ended.
    pub async fn caller(&mut self) -> Option<Caller> {
        let callback = self.callback.wait_for(Option::is_some).await.ok()?;
        callback.as_ref().map(Callback::caller)
    }
}

/// Holder of the guest, for display.
#[derive(Debug, Clone)]
pub struct Held {
    /// Host half that holds the guest.
    pub host: HostHalf,
    /// Time at which it took the guest.
    pub since: SystemTime,
    /// Identity that it has assigned to this guest, once it is known.
    pub identity: Option<WhoAmIResponse>,
}

impl Holder {
    /// Makes `host`, which has proved to be `peer`, the holder; `may_call_back` is true if it may open a callback.
    ///
    /// # Errors
    /// `FAILED_PRECONDITION` if another host half holds the guest and answers. A host half without a key never
    /// takes the guest from one with a key. One that may not open a callback never takes it from one that has not
    /// opened one: neither of the two can answer, so each would take the guest from the other forever.
    pub async fn take(&self, host: HostHalf, peer: Arc<Peer>, may_call_back: bool) -> Result<Hold, Status> {
        let rival = {
            let mut slot = self.slot();
            match &slot.current {
                Some(current) if *peer != Peer::Plain && *current.peer == Peer::Plain => {
                    let before = name(&current.host);
                    tracing::warn!("host half {} takes over: {before} has no key", name(&host));
                    return Ok(self.replace(&mut slot, host, peer));
                }
                Some(current) if *peer == Peer::Plain && *current.peer != Peer::Plain => {
                    return Err(held(&current.host, &host));
                }
                Some(current) if !current.is(&host, &peer) => {
                    Some((current.number, current.host.clone(), current.taken, current.callback()))
                }
                _ => None,
            }
        };
        if let Some((number, rival, taken, callback)) = rival {
            let answers = match callback {
                Some(callback) => callback.answers().await,
                None => !may_call_back || taken.elapsed() < CALLBACK_GRACE,
            };
            let mut slot = self.slot();
            // A host half that has taken the guest meanwhile has just shown that it is alive.
            let holder = slot.current.as_ref().filter(|current| answers || current.number != number);
            if let Some(current) = holder {
                return Err(held(&current.host, &host));
            }
            tracing::warn!("host half {} takes over: {} does not answer", name(&host), name(&rival));
            return Ok(self.replace(&mut slot, host, peer));
        }
        Ok(self.replace(&mut self.slot(), host, peer))
    }

    fn replace(&self, slot: &mut Slot, host: HostHalf, peer: Arc<Peer>) -> Hold {
        slot.holds += 1;
        let number = slot.holds;
        let (over, lost) = watch::channel(None);
        tracing::info!("held by host half {}", name(&host));
        if let Some(before) = slot.current.take() {
            before.over.send_replace(Some(if before.is(&host, &peer) {
                "the same host half opened the events again".to_owned()
            } else {
                format!("taken over by host half {}", name(&host))
            }));
        }
        slot.current = Some(Current {
            number,
            host,
            peer,
            since: SystemTime::now(),
            taken: Instant::now(),
            callback: watch::Sender::new(None),
            over,
        });
        Hold { holder: self.clone(), number, lost }
    }

    /// Sets the callback of the holder, in place of any earlier one. Returns a channel that reports when this
    /// callback must be closed; `None` if `host` does not hold the guest.
    pub fn attach(
        &self,
        host: &HostHalf,
        peer: &Peer,
        callback: Callback,
    ) -> Option<impl Future<Output = ()> + use<>> {
        let mut slot = self.slot();
        let current = slot.current.as_mut().filter(|current| current.is(host, peer))?;
        let number = callback.number();
        current.callback.send_replace(Some(callback));
        let (mut callback, mut over) = (current.callback.subscribe(), current.over.subscribe());
        Some(async move {
            let is_other = |now: &Option<Callback>| now.as_ref().is_some_and(|now| now.number() != number);
            tokio::select! {
                // An error means that the hold has ended by itself.
                _ = over.wait_for(Option::is_some) => {}
                _ = callback.wait_for(is_other) => {}
            }
        })
    }

    /// Forgets the callback of this number.
    pub fn detach(&self, number: u64) {
        if let Some(current) = &mut self.slot().current
            && current.callback().is_some_and(|callback| callback.number() == number)
        {
            current.callback.send_replace(None);
            // As if taken now: the holder may open another one.
            current.taken = Instant::now();
        }
    }

    /// The host half that calls itself so and has proved to be `peer`, if it holds the guest.
    pub fn held_by(&self, instance_id: &str, peer: &Peer) -> Option<HostHalf> {
        let slot = self.slot();
        let current = slot.current.as_ref()?;
        (current.host.instance_id == instance_id && current.peer.is_same(peer)).then(|| current.host.clone())
    }

    /// The hold of the host half that calls itself so and has proved to be `peer`, if it holds the guest.
    pub fn tenure_of(&self, instance_id: &str, peer: &Peer) -> Option<Tenure> {
        let slot = self.slot();
        let current = slot.current.as_ref()?;
        (current.host.instance_id == instance_id && current.peer.is_same(peer)).then(|| current.tenure())
    }

    /// The hold of this number, as long as it lasts.
    pub fn tenure(&self, number: u64) -> Option<Tenure> {
        let slot = self.slot();
        slot.current.as_ref().filter(|current| current.number == number).map(Current::tenure)
    }

    /// Returns the current holder.
    pub fn held(&self) -> Option<Held> {
        let slot = self.slot();
        let current = slot.current.as_ref()?;
        Some(Held {
            host: current.host.clone(),
            since: current.since,
            identity: current.callback().as_ref().map(Callback::identity),
        })
    }

    /// Returns the caller for the host half, for other services that it provides.
    ///
    /// # Errors
    /// The reason why there is none, for display.
    pub fn caller(&self) -> Result<Caller, String> {
        let slot = self.slot();
        let current = slot.current.as_ref().ok_or("no host half holds this guest")?;
        let callback = current.callback();
        callback
            .map(|callback| callback.caller())
            .ok_or_else(|| {
                let host = name(&current.host);
                format!("host half {host} accepts no requests from this guest; if it is of an earlier release, upgrade it")
            })
    }

    fn slot(&self) -> MutexGuard<'_, Slot> {
        // Ignores poisoning: no operation under the lock can leave the slot inconsistent.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns the status for a rival, which does not contain the name that the holder gives itself.
fn held(holder: &HostHalf, rival: &HostHalf) -> Status {
    tracing::warn!("host half {} is refused: {} holds this guest", name(rival), name(holder));
    let host_name = clean(&holder.host_name);
    Status::failed_precondition(format!("held by the host half on {host_name}, which answers"))
}

fn clean(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(64).collect()
}

/// Describes a host half for display.
fn name(host: &HostHalf) -> String {
    format!("{} ({})", clean(&host.host_name), clean(&host.instance_id))
}

/// Proof of holding the guest; it is free when this is dropped.
#[derive(Debug)]
pub struct Hold {
    holder: Holder,
    number: u64,
    lost: watch::Receiver<Option<String>>,
}

impl Hold {
    /// Completes when another stream took the guest, with what to tell the peer.
    pub async fn lost(&mut self) -> Status {
        match self.lost.wait_for(Option::is_some).await {
            Ok(reason) => Status::aborted(reason.clone().unwrap_or_default()),
            Err(_) => Status::aborted("the hold has ended"),
        }
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        let mut slot = self.holder.slot();
        if let Some(over) = slot.current.take_if(|current| current.number == self.number) {
            tracing::info!("host half {} has disconnected", name(&over.host));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trust::Fingerprint;
    use crate::trust::peer::Keyed;

    fn host(name: &str) -> HostHalf {
        HostHalf { host_name: name.to_owned(), instance_id: name.to_owned() }
    }

    fn keyed() -> Arc<Peer> {
        let fingerprint = Fingerprint::of(b"a key");
        let (names, roles) = (Vec::new(), Vec::new());
        Arc::new(Peer::Keyed(Keyed { fingerprint, anchor: fingerprint, names, roles, until: None }))
    }

    /// As with `trust.plain`: anybody who can dial the guest could keep its host half from it.
    #[tokio::test]
    async fn whoever_has_proved_a_key_takes_the_guest_from_whoever_has_none_and_never_the_other_way_round() {
        for may_call_back in [false, true] {
            let holder = Holder::default();
            let mut plain = holder.take(host("plain"), Arc::new(Peer::Plain), true).await.unwrap();
            let keyed_hold = holder.take(host("keyed"), keyed(), may_call_back).await.unwrap();
            assert!(plain.lost().await.message().contains("taken over by host half keyed"));
            drop(plain);
            assert_eq!(holder.held().unwrap().host, host("keyed"));
            let refused = holder.take(host("plain"), Arc::new(Peer::Plain), true).await.unwrap_err();
            assert!(refused.message().contains("held by the host half on keyed"), "{refused}");
            drop(keyed_hold);
            assert!(holder.take(host("plain"), Arc::new(Peer::Plain), true).await.is_ok());
        }
    }
}
