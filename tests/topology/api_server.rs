//! An API server as far as a kubelet's credential sees one: Nodes with versions, conflicts, merge patches, lists and
//! watches with bookmarks that expire, `NodeRestriction`'s rules; over TLS with client certificates; with faults on demand.

use std::collections::{BTreeMap, HashMap};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll};
use std::time::Duration;

use guestlet::supervise::Scope;
use http::{Method, Request, Response, StatusCode};
use hyper::body::{Body, Bytes, Frame, Incoming};
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use rcgen::{BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio_rustls::TlsAcceptor;

/// What the server does instead of its work.
#[derive(Debug, Clone, Default)]
pub enum Fault {
    #[default]
    None,
    /// It answers with this code.
    Refuse(u16),
    /// It answers with these bytes, and this code.
    Say(u16, Vec<u8>),
    /// It tells who watches this line, and who comes to watch.
    Tell(String),
    /// It refuses patches with this code.
    RefusePatches(u16),
}

#[derive(Default)]
struct Store {
    version: u64,
    nodes: BTreeMap<String, Value>,
    /// Version, type, object.
    log: Vec<(u64, &'static str, Value)>,
    /// What happened before is not known any more.
    compacted: u64,
    requests: Vec<String>,
    fault: Fault,
    /// How many patches somebody else is faster than.
    rivals: u32,
    watchers: Vec<mpsc::UnboundedSender<Told>>,
    /// Whose a certificate is.
    issued: HashMap<Vec<u8>, String>,
}

#[derive(Clone)]
enum Told {
    Line(String),
    End,
}

/// A cluster whose API server can be stopped and started.
pub struct Cluster {
    pub folder: tempfile::TempDir,
    authority: (String, KeyPair, CertificateParams),
    store: Arc<Mutex<Store>>,
    address: SocketAddr,
    running: Option<Scope>,
}

impl Cluster {
    pub async fn start() -> Self {
        let key = KeyPair::generate().unwrap();
        let mut parameters = CertificateParams::default();
        parameters.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        parameters.distinguished_name.push(DnType::CommonName, "cluster");
        let authority = (parameters.self_signed(&key).unwrap().pem(), key, parameters);
        let mut cluster = Self {
            folder: tempfile::tempdir().unwrap(),
            authority,
            store: Arc::default(),
            address: ([127, 0, 0, 1], 0).into(),
            running: None,
        };
        cluster.serve().await;
        cluster
    }

    /// Serves, at the address where it did before.
    pub async fn serve(&mut self) {
        let listener = TcpListener::bind(self.address).await.unwrap();
        self.address = listener.local_addr().unwrap();
        let (certificate, key) = self.issue("apiserver", Duration::from_secs(3600));
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_slice(self.authority.0.as_bytes()).unwrap()).unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider.clone());
        let config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_client_cert_verifier(verifier.build().unwrap())
            .with_single_cert(
                vec![CertificateDer::from_pem_slice(certificate.as_bytes()).unwrap()],
                PrivateKeyDer::from_pem_slice(key.as_bytes()).unwrap(),
            )
            .unwrap();
        let acceptor = TlsAcceptor::from(Arc::new(config));
        let scope = Scope::new();
        let (children, store) = (scope.children().clone(), Arc::clone(&self.store));
        scope.children().spawn(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                let (acceptor, store) = (acceptor.clone(), Arc::clone(&store));
                children.spawn(async move {
                    let Ok(stream) = acceptor.accept(stream).await else { return };
                    let certificate = stream.get_ref().1.peer_certificates().unwrap()[0].to_vec();
                    let node = store.lock().unwrap().issued.get(&certificate).cloned().unwrap_or_default();
                    let service =
                        service_fn(move |request| answer(Arc::clone(&store), node.clone(), request));
                    let connection = hyper::server::conn::http1::Builder::new();
                    drop(connection.serve_connection(TokioIo::new(stream), service).await);
                });
            }
        });
        self.running = Some(scope);
    }

    /// Closes every connection, and listens no more.
    pub fn stop(&mut self) {
        self.running = None;
        self.store().watchers.clear();
    }

    fn store(&self) -> MutexGuard<'_, Store> {
        self.store.lock().unwrap()
    }

    fn issue(&self, name: &str, lasts: Duration) -> (String, String) {
        let (_, authority_key, parameters) = &self.authority;
        let issuer = Issuer::from_params(parameters, authority_key);
        let key = KeyPair::generate().unwrap();
        let mut parameters = CertificateParams::new(vec!["127.0.0.1".to_owned()]).unwrap();
        parameters.distinguished_name.push(DnType::CommonName, name);
        parameters.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        let now = std::time::SystemTime::now();
        // None at all: it was good until an hour ago.
        let end = if lasts.is_zero() { now - Duration::from_secs(3600) } else { now + lasts };
        parameters.not_after = end.into();
        let certificate = parameters.signed_by(&key, &issuer).unwrap();
        if let Some(node) = name.strip_prefix("system:node:") {
            self.store().issued.insert(certificate.der().to_vec(), node.to_owned());
        }
        (certificate.pem(), key.serialize_pem())
    }

    pub fn kubeconfig(&self) -> PathBuf {
        self.folder.path().join("agent/kubelet.kubeconfig")
    }

    /// Gives the kubelet of `node` a credential, as RKE2 lays it out; again for another one.
    pub fn admit(&self, node: &str) {
        self.admit_as(&format!("system:node:{node}"), Duration::from_secs(3600));
    }

    pub fn admit_as(&self, name: &str, lasts: Duration) {
        let kubeconfig = self.kubeconfig();
        let folder = kubeconfig.parent().unwrap();
        std::fs::create_dir_all(folder).unwrap();
        for (file, text) in self.credential(name, lasts, folder) {
            replace(&folder.join(file), &text);
        }
    }

    /// The files that such a credential is made of, by their names, for that folder.
    pub fn credential(&self, name: &str, lasts: Duration, folder: &Path) -> [(&'static str, String); 3] {
        let (certificate, key) = self.issue(name, lasts);
        let kubeconfig = format!(
            "apiVersion: v1\nkind: Config\nclusters:\n- cluster:\n    server: https://{}\n    \
             certificate-authority: server-ca.crt\n  name: local\ncontexts:\n- context:\n    cluster: local\n    \
             namespace: default\n    user: user\n  name: Default\ncurrent-context: Default\nusers:\n- name: user\n  \
             user:\n    client-certificate: client-kubelet.pem\n    client-key: {}\n",
            self.address,
            folder.join("client-kubelet.pem").display()
        );
        [
            ("server-ca.crt", self.authority.0.clone()),
            // As kubelet does: one file with both.
            ("client-kubelet.pem", certificate + &key),
            ("kubelet.kubeconfig", kubeconfig),
        ]
    }

    /// Where it listens, on this machine.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Registers a Node.
    pub fn join(&self, name: &str, labels: Value) {
        let node = json!({
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": { "name": name, "uid": format!("uid-of-{name}"), "labels": labels },
            "spec": {},
            "status": {
                "conditions": [{ "type": "Ready", "status": "True", "message": "kubelet is posting ready status" }],
                "addresses": [{ "type": "InternalIP", "address": "192.0.2.7" }, { "type": "Hostname", "address": name }],
                "nodeInfo": { "kubeletVersion": "v1.36.1" },
            },
        });
        self.store().put(name, "ADDED", node);
    }

    pub fn node(&self, name: &str) -> Value {
        self.store().nodes.get(name).cloned().unwrap_or_default()
    }

    pub fn label(&self, name: &str, key: &str) -> Option<String> {
        self.node(name)["metadata"]["labels"][key].as_str().map(str::to_owned)
    }

    /// Somebody else changes a Node.
    pub fn edit(&self, name: &str, edit: impl FnOnce(&mut Value)) {
        let mut store = self.store();
        let mut node = store.nodes[name].clone();
        edit(&mut node);
        store.put(name, "MODIFIED", node);
    }

    /// What was asked since the last time.
    pub fn requests(&self) -> Vec<String> {
        std::mem::take(&mut self.store().requests)
    }

    pub fn watchers(&self) -> usize {
        let mut store = self.store();
        store.watchers.retain(|watcher| !watcher.is_closed());
        store.watchers.len()
    }

    pub fn fault(&self, fault: Fault) {
        let mut store = self.store();
        if let Fault::Tell(line) = &fault {
            store.tell(&Told::Line(line.clone()));
        }
        store.fault = fault;
    }

    /// Before each of the next patches somebody else changes the Node.
    pub fn rivals(&self, count: u32) {
        self.store().rivals = count;
    }

    /// Ends every watch: where it was is not known any more.
    pub fn expire(&self) {
        let mut store = self.store();
        store.version += 1;
        store.compacted = store.version;
        let status = status(410, "too old resource version");
        store.tell(&Told::Line(json!({ "type": "ERROR", "object": status }).to_string()));
        store.end();
    }

    /// Ends every watch, as a server does after its time.
    pub fn end_watches(&self) {
        self.store().end();
    }

    pub fn bookmark(&self) {
        let mut store = self.store();
        store.version += 1;
        let object = json!({ "kind": "Node", "apiVersion": "v1", "metadata": { "resourceVersion": store.version.to_string() } });
        store.tell(&Told::Line(json!({ "type": "BOOKMARK", "object": object }).to_string()));
    }
}

fn replace(path: &Path, text: &str) {
    let beside = path.with_extension("new");
    std::fs::write(&beside, text).unwrap();
    std::fs::rename(beside, path).unwrap();
}

impl Store {
    fn put(&mut self, name: &str, kind: &'static str, mut node: Value) {
        self.version += 1;
        node["metadata"]["resourceVersion"] = json!(self.version.to_string());
        self.log.push((self.version, kind, node.clone()));
        self.tell(&Told::Line(json!({ "type": kind, "object": node }).to_string()));
        self.nodes.insert(name.to_owned(), node);
    }

    /// Ends every watch.
    fn end(&mut self) {
        self.tell(&Told::End);
        self.watchers.clear();
    }

    fn tell(&mut self, told: &Told) {
        self.watchers.retain(|watcher| watcher.send(told.clone()).is_ok());
    }

    /// A merge patch by the kubelet of `name`, within the rules of `NodeRestriction`.
    fn patch(&mut self, name: &str, patch: &Value) -> Result<Value, (u16, String)> {
        if self.rivals > 0 {
            self.rivals -= 1;
            let mut node = self.nodes[name].clone();
            node["status"]["rival"] = json!(self.rivals);
            self.put(name, "MODIFIED", node);
        }
        let node = self.nodes.get(name).ok_or((404, format!("nodes {name:?} not found")))?;
        let expected = &patch["metadata"]["resourceVersion"];
        if !expected.is_null() && *expected != node["metadata"]["resourceVersion"] {
            return Err((409, "the object has been modified".to_owned()));
        }
        for key in patch["metadata"]["labels"].as_object().into_iter().flatten().map(|(key, _)| key) {
            let prefix = key.split_once('/').map_or("", |(prefix, _)| prefix);
            let below = |domain: &str| prefix == domain || prefix.ends_with(&format!(".{domain}"));
            let permitted = ["topology.kubernetes.io/zone", "topology.kubernetes.io/region"]
                .contains(&key.as_str())
                || below("node.kubernetes.io")
                || below("kubelet.kubernetes.io");
            if (below("kubernetes.io") || below("k8s.io")) && !permitted {
                return Err((403, format!("is not allowed to modify labels: {key}")));
            }
        }
        let id = &node["spec"]["providerID"];
        if !patch["spec"]["providerID"].is_null() && !id.is_null() && *id != patch["spec"]["providerID"] {
            return Err((403, "may not change the providerID".to_owned()));
        }
        if patch["spec"].get("taints").is_some() {
            return Err((403, "is not allowed to modify taints".to_owned()));
        }
        let mut after = node.clone();
        merge(&mut after, patch);
        self.put(name, "MODIFIED", after);
        Ok(self.nodes[name].clone())
    }
}

/// RFC 7386.
fn merge(target: &mut Value, patch: &Value) {
    let Some(patch) = patch.as_object() else {
        *target = patch.clone();
        return;
    };
    if !target.is_object() {
        *target = json!({});
    }
    let target = target.as_object_mut().unwrap();
    for (key, value) in patch {
        if value.is_null() {
            target.remove(key);
        } else {
            merge(target.entry(key.clone()).or_insert(Value::Null), value);
        }
    }
}

fn status(code: u16, message: &str) -> Value {
    json!({
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "message": message,
        "reason": "Refused", "code": code,
    })
}

/// Pieces of a body, as they come.
struct Pieces(mpsc::UnboundedReceiver<Told>);

impl Body for Pieces {
    type Data = Bytes;
    type Error = std::io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, std::io::Error>>> {
        self.0.poll_recv(context).map(|told| match told {
            Some(Told::Line(line)) => Some(Ok(Frame::data(Bytes::from(line + "\n")))),
            Some(Told::End) | None => None,
        })
    }
}

fn whole(code: u16, bytes: Vec<u8>) -> Response<Pieces> {
    let (sender, receiver) = mpsc::unbounded_channel();
    sender.send(Told::Line(String::from_utf8_lossy(&bytes).into_owned())).unwrap();
    let response = Response::builder().status(StatusCode::from_u16(code).unwrap());
    response.header("content-type", "application/json").body(Pieces(receiver)).unwrap()
}

async fn answer(
    store: Arc<Mutex<Store>>,
    node: String,
    request: Request<Incoming>,
) -> Result<Response<Pieces>, std::io::Error> {
    let (head, body) = request.into_parts();
    let body = read(body).await;
    let path = head.uri.path().to_owned();
    let query = head.uri.query().unwrap_or_default().replace("%3D", "=").replace("%2E", ".");
    let parameter = |name: &str| {
        query.split('&').find_map(|pair| Some(pair.strip_prefix(name)?.strip_prefix('=')?.to_owned()))
    };
    let watches = parameter("watch").is_some();
    let verb = match (&head.method, path.as_str()) {
        (&Method::GET, _) if watches => "watch",
        (&Method::GET, _) => "list",
        (&Method::PATCH, _) => "patch",
        (_, "/api/v1/namespaces/default/events") => "event",
        _ => "other",
    };
    let fault = {
        let mut store = store.lock().unwrap();
        store.requests.push(verb.to_owned());
        store.fault.clone()
    };
    let refused = |code: u16, message: &str| Ok(whole(code, status(code, message).to_string().into_bytes()));
    match &fault {
        Fault::Refuse(code) => return refused(*code, "as the test wants it"),
        Fault::RefusePatches(code) if verb == "patch" => return refused(*code, "as the test wants it"),
        Fault::Say(code, bytes) => return Ok(whole(*code, bytes.clone())),
        _ => {}
    }
    let own = parameter("fieldSelector").as_deref() == Some(&format!("metadata.name={node}"));
    let mut locked = store.lock().unwrap();
    match verb {
        "list" | "watch" if path != "/api/v1/nodes" || !own => refused(403, "only your own Node"),
        "list" => {
            let items: Vec<_> = locked.nodes.get(&node).into_iter().collect();
            let list =
                json!({ "metadata": { "resourceVersion": locked.version.to_string() }, "items": items });
            Ok(whole(200, list.to_string().into_bytes()))
        }
        "watch" => {
            let since: u64 = parameter("resourceVersion").unwrap().parse().unwrap();
            if since < locked.compacted {
                return refused(410, "too old resource version");
            }
            let (sender, receiver) = mpsc::unbounded_channel();
            for (version, kind, object) in &locked.log {
                if *version > since && object["metadata"]["name"] == node.as_str() {
                    let line = json!({ "type": kind, "object": object }).to_string();
                    sender.send(Told::Line(line)).unwrap();
                }
            }
            if let Fault::Tell(line) = fault {
                sender.send(Told::Line(line)).unwrap();
            }
            locked.watchers.push(sender);
            Ok(Response::new(Pieces(receiver)))
        }
        "patch" if path != format!("/api/v1/nodes/{node}") => refused(403, "only your own Node"),
        "patch" if head.headers["content-type"] != "application/merge-patch+json" => {
            refused(415, "what is it?")
        }
        "patch" => match locked.patch(&node, &serde_json::from_slice(&body).unwrap()) {
            Ok(node) => Ok(whole(200, node.to_string().into_bytes())),
            Err((code, message)) => refused(code, &message),
        },
        "event" => Ok(whole(201, body)),
        _ => refused(404, "no such path"),
    }
}

async fn read(mut body: Incoming) -> Vec<u8> {
    let mut bytes = Vec::new();
    while let Some(Ok(frame)) = std::future::poll_fn(|context| Pin::new(&mut body).poll_frame(context)).await
    {
        bytes.extend_from_slice(frame.data_ref().map(Bytes::as_ref).unwrap_or_default());
    }
    bytes
}
