//! Envelope of a receipt: the exact document as one text, and beside it the signature over exactly these bytes.
//!
//! ```text
//! {"guestlet-receipt":1,"document":"{\"schema\":1,…}","key":"ed25519:…","signature":"<128 hexadecimal digits>"}
//! ```
//!
//! The signed message is `PREFIX` followed by the document's bytes, so that a signature made by the same key for
//! another purpose cannot be used for a receipt. An envelope comes from a disk or from a guest: its contents are
//! parsed, and nothing in them is trusted.

use serde::{Deserialize, Serialize};

use super::{MOST_BYTES, Receipt, SCHEMA};

/// Bytes before the document in the signed message.
const PREFIX: &[u8] = b"guestlet receipt 1\n";
/// Version of the envelope.
const VERSION: u32 = 1;

/// Signature, with the public key of the signer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Signature {
    /// Public key, in the format of key lines.
    pub key: String,
    /// Bytes of the signature.
    pub bytes: Vec<u8>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct Envelope {
    guestlet_receipt: u32,
    document: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    key: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    signature: Option<String>,
}

/// Result of checking a signature.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Check {
    /// The signature is valid for these bytes, by the key with this fingerprint.
    Good(String),
    /// The signature is invalid.
    Bad,
}

/// Authenticity of an envelope.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// The envelope is unchanged since the holder of the key with this fingerprint signed it. The caller has to find
    /// out whose key it is.
    Signed(String),
    /// The guest had no key, so anybody may have written the envelope.
    Unsigned,
    /// The envelope or its signature was changed; how that was detected.
    Altered(String),
    /// The text is not a receipt; why not.
    Unreadable(String),
}

impl Verdict {
    /// Returns the verdict in one word, as in the API and in files.
    pub fn word(&self) -> &'static str {
        match self {
            Self::Signed(_) => "signed",
            Self::Unsigned => "unsigned",
            Self::Altered(_) => "altered",
            Self::Unreadable(_) => "unreadable",
        }
    }

    /// Returns the fingerprint of the key, or the reason why the envelope is not authentic.
    pub fn detail(&self) -> &str {
        match self {
            Self::Signed(detail) | Self::Altered(detail) | Self::Unreadable(detail) => detail,
            Self::Unsigned => "",
        }
    }
}

/// Envelope that was opened and checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Opened {
    /// Receipt in the envelope, tidied; absent if it cannot be read.
    pub receipt: Option<Receipt>,
    /// Authenticity of the envelope.
    pub verdict: Verdict,
}

/// Puts a receipt into an envelope, and shortens its lists until it is not too large. The envelope is signed if
/// `sign` returns a signature.
pub fn seal(mut receipt: Receipt, sign: impl Fn(&[u8]) -> Option<Signature>) -> String {
    receipt.schema = SCHEMA;
    receipt.tidy();
    let room = 512;
    loop {
        let document = serde_json::to_string(&receipt).unwrap_or_default();
        let bare = encode(&document, None);
        if bare.len() + room > MOST_BYTES && receipt.shorten() {
            continue;
        }
        return match sign(&signed(&document)) {
            Some(signature) => encode(&document, Some(&signature)),
            None => bare,
        };
    }
}

fn signed(document: &str) -> Vec<u8> {
    [PREFIX, document.as_bytes()].concat()
}

fn encode(document: &str, signature: Option<&Signature>) -> String {
    let envelope = Envelope {
        guestlet_receipt: VERSION,
        document: document.to_owned(),
        key: signature.map(|signature| signature.key.clone()),
        signature: signature.map(|signature| hexadecimal(&signature.bytes)),
    };
    // Serialising texts and a number cannot fail.
    let mut text = serde_json::to_string(&envelope).unwrap_or_default();
    text.push('\n');
    text
}

fn hexadecimal(bytes: &[u8]) -> String {
    use std::fmt::Write as _;

    bytes.iter().fold(String::new(), |mut text, byte| {
        // Writing to a String cannot fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

fn bytes(hexadecimal: &str) -> Option<Vec<u8>> {
    let digits = hexadecimal.as_bytes();
    if !digits.len().is_multiple_of(2) || !digits.iter().all(u8::is_ascii_hexdigit) {
        return None;
    }
    let pairs = digits.chunks_exact(2);
    pairs.map(|pair| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok()).collect()
}

/// Opens an envelope. `id` is the expected ID of the receipt, if known. `check` verifies a signature: it gets a
/// key in the format of key lines, a message and the signature.
pub fn open(envelope: &[u8], id: Option<&str>, check: impl FnOnce(&str, &[u8], &[u8]) -> Check) -> Opened {
    match read(envelope) {
        Err(why) => Opened { receipt: None, verdict: Verdict::Unreadable(why) },
        Ok((envelope, receipt)) => {
            let verdict = verdict(&envelope, &receipt, id, check);
            Opened { receipt: Some(receipt), verdict }
        }
    }
}

fn read(envelope: &[u8]) -> Result<(Envelope, Receipt), String> {
    if envelope.len() > MOST_BYTES {
        return Err(format!("it has more than {MOST_BYTES} bytes"));
    }
    let envelope: Envelope = serde_json::from_slice(envelope)
        .map_err(|error| format!("it is not the envelope of a receipt: {error}"))?;
    if envelope.guestlet_receipt != VERSION {
        return Err(format!(
            "its version is {}, which this guestlet does not support",
            envelope.guestlet_receipt
        ));
    }
    let mut receipt: Receipt = serde_json::from_str(&envelope.document)
        .map_err(|error| format!("its document is not a receipt: {error}"))?;
    if receipt.schema != SCHEMA {
        return Err(format!(
            "its document has version {}, which this guestlet does not support",
            receipt.schema
        ));
    }
    receipt.tidy();
    Ok((envelope, receipt))
}

fn verdict(
    envelope: &Envelope,
    receipt: &Receipt,
    id: Option<&str>,
    check: impl FnOnce(&str, &[u8], &[u8]) -> Check,
) -> Verdict {
    let altered = |why: &str| Verdict::Altered(why.to_owned());
    if id.is_some_and(|id| id != receipt.id) {
        return altered("its document has another id");
    }
    let (key, signature) = match (&envelope.key, &envelope.signature) {
        (None, None) => return Verdict::Unsigned,
        (Some(key), Some(signature)) => (key, signature),
        _ => return altered("it has a key without a signature, or a signature without a key"),
    };
    let Some(signature) = bytes(signature) else {
        return altered("its signature is not a hexadecimal number");
    };
    match check(key, &signed(&envelope.document), &signature) {
        Check::Good(fingerprint) => Verdict::Signed(fingerprint),
        Check::Bad => altered("its signature is not the one of its key over its document"),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::receipt::{NotFrozen, Volume};

    /// Signs in a way that anybody can check: with the message's length and the sum of its bytes.
    fn sign(message: &[u8]) -> Vec<u8> {
        let sum =
            message.iter().fold(7u64, |sum, byte| sum.wrapping_mul(1_000_003).wrapping_add(u64::from(*byte)));
        sum.to_be_bytes().to_vec()
    }

    fn sealed(receipt: Receipt) -> String {
        seal(receipt, |message| Some(Signature { key: "key".to_owned(), bytes: sign(message) }))
    }

    fn check(key: &str, message: &[u8], signature: &[u8]) -> Check {
        if key == "key" && sign(message) == signature {
            Check::Good("SHA256:x".to_owned())
        } else {
            Check::Bad
        }
    }

    fn receipt() -> Receipt {
        Receipt { id: "0123456789abcdef0123456789abcdef".to_owned(), ..Receipt::default() }
    }

    #[test]
    fn what_was_sealed_is_read_as_it_was() {
        let opened = open(sealed(receipt()).as_bytes(), Some(&receipt().id), check);
        assert_eq!(opened.verdict, Verdict::Signed("SHA256:x".to_owned()));
        assert_eq!(opened.receipt.unwrap(), Receipt { schema: SCHEMA, ..receipt() });
        let opened = open(seal(receipt(), |_| None).as_bytes(), None, check);
        assert_eq!(opened.verdict, Verdict::Unsigned);
        let opened = open(sealed(receipt()).as_bytes(), Some("other"), check);
        assert_eq!(opened.verdict.word(), "altered");
    }

    #[test]
    fn one_with_too_much_is_cut_and_says_so() {
        let volume = |place: usize| Volume {
            mount_point: format!("/{place}{}", "\"ä".repeat(300)),
            ..Volume::default()
        };
        let other = |place: usize| NotFrozen { mount_point: format!("/{place}"), ..NotFrozen::default() };
        let full = Receipt {
            volumes: (0..300).map(volume).collect(),
            not_frozen: (0..300).map(other).collect(),
            hooks: vec!["\"".repeat(1000); 300],
            reasons: vec!["\"".repeat(1000); 300],
            ..receipt()
        };
        let envelope = sealed(full);
        assert!(envelope.len() <= MOST_BYTES, "{}", envelope.len());
        let opened = open(envelope.as_bytes(), None, check);
        assert_eq!(opened.verdict.word(), "signed");
        let receipt = opened.receipt.unwrap();
        assert!(receipt.left_out > 100 && !receipt.volumes.is_empty(), "{}", receipt.left_out);
    }

    proptest! {
        #[test]
        fn whatever_is_changed_in_a_signed_one_is_noticed(place: prop::sample::Index, byte: u8) {
            let envelope = sealed(receipt()).into_bytes();
            let mut changed = envelope.clone();
            let place = place.index(changed.len());
            changed[place] = byte;
            let opened = open(&changed, None, check);
            if let Verdict::Signed(_) = opened.verdict {
                // The change was in white space, or in another spelling of the same text.
                prop_assert_eq!(opened.receipt, open(&envelope, None, check).receipt);
            } else if changed != envelope {
                prop_assert_ne!(opened.verdict.word(), "signed");
            }
        }

        #[test]
        fn whatever_bytes_there_are_are_read(bytes: Vec<u8>) {
            let opened = open(&bytes, None, check);
            prop_assert_eq!(opened.verdict.word(), "unreadable");
        }

        #[test]
        fn whatever_a_document_says_is_read(document in "\\PC{0,200}", signature in "\\PC{0,40}") {
            let envelope = serde_json::json!({
                "guestlet-receipt": 1, "document": document, "key": "key", "signature": signature,
            });
            let opened = open(envelope.to_string().as_bytes(), None, check);
            prop_assert_ne!(opened.verdict.word(), "signed");
        }
    }
}
