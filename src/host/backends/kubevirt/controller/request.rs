//! Certification request of a node (PKCS #10, RFC 2986): its public key, and the proof that it has the private
//! key.

use rcgen::{PKCS_ECDSA_P256_SHA256, PublicKeyData, SignatureAlgorithm};
use ring::signature::{ECDSA_P256_SHA256_ASN1, UnparsedPublicKey};
use x509_parser::certification_request::X509CertificationRequest;
use x509_parser::oid_registry::OID_SIG_ECDSA_WITH_SHA256;
use x509_parser::prelude::FromDer as _;

/// Maximum length of a request in bytes; those of nodes have some 200.
const LONGEST: usize = 4096;
/// Length in bytes of an encoded point on P-256: one byte for the form, and two coordinates.
const POINT: usize = 65;
/// Bytes before the point in a `SubjectPublicKeyInfo` (RFC 5480): `id-ecPublicKey` on `prime256v1`, and the
/// header of a bit string.
const HEAD: [u8; 26] = [
    0x30, 0x59, 0x30, 0x13, 0x06, 0x07, 0x2a, 0x86, 0x48, 0xce, 0x3d, 0x02, 0x01, 0x06, 0x08, 0x2a, 0x86,
    0x48, 0xce, 0x3d, 0x03, 0x01, 0x07, 0x03, 0x42, 0x00,
];

/// Reason why a request is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum BadRequest {
    /// The request cannot be parsed.
    #[error("it is not a certification request (PKCS #10, DER)")]
    Unreadable,
    /// The key is of another kind.
    #[error("its key is not one of ECDSA with P-256")]
    Key,
    /// The sender has not proved possession of the private key.
    #[error("its signature was not made with its key")]
    Signature,
}

/// Public key that is to be certified.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Requested([u8; POINT]);

impl PublicKeyData for Requested {
    fn der_bytes(&self) -> &[u8] {
        &self.0
    }

    fn algorithm(&self) -> &'static SignatureAlgorithm {
        &PKCS_ECDSA_P256_SHA256
    }
}

/// Extracts the public key from a request, after verifying that the request is signed with it.
pub(super) fn key(der: &[u8]) -> Result<Requested, BadRequest> {
    if der.len() > LONGEST {
        return Err(BadRequest::Unreadable);
    }
    let Ok(([], request)) = X509CertificationRequest::from_der(der) else {
        return Err(BadRequest::Unreadable);
    };
    let asked = &request.certification_request_info;
    let point = asked.subject_pki.raw.strip_prefix(&HEAD).and_then(|point| point.try_into().ok());
    let point: [u8; POINT] = point.ok_or(BadRequest::Key)?;
    let signature = &request.signature_value;
    if request.signature_algorithm.algorithm != OID_SIG_ECDSA_WITH_SHA256 || signature.unused_bits != 0 {
        return Err(BadRequest::Signature);
    }
    let key = UnparsedPublicKey::new(&ECDSA_P256_SHA256_ASN1, point);
    let verified = key.verify(asked.raw, &signature.data);
    verified.map(|()| Requested(point)).map_err(|_| BadRequest::Signature)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rcgen::{CertificateParams, KeyPair, PKCS_ECDSA_P384_SHA384, PKCS_ED25519};

    use super::*;

    fn request(key: &KeyPair) -> Vec<u8> {
        CertificateParams::new(["somebody.example".to_owned()])
            .unwrap()
            .serialize_request(key)
            .unwrap()
            .der()
            .to_vec()
    }

    #[test]
    fn the_key_of_a_request_is_proved() {
        let pair = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).unwrap();
        let good = request(&pair);
        assert_eq!(key(&good).unwrap().der_bytes(), pair.public_key_raw());

        // A request that contains one key but is signed with another.
        let other = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).unwrap();
        let at = good.windows(POINT).position(|window| window == pair.public_key_raw()).unwrap();
        let mut stolen = good.clone();
        stolen[at..at + POINT].copy_from_slice(other.public_key_raw());
        assert_eq!(key(&stolen), Err(BadRequest::Signature));
        for algorithm in [&PKCS_ED25519, &PKCS_ECDSA_P384_SHA384] {
            let pair = KeyPair::generate_for(algorithm).unwrap();
            assert_eq!(key(&request(&pair)), Err(BadRequest::Key));
        }
    }

    /// Parses a request that OpenSSL generated: `openssl ecparam -name prime256v1 -genkey -noout -out key; openssl
    /// req -new -key key -subj /CN=somebody.example -addext subjectAltName=DNS:somebody.example -outform DER |
    /// base64`
    #[test]
    fn a_request_of_openssl_is_read() {
        let text = "MIIBBDCBqwIBADAbMRkwFwYDVQQDDBBzb21lYm9keS5leGFtcGxlMFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAEVheL5oSAPGt7t4VjbS7AZyRctCAtczc759IDoGw7cs/ohkl9qiLrW++Nzs1QFsZLIuXeRKZQUWc0kd54O/c6J6AuMCwGCSqGSIb3DQEJDjEfMB0wGwYDVR0RBBQwEoIQc29tZWJvZHkuZXhhbXBsZTAKBggqhkjOPQQDAgNIADBFAiA3PuOvAFmcRYcDkBJgvgVmnBNiXMU86a1OTUciOKHZMAIhAKkx3atYfY2arPhHi0usxWbs7B8Sp4FnHf6RxW4YcufY";
        assert!(key(&base64_simd::STANDARD.decode_to_vec(text).unwrap()).is_ok());
    }

    #[test]
    fn nothing_that_is_signed_can_be_changed_and_nothing_added_or_left_out() {
        let good = request(&KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).unwrap());
        let ecdsa_with_sha256 = [0x30, 0x0a, 0x06, 0x08, 0x2a, 0x86, 0x48, 0xce, 0x3d, 0x04, 0x03, 0x02];
        let signed = good.windows(12).position(|window| window == ecdsa_with_sha256).unwrap();
        for at in 0..good.len() {
            let mut changed = good.clone();
            changed[at] ^= 1;
            // The encoding of the signature is not itself signed, and may have several accepted forms.
            let is_same = at >= signed && key(&changed) == key(&good);
            assert!(is_same || key(&changed).is_err(), "byte {at}");
            assert_eq!(key(&good[..at]), Err(BadRequest::Unreadable), "{at} bytes");
        }
        assert_eq!(key(&[good.as_slice(), &[0]].concat()), Err(BadRequest::Unreadable));
        assert_eq!(key(&vec![0x30; LONGEST + 1]), Err(BadRequest::Unreadable));
    }

    proptest! {
        #[test]
        fn any_bytes_will_do(bytes: Vec<u8>) {
            prop_assert!(key(&bytes).is_err());
        }
    }
}
