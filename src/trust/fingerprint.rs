//! Names of public keys.

use std::fmt;
use std::str::FromStr;

use base64_simd::STANDARD_NO_PAD;
use ring::digest;

/// Prefix of the digest, as ssh-keygen(1) prints it.
const PREFIX: &str = "SHA256:";

/// The SHA-256 digest of a public key's `SubjectPublicKeyInfo` (RFC 5280) in DER, by which people and settings name the key:
/// `SHA256:` and Base64 without padding.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Fingerprint([u8; 32]);

impl Fingerprint {
    /// Names the key with this `SubjectPublicKeyInfo`.
    pub fn of(public_key: &[u8]) -> Self {
        let mut bytes = [0; 32];
        bytes.copy_from_slice(digest::digest(&digest::SHA256, public_key).as_ref());
        Self(bytes)
    }
}

impl fmt::Display for Fingerprint {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{PREFIX}{}", STANDARD_NO_PAD.encode_to_string(self.0))
    }
}

impl fmt::Debug for Fingerprint {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, formatter)
    }
}

/// Error for a text that is not a fingerprint.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is not a fingerprint; write it as SHA256:… with 43 characters of Base64, as guestctl trust ls prints it"
)]
pub struct NotAFingerprint(String);

impl FromStr for Fingerprint {
    type Err = NotAFingerprint;

    fn from_str(text: &str) -> Result<Self, NotAFingerprint> {
        let wrong = || NotAFingerprint(text.chars().take(80).collect());
        let digest = text.strip_prefix(PREFIX).ok_or_else(wrong)?;
        let bytes = STANDARD_NO_PAD.decode_to_vec(digest).map_err(|_| wrong())?;
        Ok(Self(bytes.try_into().map_err(|_| wrong())?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fingerprint_is_read_as_it_is_written() {
        let fingerprint = Fingerprint::of(b"key");
        let text = fingerprint.to_string();
        // printf key | openssl dgst -sha256 -binary | base64
        assert_eq!(text, "SHA256:LHDhK3oGRvkiefQnx7OOczTY5Tic/xZ6HcMOc/gmtoM");
        assert_eq!(text.parse(), Ok(fingerprint));
    }

    #[test]
    fn what_is_no_fingerprint_is_refused() {
        let right = Fingerprint::of(b"key").to_string();
        for wrong in
            ["", "SHA256:", "SHA256:AAAA", &right[1..], &right[..right.len() - 1], &format!("{right}A")]
        {
            let error = wrong.parse::<Fingerprint>().unwrap_err().to_string();
            assert!(error.contains("is not a fingerprint"), "{wrong:?}: {error}");
        }
    }
}
