//! The bodies of a gRPC call that has one request and one answer.

use std::pin::Pin;

use bytes::{BufMut as _, Bytes, BytesMut};
use http::HeaderMap;
use hyper::body::{Body as HttpBody, Frame, SizeHint};
use tonic::Status;
use tonic::body::Body;

/// Before each message: whether it is compressed (one byte), and its length (gRPC over HTTP/2).
const PREFIX: usize = 5;

/// The only message of a body, and its trailers.
///
/// # Errors
/// If it is larger than `most` bytes, compressed, or more than one; or as the body says.
pub async fn message(mut body: Body, most: usize) -> Result<(Option<Bytes>, Option<HeaderMap>), Status> {
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

/// What is said of a request that has more than `most` bytes.
pub fn too_large(most: usize) -> Status {
    Status::resource_exhausted(format!("the request has more than {most} bytes"))
}

/// A message as a body has it.
pub fn framed(message: &[u8]) -> Bytes {
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
pub struct Frames {
    /// Its only data.
    pub data: Option<Bytes>,
    /// What follows.
    pub trailers: Option<HeaderMap>,
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
