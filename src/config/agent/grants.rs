//! `[[grant]]`, `[policy]` and `[trust]`: permissions of clients. Each grant is checked in its own file, because
//! messages name the line.
//!
//! ```toml
//! [[grant]]
//! host = "SHA256:…"                  # or a URI, "*" (every key), "qga", "plain"
//! caller = "uid:0 *"                 # user that the host half acts for; "" for itself, "*" is the default
//! roles = ["status", "exec"]         # or profile = "monitor"
//! exec = { paths = ["/usr/bin/journalctl"], users = ["nobody"] }
//! files = { paths = ["/var/log"], read-only = true }
//! forward = ["22", "unix:/run/postgresql/.s.PGSQL.5432"]
//! ```

use std::path::{Component, Path, PathBuf};

use serde::Deserialize;
use toml::Spanned;

use crate::config::agent::check;
use crate::config::{Error, Problem};
use crate::policy::grant::MAX_CALLER;
use crate::policy::{Caller, Grant, Host, Mode, Role, Roles, role};
use crate::text::target::{NoTarget, Target};

/// Maximum number of grants in one file.
const MOST: usize = 1000;
/// Maximum number of targets of one grant.
const MOST_TARGETS: usize = 256;

/// Table `[[grant]]`, unchecked.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct GrantFragment {
    host: Option<Spanned<String>>,
    caller: Option<Spanned<String>>,
    roles: Option<Spanned<Vec<String>>>,
    profile: Option<Spanned<String>>,
    exec: Option<Spanned<GrantExecFragment>>,
    files: Option<Spanned<GrantFilesFragment>>,
    forward: Option<Spanned<Vec<String>>>,
}

/// Key `exec` of a grant: the programs, and the users that they run as.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct GrantExecFragment {
    paths: Option<Vec<PathBuf>>,
    users: Option<Vec<String>>,
}

impl GrantExecFragment {
    fn is_empty(&self) -> bool {
        self.paths.is_none() && self.users.is_none()
    }
}

/// Key `files` of a grant: the files, and whether they may be written.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct GrantFilesFragment {
    paths: Option<Vec<PathBuf>>,
    read_only: Option<bool>,
}

/// Table `[policy]`.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct PolicyFragment {
    /// Mode of the policy: `enforce` or `audit`.
    pub mode: Option<String>,
}

/// Table `[audit]`: further destinations of the audit records.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct AuditFragment {
    /// Additional file for audit records, as JSON lines.
    pub file: Option<PathBuf>,
}

/// Table `[trust]`: the keys, and the roles of a host half without a key.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct TrustFragment {
    /// Roles that a host half without a key has even if the guest has keys.
    pub plain: Option<Vec<String>>,
    /// Directory for the guest's own key.
    pub state_dir: Option<PathBuf>,
}

/// Returns the mode of `[policy]`.
pub(super) fn mode(policy: &PolicyFragment) -> Result<Mode, Problem> {
    match policy.mode.as_deref() {
        None | Some("enforce") => Ok(Mode::Enforce),
        Some("audit") => Ok(Mode::Audit),
        Some(other) => {
            check::problem("policy.mode", format!("policy.mode is {other:?}; use enforce or audit"))
        }
    }
}

/// Returns the roles of `trust.plain`.
pub(super) fn plain(trust: &TrustFragment) -> Result<Roles, Problem> {
    let mut roles = Roles::NONE;
    for word in trust.plain.as_deref().unwrap_or_default() {
        match Role::named(word) {
            Some(role) => roles = roles.with(role),
            None => return check::problem("trust.plain", format!("trust.plain: {}", no_role(word))),
        }
    }
    Ok(roles)
}

fn no_role(word: &str) -> String {
    format!("unknown role {word:?}; the roles are {}", role::words())
}

/// Checks the grants of one file with this `text`.
pub(super) fn check(
    file: &Path,
    text: &str,
    fragments: &[Spanned<GrantFragment>],
) -> Result<Vec<Grant>, Error> {
    if fragments.len() > MOST {
        return Err(Error::in_file(file, format!("there are more than {MOST} grants")));
    }
    fragments.iter().map(|fragment| Checker { file, text, fragment }.grant()).collect()
}

/// Checker of one grant, which knows the file and text for its messages.
struct Checker<'a> {
    file: &'a Path,
    text: &'a str,
    fragment: &'a Spanned<GrantFragment>,
}

impl Checker<'_> {
    /// Returns the error that something is wrong at a place in the text, or with the grant as a whole.
    fn wrong<T>(&self, at: Option<std::ops::Range<usize>>, problem: impl Into<String>) -> Result<T, Error> {
        let start = at.unwrap_or_else(|| self.fragment.span()).start;
        Err(Error::at(self.file, self.text, start, problem))
    }

    fn grant(&self) -> Result<Grant, Error> {
        let GrantFragment { exec, files, .. } = self.fragment.get_ref();
        let host = self.host()?;
        let caller = self.caller(&host)?;
        let mut roles = self.roles()?;
        if let Some(files) = files.as_ref().filter(|files| files.get_ref().read_only == Some(true)) {
            let says_so = self.fragment.get_ref().roles.as_ref();
            if says_so.is_some_and(|roles| roles.get_ref().iter().any(|word| word == Role::FilesWrite.word()))
            {
                return self.wrong(
                    Some(files.span()),
                    "the role files-write and files.read-only do not go together",
                );
            }
            roles = roles.without(Role::FilesWrite);
        }
        if let Some(exec) = exec.as_ref().filter(|_| !roles.has(Role::Exec)) {
            return self
                .wrong(Some(exec.span()), "exec limits programs, but the grant does not have the role exec");
        }
        if let Some(files) = files.as_ref().filter(|_| !roles.has(Role::FilesRead)) {
            return self.wrong(Some(files.span()), "files limits files, but the grant has no role for files");
        }
        let limits_nothing =
            |files: &GrantFilesFragment| files.paths.is_none() && files.read_only != Some(true);
        if let Some(files) = files.as_ref().filter(|files| limits_nothing(files.get_ref())) {
            return self.wrong(
                Some(files.span()),
                "files limits nothing; set paths or read-only = true in it, or leave it out for all files",
            );
        }
        if let Some(exec) = exec.as_ref().filter(|exec| exec.get_ref().is_empty()) {
            return self.wrong(Some(exec.span()), "exec is empty; set paths or users");
        }
        let users = exec.as_ref().and_then(|exec| exec.get_ref().users.clone());
        let exec = exec.as_ref().and_then(|exec| {
            exec.get_ref().paths.as_deref().map(|paths| self.paths("exec.paths", exec.span(), paths))
        });
        let files = files.as_ref().and_then(|files| {
            files.get_ref().paths.as_deref().map(|paths| self.paths("files.paths", files.span(), paths))
        });
        let line = crate::config::line_of(self.text, self.fragment.span().start);
        Ok(Grant {
            origin: format!("{}:{line}", self.file.display()),
            host,
            caller,
            roles,
            exec: exec.transpose()?,
            users,
            files: files.transpose()?,
            forward: self.targets(roles)?,
        })
    }

    fn host(&self) -> Result<Host, Error> {
        let Some(host) = &self.fragment.get_ref().host else {
            return self.wrong(None, "[[grant]] has no host; set whom it is for");
        };
        match host.get_ref().as_str() {
            "*" => Ok(Host::AnyKey),
            "qga" => Ok(Host::Qga),
            "plain" => Ok(Host::Plain),
            uri if is_uri(uri) => Ok(Host::Name(uri.to_owned())),
            key if key.starts_with("SHA256:") => match key.parse() {
                Ok(fingerprint) => Ok(Host::Key(fingerprint)),
                Err(error) => self.wrong(Some(host.span()), format!("host: {error}")),
            },
            other => {
                let problem = format!(
                    "host is {other:?}; use a fingerprint (SHA256:…), the URI of a certificate (guestlet://…), \
                     \"*\" for every key, \"qga\" or \"plain\""
                );
                self.wrong(Some(host.span()), problem)
            }
        }
    }

    fn caller(&self, host: &Host) -> Result<Caller, Error> {
        let Some(caller) = &self.fragment.get_ref().caller else { return Ok(Caller::any()) };
        let pattern = caller.get_ref();
        if pattern.len() > MAX_CALLER || !pattern.bytes().all(is_printable) {
            let problem =
                format!("caller must be at most {MAX_CALLER} ASCII characters; percent-encode others");
            return self.wrong(Some(caller.span()), problem);
        }
        if matches!(host, Host::Qga | Host::Plain) && pattern != "*" {
            let problem = format!("caller has no meaning for {host}, whose identity is not proved");
            return self.wrong(Some(caller.span()), problem);
        }
        Ok(Caller::new(pattern.as_str()))
    }

    fn roles(&self) -> Result<Roles, Error> {
        let GrantFragment { roles, profile, .. } = self.fragment.get_ref();
        match (roles, profile) {
            (Some(_), Some(profile)) => {
                self.wrong(Some(profile.span()), "a grant has either roles or a profile; write two grants")
            }
            (None, None) => self.wrong(None, "[[grant]] gives nothing; set roles or profile"),
            (None, Some(profile)) => Roles::of_profile(profile.get_ref()).map_or_else(
                || {
                    let (name, known) = (profile.get_ref(), role::profiles());
                    let problem = format!("unknown profile {name:?}; the profiles are {known}");
                    self.wrong(Some(profile.span()), problem)
                },
                Ok,
            ),
            (Some(words), None) if words.get_ref().is_empty() => {
                self.wrong(Some(words.span()), "roles is empty; remove a grant that gives nothing")
            }
            (Some(words), None) => {
                let mut roles = Roles::NONE;
                for word in words.get_ref() {
                    match Role::named(word) {
                        Some(role) => roles = roles.with(role),
                        None => return self.wrong(Some(words.span()), no_role(word)),
                    }
                }
                Ok(roles)
            }
        }
    }

    fn targets(&self, roles: Roles) -> Result<Vec<Target>, Error> {
        let Some(forward) = &self.fragment.get_ref().forward else { return Ok(Vec::new()) };
        let wrong = |problem: String| self.wrong(Some(forward.span()), problem);
        if !roles.has(Role::Forward) {
            return wrong("forward lists targets, but the grant does not have the role forward".to_owned());
        }
        let list = forward.get_ref();
        if list.is_empty() {
            return wrong("forward is empty; leave it out, and nothing may be reached".to_owned());
        }
        if list.len() > MOST_TARGETS {
            return wrong(format!("forward has more than {MOST_TARGETS} targets"));
        }
        let targets = list.iter().map(|text| text.parse());
        targets.collect::<Result<_, NoTarget>>().or_else(|error| wrong(format!("forward: {error}")))
    }

    fn paths(&self, key: &str, at: std::ops::Range<usize>, list: &[PathBuf]) -> Result<Vec<PathBuf>, Error> {
        let plain = |path: &&PathBuf| {
            path.is_absolute() && !path.components().any(|part| matches!(part, Component::ParentDir))
        };
        let is_any = |part: Component<'_>| matches!(part.as_os_str().to_str(), Some("*" | "**"));
        if let Some(path) = list.iter().find(|path| path.components().any(is_any)) {
            let problem = format!(
                "{key}: {:?} is a pattern, which is not supported; write the directory, which includes all that is below it",
                path.display().to_string()
            );
            return self.wrong(Some(at), problem);
        }
        match list.iter().find(|path| !plain(path)) {
            Some(path) => {
                let path = path.display().to_string();
                self.wrong(Some(at), format!("{key}: {path:?} must be an absolute path without \"..\""))
            }
            // Collected from components, so that no path ends with a slash or has two in a row.
            None => Ok(list.iter().map(|path| path.components().collect()).collect()),
        }
    }
}

fn is_printable(byte: u8) -> bool {
    matches!(byte, b' '..=b'~')
}

/// Returns whether a text is a scheme, `://` and something after it.
fn is_uri(text: &str) -> bool {
    let plain = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_graphic());
    text.split_once("://").is_some_and(|(scheme, rest)| plain(scheme) && plain(rest) && !rest.contains('*'))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config;
    use crate::config::agent::fragment::AgentFragment;

    fn grants(text: &str) -> Result<Vec<Grant>, String> {
        let file = Path::new("a.toml");
        let fragment: AgentFragment = config::parse(file, text).map_err(|error| error.to_string())?;
        check(file, text, &fragment.grant).map_err(|error| error.to_string())
    }

    #[test]
    fn grants_are_read_as_they_are_written() {
        let text = "[[grant]]\nhost = 'qga'\nroles = ['status', 'exec']\nexec = { paths = ['/usr//bin/'], users = ['nobody'] }\n\n\
                    [[grant]]\nhost = 'guestlet://shop/host/a'\ncaller = 'uid:0 *'\nprofile = 'qemu-ga'\n\
                    files = { paths = ['/srv'], read-only = true }\n";
        let [first, second] = &grants(text).unwrap()[..] else { panic!("two") };
        assert_eq!((first.origin.as_str(), second.origin.as_str()), ("a.toml:1", "a.toml:6"));
        assert_eq!((&first.host, first.caller.pattern()), (&Host::Qga, "*"));
        assert_eq!(first.roles, Roles::of(&[Role::Status, Role::Exec]));
        assert_eq!((&first.exec, &first.files), (&Some(vec!["/usr/bin".into()]), &None));
        assert_eq!((&first.users, &second.users), (&Some(vec!["nobody".to_owned()]), &None));
        assert_eq!(second.host, Host::Name("guestlet://shop/host/a".to_owned()));
        assert_eq!(second.caller.pattern(), "uid:0 *");
        assert!(second.roles.has(Role::FilesRead) && !second.roles.has(Role::FilesWrite));
        assert_eq!((&second.exec, &second.files), (&None, &Some(vec!["/srv".into()])));
    }

    #[test]
    fn targets_are_named_one_by_one() {
        let text = "[[grant]]\nhost = 'plain'\nroles = ['forward']\nforward = ['22', 'unix:/run/a']\n\
                    [[grant]]\nhost = '*'\nprofile = 'operator'\n";
        let [first, second] = &grants(text).unwrap()[..] else { panic!("two") };
        let targets: Vec<_> = first.forward.iter().map(ToString::to_string).collect();
        assert_eq!(targets, ["22", "unix:/run/a"]);
        assert!(second.roles.has(Role::Forward) && second.forward.is_empty());
    }

    #[test]
    fn a_mistake_is_refused_with_its_line_and_what_to_write() {
        let key = "SHA256:LHDhK3oGRvkiefQnx7OOczTY5Tic/xZ6HcMOc/gmtoM";
        let cases = [
            ("roles = ['status']", "a.toml:1: [[grant]] has no host"),
            ("host = 'qga'", "a.toml:1: [[grant]] gives nothing"),
            ("host = 'qga'\nroles = []", "a.toml:3: roles is empty"),
            ("host = 'qga'\nroles = ['stats']", "a.toml:3: unknown role \"stats\"; the roles are status, "),
            (
                "host = 'qga'\nprofile = 'all'",
                "a.toml:3: unknown profile \"all\"; the profiles are qemu-ga, ",
            ),
            ("host = 'qga'\nroles = ['exec']\nprofile = 'monitor'", "a.toml:4: a grant has either"),
            (
                "host = 'SHA256:AAAA'\nroles = ['status']",
                "a.toml:2: host: \"SHA256:AAAA\" is not a fingerprint",
            ),
            ("host = 'web-1'\nroles = ['status']", "a.toml:2: host is \"web-1\"; use a fingerprint"),
            ("host = ''\nroles = ['status']", "a.toml:2: host is \"\""),
            ("host = 'guestlet://*'\nroles = ['status']", "a.toml:2: host is"),
            (
                "host = 'qga'\ncaller = 'uid:0 *'\nroles = ['status']",
                "a.toml:3: caller has no meaning for qga",
            ),
            ("host = '*'\ncaller = 'ä'\nroles = ['status']", "a.toml:3: caller must be"),
            ("host = 'plain'\nroles = ['exec']\nforward = ['22']", "a.toml:4: forward lists targets"),
            ("host = 'plain'\nroles = ['forward']\nforward = []", "a.toml:4: forward is empty"),
            (
                "host = 'plain'\nroles = ['forward']\nforward = ['22', 'db:5432']",
                "a.toml:4: forward: \"db:5432\": host names are not resolved",
            ),
            (
                "host = 'qga'\nroles = ['exec']\nexec = { paths = ['bin/x'] }",
                "a.toml:4: exec.paths: \"bin/x\" must be an absolute path",
            ),
            ("host = 'qga'\nroles = ['exec']\nexec = {}", "a.toml:4: exec is empty; set paths or users"),
            ("host = 'qga'\nroles = ['status']\nexec = { paths = ['/x'] }", "a.toml:4: exec limits programs"),
            ("host = 'qga'\nroles = ['exec']\nfiles = { read-only = true }", "a.toml:4: files limits files"),
            (
                "host = 'qga'\nroles = ['files-write']\nfiles = { read-only = true }",
                "a.toml:4: the role files-write and files.read-only",
            ),
            (
                "host = 'qga'\nroles = ['files-read']\nfiles = { paths = ['/a/../b'] }",
                "must be an absolute path without \"..\"",
            ),
            (
                "host = 'qga'\nroles = ['files-read']\nfiles = {}",
                "a.toml:4: files limits nothing; set paths or",
            ),
            (
                "host = 'qga'\nroles = ['files-read']\nfiles = { read-only = false }",
                "a.toml:4: files limits nothing",
            ),
            (
                "host = 'qga'\nroles = ['files-read']\nfiles = { paths = ['srv'] }",
                "a.toml:4: files.paths: \"srv\" must be an absolute path",
            ),
            (
                "host = 'qga'\nroles = ['files-read']\nfiles = { paths = ['/srv/*'] }",
                "a.toml:4: files.paths: \"/srv/*\" is a pattern, which is not supported; write the directory",
            ),
            (
                "host = 'qga'\nroles = ['exec']\nexec = { paths = ['/usr/**/ls'] }",
                "a.toml:4: exec.paths: \"/usr/**/ls\" is a pattern",
            ),
            ("host = 'qga'\nrole = 'exec'", "a.toml:3: unknown field `role`"),
        ];
        for (text, expected) in cases {
            let error = grants(&format!("[[grant]]\n{text}\n")).unwrap_err();
            assert!(error.contains(expected), "{text:?}: {error}");
        }
        assert!(grants(&format!("[[grant]]\nhost = '{key}'\nroles = ['disks']\n")).is_ok());
        assert!(grants("[grant]\nhost = 'qga'\n").is_err());
    }
}
