//! Byte streams between guest, host and people: who listens, who dials, and HTTP/2 over one of them.
//!
//! Each file owns one kind of stream. To add one, implement [`Stream`] for it (anything that reads and
//! writes asynchronously is one) and give it a listener or a dialer here.

use tokio::io::{AsyncRead, AsyncWrite};

#[cfg(feature = "agent")]
mod appearance;
#[cfg(any(feature = "agent", feature = "host"))]
pub mod callback;
#[cfg(any(feature = "agent", feature = "ctl", feature = "host"))]
pub mod carry;
#[cfg(feature = "agent")]
pub mod clients;
#[cfg(feature = "host")]
pub mod dial;
#[cfg(feature = "agent")]
pub mod first_byte;
#[cfg(any(feature = "host", feature = "ccm"))]
pub mod http1;
pub mod http2;
#[cfg(feature = "agent")]
pub mod later;
#[cfg(feature = "agent")]
pub mod listen;
#[cfg(any(feature = "agent", feature = "host"))]
pub mod opening;
#[cfg(feature = "agent")]
pub mod relay;
#[cfg(any(feature = "agent", feature = "host"))]
mod route;
#[cfg(any(feature = "agent", feature = "host"))]
pub mod seats;
#[cfg(any(feature = "agent", feature = "host"))]
pub mod serial;
pub mod unix;
#[cfg(feature = "agent")]
pub mod virtio_serial;
#[cfg(feature = "agent")]
pub mod vsock;

#[cfg(any(feature = "agent", feature = "host"))]
pub use route::Both;

/// Any bidirectional byte stream.
pub trait Stream: AsyncRead + AsyncWrite + Send + Unpin + 'static {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin + 'static> Stream for T {}

/// A stream whose kind was chosen at run time.
pub type BoxStream = Box<dyn Stream>;
