//! Walk through what is to be copied, from the top down, directory by directory: first files and links, then
//! subdirectories, and finally the attributes of the directory itself.

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

/// Directory that is being copied.
struct Directory {
    source: Vec<u8>,
    target: Vec<u8>,
    entry: FileEntry,
    /// Remaining entries in reverse order; the next one is the last.
    rest: Vec<FileEntry>,
}

/// Copies everything that is not in place yet.
///
/// # Errors
/// Fails if an end breaks, or nothing can be copied.
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
        // The content goes into the directory that was opened, or into one that is yet to be created.
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

/// Returns the umask of this process.
fn own_mask() -> u32 {
    use nix::sys::stat::{Mode, umask};

    // umask(2) returns the mask only while it sets another one.
    let mask = umask(Mode::from_bits_truncate(0o077));
    umask(mask);
    mask.bits() as u32 & 0o777
}

/// Returns the target below the directory that the writing end has opened.
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
    // For "." and "/" the content of the directory is copied.
    Ok(name.to_vec())
}

impl Pass<'_> {
    /// Copies a directory with all of its content.
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

    /// Creates a directory, and determines its entries to copy; `None` if that fails.
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
        // Names from a guest have to be checked before they are used in paths.
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

    /// Completes a directory after all of its entries were copied.
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

    /// Copies something that is not a directory.
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
            // A file from an earlier pass belongs to this copy, and may be replaced.
            replace: !options.keep || self.state.done.contains_key(target),
        };
        let done = self.to.done(to_writer::Request::MakeSymlink(wanted)).await?;
        self.state.is_done(target, done.entry, 0);
        Ok(())
    }

    /// Returns the result; `None` after a failure, which is recorded and shown.
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
