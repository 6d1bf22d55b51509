//! Codec for messages of the guestlet API: protobuf, in buffers that start small.
//!
//! The codec of tonic allocates 8 KB for each stream. A host half has a stream to every guest, and most
//! messages have about a hundred bytes.

use std::marker::PhantomData;

use bytes::{Buf as _, Bytes};
use prost::Message;
use tonic::Status;
use tonic::codec::{BufferSettings, Codec, DecodeBuf, Decoder};
use tonic_prost::{ProstDecoder, ProstEncoder};

use super::weigh;

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
    type Decoder = Weighed<U>;

    fn encoder(&mut self) -> Self::Encoder {
        ProstEncoder::new(settings())
    }

    fn decoder(&mut self) -> Self::Decoder {
        Weighed(ProstDecoder::new(settings()))
    }
}

fn settings() -> BufferSettings {
    BufferSettings::new(BUFFER, YIELD)
}

/// Decodes what does not take too much memory ([`weigh::check`]).
#[derive(Debug)]
pub struct Weighed<U>(ProstDecoder<U>);

impl<U: Message + Default + 'static> Decoder for Weighed<U> {
    type Item = U;
    type Error = Status;

    fn decode(&mut self, source: &mut DecodeBuf<'_>) -> Result<Option<U>, Status> {
        // A message is in one piece.
        weigh::check::<U>(source.chunk()).map_err(Status::out_of_range)?;
        self.0.decode(source)
    }

    fn buffer_settings(&self) -> BufferSettings {
        settings()
    }
}

/// The same for answers that are taken as their bytes, because it is decided with these whether, and when, they are decoded.
#[derive(Debug)]
pub struct Raw<T>(PhantomData<T>);

impl<T> Default for Raw<T> {
    fn default() -> Self {
        Self(PhantomData)
    }
}

impl<T: Message + Send + 'static> Codec for Raw<T> {
    type Encode = T;
    type Decode = Bytes;
    type Encoder = ProstEncoder<T>;
    type Decoder = Undecoded;

    fn encoder(&mut self) -> Self::Encoder {
        ProstEncoder::new(settings())
    }

    fn decoder(&mut self) -> Self::Decoder {
        Undecoded
    }
}

/// Takes messages as they are.
#[derive(Debug)]
pub struct Undecoded;

impl Decoder for Undecoded {
    type Item = Bytes;
    type Error = Status;

    fn decode(&mut self, source: &mut DecodeBuf<'_>) -> Result<Option<Bytes>, Status> {
        Ok(Some(source.copy_to_bytes(source.remaining())))
    }

    fn buffer_settings(&self) -> BufferSettings {
        settings()
    }
}
