//! Keys and certificates as text (RFC 7468).

use base64_simd::STANDARD;

/// PEM label of a certificate.
pub const CERTIFICATE: &str = "CERTIFICATE";
/// PEM label of a private key in PKCS #8.
pub const PRIVATE_KEY: &str = "PRIVATE KEY";
/// Characters of Base64 in a line.
const WIDTH: usize = 64;

/// The text of something in DER.
pub fn encode(label: &str, der: &[u8]) -> String {
    let encoded = STANDARD.encode_to_string(der);
    let lines = encoded.as_bytes().chunks(WIDTH).flat_map(|line| line.iter().chain(b"\n"));
    let lines: String = lines.map(|&byte| char::from(byte)).collect();
    format!("-----BEGIN {label}-----\n{lines}-----END {label}-----\n")
}

#[cfg(test)]
mod tests {
    use rustls::pki_types::CertificateDer;
    use rustls::pki_types::pem::PemObject as _;

    use super::*;

    #[test]
    fn what_is_written_is_read_and_its_lines_are_short() {
        for length in [0_u8, 1, 47, 48, 49, 96, 200] {
            let der: Vec<u8> = (0..length).collect();
            let text = encode(CERTIFICATE, &der);
            assert_eq!(CertificateDer::from_pem_slice(text.as_bytes()).unwrap().as_ref(), der, "{length}");
            assert!(text.lines().all(|line| (1..=64).contains(&line.len())), "{text}");
            assert!(text.ends_with("-\n"));
        }
    }
}
