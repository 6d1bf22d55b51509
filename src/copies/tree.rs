//! Opened object, and access to everything below it.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use super::{Failure, paths};
use crate::sys::beneath;

/// Opened object, and the directory below it that was entered last.
pub struct Tree {
    root: Rc<OwnedFd>,
    entered: Option<(Vec<u8>, Rc<OwnedFd>)>,
}

/// Entry in a directory.
pub struct Spot<'p> {
    pub directory: Rc<OwnedFd>,
    pub name: &'p [u8],
}

/// Converts a path that a caller has named to a path of this process.
pub fn named(base: &Path, path: &[u8]) -> Result<PathBuf, Failure> {
    paths::named(path).map_err(|wrong| Failure::last(format!("the path {wrong}")))?;
    Ok(base.join(beneath::path(path.to_vec())))
}

impl Tree {
    pub fn at(root: OwnedFd) -> Self {
        Self { root: Rc::new(root), entered: None }
    }

    /// Returns the opened object itself.
    pub fn root(&self) -> Rc<OwnedFd> {
        Rc::clone(&self.root)
    }

    /// Opens the directory at a path.
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

    /// Returns the directory of an entry, and its name there.
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

    /// Opens what is at a path: the opened object itself, or something below it. A symbolic link is opened
    /// itself.
    pub fn find(&mut self, path: &[u8]) -> Result<Rc<OwnedFd>, Failure> {
        if path.is_empty() {
            return Ok(self.root());
        }
        let spot = self.spot(path)?;
        let found = beneath::find_in(&spot.directory, beneath::name(spot.name));
        found.map(Rc::new).map_err(Failure::io("open", path))
    }
}
