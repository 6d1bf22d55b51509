//! Contents of a Lease, and what a candidate that reads it may do: decisions only.
//!
//! The times in a Lease were written by the clock of another machine and are for users only. Decisions depend on
//! how long the Lease has been seen unchanged, by this machine's own monotonic clock.

use std::collections::BTreeMap;
use std::time::Duration;

use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use k8s_openapi::jiff::Timestamp;
use tokio::time::Instant;

use super::Notice;

/// Duration in a released Lease, in seconds: the API server does not accept zero.
const RELEASED_SECONDS: i32 = 1;

/// Returns the holder of a Lease; empty if there is none.
pub(super) fn holder(lease: &Lease) -> &str {
    lease.spec.as_ref().and_then(|spec| spec.holder_identity.as_deref()).unwrap_or_default()
}

/// Permission of a candidate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Turn {
    /// The candidate may take the Lease.
    Take,
    /// Another candidate may still hold it.
    Wait,
}

/// Last seen version of the Lease, and since when it has been unchanged.
#[derive(Debug, Default)]
pub(super) struct Seen(Option<Record>);

/// Lease as it was read; without a UID and a spec if it does not exist.
#[derive(Debug, PartialEq)]
struct Version {
    uid: Option<String>,
    spec: Option<LeaseSpec>,
}

#[derive(Debug)]
struct Record {
    version: Version,
    since: Instant,
}

impl Record {
    /// Returns whether the Lease was released, belongs to this candidate, or has been unchanged for as long as it is
    /// valid. A Lease without a holder, or a missing one, is not free at once: someone other than the holder has
    /// edited or deleted it, and the holder may believe for a while that it still leads.
    fn is_free(&self, identity: &str, now: Instant, shortest: Duration) -> bool {
        let spec = self.version.spec.as_ref();
        let holder = spec.and_then(|spec| spec.holder_identity.as_deref());
        let seconds = spec.and_then(|spec| spec.lease_duration_seconds).unwrap_or_default();
        let is_released = (holder, seconds) == (Some(""), RELEASED_SECONDS);
        // A duration that is missing or was shortened by others does not make the holder give up sooner.
        let valid = Duration::from_secs(u64::try_from(seconds).unwrap_or_default()).max(shortest);
        is_released || holder == Some(identity) || now.saturating_duration_since(self.since) >= valid
    }
}

impl Seen {
    /// Decides what the candidate `identity` may do at `now`, after it has read `lease`; none if it does not exist. A
    /// Lease counts as valid for `shortest` at least.
    pub(super) fn look(
        &mut self,
        lease: Option<&Lease>,
        identity: &str,
        now: Instant,
        shortest: Duration,
    ) -> Turn {
        let uid = lease.and_then(|lease| lease.metadata.uid.clone());
        let version = Version { uid, spec: lease.map(|lease| lease.spec.clone().unwrap_or_default()) };
        let record = match self.0.take().filter(|record| record.version == version) {
            Some(record) => record,
            None => Record { version, since: now },
        };
        let turn = if record.is_free(identity, now, shortest) { Turn::Take } else { Turn::Wait };
        self.0 = Some(record);
        turn
    }
}

/// Returns the Lease of this name with `identity` as its holder, as it replaces the one that was read.
pub(super) fn held(
    read: Option<Lease>,
    name: &str,
    identity: &str,
    notice: &Notice,
    valid: Duration,
) -> Lease {
    let is_new = read.is_none();
    let mut lease = read.unwrap_or_else(|| Lease {
        metadata: ObjectMeta { name: Some(name.to_owned()), ..ObjectMeta::default() },
        ..Lease::default()
    });
    let now = MicroTime(Timestamp::now());
    let goes_on = holder(&lease) == identity;
    let spec = lease.spec.get_or_insert_default();
    let transitions = spec.lease_transitions.unwrap_or_default().max(0);
    if !goes_on {
        spec.acquire_time = Some(now.clone());
        spec.lease_transitions = Some(if is_new { 0 } else { transitions.saturating_add(1) });
    }
    spec.holder_identity = Some(identity.to_owned());
    // Whole seconds, rounded up.
    let seconds = valid.as_secs() + u64::from(valid.subsec_nanos() > 0);
    spec.lease_duration_seconds = Some(i32::try_from(seconds.max(1)).unwrap_or(i32::MAX));
    spec.renew_time = Some(now);
    for (key, text) in notice.while_held.iter().chain(&notice.lasting) {
        annotations(&mut lease).insert((*key).to_owned(), text.clone());
    }
    lease
}

/// Returns the Lease without a holder, as it replaces one that was held with this notice.
pub(super) fn released(mut lease: Lease, notice: &Notice) -> Lease {
    let now = MicroTime(Timestamp::now());
    let spec = lease.spec.get_or_insert_default();
    spec.holder_identity = Some(String::new());
    spec.lease_duration_seconds = Some(RELEASED_SECONDS);
    spec.acquire_time = Some(now.clone());
    spec.renew_time = Some(now);
    if let Some(told) = &mut lease.metadata.annotations {
        told.retain(|key, _| !notice.while_held.contains_key(key.as_str()));
    }
    lease
}

fn annotations(lease: &mut Lease) -> &mut BTreeMap<String, String> {
    lease.metadata.annotations.get_or_insert_default()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    const LEAST: Duration = Duration::from_secs(15);

    fn lease(spec: &Value) -> Lease {
        let metadata = json!({ "uid": "1", "annotations": { "example.com/kept": "yes" } });
        serde_json::from_value(json!({ "metadata": metadata, "spec": spec })).unwrap()
    }

    fn of(holder: &str, renewed: &str) -> Lease {
        lease(&json!({ "holderIdentity": holder, "leaseDurationSeconds": 15, "renewTime": renewed }))
    }

    /// Checks what "me" may do with the Lease that it reads after so many seconds.
    #[track_caller]
    fn looks(steps: &[(u64, Option<Lease>, Turn)]) {
        let (mut seen, start) = (Seen::default(), Instant::now());
        for (after, lease, expected) in steps {
            let now = start + Duration::from_secs(*after);
            assert_eq!(seen.look(lease.as_ref(), "me", now, LEAST), *expected, "after {after} s: {lease:?}");
        }
    }

    #[test]
    fn only_what_does_not_change_for_as_long_as_it_is_valid_is_taken() {
        use Turn::{Take, Wait};

        let one = |renewed: &str| Some(of("other", renewed));
        looks(&[
            (0, one("2026-01-01T00:00:00.000000Z"), Wait),
            (14, one("2026-01-01T00:00:00.000000Z"), Wait),
            (15, one("2026-01-01T00:00:00.000001Z"), Wait),
            (29, one("2026-01-01T00:00:00.000001Z"), Wait),
            (30, one("2026-01-01T00:00:00.000001Z"), Take),
        ]);
        // The clock of the holder does not matter.
        for renewed in
            ["0001-01-01T00:00:00.000000Z", "1970-01-01T00:00:00.000000Z", "9999-12-30T00:00:00.000000Z"]
        {
            looks(&[(0, one(renewed), Wait), (14, one(renewed), Wait), (15, one(renewed), Take)]);
        }
        // Nor does it matter if that clock goes backwards.
        looks(&[
            (0, one("2026-01-01T00:00:20.000000Z"), Wait),
            (10, one("2026-01-01T00:00:10.000000Z"), Wait),
            (20, one("2026-01-01T00:00:00.000000Z"), Wait),
        ]);
    }

    #[test]
    fn what_was_given_back_is_taken_at_once_and_what_others_have_emptied_is_not() {
        use Turn::{Take, Wait};

        let given_back = json!({ "holderIdentity": "", "leaseDurationSeconds": 1 });
        for spec in [given_back, json!({ "holderIdentity": "me" })] {
            looks(&[(0, Some(lease(&spec)), Take)]);
        }
        looks(&[(0, Some(released(of("other", "2026-01-01T00:00:00.000000Z"), &Notice::default())), Take)]);
        let emptied = [
            None,
            Some(lease(&json!(null))),
            Some(lease(&json!({}))),
            Some(lease(&json!({ "holderIdentity": "" }))),
            Some(lease(&json!({ "holderIdentity": "", "leaseDurationSeconds": 15 }))),
            Some(lease(&json!({ "leaseDurationSeconds": 1 }))),
        ];
        for one in emptied {
            looks(&[(0, one.clone(), Wait), (14, one.clone(), Wait), (15, one, Take)]);
        }
    }

    #[test]
    fn a_holder_is_left_the_time_that_it_believes_to_have() {
        use Turn::{Take, Wait};

        let with = |seconds: Value| {
            Some(lease(&json!({ "holderIdentity": "other", "leaseDurationSeconds": seconds })))
        };
        for shorter in [json!(null), json!(1), json!(-7)] {
            looks(&[
                (0, with(shorter.clone()), Wait),
                (14, with(shorter.clone()), Wait),
                (15, with(shorter), Take),
            ]);
        }
        looks(&[(0, with(json!(60)), Wait), (59, with(json!(60)), Wait), (60, with(json!(60)), Take)]);
        // The Lease is deleted by someone else meanwhile.
        looks(&[(0, with(json!(15)), Wait), (10, None, Wait), (24, None, Wait), (25, None, Take)]);
        // The former holder creates it again.
        looks(&[(0, None, Wait), (14, with(json!(15)), Wait), (28, with(json!(15)), Wait), (29, None, Wait)]);
    }

    #[test]
    fn one_that_was_made_again_is_another() {
        let other = |uid: &str| {
            let mut lease = of("other", "2026-01-01T00:00:00.000000Z");
            lease.metadata.uid = Some(uid.to_owned());
            Some(lease)
        };
        looks(&[(0, other("1"), Turn::Wait), (10, other("2"), Turn::Wait), (20, other("2"), Turn::Wait)]);
        looks(&[(0, other("1"), Turn::Wait), (10, other("2"), Turn::Wait), (25, other("2"), Turn::Take)]);
    }

    #[test]
    fn what_is_written_counts_transitions_and_keeps_what_others_wrote() {
        let notice = Notice {
            while_held: BTreeMap::from([("address", "192.0.2.7:9971".to_owned())]),
            lasting: BTreeMap::from([("authority", "pem".to_owned())]),
        };
        let write =
            |read, identity: &str| held(read, "lease", identity, &notice, Duration::from_millis(14_001));
        let transitions = |lease: &Lease| lease.spec.as_ref().unwrap().lease_transitions;
        let first = write(None, "a");
        assert_eq!((holder(&first), transitions(&first)), ("a", Some(0)));
        assert_eq!(first.metadata.name.as_deref(), Some("lease"));
        assert_eq!(first.metadata.annotations.as_ref().unwrap()["address"], "192.0.2.7:9971");
        let again = write(Some(first.clone()), "a");
        let acquired = |lease: &Lease| lease.spec.as_ref().unwrap().acquire_time.clone();
        assert_eq!((transitions(&again), acquired(&again)), (Some(0), acquired(&first)));
        let second = write(Some(again), "b");
        assert_eq!((holder(&second), transitions(&second)), ("b", Some(1)));
        let free = released(second, &notice);
        assert_eq!((holder(&free), transitions(&free)), ("", Some(1)));
        assert_eq!(free.metadata.annotations.as_ref().unwrap().get("address"), None);
        assert_eq!(free.metadata.annotations.as_ref().unwrap()["authority"], "pem");
        assert_eq!(transitions(&write(Some(free), "b")), Some(2));

        let odd = json!({ "leaseTransitions": i32::MAX, "strategy": "OldestEmulationVersion" });
        let kept = write(Some(lease(&odd)), "a");
        let spec = kept.spec.as_ref().unwrap();
        assert_eq!((spec.lease_transitions, spec.lease_duration_seconds), (Some(i32::MAX), Some(15)));
        assert_eq!(spec.strategy.as_deref(), Some("OldestEmulationVersion"));
        assert_eq!(kept.metadata.annotations.unwrap()["example.com/kept"], "yes");
        assert_eq!(transitions(&write(Some(lease(&json!({ "leaseTransitions": -3 }))), "a")), Some(1));
    }
}
