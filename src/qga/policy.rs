//! What may be called: block and allow lists of commands, as qemu-ga has them, and what commands that may be called
//! are limited to.

use std::path::{Path, PathBuf};

use crate::qga::error::Error;
use crate::qga::table::{self, COMMANDS};

/// What commands are limited to beyond the lists.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// The only programs that guest-exec runs, and those below folders that are named here.
    pub exec_paths: Option<Vec<PathBuf>>,
    /// The only files that guest-file-open opens, and those below folders that are named here.
    pub file_paths: Option<Vec<PathBuf>>,
    /// guest-file-open opens for reading only.
    pub files_read_only: bool,
    /// Passwords may be set.
    pub passwords: bool,
}

impl Default for Limits {
    /// As with qemu-ga: none.
    fn default() -> Self {
        Self { exec_paths: None, file_paths: None, files_read_only: false, passwords: true }
    }
}

impl Limits {
    /// Whether guest-exec may run the program that `path` is when every link in it is followed.
    ///
    /// # Errors
    /// If the settings do not let it.
    pub fn exec(&self, path: &Path) -> Result<(), Error> {
        within("the program", path, self.exec_paths.as_deref(), "qga.exec.paths")
    }

    /// Whether a program may be given an environment: by variables such as `LD_PRELOAD`, `BASH_ENV` and `PERL5OPT` most
    /// programs run others.
    ///
    /// # Errors
    /// If the settings limit what is run.
    pub fn environment(&self) -> Result<(), Error> {
        if self.exec_paths.is_none() {
            return Ok(());
        }
        Err(Error::refused("\"env\" is not taken where programs are limited", "qga.exec.paths"))
    }

    /// Whether guest-file-open may open the file that `path` is when every link in it is followed.
    ///
    /// # Errors
    /// If the settings do not let it.
    pub fn file(&self, path: &Path, for_writing: bool) -> Result<(), Error> {
        if for_writing && self.files_read_only {
            return Err(Error::refused("files may be opened for reading only", "qga.files.read-only"));
        }
        within("the file", path, self.file_paths.as_deref(), "qga.files.paths")
    }

    /// Whether passwords may be set.
    ///
    /// # Errors
    /// If the settings do not let it.
    pub fn password(&self) -> Result<(), Error> {
        if self.passwords {
            return Ok(());
        }
        Err(Error::refused("passwords may not be set", "qga.passwords.allow"))
    }
}

fn within(what: &str, path: &Path, allowed: Option<&[PathBuf]>, setting: &str) -> Result<(), Error> {
    // By whole components: /usr/bin does not allow /usr/bin-evil.
    if allowed.is_none_or(|allowed| allowed.iter().any(|allowed| path.starts_with(allowed))) {
        return Ok(());
    }
    Err(Error::refused(&format!("{what} {} is not among those allowed", path.display()), setting))
}

/// Which rows of the command table are switched on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Policy {
    enabled: Vec<bool>,
    /// What commands are limited to.
    pub limits: Limits,
}

impl Default for Policy {
    fn default() -> Self {
        Self { enabled: vec![true; COMMANDS.len()], limits: Limits::default() }
    }
}

impl Policy {
    /// A policy from lists of names. An `allow` list denies what it does not name; `block` wins over it.
    /// Names that are not known are returned, for a warning: a list may be meant for several versions.
    pub fn new<'a>(allow: Option<&'a [String]>, block: &'a [String]) -> (Self, Vec<&'a str>) {
        let mut policy = match allow {
            Some(_) => Self { enabled: vec![false; COMMANDS.len()], limits: Limits::default() },
            None => Self::default(),
        };
        let mut unknown = Vec::new();
        let allowed = allow.unwrap_or_default().iter().map(|name| (name, true));
        for (name, enabled) in allowed.chain(block.iter().map(|name| (name, false))) {
            match table::find(name) {
                Some(place) => policy.enabled[place] = enabled,
                None => unknown.push(name.as_str()),
            }
        }
        (policy, unknown)
    }

    /// Whether the command at this place of the table may be called.
    pub fn allows(&self, place: usize) -> bool {
        self.enabled.get(place).copied().unwrap_or(false)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn enabled(allow: Option<&[&str]>, block: &[&str]) -> Vec<&'static str> {
        let owned = |names: &[&str]| names.iter().map(ToString::to_string).collect::<Vec<_>>();
        let allow = allow.map(owned);
        let block = owned(block);
        let (policy, _) = Policy::new(allow.as_deref(), &block);
        COMMANDS.iter().enumerate().filter(|(place, _)| policy.allows(*place)).map(|(_, c)| c.name).collect()
    }

    #[test]
    fn block_wins_over_allow_and_allow_denies_the_rest() {
        assert_eq!(enabled(None, &[]).len(), COMMANDS.len());
        assert!(!enabled(None, &["guest-shutdown"]).contains(&"guest-shutdown"));
        assert_eq!(enabled(Some(&["guest-ping", "guest-sync"]), &["guest-sync"]), ["guest-ping"]);
        assert!(enabled(Some(&[]), &[]).is_empty());
    }

    #[test]
    fn limits_hold_by_whole_parts_of_a_path() {
        let limits = Limits {
            exec_paths: Some(vec!["/usr/bin".into()]),
            file_paths: Some(vec!["/srv".into()]),
            files_read_only: true,
            passwords: false,
        };
        assert_eq!(limits.exec(Path::new("/usr/bin/true")), Ok(()));
        let refused = limits.exec(Path::new("/usr/bin-evil/true")).unwrap_err().desc;
        assert_eq!(
            refused,
            "the program /usr/bin-evil/true is not among those allowed; see qga.exec.paths in guestlet's settings"
        );
        assert_eq!(limits.file(Path::new("/srv/a/b"), false), Ok(()));
        assert!(limits.file(Path::new("/srv/a/b"), true).unwrap_err().desc.contains("qga.files.read-only"));
        assert!(limits.password().unwrap_err().desc.contains("qga.passwords.allow"));
        let unlimited = Limits::default();
        assert_eq!(unlimited.file(Path::new("/anything"), true), Ok(()));
    }

    #[test]
    fn unknown_names_are_told() {
        let block = ["guest-exce".to_owned(), "guest-ping".to_owned()];
        assert_eq!(Policy::new(None, &block).1, ["guest-exce"]);
    }
}
