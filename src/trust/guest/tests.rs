use std::time::Duration;

use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, CustomExtension, ExtendedKeyUsagePurpose, IsCa,
    KeyPair, PKCS_ED25519, PublicKeyData as _, SanType, date_time_ymd,
};

use super::*;
use crate::trust::anchors;
use crate::trust::key::PublicKey;

type Issuer = CertifiedIssuer<'static, KeyPair>;

/// Clock that is set to 2025-01-01.
const NOW: Clock = Clock::Set(UnixTime::since_unix_epoch(Duration::from_secs(1_735_689_600)));
const NAME: &str = "guestlet://lab/host/one";

fn key() -> KeyPair {
    KeyPair::generate_for(&PKCS_ED25519).unwrap()
}

fn ca_params() -> CertificateParams {
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params
}

fn ca() -> Issuer {
    CertifiedIssuer::self_signed(ca_params(), key()).unwrap()
}

/// Returns the parameters of a valid certificate of a host half.
fn host_params() -> CertificateParams {
    let mut params = CertificateParams::default();
    params.subject_alt_names = vec![SanType::URI(NAME.try_into().unwrap())];
    params.not_before = date_time_ymd(2024, 1, 1);
    params.not_after = date_time_ymd(2026, 1, 1);
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
    params
}

fn signed(params: &CertificateParams, issuer: &Issuer) -> CertificateDer<'static> {
    params.signed_by(&key(), issuer).unwrap().der().clone()
}

/// Returns the anchors of a guest that was given the key, in a line with `words` after it.
fn anchor(key: &KeyPair, words: &str) -> Vec<Anchor> {
    let public = PublicKey::from_spki(&key.subject_public_key_info()).unwrap();
    anchors::parse("test", &format!("{public} {words}")).unwrap()
}

/// Judges a certificate that was signed by `issuer`, a CA that the guest was given.
fn of_the_ca(issuer: &Issuer, clock: Clock, params: &CertificateParams) -> Result<Keyed, Refusal> {
    recognize(
        &anchor(issuer.key(), "ca role=status"),
        clock,
        &signed(params, issuer),
        &[issuer.der().clone()],
    )
}

/// Returns the TLS error of a refused certificate.
fn wrong(outcome: Result<Keyed, Refusal>) -> CertificateError {
    match outcome {
        Err(Refusal::Wrong(error, _)) => error,
        other => panic!("{other:?}"),
    }
}

#[track_caller]
fn unknown(outcome: &Result<Keyed, Refusal>) {
    assert!(matches!(outcome, Err(Refusal::Unknown(_))), "{outcome:?}");
}

#[test]
fn a_host_of_the_ca_has_the_names_of_its_certificate_and_the_roles_of_the_ca() {
    let ca = ca();
    let keyed = of_the_ca(&ca, NOW, &host_params()).unwrap();
    assert_eq!(keyed.names, [NAME]);
    assert_eq!(keyed.roles, ["status"]);
    assert_eq!(keyed.until, certificate::ends(&signed(&host_params(), &ca)));
    assert!(keyed.until.is_some());
    assert_eq!(keyed.anchor, anchor(ca.key(), "ca")[0].fingerprint);
    assert_ne!(keyed.fingerprint, keyed.anchor);
}

#[test]
fn the_dates_of_a_ca_s_certificate_count_once_the_clock_is_set() {
    let ca = ca();
    let cases = [
        ("expired", 2020, 2021, CertificateError::Expired),
        ("not valid yet", 2080, 2090, CertificateError::NotValidYet),
    ];
    for (name, from, until, expected) in cases {
        let mut params = host_params();
        params.not_before = date_time_ymd(from, 1, 1);
        params.not_after = date_time_ymd(until, 1, 1);
        assert_eq!(of_the_ca(&ca, Clock::Unset, &params).unwrap().names, [NAME], "{name}");
        assert_eq!(wrong(of_the_ca(&ca, NOW, &params)), expected, "{name}");
    }
}

#[test]
fn a_pinned_key_is_taken_whatever_its_certificate_says() {
    let (pinned, stranger) = (key(), key());
    for (from, until) in [(1970, 1971), (2080, 2090)] {
        let mut params = host_params();
        params.not_before = date_time_ymd(from, 1, 1);
        params.not_after = date_time_ymd(until, 1, 1);
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        let leaf = params.self_signed(&pinned).unwrap();
        for clock in [NOW, Clock::Unset] {
            let keyed = recognize(&anchor(&pinned, "role=freeze"), clock, leaf.der(), &[]).unwrap();
            assert_eq!(keyed.roles, ["freeze"]);
            assert_eq!(keyed.fingerprint, keyed.anchor);
            // No CA vouches for the names in a self-signed certificate.
            assert!(keyed.names.is_empty(), "{keyed:?}");
            unknown(&recognize(&anchor(&stranger, ""), clock, leaf.der(), &[]));
        }
    }
}

#[test]
fn a_certificate_that_names_no_host_is_refused() {
    let ca = ca();
    for name in
        ["https://lab/host/one", "guestlet://lab/guest/one", "guestlet:///host/one", "guestlet://lab/host/"]
    {
        let mut params = host_params();
        params.subject_alt_names = vec![SanType::URI(name.try_into().unwrap())];
        assert_eq!(wrong(of_the_ca(&ca, NOW, &params)), CertificateError::NotValidForName, "{name}");
    }
    let mut params = host_params();
    params.subject_alt_names.clear();
    assert_eq!(wrong(of_the_ca(&ca, NOW, &params)), CertificateError::NotValidForName);
}

#[test]
fn a_critical_extension_that_is_unknown_is_refused_and_another_is_not() {
    let ca = ca();
    for critical in [false, true] {
        let mut extension = CustomExtension::from_oid_content(&[1, 3, 6, 1, 4, 1, 32473, 1], vec![5, 0]);
        extension.set_criticality(critical);
        let mut params = host_params();
        params.custom_extensions = vec![extension];
        for clock in [NOW, Clock::Unset] {
            let outcome = of_the_ca(&ca, clock, &params);
            if critical {
                assert_eq!(wrong(outcome), CertificateError::BadEncoding);
            } else {
                assert_eq!(outcome.unwrap().names, [NAME]);
            }
        }
    }
}

#[test]
fn a_certificate_for_servers_only_is_refused() {
    let mut params = host_params();
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    assert_eq!(wrong(of_the_ca(&ca(), NOW, &params)), CertificateError::InvalidPurpose);
}

#[test]
fn what_another_ca_has_signed_is_refused_even_beside_the_right_one() {
    let (ours, theirs) = (ca(), ca());
    let given = anchor(ours.key(), "ca");
    let leaf = signed(&host_params(), &theirs);
    unknown(&recognize(&given, NOW, &leaf, &[theirs.der().clone()]));
    // The other CA is placed before the accepted one.
    unknown(&recognize(&given, NOW, &leaf, &[theirs.der().clone(), ours.der().clone()]));
    assert_eq!(
        wrong(recognize(&given, NOW, &leaf, &[ours.der().clone()])),
        CertificateError::BadEncoding,
        "the signature is not that of our CA"
    );
}

#[test]
fn only_the_ca_itself_signs_host_halves() {
    let root = ca();
    let between = CertifiedIssuer::signed_by(ca_params(), key(), &root).unwrap();
    let leaf = signed(&host_params(), &between);
    let given = anchor(root.key(), "ca");
    for others in [vec![&between, &root], vec![&between], vec![]] {
        let others: Vec<_> = others.into_iter().map(|issuer| issuer.der().clone()).collect();
        unknown(&recognize(&given, NOW, &leaf, &others));
    }
    // A host half that was given a certificate cannot give one.
    let host = CertifiedIssuer::signed_by(host_params(), key(), &root).unwrap();
    let leaf = signed(&host_params(), &host);
    unknown(&recognize(&given, NOW, &leaf, &[host.der().clone()]));
}

#[test]
fn the_key_of_a_ca_does_not_open_the_guest_itself() {
    let mut params = ca_params();
    params.subject_alt_names = host_params().subject_alt_names;
    params.extended_key_usages = host_params().extended_key_usages;
    let ca = CertifiedIssuer::self_signed(params, key()).unwrap();
    let given = anchor(ca.key(), "ca");
    unknown(&recognize(&given, NOW, ca.der(), &[]));
    assert_eq!(wrong(recognize(&given, NOW, ca.der(), &[ca.der().clone()])), CertificateError::BadEncoding);
    // And that of a host half signs nothing.
    let leaf = signed(&host_params(), &ca);
    unknown(&recognize(&anchor(ca.key(), ""), NOW, &leaf, &[ca.der().clone()]));
}

#[test]
fn what_is_no_certificate_is_refused() {
    let ca = ca();
    let leaf = signed(&host_params(), &ca);
    let nothing = CertificateDer::from(&b"nothing"[..]);
    let given = anchor(ca.key(), "ca");
    assert_eq!(wrong(recognize(&given, NOW, &nothing, &[])), CertificateError::BadEncoding);
    assert_eq!(wrong(recognize(&given, NOW, &leaf, &[nothing])), CertificateError::BadEncoding);
    let other = KeyPair::generate_for(&rcgen::PKCS_ECDSA_P256_SHA256).unwrap();
    let leaf = host_params().signed_by(&other, &ca).unwrap();
    let outcome = recognize(&given, NOW, leaf.der(), &[ca.der().clone()]);
    assert_eq!(wrong(outcome), CertificateError::BadEncoding, "not Ed25519");
}
