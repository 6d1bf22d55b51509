//! HTTP/2 frames by hand (RFC 9113), for what no library sends.

use std::io;

use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWriteExt as _, DuplexStream};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const PING: u8 = 6;
const CONTINUATION: u8 = 9;
const END_STREAM: u8 = 1;

/// The stream of the events: `GetInfo` was the first one.
const EVENTS: u32 = 3;
/// A header that says nothing, its texts not compressed (RFC 7541).
const TRAILERS: [u8; 5] = [0, 1, b'a', 1, b'b'];

/// What a guest does with frames.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Trick {
    /// Sends PING frames as fast as it can.
    Pings,
    /// The same, and reads no answer.
    UnreadPings,
    /// Sends SETTINGS frames as fast as it can.
    Settings,
    /// Sends a head that never ends.
    EndlessHead,
    /// Resets each call of the host half.
    Resets,
}

fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
    let mut bytes = length[1..].to_vec();
    bytes.extend([kind, flags]);
    bytes.extend(stream.to_be_bytes());
    bytes.extend(payload);
    bytes
}

/// Reads one frame.
async fn next(reader: &mut (impl AsyncRead + Unpin)) -> io::Result<(u8, u32, Vec<u8>)> {
    let mut head = [0; 9];
    reader.read_exact(&mut head).await?;
    let [a, b, c, kind, _, stream @ ..] = head;
    let mut bytes = head.to_vec();
    bytes.resize(head.len() + usize::try_from(u32::from_be_bytes([0, a, b, c])).unwrap(), 0);
    reader.read_exact(&mut bytes[head.len()..]).await?;
    Ok((kind, u32::from_be_bytes(stream), bytes))
}

/// Lets a good agent, at the other end of `agent`, open the session, and then plays `trick` in its place.
pub async fn play_later(trick: Trick, stream: UnixStream, agent: DuplexStream) -> io::Result<()> {
    let (mut reader, mut writer) = stream.into_split();
    let (mut from_agent, mut to_agent) = tokio::io::split(agent);
    let opening = async {
        loop {
            let (kind, stream, bytes) = next(&mut from_agent).await?;
            writer.write_all(&bytes).await?;
            // The first event.
            if kind == DATA && stream > 1 {
                return Ok::<_, io::Error>(());
            }
        }
    };
    tokio::select! {
        opened = opening => opened?,
        copied = tokio::io::copy(&mut reader, &mut to_agent) => return copied.map(drop),
    }
    play_on(trick, reader, writer).await
}

/// Plays `trick` on a new stream until the host half closes it.
pub async fn play(trick: Trick, stream: UnixStream) -> io::Result<()> {
    let (mut reader, mut writer) = stream.into_split();
    reader.read_exact(&mut [0; PREFACE.len()]).await?;
    writer.write_all(&frame(SETTINGS, 0, 0, &[])).await?;
    play_on(trick, reader, writer).await
}

async fn play_on(trick: Trick, mut reader: OwnedReadHalf, mut writer: OwnedWriteHalf) -> io::Result<()> {
    let piece = match trick {
        Trick::Pings | Trick::UnreadPings => frame(PING, 0, 0, &[0; 8]).repeat(100),
        Trick::Settings => frame(SETTINGS, 0, 0, &[]).repeat(100),
        Trick::EndlessHead => {
            // In place of what follows the first event.
            writer.write_all(&frame(HEADERS, END_STREAM, EVENTS, &TRAILERS)).await?;
            frame(CONTINUATION, 0, EVENTS, &[])
        }
        Trick::Resets => loop {
            let (kind, stream, _) = next(&mut reader).await?;
            if kind == HEADERS {
                writer.write_all(&frame(RST_STREAM, 0, stream, &8_u32.to_be_bytes())).await?;
            }
        },
    };
    let reading = async {
        if trick == Trick::UnreadPings {
            std::future::pending::<()>().await;
        }
        drop(tokio::io::copy(&mut reader, &mut tokio::io::sink()).await);
    };
    let writing = async {
        loop {
            writer.write_all(&piece).await?;
        }
    };
    tokio::select! {
        () = reading => Ok(()),
        ended = writing => ended,
    }
}
