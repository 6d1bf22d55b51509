//! One prefix before every path that is read, so that a test can lay out a tree taken from a real guest.
//!
//! The prefix is no sandbox: it is for paths that this program names itself, never for paths that came
//! from a caller.

use std::io;
use std::path::{Path, PathBuf};

/// Where `/` is.
#[derive(Debug, Clone)]
pub struct Root(PathBuf);

impl Default for Root {
    fn default() -> Self {
        Self(PathBuf::from("/"))
    }
}

impl Root {
    /// A root at `prefix`.
    pub fn at(prefix: impl Into<PathBuf>) -> Self {
        Self(prefix.into())
    }

    /// Whether this is the machine itself.
    pub fn is_the_machine(&self) -> bool {
        self.0 == Path::new("/")
    }

    /// The path of the absolute `path` below this root.
    pub fn path(&self, path: &str) -> PathBuf {
        self.0.join(Path::new(path).strip_prefix("/").unwrap_or(Path::new(path)))
    }

    /// The path below this root that a caller has named, to the letter: a `/` at its end stays, as it means a folder.
    pub fn path_as_given(&self, path: &str) -> PathBuf {
        let mut whole = self.0.clone().into_os_string();
        if !self.is_the_machine() {
            whole.push("/");
        }
        whole.push(path.trim_start_matches('/'));
        whole.into()
    }

    /// Reads a small file, such as those of /proc and /sys.
    ///
    /// # Errors
    /// As `read(2)` gives them.
    #[allow(clippy::disallowed_methods, reason = "this is the boundary")]
    pub fn read(&self, path: &str) -> io::Result<Vec<u8>> {
        std::fs::read(self.path(path))
    }

    /// The contents of a file that holds one line of text, without white space around it; empty if the
    /// file is missing or cannot be read.
    pub fn line(&self, path: &str) -> String {
        self.read(path).map(|bytes| String::from_utf8_lossy(&bytes).trim().to_owned()).unwrap_or_default()
    }
}
