//! Informs guests that this host half is going to use another key, and that the previous key is no longer valid.
//!
//! ```text
//!  guestctl trust rotate --host ──▶ next key ──every session──▶ the guest accepts both
//!                     --finish ──▶ it is used ──every session──▶ the guest drops the previous one
//! ```

use std::sync::Arc;
use std::time::Duration;

use super::contact::Contact;
use super::conversation::Caller;
use super::text;
use super::trust::Trust;
use crate::wire::proto::v1::ReplaceHostKeyRequest;
use crate::wire::proto::v1::replace_host_key_request::Step;

/// Timeout of an agent for one step.
const DEADLINE: Duration = Duration::from_secs(10);
/// First and longest delay before a guest that did not accept a key is asked again. The delay doubles each time.
const AGAIN: Duration = Duration::from_secs(60);
const AT_LATEST: Duration = Duration::from_secs(3600);

/// Informs the guest of key changes while the session lasts. Completes when this host half has begun to use
/// another key, because the session then has to begin anew. A guest without a key is not informed.
pub async fn keep(caller: &Caller, contact: &Contact, is_keyed: bool) {
    let Some(trust) = contact.trust.as_ref().filter(|_| is_keyed) else {
        return std::future::pending().await;
    };
    let mut changes = trust.changes();
    let began = trust.switches();
    let mut again = AGAIN;
    loop {
        if trust.switches() != began {
            return;
        }
        changes.mark_unchanged();
        // Boxed, because the session is long-lived and the calls are not.
        let told = Box::pin(tell(caller.clone(), contact, trust)).await;
        let is_new = trust.complains(&contact.vm.ids.lasting, told.as_ref().err());
        if let Some(problem) = told.as_ref().err().filter(|_| is_new) {
            tracing::warn!(vm = contact.vm.name, problem, "cannot send this host half's keys to the guest");
        }
        tokio::select! {
            // No error can occur: the sender outlives every session.
            _ = changes.changed() => again = AGAIN,
            () = tokio::time::sleep(again), if told.is_err() => again = AT_LATEST.min(again * 2),
        }
    }
}

async fn tell(mut caller: Caller, contact: &Contact, trust: &Arc<Trust>) -> Result<(), String> {
    let rotation = trust.rotation().await.map_err(|error| error.to_string())?;
    // This is repeated in every session, because the guest's disk may have been restored since the last one.
    if let Some(next) = rotation.next {
        step(&mut caller, Step::Next(next.spki().to_vec())).await?;
        trust.told(&contact.vm, next).await.map_err(|error| error.to_string())?;
    }
    for before in rotation.retired {
        // A guest that was given the current key by hand does not know that it replaces another one.
        if let Err(problem) = step(&mut caller, Step::Retire(before.fingerprint().to_string())).await {
            tracing::debug!(
                vm = contact.vm.name,
                problem,
                "an earlier key of this host half cannot be dropped"
            );
        }
    }
    Ok(())
}

async fn step(caller: &mut Caller, step: Step) -> Result<(), String> {
    let call = caller.replace_host_key(ReplaceHostKeyRequest { step: Some(step) });
    match tokio::time::timeout(DEADLINE, call).await {
        Ok(Ok(_)) => Ok(()),
        Ok(Err(status)) => Err(text::clean(status.message())),
        Err(_) => Err("it does not answer".to_owned()),
    }
}
