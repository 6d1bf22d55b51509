//! Reads from a file in pieces, one of which is read while the one before is sent: however much is asked for, no
//! more than a few pieces are held.

use std::fs::File;
use std::io::{self, Read as _, Seek as _, SeekFrom};

use tokio::sync::{OwnedMutexGuard, mpsc, oneshot};
use tokio::task::spawn_blocking;

/// Bytes of one piece; a multiple of three, so that pieces in base64 make a whole.
pub const PIECE: usize = 192 * 1024;
/// Pieces that wait to be sent.
const WAITING: usize = 1;

/// Some bytes of a file.
#[derive(Debug, PartialEq, Eq)]
pub struct Piece {
    /// What they were converted to.
    pub converted: Vec<u8>,
    /// How many they were.
    pub length: usize,
    /// The file's end was met.
    pub end: bool,
    /// No other piece follows.
    pub last: bool,
}

/// The pieces of one read.
#[derive(Debug)]
pub struct Pieces {
    /// The first one, which may be empty.
    pub first: Piece,
    /// What follows it, if it is not the last. Pieces that are not taken are not read: the next read begins there,
    /// if the file is one that has places.
    pub rest: Option<mpsc::Receiver<Piece>>,
}

type Turn = OwnedMutexGuard<Option<File>>;

/// Begins to read `count` bytes; the turn ends when they are read, or nobody wants them any more.
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
            // Nobody has got it. What has no places, such as a pipe, has lost it.
            let _ = file.seek(SeekFrom::Current(-i64::try_from(length).unwrap_or(0)));
        }
        if last || !taken {
            return;
        }
    }
}

/// Reads until the buffer is full, and says how far it came and whether the file ended before.
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
