//! Goes through what is to be copied, from the top down, and each directory by itself: files and links first, then the directories in
//! it, and at last what it has itself.

use super::ends::{Reading, Writing, unexpected};
use super::file::{self, One};
use super::pass::Pass;
use super::place::shown;
use super::state::State;
use super::trouble::Trouble;
use super::{Job, Place};
use crate::copies::{owner_of, paths};
use crate::wire::proto::v1::{
    EndDirectory, FileEntry, FileFailed, FileKind, FilesOpened, MakeDirectory, MakeSymlink, from_reader,
    to_reader, to_writer,
};

/// A directory that is gone through.
struct Directory {
    source: Vec<u8>,
    target: Vec<u8>,
    entry: FileEntry,
    /// What is in it and comes next, the last one first.
    rest: Vec<FileEntry>,
}

/// Copies everything that is not there yet.
///
/// # Errors
/// If an end breaks, or nothing can be copied.
pub async fn copy(
    from: &mut Reading,
    to: &mut Writing,
    opened: &FilesOpened,
    place: &FilesOpened,
    job: &Job,
    source: &Place,
    state: &mut State,
) -> Result<(), Trouble> {
    let entry = opened.entry.clone().ok_or_else(unexpected)?;
    let is_directory = entry.kind() == FileKind::Directory;
    if is_directory && !job.options.recursive {
        return Err(Trouble::fatal(format!("{} is a directory; copy it with -r", source.words())));
    }
    if !is_directory && source.is_directory() {
        return Err(Trouble::fatal(format!("{} is not a directory", source.words())));
    }
    let target = target(opened, place, job, source, is_directory)?;
    let is_here = job.destination.vm().is_none();
    let (mask, sets_owners) =
        if is_here { (own_mask(), nix::unistd::geteuid().is_root()) } else { (0o022, true) };
    let goes_on = place.was_interrupted || state.was_lost;
    let mut pass = Pass {
        from,
        to,
        job,
        state,
        goes_on,
        mask,
        sets_owners,
        made_by_itself: None,
        is_into_itself: false,
    };
    if is_directory {
        pass.is_into_itself = source.vm() == job.destination.vm();
        // What is in it goes into what was opened, or into a directory that is still to be made.
        let opened = place.entry.as_ref().filter(|_| target.is_empty()).map(identity);
        pass.made_by_itself = opened.filter(|_| pass.is_into_itself);
        pass.tree(target, entry).await?;
    } else {
        pass.one(&[], target, &entry).await?;
    }
    pass.to.done(to_writer::Request::Close(true)).await?;
    Ok(())
}

fn identity(entry: &FileEntry) -> (u64, u64) {
    (entry.device, entry.inode)
}

/// The umask of this process.
fn own_mask() -> u32 {
    use nix::sys::stat::{Mode, umask};

    // There is no other way to learn it.
    let mask = umask(Mode::from_bits_truncate(0o077));
    umask(mask);
    mask.bits() as u32 & 0o777
}

/// Where it goes, below what the writing end has opened.
fn target(
    opened: &FilesOpened,
    place: &FilesOpened,
    job: &Job,
    source: &Place,
    is_directory: bool,
) -> Result<Vec<u8>, Trouble> {
    let destination = &job.destination;
    if !place.last.is_empty() {
        if job.sources.len() > 1 || (destination.is_directory() && !is_directory) {
            return Err(Trouble::fatal(format!("{} is not a directory", destination.words())));
        }
        if let (Some(there), Some(entry)) = (&place.entry, &opened.entry) {
            let is_it = (there.device, there.inode) == (entry.device, entry.inode);
            if is_it && source.vm() == destination.vm() {
                let words = format!("{} and {} are the same", source.words(), destination.words());
                return Err(Trouble::fatal(words));
            }
        }
        return Ok(place.last.clone());
    }
    let (_, name) = paths::split(source.path());
    if *source == Place::Standard {
        let words = format!("{} is a directory; name the file in it", destination.words());
        return Err(Trouble::fatal(words));
    }
    // Of "." and "/" what is in it is copied.
    Ok(name.to_vec())
}

impl Pass<'_> {
    /// A directory, and all in it.
    async fn tree(&mut self, target: Vec<u8>, entry: FileEntry) -> Result<(), Trouble> {
        if self.is_made_by_itself(&entry) {
            return Err(Trouble::fatal("a directory cannot be copied into itself"));
        }
        let mut open = Vec::new();
        open.extend(self.enter(Vec::new(), target, entry).await?);
        while let Some(directory) = open.last_mut() {
            let Some(next) = directory.rest.pop() else {
                let Some(done) = open.pop() else { break };
                self.leave(&done).await?;
                continue;
            };
            let source = paths::join(&directory.source, &next.name);
            let target = paths::join(&directory.target, &next.name);
            match next.kind() {
                FileKind::Directory if self.is_made_by_itself(&next) => {
                    self.fails(&source, &target, "a directory cannot be copied into itself");
                }
                FileKind::Directory => open.extend(self.enter(source, target, next).await?),
                _ => self.one(&source, target, &next).await?,
            }
        }
        Ok(())
    }

    fn is_made_by_itself(&self, entry: &FileEntry) -> bool {
        self.made_by_itself == Some(identity(entry))
    }

    fn fails(&mut self, source: &[u8], target: &[u8], words: &str) {
        let failed = FileFailed { message: words.to_owned(), ..FileFailed::default() };
        self.state.fails(target, source, &failed);
    }

    /// Makes a directory, and finds out what is to go into it; nothing, if that fails.
    async fn enter(
        &mut self,
        source: Vec<u8>,
        target: Vec<u8>,
        entry: FileEntry,
    ) -> Result<Option<Directory>, Trouble> {
        if self.state.has_failed(&target) {
            return Ok(None);
        }
        if !target.is_empty() {
            let mode = entry.mode & 0o777 & !self.mask;
            let wanted = MakeDirectory { path: target.clone(), has_to_be_new: false, mode };
            let done = self.to.done(to_writer::Request::MakeDirectory(wanted)).await;
            let Some(done) = self.or_fails(done, &source, &target)? else { return Ok(None) };
            self.state.steps += 1;
            if self.is_into_itself && self.made_by_itself.is_none() {
                self.made_by_itself = done.entry.as_ref().map(identity);
            }
            if done.is_new {
                self.state.made.insert(target.clone());
            }
        }
        let listed = self.list(&source).await;
        let Some(mut rest) = self.or_fails(listed, &source, &target)? else { return Ok(None) };
        // What a guest says is no path until it was looked at.
        rest.retain(|entry| {
            let is_name = paths::is_name(&entry.name);
            if !is_name {
                let failed = FileFailed {
                    message: format!("{:?} is not a valid name", shown(&entry.name)),
                    ..FileFailed::default()
                };
                self.state.fails(&paths::join(&target, &entry.name), &source, &failed);
            }
            is_name
        });
        let is_directory = |entry: &FileEntry| entry.kind() == FileKind::Directory;
        rest.sort_by(|one, other| (is_directory(other), &other.name).cmp(&(is_directory(one), &one.name)));
        Ok(Some(Directory { source, target, entry, rest }))
    }

    async fn list(&mut self, path: &[u8]) -> Result<Vec<FileEntry>, Trouble> {
        self.from.ask(to_reader::Request::List(path.to_vec())).await?;
        let mut all = Vec::new();
        loop {
            match self.from.next().await? {
                from_reader::Answer::Entries(entries) => all.extend(entries.entries),
                from_reader::Answer::Done(_) => return Ok(all),
                _ => return Err(unexpected()),
            }
            if all.len() > 1_000_000 {
                return Err(Trouble::fatal(format!("{} has too many entries", shown(path))));
            }
        }
    }

    /// Everything is in a directory.
    async fn leave(&mut self, directory: &Directory) -> Result<(), Trouble> {
        let Directory { source, target, entry, .. } = directory;
        let options = self.job.options;
        let is_new = self.state.made.contains(target);
        let new_mode = is_new.then_some(entry.mode & 0o777 & !self.mask);
        let end = EndDirectory {
            path: target.clone(),
            mode: if options.preserve { Some(entry.mode) } else { new_mode },
            owner: (options.preserve && self.sets_owners).then(|| owner_of(entry)),
            modified: entry.modified.filter(|_| options.preserve),
            attributes: if options.attributes { entry.attributes.clone() } else { Vec::new() },
        };
        let ended = self.to.done(to_writer::Request::EndDirectory(end)).await;
        self.or_fails(ended, source, target).map(drop)
    }

    /// One thing that is no directory.
    async fn one(&mut self, source: &[u8], target: Vec<u8>, entry: &FileEntry) -> Result<(), Trouble> {
        if self.state.has_failed(&target) {
            return Ok(());
        }
        let done = match entry.kind() {
            FileKind::Regular => file::copy(self, &One { source, target: &target, entry }).await,
            FileKind::Symlink => self.link(&target, entry).await,
            _ => {
                self.fails(source, &target, "it is a device, a pipe or a socket, which is not copied");
                return Ok(());
            }
        };
        self.or_fails(done, source, &target).map(drop)
    }

    async fn link(&mut self, target: &[u8], entry: &FileEntry) -> Result<(), Trouble> {
        let options = self.job.options;
        let wanted = MakeSymlink {
            path: target.to_vec(),
            target: entry.link_target.clone(),
            owner: (options.preserve && self.sets_owners).then(|| owner_of(entry)),
            modified: entry.modified.filter(|_| options.preserve),
            // The one of an earlier pass is ours.
            replace: !options.keep || self.state.done.contains_key(target),
        };
        let done = self.to.done(to_writer::Request::MakeSymlink(wanted)).await?;
        self.state.is_done(target, done.entry, 0);
        Ok(())
    }

    /// What was done; nothing, if that failed, which is told.
    fn or_fails<T>(
        &mut self,
        done: Result<T, Trouble>,
        source: &[u8],
        target: &[u8],
    ) -> Result<Option<T>, Trouble> {
        match done {
            Ok(done) => Ok(Some(done)),
            Err(Trouble::Failed(failed)) => {
                self.state.fails(target, source, &failed);
                Ok(None)
            }
            Err(other) => Err(other),
        }
    }
}
