//! The CA as stored in a Secret, and the certificates that it issues.

use proptest::prelude::*;
use rcgen::PKCS_ED25519;

use super::*;
use crate::host::backends::kubevirt::node::identity::{NodeKey, renew_after};

/// Builds a Secret with this data.
fn secret(parts: &[(&str, &[u8])]) -> Secret {
    let data = parts.iter().map(|(name, bytes)| ((*name).to_owned(), ByteString(bytes.to_vec())));
    Secret { data: Some(data.collect()), ..Secret::default() }
}

fn part(secret: &Secret, name: &str) -> Vec<u8> {
    secret.data.as_ref().unwrap()[name].0.clone()
}

#[test]
fn a_ca_is_read_as_it_was_kept() {
    let ca = Ca::make().unwrap();
    let kept = ca.secret();
    assert_eq!(kept.type_.as_deref(), Some("kubernetes.io/tls"));
    let read = Ca::load(&kept, "guestlet-system/guestlet-controller-ca").unwrap();
    assert_eq!(read.pem(), ca.pem());
    assert_eq!(part(&read.secret(), KEY), part(&kept, KEY));
    let key = String::from_utf8(part(&kept, KEY)).unwrap();
    assert!(key.starts_with("-----BEGIN PRIVATE KEY-----\n"));
    let secret = key.lines().nth(1).unwrap();
    assert!(!format!("{ca:?}").contains(secret) && !ca.pem().contains(secret));
}

#[test]
fn a_damaged_secret_is_no_ca_and_says_what_to_do() {
    let (one, other) = (Ca::make().unwrap().secret(), Ca::make().unwrap().secret());
    let (certificate, key) = (part(&one, CERTIFICATE), part(&one, KEY));
    let ed25519 = KeyPair::generate_for(&PKCS_ED25519).unwrap();
    let ed25519 = pem::encode(pem::PRIVATE_KEY, ed25519.serialized_der()).into_bytes();
    // The CA's own key, with a certificate in a different name.
    let named = {
        let key = PrivateKeyDer::from_pem_slice(&key).unwrap();
        let PrivateKeyDer::Pkcs8(key) = key else { panic!() };
        let key = KeyPair::from_pkcs8_der_and_sign_algo(&key, &PKCS_ECDSA_P256_SHA256).unwrap();
        let parameters = CertificateParams::new(["somebody".to_owned()]).unwrap();
        pem::encode(pem::CERTIFICATE, parameters.self_signed(&key).unwrap().der()).into_bytes()
    };
    for (what, parts, words) in [
        ("nothing", vec![], "tls.crt has no certificate"),
        ("no key", vec![(CERTIFICATE, &certificate[..])], "tls.key has no ECDSA key"),
        ("no certificate", vec![(KEY, &key[..])], "tls.crt has no certificate"),
        ("a cut certificate", vec![(CERTIFICATE, &certificate[..200]), (KEY, &key)], "tls.crt has no"),
        ("a cut key", vec![(CERTIFICATE, &certificate), (KEY, &key[..60])], "tls.key has no"),
        ("garbage", vec![(CERTIFICATE, b"\xff\x00"), (KEY, b"\xff\x00")], "tls.crt has no"),
        (
            "another kind of key",
            vec![(CERTIFICATE, &certificate), (KEY, &ed25519)],
            "tls.key has no ECDSA key",
        ),
        (
            "another's key",
            vec![(CERTIFICATE, &certificate), (KEY, &part(&other, KEY))],
            "is not the certificate",
        ),
        ("another name", vec![(CERTIFICATE, &named), (KEY, &key)], "is not the certificate"),
    ] {
        let error = Ca::load(&secret(&parts), "here/ca").unwrap_err();
        let said = error.to_string();
        assert!(matches!(error, CaError::Damaged(..)), "{what}: {said}");
        assert!(
            said.contains(words) && said.contains("the Secret here/ca") && said.contains("delete it"),
            "{said}"
        );
        assert!(!said.contains("BEGIN"), "{said}");
    }
}

#[test]
fn a_node_gets_its_own_name_and_nothing_that_it_asks_for() {
    let ca = Ca::make().unwrap();
    let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).unwrap();
    let mut asked = CertificateParams::new(["guestlet-controller".to_owned()]).unwrap();
    asked.subject_alt_names.push(SanType::URI("guestlet://node/host-2".try_into().unwrap()));
    asked.distinguished_name.push(DnType::CommonName, "host-2");
    asked.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    asked.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    let asked = asked.serialize_request(&key).unwrap();
    let signed = ca.sign(asked.der(), "host-1").unwrap();
    assert_eq!(certificate::uris(&signed).unwrap(), ["guestlet://node/host-1"]);
    assert_eq!(node_of(&signed).as_deref(), Some("host-1"));
    for word in ["host-2", "guestlet-controller\u{30}"] {
        assert!(!signed.windows(word.len()).any(|window| window == word.as_bytes()), "{word}");
    }
    // The certificate is valid for client authentication only.
    let anchor = anchor_from_trusted_cert(ca.certificate()).unwrap();
    let verify = |usage| {
        let parsed = EndEntityCert::try_from(&signed).unwrap();
        let algorithms = &[webpki::ring::ECDSA_P256_SHA256];
        parsed
            .verify_for_usage(
                algorithms,
                std::slice::from_ref(&anchor),
                &[],
                UnixTime::now(),
                usage,
                None,
                None,
            )
            .map(drop)
    };
    verify(KeyUsage::client_auth()).unwrap();
    assert!(verify(KeyUsage::server_auth()).is_err());
    // The certificate is renewed well before it expires.
    let after = renew_after(&signed).unwrap();
    assert!(after > LASTING / 3 && after < LASTING * 2 / 3, "{after:?}");
}

#[test]
fn nodes_may_be_called_what_kubernetes_allows() {
    let (ca, request) = (Ca::make().unwrap(), NodeKey::generate().unwrap().request().unwrap());
    for name in ["n", "node-1.example.com", &"a".repeat(64), &"a".repeat(65), &"a".repeat(253)] {
        assert_eq!(node_of(&ca.sign(&request, name).unwrap()).as_deref(), Some(name));
    }
    for name in ["", "a/b", "A", "a b", "é", "a\0", &"a".repeat(254)] {
        assert!(matches!(ca.sign(&request, name), Err(SignError::Name(_))), "{name:?}");
    }
    assert!(matches!(ca.sign(b"no request", "n"), Err(SignError::Request(BadRequest::Unreadable))));
}

#[test]
fn only_a_certificate_of_one_node_is_that_of_a_node() {
    let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).unwrap();
    let with = |names: &[&str]| {
        let mut parameters = CertificateParams::default();
        let uri = |name: &&str| SanType::URI((*name).try_into().unwrap());
        parameters.subject_alt_names = names.iter().map(uri).collect();
        node_of(parameters.self_signed(&key).unwrap().der())
    };
    assert_eq!(with(&["guestlet://node/n"]).as_deref(), Some("n"));
    for names in [
        &[][..],
        &["guestlet://node/"],
        &["guestlet://node/a/b"],
        &["guestlet://production/host/n"],
        &["https://node/n"],
        &["guestlet://node/n", "guestlet://node/m"],
    ] {
        assert_eq!(with(names), None, "{names:?}");
    }
    let ca = Ca::make().unwrap();
    assert_eq!(node_of(ca.certificate()), None);
    assert_eq!(node_of(&ca.server_certificate(&key).unwrap()), None);
    assert_eq!(node_of(&CertificateDer::from(&b"no certificate"[..])), None);
}

proptest! {
    #[test]
    fn any_secret_will_do(certificate: Vec<u8>, key: Vec<u8>) {
        prop_assert!(Ca::load(&secret(&[(CERTIFICATE, &certificate), (KEY, &key)]), "here/ca").is_err());
    }
}
