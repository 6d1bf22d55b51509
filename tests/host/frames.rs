//! HTTP/2 frames by hand (RFC 9113), for what no library sends.

use std::io;

use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWriteExt as _, DuplexStream};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};

use crate::guest::Channel;

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const PING: u8 = 6;
const CONTINUATION: u8 = 9;
const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;

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
    /// Asks who it is, and gives no room for the answer.
    NoRoom,
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

/// A gRPC request's head, its texts not compressed (RFC 7541).
fn head(path: &str) -> Vec<u8> {
    let text = |text: &str| [&[u8::try_from(text.len()).unwrap()], text.as_bytes()].concat();
    let (post, http, path_is, authority_is, named) = (0x83, 0x86, 0x04, 0x01, 0x00);
    let mut bytes = vec![post, http, path_is];
    bytes.extend(text(path));
    bytes.push(authority_is);
    bytes.extend(text("host"));
    for (name, value) in [("content-type", "application/grpc"), ("te", "trailers")] {
        bytes.push(named);
        bytes.extend(text(name));
        bytes.extend(text(value));
    }
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
pub async fn play(trick: Trick, channel: Channel, stream: UnixStream) -> io::Result<()> {
    let (mut reader, mut writer) = stream.into_split();
    if channel == Channel::Callback {
        writer.write_all(PREFACE).await?;
    } else {
        reader.read_exact(&mut [0; PREFACE.len()]).await?;
    }
    let no_room = [&[0, 4][..], &0_u32.to_be_bytes()].concat();
    let settings: &[u8] = if trick == Trick::NoRoom { &no_room } else { &[] };
    writer.write_all(&frame(SETTINGS, 0, 0, settings)).await?;
    play_on(trick, reader, writer).await
}

async fn play_on(trick: Trick, mut reader: OwnedReadHalf, mut writer: OwnedWriteHalf) -> io::Result<()> {
    let piece = match trick {
        Trick::Pings | Trick::UnreadPings => frame(PING, 0, 0, &[0; 8]).repeat(100),
        Trick::Settings => frame(SETTINGS, 0, 0, &[]).repeat(100),
        Trick::EndlessHead => {
            writer.write_all(&frame(HEADERS, 0, 1, &head("/"))).await?;
            frame(CONTINUATION, 0, 1, &[])
        }
        Trick::NoRoom => {
            writer.write_all(&frame(HEADERS, END_HEADERS, 1, &head("/guestlet.v1.Host/WhoAmI"))).await?;
            writer.write_all(&frame(DATA, END_STREAM, 1, &[0; 5])).await?;
            Vec::new()
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
        while !piece.is_empty() {
            writer.write_all(&piece).await?;
        }
        std::future::pending().await
    };
    tokio::select! {
        () = reading => Ok(()),
        ended = writing => ended,
    }
}
