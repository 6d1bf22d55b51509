//! Reading end of a copy.

use std::fs::File;
use std::io::{self, Seek as _, SeekFrom};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStringExt as _;
use std::path::PathBuf;

use bytes::{Bytes, BytesMut};
use tokio::sync::mpsc;

use super::digest::Digest;
use super::entry::{attributes, entry, is_same};
use super::tree::{self, Tree};
use super::{Failure, Gone, Guard, PIECE, Unmet};
use crate::sys::beneath::{self, Kind};
use crate::sys::root::Root;
use crate::wire::proto::v1::from_reader::Answer;
use crate::wire::proto::v1::to_reader::Request;
use crate::wire::proto::v1::{
    FileData, FileDone, FileEntries, FileEntry, FileFailure, FileHole, FilesOpened, FromReader, OpenFiles,
    ReadFileContent, ToReader,
};

/// Entries of one directory that are reported, at most.
const MAX_ENTRIES: usize = 1_000_000;
/// Limit of the entries of one message, and of the bytes of their names, links and attributes.
const ENTRIES: usize = 256;
const ENTRY_BYTES: usize = 64 << 10;

/// Reading end of a copy.
pub struct Reader<G> {
    /// Decides what may be read.
    pub guard: G,
    /// Directory that relative paths start from.
    pub base: PathBuf,
    /// Channel for what is read.
    pub answers: mpsc::Sender<FromReader>,
}

/// Object that was opened.
struct Opened {
    tree: Tree,
    with_attributes: bool,
}

impl<G: Guard> Reader<G> {
    /// Carries out requests until the channel is closed. Blocks.
    pub fn run(&self, mut requests: mpsc::Receiver<ToReader>) {
        let mut opened = None;
        while let Some(request) = requests.blocking_recv() {
            let Some(request) = request.request else { continue };
            match self.answer(&mut opened, &request) {
                Ok(()) => {}
                Err(Unmet::Failed(failure)) => {
                    if self.say(Answer::Failed(failure.into())).is_err() {
                        return;
                    }
                }
                Err(Unmet::Gone) => return,
            }
        }
    }

    fn say(&self, answer: Answer) -> Result<(), Gone> {
        self.answers.blocking_send(FromReader { answer: Some(answer) }).map_err(|_| Gone)
    }

    fn answer(&self, opened: &mut Option<Opened>, request: &Request) -> Result<(), Unmet> {
        let opened = match (request, opened) {
            (Request::Open(open), opened) => {
                let (new, answer) = self.open(open)?;
                *opened = Some(new);
                return Ok(self.say(Answer::Opened(answer))?);
            }
            (_, Some(opened)) => opened,
            (_, None) => return Err(Failure::last("nothing was opened").into()),
        };
        match request {
            Request::List(path) => self.list(opened, path),
            Request::Read(read) => self.read(opened, read),
            Request::Open(_) => Ok(()),
        }
    }

    fn open(&self, open: &OpenFiles) -> Result<(Opened, FilesOpened), Failure> {
        let path = tree::named(&self.base, &open.path)?;
        let found = beneath::find(&path).map_err(Failure::io("open", &open.path))?;
        self.guard.may(&found, None, false).map_err(Failure::denied)?;
        let facts = beneath::facts(&found).map_err(Failure::io("examine", &open.path))?;
        let mut told = entry(&facts);
        if open.with_attributes {
            told.attributes =
                attributes(&found).map_err(Failure::io("read the attributes of", &open.path))?;
        }
        let answer = FilesOpened { entry: Some(told), boot_id: boot_id(), ..FilesOpened::default() };
        Ok((Opened { tree: Tree::at(found), with_attributes: open.with_attributes }, answer))
    }

    fn list(&self, opened: &mut Opened, path: &[u8]) -> Result<(), Unmet> {
        let directory = opened.tree.directory(path)?;
        self.guard.may(&directory, None, false).map_err(Failure::denied)?;
        let names = beneath::names(&directory).map_err(Failure::io("list", path))?;
        let (mut entries, mut bytes) = (Vec::new(), 0);
        for (number, name) in names.enumerate() {
            if number >= MAX_ENTRIES {
                let path = String::from_utf8_lossy(path);
                return Err(Failure::last(format!("{path} has more than {MAX_ENTRIES} entries")).into());
            }
            let name = name.map_err(Failure::io("list", path))?;
            let full = super::paths::join(path, name.as_encoded_bytes());
            let told = one(&directory, name, opened.with_attributes);
            // An entry that was removed meanwhile is left out.
            let Some(told) = told.map_err(Failure::io("examine", &full))? else { continue };
            let attributes = told.attributes.iter().map(|one| one.name.len() + one.value.len() + 16);
            bytes += 160 + told.name.len() + told.link_target.len() + attributes.sum::<usize>();
            entries.push(told);
            if entries.len() >= ENTRIES || bytes >= ENTRY_BYTES {
                self.say(Answer::Entries(FileEntries { entries: std::mem::take(&mut entries) }))?;
                bytes = 0;
            }
        }
        if !entries.is_empty() {
            self.say(Answer::Entries(FileEntries { entries }))?;
        }
        Ok(self.say(Answer::Done(FileDone::default()))?)
    }

    fn read(&self, opened: &mut Opened, read: &ReadFileContent) -> Result<(), Unmet> {
        let path = &read.path;
        let found = opened.tree.find(path)?;
        let facts = beneath::facts(&*found).map_err(Failure::io("examine", path))?;
        if facts.kind != Kind::Regular {
            return Err(Failure::last(not_a_file(facts.kind, path)).into());
        }
        self.guard.may(&found, None, false).map_err(Failure::denied)?;
        let mut file = beneath::read(&found).map_err(Failure::io("open", path))?;
        let begun = entry(&beneath::facts(&file).map_err(Failure::io("examine", path))?);
        if read.expected.as_ref().is_some_and(|expected| !is_same(expected, &begun)) {
            return Err(changed(path).into());
        }
        let mut digest = Digest::default();
        if read.offset > 0 {
            let before = digest.read(&mut file, read.offset, || !self.answers.is_closed());
            if before.map_err(Failure::io("read", path))? < read.offset {
                return Err(changed(path).into());
            }
        }
        self.say(Answer::Reading(begun.clone()))?;
        let size = self.content(&mut file, read.offset, &begun, path, &mut digest)?;
        let ended = entry(&beneath::facts(&file).map_err(Failure::io("examine", path))?);
        if !is_same(&begun, &ended) {
            return Err(changed(path).into());
        }
        self.guard.copied(size - read.offset);
        let done = FileDone { entry: Some(ended), sha256: digest.value(), size, ..FileDone::default() };
        Ok(self.say(Answer::Done(done))?)
    }

    /// Sends the content of a file from an offset; returns its length.
    fn content(
        &self,
        file: &mut File,
        from: u64,
        entry: &FileEntry,
        path: &[u8],
        digest: &mut Digest,
    ) -> Result<u64, Unmet> {
        let mut pieces = Pieces::default();
        // Files that the kernel generates have neither a size nor holes.
        let is_made_up = entry.size == 0;
        let end = if is_made_up { u64::MAX } else { entry.size };
        let mut at = from;
        while at < end {
            let (begin, stop) = if is_made_up {
                (at, end)
            } else {
                let next = beneath::next_data(file, at, end).map_err(Failure::io("read", path))?;
                next.unwrap_or((end, end))
            };
            if begin > at {
                digest.zeros(begin - at);
                self.say(Answer::Hole(FileHole { offset: at, length: begin - at }))?;
                at = begin;
            }
            file.seek(SeekFrom::Start(at)).map_err(Failure::io("read", path))?;
            while at < stop {
                let wanted = usize::try_from(stop - at).unwrap_or(PIECE).min(PIECE);
                let data = pieces.read(file, wanted).map_err(Failure::io("read", path))?;
                if data.is_empty() {
                    return Ok(at);
                }
                digest.update(&data);
                let offset = at;
                at += data.len() as u64;
                self.say(Answer::Data(FileData { offset, data }))?;
            }
        }
        Ok(at)
    }
}

/// Allocator of pieces of content, which reuses memory that nobody holds any longer.
#[derive(Default)]
struct Pieces(BytesMut);

impl Pieces {
    fn read(&mut self, file: &mut File, wanted: usize) -> io::Result<Bytes> {
        use std::io::Read as _;

        self.0.clear();
        self.0.resize(wanted, 0);
        let mut length = 0;
        while length < wanted {
            match file.read(&mut self.0[length..]) {
                Ok(0) => break,
                Ok(count) => length += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        self.0.truncate(length);
        Ok(self.0.split().freeze())
    }
}

/// Looks up the entry of a name; `None` if it no longer exists.
fn one(
    directory: &OwnedFd,
    name: std::ffi::OsString,
    with_attributes: bool,
) -> io::Result<Option<FileEntry>> {
    let Some(facts) = beneath::look(directory, &name)? else { return Ok(None) };
    let mut told = entry(&facts);
    match facts.kind {
        Kind::Symlink => told.link_target = beneath::link_target(directory, &name)?.into_vec(),
        Kind::Regular | Kind::Directory if with_attributes => {
            told.attributes = attributes(&beneath::find_in(directory, &name)?)?;
        }
        _ => {}
    }
    told.name = name.into_vec();
    Ok(Some(told))
}

fn not_a_file(kind: Kind, path: &[u8]) -> String {
    let path = String::from_utf8_lossy(path);
    let what = match kind {
        Kind::Directory => "is a directory",
        Kind::Symlink => "is a symbolic link",
        _ => "is a device, a pipe or a socket, which is not copied",
    };
    format!("{path} {what}").trim_start().to_owned()
}

fn changed(path: &[u8]) -> Failure {
    let path = String::from_utf8_lossy(path);
    Failure::new(
        FileFailure::Changed,
        format!("{path} changed while it was being copied").trim_start().to_owned(),
    )
}

/// Returns the kernel's boot ID, which changes with every boot.
pub fn boot_id() -> String {
    Root::default().line("/proc/sys/kernel/random/boot_id")
}
