//! Commands for files that a client opens by path.

use std::borrow::Cow;
use std::io::SeekFrom;
use std::path::PathBuf;
use std::time::Duration;

use futures_util::stream::unfold;
use serde::Serialize;
use serde_json::value::RawValue;
use tokio::sync::mpsc::Receiver;
use tokio::time::timeout;

use crate::guest::files::{self, MAX_READ, Mode, PIECE, Piece, Pieces, Place};
use crate::policy::Role;
use crate::qga::arguments::{Refused, Value};
use crate::qga::base64::{Base64, encode};
use crate::qga::call::Call;
use crate::qga::error::Error;
use crate::qga::owners::Kind;
use crate::qga::reply::{Parts, Reply};
use crate::qga::room::Share;
use crate::qga::table::{Class, Command, Pending, Run};

/// Bytes that one read returns unless the client gives a count; the same as in qemu-ga.
const USUAL_COUNT: usize = 4096;
/// Bytes that the pieces of an answer take at a time, as read and as base64 together.
const PIECES: usize = 1 << 20;
/// Time for which a disk may delay the rest of an answer that has begun; after it the read returns fewer bytes.
const STUCK: Duration = Duration::from_secs(5);

const FILES: Command = Command { since: "0.15", class: Class::Files, ..Command::USUAL };

/// Rows of the command table.
pub const COMMANDS: &[Command] = &[
    Command {
        name: "guest-file-close",
        role: Some(Role::FilesRead),
        arguments: "handle",
        summary: "Closes a file.",
        differences: "An error of close(2) is returned: some file systems report failed writes that way.",
        run: Run::Later(close),
        ..FILES
    },
    Command {
        name: "guest-file-flush",
        role: Some(Role::FilesRead),
        arguments: "handle",
        summary: "Passes what was written to the kernel.",
        differences: "Every write has done so already; the command finds nothing left to do.",
        run: Run::Later(flush),
        ..FILES
    },
    Command {
        name: "guest-file-open",
        role: Some(Role::FilesRead),
        arguments: "path, mode? (as fopen(3): `r`, `w`, `a`, each with `+` and `b`; default `r`)",
        returns: "handle",
        audited: true,
        summary: "Opens a file; a new one may be read by everybody and written by root (0644). A relative path begins \
                  at the agent's working directory, which the unit sets to `/`.",
        differences: "New files are not writable by everybody (qemu-ga: 0666, whatever its umask). Devices and pipes \
                      are opened without waiting: a pipe that nobody reads cannot be opened for writing. At most 512 \
                      files are open. Handles fit 31 bits, and one is given again, also by another run of the agent, \
                      only 24 days later or after a boot.",
        run: Run::Later(open),
        ..FILES
    },
    Command {
        name: "guest-file-read",
        role: Some(Role::FilesRead),
        arguments: "handle, count? (bytes, default 4096, at most 48 MiB)",
        returns: "count, buf-b64, eof",
        summary: "Reads from the current position of the file.",
        differences: "A large answer is sent while it is read, and never held as a whole; an error after some bytes \
                      makes it a short one, and so does a disk that gives nothing for 5 s. Where many clients do \
                      not read their large answers, one of more than 192 KiB is refused until they do.",
        run: Run::Later(read),
        ..FILES
    },
    Command {
        name: "guest-file-seek",
        role: Some(Role::FilesRead),
        arguments: "handle, offset, whence (`set`, `cur`, `end`, or 0, 1, 2)",
        returns: "position, eof",
        summary: "Sets the current position of the file.",
        run: Run::Later(seek),
        ..FILES
    },
    Command {
        name: "guest-file-write",
        role: Some(Role::FilesWrite),
        arguments: "handle, buf-b64, count? (bytes, default all)",
        returns: "count, eof",
        summary: "Writes at the current position of the file, or at its end if it was opened with `a`.",
        differences: "Nothing is buffered, so a full disk is an error of the write and not of a later flush. \
                      Base64 without padding is decoded completely; qemu-ga drops the last bytes.",
        run: Run::Later(write),
        ..FILES
    },
];

/// Implements `guest-file-open`.
pub fn open<'a>(call: &'a Call<'a>) -> Pending<'a> {
    Box::pin(async move {
        let (path, mode) = call.arguments.read(|arguments| {
            Ok((arguments.required::<String>("path")?, arguments.optional("mode")?.unwrap_or(Mode::READ)))
        })?;
        call.concerns(&*path);
        if path.is_empty() {
            return Err(Error::argument("\"path\"", "must not be empty"));
        }
        let guest = &call.context.guest;
        let check = call.check("guest-file-open");
        if mode.writes() {
            check.needs(Role::FilesWrite);
        }
        let (given, path) = (PathBuf::from(&*path), guest.root.path_as_given(&path));
        let may = move |place: &Place| check.file(&given, place, mode.writes());
        let handle = guest.files.open(path, mode, may).await?;
        call.gives(Kind::File, handle);
        Reply::value(&handle)
    })
}

/// Checks that the handle belongs to the caller. The handle of another caller is treated as unknown.
fn own(call: &Call<'_>, handle: i64) -> Result<(), Error> {
    if call.owns(Kind::File, handle) { Ok(()) } else { Err(files::Error::UnknownHandle.into()) }
}

/// Implements `guest-file-close`.
pub fn close<'a>(call: &'a Call<'a>) -> Pending<'a> {
    Box::pin(async move {
        let handle = call.arguments.read(|arguments| arguments.required("handle"))?;
        own(call, handle)?;
        let closed = call.context.guest.files.close(handle).await;
        call.context.owners.forget(Kind::File, handle);
        closed?;
        Ok(Reply::empty())
    })
}

/// Implements `guest-file-flush`.
pub fn flush<'a>(call: &'a Call<'a>) -> Pending<'a> {
    Box::pin(async move {
        let handle = call.arguments.read(|arguments| arguments.required("handle"))?;
        own(call, handle)?;
        call.context.guest.files.flush(handle).await?;
        Ok(Reply::empty())
    })
}

/// Implements `guest-file-read`.
pub fn read<'a>(call: &'a Call<'a>) -> Pending<'a> {
    Box::pin(async move {
        let (handle, count) = call
            .arguments
            .read(|arguments| Ok((arguments.required("handle")?, arguments.optional::<i64>("count")?)))?;
        let count = match count.map(usize::try_from) {
            None => USUAL_COUNT,
            Some(Ok(count)) if count <= MAX_READ => count,
            Some(_) => return Err(Error::argument("\"count\"", &format!("must be from 0 to {MAX_READ}"))),
        };
        own(call, handle)?;
        let share = call.answer(count, PIECE, PIECES)?;
        Ok(answer(call.context.guest.files.read(handle, count, encode).await?, share))
    })
}

/// Builds the answer; its members are in the order in which their values become known.
fn answer(Pieces { first, rest }: Pieces, share: Share) -> Reply {
    let begin = b"{\"buf-b64\":\"";
    match rest {
        Some(rest) if !first.last => {
            Reply::in_parts(&[begin, &first.converted], parts(first.length, rest, share))
        }
        _ => Reply::of(&[begin, &first.converted, &end(first.length, first.end)]),
    }
}

fn end(count: usize, eof: bool) -> Vec<u8> {
    format!("\",\"count\":{count},\"eof\":{eof}}}").into_bytes()
}

/// Returns the rest of an answer; `share` is released at its end.
fn parts(count: usize, rest: Receiver<Piece>, share: Share) -> Parts {
    Box::pin(unfold((count, Some((rest, share))), async |(count, rest)| {
        let (mut rest, share) = rest?;
        let piece = timeout(STUCK, rest.recv()).await.ok().flatten();
        let nothing = Piece { converted: Vec::new(), length: 0, end: false, last: true };
        let Piece { converted: mut text, length, end: eof, last } = piece.unwrap_or(nothing);
        let count = count + length;
        if last {
            text.extend(end(count, eof));
        }
        Some((text, (count, (!last).then_some((rest, share)))))
    }))
}

#[derive(Serialize)]
struct Written {
    count: usize,
    eof: bool,
}

/// Implements `guest-file-write`.
pub fn write<'a>(call: &'a Call<'a>) -> Pending<'a> {
    Box::pin(async move {
        let (handle, Base64(mut bytes), count) = call.arguments.read(|arguments| {
            Ok((
                arguments.required("handle")?,
                arguments.required("buf-b64")?,
                arguments.optional::<i64>("count")?,
            ))
        })?;
        if let Some(count) = count {
            let whole = bytes.len();
            let count = usize::try_from(count).ok().filter(|count| *count <= whole);
            let wrong =
                || Error::argument("\"count\"", &format!("must be from 0 to the {whole} bytes given"));
            bytes.truncate(count.ok_or_else(wrong)?);
        }
        let count = bytes.len();
        own(call, handle)?;
        call.context.guest.files.write(handle, bytes).await?;
        Reply::value(&Written { count, eof: false })
    })
}

#[derive(Serialize)]
struct Sought {
    position: u64,
    eof: bool,
}

/// Implements `guest-file-seek`.
pub fn seek<'a>(call: &'a Call<'a>) -> Pending<'a> {
    Box::pin(async move {
        let (handle, offset, whence) = call.arguments.read(|arguments| {
            Ok((
                arguments.required("handle")?,
                arguments.required::<i64>("offset")?,
                arguments.required("whence")?,
            ))
        })?;
        let to = match whence {
            Whence::Set => SeekFrom::Start(offset.try_into().map_err(|_| {
                Error::argument("\"offset\"", "must not be negative where it is from the beginning")
            })?),
            Whence::Current => SeekFrom::Current(offset),
            Whence::End => SeekFrom::End(offset),
        };
        own(call, handle)?;
        let position = call.context.guest.files.seek(handle, to).await?;
        Reply::value(&Sought { position, eof: false })
    })
}

/// Reference point of an offset, as in lseek(2).
#[derive(Debug, Clone, Copy)]
enum Whence {
    Set,
    Current,
    End,
}

impl Value<'_> for Whence {
    fn read(value: &RawValue) -> Result<Self, Refused> {
        match value.get() {
            "0" | "\"set\"" => Ok(Self::Set),
            "1" | "\"cur\"" => Ok(Self::Current),
            "2" | "\"end\"" => Ok(Self::End),
            _ => Err(Refused::expected("one of \"set\", \"cur\", \"end\", or 0, 1, 2")),
        }
    }
}

impl Value<'_> for Mode {
    fn read(value: &RawValue) -> Result<Self, Refused> {
        let name = <Cow<'_, str>>::read(value)?;
        name.parse().map_err(|()| Refused::expected("one of r, w, a, each with + or b or both"))
    }
}
