//! Bounds that the settings of `[qga]`, and those of qemu-ga, set for QGA clients, whatever their grants allow.

use std::fmt;
use std::path::{Path, PathBuf};

use crate::policy::grant::within;
use crate::policy::rules::{Asked, Detail, NOT_HERE};

/// Restrictions on the arguments of commands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// Only programs that guest-exec may run: files, or directories with everything below them.
    pub exec_paths: Option<Vec<PathBuf>>,
    /// Only files that guest-file-open may open: files, or directories with everything below them.
    pub file_paths: Option<Vec<PathBuf>>,
    /// True if guest-file-open may open files for reading only.
    pub files_read_only: bool,
    /// True if passwords may be set.
    pub passwords: bool,
}

impl Default for Limits {
    /// No restrictions, as with qemu-ga.
    fn default() -> Self {
        Self { exec_paths: None, file_paths: None, files_read_only: false, passwords: true }
    }
}

/// Lists of commands, and restrictions on the arguments of those that may be called.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Bounds {
    /// Only commands that may be called, if set.
    pub allow: Option<Vec<String>>,
    /// Commands that may not be called, even if they are in `allow`.
    pub block: Vec<String>,
    /// Restrictions on the arguments of the commands that may be called.
    pub limits: Limits,
}

/// Bound that forbids a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bound<'a> {
    /// The command is blocked, or not among those that may be called.
    Command,
    /// The program is not among those that may be run.
    Program(&'a Path),
    /// Programs are restricted, and environment variables could make them run others.
    Environment,
    /// Programs are restricted, and a working directory could make them run others.
    Directory,
    /// Files may be opened for reading only.
    ReadOnly,
    /// The file is not among those that may be opened.
    File {
        /// Path of the file.
        path: &'a Path,
        /// True if the guest has the file at that path.
        is_here: bool,
    },
    /// Passwords may not be set.
    Passwords,
}

impl fmt::Display for Bound<'_> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (problem, setting) = match self {
            Self::Command => return formatter.write_str("the command is not allowed"),
            Self::Program(path) => (among("the program", path), "qga.exec.paths"),
            Self::Environment => {
                ("\"env\" is not allowed where programs are limited".to_owned(), "qga.exec.paths")
            }
            Self::Directory => (
                "a working directory (--cwd) is not allowed where programs are limited".to_owned(),
                "qga.exec.paths",
            ),
            Self::ReadOnly => ("files may be opened only for reading".to_owned(), "qga.files.read-only"),
            Self::File { path, is_here: true } => (among("the file", path), "qga.files.paths"),
            Self::File { path, is_here: false } => (
                format!("the file {}{NOT_HERE}, is not among those allowed", path.display()),
                "qga.files.paths",
            ),
            Self::Passwords => ("passwords may not be set".to_owned(), "qga.passwords.allow"),
        };
        write!(formatter, "{problem}; see {setting} in guestlet's settings")
    }
}

fn among(what: &str, path: &Path) -> String {
    format!("{what} {} is not among those allowed", path.display())
}

impl Bounds {
    /// Returns the bound that forbids the call, if any does.
    pub fn forbid<'a>(&self, asked: &Asked<'a>) -> Option<Bound<'a>> {
        let has = |list: &Vec<String>| list.iter().any(|name| name == asked.verb);
        if has(&self.block) || !self.allow.as_ref().is_none_or(has) {
            return Some(Bound::Command);
        }
        let Limits { exec_paths, file_paths, files_read_only, passwords } = &self.limits;
        match asked.detail {
            Detail::Program { path, environment, directory, .. } => {
                let paths = exec_paths.as_deref()?;
                if !within(path, paths) {
                    return Some(Bound::Program(path));
                }
                let directory = directory.then_some(Bound::Directory);
                environment.then_some(Bound::Environment).or(directory)
            }
            Detail::File { writes: true, .. } if *files_read_only => Some(Bound::ReadOnly),
            Detail::File { path, is_here, .. } => {
                let paths = file_paths.as_deref()?;
                (!is_here || !within(path, paths)).then_some(Bound::File { path, is_here })
            }
            Detail::Password => (!passwords).then_some(Bound::Passwords),
            Detail::None | Detail::Target(_) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::role::Role;
    use crate::policy::rules::Who;

    fn forbidden(bounds: &Bounds, detail: Detail<'_>) -> Option<String> {
        let asked = Asked { detail, ..Asked::new(Who::Qga, "", "guest-x", Role::Status) };
        bounds.forbid(&asked).map(|bound| bound.to_string())
    }

    #[test]
    fn limits_hold_by_whole_parts_of_a_path() {
        let limits = Limits {
            exec_paths: Some(vec!["/usr/bin".into()]),
            file_paths: Some(vec!["/srv".into()]),
            files_read_only: true,
            passwords: false,
        };
        let bounds = Bounds { limits, ..Bounds::default() };
        let program = |path, environment| Detail::Program {
            path: Path::new(path),
            environment,
            directory: false,
            user: "root",
        };
        assert_eq!(forbidden(&bounds, program("/usr/bin/true", false)), None);
        assert_eq!(
            forbidden(&bounds, program("/usr/bin-evil/true", false)).unwrap(),
            "the program /usr/bin-evil/true is not among those allowed; see qga.exec.paths in guestlet's settings"
        );
        assert!(
            forbidden(&bounds, program("/usr/bin/true", true)).unwrap().starts_with("\"env\" is not allowed")
        );
        let file = |path, writes| Detail::File { path: Path::new(path), is_here: true, writes };
        assert_eq!(forbidden(&bounds, file("/srv/a/b", false)), None);
        assert!(forbidden(&bounds, file("/srv/a/b", true)).unwrap().contains("qga.files.read-only"));
        assert!(forbidden(&bounds, file("/srv2", false)).unwrap().contains("qga.files.paths"));
        assert!(forbidden(&bounds, Detail::Password).unwrap().contains("qga.passwords.allow"));
        let elsewhere = Detail::File { path: Path::new("/srv/a/b"), is_here: false, writes: false };
        assert!(forbidden(&bounds, elsewhere).unwrap().contains("/srv/a/b, which leads into another mount"));
        assert_eq!(forbidden(&Bounds::default(), elsewhere), None);
        assert_eq!(forbidden(&Bounds::default(), file("/anything", true)), None);
    }
}
