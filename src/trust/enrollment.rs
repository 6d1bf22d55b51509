//! The proof of a guest at its first contact that it is the one which was set up for a VM: by a token that only its owner and
//! the host half know, and bound to this very connection, so that nobody in the middle can pass it on.

use std::fmt;
use std::str::FromStr;

use ring::hmac;
use ring::rand::{SecureRandom as _, SystemRandom};

use crate::trust::tls::BINDING;

/// Bytes of a token.
const LENGTH: usize = 16;

/// A token, used once. Never shown in logs.
#[derive(Clone, PartialEq, Eq)]
pub struct Token([u8; LENGTH]);

impl fmt::Debug for Token {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Token(…)")
    }
}

/// Error for a text that is not a token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("it is not a token, which has 32 hexadecimal digits; guestctl trust bootstrap --token prints one")]
pub struct NotAToken;

impl FromStr for Token {
    type Err = NotAToken;

    fn from_str(text: &str) -> Result<Self, NotAToken> {
        let digits = text.trim_ascii();
        if digits.len() != 2 * LENGTH || !digits.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return Err(NotAToken);
        }
        u128::from_str_radix(digits, 16).map(|number| Self(number.to_be_bytes())).map_err(|_| NotAToken)
    }
}

#[cfg(test)]
impl From<[u8; LENGTH]> for Token {
    fn from(bytes: [u8; LENGTH]) -> Self {
        Self(bytes)
    }
}

impl Token {
    /// Makes a new one; `None` if the kernel gives no random bytes.
    pub fn generate() -> Option<Self> {
        let mut bytes = [0; LENGTH];
        SystemRandom::new().fill(&mut bytes).ok()?;
        Some(Self(bytes))
    }

    /// Returns the digits of the token, for the configuration of the guest.
    pub fn reveal(&self) -> String {
        format!("{:032x}", u128::from_be_bytes(self.0))
    }

    /// Returns the proof that this end of the connection has the token: an HMAC over the secret of the connection.
    pub fn proof(&self, binding: &[u8; BINDING]) -> Vec<u8> {
        hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, &self.0), binding).as_ref().to_vec()
    }

    /// Returns whether `proof` is valid for this token and connection.
    pub fn is_proved(&self, binding: &[u8; BINDING], proof: &[u8]) -> bool {
        hmac::verify(&hmac::Key::new(hmac::HMAC_SHA256, &self.0), binding, proof).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_token_proves_itself_and_only_on_one_connection() {
        let (token, other) = (Token::generate().unwrap(), Token::generate().unwrap());
        let proof = token.proof(&[1; BINDING]);
        assert!(token.is_proved(&[1; BINDING], &proof));
        assert!(!token.is_proved(&[2; BINDING], &proof));
        assert!(!other.is_proved(&[1; BINDING], &proof));
        assert!(!token.is_proved(&[1; BINDING], &proof[1..]));
    }

    #[test]
    fn a_token_is_read_as_it_is_written_and_is_not_shown_by_accident() {
        let token: Token = "00112233445566778899aabbccddeeff\n".parse().unwrap();
        assert_eq!(token.reveal(), "00112233445566778899aabbccddeeff");
        assert_eq!(format!("{token:?}"), "Token(…)");
        for wrong in ["", "0011", "00112233445566778899aabbccddeefg", "+0112233445566778899aabbccddeeff"] {
            assert_eq!(wrong.parse::<Token>(), Err(NotAToken), "{wrong}");
        }
    }
}
