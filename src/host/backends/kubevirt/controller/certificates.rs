//! CA of the controllers: it vouches for the leader to nodes, and for nodes to the leader.
//!
//! The first leader generates the key and stores it in a Secret, so that nodes and later leaders continue to
//! trust each other. The certificates that it signs are valid for a day and are not stored: nodes renew theirs
//! in time, and the leader issues its own.

use std::time::{Duration, SystemTime};

use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use kube::Client;
use kube::api::ObjectMeta;
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer,
    KeyPair, KeyUsagePurpose, PKCS_ECDSA_P256_SHA256, PublicKeyData, SanType, SerialNumber, date_time_ymd,
};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, UnixTime};
use webpki::{EndEntityCert, KeyUsage, anchor_from_trusted_cert};

use super::private;
use super::request::{self, BadRequest};
use crate::trust::{certificate, pem};

/// Name of the Secret, of type `kubernetes.io/tls`.
pub const SECRET: &str = "guestlet-controller-ca";
/// Name in the leader's certificate, which nodes verify.
pub const SERVER_NAME: &str = "guestlet-controller";
/// Common name in the CA's certificate.
const CA_NAME: &str = "guestlet-controller-ca";
/// Prefix of a node's name in the URI of its certificate.
const NODE: &str = "guestlet://node/";
/// Maximum length of a common name (X.520); a longer node name appears only in the URI.
const LONGEST_COMMON_NAME: usize = 64;
/// Validity of a certificate.
pub const LASTING: Duration = Duration::from_secs(24 * 60 * 60);
/// Time by which a certificate is backdated, for nodes whose clocks are slow.
const EARLY: Duration = Duration::from_secs(60 * 60);
const SECRET_TYPE: &str = "kubernetes.io/tls";
const CERTIFICATE: &str = "tls.crt";
const KEY: &str = "tls.key";

/// Reason why there is no CA.
#[derive(Debug, thiserror::Error)]
pub enum CaError {
    /// The contents of the Secret are unusable. They are never replaced automatically: all nodes would have to
    /// present their tokens again, and an administrator should learn about the damage.
    #[error(
        "the Secret {0} has no usable CA: {1}; delete it, and a new one is created, which nodes adopt by themselves"
    )]
    Damaged(String, String),
    /// The API server does not return the Secret.
    #[error("cannot {0}: {1}")]
    Unavailable(String, String),
    /// No key or certificate can be generated.
    #[error("cannot make a certificate")]
    Make(#[from] rcgen::Error),
    /// TLS cannot be set up with it.
    #[error("cannot set up TLS")]
    Tls(#[from] rustls::Error),
}

/// Reason why a node gets no certificate.
#[derive(Debug, thiserror::Error)]
pub enum SignError {
    /// The certification request is refused.
    #[error("the request for a certificate is refused: {0}")]
    Request(#[from] BadRequest),
    /// The node's name is not valid in a certificate.
    #[error("{0:?} is not a name of a Node")]
    Name(String),
    /// No certificate can be generated.
    #[error("cannot make a certificate")]
    Make(#[from] rcgen::Error),
}

/// Certificate and key of the CA.
#[derive(Debug)]
pub struct Ca {
    certificate: CertificateDer<'static>,
    pem: String,
    issuer: Issuer<'static, KeyPair>,
}

fn parameters() -> CertificateParams {
    let mut parameters = CertificateParams::default();
    parameters.distinguished_name = DistinguishedName::new();
    parameters.distinguished_name.push(DnType::CommonName, CA_NAME);
    parameters.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    parameters.key_usages = vec![KeyUsagePurpose::KeyCertSign];
    // The CA is replaced by deleting its Secret, and so never expires.
    parameters.not_before = date_time_ymd(1970, 1, 1);
    parameters.not_after = date_time_ymd(9999, 12, 31);
    parameters
}

impl Ca {
    /// Generates a CA without storing it.
    ///
    /// # Errors
    /// If no key can be generated.
    pub fn make() -> Result<Self, rcgen::Error> {
        let (key, parameters) = (KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256)?, parameters());
        let certificate = parameters.self_signed(&key)?.der().clone();
        Ok(Self::of(certificate, Issuer::new(parameters, key)))
    }

    fn of(certificate: CertificateDer<'static>, issuer: Issuer<'static, KeyPair>) -> Self {
        let pem = pem::encode(pem::CERTIFICATE, &certificate);
        Self { certificate, pem, issuer }
    }

    /// Loads the CA from the Secret in a namespace, and creates the Secret if it does not exist.
    ///
    /// # Errors
    /// If the Secret contains no usable CA, or can be neither read nor created.
    pub async fn load_or_make(client: &Client, namespace: &str) -> Result<Self, CaError> {
        let place = format!("{namespace}/{SECRET}");
        let unavailable = |verb: &str, failure: private::Failure| {
            CaError::Unavailable(format!("{verb} the Secret {place}"), failure.words)
        };
        match private::get::<Secret>(client, namespace, SECRET).await {
            Ok(secret) => return Self::load(&secret, &place),
            Err(failure) if failure.code == Some(404) => {}
            Err(failure) => return Err(unavailable("read", failure)),
        }
        let made = Self::make()?;
        match private::create(client, Some(namespace), &made.secret()).await {
            Ok(_) => {
                tracing::info!("made the CA of the controllers, which is in the Secret {place}");
                Ok(made)
            }
            // Another leader has created the Secret first, so use that, whatever state it is in.
            Err(failure) if failure.code == Some(409) => {
                let secret = private::get::<Secret>(client, namespace, SECRET).await;
                Self::load(&secret.map_err(|failure| unavailable("read", failure))?, &place)
            }
            Err(failure) => Err(unavailable("make", failure)),
        }
    }

    fn secret(&self) -> Secret {
        let key = pem::encode(pem::PRIVATE_KEY, self.issuer.key().serialized_der());
        let data = [(CERTIFICATE, self.pem.clone()), (KEY, key)];
        let data = data.map(|(name, text)| (name.to_owned(), ByteString(text.into_bytes())));
        Secret {
            metadata: ObjectMeta { name: Some(SECRET.to_owned()), ..ObjectMeta::default() },
            data: Some(data.into()),
            type_: Some(SECRET_TYPE.to_owned()),
            ..Secret::default()
        }
    }

    fn load(secret: &Secret, place: &str) -> Result<Self, CaError> {
        let data = |name: &str| secret.data.as_ref().and_then(|data| data.get(name)).map(|data| &data.0[..]);
        Self::from_pem(data(CERTIFICATE).unwrap_or_default(), data(KEY).unwrap_or_default())
            .map_err(|why| CaError::Damaged(place.to_owned(), why.to_owned()))
    }

    fn from_pem(certificate: &[u8], key: &[u8]) -> Result<Self, &'static str> {
        let no_certificate = "tls.crt has no certificate (PEM)";
        let certificate = CertificateDer::from_pem_slice(certificate).map_err(|_| no_certificate)?;
        let no_key = "tls.key has no ECDSA key of P-256 in PKCS #8 (PEM)";
        let Ok(PrivateKeyDer::Pkcs8(key)) = PrivateKeyDer::from_pem_slice(key) else { return Err(no_key) };
        let key = KeyPair::from_pkcs8_der_and_sign_algo(&key, &PKCS_ECDSA_P256_SHA256).map_err(|_| no_key)?;
        let ca = Self::of(certificate, Issuer::new(parameters(), key));
        ca.check().ok_or("tls.crt is not the certificate of the CA whose key is in tls.key")?;
        Ok(ca)
    }

    /// Checks that the key's signatures verify against the certificate.
    fn check(&self) -> Option<()> {
        let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).ok()?;
        let leaf = self.server_certificate(&key).ok()?;
        let anchor = anchor_from_trusted_cert(&self.certificate).ok()?;
        let parsed = EndEntityCert::try_from(&leaf).ok()?;
        let algorithms = &[webpki::ring::ECDSA_P256_SHA256];
        let usage = KeyUsage::server_auth();
        parsed.verify_for_usage(algorithms, &[anchor], &[], UnixTime::now(), usage, None, None).ok().map(drop)
    }

    /// Returns the certificate in PEM, as published in the Lease.
    pub fn pem(&self) -> &str {
        &self.pem
    }

    /// Returns the certificate in DER.
    pub(super) fn certificate(&self) -> &CertificateDer<'static> {
        &self.certificate
    }

    /// Issues a certificate for the leader.
    pub(super) fn server_certificate(&self, key: &KeyPair) -> Result<CertificateDer<'static>, rcgen::Error> {
        let names = vec![SanType::DnsName(SERVER_NAME.try_into()?)];
        self.issue(names, SERVER_NAME, ExtendedKeyUsagePurpose::ServerAuth, key, SystemTime::now())
    }

    /// Issues a certificate for a node. Of the request (PKCS #10, DER), only the key is used.
    ///
    /// # Errors
    /// If it is not a valid request for an ECDSA key on P-256, signed with this key.
    pub fn sign(&self, request: &[u8], node: &str) -> Result<CertificateDer<'static>, SignError> {
        self.sign_at(request, node, SystemTime::now())
    }

    pub(super) fn sign_at(
        &self,
        request: &[u8],
        node: &str,
        now: SystemTime,
    ) -> Result<CertificateDer<'static>, SignError> {
        let key = request::key(request)?;
        if !is_name(node) {
            return Err(SignError::Name(node.to_owned()));
        }
        let names = vec![SanType::URI(format!("{NODE}{node}").try_into()?)];
        Ok(self.issue(names, node, ExtendedKeyUsagePurpose::ClientAuth, &key, now)?)
    }

    fn issue(
        &self,
        names: Vec<SanType>,
        common_name: &str,
        purpose: ExtendedKeyUsagePurpose,
        key: &impl PublicKeyData,
        now: SystemTime,
    ) -> Result<CertificateDer<'static>, rcgen::Error> {
        let now = now.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let mut parameters = CertificateParams::default();
        parameters.distinguished_name = DistinguishedName::new();
        if common_name.len() <= LONGEST_COMMON_NAME {
            parameters.distinguished_name.push(DnType::CommonName, common_name);
        }
        parameters.subject_alt_names = names;
        parameters.serial_number = Some(SerialNumber::from_slice(&fastrand::u128(1..).to_be_bytes()));
        parameters.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        parameters.extended_key_usages = vec![purpose];
        parameters.not_before = date_time_ymd(1970, 1, 1) + now.saturating_sub(EARLY);
        parameters.not_after = date_time_ymd(1970, 1, 1) + now + LASTING;
        Ok(parameters.signed_by(key, &self.issuer)?.der().clone())
    }
}

/// Reports whether a Node can have this name (RFC 1123).
fn is_name(node: &str) -> bool {
    let is_fit = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || matches!(byte, b'-' | b'.');
    (1..=253).contains(&node.len()) && node.bytes().all(is_fit)
}

/// Returns the node's name in a certificate that was verified in a handshake, and thus was issued by the CA.
pub fn node_of(certificate: &CertificateDer<'_>) -> Option<String> {
    let names = certificate::uris(certificate)?;
    let [name] = names.as_slice() else { return None };
    name.strip_prefix(NODE).filter(|node| is_name(node)).map(str::to_owned)
}

#[cfg(test)]
mod tests;
