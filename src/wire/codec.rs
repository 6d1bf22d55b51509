//! How messages of the guestlet API become bytes: as protobuf, in buffers that begin small.
//!
//! tonic's own codec begins each stream with 8 KB; a host half has a stream with every guest, and most messages
//! have a hundred bytes.

use std::marker::PhantomData;

use prost::Message;
use tonic::codec::{BufferSettings, Codec};
use tonic_prost::{ProstDecoder, ProstEncoder};

/// Bytes that a buffer begins with, and grows by.
const BUFFER: usize = 128;
/// Bytes that are collected before they are sent.
const YIELD: usize = 32 * 1024;

/// The codec that the generated services use.
#[derive(Debug)]
pub struct Prost<T, U>(PhantomData<(T, U)>);

impl<T, U> Default for Prost<T, U> {
    fn default() -> Self {
        Self(PhantomData)
    }
}

impl<T, U> Codec for Prost<T, U>
where
    T: Message + Send + 'static,
    U: Message + Default + Send + 'static,
{
    type Encode = T;
    type Decode = U;
    type Encoder = ProstEncoder<T>;
    type Decoder = ProstDecoder<U>;

    fn encoder(&mut self) -> Self::Encoder {
        ProstEncoder::new(BufferSettings::new(BUFFER, YIELD))
    }

    fn decoder(&mut self) -> Self::Decoder {
        ProstDecoder::new(BufferSettings::new(BUFFER, YIELD))
    }
}
