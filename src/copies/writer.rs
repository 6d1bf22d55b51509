//! Writing end of a copy.

use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::rc::Rc;

use tokio::sync::mpsc;

use super::aside::{self, Aside};
use super::digest::Digest;
use super::entry::{self, entry};
use super::records::{Record, Records};
use super::tree::{self, Spot, Tree};
use super::writing::{Open, Writing, set_attributes};
use super::{Failure, Gone, Guard, Unmet, paths};
use crate::sys::beneath::{self, Kind};
use crate::wire::proto::v1::from_writer::Answer;
use crate::wire::proto::v1::to_writer::Request;
use crate::wire::proto::v1::{
    BeginFile, EndDirectory, FileBegun, FileDone, FileFailure, FilesOpened, FinishFile, FromWriter,
    MakeDirectory, MakeSymlink, OpenFiles, ToWriter,
};

/// Bytes between two reports of the progress.
const TOLD: u64 = 4 << 20;
/// Size above which the record of a file is on the disk before the file is begun.
const LARGE: u64 = 1 << 20;

/// Writing end of a copy.
pub struct Writer<G> {
    /// Decides what may be written.
    pub guard: G,
    /// Directory that relative paths start from.
    pub base: PathBuf,
    /// Records of interrupted copies.
    pub records: Records,
    /// Channel for the results.
    pub answers: mpsc::Sender<FromWriter>,
}

/// Object that was opened.
struct Opened {
    tree: Tree,
    id: String,
    /// Name of the copied object, if it is an entry of the opened directory.
    last: Vec<u8>,
    record: Record,
    file: Open,
}

impl<G: Guard> Writer<G> {
    /// Carries out requests until the channel is closed. Blocks.
    pub fn run(&self, mut requests: mpsc::Receiver<ToWriter>) {
        let mut opened = None;
        while let Some(request) = requests.blocking_recv() {
            let Some(request) = request.request else { continue };
            self.guard.wait();
            match self.answer(&mut opened, request) {
                Ok(()) => {}
                Err(Unmet::Failed(failure)) => {
                    if self.say(Answer::Failed(failure.into())).is_err() {
                        break;
                    }
                }
                Err(Unmet::Gone) => break,
            }
        }
        // A file that has received nothing is not worth continuing.
        if let Some(Opened { file: Open::Writing(writing), .. }) = opened
            && writing.at == 0
        {
            writing.aside.remove();
        }
    }

    fn say(&self, answer: Answer) -> Result<(), Gone> {
        self.answers.blocking_send(FromWriter { answer: Some(answer) }).map_err(|_| Gone)
    }

    fn done(&self, done: FileDone) -> Result<(), Unmet> {
        Ok(self.say(Answer::Done(done))?)
    }

    fn answer(&self, opened: &mut Option<Opened>, request: Request) -> Result<(), Unmet> {
        let opened = match (&request, opened) {
            (Request::Open(open), opened) => {
                let (new, answer) = self.open(open)?;
                *opened = Some(new);
                return Ok(self.say(Answer::Opened(answer))?);
            }
            (_, Some(opened)) => opened,
            (_, None) => return Err(Failure::last("nothing was opened").into()),
        };
        match request {
            Request::Open(_) => Ok(()),
            Request::Look(path) => self.look(opened, &path),
            Request::Digest(path) => self.digest(opened, &path),
            Request::MakeDirectory(make) => self.make_directory(opened, &make),
            Request::EndDirectory(end) => self.end_directory(opened, &end),
            Request::MakeSymlink(make) => self.make_symlink(opened, &make),
            Request::Begin(wanted) => self.begin(opened, &wanted),
            Request::Restart(_) => opened.file.with(Writing::restart),
            Request::Data(data) => self.write(opened, |writing| writing.data(&data)),
            Request::Hole(hole) => self.write(opened, |writing| writing.hole(&hole)),
            Request::Finish(finish) => self.finish(opened, &finish),
            Request::Discard(_) => {
                opened.drop_file();
                self.done(FileDone::default())
            }
            Request::Close(_) => {
                opened.drop_file();
                opened.record.remove();
                self.done(FileDone::default())
            }
        }
    }

    fn open(&self, open: &OpenFiles) -> Result<(Opened, FilesOpened), Failure> {
        if !aside::is_id(open.id.as_bytes()) {
            return Err(Failure::last(
                "the identifier of a copy must be 16 hexadecimal digits in lower case",
            ));
        }
        let path = tree::named(&self.base, &open.path)?;
        let (record, was_interrupted) = self.records.of(&open.id);
        // A directory that the interrupted copy has created is the target itself, and not a directory to copy into.
        let is_entry = open.is_entry || record.has_made_directory();
        let mut answer =
            FilesOpened { was_interrupted, boot_id: super::reader::boot_id(), ..FilesOpened::default() };
        let found = match beneath::find(&path) {
            Ok(found) => Some(found),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(Failure::io("open", &open.path)(error)),
        };
        let facts =
            found.as_ref().map(beneath::facts).transpose().map_err(Failure::io("examine", &open.path))?;
        let directory = match (found, facts) {
            (Some(found), Some(facts)) if facts.kind == Kind::Directory && !is_entry => {
                answer.entry = Some(entry(&facts));
                found
            }
            _ => {
                let (directory, last) = paths::split(&open.path);
                let words = || format!("there is no directory {}", String::from_utf8_lossy(&open.path));
                if last.is_empty() {
                    return Err(Failure::new(FileFailure::NotFound, words()));
                }
                let parent = beneath::find(&tree::named(&self.base, directory)?);
                let parent = parent.map_err(Failure::io("enter", directory))?;
                let there = beneath::look(&parent, beneath::name(last));
                answer.entry = there.map_err(Failure::io("examine", &open.path))?.as_ref().map(entry);
                answer.last = last.to_vec();
                parent
            }
        };
        let is_directory = beneath::facts(&directory).is_ok_and(|facts| facts.kind == Kind::Directory);
        if !is_directory {
            let words = format!("{} has no parent directory", String::from_utf8_lossy(&open.path));
            return Err(Failure::last(words));
        }
        let (id, last) = (open.id.clone(), answer.last.clone());
        let opened = Opened { tree: Tree::at(directory), id, last, record, file: Open::None };
        Ok((opened, answer))
    }

    fn look(&self, opened: &mut Opened, path: &[u8]) -> Result<(), Unmet> {
        let spot = opened.tree.spot(path)?;
        self.guard.may(&spot.directory, Some(spot.name), false).map_err(Failure::denied)?;
        let found = beneath::look(&spot.directory, beneath::name(spot.name));
        let found = found.map_err(Failure::io("examine", path))?;
        self.done(FileDone { entry: found.as_ref().map(entry), ..FileDone::default() })
    }

    fn digest(&self, opened: &mut Opened, path: &[u8]) -> Result<(), Unmet> {
        let found = opened.tree.find(path)?;
        let facts = beneath::facts(&*found).map_err(Failure::io("examine", path))?;
        if facts.kind != Kind::Regular {
            return Err(Failure::last(format!("{} is not a file", String::from_utf8_lossy(path))).into());
        }
        self.guard.may(&found, None, false).map_err(Failure::denied)?;
        let mut file = beneath::read(&found).map_err(Failure::io("open", path))?;
        let mut digest = Digest::default();
        let size = digest.read(&mut file, u64::MAX, || !self.answers.is_closed());
        let size = size.map_err(Failure::io("read", path))?;
        self.done(FileDone {
            entry: Some(entry(&facts)),
            sha256: digest.value(),
            size,
            ..FileDone::default()
        })
    }

    fn make_directory(&self, opened: &mut Opened, make: &MakeDirectory) -> Result<(), Unmet> {
        let path = &make.path;
        let spot = opened.tree.spot(path)?;
        self.guard.may(&spot.directory, Some(spot.name), true).map_err(Failure::denied)?;
        let is_new = beneath::make_directory(&spot.directory, beneath::name(spot.name), make.mode);
        let is_new = is_new.map_err(Failure::io("make the directory", path))?;
        let found = beneath::look(&spot.directory, beneath::name(spot.name));
        let found = found.map_err(Failure::io("examine", path))?;
        let Some(found) = found.filter(|found| found.kind == Kind::Directory) else {
            let words = format!("{} exists and is not a directory", String::from_utf8_lossy(path));
            return Err(Failure::new(FileFailure::Exists, words).into());
        };
        if !is_new && make.has_to_be_new {
            let words = format!("{} already exists", String::from_utf8_lossy(path));
            return Err(Failure::new(FileFailure::Exists, words).into());
        }
        if is_new && *path == opened.last {
            opened.record.note_directory();
        }
        self.done(FileDone { entry: Some(entry(&found)), is_new, ..FileDone::default() })
    }

    fn end_directory(&self, opened: &mut Opened, end: &EndDirectory) -> Result<(), Unmet> {
        let path = &end.path;
        let directory = opened.tree.directory(path)?;
        self.guard.may(&directory, None, true).map_err(Failure::denied)?;
        let set = |error| Unmet::from(Failure::io("preserve the attributes of", path)(error));
        let opened = beneath::read(&directory).map_err(Failure::io("open", path))?;
        if let Some(owner) = &end.owner {
            beneath::set_owner(&opened, owner.user, owner.group).map_err(set)?;
        }
        if let Some(mode) = end.mode {
            beneath::set_mode(&opened, mode & 0o7777).map_err(set)?;
        }
        set_attributes(&opened, &end.attributes).map_err(set)?;
        if let Some(time) = &end.modified {
            beneath::set_modified(&opened, entry::moment(time)).map_err(set)?;
        }
        beneath::sync_names(&directory).map_err(Failure::io("write to the disk", path))?;
        let facts = beneath::facts(&opened).map_err(Failure::io("examine", path))?;
        self.done(FileDone { entry: Some(entry(&facts)), ..FileDone::default() })
    }

    fn make_symlink(&self, opened: &mut Opened, make: &MakeSymlink) -> Result<(), Unmet> {
        let path = &make.path;
        paths::named(&make.target)
            .map_err(|wrong| Failure::last(format!("the target of the symbolic link {wrong}")))?;
        let spot = opened.tree.spot(path)?;
        self.guard.may(&spot.directory, Some(spot.name), true).map_err(Failure::denied)?;
        let before = beneath::look(&spot.directory, beneath::name(spot.name));
        let before = before.map_err(Failure::io("examine", path))?;
        if before.is_some_and(|before| before.kind == Kind::Directory) {
            let words = format!("{} is a directory, and is not replaced", String::from_utf8_lossy(path));
            return Err(Failure::new(FileFailure::Exists, words).into());
        }
        if before.is_some() && !make.replace {
            let words = format!("{} already exists", String::from_utf8_lossy(path));
            return Err(Failure::new(FileFailure::Exists, words).into());
        }
        let failed = |error| Unmet::from(Failure::io("make the symbolic link", path)(error));
        let (directory, beside) = (&*spot.directory, aside::name(spot.name, &opened.id));
        // A leftover link has no content that could be continued.
        let left = beneath::look(directory, &beside).map_err(failed)?;
        if left.is_some_and(|left| left.kind == Kind::Symlink) {
            beneath::remove(directory, &beside).map_err(failed)?;
        }
        beneath::make_symlink(beneath::name(&make.target), directory, &beside).map_err(failed)?;
        let owner = make.owner.as_ref().map(|owner| (owner.user, owner.group));
        let modified = make.modified.as_ref().map(entry::moment);
        let renamed = beneath::set_of_link(directory, &beside, owner, modified)
            .and_then(|()| beneath::replace(directory, &beside, beneath::name(spot.name)));
        if let Err(error) = renamed {
            drop(beneath::remove(directory, &beside));
            return Err(failed(error));
        }
        let facts = beneath::look(directory, beneath::name(spot.name)).map_err(failed)?;
        self.done(FileDone {
            entry: facts.as_ref().map(entry),
            is_new: before.is_none(),
            ..FileDone::default()
        })
    }

    fn begin(&self, opened: &mut Opened, wanted: &BeginFile) -> Result<(), Unmet> {
        opened.drop_file();
        let writing = match self.try_begin(opened, wanted) {
            Ok(writing) => writing,
            Err(unmet) => {
                opened.file = Open::Failed;
                return Err(unmet);
            }
        };
        let begun = FileBegun { offset: writing.at, sha256: writing.digest.value() };
        opened.file = Open::Writing(Box::new(writing));
        if wanted.fresh { Ok(()) } else { Ok(self.say(Answer::Begun(begun))?) }
    }

    fn try_begin(&self, opened: &mut Opened, begin: &BeginFile) -> Result<Writing, Unmet> {
        let path = &begin.path;
        let Spot { directory, name } = opened.tree.spot(path)?;
        self.guard.may(&directory, Some(name), true).map_err(Failure::denied)?;
        let before = beneath::look(&directory, beneath::name(name)).map_err(Failure::io("examine", path))?;
        let words = String::from_utf8_lossy(path);
        let refused = |what: &str| Unmet::from(Failure::new(FileFailure::Exists, format!("{words} {what}")));
        match before.map(|before| before.kind) {
            Some(_) if begin.keep => return Err(refused("already exists")),
            None | Some(Kind::Regular) => {}
            Some(Kind::Directory) => return Err(refused("is a directory, which a file does not replace")),
            Some(Kind::Symlink) => {
                return Err(refused("is a symbolic link, and not followed; remove it or name its target"));
            }
            Some(Kind::Special) => return Err(refused("is a device, a pipe or a socket")),
        }
        let mut aside = Aside::open(&directory, name, &opened.id).map_err(|error| match error {
            aside::Error::System(error) => Failure::io("write", path)(error),
            aside::Error::Busy(_) => Failure::new(FileFailure::Busy, error.to_string()),
            aside::Error::Foreign(_) => Failure::last(error.to_string()),
        })?;
        let mut digest = Digest::default();
        let mut at = 0;
        let read = |error| Failure::io("read what is there of", path)(error);
        if begin.fresh {
            aside.file().set_len(0).map_err(Failure::io("write", path))?;
        } else if aside.facts().size > 0 {
            let goes_on = || !self.answers.is_closed();
            at = digest.read(aside.file_mut(), u64::MAX, goes_on).map_err(read)?;
        }
        let has = beneath::free_space(&directory).unwrap_or(u64::MAX);
        let needs = begin.size.saturating_sub(at);
        if needs > has {
            if at == 0 {
                aside.remove();
            }
            let words = format!("not enough space for {words}: it has {needs} bytes, and {has} are free");
            return Err(Failure::last(words).into());
        }
        opened.record.note(aside.directory(), aside.name(), aside.facts(), begin.size > LARGE);
        let (path, name, keep) = (path.clone(), name.to_vec(), begin.keep);
        Ok(Writing { aside, path, name, before, keep, at, told: at, digest })
    }

    fn write(
        &self,
        opened: &mut Opened,
        work: impl FnOnce(&mut Writing) -> Result<(), Unmet>,
    ) -> Result<(), Unmet> {
        let done = opened.file.with(work);
        if done.is_err() {
            // A full disk must not stay full because of a file that cannot be completed.
            opened.file.drop_failed();
        } else if let Open::Writing(writing) = &mut opened.file
            && writing.at - writing.told >= TOLD
        {
            writing.told = writing.at;
            self.say(Answer::Written(writing.at))?;
        }
        done
    }

    fn finish(&self, opened: &mut Opened, finish: &FinishFile) -> Result<(), Unmet> {
        let writing = match std::mem::replace(&mut opened.file, Open::None) {
            Open::Writing(writing) => *writing,
            Open::Failed => return Ok(()),
            Open::None => return Err(Failure::last("no file was begun").into()),
        };
        let path = writing.path.clone();
        if writing.at != finish.size || writing.digest.value() != finish.sha256 {
            writing.aside.remove();
            let words =
                format!("{} was changed in transit: its SHA-256 differs", String::from_utf8_lossy(&path));
            return Err(Failure::new(FileFailure::Digest, words).into());
        }
        let set = writing.complete(finish);
        if let Err(failure) = set {
            writing.aside.remove();
            return Err(failure.into());
        }
        // Writing the content may have taken long.
        self.guard.wait();
        let Writing { aside, name, before, keep, digest, .. } = writing;
        if let Err(words) = self.guard.may(aside.directory(), Some(&name), true) {
            aside.remove();
            return Err(Failure::denied(words).into());
        }
        let directory = Rc::clone(aside.directory());
        let beside = aside.name().clone();
        if let Err(error) = aside.finish(&name, keep) {
            remove_own(&directory, &beside);
            return Err(Failure::io("give its name to", &path)(error).into());
        }
        let facts = beneath::look(&directory, beneath::name(&name)).map_err(Failure::io("examine", &path))?;
        self.guard.copied(finish.size);
        self.done(FileDone {
            entry: facts.as_ref().map(entry),
            sha256: digest.value(),
            size: finish.size,
            is_new: before.is_none(),
        })
    }
}

/// Removes a temporary file that did not get its final name.
fn remove_own(directory: &OwnedFd, beside: &std::ffi::OsStr) {
    if beneath::look(directory, beside).is_ok_and(|found| found.is_some_and(|it| it.kind == Kind::Regular)) {
        drop(beneath::remove(directory, beside));
    }
}

impl Opened {
    /// Removes the file that was begun.
    fn drop_file(&mut self) {
        self.file.drop_failed();
        self.file = Open::None;
    }
}
