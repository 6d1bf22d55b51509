//! Handshakes between nodes and the leader.

use std::time::Duration;

use rustls::pki_types::{CertificateDer, ServerName};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, duplex};
use tokio_rustls::{TlsAcceptor, TlsConnector};

use super::super::certificates::{SERVER_NAME, node_of};
use super::*;
use crate::host::backends::kubevirt::node::identity::{NodeKey, client_config};

/// Returns the node's name that the leader sees for this client, or the reason why the connection fails.
async fn dials(
    leader: &Arc<ServerConfig>,
    node: Arc<rustls::ClientConfig>,
) -> Result<Option<String>, String> {
    dials_as(leader, node, SERVER_NAME).await
}

async fn dials_as(
    leader: &Arc<ServerConfig>,
    node: Arc<rustls::ClientConfig>,
    name: &'static str,
) -> Result<Option<String>, String> {
    let (near, far) = duplex(64 * 1024);
    let accept = async {
        let mut stream = TlsAcceptor::from(Arc::clone(leader)).accept(far).await?;
        stream.write_all(b"hello").await?;
        stream.shutdown().await?;
        let session = stream.get_ref().1;
        assert_eq!(session.alpn_protocol(), Some(PROTOCOL));
        let shown = session.peer_certificates().map(|shown| node_of(&shown[0]).unwrap());
        std::io::Result::Ok(shown)
    };
    let dial = async {
        let name = ServerName::try_from(name).unwrap();
        let mut stream = TlsConnector::from(node).connect(name, near).await?;
        // In TLS 1.3 the client learns from the first read, not from the handshake, that it was refused.
        let mut said = Vec::new();
        stream.read_to_end(&mut said).await?;
        std::io::Result::Ok(said)
    };
    let (accepted, dialled) = tokio::join!(accept, dial);
    let shown = accepted.map_err(|error| error.to_string())?;
    assert_eq!(dialled.map_err(|error| error.to_string())?, b"hello");
    Ok(shown)
}

fn ca() -> Arc<Ca> {
    Arc::new(Ca::make().unwrap())
}

/// Creates a node with this name whose certificate the CA signed at this time.
fn certified(ca: &Ca, at: SystemTime) -> (NodeKey, CertificateDer<'static>) {
    let key = NodeKey::generate().unwrap();
    let certificate = ca.sign_at(&key.request().unwrap(), "host-1", at).unwrap();
    (key, certificate)
}

#[tokio::test]
async fn a_node_is_nobody_until_it_has_a_certificate() {
    let ca = ca();
    let leader = ca.server_config().unwrap();
    assert_eq!(dials(&leader, client_config(ca.pem(), None).unwrap()).await, Ok(None));
    let (key, certificate) = certified(&ca, SystemTime::now());
    let node = client_config(ca.pem(), Some((&key, &certificate))).unwrap();
    assert_eq!(dials(&leader, Arc::clone(&node)).await, Ok(Some("host-1".to_owned())));
    // Sessions are not resumed: the certificate is presented each time.
    assert_eq!(dials(&leader, node).await, Ok(Some("host-1".to_owned())));
}

#[tokio::test]
async fn who_is_not_vouched_for_is_refused() {
    let (ours, other, now) = (ca(), ca(), SystemTime::now());
    let leader = ours.server_config().unwrap();
    let dial = async |signer: &Ca, at| {
        let (key, certificate) = certified(signer, at);
        dials(&leader, client_config(ours.pem(), Some((&key, &certificate))).unwrap()).await
    };
    let day = Duration::from_secs(24 * 3600);
    assert_eq!(dial(&ours, now - day / 2).await, Ok(Some("host-1".to_owned())));
    let why = dial(&other, now).await.unwrap_err();
    assert!(why.contains("BadSignature") || why.contains("UnknownIssuer"), "{why}");
    let why = dial(&ours, now - 2 * day).await.unwrap_err();
    assert!(why.contains("certificate expired"), "{why}");
    let why = dial(&ours, now + day).await.unwrap_err();
    assert!(why.contains("not valid yet"), "{why}");

    // A leader of a different CA, and one with a different name.
    let why = dials(&other.server_config().unwrap(), client_config(ours.pem(), None).unwrap()).await;
    assert!(why.is_err(), "{why:?}");
    let why = dials_as(&leader, client_config(ours.pem(), None).unwrap(), "host-1").await;
    assert!(why.is_err(), "{why:?}");
    // A node that impersonates the leader.
    let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).unwrap();
    let request = rcgen::CertificateParams::new([SERVER_NAME.to_owned()]).unwrap();
    let request = request.serialize_request(&key).unwrap();
    let certificate = ours.sign(request.der(), SERVER_NAME).unwrap();
    let mut posing = ServerConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&TLS13])
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![certificate], PrivateKeyDer::Pkcs8(key.serialize_der().into()))
        .unwrap();
    posing.alpn_protocols = vec![PROTOCOL.to_vec()];
    let why = dials(&Arc::new(posing), client_config(ours.pem(), None).unwrap()).await;
    assert!(why.is_err(), "{why:?}");
}

#[test]
fn a_certificate_needs_its_key_and_a_ca_is_one() {
    let ca = ca();
    let (_, certificate) = certified(&ca, SystemTime::now());
    let other = NodeKey::generate().unwrap();
    assert!(client_config(ca.pem(), Some((&other, &certificate))).is_err());
    for wrong in ["", "no PEM", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"] {
        assert!(client_config(wrong, None).is_err(), "{wrong:?}");
    }
}

#[test]
fn the_leader_replaces_its_certificate_in_time() {
    let leader = Leader::new(ca()).unwrap();
    let now = SystemTime::now();
    let serial = |at: SystemTime| leader.at(at).cert[0].clone();
    let first = serial(now);
    assert_eq!(serial(now + LASTING / 2 - Duration::from_secs(60)), first);
    let second = serial(now + LASTING / 2 + Duration::from_secs(60));
    assert_ne!(second, first);
    assert_eq!(serial(now + LASTING - Duration::from_secs(60)), second);
    // The clock was set back.
    assert_ne!(serial(now), second);
}
