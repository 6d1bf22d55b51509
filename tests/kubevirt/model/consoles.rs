//! virt-api and virt-handler: the serial console of an instance, over a WebSocket. Whoever opened it last has it; the connection of
//! whoever had it before is closed without a word.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use futures_util::{SinkExt as _, StreamExt as _};
use http::header::{CONNECTION, SEC_WEBSOCKET_ACCEPT, SEC_WEBSOCKET_KEY, SEC_WEBSOCKET_PROTOCOL, UPGRADE};
use http::{Request, Response, StatusCode};
use hyper::body::Incoming;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream};
use tokio::sync::mpsc;
use tokio::task::AbortHandle;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::handshake::derive_accept_key;
use tokio_tungstenite::tungstenite::protocol::Role;

const PROTOCOL: &str = "plain.kubevirt.io";
/// Bytes of a serial port that wait.
const BUFFER: usize = 4096;

/// A guest's end of its console, for each connection that is opened.
pub type Ports = mpsc::UnboundedReceiver<DuplexStream>;

/// The consoles of instances, by namespace and name.
#[derive(Default)]
pub struct Consoles(Mutex<BTreeMap<String, Console>>);

/// Where its connections go to, and what serves that which has it.
type Console = (mpsc::UnboundedSender<DuplexStream>, Option<AbortHandle>);

impl Consoles {
    /// The instance of this name has one from now on.
    pub fn add(&self, name: &str) -> Ports {
        let (ports, taken) = mpsc::unbounded_channel();
        let mut consoles = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        consoles.insert(name.to_owned(), (ports, None));
        taken
    }

    /// Agrees to a WebSocket, and serves it. None if there is no such console.
    pub fn open(&self, name: &str, request: Request<Incoming>) -> Option<Response<String>> {
        let mut consoles = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (ports, before) = consoles.get_mut(name)?;
        let (guest, ours) = tokio::io::duplex(BUFFER);
        let headers = request.headers();
        assert_eq!(headers[SEC_WEBSOCKET_PROTOCOL], PROTOCOL);
        let accept = derive_accept_key(headers[SEC_WEBSOCKET_KEY].as_bytes());
        let _ = ports.send(guest);
        let serving = tokio::spawn(serve(request, ours)).abort_handle();
        if let Some(before) = before.replace(serving) {
            before.abort();
        }
        let response = Response::builder()
            .status(StatusCode::SWITCHING_PROTOCOLS)
            .header(CONNECTION, "Upgrade")
            .header(UPGRADE, "websocket")
            .header(SEC_WEBSOCKET_ACCEPT, accept)
            .header(SEC_WEBSOCKET_PROTOCOL, PROTOCOL);
        Some(response.body(String::new()).expect("an answer"))
    }
}

/// Until one of both ends is gone.
async fn serve(request: Request<Incoming>, port: DuplexStream) {
    let Ok(upgraded) = hyper::upgrade::on(request).await else { return };
    let socket = WebSocketStream::from_raw_socket(TokioIo::new(upgraded), Role::Server, None).await;
    let (mut sink, mut messages) = socket.split();
    let (mut output, mut input) = tokio::io::split(port);
    let to_client = async {
        let mut bytes = vec![0; BUFFER];
        while let Ok(length @ 1..) = output.read(&mut bytes).await {
            if sink.send(Message::Binary(bytes[..length].to_vec().into())).await.is_err() {
                return;
            }
        }
    };
    let to_guest = async {
        while let Some(Ok(message)) = messages.next().await {
            if let Message::Binary(bytes) = message
                && input.write_all(&bytes).await.is_err()
            {
                return;
            }
        }
    };
    tokio::select! {
        () = to_client => {}
        () = to_guest => {}
    }
}
