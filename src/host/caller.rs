//! Identity of a caller, as it is passed to guests and written to the audit log: a user of this host, or a guest.
//! To add a kind: its variant, and its text form.

use std::fmt::{self, Write as _};
use std::sync::Arc;

use tonic::Request;
use tonic::metadata::AsciiMetadataValue;

/// Metadata key of a call to a guest that names the caller; absent if the host half itself is the caller.
const CALLER: &str = "guestlet-caller";
/// Metadata key of a call to a guest with the identifier of the call that it is part of.
const AUDIT_ID: &str = "guestlet-audit-id";

/// Caller of an operation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Caller {
    /// User of this host, connected to the socket of the admin API.
    User {
        /// User ID, as certified by the kernel.
        uid: u32,
        /// Login name, if the name service knows one.
        name: Option<String>,
    },
    /// Guest of the VM with this name.
    Guest(String),
    /// Caller that another program of guestlet has identified, in that program's words.
    Told(String),
}

impl fmt::Display for Caller {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::User { uid, name: Some(name) } => write!(formatter, "uid:{uid} {name}"),
            Self::User { uid, name: None } => write!(formatter, "uid:{uid}"),
            Self::Guest(vm) => write!(formatter, "vm:{vm}"),
            Self::Told(words) => formatter.write_str(words),
        }
    }
}

/// Caller on whose behalf something is done, and the identifier of its call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Behalf(Arc<(Caller, String)>);

/// Limit on the bytes of a word from another program; higher than for any word that this program sends.
const LONGEST_WORD: usize = 1024;

impl Behalf {
    /// Creates the behalf of a caller, with a new identifier for its call.
    pub fn of(caller: Caller) -> Self {
        Self(Arc::new((caller, format!("{:032x}", fastrand::u128(..)))))
    }

    /// Builds the caller and the call's identifier from the words of another program of guestlet. Returns `None` if
    /// they are malformed.
    pub fn told(caller: String, id: String) -> Option<Self> {
        let is_word =
            |word: &str| !word.is_empty() && word.len() <= LONGEST_WORD && !word.contains(char::is_control);
        let is_id = is_word(&id) && id.bytes().all(|byte| byte.is_ascii_hexdigit());
        (is_word(&caller) && is_id).then(|| Self(Arc::new((Caller::Told(caller), id))))
    }

    /// Returns the caller.
    pub fn caller(&self) -> &Caller {
        &self.0.0
    }

    /// Returns the identifier of the call, which links the records of host and guest: 32 hexadecimal digits.
    pub fn id(&self) -> &str {
        &self.0.1
    }

    /// Wraps a request to a guest, with the caller and the call's identifier as metadata.
    pub fn state<T>(&self, request: T) -> Request<T> {
        let mut request = Request::new(request);
        let metadata = request.metadata_mut();
        for (key, value) in [(CALLER, encode(&self.caller().to_string())), (AUDIT_ID, self.id().to_owned())] {
            // The conversion cannot fail: all other bytes have been percent-encoded.
            if let Ok(value) = AsciiMetadataValue::try_from(value) {
                metadata.insert(key, value);
            }
        }
        request
    }
}

/// Percent-encodes each byte that is not printable ASCII, and `%` itself.
fn encode(text: &str) -> String {
    let mut encoded = String::with_capacity(text.len());
    for byte in text.bytes() {
        if (b' '..=b'~').contains(&byte) && byte != b'%' {
            encoded.push(byte.into());
        } else {
            // Writing to a String cannot fail.
            let _ = write!(encoded, "%{byte:02X}");
        }
    }
    encoded
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn user(uid: u32, name: Option<&str>) -> Caller {
        Caller::User { uid, name: name.map(str::to_owned) }
    }

    #[test]
    fn a_guest_is_told_who_asks_and_as_part_of_what() {
        let behalf = Behalf::of(user(1000, Some("jürgen 100%")));
        let request = behalf.state(());
        assert_eq!(request.metadata().get(CALLER).unwrap(), "uid:1000 j%C3%BCrgen 100%25");
        assert_eq!(request.metadata().get(AUDIT_ID).unwrap(), behalf.id());
        assert!(behalf.id().len() == 32 && behalf.id().bytes().all(|one| one.is_ascii_hexdigit()));
        assert_ne!(behalf.id(), Behalf::of(user(1000, None)).id());
        let written = [user(7, None), Caller::Guest("web-1".into())].map(|caller| caller.to_string());
        assert_eq!(written, ["uid:7", "vm:web-1"]);
    }

    proptest! {
        #[test]
        fn any_name_can_be_told(name in ".{0,40}") {
            let request = Behalf::of(user(1, Some(&name))).state(());
            let told = request.metadata().get(CALLER).unwrap().to_str().unwrap().to_owned();
            let (mut bytes, mut rest) = (Vec::new(), told.bytes());
            while let Some(byte) = rest.next() {
                if byte != b'%' {
                    bytes.push(byte);
                    continue;
                }
                let digits = [rest.next().unwrap(), rest.next().unwrap()];
                bytes.push(u8::from_str_radix(std::str::from_utf8(&digits).unwrap(), 16).unwrap());
            }
            prop_assert_eq!(String::from_utf8(bytes).unwrap(), format!("uid:1 {name}"));
        }
    }
}
