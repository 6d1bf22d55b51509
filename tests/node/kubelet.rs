//! What of kubelet an API server asks for `kubectl exec`: it takes the WebSocket that the API server passes on, runs the program
//! in what stands for the pod, and passes its streams on by the protocol `v4.channel.k8s.io`. A pod is a host half of a lab, and
//! the program is the real guestctl, with the socket of that as a container's environment has it.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::{SinkExt as _, StreamExt as _};
use http::HeaderValue;
use http::header::SEC_WEBSOCKET_PROTOCOL;
use rcgen::{CertificateParams, KeyPair};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::process::{ChildStdin, Command};
use tokio::sync::{Notify, mpsc};
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::pki_types::PrivateKeyDer;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::handshake::server::{ErrorResponse, Request, Response};

use crate::api::Api;

const PROTOCOL: &str = "v4.channel.k8s.io";
const INPUT: u8 = 0;
const OUTPUT: u8 = 1;
const ERRORS: u8 = 2;
const STATUS: u8 = 3;

/// What runs in the pods of a node.
#[derive(Default)]
pub struct Pods {
    /// The socket of the host half in each, by the pod's name.
    sockets: BTreeMap<String, PathBuf>,
    /// What was run: the pod's name, and the command.
    pub asked: Vec<(String, Vec<String>)>,
    /// How long it takes until something is passed on of what a program prints, and how it has ended. Input that comes before
    /// that resets the connection, as it does where the program has ended already.
    pub delay: Duration,
}

impl Pods {
    /// The container of this pod is gone, and its Pod does not say so yet.
    pub fn forget(&mut self, pod: &str) {
        self.sockets.remove(pod);
    }
}

/// A kubelet; it ends with this value, and what runs in its pods with it.
pub struct Kubelet {
    pub pods: Arc<Mutex<Pods>>,
    pub address: SocketAddr,
    broken: Arc<Notify>,
    _serving: JoinSet<()>,
}

impl Kubelet {
    /// Serves at a port of this address.
    pub async fn start(address: IpAddr) -> Self {
        let listener = TcpListener::bind((address, 0)).await.unwrap();
        let address = listener.local_addr().unwrap();
        let pods = Arc::<Mutex<Pods>>::default();
        let (acceptor, own) = (acceptor(), Arc::clone(&pods));
        let broken = Arc::<Notify>::default();
        let breaks = Arc::clone(&broken);
        let mut serving = JoinSet::new();
        serving.spawn(async move {
            let mut connections = JoinSet::new();
            loop {
                tokio::select! {
                    Ok((stream, _)) = listener.accept() => {
                        connections.spawn(serve(acceptor.clone(), stream, Arc::clone(&own)));
                    }
                    () = breaks.notified() => connections.abort_all(),
                }
            }
        });
        Self { pods, address, broken, _serving: serving }
    }

    /// All connections break, without a word.
    pub fn break_connections(&self) {
        self.broken.notify_one();
    }

    /// Says at the Node where this kubelet is.
    pub async fn announce(&self, api: &Api, node: &str) {
        let status = json!({
            "addresses": [{ "type": "InternalIP", "address": self.address.ip() }],
            "daemonEndpoints": { "kubeletEndpoint": { "Port": self.address.port() } },
        });
        api.patch(&format!("/api/v1/nodes/{node}/status"), &json!({ "status": status })).await.unwrap();
    }

    /// There is a host half with this socket in the pod of this name.
    pub fn run(&self, pod: &str, socket: PathBuf) {
        self.pods.lock().unwrap().sockets.insert(pod.to_owned(), socket);
    }
}

fn acceptor() -> TlsAcceptor {
    let key = KeyPair::generate().unwrap();
    let certificate = CertificateParams::new(["kubelet".to_owned()]).unwrap().self_signed(&key).unwrap();
    let key = PrivateKeyDer::try_from(key.serialize_der()).unwrap();
    let config = ServerConfig::builder().with_no_client_auth();
    TlsAcceptor::from(Arc::new(config.with_single_cert(vec![certificate.der().clone()], key).unwrap()))
}

async fn serve(acceptor: TlsAcceptor, stream: TcpStream, pods: Arc<Mutex<Pods>>) {
    let Ok(stream) = acceptor.accept(stream).await else { return };
    let mut asked = None;
    #[allow(clippy::result_large_err, reason = "so it is defined")]
    let answer = |request: &Request, mut response: Response| -> Result<Response, ErrorResponse> {
        asked = Some(request.uri().clone());
        let offered = request.headers().get(SEC_WEBSOCKET_PROTOCOL).unwrap().to_str().unwrap();
        assert!(offered.split(", ").any(|one| one == PROTOCOL), "{offered}");
        response.headers_mut().insert(SEC_WEBSOCKET_PROTOCOL, HeaderValue::from_static(PROTOCOL));
        Ok(response)
    };
    let Ok(socket) = tokio_tungstenite::accept_hdr_async(stream, answer).await else { return };
    let asked = asked.unwrap();
    // /exec/NAMESPACE/POD/CONTAINER
    let path: Vec<_> = asked.path().split('/').collect();
    assert_eq!((path[1], path[2], path[4]), ("exec", "guestlet-system", "guestlet-host"), "{asked}");
    let words: Vec<_> =
        asked.query().unwrap_or_default().split('&').filter_map(|part| part.split_once('=')).collect();
    for wanted in [("input", "1"), ("output", "1"), ("error", "1")] {
        assert!(words.contains(&wanted), "{asked}");
    }
    let command: Vec<_> =
        words.iter().filter(|(key, _)| *key == "command").map(|(_, word)| decoded(word)).collect();
    let (found, delay) = {
        let mut pods = pods.lock().unwrap();
        pods.asked.push((path[3].to_owned(), command.clone()));
        (pods.sockets.get(path[3]).cloned(), pods.delay)
    };
    let (mut sink, mut messages) = socket.split();
    let Some(place) = found else {
        let told =
            json!({ "status": "Failure", "message": "container not found (\"guestlet-host\")", "code": 500 });
        let _ = sink.send(frame(STATUS, told.to_string().as_bytes())).await;
        return;
    };
    let (frames, mut to_send) = mpsc::channel(4);
    let mut running = JoinSet::new();
    let (input, to_program) = mpsc::channel::<Vec<u8>>(4);
    running.spawn(run(command, place, to_program, frames));
    tokio::select! {
        () = tokio::time::sleep(delay) => {}
        _ = messages.next(), if !delay.is_zero() => return,
    }
    let receiving = async {
        while let Some(Ok(message)) = messages.next().await {
            if let Message::Binary(data) = message
                && data.first() == Some(&INPUT)
            {
                // What the program does not read any more is thrown away: how it has ended is still to be told.
                let _ = input.send(data[1..].to_vec()).await;
            }
        }
    };
    let sending = async {
        while let Some(frame) = to_send.recv().await {
            if sink.send(frame).await.is_err() {
                return;
            }
        }
        let _ = sink.close().await;
    };
    tokio::select! {
        () = receiving => {}
        () = sending => {}
    }
    // The program hears that its input has ended, and ends, as in a container.
    drop(input);
    while running.join_next().await.is_some() {}
}

/// A word of a query.
fn decoded(word: &str) -> String {
    let mut parts = word.split('%');
    let first = parts.next().unwrap().to_owned();
    parts.fold(first, |all, part| {
        let code = u8::from_str_radix(&part[..2], 16).unwrap();
        format!("{all}{}{}", char::from(code), &part[2..])
    })
}

fn frame(channel: u8, data: &[u8]) -> Message {
    Message::binary([&[channel], data].concat())
}

async fn run(
    command: Vec<String>,
    socket: PathBuf,
    input: mpsc::Receiver<Vec<u8>>,
    frames: mpsc::Sender<Message>,
) {
    assert_eq!(command[0], "guestctl");
    let mut program = Command::new(env!("CARGO_BIN_EXE_guestctl"));
    program.args(&command[1..]).env("GUESTLET_HOST_SOCKET", socket);
    let streams = program.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = streams.kill_on_drop(true).spawn().unwrap();
    let (output, errors) = (child.stdout.take().unwrap(), child.stderr.take().unwrap());
    let stdin = child.stdin.take().unwrap();
    let ending = async {
        // Who has gone reads nothing; the program notices by its input.
        tokio::join!(pass(OUTPUT, output, frames.clone()), pass(ERRORS, errors, frames.clone()));
        let status = child.wait().await.unwrap();
        let _ = frames.send(frame(STATUS, told(status.code()).to_string().as_bytes())).await;
    };
    let feeding = async {
        feed(stdin, input).await;
        std::future::pending::<()>().await;
    };
    tokio::select! {
        () = ending => {}
        () = feeding => {}
    }
}

async fn feed(mut stdin: ChildStdin, mut input: mpsc::Receiver<Vec<u8>>) {
    while let Some(data) = input.recv().await {
        if stdin.write_all(&data).await.is_err() {
            return;
        }
    }
}

async fn pass(channel: u8, mut from: impl tokio::io::AsyncRead + Unpin, frames: mpsc::Sender<Message>) {
    let mut buffer = vec![0; 16 * 1024];
    while let Ok(length) = from.read(&mut buffer).await
        && length > 0
    {
        let _ = frames.send(frame(channel, &buffer[..length])).await;
    }
}

/// How kubelet says how a program has ended.
fn told(code: Option<i32>) -> Value {
    match code {
        Some(0) => json!({ "metadata": {}, "status": "Success" }),
        code => json!({
            "metadata": {},
            "status": "Failure",
            "reason": "NonZeroExitCode",
            "message": "command terminated with non-zero exit code",
            "details": { "causes": [{ "reason": "ExitCode", "message": code.unwrap_or(137).to_string() }] },
        }),
    }
}
