//! Support for clients that were not written for this server: any gRPC client, on a unix socket.
//!
//! Such a client sends as `:authority` the address that it dialled: `localhost`, an empty value, a path, or a
//! path in percent encoding (kubelet, for the socket of a plugin's registration). The value has no meaning on
//! a socket with a single server, but the crate h2 resets each call whose authority is not a host name.
//! [`Foreign`] is placed in front of it:
//!
//! ```text
//! client ──▶ Requests: frames pass unchanged, except header blocks, whose authority becomes a host name ──▶ h2
//! client ◀── Answers: frames pass unchanged; refusals of a call or the connection are reported ◀── h2
//! ```
//! A header block is held until it is complete, up to a limit. A malformed frame or block is passed unchanged,
//! and so is everything after it: h2 is responsible for refusing it.

use std::io;
use std::mem::MaybeUninit;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::authority;

/// Connection preface of a client (RFC 9113, 3.4).
const PREFACE: &[u8; 24] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// Bytes of a frame's head.
const HEAD: usize = 9;
/// Bytes of one frame's payload, unless the server allows more.
const MOST_PAYLOAD: usize = 16 * 1024;
/// Bytes of the frames of one header block. h2 refuses smaller ones already.
const MOST_HELD: usize = 64 * 1024;
/// Bytes that are read at a time.
const READ: usize = 4096;

const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const GOAWAY: u8 = 7;
const CONTINUATION: u8 = 9;

const END_STREAM: u8 = 0x1;
const END_HEADERS: u8 = 0x4;
const PADDED: u8 = 0x8;
const PRIORITY: u8 = 0x20;

/// Errors that end a call without blaming who made it (RFC 9113, 7): `NO_ERROR`, `REFUSED_STREAM`, `CANCEL`.
const BLAMELESS: [u32; 3] = [0, 7, 8];

/// The head of a frame.
#[derive(Debug, Clone, Copy)]
struct Head {
    len: usize,
    kind: u8,
    flags: u8,
    stream: [u8; 4],
}

impl Head {
    /// Parses the head that `frame` begins with; `None` if it is incomplete.
    fn of(frame: &[u8]) -> Option<Self> {
        let &[high, middle, low, kind, flags, ref stream @ ..] = frame.first_chunk::<HEAD>()?;
        let len = usize::from(high) << 16 | usize::from(middle) << 8 | usize::from(low);
        Some(Self { len, kind, flags, stream: *stream })
    }
}

/// Requests on their way from a client to the server.
#[derive(Debug, Default)]
pub struct Requests {
    /// Bytes of the preface that have come.
    begun: usize,
    /// Bytes that pass before the next frame's head.
    passing: usize,
    /// The head of a frame as far as it has come, or the frames of a header block.
    held: Vec<u8>,
    /// Offset of the current frame in the held bytes.
    frame: usize,
    /// True if everything is passed unchanged from now on.
    is_opaque: bool,
    /// Protocol that the client speaks in place of HTTP/2, if that was recognized.
    misunderstood: Option<&'static str>,
}

impl Requests {
    /// Takes what has come from the client, and appends to `out` what the server gets.
    pub fn take(&mut self, mut input: &[u8], out: &mut Vec<u8>) {
        while !input.is_empty() {
            if self.is_opaque {
                return out.extend_from_slice(input);
            }
            if self.begun < PREFACE.len() {
                let now = take(&mut input, PREFACE.len() - self.begun);
                if !PREFACE[self.begun..].starts_with(now) {
                    self.is_opaque = true;
                    self.misunderstood =
                        Some(misunderstood(if self.begun == 0 { now[0] } else { PREFACE[0] }));
                }
                self.begun += now.len();
                out.extend_from_slice(now);
            } else if self.passing > 0 {
                let now = take(&mut input, self.passing);
                self.passing -= now.len();
                out.extend_from_slice(now);
            } else {
                self.hold(&mut input, out);
            }
        }
    }

    /// Holds more of a frame that has to be looked at, and passes it on when that is done.
    fn hold(&mut self, input: &mut &[u8], out: &mut Vec<u8>) {
        let whole =
            |held: &[u8], frame: usize| Head::of(&held[frame..]).map(|head| (head, frame + HEAD + head.len));
        let until = whole(&self.held, self.frame).map_or(self.frame + HEAD, |(_, end)| end);
        self.held.extend_from_slice(take(input, until - self.held.len()));
        let Some((head, end)) = whole(&self.held, self.frame) else { return };
        let is_first = self.frame == 0;
        if is_first && head.kind != HEADERS {
            self.passing = head.len;
            return self.pass(out);
        }
        let continues =
            is_first || (head.kind == CONTINUATION && self.held.get(5..HEAD) == Some(&head.stream));
        if !continues || end > MOST_HELD {
            return self.give_up(out);
        }
        if self.held.len() < end {
            return;
        }
        if head.flags & END_HEADERS == 0 {
            self.frame = end;
            return;
        }
        match with_other_authority(&self.held) {
            Some(frames) => {
                self.held = frames;
                self.pass(out);
            }
            None => self.give_up(out),
        }
    }

    fn pass(&mut self, out: &mut Vec<u8>) {
        out.append(&mut self.held);
        self.frame = 0;
    }

    fn give_up(&mut self, out: &mut Vec<u8>) {
        self.is_opaque = true;
        out.extend(std::mem::take(&mut self.held));
    }
}

/// Names the protocol that a client speaks in place of HTTP/2, by its first byte.
fn misunderstood(first: u8) -> &'static str {
    match first {
        0x16 => "it speaks TLS",
        b'A'..=b'Z' => "it speaks HTTP/1",
        _ => "it does not speak HTTP/2",
    }
}

/// Up to so many bytes from the beginning of `input`.
fn take<'a>(input: &mut &'a [u8], most: usize) -> &'a [u8] {
    let (now, rest) = input.split_at(most.min(input.len()));
    *input = rest;
    now
}

/// The frames of one header block, with another authority in it.
fn with_other_authority(frames: &[u8]) -> Option<Vec<u8>> {
    let first = Head::of(frames)?;
    let mut block = Vec::with_capacity(frames.len());
    let mut rest = frames;
    while let Some(head) = Head::of(rest) {
        let (payload, after) = rest.get(HEAD..)?.split_at_checked(head.len)?;
        block.extend_from_slice(if head.kind == HEADERS { fragment(head.flags, payload)? } else { payload });
        rest = after;
    }
    let block = authority::replaced(&block)?;
    let mut new = Vec::with_capacity(block.len() + HEAD);
    let mut kind = HEADERS;
    let mut flags = first.flags & END_STREAM;
    let mut pieces = block.chunks(MOST_PAYLOAD).peekable();
    loop {
        let piece = pieces.next().unwrap_or_default();
        if pieces.peek().is_none() {
            flags |= END_HEADERS;
        }
        new.extend_from_slice(&u32::try_from(piece.len()).ok()?.to_be_bytes()[1..]);
        new.extend_from_slice(&[kind, flags]);
        new.extend_from_slice(&first.stream);
        new.extend_from_slice(piece);
        if pieces.peek().is_none() {
            return Some(new);
        }
        (kind, flags) = (CONTINUATION, 0);
    }
}

/// The piece of a header block in a HEADERS frame: without padding and priority (RFC 9113, 6.2).
fn fragment(flags: u8, mut payload: &[u8]) -> Option<&[u8]> {
    if flags & PADDED != 0 {
        let (&padding, rest) = payload.split_first()?;
        payload = rest.get(..rest.len().checked_sub(usize::from(padding))?)?;
    }
    if flags & PRIORITY != 0 { payload.get(5..) } else { Some(payload) }
}

/// Answers on their way from the server to a client.
#[derive(Debug, Default)]
struct Answers {
    /// Bytes of the payload that pass before the next frame's head.
    passing: usize,
    /// The frame that comes now, as far as it is looked at.
    held: Vec<u8>,
}

impl Answers {
    /// Looks at what is sent; the errors that blame the client.
    fn take(&mut self, mut sent: &[u8]) -> Vec<u32> {
        let mut errors = Vec::new();
        while !sent.is_empty() {
            if self.passing > 0 {
                self.passing -= take(&mut sent, self.passing).len();
                continue;
            }
            let until = Head::of(&self.held).map_or(HEAD, |head| HEAD + head.looked_at());
            self.held.extend_from_slice(take(&mut sent, until - self.held.len()));
            let Some(head) = Head::of(&self.held) else { continue };
            if self.held.len() < HEAD + head.looked_at() {
                continue;
            }
            if let Some(code) = self.held[HEAD..].last_chunk().map(|&code| u32::from_be_bytes(code))
                && !BLAMELESS.contains(&code)
            {
                errors.push(code);
            }
            self.passing = head.len - head.looked_at();
            self.held.clear();
        }
        errors
    }
}

impl Head {
    /// Bytes of the payload up to and with its error code, if it has one.
    fn looked_at(self) -> usize {
        match self.kind {
            RST_STREAM => self.len.min(4),
            GOAWAY => self.len.min(8),
            _ => 0,
        }
    }
}

/// The name of an error (RFC 9113, 7).
fn name(code: u32) -> &'static str {
    match code {
        1 => "PROTOCOL_ERROR",
        2 => "INTERNAL_ERROR",
        3 => "FLOW_CONTROL_ERROR",
        5 => "STREAM_CLOSED",
        6 => "FRAME_SIZE_ERROR",
        9 => "COMPRESSION_ERROR",
        11 => "ENHANCE_YOUR_CALM",
        _ => "another HTTP/2 error",
    }
}

/// Stream of a client, for the server. `refused` is called with the reason whenever the client is refused.
pub struct Foreign<S, F> {
    stream: S,
    requests: Requests,
    /// Bytes that the server has not read yet, beginning at `at`.
    ready: Vec<u8>,
    at: usize,
    answers: Answers,
    refused: F,
}

impl<S, F: FnMut(&'static str)> Foreign<S, F> {
    /// Wraps `stream`.
    pub fn new(stream: S, refused: F) -> Self {
        let (requests, answers) = (Requests::default(), Answers::default());
        Self { stream, requests, ready: Vec::new(), at: 0, answers, refused }
    }

    fn came(&mut self, bytes: &[u8]) {
        self.ready.clear();
        self.at = 0;
        self.requests.take(bytes, &mut self.ready);
        if let Some(why) = self.requests.misunderstood.take() {
            (self.refused)(why);
        }
    }

    fn sent(&mut self, bytes: &[u8]) {
        for code in self.answers.take(bytes) {
            (self.refused)(name(code));
        }
    }
}

impl<S: AsyncRead + Unpin, F: FnMut(&'static str) + Unpin> AsyncRead for Foreign<S, F> {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        while this.at == this.ready.len() {
            let mut room = [MaybeUninit::uninit(); READ];
            let mut read = ReadBuf::uninit(&mut room);
            ready!(Pin::new(&mut this.stream).poll_read(context, &mut read))?;
            if read.filled().is_empty() {
                return Poll::Ready(Ok(()));
            }
            this.came(read.filled());
        }
        let mut rest = &this.ready[this.at..];
        let now = take(&mut rest, buffer.remaining());
        buffer.put_slice(now);
        this.at += now.len();
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin, F: FnMut(&'static str) + Unpin> AsyncWrite for Foreign<S, F> {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let count = ready!(Pin::new(&mut this.stream).poll_write(context, bytes))?;
        this.sent(&bytes[..count]);
        Poll::Ready(Ok(count))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let count = ready!(Pin::new(&mut this.stream).poll_write_vectored(context, slices))?;
        let mut left = count;
        for slice in slices {
            let mut bytes = &**slice;
            let now = take(&mut bytes, left);
            this.sent(now);
            left -= now.len();
        }
        Poll::Ready(Ok(count))
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_flush(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_shutdown(context)
    }
}
