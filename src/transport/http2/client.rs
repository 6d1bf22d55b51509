//! The calling end of an HTTP/2 connection, straight on h2: hyper's keeps a queue of 8 KB and two tasks for each
//! connection, and a host half has one with every guest.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use h2::client::SendRequest;
use h2::{Error, Reason, RecvStream, SendStream};
use http::{Request, Response};
use hyper::body::{Body as HttpBody, Bytes, Frame};
use tonic::body::Body;

use super::{
    Bounds, CONNECTION_WINDOW, HEADER_TABLE_SIZE, MAX_HEADER_LIST_SIZE, SEND_BUFFER, STREAM_WINDOW,
    WIDE_CONNECTION_WINDOW, WIDE_FRAME, WIDE_SEND_BUFFER, WIDE_WINDOW,
};
use crate::transport::Stream;

/// The calling end of a connection; clones share it.
#[derive(Debug, Clone)]
pub struct Client(SendRequest<Bytes>);

/// Limit on the memory that small unread messages may waste, counting for each message the difference to 256
/// bytes; beyond it the connection is closed. (Without this setting, some hundred small messages would exceed
/// h2's limit.)
const SMALL_FRAMES: usize = 1 << 20;

/// The connection under a [`Client`]; dropping it closes the stream.
pub struct Connection(Pin<Box<dyn Future<Output = Result<(), Error>> + Send>>);

impl Connection {
    /// Completes when the stream has ended.
    ///
    /// # Errors
    /// If the peer broke the protocol, or the stream broke.
    pub async fn ended(&mut self) -> Result<(), Error> {
        self.0.as_mut().await
    }
}

/// Makes `stream` a connection for calls. The caller has to poll [`Connection::ended`].
///
/// # Errors
/// If the stream breaks during the handshake (the peer's part is not waited for).
pub async fn connect(stream: impl Stream) -> Result<(Client, Connection), Error> {
    let windows = (STREAM_WINDOW, CONNECTION_WINDOW, SEND_BUFFER);
    handshake(stream, &mut h2::client::Builder::new(), windows).await
}

/// As [`connect`], for answers that may come in small messages and not be read for long, such as what a program writes whose reader
/// has stopped. What the peer may have under way is bounded by the windows, and so by some 4,000 of the smallest messages.
///
/// # Errors
/// As [`connect`].
pub async fn connect_for_streams(stream: impl Stream) -> Result<(Client, Connection), Error> {
    let windows = (WIDE_WINDOW, WIDE_CONNECTION_WINDOW, WIDE_SEND_BUFFER);
    let mut builder = h2::client::Builder::new();
    handshake(stream, builder.data_frame_budget(SMALL_FRAMES).max_frame_size(WIDE_FRAME), windows).await
}

async fn handshake(
    stream: impl Stream,
    builder: &mut h2::client::Builder,
    (stream_window, connection_window, send_buffer): (u32, u32, usize),
) -> Result<(Client, Connection), Error> {
    let (sender, connection) = builder
        .initial_window_size(stream_window)
        .initial_connection_window_size(connection_window)
        .max_header_list_size(MAX_HEADER_LIST_SIZE)
        .header_table_size(HEADER_TABLE_SIZE)
        .max_send_buffer_size(send_buffer)
        // Until the peer has said how many calls may be open: one more than that would be refused.
        .initial_max_send_streams(Bounds::SMALL.open_calls as usize)
        .enable_push(false)
        .handshake(stream)
        .await?;
    Ok((Client(sender), Connection(Box::pin(connection))))
}

impl tower_service::Service<Request<Body>> for Client {
    type Response = Response<Answer>;
    type Error = Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Self::Error>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        // Each call waits for its own turn.
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        Box::pin(call(self.0.clone(), request))
    }
}

/// Makes one call; dropping the future, or the answer, cancels it.
async fn call(sender: SendRequest<Bytes>, request: Request<Body>) -> Result<Response<Answer>, Error> {
    let (head, body) = request.into_parts();
    let mut sender = sender.ready().await?;
    let (mut answer, stream) = sender.send_request(Request::from_parts(head, ()), body.is_end_stream())?;
    let mut sending = (!body.is_end_stream()).then(|| Box::pin(send(body, stream)) as Sending);
    let answer = loop {
        tokio::select! {
            biased;
            // If sending ended early, the answer contains the reason.
            _ = poll(&mut sending), if sending.is_some() => sending = None,
            answer = &mut answer => break answer?,
        }
    };
    Ok(answer.map(|stream| Answer { stream, sending }))
}

/// A request's body on its way.
type Sending = Pin<Box<dyn Future<Output = Result<(), Error>> + Send>>;

async fn poll(sending: &mut Option<Sending>) -> Result<(), Error> {
    match sending {
        Some(sending) => sending.as_mut().await,
        None => Ok(()),
    }
}

/// Sends a request's body, as the peer makes room for it.
async fn send(mut body: Body, mut stream: SendStream<Bytes>) -> Result<(), Error> {
    loop {
        let frame = tokio::select! {
            biased;
            reset = std::future::poll_fn(|context| stream.poll_reset(context)) => return reset.map(drop),
            frame = std::future::poll_fn(|context| Pin::new(&mut body).poll_frame(context)) => frame,
        };
        let data = match frame.map(|frame| frame.map(Frame::into_data)) {
            Some(Ok(Ok(data))) => data,
            Some(Ok(Err(frame))) => match frame.into_trailers() {
                Ok(trailers) => return stream.send_trailers(trailers),
                Err(_) => continue,
            },
            Some(Err(_)) => {
                stream.send_reset(Reason::CANCEL);
                return Ok(());
            }
            None => return stream.send_data(Bytes::new(), true),
        };
        let last = body.is_end_stream();
        if !data.is_empty() && !has_room(&mut stream).await? {
            return Ok(());
        }
        stream.send_data(data, last)?;
        if last {
            return Ok(());
        }
    }
}

/// Waits until the peer has room for a part of the body; whether it still wants any.
async fn has_room(stream: &mut SendStream<Bytes>) -> Result<bool, Error> {
    stream.reserve_capacity(1);
    while stream.capacity() == 0 {
        match std::future::poll_fn(|context| stream.poll_capacity(context)).await {
            Some(room) => room?,
            None => return Ok(false),
        };
    }
    Ok(true)
}

/// The body of an answer.
pub struct Answer {
    stream: RecvStream,
    /// The rest of the request.
    sending: Option<Sending>,
}

impl HttpBody for Answer {
    type Data = Bytes;
    type Error = Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        if self.sending.as_mut().is_some_and(|sending| sending.as_mut().poll(context).is_ready()) {
            self.sending = None;
        }
        if let Some(data) = ready!(self.stream.poll_data(context)) {
            let data = data.and_then(|data| {
                self.stream.flow_control().release_capacity(data.len())?;
                Ok(Frame::data(data))
            });
            return Poll::Ready(Some(data));
        }
        let trailers = ready!(self.stream.poll_trailers(context));
        Poll::Ready(trailers.map(|trailers| trailers.map(Frame::trailers)).transpose())
    }

    fn is_end_stream(&self) -> bool {
        self.stream.is_end_stream()
    }
}
