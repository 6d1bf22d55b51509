//! Writes cpio archives (format "newc") for the kernel to unpack at boot, and finds the libraries that a
//! program needs there.

use std::fmt::Write as _;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, bail};

/// An archive that is being written.
#[derive(Debug)]
pub struct Archive<W: Write> {
    out: W,
    files: u32,
    folders: Vec<PathBuf>,
}

const FOLDER: u32 = 0o040_755;
const PROGRAM: u32 = 0o100_755;

impl<W: Write> Archive<W> {
    /// An empty archive.
    pub fn new(out: W) -> Self {
        Self { out, files: 0, folders: Vec::new() }
    }

    /// Adds a file (executable by all, which does no harm) at an absolute path, with the folders above it.
    pub fn file(&mut self, path: &str, contents: &[u8]) -> anyhow::Result<()> {
        let folders: Vec<_> = Path::new(path).ancestors().skip(1).map(Path::to_path_buf).collect();
        for folder in folders.into_iter().rev().filter(|folder| folder != Path::new("/")) {
            if !self.folders.contains(&folder) {
                self.member(&folder.to_string_lossy(), FOLDER, &[])?;
                self.folders.push(folder);
            }
        }
        self.member(path, PROGRAM, contents)
    }

    /// Ends the archive.
    pub fn finish(mut self) -> anyhow::Result<W> {
        self.member("TRAILER!!!", 0, &[])?;
        Ok(self.out)
    }

    fn member(&mut self, path: &str, mode: u32, contents: &[u8]) -> anyhow::Result<()> {
        self.files += 1;
        let name = path.trim_start_matches('/');
        let fields = [
            self.files,
            mode,
            0,
            0,
            1,
            0,
            u32::try_from(contents.len())?,
            0,
            0,
            0,
            0,
            u32::try_from(name.len() + 1)?,
            0,
        ];
        let mut header = String::from("070701");
        for field in fields {
            write!(header, "{field:08x}")?;
        }
        let head = [header.as_bytes(), name.as_bytes(), &[0]].concat();
        for part in [&head[..], contents] {
            self.out.write_all(part)?;
            self.out.write_all(&[0; 3][..part.len().wrapping_neg() % 4])?;
        }
        Ok(())
    }
}

/// The shared libraries that `program` loads, as `ldd` says, its loader included.
pub fn libraries(program: &Path) -> anyhow::Result<Vec<String>> {
    let output = Command::new("ldd").arg(program).output().context("cannot run ldd")?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    if text.contains("not found") {
        bail!("{} needs a library that is missing:\n{text}", program.display());
    }
    Ok(text.split_whitespace().filter(|word| word.starts_with('/')).map(str::to_owned).collect())
}
