//! The settings of `[freeze]` about applications, and `[[freeze.application]]`: which of them take part, and how.

use std::path::PathBuf;
use std::time::Duration;

use crate::applications::KINDS;
use crate::config::Problem;
use crate::config::agent::check::{absolute, problem, time};
use crate::config::agent::fragment::{ApplicationFragment, FreezesFragment};

/// Default time for holding all applications, out of the 50 s that hooks and applications have together.
const DEADLINE: Duration = Duration::from_secs(30);
/// Maximum number of `[[freeze.application]]` tables.
const MOST: usize = 32;
/// Maximum number of words of a command, and of directories with data.
const MOST_WORDS: usize = 64;
/// Maximum length of a name, a user or a target, in bytes.
const LONGEST: usize = 1023;
const KEY: &str = "freeze.application";

/// Applications that take part in freezes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ApplicationSettings {
    /// True to look for databases at their usual places.
    pub auto: bool,
    /// Applications that have a table.
    pub listed: Vec<ApplicationSetting>,
    /// Time in which all of them have to be held.
    pub deadline: Duration,
    /// True if a freeze without applications, or without one of them, fails.
    pub required: bool,
}

/// Application from a `[[freeze.application]]` table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ApplicationSetting {
    /// A database of a kind that the agent supports.
    Kind {
        /// Kind of database, such as `postgresql`.
        kind: String,
        /// Address of the database, such as the path of its socket.
        target: String,
        /// User that the database has to belong to.
        user: Option<String>,
    },
    /// A pair of commands.
    Commands {
        /// Name of the application, for messages and receipts.
        name: String,
        /// User that the commands run as.
        user: String,
        /// Command before a freeze: a program and its arguments.
        freeze: Vec<String>,
        /// Command after a freeze: a program and its arguments.
        thaw: Vec<String>,
        /// Directories with the application's data.
        data: Vec<PathBuf>,
    },
}

impl ApplicationSettings {
    /// Returns whether an application runs as root, which means that it may do anything.
    pub fn any_as_root(&self) -> bool {
        self.listed.iter().any(|one| match one {
            ApplicationSetting::Kind { user, .. } => user.as_deref() == Some("root"),
            ApplicationSetting::Commands { user, .. } => user == "root" || user == "0",
        })
    }

    /// Returns whether a process may have to run as another user.
    pub fn any(&self) -> bool {
        self.auto || !self.listed.is_empty()
    }
}

/// Checks the settings, and fills in defaults.
pub fn check(freeze: FreezesFragment) -> Result<ApplicationSettings, Problem> {
    let auto = match freeze.applications.as_deref() {
        None | Some("auto") => true,
        Some("listed") => false,
        Some(other) => {
            let text = format!("freeze.applications = {other:?}: use \"auto\" or \"listed\"");
            return problem("freeze.applications", text);
        }
    };
    let required = match freeze.require.as_deref() {
        None | Some("filesystem") => false,
        Some("application") => true,
        Some(other) => {
            let text = format!("freeze.require is {other:?}; use \"filesystem\" or \"application\"");
            return problem("freeze.require", text);
        }
    };
    if freeze.application.len() > MOST {
        return problem(KEY, format!("there are more than {MOST} tables [[{KEY}]]"));
    }
    let deadline = time("freeze.applications-deadline", freeze.applications_deadline.as_ref(), DEADLINE)?;
    let listed = freeze.application.into_iter().map(application).collect::<Result<_, _>>()?;
    Ok(ApplicationSettings { auto, listed, deadline, required })
}

fn application(found: ApplicationFragment) -> Result<ApplicationSetting, Problem> {
    let ApplicationFragment { name, kind, target, user, freeze, thaw, data } = found;
    match (kind, target) {
        (Some(kind), Some(target)) => {
            if name.is_some() || freeze.is_some() || thaw.is_some() || data.is_some() {
                let text = format!("{KEY}: with a kind, name, freeze, thaw and data cannot be set");
                return problem(KEY, text);
            }
            let known = || KINDS.iter().map(|(name, _)| *name);
            if !known().any(|name| name == kind) {
                let known = known().collect::<Vec<_>>().join(", ");
                return problem(KEY, format!("{KEY}: the kind {kind:?} is not one of {known}"));
            }
            let target = word("target", Some(target))?;
            let user = user.map(|user| word("user", Some(user))).transpose()?;
            Ok(ApplicationSetting::Kind { kind, target, user })
        }
        (None, None) => Ok(ApplicationSetting::Commands {
            name: word("name", name)?,
            user: word("user", user)?,
            freeze: command("freeze", freeze)?,
            thaw: command("thaw", thaw)?,
            data: directories(data)?,
        }),
        _ => problem(KEY, format!("{KEY}: kind and target must be set together")),
    }
}

fn word(key: &str, text: Option<String>) -> Result<String, Problem> {
    match text {
        Some(text) if !text.is_empty() && text.len() <= LONGEST && !text.contains(char::is_control) => {
            Ok(text)
        }
        _ => problem(
            KEY,
            format!("{KEY}: {key} must be set, to 1 to {LONGEST} bytes without control characters"),
        ),
    }
}

fn command(key: &str, words: Option<Vec<String>>) -> Result<Vec<String>, Problem> {
    let words = words.unwrap_or_default();
    let is_program = words.first().is_some_and(|program| program.starts_with('/'));
    if is_program && words.len() <= MOST_WORDS && !words.iter().any(|word| word.contains('\0')) {
        return Ok(words);
    }
    let text = format!(
        "{KEY}: {key} must be the absolute path of a program and its arguments, at most {MOST_WORDS} words"
    );
    problem(KEY, text)
}

fn directories(data: Option<Vec<PathBuf>>) -> Result<Vec<PathBuf>, Problem> {
    let data = data.unwrap_or_default();
    if data.is_empty() || data.len() > MOST_WORDS {
        let text = format!("{KEY}: data must list the directories with the data, at most {MOST_WORDS}");
        return problem(KEY, text);
    }
    data.into_iter().map(|path| absolute(KEY, path)).collect()
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::config;
    use crate::config::agent::fragment::AgentFragment;

    fn checked(text: &str) -> Result<ApplicationSettings, String> {
        let fragment: AgentFragment =
            config::parse(Path::new("agent.toml"), text).map_err(|error| error.to_string())?;
        check(fragment.freeze).map_err(|problem| problem.text)
    }

    const SHOP: &str = "[[freeze.application]]\nname = 'shop'\nuser = 'shop'\nfreeze = ['/usr/bin/shop', 'hold']\n\
                        thaw = ['/usr/bin/shop', 'go']\ndata = ['/srv/shop']\n";

    #[test]
    fn databases_are_looked_for_unless_the_settings_say_otherwise() {
        let usual = checked("").unwrap();
        assert_eq!((usual.auto, usual.required, usual.deadline.as_secs()), (true, false, 30));
        let other = checked(
            "[freeze]\napplications = 'listed'\napplications-deadline = '5s'\nrequire = 'application'\n\
             [[freeze.application]]\nkind = 'postgresql'\ntarget = '/tmp/.s.PGSQL.5432'\nuser = 'root'\n",
        )
        .unwrap();
        assert_eq!((other.auto, other.required, other.deadline.as_secs()), (false, true, 5));
        assert!(other.any_as_root() && other.any());
        let shop = checked(SHOP).unwrap();
        assert!(!shop.any_as_root());
        assert!(matches!(&shop.listed[..], [ApplicationSetting::Commands { name, .. }] if name == "shop"));
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        let cases = [
            ("freeze.applications = 'none of them'".to_owned(), "use \"auto\" or \"listed\""),
            ("freeze.require = 'crash'".to_owned(), "use \"filesystem\""),
            ("freeze.applications-deadline = 0".to_owned(), "from 1 second"),
            ("[[freeze.application]]\nkind = 'oracle'\ntarget = '/x'".to_owned(), "not one of postgresql"),
            ("[[freeze.application]]\nkind = 'postgresql'".to_owned(), "must be set together"),
            ("[[freeze.application]]\nkind = 'postgresql'\ntarget = ''".to_owned(), "target must be set"),
            (format!("{SHOP}kind = 'postgresql'\ntarget = '/x'"), "with a kind, name, freeze"),
            (SHOP.replace("name = 'shop'\n", ""), "name must be set"),
            (SHOP.replace("user = 'shop'\n", ""), "user must be set"),
            (SHOP.replace("['/usr/bin/shop', 'go']", "[]"), "thaw must be the absolute path"),
            (SHOP.replace("['/usr/bin/shop', 'hold']", "['shop']"), "freeze must be the absolute path"),
            (SHOP.replace("['/srv/shop']", "[]"), "data must list"),
            (SHOP.replace("['/srv/shop']", "['srv']"), "must be an absolute path"),
            (SHOP.repeat(MOST + 1), "more than 32 tables"),
            (format!("{SHOP}socket = 1"), "unknown field `socket`"),
        ];
        for (text, words) in cases {
            let error = checked(&text).unwrap_err();
            assert!(error.contains(words), "{text}: {error}");
        }
    }
}
