//! One `[[grant]]` of the settings: the client that it is for, and the roles that it gives.

use std::fmt;
use std::path::{Path, PathBuf};

use crate::policy::role::{Role, Roles};
use crate::policy::rules::{Detail, Who};
use crate::text::target::Target;
use crate::text::wildcard;
use crate::trust::Fingerprint;

/// Maximum length of the name of a caller, and of a pattern for it, in bytes.
pub const MAX_CALLER: usize = 256;

/// Client that a grant is for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Host {
    /// The host half with this key.
    Key(Fingerprint),
    /// Host halves with this URI in their certificate.
    Name(String),
    /// Every host half that has proved a key.
    AnyKey,
    /// Clients of QGA, all of them.
    Qga,
    /// Host halves that have proved no key.
    Plain,
}

impl Host {
    /// Returns whether `who` is covered.
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
    /// Formats the client as the settings write it.
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

/// Pattern for the callers that a host half names; `*` stands for any number of characters.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Caller(String);

impl Caller {
    /// Creates a pattern from the text in the settings.
    pub fn new(pattern: impl Into<String>) -> Self {
        Self(pattern.into())
    }

    /// Creates the pattern that matches every caller, named or not.
    pub fn any() -> Self {
        Self::new("*")
    }

    /// Returns the pattern as the settings have it.
    pub fn pattern(&self) -> &str {
        &self.0
    }

    /// Returns whether the pattern matches `caller`, which is empty if the host half does not name one.
    pub fn fits(&self, caller: &str) -> bool {
        wildcard::matches(&self.0, caller)
    }
}

/// Grant of roles to a host half or to QGA clients.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Grant {
    /// File and line of the grant, for messages.
    pub origin: String,
    /// Client that the grant is for.
    pub host: Host,
    /// Users that the client acts for.
    pub caller: Caller,
    /// Roles that it gives.
    pub roles: Roles,
    /// Only programs that may be run by it: files, or directories with everything below them.
    pub exec: Option<Vec<PathBuf>>,
    /// Only users that programs may be run as by it, by their login names.
    pub users: Option<Vec<String>>,
    /// Only files that may be opened by it: files, or directories with everything below them.
    pub files: Option<Vec<PathBuf>>,
    /// Targets that may be reached through the guest by it.
    pub forward: Vec<Target>,
}

impl Grant {
    /// Returns whether the grant is for `who` when it acts for `caller`.
    pub fn is_for(&self, who: &Who<'_>, caller: &str) -> bool {
        self.host.means(who) && self.caller.fits(caller)
    }

    /// Returns whether the grant gives `role` for a call with this detail.
    pub fn gives(&self, role: Role, detail: &Detail<'_>) -> bool {
        self.roles.has(role)
            && match detail {
                Detail::None | Detail::Password => true,
                // With exec.paths, environment and working directory are not allowed. Variables such as LD_PRELOAD make most
                // programs run others, and a script runs what it names without a path, or with a relative one, from its
                // working directory.
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

/// Returns whether a path equals one of `paths` or is below one of them, by whole components: /usr/bin does not
/// cover /usr/bin-evil.
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
