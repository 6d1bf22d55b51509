//! Settings: TOML fragments, which are merged in order, checked once and turned into one struct for each program.
//!
//! A program reads its main file, then every `*.toml` of its drop-in directory in the order of their names;
//! a later fragment wins. Unknown keys are refused. To add a setting: a field in the program's fragment (an
//! `Option`), its merging, its check, its place in the validated struct, and its row in `reference`.

#[cfg(feature = "agent")]
pub mod agent;
#[cfg(feature = "agent")]
pub mod disk_rules;
#[cfg(feature = "agent")]
pub mod environment_file;
#[cfg(feature = "agent")]
pub mod key_file;

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;

use crate::sys::files;

#[cfg(feature = "host")]
pub mod host;
#[cfg(all(test, feature = "agent", feature = "host"))]
mod reference;

/// A fragment of settings: every field optional.
pub trait Fragment: DeserializeOwned + Default {
    /// Takes every field that `later` sets.
    fn merge(&mut self, later: Self, file: &Path);

    /// Keeps the text that this fragment was parsed from, if its checks name lines.
    fn remember(&mut self, _text: &str) {}

    /// Returns the line on which this fragment sets `key`, if known.
    fn line(&self, _key: &str) -> Option<usize> {
        None
    }
}

/// Reason why settings were refused. Names the file and, if known, the line.
#[derive(Debug)]
pub struct Error {
    file: PathBuf,
    line: Option<usize>,
    problem: String,
}

impl Error {
    /// Creates an error about a file as a whole, or about all fragments together.
    pub fn in_file(file: &Path, problem: impl Into<String>) -> Self {
        Self { file: file.to_owned(), line: None, problem: problem.into() }
    }

    /// Creates an error about a line of a file.
    pub fn on_line(file: &Path, line: usize, problem: impl Into<String>) -> Self {
        Self { file: file.to_owned(), line: Some(line), problem: problem.into() }
    }

    /// Creates an error at the byte `offset` of a file with this `text`.
    pub fn at(file: &Path, text: &str, offset: usize, problem: impl Into<String>) -> Self {
        Self { file: file.to_owned(), line: Some(line_of(text, offset)), problem: problem.into() }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}", self.file.display())?;
        if let Some(line) = self.line {
            write!(formatter, ":{line}")?;
        }
        write!(formatter, ": {}", self.problem)
    }
}

impl std::error::Error for Error {}

/// Reads `main` and the `*.toml` files of `drop_ins`.
///
/// Missing files are ignored. A missing `main` is an error if it is `required`, and a dangling symbolic link
/// always is.
///
/// # Errors
/// The first fragment that cannot be read or has an unknown key or an invalid value.
pub fn load<F: Fragment>(main: &Path, required: bool, drop_ins: &Path) -> Result<F, Error> {
    Ok(merge(fragments(main, required, drop_ins)?))
}

/// Problem that a check found in the merged fragments.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// Setting that has the problem, such as `control.port`.
    pub key: &'static str,
    /// Description of the problem, and of a valid value.
    pub text: String,
}

/// Merges fragments in their order and checks the outcome. A problem is attributed to the fragment that introduced
/// it, and to the line of its key.
///
/// # Errors
/// The problem that `check` finds.
pub fn merge_checked<F: Fragment + Clone, T>(
    fragments: Vec<(PathBuf, F)>,
    check: impl Fn(F) -> Result<T, Problem>,
) -> Result<T, Error> {
    let problem = match check(merge(fragments.clone())) {
        Ok(checked) => return Ok(checked),
        Err(problem) => problem,
    };
    let same = |count: &usize| check(merge(fragments[..*count].to_vec())).err().as_ref() == Some(&problem);
    let count = (1..=fragments.len()).find(same).unwrap_or(fragments.len());
    match fragments.into_iter().nth(count.saturating_sub(1)) {
        Some((file, fragment)) => {
            Err(Error { file, line: fragment.line(problem.key), problem: problem.text })
        }
        None => Err(Error::in_file(Path::new("settings"), problem.text)),
    }
}

fn merge<F: Fragment>(fragments: Vec<(PathBuf, F)>) -> F {
    let mut merged = F::default();
    for (file, fragment) in fragments {
        merged.merge(fragment, &file);
    }
    merged
}

/// Reads the fragments that [`load`] merges, with their files.
///
/// # Errors
/// The errors of [`load`].
pub fn fragments<F: Fragment>(
    main: &Path,
    required: bool,
    drop_ins: &Path,
) -> Result<Vec<(PathBuf, F)>, Error> {
    let mut fragments = Vec::new();
    let mut files = vec![main.to_owned()];
    files.extend(drop_in_files(drop_ins)?);
    for file in files {
        match read(&file) {
            Ok(text) => {
                let fragment = parse(&file, &text)?;
                fragments.push((file, fragment));
            }
            Err(error) => may_be_missing(&file, &error, required && file == main)?,
        }
    }
    Ok(fragments)
}

/// Parses one fragment; `file` is used in errors.
///
/// # Errors
/// If the text is not valid TOML, or has an unknown key or an invalid value: with the line.
pub fn parse<F: Fragment>(file: &Path, text: &str) -> Result<F, Error> {
    let mut fragment: F = toml::from_str(text).map_err(|error| Error {
        file: file.to_owned(),
        line: error.span().map(|span| line_of(text, span.start)),
        problem: error.message().replace('\n', " "),
    })?;
    fragment.remember(text);
    Ok(fragment)
}

fn line_of(text: &str, offset: usize) -> usize {
    text.as_bytes().iter().take(offset).filter(|byte| **byte == b'\n').count() + 1
}

/// Checks that reading `path` failed because no such file or directory exists, and that it is not required. A
/// dangling symbolic link is an error: its target, for instance on a disk that is not mounted yet, may have
/// settings that restrict access.
fn may_be_missing(path: &Path, error: &io::Error, required: bool) -> Result<(), Error> {
    if error.kind() != io::ErrorKind::NotFound || required {
        return Err(Error::in_file(path, format!("cannot be read: {error}")));
    }
    match files::dangling(path) {
        None => Ok(()),
        Some(link) => Err(Error::in_file(
            path,
            format!(
                "cannot be read: {} is a dangling symbolic link; mount the file system of its target first, \
                 or remove the link",
                link.display()
            ),
        )),
    }
}

/// Reads a file that may be missing.
#[cfg(feature = "agent")]
#[allow(clippy::disallowed_methods, reason = "settings are this module's own files")]
fn bytes(file: &Path) -> Result<Option<Vec<u8>>, Error> {
    match std::fs::read(file) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(error) => may_be_missing(file, &error, false).map(|()| None),
    }
}

#[allow(clippy::disallowed_methods, reason = "settings are this module's own files")]
fn read(file: &Path) -> io::Result<String> {
    std::fs::read_to_string(file)
}

fn drop_in_files(folder: &Path) -> Result<Vec<PathBuf>, Error> {
    let entries = match std::fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return may_be_missing(folder, &error, false).map(|()| Vec::new());
        }
        Err(error) => return Err(Error::in_file(folder, format!("cannot be listed: {error}"))),
    };
    let mut files = Vec::new();
    for entry in entries {
        let path =
            entry.map_err(|error| Error::in_file(folder, format!("cannot be listed: {error}")))?.path();
        if path.extension().is_some_and(|extension| extension == "toml") {
            files.push(path);
        }
    }
    files.sort_unstable();
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, Default, serde::Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Sample {
        colour: Option<String>,
        size: Option<u32>,
    }

    impl Fragment for Sample {
        fn merge(&mut self, later: Self, _file: &Path) {
            self.colour = later.colour.or(self.colour.take());
            self.size = later.size.or(self.size);
        }
    }

    fn write(folder: &Path, name: &str, text: &str) {
        let path = folder.join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        #[allow(clippy::disallowed_methods)]
        std::fs::write(path, text).unwrap();
    }

    #[test]
    fn later_fragments_win_in_the_order_of_their_names() {
        let folder = tempfile::tempdir().unwrap();
        write(folder.path(), "main.toml", "colour = 'red'\nsize = 1\n");
        write(folder.path(), "d/20.toml", "colour = 'green'\n");
        write(folder.path(), "d/10.toml", "colour = 'blue'\nsize = 2\n");
        write(folder.path(), "d/30.conf", "not even TOML");
        let sample: Sample = load(&folder.path().join("main.toml"), true, &folder.path().join("d")).unwrap();
        assert_eq!((sample.colour.as_deref(), sample.size), (Some("green"), Some(2)));
    }

    #[test]
    fn an_unknown_key_is_refused_with_file_and_line() {
        let folder = tempfile::tempdir().unwrap();
        write(folder.path(), "main.toml", "size = 1\ncolor = 'red'\n");
        let error = load::<Sample>(&folder.path().join("main.toml"), true, &folder.path().join("d"))
            .unwrap_err()
            .to_string();
        assert!(error.contains("main.toml:2: unknown field `color`"), "{error}");
    }

    #[test]
    fn a_missing_main_file_is_a_fault_only_where_it_is_required() {
        let folder = tempfile::tempdir().unwrap();
        let missing = folder.path().join("main.toml");
        assert!(load::<Sample>(&missing, false, &folder.path().join("d")).is_ok());
        assert!(load::<Sample>(&missing, true, &folder.path().join("d")).is_err());
    }

    /// Guards against ignoring settings on a disk that is not mounted yet: their contents are unknown then.
    #[test]
    fn a_link_to_nothing_is_not_taken_for_a_file_that_is_missing() {
        for link in ["main.toml", "d", "d/10.toml"] {
            let folder = tempfile::tempdir().unwrap();
            let at = folder.path().join(link);
            std::fs::create_dir_all(at.parent().unwrap()).unwrap();
            std::os::unix::fs::symlink("/nowhere/there", &at).unwrap();
            let main = folder.path().join("main.toml");
            let error = load::<Sample>(&main, false, &folder.path().join("d")).unwrap_err().to_string();
            let expected = format!("{0}: cannot be read: {0} is a dangling symbolic link", at.display());
            assert!(error.starts_with(&expected), "{error}");
        }
        let folder = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink("/nowhere/there", folder.path().join("etc")).unwrap();
        let main = folder.path().join("etc/main.toml");
        assert!(load::<Sample>(&main, false, &folder.path().join("etc/d")).is_err());
    }
}
