//! Ed25519 keys (RFC 8410), in files and in memory.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use base64_simd::STANDARD;
use ring::rand::{SecureRandom as _, SystemRandom};
use ring::signature::{ED25519, Ed25519KeyPair, KeyPair as _, UnparsedPublicKey};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use crate::sys::files;
use crate::trust::Fingerprint;
use crate::trust::pem;
use crate::trust::public_key::{self, NotAPublicKey};

/// DER prefix of a private key in PKCS #8, before its 32 bytes.
const PRIVATE_PREFIX: [u8; 16] =
    [0x30, 0x2e, 0x02, 0x01, 0x00, 0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70, 0x04, 0x22, 0x04, 0x20];
/// Prefix of a public key in text, before its Base64.
pub(super) const WORD: &str = "ed25519:";
/// Bytes of a file with a key.
const MAX_FILE: u64 = 16 * 1024;

/// An Ed25519 public key, as its `SubjectPublicKeyInfo` in DER.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PublicKey([u8; public_key::LENGTH]);

impl PublicKey {
    /// The key in a `SubjectPublicKeyInfo`.
    ///
    /// # Errors
    /// If that is not one of Ed25519, or a weak one.
    pub fn from_spki(spki: &[u8]) -> Result<Self, NotAPublicKey> {
        public_key::ed25519(spki).map(Self)
    }

    /// The `SubjectPublicKeyInfo` in DER.
    pub fn spki(&self) -> &[u8; public_key::LENGTH] {
        &self.0
    }

    /// Returns the fingerprint of the key.
    pub fn fingerprint(&self) -> Fingerprint {
        Fingerprint::of(&self.0)
    }

    /// Returns whether `signature` over `message` was made with the private half of this key.
    pub fn has_signed(&self, message: &[u8], signature: &[u8]) -> bool {
        let raw = self.0.get(public_key::HEAD.len()..).unwrap_or_default();
        UnparsedPublicKey::new(&ED25519, raw).verify(message, signature).is_ok()
    }
}

/// `ed25519:` and the Base64 of the `SubjectPublicKeyInfo`, as lines of keys have it.
impl fmt::Display for PublicKey {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{WORD}{}", STANDARD.encode_to_string(self.0))
    }
}

impl fmt::Debug for PublicKey {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.fingerprint(), formatter)
    }
}

/// Error for a text that is not a public key.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("it is not a public key; write it as ed25519: and 60 characters of Base64")]
pub struct NotAKey;

impl FromStr for PublicKey {
    type Err = NotAKey;

    fn from_str(text: &str) -> Result<Self, NotAKey> {
        let encoded = text.strip_prefix(WORD).ok_or(NotAKey)?;
        let spki = STANDARD.decode_to_vec(encoded).map_err(|_| NotAKey)?;
        Self::from_spki(&spki).map_err(|_| NotAKey)
    }
}

/// Serialized in the same form as in text.
impl Serialize for PublicKey {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for PublicKey {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
    }
}

/// The name of the key, as lines of keys have it, if its private half has made `signature` over `message`.
pub fn signer(key: &str, message: &[u8], signature: &[u8]) -> Option<Fingerprint> {
    let key: PublicKey = key.parse().ok()?;
    key.has_signed(message, signature).then(|| key.fingerprint())
}

/// Reason why there is no usable private key, or why it cannot be replaced.
#[derive(Debug, thiserror::Error)]
pub enum KeyError {
    /// The kernel gives no random bytes.
    #[error("the kernel provides no random bytes")]
    Random,
    /// The file is damaged, or has a key of another kind.
    #[error("{0} has no Ed25519 private key in PKCS #8 (PEM)")]
    NotAKey(PathBuf),
    /// File that users other than its owner can read.
    #[error(
        "{0} is readable by users other than its owner; fix that (chmod 600), and replace the key if anybody may have read it"
    )]
    Exposed(PathBuf),
    /// Key that this host half may not replace.
    #[error(
        "a key can be replaced only by a host half whose own key this guest was given, and only with one that \
         it has announced"
    )]
    NotReplaceable,
    /// Root in the guest has taken its key away meanwhile.
    #[error("this guest no longer accepts the host half that asks for this")]
    NoLongerTrusted,
    /// Fingerprint that does not belong to the next key.
    #[error("there is no next key {0}")]
    NoSuchKey(Fingerprint),
    /// File that cannot be written, because file systems are frozen.
    #[error("cannot write {0}: file systems are frozen now")]
    Frozen(PathBuf),
    /// Error of the operating system.
    #[error("cannot {what} {path}")]
    Io {
        /// Operation that failed: "read", "write" or "remove".
        what: &'static str,
        /// Path of the file.
        path: PathBuf,
        /// Cause of the failure.
        source: io::Error,
    },
}

/// An Ed25519 key pair. Its private half is never shown.
pub struct Key {
    pkcs8: Vec<u8>,
    public: PublicKey,
}

impl fmt::Debug for Key {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_tuple("Key").field(&self.public).finish()
    }
}

impl Key {
    /// Makes a new one.
    ///
    /// # Errors
    /// If the kernel gives no random bytes.
    pub fn generate() -> Result<Self, KeyError> {
        let mut seed = [0; 32];
        SystemRandom::new().fill(&mut seed).map_err(|_| KeyError::Random)?;
        Self::from_pkcs8([&PRIVATE_PREFIX[..], &seed].concat()).ok_or(KeyError::Random)
    }

    fn from_pkcs8(pkcs8: Vec<u8>) -> Option<Self> {
        let pair = Ed25519KeyPair::from_pkcs8_maybe_unchecked(&pkcs8).ok()?;
        let public =
            PublicKey::from_spki(&[&public_key::HEAD[..], pair.public_key().as_ref()].concat()).ok()?;
        Some(Self { pkcs8, public })
    }

    /// Returns the public half.
    pub fn public(&self) -> PublicKey {
        self.public
    }

    /// Signs a message; `None` if the key cannot be used.
    pub fn sign(&self, message: &[u8]) -> Option<Vec<u8>> {
        let pair = Ed25519KeyPair::from_pkcs8_maybe_unchecked(&self.pkcs8).ok()?;
        Some(pair.sign(message).as_ref().to_vec())
    }

    /// The private half in PKCS #8.
    pub fn pkcs8(&self) -> PrivatePkcs8KeyDer<'_> {
        PrivatePkcs8KeyDer::from(self.pkcs8.as_slice())
    }

    /// Reads one from a file, PEM; `None` if there is no such file. Blocks.
    ///
    /// # Errors
    /// If the file cannot be read, has something else, or can be read by everybody.
    pub fn load(path: &Path) -> Result<Option<Self>, KeyError> {
        use std::os::unix::fs::PermissionsExt as _;

        let io = |source| KeyError::Io { what: "read", path: path.to_owned(), source };
        let Some(bytes) = files::read_at_most(path, MAX_FILE).map_err(io)? else {
            // A dangling link does not mean that there is no key: the disk that it points to may be missing.
            return match files::dangling(path) {
                Some(link) => {
                    Err(io(io::Error::other(format!("{} is a dangling symbolic link", link.display()))))
                }
                None => Ok(None),
            };
        };
        let mode = std::fs::metadata(path).map_err(io)?.permissions().mode();
        if mode & 0o077 != 0 {
            return Err(KeyError::Exposed(path.to_owned()));
        }
        let key = match PrivateKeyDer::from_pem_slice(&bytes) {
            Ok(PrivateKeyDer::Pkcs8(der)) => Self::from_pkcs8(der.secret_pkcs8_der().to_vec()),
            _ => None,
        };
        key.map(Some).ok_or_else(|| KeyError::NotAKey(path.to_owned()))
    }

    /// Writes it to a file, PEM, for the process's own user only; it is on the disk when this returns. Blocks.
    ///
    /// # Errors
    /// If the file cannot be written; the one before is as it was.
    pub fn save(&self, path: &Path) -> Result<(), KeyError> {
        let text = pem::encode(pem::PRIVATE_KEY, &self.pkcs8);
        files::replace_synced(path, text.as_bytes()).map_err(|source| KeyError::Io {
            what: "write",
            path: path.to_owned(),
            source,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn a_key_is_read_as_it_was_saved_and_nobody_else_can_read_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("key");
        assert!(Key::load(&path).unwrap().is_none());
        let key = Key::generate().unwrap();
        key.save(&path).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(Key::load(&path).unwrap().unwrap().public(), key.public());
        assert!(!format!("{key:?}").contains("pkcs8"));
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o640)).unwrap();
        assert!(matches!(Key::load(&path), Err(KeyError::Exposed(_))));
    }

    /// openssl genpkey -algorithm ed25519; openssl pkey -pubout -outform DER | base64
    #[test]
    #[allow(clippy::disallowed_methods)]
    fn keys_of_openssl_are_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("key");
        let text = "-----BEGIN PRIVATE KEY-----\nMC4CAQAwBQYDK2VwBCIEIKwUvq2q+6sXhlg/dyUBHkRLvYY8cdE4W6OOGfVJSMqx\n-----END PRIVATE KEY-----\n";
        std::fs::write(&path, text).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
        assert_eq!(
            Key::load(&path).unwrap().unwrap().public().to_string(),
            "ed25519:MCowBQYDK2VwAyEAcuHX3aaVsbQygH5vGG1ph7N3I6kp84R4mW38YFMiq4Q="
        );
    }

    #[test]
    #[allow(clippy::disallowed_methods)]
    fn what_is_no_key_is_refused_with_its_place() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("key");
        for text in ["", "hello", "-----BEGIN PRIVATE KEY-----\nMC4C\n-----END PRIVATE KEY-----\n"] {
            std::fs::write(&path, text).unwrap();
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
            let error = Key::load(&path).unwrap_err().to_string();
            assert!(error.contains(path.to_str().unwrap()), "{error}");
        }
    }

    #[test]
    fn a_signature_is_of_one_key_and_one_message() {
        let key = Key::generate().unwrap();
        let signature = key.sign(b"message").unwrap();
        assert!(key.public().has_signed(b"message", &signature));
        assert!(!key.public().has_signed(b"massage", &signature));
        assert!(!key.public().has_signed(b"message", &signature[1..]));
        assert!(!Key::generate().unwrap().public().has_signed(b"message", &signature));
    }

    #[test]
    fn a_public_key_is_read_as_it_is_written() {
        let public = Key::generate().unwrap().public();
        assert_eq!(public.to_string().parse(), Ok(public));
        for wrong in ["", "ed25519:", "ed25519:AAAA", "rsa:AAAA"] {
            assert_eq!(wrong.parse::<PublicKey>(), Err(NotAKey), "{wrong}");
        }
    }
}
