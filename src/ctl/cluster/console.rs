//! Serial console of a VM on KubeVirt: a WebSocket of virt-api behind the API server, which forwards it and
//! authorizes the user.
//!
//! ```text
//! seat ◀──messages──▶ API server ◀──▶ virt-api ◀──▶ virt-handler ◀──▶ QEMU
//! ```
//!
//! KubeVirt gives the console to the client that opened it last, and closes the connection of the former one
//! without a reason. Therefore a connection that has ended is not made again: two clients that did so would
//! take the console from each other for ever.

use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::time::Duration;

use futures_util::stream::{SplitSink, SplitStream};
use futures_util::{SinkExt as _, StreamExt as _};
use http::{HeaderMap, Request, Response, StatusCode, header};
use hyper::body::Body as _;
use hyper::upgrade::Upgraded;
use hyper_util::rt::TokioIo;
use kube::api::{Api, DynamicObject};
use kube::client::Body;
use kube::core::{ApiResource, GroupVersionKind, Status};
use tokio::sync::mpsc;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::handshake::client::generate_key;
use tokio_tungstenite::tungstenite::handshake::derive_accept_key;
use tokio_tungstenite::tungstenite::protocol::{Role, WebSocketConfig};
use tokio_tungstenite::tungstenite::{self, Message};

use super::Error;
use super::access::ApiServer;
use super::api::Asked;
use super::exec::printable;
use crate::ctl;
use crate::ctl::console::seat::{Seat, signals};
use crate::ctl::console::{ENDED, LOST};
use crate::ctl::exec::local::Outputs;
use crate::labels::is_subdomain;

/// Subprotocol in which messages carry the bytes of the console unchanged.
const PROTOCOL: &str = "plain.kubevirt.io";
/// Limit of the bytes of a refusal that are read.
const MOST_REFUSAL: usize = 64 << 10;
/// Limit of the bytes of a message.
const MOST_MESSAGE: usize = 1 << 20;
/// Interval between pings, which keep proxies on the path from closing an idle connection.
const PING: Duration = Duration::from_secs(20);
/// Interval between the checks whether the VM has ended, and the number of checks: KubeVirt reports the end
/// some time after it has closed the console.
const AGAIN: Duration = Duration::from_secs(1);
const TIMES: usize = 5;

type Socket = WebSocketStream<TokioIo<Upgraded>>;

/// Reasons why the console session has ended.
enum Over {
    /// The user has left, or the reader of the output has closed it.
    Left,
    /// The connection has ended, for this reason.
    Lost(String),
}

/// Connects this terminal with the console of the VM of this name, `NAMESPACE/NAME`, until the user leaves
/// it.
///
/// # Errors
/// Fails if the console cannot be opened, or ends for a reason other than the wish of the user.
pub async fn run(server: &ApiServer, name: &str) -> Result<(), ctl::Error> {
    let failed = |error| ctl::Error::Read("standard input".to_owned(), error);
    let mut outputs = Outputs::start().map_err(failed)?;
    let mut signals = signals().map_err(failed)?;
    let (namespace, vm) = name.split_once('/').unwrap_or(("default", name));
    // The names become components of a path.
    if !is_subdomain(namespace) || !is_subdomain(vm) {
        return Err(Error::UnknownGuest { name: name.to_owned(), similar: Vec::new() }.into());
    }
    let asked = Asked {
        what: "open the console",
        verb: "get",
        resource: "virtualmachineinstances/console.subresources.kubevirt.io",
        namespace: Some(namespace),
        role: "KubeVirt's kubevirt.io:edit or kubevirt.io:admin, by a RoleBinding there",
    };
    let socket = tokio::select! {
        socket = server.ask(asked, open(server, namespace, vm)) => socket?,
        signal = signals.next() => return Err(ctl::Error::Ended(128 + signal)),
    };
    let mut seat = Seat::default();
    seat.begin()?;
    seat.greet(name, &server.url);
    let over = converse(socket, &mut seat, &mut outputs, &mut signals).await;
    if matches!(over, Ok(Over::Lost(_))) {
        seat.show_rest(&mut outputs, &mut signals).await?;
    }
    // The terminal is restored before any message.
    seat.end();
    match over? {
        Over::Left => Ok(()),
        Over::Lost(why) => Err(tokio::select! {
            error = ended(server, namespace, vm, &why) => error,
            signal = signals.next() => ctl::Error::Ended(128 + signal),
        }),
    }
}

/// Opens the console.
async fn open(server: &ApiServer, namespace: &str, vm: &str) -> Result<Socket, kube::Error> {
    let key = generate_key();
    let path = format!(
        "/apis/subresources.kubevirt.io/v1/namespaces/{namespace}/virtualmachineinstances/{vm}/console"
    );
    let request = Request::get(path)
        .header(header::CONNECTION, "Upgrade")
        .header(header::UPGRADE, "websocket")
        .header(header::SEC_WEBSOCKET_VERSION, "13")
        .header(header::SEC_WEBSOCKET_KEY, &key)
        .header(header::SEC_WEBSOCKET_PROTOCOL, PROTOCOL)
        .body(Body::empty())
        .map_err(kube::Error::HttpError)?;
    let response = server.client.send(request).await?;
    if response.status() != StatusCode::SWITCHING_PROTOCOLS {
        return Err(refusal(response).await);
    }
    if let Some(why) = flaw(response.headers(), &key) {
        return Err(kube::Error::Api(Status::failure(why, "WebSocket").boxed()));
    }
    let upgraded = hyper::upgrade::on(response)
        .await
        .map_err(|error| kube::Error::Api(Status::failure(&error.to_string(), "WebSocket").boxed()))?;
    let limits =
        WebSocketConfig::default().max_message_size(Some(MOST_MESSAGE)).max_frame_size(Some(MOST_MESSAGE));
    Ok(WebSocketStream::from_raw_socket(TokioIo::new(upgraded), Role::Client, Some(limits)).await)
}

/// Checks an answer that accepts a WebSocket, and returns why it does not belong to this request (RFC 6455,
/// section 4.1); `None` if it does.
fn flaw(headers: &HeaderMap, key: &str) -> Option<&'static str> {
    let has = |name, value: &str| {
        headers
            .get(name)
            .and_then(|text| text.to_str().ok())
            .is_some_and(|text| text.eq_ignore_ascii_case(value))
    };
    if !has(header::UPGRADE, "websocket") || !has(header::CONNECTION, "Upgrade") {
        return Some("the answer switches to something other than a WebSocket");
    }
    let accepted = headers.get(header::SEC_WEBSOCKET_ACCEPT).map(http::HeaderValue::as_bytes);
    if accepted != Some(derive_accept_key(key.as_bytes()).as_bytes()) {
        return Some("the answer belongs to another WebSocket request");
    }
    (!has(header::SEC_WEBSOCKET_PROTOCOL, PROTOCOL))
        .then_some("the answer has a protocol other than plain.kubevirt.io")
}

/// Converts an answer that refuses the WebSocket to an error with its message.
async fn refusal(response: Response<Body>) -> kube::Error {
    let code = response.status().as_u16();
    let (mut body, mut bytes) = (response.into_body(), Vec::new());
    while let Some(Ok(frame)) = poll_fn(|context| Pin::new(&mut body).poll_frame(context)).await {
        let data = frame.into_data().unwrap_or_default();
        bytes.extend_from_slice(&data);
        if bytes.len() > MOST_REFUSAL {
            bytes.truncate(MOST_REFUSAL);
            break;
        }
    }
    let status = serde_json::from_slice::<Status>(&bytes);
    let status =
        status.unwrap_or_else(|_| Status::failure(String::from_utf8_lossy(&bytes).trim(), "Refused"));
    kube::Error::Api(status.with_code(code).boxed())
}

async fn converse(
    socket: Socket,
    seat: &mut Seat,
    outputs: &mut Outputs,
    signals: &mut ctl::signals::Signals<u8>,
) -> Result<Over, ctl::Error> {
    let (sink, mut messages) = socket.split();
    // The queue has room for one part of the input and one ping.
    let (to_send, queue) = mpsc::channel(2);
    let mut sending = pin!(send(sink, queue));
    let mut ping = tokio::time::interval(PING);
    let mut permit = None;
    loop {
        tokio::select! {
            biased;
            signal = signals.next() => return Err(ctl::Error::Ended(128 + signal)),
            written = outputs.written.recv() => if seat.has_written(written)? { return Ok(Over::Left) },
            why = &mut sending => return Ok(Over::Lost(why)),
            free = to_send.clone().reserve_owned(), if permit.is_none() => permit = free.ok(),
            part = seat.next_part(), if permit.is_some() => {
                let (bytes, leaves) = seat.read(part)?;
                if leaves {
                    return Ok(Over::Left);
                }
                if let Some(permit) = permit.take().filter(|_| !bytes.is_empty()) {
                    permit.send(Message::Binary(bytes.into()));
                }
            }
            message = next(&mut messages), if seat.has_room() => match message {
                Ok(bytes) => { seat.show(bytes, outputs); }
                Err(why) => return Ok(Over::Lost(why)),
            },
            _ = ping.tick() => {
                // If the queue is full, the connection is in use, and no ping is needed.
                let _ = to_send.try_send(Message::Ping(Vec::new().into()));
            }
        }
    }
}

/// Sends the messages of the queue until sending fails; returns the reason.
async fn send(mut sink: SplitSink<Socket, Message>, mut queue: mpsc::Receiver<Message>) -> String {
    while let Some(message) = queue.recv().await {
        if let Err(error) = sink.send(message).await {
            return words(&error);
        }
    }
    std::future::pending().await
}

/// Returns the next output of the guest, or the reason why the connection has ended.
async fn next(messages: &mut SplitStream<Socket>) -> Result<Vec<u8>, String> {
    loop {
        match messages.next().await {
            Some(Ok(Message::Binary(bytes))) => return Ok(bytes.into()),
            Some(Ok(Message::Text(text))) => return Ok(text.as_bytes().to_vec()),
            Some(Ok(Message::Close(Some(frame)))) if !frame.reason.is_empty() => {
                return Err(format!("it was closed: {}", printable(&frame.reason)));
            }
            Some(Ok(Message::Close(_))) | None => return Err("it was closed".to_owned()),
            Some(Ok(_)) => {}
            Some(Err(error)) => return Err(words(&error)),
        }
    }
}

fn words(error: &tungstenite::Error) -> String {
    match error {
        tungstenite::Error::Protocol(tungstenite::error::ProtocolError::ResetWithoutClosingHandshake) => {
            "it was closed without a reason".to_owned()
        }
        error => error.to_string(),
    }
}

/// Returns why a console has ended, as far as that is known.
async fn ended(server: &ApiServer, namespace: &str, vm: &str, why: &str) -> ctl::Error {
    let kind = GroupVersionKind::gvk("kubevirt.io", "v1", "VirtualMachineInstance");
    let resource = ApiResource::from_gvk_with_plural(&kind, "virtualmachineinstances");
    let instances: Api<DynamicObject> = Api::namespaced_with(server.client.clone(), namespace, &resource);
    let asked = Asked {
        what: "read the VirtualMachineInstance",
        verb: "get",
        resource: "virtualmachineinstances.kubevirt.io",
        namespace: Some(namespace),
        role: "KubeVirt's kubevirt.io:view",
    };
    for _ in 0..TIMES {
        let has_ended = match server.ask(asked, instances.get_opt(vm)).await {
            Ok(Some(instance)) => {
                let phase = &instance.data["status"]["phase"];
                instance.metadata.deletion_timestamp.is_some() || phase == "Succeeded" || phase == "Failed"
            }
            Ok(None) => true,
            // The state of the VM is not known, and is not requested again.
            Err(_) => break,
        };
        if has_ended {
            return ctl::Error::NotRun(format!("the VM {namespace}/{vm} has ended"), ENDED);
        }
        tokio::time::sleep(AGAIN).await;
    }
    let words = format!(
        "lost the console of {namespace}/{vm}: {why}; KubeVirt gives it to the client that opened it last, \
         so another client may have it now"
    );
    ctl::Error::NotRun(words, LOST)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_to_this_request_and_of_this_protocol() {
        // Example of RFC 6455, section 1.3.
        let (key, accepted) = ("dGhlIHNhbXBsZSBub25jZQ==", "s3pPLMBiTxaQ9kYGzzhZRbK+xOo=");
        let headers = |list: [&'static str; 4]| {
            let names = [
                header::UPGRADE,
                header::CONNECTION,
                header::SEC_WEBSOCKET_ACCEPT,
                header::SEC_WEBSOCKET_PROTOCOL,
            ];
            let values = list.map(|value| value.parse().unwrap());
            names.into_iter().zip(values).collect::<HeaderMap>()
        };
        assert_eq!(flaw(&headers(["WebSocket", "upgrade", accepted, PROTOCOL]), key), None);
        for (list, words) in [
            (["h2c", "upgrade", accepted, PROTOCOL], "something other"),
            (["websocket", "close", accepted, PROTOCOL], "something other"),
            (["websocket", "upgrade", "x", PROTOCOL], "another WebSocket request"),
            (["websocket", "upgrade", accepted, "v4.channel.k8s.io"], "a protocol other"),
        ] {
            assert!(flaw(&headers(list), key).unwrap().contains(words), "{list:?}");
        }
    }
}
