//! DER encoding of an Ed25519 public key, and recognition of other data that users paste in its place.

/// Bytes of the `SubjectPublicKeyInfo` (RFC 8410) of an Ed25519 key.
pub const LENGTH: usize = 44;

/// DER prefix before the key itself: a sequence, the algorithm 1.3.101.112 without parameters, and a bit
/// string of 33 bytes whose first byte says that no bits are unused.
pub(super) const HEAD: [u8; 12] = [0x30, 0x2a, 0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70, 0x03, 0x21, 0x00];

const INTEGER: u8 = 0x02;
const OBJECT_IDENTIFIER: u8 = 0x06;
const SEQUENCE: u8 = 0x30;

/// The algorithms of other keys that tools make, by the bytes of their object identifiers.
const OTHER_ALGORITHMS: [(&[u8], &str); 8] = [
    (&[0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 0x01, 0x01, 0x01], "RSA"),
    (&[0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 0x01, 0x01, 0x0a], "RSASSA-PSS"),
    (&[0x2a, 0x86, 0x48, 0xce, 0x3d, 0x02, 0x01], "ECDSA"),
    (&[0x2a, 0x86, 0x48, 0xce, 0x38, 0x04, 0x01], "DSA"),
    (&[0x2b, 0x65, 0x6e], "X25519"),
    (&[0x2b, 0x65, 0x6f], "X448"),
    (&[0x2b, 0x65, 0x71], "Ed448"),
    (&[0x60, 0x86, 0x48, 0x01, 0x65, 0x03, 0x04, 0x03], "ML-DSA or SLH-DSA"),
];

/// The y coordinates of the points of small order, also in the two spellings that RFC 8032 forbids. Whoever knows no private
/// key at all can make signatures that such a "key" verifies; the first is also what a placeholder of zeros comes to.
const SMALL_ORDER: [[u8; 32]; 7] = [
    [0; 32],
    spelled(0x01, 0x00, 0x00),
    spelled(0xec, 0xff, 0x7f),
    spelled(0xed, 0xff, 0x7f),
    spelled(0xee, 0xff, 0x7f),
    [
        0x26, 0xe8, 0x95, 0x8f, 0xc2, 0xb2, 0x27, 0xb0, 0x45, 0xc3, 0xf4, 0x89, 0xf2, 0xef, 0x98, 0xf0, 0xd5,
        0xdf, 0xac, 0x05, 0xd3, 0xc6, 0x33, 0x39, 0xb1, 0x38, 0x02, 0x88, 0x6d, 0x53, 0xfc, 0x05,
    ],
    [
        0xc7, 0x17, 0x6a, 0x70, 0x3d, 0x4d, 0xd8, 0x4f, 0xba, 0x3c, 0x0b, 0x76, 0x0d, 0x10, 0x67, 0x0f, 0x2a,
        0x20, 0x53, 0xfa, 0x2c, 0x39, 0xcc, 0xc6, 0x4e, 0xc7, 0xfd, 0x77, 0x92, 0xac, 0x03, 0x7a,
    ],
];

const fn spelled(first: u8, middle: u8, last: u8) -> [u8; 32] {
    let mut bytes = [middle; 32];
    bytes[0] = first;
    bytes[31] = last;
    bytes
}

/// Reason why bytes are not an Ed25519 public key. It contains none of the bytes, because they may be a
/// secret.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NotAPublicKey {
    /// A private key, in PKCS#8 or as OpenSSL writes those of one algorithm.
    #[error(
        "this is a private key, which must stay secret: discard it, generate a new one, and write its public key here"
    )]
    Private,
    /// A key for something else.
    #[error("the key is for {0}; only Ed25519 keys are accepted")]
    OtherAlgorithm(&'static str),
    /// Fewer bytes than the first of them promise.
    #[error("the key is cut off: it has {has} of {promised} bytes; copy the whole line again")]
    Truncated {
        /// Bytes that there are.
        has: usize,
        /// Bytes that there would be.
        promised: usize,
    },
    /// The 32 bytes of a key without what says which algorithm they are for.
    #[error(
        "these are 32 bytes without the name of an algorithm; write the DER SubjectPublicKeyInfo, 44 bytes, as `openssl pkey -pubout -outform DER` does"
    )]
    Bare,
    /// Point that verifies signatures which no private key has made, such as a placeholder of zeros.
    #[error("this key is weak: anybody can forge its signatures")]
    Weak,
    /// Unrecognized data.
    #[error("this is not an Ed25519 public key (the DER SubjectPublicKeyInfo of RFC 8410, 44 bytes)")]
    Unknown,
}

/// Takes the `SubjectPublicKeyInfo` of an Ed25519 key, and nothing else.
///
/// # Errors
/// If the bytes are something else, with what they seem to be.
pub fn ed25519(der: &[u8]) -> Result<[u8; LENGTH], NotAPublicKey> {
    match <[u8; LENGTH]>::try_from(der) {
        Ok(whole) if whole.starts_with(&HEAD) => {
            let mut y = [0; 32];
            y.copy_from_slice(&whole[HEAD.len()..]);
            // The highest bit is the sign of x.
            y[31] &= 0x7f;
            if SMALL_ORDER.contains(&y) { Err(NotAPublicKey::Weak) } else { Ok(whole) }
        }
        _ => Err(something_else(der)),
    }
}

fn something_else(der: &[u8]) -> NotAPublicKey {
    let Some(outer) = Value::first(der).filter(|value| value.tag == SEQUENCE) else {
        return if der.len() == LENGTH - HEAD.len() { NotAPublicKey::Bare } else { NotAPublicKey::Unknown };
    };
    // Every form of a private key begins with its version, and a public key with its algorithm.
    let Some(first) = Value::first(outer.contents) else { return NotAPublicKey::Unknown };
    if first.tag == INTEGER {
        return NotAPublicKey::Private;
    }
    if let Some(name) = other_algorithm(&first) {
        return NotAPublicKey::OtherAlgorithm(name);
    }
    let promised = outer.head + outer.length;
    if promised > der.len() {
        return NotAPublicKey::Truncated { has: der.len(), promised };
    }
    NotAPublicKey::Unknown
}

/// The algorithm that a `SubjectPublicKeyInfo` begins with, if it is a known one other than Ed25519.
fn other_algorithm(algorithm: &Value<'_>) -> Option<&'static str> {
    let identifier = Value::first(algorithm.contents)?;
    let named = algorithm.tag == SEQUENCE && identifier.tag == OBJECT_IDENTIFIER;
    OTHER_ALGORITHMS
        .into_iter()
        .find(|(bytes, _)| named && identifier.contents.starts_with(bytes))
        .map(|(_, name)| name)
}

/// The beginning of a DER value.
struct Value<'a> {
    tag: u8,
    /// Bytes before the contents.
    head: usize,
    /// Bytes that the contents should have.
    length: usize,
    /// Contents that are present, which may be shorter.
    contents: &'a [u8],
}

impl<'a> Value<'a> {
    /// Parses the value that `bytes` begin with; `None` if its length is incomplete, or is more than 64 KiB.
    fn first(bytes: &'a [u8]) -> Option<Self> {
        let (head, length) = match bytes {
            [_, length @ ..=0x7f, ..] => (2, usize::from(*length)),
            [_, 0x81, length, ..] => (3, usize::from(*length)),
            [_, 0x82, high, low, ..] => (4, usize::from(u16::from_be_bytes([*high, *low]))),
            _ => return None,
        };
        let rest = bytes.get(head..)?;
        Some(Self { tag: *bytes.first()?, head, length, contents: &rest[..length.min(rest.len())] })
    }
}

#[cfg(test)]
mod tests {
    use base64_simd::STANDARD;
    use proptest::prelude::*;

    use super::*;

    /// `openssl genpkey -algorithm ed25519 | openssl pkey -pubout`
    const PUBLIC: &str = "MCowBQYDK2VwAyEAa72vA2BgKOo5TFtkXTTR/kXMl5gcR0rtF7JG5i0kFGk=";

    fn decoded(text: &str) -> Vec<u8> {
        STANDARD.decode_to_vec(text).unwrap()
    }

    #[test]
    fn a_key_as_openssl_writes_it() {
        let der = decoded(PUBLIC);
        assert_eq!(ed25519(&der).unwrap().as_slice(), der);
    }

    #[test]
    fn what_is_none_is_named() {
        let whole = decoded(PUBLIC);
        let truncated = |has| NotAPublicKey::Truncated { has, promised: 44 };
        for (name, der, expected) in [
            (
                "PKCS#8",
                decoded("MC4CAQAwBQYDK2VwBCIEIBZBOhk6citXRfIysGfV6lrU6rTMdaSAQJc2xNbazkxZ"),
                NotAPublicKey::Private,
            ),
            (
                "X25519",
                decoded("MCowBQYDK2VuAyEAY6qHqFUxIc6pkef7iOKK6jtgmXw0f1ZgGJNsO723nhQ="),
                NotAPublicKey::OtherAlgorithm("X25519"),
            ),
            (
                "P-256",
                decoded(
                    "MFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAEkcP00YwZOHxL0NSpbY1gUEg0KvEqb5ZiNuYVADRZnoiLPhiGbgVY7KAUuR/cNMyeN0ds0qedXVLaALF/Jo9qig==",
                ),
                NotAPublicKey::OtherAlgorithm("ECDSA"),
            ),
            (
                "Ed448",
                decoded(
                    "MEMwBQYDK2VxAzoA/aFOH+2l2H8TtdpH6xc7e9fIpdaOs6ZHjv8eIJ9c5j5F6lLe3P9Sjuk21m6xR+98y1WgFNAUT30A",
                ),
                NotAPublicKey::OtherAlgorithm("Ed448"),
            ),
            (
                "the beginning of RSA",
                decoded("MIGfMA0GCSqGSIb3DQEBAQUAA4GNADCBiQKB"),
                NotAPublicKey::OtherAlgorithm("RSA"),
            ),
            ("cut off by one", whole[..43].to_vec(), truncated(43)),
            ("cut off in the key", whole[..20].to_vec(), truncated(20)),
            ("one too many", [whole.as_slice(), &[0]].concat(), NotAPublicKey::Unknown),
            ("without its algorithm", whole[12..].to_vec(), NotAPublicKey::Bare),
            ("nothing", Vec::new(), NotAPublicKey::Unknown),
            ("text", b"-----BEGIN PUBLIC KEY-----".to_vec(), NotAPublicKey::Unknown),
        ] {
            assert_eq!(ed25519(&der), Err(expected), "{name}");
        }
    }

    #[test]
    fn a_key_that_anybody_can_sign_for_is_none() {
        for y in SMALL_ORDER {
            for sign in [0, 0x80] {
                let mut der = [HEAD.as_slice(), &y].concat();
                der[43] |= sign;
                assert_eq!(ed25519(&der), Err(NotAPublicKey::Weak), "{der:x?}");
            }
        }
    }

    proptest! {
        #[test]
        fn any_bytes_will_do(bytes: Vec<u8>) {
            prop_assert!(ed25519(&bytes).is_err());
        }

        #[test]
        fn what_looks_like_der_will_do(bytes in prop::collection::vec(
            prop::sample::select(vec![0, 1, 2, 3, 6, 0x2a, 0x2b, 0x30, 0x65, 0x70, 0x7f, 0x80, 0x81, 0x82, 0xff]), 0..64,
        )) {
            prop_assert!(ed25519(&bytes).is_err());
        }
    }
}
