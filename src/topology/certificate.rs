//! Subject and validity period of a certificate (RFC 5280). Pure.
//!
//! The API server decides whether the certificate is genuine; this only reads the kubelet's own.

use x509_parser::certificate::X509CertificateParser;
use x509_parser::nom::Parser as _;

/// Subject and validity period of a certificate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Certificate {
    /// Common name of the subject.
    pub common_name: String,
    /// Start of the validity, in seconds since 1970.
    pub not_before: i64,
    /// End of the validity, in seconds since 1970.
    pub not_after: i64,
}

/// Parses a certificate in DER; none if it is malformed, or has no common name.
pub fn parse(der: &[u8]) -> Option<Certificate> {
    // Extensions are not needed, and the parser has code for some twenty kinds of them.
    let (_, certificate) = X509CertificateParser::new().with_deep_parse_extensions(false).parse(der).ok()?;
    let common_name = certificate.subject().iter_common_name().next()?.as_str().ok()?.to_owned();
    let validity = certificate.validity();
    Some(Certificate {
        common_name,
        not_before: validity.not_before.timestamp(),
        not_after: validity.not_after.timestamp(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn made(name: &str) -> Vec<u8> {
        let mut parameters = rcgen::CertificateParams::default();
        parameters.distinguished_name = rcgen::DistinguishedName::new();
        parameters.distinguished_name.push(rcgen::DnType::OrganizationName, "system:nodes");
        parameters.distinguished_name.push(rcgen::DnType::CommonName, name);
        parameters.not_before = rcgen::date_time_ymd(2024, 2, 29);
        parameters.not_after = rcgen::date_time_ymd(2055, 1, 1);
        let key = rcgen::KeyPair::generate().unwrap();
        parameters.self_signed(&key).unwrap().der().to_vec()
    }

    #[test]
    fn whose_it_is_and_when_it_is_good() {
        let read = parse(&made("system:node:web-1")).unwrap();
        assert_eq!(read.common_name, "system:node:web-1");
        assert_eq!((read.not_before, read.not_after), (1_709_164_800, 2_682_374_400));
    }

    #[test]
    fn anything_else_is_none_and_harms_nobody() {
        let good = made("a");
        for end in 0..good.len() {
            assert_eq!(parse(&good[..end]), None, "{end}");
        }
        for place in 0..good.len() {
            for byte in [0, 0x30, 0x7f, 0x80, 0x84, 0xff] {
                let mut bad = good.clone();
                bad[place] = byte;
                let _ = parse(&bad);
            }
        }
    }
}
