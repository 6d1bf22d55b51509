//! Copy of one file.
//!
//! ```text
//! done before? ──yes──▶ still there? ──▶ done
//!     │ no                  │ no
//!     ▼                     ▼
//!   begin ──begun at──▶ content ──▶ finish ──▶ done
//!     │ busy: again        │ changed: once more    │ another SHA-256: once more, from its beginning
//! ```

use std::time::Duration;

use super::Place;
use super::ends::unexpected;
use super::pass::Pass;
use super::trouble::Trouble;
use crate::copies::{PIECE, is_same, owner_of};
use crate::wire::proto::v1::{
    BeginFile, FileDone, FileEntry, FileFailed, FileFailure, FinishFile, ReadFileContent, from_reader,
    from_writer, to_reader, to_writer,
};

/// Attempts per file, if it was changed meanwhile or did not arrive as it was sent.
const TRIES: u32 = 2;
/// Most bytes of an unneeded file that are read and discarded. For more, both ends are opened again.
const DRAINED: u64 = 64 << 20;
/// Number of waits for another copy of the same file, and the length of each.
const BUSY: u32 = 60;
const PAUSE: Duration = Duration::from_millis(500);

/// File: its source, its target, and its entry.
pub struct One<'o> {
    /// Path below the object that the reading end has opened.
    pub source: &'o [u8],
    /// Path below the object that the writing end has opened.
    pub target: &'o [u8],
    /// Entry that the reading end has reported.
    pub entry: &'o FileEntry,
}

/// Result of an attempt.
enum Ended {
    Done(FileDone),
    /// The file was changed while it was read. The next attempt reads its present content.
    Changed(Trouble),
    /// The content at the destination cannot be used.
    Spoiled(Trouble),
    /// Another copy is writing the file.
    Busy(Trouble),
}

/// Copies a file, unless it was copied already.
///
/// # Errors
/// Fails if the copy fails, or an end breaks.
pub async fn copy(pass: &mut Pass<'_>, one: &One<'_>) -> Result<(), Trouble> {
    if is_there(pass, one).await? {
        return Ok(());
    }
    let (mut tries, mut busy, mut fresh, mut expected) = (0, 0, false, Some(one.entry.clone()));
    if one.entry.inode == 0 {
        // A stream has no entry that it could be compared with.
        expected = None;
    }
    loop {
        let why = match attempt(pass, one, fresh, expected.clone()).await? {
            Ended::Done(done) => {
                pass.state.is_done(one.target, done.entry, done.size);
                return Ok(());
            }
            Ended::Busy(why) => {
                busy += 1;
                if busy > BUSY {
                    return Err(why);
                }
                tokio::time::sleep(PAUSE).await;
                continue;
            }
            Ended::Changed(why) => {
                expected = None;
                why
            }
            Ended::Spoiled(why) => {
                fresh = true;
                why
            }
        };
        tries += 1;
        if tries >= TRIES {
            return Err(why);
        }
    }
}

/// Returns whether an earlier pass, or an earlier run, has copied the file.
async fn is_there(pass: &mut Pass<'_>, one: &One<'_>) -> Result<bool, Trouble> {
    let finishing = pass.state.finishing.clone().filter(|(target, _)| target == one.target);
    let done = pass.state.done.get(one.target).cloned();
    if finishing.is_none() && done.is_none() && !pass.goes_on {
        return Ok(false);
    }
    let looked = pass.to.done(to_writer::Request::Look(one.target.to_vec())).await?;
    let Some(there) = looked.entry else { return Ok(false) };
    if done.is_some_and(|done| is_same(&done, &there)) {
        pass.state.steps += 1;
        return Ok(true);
    }
    let options = pass.job.options;
    let differs = there.size != one.entry.size
        || one.entry.size == 0
        || (options.preserve && (there.mode, there.modified) != (one.entry.mode, one.entry.modified));
    if there.kind != one.entry.kind || (finishing.is_none() && (differs || options.attributes)) {
        return Ok(false);
    }
    let at = pass.to.done(to_writer::Request::Digest(one.target.to_vec())).await?;
    let wanted = match finishing {
        Some((_, sha256)) => sha256,
        None => digest(pass, one).await?,
    };
    if at.sha256 == wanted {
        pass.state.is_done(one.target, Some(there), 0);
        return Ok(true);
    }
    Ok(false)
}

/// Requests the SHA-256 of the source.
async fn digest(pass: &mut Pass<'_>, one: &One<'_>) -> Result<Vec<u8>, Trouble> {
    let read = ReadFileContent {
        path: one.source.to_vec(),
        offset: one.entry.size,
        expected: Some(one.entry.clone()),
    };
    pass.from.ask(to_reader::Request::Read(read)).await?;
    loop {
        match pass.from.next().await? {
            from_reader::Answer::Done(done) => return Ok(done.sha256),
            from_reader::Answer::Reading(_) | from_reader::Answer::Data(_) => {}
            _ => return Err(unexpected()),
        }
    }
}

async fn attempt(
    pass: &mut Pass<'_>,
    one: &One<'_>,
    fresh: bool,
    expected: Option<FileEntry>,
) -> Result<Ended, Trouble> {
    let entry = one.entry;
    let is_stream = entry.inode == 0;
    let is_fresh =
        (fresh || entry.size <= PIECE as u64) && !is_stream && pass.job.destination != Place::Standard;
    let wanted = BeginFile {
        path: one.target.to_vec(),
        fresh: is_fresh,
        size: entry.size.min(entry.allocated),
        keep: pass.job.options.keep,
    };
    pass.to.ask(to_writer::Request::Begin(wanted)).await?;
    let mut offset = 0;
    if !is_fresh {
        match pass.to.next().await {
            Ok(from_writer::Answer::Begun(begun)) => offset = begun.offset,
            Ok(_) => return Err(unexpected()),
            Err(trouble) => return busy_or(trouble),
        }
        // Input that an earlier run has read from standard input cannot be read again.
        let is_useless = if is_stream { offset > 0 && !pass.state.can_go_on } else { offset > entry.size };
        if is_useless {
            pass.to.ask(to_writer::Request::Restart(true)).await?;
            offset = 0;
        }
    }
    pass.state.can_go_on |= is_stream || entry.size > PIECE as u64;
    let name = if one.source.is_empty() { one.target } else { one.source };
    pass.state.progress.begin(name, offset, entry.size);
    let read = ReadFileContent { path: one.source.to_vec(), offset, expected };
    pass.from.ask(to_reader::Request::Read(read)).await?;
    let is_short = entry.size - offset.min(entry.size) <= DRAINED && !is_stream;
    let read = match content(pass, is_short).await {
        Ok(read) => read,
        Err(Cut::Reading(failed)) => {
            let why = discard(pass, failed).await?;
            let has_changed =
                matches!(&why, Trouble::Failed(failed) if failed.kind() == FileFailure::Changed);
            return if has_changed { Ok(Ended::Changed(why)) } else { Err(why) };
        }
        Err(Cut::Writing(failed)) if is_short => return busy_or(Trouble::Failed(failed)),
        Err(Cut::Writing(failed)) => {
            pass.state.fails(one.target, one.source, &failed);
            return Err(Trouble::Again);
        }
        Err(Cut::Broken(trouble)) => return Err(trouble),
    };
    let finish = finish(pass, one, &read);
    pass.state.finishing = Some((one.target.to_vec(), read.sha256));
    match pass.to.done(to_writer::Request::Finish(finish)).await {
        Ok(done) => Ok(Ended::Done(done)),
        Err(trouble) => {
            if matches!(trouble, Trouble::Failed(_)) {
                pass.state.finishing = None;
            }
            busy_or(trouble)
        }
    }
}

fn busy_or(trouble: Trouble) -> Result<Ended, Trouble> {
    let kind = match &trouble {
        Trouble::Failed(failed) => failed.kind(),
        _ => FileFailure::Unspecified,
    };
    match kind {
        FileFailure::Busy => Ok(Ended::Busy(trouble)),
        FileFailure::Digest => Ok(Ended::Spoiled(trouble)),
        _ => Err(trouble),
    }
}

/// Discards what was written of a file after a failure of the reading end. Returns why the file fails.
async fn discard(pass: &mut Pass<'_>, failed: FileFailed) -> Result<Trouble, Trouble> {
    pass.to.ask(to_writer::Request::Discard(true)).await?;
    loop {
        match pass.to.next().await {
            Ok(from_writer::Answer::Done(_)) => return Ok(Trouble::Failed(failed)),
            // The writing end had failed before.
            Ok(_) | Err(Trouble::Failed(_)) => {}
            Err(other) => return Err(other),
        }
    }
}

/// Reasons why not all of the content was relayed.
enum Cut {
    /// The reading end has failed to read, and will accept the next request.
    Reading(FileFailed),
    /// The writing end has failed.
    Writing(FileFailed),
    Broken(Trouble),
}

/// Relays the content. If the writing end fails and `is_short`, the rest is read and discarded.
async fn content(pass: &mut Pass<'_>, is_short: bool) -> Result<FileDone, Cut> {
    let Pass { from, to, state, .. } = pass;
    let mut refused = None;
    loop {
        let answer = tokio::select! {
            biased;
            answer = to.next(), if refused.is_none() => {
                refused = heard(answer)?;
                match refused.take_if(|_| !is_short) {
                    Some(failed) => return Err(Cut::Writing(failed)),
                    None => continue,
                }
            }
            answer = from.next() => answer,
        };
        let (request, length) = match answer {
            Ok(from_reader::Answer::Reading(_)) => continue,
            Ok(from_reader::Answer::Data(data)) => {
                let length = data.data.len() as u64;
                (to_writer::Request::Data(data), length)
            }
            Ok(from_reader::Answer::Hole(hole)) => {
                let length = hole.length;
                (to_writer::Request::Hole(hole), length)
            }
            Ok(from_reader::Answer::Done(done)) => {
                return refused.map_or(Ok(done), |it| Err(Cut::Writing(it)));
            }
            Ok(_) => return Err(Cut::Broken(unexpected())),
            Err(Trouble::Failed(failed)) => {
                return Err(refused.map_or(Cut::Reading(failed), Cut::Writing));
            }
            Err(other) => return Err(Cut::Broken(other)),
        };
        if refused.is_some() {
            continue;
        }
        to.ask(request).await.map_err(Cut::Broken)?;
        state.progress.more(length);
        state.steps += 1;
    }
}

/// Interprets an answer of the writing end during the transfer: the failure, or `None`.
fn heard(answer: Result<from_writer::Answer, Trouble>) -> Result<Option<FileFailed>, Cut> {
    match answer {
        Ok(from_writer::Answer::Written(_)) => Ok(None),
        Ok(_) => Err(Cut::Broken(unexpected())),
        Err(Trouble::Failed(failed)) => Ok(Some(failed)),
        Err(other) => Err(Cut::Broken(other)),
    }
}

fn finish(pass: &Pass<'_>, one: &One<'_>, read: &FileDone) -> FinishFile {
    let options = pass.job.options;
    // The facts at the time of reading count.
    let entry = read.entry.as_ref().unwrap_or(one.entry);
    FinishFile {
        size: read.size,
        sha256: read.sha256.clone(),
        mode: options.preserve.then_some(entry.mode),
        owner: (options.preserve && pass.sets_owners).then(|| owner_of(entry)),
        modified: entry.modified.filter(|_| options.preserve),
        attributes: if options.attributes { one.entry.attributes.clone() } else { Vec::new() },
        new_mode: entry.mode & 0o777 & !pass.mask,
    }
}
