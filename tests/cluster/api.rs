//! The API server, as somebody who may do everything asks it.

use std::net::SocketAddr;
use std::path::Path;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use http::{Method, Request, StatusCode};
use hyper::body::{Body as _, Incoming};
use hyper::client::conn::http1::SendRequest;
use hyper_util::rt::TokioIo;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use serde_json::Value;
use tokio::net::TcpStream;
use tokio::task::JoinHandle;
use tokio_rustls::TlsConnector;

use crate::patience::{PATIENCE, until};

/// Where kinds are made known.
const KINDS: &str = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions";

/// The path of the objects among which this one belongs.
pub fn collection(object: &Value) -> String {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let (version, kind) = (text(&object["apiVersion"]), text(&object["kind"]).to_lowercase());
    let plural = match kind.strip_suffix('y') {
        Some(stem) => format!("{stem}ies"),
        None if kind.ends_with("class") => format!("{kind}es"),
        None => format!("{kind}s"),
    };
    let root = if version.contains('/') { "apis" } else { "api" };
    let namespace = object["metadata"]["namespace"].as_str();
    let within = namespace.map(|name| format!("/namespaces/{name}")).unwrap_or_default();
    format!("/{root}/{version}{within}/{plural}")
}

/// A client; a connection for each request, unless it keeps them.
#[derive(Clone)]
pub struct Api {
    address: SocketAddr,
    tls: TlsConnector,
    /// Connections on which nothing is asked now.
    kept: Option<Arc<Mutex<Vec<Asker>>>>,
}

/// A connection that is asked on.
struct Asker {
    sender: SendRequest<String>,
    _connection: Connection,
}

impl Api {
    /// One that asks as the user of `<name>.conf` in the folder of the cluster's [`crate::authority::Authority`].
    pub fn read(folder: &Path, name: &str) -> Self {
        let config = std::fs::read(folder.join(format!("{name}.conf"))).unwrap();
        let config: Value = serde_json::from_slice(&config).unwrap();
        let server = config["clusters"][0]["cluster"]["server"].as_str().unwrap();
        let address = server.strip_prefix("https://").unwrap().parse().unwrap();
        let authority = CertificateDer::from_pem_file(folder.join("ca.crt")).unwrap();
        let pair = folder.join(format!("{name}.pem"));
        let mut roots = RootCertStore::empty();
        roots.add(authority).unwrap();
        let config = ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots)
            .with_client_auth_cert(
                vec![CertificateDer::from_pem_file(&pair).unwrap()],
                PrivateKeyDer::from_pem_file(&pair).unwrap(),
            )
            .unwrap();
        Self { address, tls: TlsConnector::from(Arc::new(config)), kept: None }
    }

    /// The same, which asks again on the connections that it has: for who asks for so much that the handshakes count.
    #[allow(dead_code, reason = "not each test program has one who asks for so much")]
    #[must_use]
    pub fn keeping(&self) -> Self {
        Self { kept: Some(Arc::default()), ..self.clone() }
    }

    /// Whether the API server says that it is ready.
    pub async fn is_ready(&self) -> bool {
        matches!(self.send(Method::GET, "/readyz", String::new(), "").await, Ok((StatusCode::OK, _)))
    }

    /// The object at this path, if there is one.
    pub async fn get(&self, path: &str) -> Option<Value> {
        match self.ask(Method::GET, path, None).await {
            (StatusCode::NOT_FOUND, _) => None,
            answer => Some(done(path, answer)),
        }
    }

    /// The objects of this path.
    pub async fn list(&self, path: &str) -> Vec<Value> {
        let mut list = done(path, self.ask(Method::GET, path, None).await);
        serde_json::from_value(list["items"].take()).unwrap()
    }

    /// Makes an object among those of this path.
    pub async fn create(&self, path: &str, object: &Value) -> Value {
        done(path, self.ask(Method::POST, path, Some(object)).await)
    }

    /// Makes an object among those of this path, unless there is one of that name.
    pub async fn ensure(&self, path: &str, object: &Value) {
        match self.ask(Method::POST, path, Some(object)).await {
            (StatusCode::CONFLICT, _) => {}
            answer => drop(done(path, answer)),
        }
    }

    /// Makes a kind known, unless it is, and waits until it is served.
    pub async fn add_kind(&self, kind: &Value) {
        let name = kind["metadata"]["name"].as_str().unwrap();
        self.ensure(KINDS, kind).await;
        until(&format!("{name} is served"), async || {
            let kind = self.get(&format!("{KINDS}/{name}")).await?;
            let conditions = kind["status"]["conditions"].as_array()?;
            let has = |name: &str| conditions.iter().any(|it| it["type"] == name && it["status"] == "True");
            assert!(!has("NonStructuralSchema"), "{kind}");
            has("Established").then_some(())
        })
        .await;
    }

    /// Changes an object as a JSON merge patch says, if it is there.
    pub async fn patch(&self, path: &str, change: &Value) -> Option<Value> {
        match self.ask(Method::PATCH, path, Some(change)).await {
            (StatusCode::NOT_FOUND, _) => None,
            answer => Some(done(path, answer)),
        }
    }

    /// Puts an object in the place of the version that it was made from; none if there is another by now.
    pub async fn replace(&self, path: &str, object: &Value) -> Option<Value> {
        match self.ask(Method::PUT, path, Some(object)).await {
            (StatusCode::CONFLICT, _) => None,
            answer => Some(done(path, answer)),
        }
    }

    /// Deletes an object, if it is there.
    pub async fn delete(&self, path: &str) {
        match self.ask(Method::DELETE, path, None).await {
            (StatusCode::NOT_FOUND, _) => {}
            answer => drop(done(path, answer)),
        }
    }

    async fn ask(&self, method: Method, path: &str, body: Option<&Value>) -> (StatusCode, Value) {
        let kind = if method == Method::PATCH { "application/merge-patch+json" } else { "application/json" };
        let body = body.map(Value::to_string).unwrap_or_default();
        // A server that a test has ended is asked again until it is back, is ready and knows who may do what.
        let deadline = Instant::now() + PATIENCE;
        loop {
            match self.send(method.clone(), path, body.clone(), kind).await {
                // A newer one says of a kind that was just made known that there are too many requests.
                Ok((
                    StatusCode::FORBIDDEN | StatusCode::SERVICE_UNAVAILABLE | StatusCode::TOO_MANY_REQUESTS,
                    _,
                )) if Instant::now() < deadline => {}
                Ok((status, answer)) => return (status, serde_json::from_slice(&answer).unwrap()),
                Err(error) => assert!(Instant::now() < deadline, "{path}: {error}"),
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    /// Asks once; the whole answer.
    pub async fn send(
        &self,
        method: Method,
        path: &str,
        body: String,
        kind: &str,
    ) -> std::io::Result<(StatusCode, Vec<u8>)> {
        let answer = self.open(method, path, body, kind).await?;
        let body = read(answer.body).await.map_err(std::io::Error::other)?;
        if let Some(kept) = &self.kept {
            kept.lock().unwrap().push(answer.asker);
        }
        Ok((answer.status, body))
    }

    /// Asks once. The answer's body is read by whoever asks, as long as it comes.
    pub async fn open(
        &self,
        method: Method,
        path: &str,
        body: String,
        kind: &str,
    ) -> std::io::Result<Answer> {
        let kept = || self.kept.as_ref()?.lock().unwrap().pop();
        let mut asker = loop {
            let Some(mut asker) = kept() else { break self.dial().await? };
            // The server may have ended it.
            if asker.sender.ready().await.is_ok() {
                break asker;
            }
        };
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header("host", self.address.to_string())
            .header("content-type", kind)
            .body(body)
            .unwrap();
        let answer = asker.sender.send_request(request).await.map_err(std::io::Error::other)?;
        let (head, body) = answer.into_parts();
        Ok(Answer { status: head.status, body, asker })
    }

    async fn dial(&self) -> std::io::Result<Asker> {
        let stream = TcpStream::connect(self.address).await?;
        let stream = self.tls.connect(ServerName::from(self.address.ip()), stream).await?;
        let handshake = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await;
        let (sender, connection) = handshake.map_err(std::io::Error::other)?;
        Ok(Asker { sender, _connection: Connection(tokio::spawn(async move { drop(connection.await) })) })
    }
}

/// What the API server answers with.
pub struct Answer {
    pub status: StatusCode,
    pub body: Incoming,
    asker: Asker,
}

/// Ends with this value.
struct Connection(JoinHandle<()>);

impl Drop for Connection {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// The whole of a body.
pub async fn read(mut body: Incoming) -> hyper::Result<Vec<u8>> {
    let mut all = Vec::new();
    while let Some(frame) = std::future::poll_fn(|context| Pin::new(&mut body).poll_frame(context)).await {
        all.extend(frame?.into_data().unwrap_or_default());
    }
    Ok(all)
}

#[track_caller]
fn done(path: &str, (status, answer): (StatusCode, Value)) -> Value {
    assert!(status.is_success(), "{path}: {status}: {answer}");
    answer
}
