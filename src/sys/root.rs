//! One prefix before every path that is read, so that a test can lay out a tree taken from a real guest.
//!
//! The prefix is no sandbox: it is for paths that this program names itself, never for paths that came
//! from a caller.

use std::fs::File;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

/// Bytes that the kernel has for what a file of /sys says.
const PAGE: usize = 4096;

/// Directory that stands for `/`: the machine's own root, or a test's directory.
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

    /// Returns whether this root is the one of the machine itself.
    pub fn is_the_machine(&self) -> bool {
        self.0 == Path::new("/")
    }

    /// The path of the absolute `path` below this root.
    pub fn path(&self, path: &str) -> PathBuf {
        self.path_of(Path::new(path))
    }

    /// The same of one that may be no text.
    pub fn path_of(&self, path: &Path) -> PathBuf {
        self.0.join(path.strip_prefix("/").unwrap_or(path))
    }

    /// Returns a path that a caller has given, below this root and otherwise unchanged: a `/` at its end is kept,
    /// because it stands for a directory. On the machine itself a relative path starts at the working directory.
    pub fn path_as_given(&self, path: &str) -> PathBuf {
        if self.is_the_machine() && !path.starts_with('/') {
            // Joined to a directory, so that the path has one whatever the name is.
            return Path::new(".").join(path);
        }
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
    /// The errors of `read(2)`.
    pub fn read(&self, path: &str) -> io::Result<Vec<u8>> {
        let mut bytes = Vec::with_capacity(PAGE);
        // Without querying the file's size, which says nothing about the contents of such a file.
        File::open(self.path(path))?.take(u64::MAX).read_to_end(&mut bytes)?;
        Ok(bytes)
    }

    /// Reads a file whose size depends on the machine, such as those of /proc.
    ///
    /// # Errors
    /// The errors of `read(2)`; also if it has more bytes than `most`.
    pub fn read_at_most(&self, path: &str, most: u64) -> io::Result<Vec<u8>> {
        let mut bytes = Vec::with_capacity(PAGE);
        File::open(self.path(path))?.take(most.saturating_add(1)).read_to_end(&mut bytes)?;
        if u64::try_from(bytes.len()).unwrap_or(u64::MAX) > most {
            return Err(io::Error::new(
                io::ErrorKind::FileTooLarge,
                format!("{path} has more than {most} bytes"),
            ));
        }
        Ok(bytes)
    }

    /// The contents of a file that holds one line of text, without white space around it; empty if the
    /// file is missing or cannot be read. What the kernel has to say fits into a page, and what does not is cut.
    pub fn line(&self, path: &str) -> String {
        let mut page = [0; PAGE];
        let length =
            File::open(self.path(path)).and_then(|mut file| file.read(&mut page)).unwrap_or_default();
        String::from_utf8_lossy(page.get(..length).unwrap_or_default()).trim().to_owned()
    }
}
