//! Which host half holds this guest: at most one.
//!
//! ```text
//!          take                    take by the same           take by another
//!  free ────────▶ held ─────────▶ held (old stream ends)    ┌─ the holder answers ──▶ refused
//!   ▲              │ ▲                                   ───┤
//!   └─stream ends──┘ └──────── taken over ◀─────────────────┴─ it does not
//! ```
//!
//! A holder answers on its callback, which it opens right after it took the guest. One that has none after five
//! seconds does not answer, as a rival sees it that may open one. Among those that may not, whose grants give them no more than
//! a look, the first one stays until its connection ends. One with a key takes the guest at once from one without, which has proved
//! nothing and may only look (`trust.plain`), and never the other way round.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use tokio::sync::watch;
use tonic::Status;

use crate::rpc::callback::Callback;
use crate::transport::callback::Caller;
use crate::trust::Peer;
use crate::wire::proto::v1::{HostHalf, WhoAmIResponse};

/// How long a holder may be without a callback before another may take its place.
const CALLBACK_GRACE: Duration = Duration::from_secs(5);

/// Who holds this guest; clones share it.
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
    /// Who it has proved to be.
    peer: Arc<Peer>,
    since: SystemTime,
    taken: Instant,
    callback: watch::Sender<Option<Callback>>,
    /// Why the hold was lost, once it is.
    over: watch::Sender<Option<String>>,
}

impl Current {
    /// Whether it is this one: what it calls itself anybody can say, and who it is it has proved.
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

/// Who holds the guest, for people.
#[derive(Debug, Clone)]
pub struct Held {
    /// The host half.
    pub host: HostHalf,
    /// Since when.
    pub since: SystemTime,
    /// What it says of this guest, once it has.
    pub identity: Option<WhoAmIResponse>,
}

impl Holder {
    /// Makes `host` the holder, which has proved to be `peer`; `may_call_back` says whether it may open a callback.
    ///
    /// # Errors
    /// `FAILED_PRECONDITION` if another one holds the guest and answers. One without a key never takes it from one that has one,
    /// and one that may not open a callback none that has not opened one: that could not be told from it by its answers, and each
    /// would take the guest from the other for ever.
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
            // Whoever took the guest meanwhile has just shown that it is there.
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

    /// Gives the holder its callback, in place of the one that it had. Returns what completes when this one must be closed;
    /// nothing if `host` does not hold the guest.
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

    /// Who holds the guest now.
    pub fn held(&self) -> Option<Held> {
        let slot = self.slot();
        let current = slot.current.as_ref()?;
        Some(Held {
            host: current.host.clone(),
            since: current.since,
            identity: current.callback().as_ref().map(Callback::identity),
        })
    }

    /// The way to the host half, for calls of other services that it has.
    ///
    /// # Errors
    /// Why there is none, in words for people.
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
        // Nothing that is done under the lock leaves the slot half changed.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What a rival is told: not what the holder calls itself.
fn held(holder: &HostHalf, rival: &HostHalf) -> Status {
    tracing::warn!("host half {} is refused: {} holds this guest", name(rival), name(holder));
    let host_name = clean(&holder.host_name);
    Status::failed_precondition(format!("held by the host half on {host_name}, which answers"))
}

fn clean(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(64).collect()
}

/// A host half as people know it.
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
            tracing::info!("host half {} is gone", name(&over.host));
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
