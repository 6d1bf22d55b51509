//! Receipts of freezes, as the host half requests them, and its description of a snapshot.

use std::path::Path;
use std::time::{Duration, SystemTime};

use tonic::Status;

use crate::guest::Guest;
use crate::guest::freeze::receipts::clerk::Clerk;
use crate::guest::freeze::receipts::now;
use crate::receipt::envelope::{Check, open};
use crate::receipt::{Cut, is_id, tidy};
use crate::sys::blocking;
use crate::trust::key::signer;
use crate::wire::proto::v1;

/// Receipts in one answer.
const MOST: usize = 256;
/// Number of receipts in one answer if the request does not limit it.
const USUAL: usize = 100;
/// Time to wait for a receipt that is being written.
const PATIENCE: Duration = Duration::from_secs(5);

/// Converts the host half's description of its snapshot. An invalid description must not prevent the thaw, so
/// texts are truncated and invalid times are left out.
pub fn cut(cut: &v1::SnapshotCut) -> Cut {
    let time = |time: Option<prost_types::Timestamp>| SystemTime::try_from(time?).ok();
    let (begun, ended) = (time(cut.begun), time(cut.ended));
    let took =
        begun.zip(ended).and_then(|(begun, ended)| ended.duration_since(begun).ok()).unwrap_or_default();
    let words = |time: Option<SystemTime>| {
        time.map(|time| prost_types::Timestamp::from(time).to_string()).unwrap_or_default()
    };
    Cut {
        id: tidy(&cut.id),
        text: tidy(&cut.text),
        begun: words(begun),
        ended: words(ended),
        took_ms: u64::try_from(took.as_millis()).unwrap_or(u64::MAX),
        exit_status: cut.exit_status,
    }
}

fn check(key: &str, message: &[u8], signature: &[u8]) -> Check {
    signer(key, message, signature).map_or(Check::Bad, |fingerprint| Check::Good(fingerprint.to_string()))
}

fn clerk(guest: &Guest) -> Result<Clerk, Status> {
    let clerk = guest.freezer.clerk().cloned();
    clerk.ok_or_else(|| Status::failed_precondition("this guest keeps no receipts"))
}

fn unreadable(directory: &Path, error: &std::io::Error) -> Status {
    Status::internal(format!("cannot read the receipts in {}: {error}", directory.display()))
}

/// Returns a list of the latest receipts.
///
/// # Errors
/// If they cannot be read, or the request exceeds the maximum number.
pub async fn list(
    guest: &Guest,
    request: &v1::ListReceiptsRequest,
) -> Result<v1::ListReceiptsResponse, Status> {
    let last = match usize::try_from(request.last).unwrap_or(usize::MAX) {
        0 => USUAL,
        last if last <= MOST => last,
        last => return Err(Status::invalid_argument(format!("last is {last}, and at most {MOST}"))),
    };
    let clerk = clerk(guest)?;
    let listed = blocking::run(move || {
        clerk.wait(PATIENCE);
        let unreadable = |error| unreadable(clerk.directory(), &error);
        let all = clerk.list().map_err(unreadable)?;
        let older = all.len().saturating_sub(last);
        let mut receipts = Vec::new();
        for entry in all.into_iter().skip(older) {
            // The receipt may have been removed meanwhile.
            let Some(envelope) = clerk.get(&entry.id).map_err(unreadable)? else { continue };
            let opened = open(&envelope, Some(&entry.id), check);
            let receipt = opened.receipt.unwrap_or_default();
            let is_there = !receipt.id.is_empty();
            receipts.push(v1::ReceiptSummary {
                kept: Some((SystemTime::UNIX_EPOCH + Duration::from_secs(entry.filed)).into()),
                id: entry.id,
                level: if is_there { receipt.level.word() } else { "" }.to_owned(),
                end: receipt.end.how,
                caller: receipt.caller.name,
                verdict: opened.verdict.word().to_owned(),
            });
        }
        Ok(v1::ListReceiptsResponse { receipts, older: u32::try_from(older).unwrap_or(u32::MAX) })
    });
    listed.await
}

/// Returns one receipt. The host half decides whether to trust it.
///
/// # Errors
/// If there is no receipt with this ID, or it cannot be read.
pub async fn get(guest: &Guest, request: v1::GetReceiptRequest) -> Result<v1::GetReceiptResponse, Status> {
    let id = request.id;
    if !is_id(&id) {
        return Err(Status::invalid_argument("id is not that of a receipt, which has 32 hexadecimal digits"));
    }
    let clerk = clerk(guest)?;
    let found = blocking::run(move || {
        clerk.wait(PATIENCE);
        let found = clerk.get(&id).map_err(|error| unreadable(clerk.directory(), &error))?;
        let none = || {
            Status::failed_precondition(format!("this guest has no receipt {id}; they are kept for 90 days"))
        };
        found.ok_or_else(none)
    });
    let envelope = found.await?;
    let boottime_ms = now().boottime_ms;
    Ok(v1::GetReceiptResponse { envelope, boottime_ms, ..v1::GetReceiptResponse::default() })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use prost_types::Timestamp;

    use super::*;

    proptest! {
        /// Whatever a host half says of its snapshot, it is taken, tidied, and never an error.
        #[test]
        fn whatever_is_said_of_a_snapshot_is_taken(
            id in "\\PC{0,300}", text in "(?s).{0,300}", seconds: i64, nanos: i32, other: i64, exit_status: i32,
        ) {
            let begun = Some(Timestamp { seconds, nanos });
            let ended = Some(Timestamp { seconds: other, nanos: 0 });
            let said = v1::SnapshotCut { id, text, begun, ended, exit_status };
            let taken = cut(&said);
            prop_assert_eq!(taken.exit_status, exit_status);
            prop_assert!(taken.id.len() <= 256 && taken.text.len() <= 256);
            prop_assert!(!taken.text.contains('\x1b'));
        }
    }

    #[test]
    fn how_long_it_took_is_told() {
        let at = |seconds| Some(Timestamp { seconds, nanos: 0 });
        let said = |begun, ended| v1::SnapshotCut { begun, ended, ..v1::SnapshotCut::default() };
        let taken = cut(&said(at(5), at(7)));
        assert_eq!((taken.took_ms, &*taken.begun), (2000, "1970-01-01T00:00:05Z"));
        assert_eq!(cut(&said(at(7), at(5))).took_ms, 0);
        assert_eq!(cut(&said(None, at(5))).begun, "");
    }
}
