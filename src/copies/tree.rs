//! What was opened, and the way to what is below it.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use super::{Failure, paths};
use crate::sys::beneath;

/// A directory, or what else was opened, and the directory below it that was entered last.
pub struct Tree {
    root: Rc<OwnedFd>,
    entered: Option<(Vec<u8>, Rc<OwnedFd>)>,
}

/// Something in a directory.
pub struct Spot<'p> {
    pub directory: Rc<OwnedFd>,
    pub name: &'p [u8],
}

/// The path that somebody has named, as one of this process.
pub fn named(base: &Path, path: &[u8]) -> Result<PathBuf, Failure> {
    paths::named(path).map_err(|wrong| Failure::last(format!("the path {wrong}")))?;
    Ok(base.join(beneath::path(path.to_vec())))
}

impl Tree {
    pub fn at(root: OwnedFd) -> Self {
        Self { root: Rc::new(root), entered: None }
    }

    /// What was opened itself.
    pub fn root(&self) -> Rc<OwnedFd> {
        Rc::clone(&self.root)
    }

    /// The directory at a path.
    pub fn directory(&mut self, path: &[u8]) -> Result<Rc<OwnedFd>, Failure> {
        if path.is_empty() {
            return Ok(self.root());
        }
        if let Some((_, directory)) = self.entered.as_ref().filter(|(entered, _)| entered == path) {
            return Ok(Rc::clone(directory));
        }
        let parts = paths::parts(path).map_err(|wrong| Failure::last(format!("the path {wrong}")))?;
        let mut directory = self.root();
        for part in parts {
            let next = beneath::enter(&directory, beneath::name(part));
            directory = Rc::new(next.map_err(Failure::io("enter", path))?);
        }
        self.entered = Some((path.to_vec(), Rc::clone(&directory)));
        Ok(directory)
    }

    /// The directory that something is in, and its name there.
    pub fn spot<'p>(&mut self, path: &'p [u8]) -> Result<Spot<'p>, Failure> {
        let (directory, name) = match path.iter().rposition(|byte| *byte == b'/') {
            Some(at) => (&path[..at], &path[at + 1..]),
            None => (&path[..0], path),
        };
        if !paths::is_name(name) || (directory.is_empty() && path.len() != name.len()) {
            return Err(Failure::last("the path has an invalid component"));
        }
        Ok(Spot { directory: self.directory(directory)?, name })
    }

    /// What is at a path: what was opened itself, or what is below it; a link itself.
    pub fn find(&mut self, path: &[u8]) -> Result<Rc<OwnedFd>, Failure> {
        if path.is_empty() {
            return Ok(self.root());
        }
        let spot = self.spot(path)?;
        let found = beneath::find_in(&spot.directory, beneath::name(spot.name));
        found.map(Rc::new).map_err(Failure::io("open", path))
    }
}
