//! Bytes in JSON: base64, as QGA has them.

use std::borrow::Cow;

use base64_simd::STANDARD;
use serde_json::value::RawValue;

use crate::qga::arguments::{Refused, Value};

/// The text of some bytes.
pub fn encode(bytes: &[u8]) -> Vec<u8> {
    STANDARD.encode_type(bytes)
}

/// An argument in base64. White space in it and missing padding do no harm.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Base64(pub Vec<u8>);

impl Value<'_> for Base64 {
    fn read(value: &RawValue) -> Result<Self, Refused> {
        // Nearly always it is as it should be, and JSON has changed nothing of it.
        let plain = value.get().strip_prefix('"').and_then(|text| text.strip_suffix('"'));
        if let Some(bytes) = plain.and_then(|text| STANDARD.decode_to_vec(text).ok()) {
            return Ok(Self(bytes));
        }
        let text = <Cow<'_, str>>::read(value)?;
        base64_simd::forgiving_decode_to_vec(text.as_bytes())
            .map(Self)
            .map_err(|_| Refused::expected("a string in base64"))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn read(text: &str) -> Result<Vec<u8>, Refused> {
        let value = RawValue::from_string(serde_json::to_string(text).unwrap()).unwrap();
        Base64::read(&value).map(|Base64(bytes)| bytes)
    }

    #[test]
    fn texts() {
        for (text, bytes) in [
            ("", &b""[..]),
            ("aGVsbG8=", b"hello"),
            ("aGVsbG8", b"hello"),
            ("aGVs\nbG8=\n", b"hello"),
            ("aGVs\r\n bG8=", b"hello"),
            ("QR==", b"A"),
            ("/+8=", b"\xff\xef"),
        ] {
            assert_eq!(read(text).as_deref(), Ok(bytes), "{text:?}");
        }
        for text in ["Q", "QQ=Q", "====", "QQ==QQ==", "!!!!", "aGVsbG8é", "-_8=", "QQ=\0"] {
            assert!(read(text).is_err(), "{text:?}");
        }
        let escaped = RawValue::from_string(r#""\/+8=\u000a""#.to_owned()).unwrap();
        assert_eq!(Base64::read(&escaped), Ok(Base64(b"\xff\xef".to_vec())));
        let number = RawValue::from_string("1234".to_owned()).unwrap();
        assert_eq!(Base64::read(&number).unwrap_err().expected, "a string");
    }

    /// As the definition has it, RFC 4648: six bits each, the first ones first.
    fn simple(bytes: &[u8]) -> String {
        const LETTERS: &[u8] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
        let mut text = String::new();
        for three in bytes.chunks(3) {
            let word =
                three.iter().fold(0, |word, byte| word << 8 | u32::from(*byte)) << (8 * (3 - three.len()));
            for place in 0..4 {
                let letter = LETTERS[(word >> (18 - 6 * place)) as usize & 63];
                text.push(if place <= three.len() { letter.into() } else { '=' });
            }
        }
        text
    }

    proptest! {
        #[test]
        fn any_bytes_come_back(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let text = String::from_utf8(encode(&bytes)).unwrap();
            prop_assert_eq!(&text, &simple(&bytes));
            prop_assert_eq!(read(&text), Ok(bytes));
        }

        #[test]
        fn one_wrong_letter_anywhere_is_found(
            bytes in proptest::collection::vec(any::<u8>(), 3..300),
            place: proptest::sample::Index,
            wrong in proptest::sample::select(&b"!\"#$%&'()*,-.:;<>?@[\\]^_`{|}~\x01\x7f"[..]),
        ) {
            let mut text = encode(&bytes);
            let place = place.index(text.len());
            text[place] = wrong;
            prop_assert!(read(std::str::from_utf8(&text).unwrap()).is_err());
        }
    }
}
