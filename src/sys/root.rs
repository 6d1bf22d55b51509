//! One prefix before every path that is read, so that a test can lay out a tree taken from a real guest.
//!
//! The prefix is no sandbox: it is for paths that this program names itself, never for paths that came
//! from a caller.

use std::fs::File;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

/// Bytes that the kernel has for what a file of /sys says.
const PAGE: usize = 4096;

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
        self.path_of(Path::new(path))
    }

    /// The same of one that may be no text.
    pub fn path_of(&self, path: &Path) -> PathBuf {
        self.0.join(path.strip_prefix("/").unwrap_or(path))
    }

    /// The path below this root that a caller has named, to the letter: a `/` at its end stays, as it means a folder. On
    /// the machine itself a relative one begins at the working directory.
    pub fn path_as_given(&self, path: &str) -> PathBuf {
        if self.is_the_machine() && !path.starts_with('/') {
            // With a folder that it is in, whatever its name is.
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
    /// As `read(2)` gives them.
    pub fn read(&self, path: &str) -> io::Result<Vec<u8>> {
        let mut bytes = Vec::with_capacity(PAGE);
        // Without asking for its size, which is none of what is in such a file.
        File::open(self.path(path))?.take(u64::MAX).read_to_end(&mut bytes)?;
        Ok(bytes)
    }

    /// Reads a file that grows with what the machine has, such as those of /proc.
    ///
    /// # Errors
    /// As `read(2)` gives them; if there are more bytes than `most`.
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
