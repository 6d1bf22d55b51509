//! Standard input and output as ends of a copy. Data that was read is not read again, and data that was
//! written stays, so that only the rest of a file is transferred over a connection that replaces another.

use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::os::fd::AsFd as _;
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use tokio::sync::mpsc;

use crate::copies::{Digest, PIECE};
use crate::wire::proto::v1::{
    FileBegun, FileData, FileDone, FileEntry, FileFailed, FileFailure, FileKind, FilesOpened, FromReader,
    FromWriter, ToReader, ToWriter, from_reader, from_writer, to_reader, to_writer,
};

/// Position of a standard stream, and the digest of its content so far.
#[derive(Clone, Default)]
pub struct Progress(Arc<Mutex<(u64, Digest)>>);

fn failed(words: &str) -> FileFailed {
    FileFailed { kind: FileFailure::Final.into(), message: words.to_owned() }
}

fn a_file() -> FileEntry {
    FileEntry { kind: FileKind::Regular.into(), mode: 0o644, ..FileEntry::default() }
}

/// Reads standard input as the reading end of a copy.
pub fn read(progress: &Progress, mut asked: mpsc::Receiver<ToReader>, tell: &mpsc::Sender<FromReader>) {
    let say = |answer| tell.blocking_send(FromReader { answer: Some(answer) }).is_ok();
    while let Some(request) = asked.blocking_recv() {
        let goes_on = match request.request {
            Some(to_reader::Request::Open(_)) => {
                let opened = FilesOpened { entry: Some(a_file()), ..FilesOpened::default() };
                say(from_reader::Answer::Opened(opened))
            }
            Some(to_reader::Request::Read(read)) => {
                let mut state = progress.0.lock().unwrap_or_else(PoisonError::into_inner);
                if state.0 == read.offset {
                    content(&mut state, &say)
                } else {
                    say(from_reader::Answer::Failed(failed(
                        "standard input cannot be read again after the connection was lost",
                    )))
                }
            }
            _ => say(from_reader::Answer::Failed(failed("standard input is not a directory"))),
        };
        if !goes_on {
            return;
        }
    }
}

fn content(state: &mut (u64, Digest), say: &dyn Fn(from_reader::Answer) -> bool) -> bool {
    let input = io::stdin().as_fd().try_clone_to_owned().map(File::from);
    let mut input = match input {
        Ok(input) => input,
        Err(error) => {
            return say(from_reader::Answer::Failed(failed(&format!("cannot read standard input: {error}"))));
        }
    };
    say(from_reader::Answer::Reading(a_file()));
    loop {
        let mut data = vec![0; PIECE];
        let mut length = 0;
        while length < PIECE {
            match input.read(&mut data[length..]) {
                Ok(0) => break,
                Ok(count) => length += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    let words = format!("cannot read standard input: {error}");
                    return say(from_reader::Answer::Failed(failed(&words)));
                }
            }
        }
        data.truncate(length);
        if length > 0 {
            let offset = state.0;
            state.1.update(&data);
            state.0 += length as u64;
            if !say(from_reader::Answer::Data(FileData { offset, data: Bytes::from(data) })) {
                return false;
            }
        }
        if length < PIECE {
            return say(from_reader::Answer::Done(FileDone {
                entry: Some(a_file()),
                sha256: state.1.value(),
                size: state.0,
                ..FileDone::default()
            }));
        }
    }
}

/// Writes standard output as the writing end of a copy.
pub fn write(progress: &Progress, mut asked: mpsc::Receiver<ToWriter>, tell: &mpsc::Sender<FromWriter>) {
    use to_writer::Request;

    let say = |answer| tell.blocking_send(FromWriter { answer: Some(answer) }).is_ok();
    while let Some(request) = asked.blocking_recv() {
        let mut state = progress.0.lock().unwrap_or_else(PoisonError::into_inner);
        let goes_on = match request.request {
            Some(Request::Open(_)) => {
                let opened = FilesOpened { last: b"-".to_vec(), ..FilesOpened::default() };
                say(from_writer::Answer::Opened(opened))
            }
            Some(Request::Begin(_)) => {
                say(from_writer::Answer::Begun(FileBegun { offset: state.0, sha256: state.1.value() }))
            }
            Some(Request::Data(data)) => match put(&mut state, &data.data) {
                Ok(()) => true,
                Err(error) => {
                    let words = format!("cannot write standard output: {error}");
                    say(from_writer::Answer::Failed(failed(&words)))
                }
            },
            Some(Request::Hole(hole)) => {
                let zeros = vec![0; PIECE];
                let mut left = hole.length;
                let mut done = Ok(());
                while left > 0 && done.is_ok() {
                    let length = usize::try_from(left).unwrap_or(PIECE).min(PIECE);
                    done = put(&mut state, &zeros[..length]);
                    left -= length as u64;
                }
                match done {
                    Ok(()) => true,
                    Err(error) => {
                        let words = format!("cannot write standard output: {error}");
                        say(from_writer::Answer::Failed(failed(&words)))
                    }
                }
            }
            Some(Request::Finish(finish)) => {
                if finish.sha256 == state.1.value() {
                    let done = FileDone { sha256: finish.sha256, size: state.0, ..FileDone::default() };
                    say(from_writer::Answer::Done(done))
                } else {
                    say(from_writer::Answer::Failed(failed(
                        "what was written to standard output differs from the file: it changed meanwhile",
                    )))
                }
            }
            Some(Request::Close(_) | Request::Discard(_)) => {
                say(from_writer::Answer::Done(FileDone::default()))
            }
            _ => say(from_writer::Answer::Failed(failed("standard output can receive one file only"))),
        };
        if !goes_on {
            return;
        }
    }
}

fn put(state: &mut (u64, Digest), data: &[u8]) -> io::Result<()> {
    let mut output = File::from(io::stdout().as_fd().try_clone_to_owned()?);
    output.write_all(data)?;
    state.1.update(data);
    state.0 += data.len() as u64;
    Ok(())
}
