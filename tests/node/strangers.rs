//! Who connects with the controller: those who say nothing, and those whose certificate ends.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use guestlet::host::backends::kubevirt::node::identity;
use guestlet::wire::proto::v1::{AskRequest, RunningVirtualMachine};
use k8s_openapi::api::core::v1::Secret;
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer,
    KeyPair, KeyUsagePurpose, SanType,
};
use tokio::net::{TcpSocket, TcpStream};
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::pki_types::pem::PemObject as _;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, RootCertStore};

use crate::cluster::wait;
use crate::patience::until;
use crate::whole::Whole;

/// Connections that one address may have whose ends have not said who they are.
const NOBODIES: usize = 16;

async fn from(source: &str, address: &str) -> TcpStream {
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind(format!("{source}:0").parse().unwrap()).unwrap();
    socket.connect(address.parse().unwrap()).await.unwrap()
}

/// Whether somebody without a certificate gets as far as TLS.
async fn is_served(source: &str, address: &str, config: &Arc<ClientConfig>) -> bool {
    let name = ServerName::try_from("guestlet-controller").unwrap();
    let stream = from(source, address).await;
    TlsConnector::from(Arc::clone(config)).connect(name, stream).await.is_ok()
}

#[test]
fn one_address_takes_no_places_from_others() {
    wait(async {
        let whole = Whole::start(1).await;
        let address = whole.address().await;
        let config = identity::client_config(&whole.authority().await, None).unwrap();
        assert!(is_served("127.0.0.3", &address, &config).await);
        until("no more are served from one address", async || {
            // They are turned away after some seconds, so there are as many again each time.
            let mut silent = Vec::new();
            for _ in 0..NOBODIES {
                silent.push(from("127.0.0.2", &address).await);
            }
            let is_full = !is_served("127.0.0.2", &address, &config).await;
            assert!(is_served("127.0.0.3", &address, &config).await, "another address has places of its own");
            is_full.then_some(())
        })
        .await;
        // Whoever has gone takes no place any more.
        until("they have gone", async || is_served("127.0.0.2", &address, &config).await.then_some(())).await;
    });
}

/// The CA of the controllers, as the leader keeps it.
async fn authority(whole: &Whole) -> Issuer<'static, KeyPair> {
    let path = "/api/v1/namespaces/guestlet-system/secrets/guestlet-controller-ca";
    let secret = until("there is a CA", async || whole.cluster.api.get(path).await).await;
    let secret: Secret = serde_json::from_value(secret).unwrap();
    let key = secret.data.unwrap().remove("tls.key").unwrap().0;
    let mut parameters = CertificateParams::default();
    parameters.distinguished_name = DistinguishedName::new();
    parameters.distinguished_name.push(DnType::CommonName, "guestlet-controller-ca");
    parameters.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    parameters.key_usages = vec![KeyUsagePurpose::KeyCertSign];
    Issuer::new(parameters, KeyPair::from_pem(&String::from_utf8(key).unwrap()).unwrap())
}

/// How somebody connects as this node by a certificate that lasts for so long.
async fn config_for(whole: &Whole, node: &str, lasting: Duration) -> Arc<ClientConfig> {
    let key = KeyPair::generate().unwrap();
    let mut parameters = CertificateParams::default();
    let now = SystemTime::now();
    (parameters.not_before, parameters.not_after) = (now.into(), (now + lasting).into());
    parameters.subject_alt_names = vec![SanType::URI(format!("guestlet://node/{node}").try_into().unwrap())];
    parameters.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
    let certificate = parameters.signed_by(&key, &authority(whole).await).unwrap();
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(whole.authority().await.as_bytes()).unwrap()).unwrap();
    let key = PrivateKeyDer::try_from(key.serialize_der()).unwrap();
    let config = ClientConfig::builder()
        .with_root_certificates(roots)
        .with_client_auth_cert(vec![certificate.der().clone()], key);
    Arc::new(config.unwrap())
}

#[test]
fn a_connection_ends_with_the_certificate_of_its_node() {
    wait(async {
        let whole = Whole::start(1).await;
        let _web = whole.vm("web").await;
        let instance = whole.cluster.instance("web").await.unwrap();
        let node = instance["status"]["nodeName"].as_str().unwrap();
        let request = AskRequest {
            vm: Some(RunningVirtualMachine {
                namespace: "default".into(),
                name: "web".into(),
                uid: instance["metadata"]["uid"].as_str().unwrap().into(),
            }),
            method: "/csi.v1.Controller/ListVolumes".into(),
            request: Vec::new(),
        };
        let mut connected = whole.connect_with(config_for(&whole, node, Duration::from_secs(10)).await).await;
        connected.calls.ask(request.clone()).await.unwrap();
        until("the connection is closed", async || connected.connection.is_finished().then_some(())).await;
        assert!(connected.calls.ask(request).await.is_err());
    });
}
