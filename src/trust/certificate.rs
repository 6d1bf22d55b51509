//! X.509 certificates around keys: the self-signed ones of both ends, and what those of others say.

use std::time::Duration;

use rcgen::{
    CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, KeyPair, PKCS_ED25519,
    date_time_ymd,
};
use rustls::pki_types::{CertificateDer, UnixTime};
use x509_parser::certificate::{X509Certificate, X509CertificateParser};
use x509_parser::extensions::{GeneralName, SubjectAlternativeName};
use x509_parser::nom::Parser as _;
use x509_parser::oid_registry::OID_X509_EXT_SUBJECT_ALT_NAME;
use x509_parser::prelude::FromDer as _;

use crate::trust::key::{Key, PublicKey};

/// Names of one certificate, and bytes of one of them; more are not looked at.
const MAX_NAMES: usize = 16;
const MAX_NAME: usize = 512;

/// End of a session that a certificate is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// The host half, which is TLS's client.
    Host,
    /// The guest, which is TLS's server.
    Guest,
}

/// Makes a certificate that only carries `key`: the peer has pinned the key, and ignores names and dates.
///
/// # Errors
/// If the key cannot sign, which does not happen with the keys of this program.
pub fn self_signed(key: &Key, end: End) -> Result<CertificateDer<'static>, rcgen::Error> {
    let pair = KeyPair::from_pkcs8_der_and_sign_algo(&key.pkcs8(), &PKCS_ED25519)?;
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, "guestlet");
    params.not_before = date_time_ymd(1970, 1, 1);
    params.not_after = date_time_ymd(9999, 12, 31);
    params.extended_key_usages = vec![match end {
        End::Host => ExtendedKeyUsagePurpose::ClientAuth,
        End::Guest => ExtendedKeyUsagePurpose::ServerAuth,
    }];
    Ok(params.self_signed(&pair)?.der().clone())
}

/// Relevant contents of a certificate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Certified {
    /// Public key of its owner.
    pub key: PublicKey,
    /// URIs of its owner (`subjectAltName`).
    pub names: Vec<String>,
}

/// A certificate whose extensions are left as bytes: the parser has code for some twenty kinds of them, and one counts here.
fn parse(der: &[u8]) -> Option<X509Certificate<'_>> {
    X509CertificateParser::new()
        .with_deep_parse_extensions(false)
        .parse(der)
        .ok()
        .map(|(_, certificate)| certificate)
}

/// Reads a certificate, without verifying its signature.
///
/// `None` if it is malformed, or contains another type of key.
pub fn read(der: &CertificateDer<'_>) -> Option<Certified> {
    let certificate = parse(der)?;
    let key = PublicKey::from_spki(certificate.public_key().raw).ok()?;
    Some(Certified { key, names: names(&certificate) })
}

/// Returns the URIs of a certificate with any type of key, without verifying its signature.
///
/// `None` if it is malformed.
pub fn uris(der: &CertificateDer<'_>) -> Option<Vec<String>> {
    parse(der).map(|certificate| names(&certificate))
}

fn names(certificate: &X509Certificate<'_>) -> Vec<String> {
    let mut names = Vec::new();
    for extension in certificate.extensions() {
        if extension.oid != OID_X509_EXT_SUBJECT_ALT_NAME {
            continue;
        }
        let Ok((_, found)) = SubjectAlternativeName::from_der(extension.value) else { continue };
        for name in &found.general_names {
            match name {
                GeneralName::URI(uri) if uri.len() <= MAX_NAME && names.len() < MAX_NAMES => {
                    names.push((*uri).to_owned());
                }
                _ => {}
            }
        }
    }
    names
}

/// Returns the time from which a certificate is valid; `None` if it is malformed.
pub fn begins(der: &CertificateDer<'_>) -> Option<UnixTime> {
    time(parse(der)?.validity().not_before.timestamp())
}

/// Returns the time until which a certificate is valid; `None` if it is malformed.
pub fn ends(der: &CertificateDer<'_>) -> Option<UnixTime> {
    time(parse(der)?.validity().not_after.timestamp())
}

fn time(seconds: i64) -> Option<UnixTime> {
    Some(UnixTime::since_unix_epoch(Duration::from_secs(u64::try_from(seconds).ok()?)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_certificate_carries_its_key_and_vouches_for_no_name() {
        let key = Key::generate().unwrap();
        for end in [End::Host, End::Guest] {
            let found = read(&self_signed(&key, end).unwrap()).unwrap();
            assert_eq!(found, Certified { key: key.public(), names: Vec::new() });
        }
        assert_eq!(read(&CertificateDer::from(&b"no certificate"[..])), None);
    }
}
