//! A CA, and the certificates that it gives to host halves.

use std::path::{Path, PathBuf};

use base64_simd::STANDARD;
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, ExtendedKeyUsagePurpose, IsCa, KeyPair,
    PKCS_ED25519, SanType, date_time_ymd,
};

pub struct Authority(CertifiedIssuer<'static, KeyPair>);

/// What is unusual about a certificate.
#[derive(Default, Clone, Copy)]
pub struct Oddly {
    pub name: Option<&'static str>,
    pub not_before: Option<i32>,
    pub not_after: Option<i32>,
    pub for_servers: bool,
}

impl Authority {
    pub fn new() -> Self {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        let key = KeyPair::generate_for(&PKCS_ED25519).unwrap();
        Self(CertifiedIssuer::self_signed(params, key).unwrap())
    }

    /// The line by which guests take all whom it vouches for.
    pub fn line(&self) -> String {
        use rcgen::PublicKeyData as _;
        let spki = self.0.key().subject_public_key_info();
        format!("ed25519:{} ca # the CA\n", STANDARD.encode_to_string(spki))
    }

    /// Writes the key of a host half and its certificate to `folder`, in the place of those that are there.
    pub fn files(&self, folder: &Path, host: &str, oddly: Oddly) -> (PathBuf, PathBuf) {
        use std::os::unix::fs::PermissionsExt as _;

        let key = KeyPair::generate_for(&PKCS_ED25519).unwrap();
        let mut params = CertificateParams::default();
        let name = oddly.name.map_or_else(|| format!("guestlet://lab/host/{host}"), str::to_owned);
        params.subject_alt_names = vec![SanType::URI(name.try_into().unwrap())];
        params.not_before = date_time_ymd(oddly.not_before.unwrap_or(2020), 1, 1);
        params.not_after = date_time_ymd(oddly.not_after.unwrap_or(2090), 1, 1);
        let usage = if oddly.for_servers {
            ExtendedKeyUsagePurpose::ServerAuth
        } else {
            ExtendedKeyUsagePurpose::ClientAuth
        };
        params.extended_key_usages = vec![usage];
        let certificate = params.signed_by(&key, &self.0).unwrap();
        let (key_file, chain_file) = (folder.join("tls.key"), folder.join("tls.pem"));
        std::fs::write(&key_file, key.serialize_pem()).unwrap();
        std::fs::set_permissions(&key_file, std::fs::Permissions::from_mode(0o600)).unwrap();
        std::fs::write(&chain_file, certificate.pem() + &self.0.pem()).unwrap();
        (key_file, chain_file)
    }
}
