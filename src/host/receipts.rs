//! Verification of receipts: whether a receipt was signed by its guest, with a key that this host half knows.

use tonic::Status;

use super::trust::Trust;
use super::trust::pins::Pin;
use crate::host::fleet::{Handle, Identity};
use crate::receipt::envelope::{Check, Verdict, open};
use crate::receipt::show;
use crate::trust::key::signer;
use crate::wire::proto::v1::GetReceiptResponse;

/// Adds the verdict on a receipt to the answer of its guest.
///
/// # Errors
/// If the fleet has stopped.
pub async fn judged(
    trust: &Trust,
    fleet: &Handle,
    name: String,
    id: &str,
    mut answer: GetReceiptResponse,
) -> Result<GetReceiptResponse, Status> {
    let machine = fleet.find(Identity::Name(name)).await?;
    let pin = machine.and_then(|machine| trust.record(&machine.vm.ids.lasting).pin);
    let opened = open(&answer.envelope, Some(id), |key, message, signature| {
        signer(key, message, signature).map_or(Check::Bad, |fingerprint| Check::Good(fingerprint.to_string()))
    });
    let (word, whose) = match &opened.verdict {
        Verdict::Signed(key) => whose(key, pin.as_ref()),
        other => (other.word(), ""),
    };
    word.clone_into(&mut answer.verdict);
    answer.detail = show::verdict(&opened.verdict, whose);
    if opened.receipt.is_none() {
        // An envelope without a readable receipt is of no use to the client.
        answer.envelope.clear();
    }
    Ok(answer)
}

fn whose(key: &str, pin: Option<&Pin>) -> (&'static str, &'static str) {
    let Some(pin) = pin else { return ("unknown-key", "; this host half knows no key of this guest") };
    let is = |known: crate::trust::key::PublicKey| known.fingerprint().to_string() == key;
    if is(pin.key) {
        return ("signed", ", the key of this guest");
    }
    if pin.previous.as_ref().is_some_and(|previous| is(previous.key)) {
        return ("signed", ", which was the previous key of this guest");
    }
    (
        "other-key",
        ", which is not the key of this guest; the key was replaced since then, or another guest made this receipt",
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::trust::pins::{How, Previous};
    use crate::trust::key::Key;

    #[test]
    fn only_keys_of_the_guest_count() {
        let [own, before, other] = [(); 3].map(|()| Key::generate().unwrap().public());
        let mut pin = Pin::new("a", own, How::Operator);
        pin.previous = Some(Previous { key: before, until: 0 });
        let word = |key: crate::trust::key::PublicKey, pin| whose(&key.fingerprint().to_string(), pin).0;
        assert_eq!(word(own, Some(&pin)), "signed");
        assert_eq!(word(before, Some(&pin)), "signed");
        assert_eq!(word(other, Some(&pin)), "other-key");
        assert_eq!(word(own, None), "unknown-key");
    }
}
