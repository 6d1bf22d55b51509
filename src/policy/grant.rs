//! One `[[grant]]` of the settings: to whom it gives which roles.

use std::fmt;
use std::path::{Path, PathBuf};

use crate::policy::role::{Role, Roles};
use crate::policy::rules::{Detail, Who};
use crate::text::target::Target;
use crate::text::wildcard;
use crate::trust::Fingerprint;

/// Bytes of the name of a caller, and of a pattern for it.
pub const MAX_CALLER: usize = 256;

/// Whom a grant is for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Host {
    /// The host half with this key.
    Key(Fingerprint),
    /// Host halves whose certificate has this URI.
    Name(String),
    /// Every host half that has proved a key.
    AnyKey,
    /// Clients of QGA.
    Qga,
    /// Host halves that have proved nothing.
    Plain,
}

impl Host {
    /// Whether `who` is meant.
    pub fn means(&self, who: &Who<'_>) -> bool {
        match (self, who) {
            (Self::Qga, Who::Qga) | (Self::Plain, Who::Plain { .. }) | (Self::AnyKey, Who::Keyed(_)) => true,
            (Self::Key(fingerprint), Who::Keyed(keyed)) => keyed.fingerprint == *fingerprint,
            (Self::Name(name), Who::Keyed(keyed)) => keyed.names.contains(name),
            _ => false,
        }
    }
}

impl fmt::Display for Host {
    /// As the settings write it.
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Key(fingerprint) => fingerprint.fmt(formatter),
            Self::Name(name) => formatter.write_str(name),
            Self::AnyKey => formatter.write_str("*"),
            Self::Qga => formatter.write_str("qga"),
            Self::Plain => formatter.write_str("plain"),
        }
    }
}

/// A pattern for the callers that a host half names; `*` stands for any characters, and for none.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Caller(String);

impl Caller {
    /// The pattern as the settings have it.
    pub fn new(pattern: impl Into<String>) -> Self {
        Self(pattern.into())
    }

    /// Everybody, and whom the host half does not name.
    pub fn any() -> Self {
        Self::new("*")
    }

    /// The pattern.
    pub fn pattern(&self) -> &str {
        &self.0
    }

    /// Whether `caller` fits; one that is not named is empty.
    pub fn fits(&self, caller: &str) -> bool {
        wildcard::matches(&self.0, caller)
    }
}

/// Roles for somebody.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Grant {
    /// File and line, for people.
    pub origin: String,
    /// Who has them.
    pub host: Host,
    /// For whom that one asks.
    pub caller: Caller,
    /// The roles.
    pub roles: Roles,
    /// The only programs that may be run by it: files, and directories with all that is below them.
    pub exec: Option<Vec<PathBuf>>,
    /// The only users that programs may be run as by it, by their login names.
    pub users: Option<Vec<String>>,
    /// The only files that may be opened by it: files, and directories with all that is below them.
    pub files: Option<Vec<PathBuf>>,
    /// What may be reached through the guest by it.
    pub forward: Vec<Target>,
}

impl Grant {
    /// Whether it is for `caller` of `who`.
    pub fn is_for(&self, who: &Who<'_>, caller: &str) -> bool {
        self.host.means(who) && self.caller.fits(caller)
    }

    /// Whether it gives `role` for that.
    pub fn gives(&self, role: Role, detail: &Detail<'_>) -> bool {
        self.roles.has(role)
            && match detail {
                Detail::None | Detail::Password => true,
                // By variables such as LD_PRELOAD most programs run others, and scripts run what they name without a path, or with
                // a relative one, from where they start.
                Detail::Program { path, environment, directory, user } => {
                    let is_plain = !environment && !directory;
                    self.exec.as_deref().is_none_or(|paths| within(path, paths) && is_plain)
                        && self.users.as_deref().is_none_or(|users| users.iter().any(|one| one == user))
                }
                Detail::File { path, is_here, .. } => {
                    self.files.as_deref().is_none_or(|paths| *is_here && within(path, paths))
                }
                Detail::Target(target) => self.forward.iter().any(|one| one.covers(target)),
            }
    }
}

/// Whether a path is one of these or below one of them, by whole components: /usr/bin does not cover /usr/bin-evil.
pub(super) fn within(path: &Path, paths: &[PathBuf]) -> bool {
    paths.iter().any(|allowed| path.starts_with(allowed))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_of_callers() {
        let cases = [
            ("*", "", true),
            ("*", "uid:0 root", true),
            ("uid:0 root", "uid:0 root", true),
            ("uid:0 root", "uid:0 root2", false),
            ("uid:0 *", "uid:0 root", true),
            ("uid:0 *", "", false),
            ("uid:0 *", "uid:01 x", false),
            ("*:ops-*", "oidc:ops-jane", true),
            ("*:ops-*", "oidc:dev-jane", false),
            ("a*a", "a", false),
            ("a*a", "aa", true),
            ("a*b*a", "a-b-a", true),
            ("a*b*a", "ab", false),
            ("", "", true),
            ("", "x", false),
        ];
        for (pattern, caller, expected) in cases {
            assert_eq!(Caller::new(pattern).fits(caller), expected, "{pattern:?} {caller:?}");
        }
    }
}
