//! Reads from a file in pieces. One piece is read while the previous one is sent, so that only a few pieces are in
//! memory, however large the read is.

use std::fs::File;
use std::io::{self, Read as _, Seek as _, SeekFrom};

use tokio::sync::{OwnedMutexGuard, mpsc, oneshot};
use tokio::task::spawn_blocking;

/// Size of one piece in bytes; a multiple of three, so that the pieces in base64 can be joined.
pub const PIECE: usize = 192 * 1024;
/// Number of pieces that may wait to be sent.
const WAITING: usize = 1;

/// Consecutive bytes of a file.
#[derive(Debug, PartialEq, Eq)]
pub struct Piece {
    /// Bytes after their conversion.
    pub converted: Vec<u8>,
    /// Number of bytes before their conversion.
    pub length: usize,
    /// True if the end of the file was reached.
    pub end: bool,
    /// True if no other piece follows.
    pub last: bool,
}

/// Pieces of one read.
#[derive(Debug)]
pub struct Pieces {
    /// First piece, which may be empty.
    pub first: Piece,
    /// Pieces after the first. A piece that nobody receives counts as not read: in a seekable file the next read
    /// begins there.
    pub rest: Option<mpsc::Receiver<Piece>>,
}

type Turn = OwnedMutexGuard<Option<File>>;

/// Begins to read `count` bytes. The turn ends when they are read, or when the receiver is dropped.
pub(super) async fn begin(turn: Turn, count: usize, convert: fn(&[u8]) -> Vec<u8>) -> io::Result<Pieces> {
    let (first, begun) = oneshot::channel();
    let (pieces, rest) = mpsc::channel(WAITING);
    drop(spawn_blocking(move || read(turn, count, convert, first, &pieces)));
    match begun.await {
        Ok(first) => Ok(Pieces { first: first?, rest: Some(rest) }),
        Err(_) => Err(io::Error::other("the reading thread ended")),
    }
}

fn read(
    mut turn: Turn,
    count: usize,
    convert: fn(&[u8]) -> Vec<u8>,
    first: oneshot::Sender<io::Result<Piece>>,
    pieces: &mpsc::Sender<Piece>,
) {
    let Some(file) = turn.as_mut() else { return };
    let mut buffer = vec![0; count.min(PIECE)];
    let mut first = Some(first);
    let mut left = count;
    loop {
        let wanted = left.min(PIECE);
        let (length, ended) = fill(file, &mut buffer[..wanted]);
        left -= length;
        let end = matches!(ended, Ok(true));
        let last = length < wanted || left == 0;
        let piece = match (ended, &first) {
            (Err(error), Some(_)) if length == 0 => Err(error),
            _ => Ok(Piece { converted: convert(&buffer[..length]), length, end, last }),
        };
        let taken = match first.take() {
            Some(first) => first.send(piece).is_ok(),
            None => piece.is_ok_and(|piece| pieces.blocking_send(piece).is_ok()),
        };
        if !taken {
            // The piece was not received: seek back, so that the next read returns it. A pipe cannot seek, so its bytes are
            // lost.
            let _ = file.seek(SeekFrom::Current(-i64::try_from(length).unwrap_or(0)));
        }
        if last || !taken {
            return;
        }
    }
}

/// Reads until the buffer is full. Returns the number of bytes, and whether the file ended before.
fn fill(file: &mut File, buffer: &mut [u8]) -> (usize, io::Result<bool>) {
    let mut length = 0;
    while length < buffer.len() {
        match file.read(&mut buffer[length..]) {
            Ok(0) => return (length, Ok(true)),
            Ok(more) => length += more,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return (length, Err(error)),
        }
    }
    (length, Ok(false))
}
