//! gRPC calls that have one request and one answer, as the bytes of these.

use std::pin::Pin;

use bytes::{BufMut as _, Bytes, BytesMut};
use http::{HeaderMap, HeaderValue, Request, Response, Uri, header};
use hyper::body::{Body as HttpBody, Frame, SizeHint};
use tonic::body::Body;
use tonic::{Code, Status};

/// Before each message: whether it is compressed (one byte), and its length (gRPC over HTTP/2).
const PREFIX: usize = 5;

/// A request whose body is that message.
///
/// # Errors
/// `UNIMPLEMENTED` if the method is no path.
pub fn request(method: &str, message: &[u8]) -> Result<Request<Body>, Status> {
    let no_method = || Status::unimplemented(format!("{method:?} is not a method"));
    let path = method.parse::<http::uri::PathAndQuery>().map_err(|_| no_method())?;
    let mut request = Request::new(Body::new(Frames { data: Some(framed(message)), trailers: None }));
    *request.method_mut() = http::Method::POST;
    *request.version_mut() = http::Version::HTTP_2;
    *request.uri_mut() = Uri::from(path);
    let headers = request.headers_mut();
    headers.insert(header::CONTENT_TYPE, tonic::metadata::GRPC_CONTENT_TYPE);
    headers.insert(header::TE, HeaderValue::from_static("trailers"));
    Ok(request)
}

/// Returns the message of a response.
///
/// # Errors
/// The status of the response, if it is not OK, or an explanation of what is malformed.
pub async fn response_message(response: Response<Body>) -> Result<Bytes, Status> {
    let (head, body) = response.into_parts();
    // One without a message may have its status at the beginning.
    let early = Status::from_header_map(&head.headers);
    if let Some(status) = early.filter(|status| status.code() != Code::Ok) {
        return Err(status);
    }
    let (message, trailers) = message_of(body, usize::MAX).await?;
    match trailers.as_ref().and_then(Status::from_header_map) {
        Some(status) if status.code() != Code::Ok => Err(status),
        _ => message.ok_or_else(|| Status::internal("the call was answered without a message")),
    }
}

/// The message of a request.
///
/// # Errors
/// If it is larger than `most` bytes, compressed, or none.
pub async fn request_message(body: Body, most: usize) -> Result<Bytes, Status> {
    let (message, _) = message_of(body, most).await?;
    message.ok_or_else(|| Status::invalid_argument("the call has no request"))
}

/// The answer of a method that has succeeded.
pub fn response(message: &[u8]) -> Response<Body> {
    let mut trailers = HeaderMap::new();
    trailers.insert(Status::GRPC_STATUS, HeaderValue::from_static("0"));
    let body = Frames { data: Some(framed(message)), trailers: Some(trailers) };
    let mut response = Response::new(Body::new(body));
    response.headers_mut().insert(header::CONTENT_TYPE, tonic::metadata::GRPC_CONTENT_TYPE);
    response
}

/// The only message of a body, and its trailers.
///
/// # Errors
/// If it is larger than `most` bytes, compressed, or more than one; or as the body says.
async fn message_of(mut body: Body, most: usize) -> Result<(Option<Bytes>, Option<HeaderMap>), Status> {
    let mut bytes = BytesMut::new();
    let mut trailers = None;
    while let Some(frame) = std::future::poll_fn(|context| Pin::new(&mut body).poll_frame(context)).await {
        match frame?.into_data() {
            Ok(data) if bytes.len() + data.len() > most.saturating_add(PREFIX) => {
                return Err(too_large(most));
            }
            Ok(data) => bytes.extend_from_slice(&data),
            Err(frame) => trailers = frame.into_trailers().ok(),
        }
    }
    if bytes.is_empty() {
        return Ok((None, trailers));
    }
    unframed(bytes.freeze()).map(|message| (Some(message), trailers))
}

/// Returns the status for a request of more than `most` bytes.
pub fn too_large(most: usize) -> Status {
    Status::resource_exhausted(format!("the request has more than {most} bytes"))
}

/// A message as a body has it.
fn framed(message: &[u8]) -> Bytes {
    let mut bytes = BytesMut::with_capacity(PREFIX + message.len());
    bytes.put_u8(0);
    // Messages of protobuf have at most 2 GiB.
    bytes.put_u32(u32::try_from(message.len()).unwrap_or(u32::MAX));
    bytes.extend_from_slice(message);
    bytes.freeze()
}

fn unframed(mut bytes: Bytes) -> Result<Bytes, Status> {
    let prefix = bytes.split_to(PREFIX.min(bytes.len()));
    match *prefix {
        [0, a, b, c, d] if u32::from_be_bytes([a, b, c, d]) as usize == bytes.len() => Ok(bytes),
        [1, ..] => Err(Status::unimplemented("the message is compressed")),
        _ => Err(Status::internal("the call has no message, or more than one")),
    }
}

/// A body that is there already.
struct Frames {
    /// Data of the body, in one piece.
    data: Option<Bytes>,
    /// Trailers after the data.
    trailers: Option<HeaderMap>,
}

impl HttpBody for Frames {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<Result<Frame<Bytes>, Status>>> {
        let data = self.data.take().map(Frame::data);
        let next = data.or_else(|| self.trailers.take().map(Frame::trailers));
        std::task::Poll::Ready(next.map(Ok))
    }

    fn is_end_stream(&self) -> bool {
        self.data.is_none() && self.trailers.is_none()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.data.as_ref().map_or(0, |data| data.len() as u64))
    }
}
