//! Public keys with which a user may log in over SSH: `~/.ssh/authorized_keys`, see sshd(8).
//!
//! The file belongs to the user. Only whole lines are added and removed; all other contents, such as comments,
//! options and empty lines, stay unchanged.

use std::io;
use std::sync::{Mutex, PoisonError};

use crate::guest::{Guest, accounts};
use crate::sys::accounts::Account;
use crate::sys::blocking;
use crate::sys::root::Root;
use crate::sys::user_files::Home;

const FOLDER: &str = ".ssh";
const FILE: &str = "authorized_keys";

/// Lock for changes: each reads the file and writes it again.
static CHANGING: Mutex<()> = Mutex::new(());

/// Reason why keys were not read or changed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The user was not found.
    #[error(transparent)]
    Account(#[from] accounts::Error),
    /// The key at this position of the request has more than one line, or is a comment.
    #[error("key {0} is not a key: a key is one line, and not a comment")]
    NoKey(usize),
    /// The home directory, or a file in it, cannot be read or written.
    #[error("cannot read or write the authorized keys of {user}")]
    Files {
        /// Name of the user.
        user: String,
        /// Error of the operating system.
        source: io::Error,
    },
}

/// Change of a user's keys.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// Adds these keys, unless they are present.
    Add(Vec<String>),
    /// Replaces all present keys by these.
    Reset(Vec<String>),
    /// Removes these keys, where present.
    Remove(Vec<String>),
}

/// Returns the keys of a user with their options and comments; empty if the file does not exist.
///
/// # Errors
/// If the user is unknown, or the file cannot be read.
pub async fn list(guest: &Guest, user: String) -> Result<Vec<String>, Error> {
    let root = guest.root.clone();
    blocking::run(move || {
        let account = accounts::find(&root, &user)?;
        let file = with_home(&root, &account, |home| home.folder(FOLDER)?.read(FILE))?.unwrap_or_default();
        let lines = String::from_utf8_lossy(&file);
        let keys = lines.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
        Ok(keys.map(str::to_owned).collect())
    })
    .await
}

/// Changes the keys of a user. Nothing is written if the file would not change.
///
/// # Errors
/// If a key is malformed, the user is unknown, or the file cannot be read or written.
pub async fn change(guest: &Guest, user: String, change: Change) -> Result<(), Error> {
    let change = match change {
        Change::Add(keys) => Change::Add(clean(keys)?),
        Change::Reset(keys) => Change::Reset(clean(keys)?),
        Change::Remove(keys) => Change::Remove(clean(keys)?),
    };
    let root = guest.root.clone();
    blocking::run(move || {
        let account = accounts::find(&root, &user)?;
        let _alone = CHANGING.lock().unwrap_or_else(PoisonError::into_inner);
        with_home(&root, &account, |home| {
            let mut folder = home.folder(FOLDER)?;
            let before = folder.read(FILE)?;
            let after = changed(before.as_deref().unwrap_or_default(), &change);
            let same = before.as_ref().map_or(after.is_empty(), |before| *before == after);
            if same { Ok(()) } else { folder.replace(FILE, &after) }
        })
    })
    .await
}

fn with_home<T>(
    root: &Root,
    account: &Account,
    work: impl FnOnce(&Home) -> io::Result<T>,
) -> Result<T, Error> {
    let done = Home::open(root, account).and_then(|home| work(&home));
    done.map_err(|source| Error::Files { user: account.name.clone(), source })
}

/// Removes duplicate keys, and the line breaks that clients leave at their ends.
fn clean(keys: Vec<String>) -> Result<Vec<String>, Error> {
    let mut known = std::collections::HashSet::new();
    let mut cleaned = Vec::new();
    for (place, key) in keys.into_iter().enumerate() {
        let key = key.trim();
        if key.contains(['\n', '\r', '\0']) || key.starts_with('#') {
            return Err(Error::NoKey(place));
        }
        if !key.is_empty() && known.insert(key.to_owned()) {
            cleaned.push(key.to_owned());
        }
    }
    Ok(cleaned)
}

/// Returns the contents of the file after a change: other lines stay the same, byte by byte.
fn changed(before: &[u8], change: &Change) -> Vec<u8> {
    let lines = || before.split_inclusive(|byte| *byte == b'\n');
    let mut after = Vec::with_capacity(before.len());
    let added: &[String] = match change {
        Change::Reset(keys) => keys,
        Change::Add(keys) => {
            after.extend_from_slice(before);
            keys
        }
        Change::Remove(keys) => {
            let keys: std::collections::HashSet<&[u8]> = keys.iter().map(String::as_bytes).collect();
            for line in lines().filter(|line| !keys.contains(line.trim_ascii())) {
                after.extend_from_slice(line);
            }
            return after;
        }
    };
    let known: std::collections::HashSet<&[u8]> = match change {
        Change::Add(_) => lines().map(<[u8]>::trim_ascii).collect(),
        _ => std::collections::HashSet::new(),
    };
    for key in added.iter().filter(|key| !known.contains(key.as_bytes())) {
        if after.last().is_some_and(|last| *last != b'\n') {
            after.push(b'\n');
        }
        after.extend_from_slice(key.as_bytes());
        after.push(b'\n');
    }
    after
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(keys: &[&str]) -> Vec<String> {
        keys.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn lines_are_added_once_and_taken_away_whole() {
        let own = b"# mine\n\nfrom=\"192.0.2.1\" ssh-rsa A me \n  ssh-rsa B\r\n\xff\xfe\nssh-rsa C";
        let with = |change: &Change| String::from_utf8_lossy(&changed(own, change)).into_owned();
        let before = String::from_utf8_lossy(own).into_owned();
        assert_eq!(with(&Change::Add(keys(&["ssh-rsa D"]))), format!("{before}\nssh-rsa D\n"));
        assert_eq!(with(&Change::Add(keys(&["ssh-rsa B", "ssh-rsa C"]))), before);
        assert_eq!(with(&Change::Reset(keys(&["ssh-rsa B"]))), "ssh-rsa B\n");
        assert_eq!(with(&Change::Reset(Vec::new())), "");
        assert_eq!(with(&Change::Remove(keys(&["ssh-rsa A me"]))), before);
        let removed = with(&Change::Remove(keys(&["from=\"192.0.2.1\" ssh-rsa A me", "ssh-rsa C"])));
        assert_eq!(removed, "# mine\n\n  ssh-rsa B\r\n\u{fffd}\u{fffd}\n");
        assert_eq!(changed(b"", &Change::Add(keys(&["a", "b"]))), b"a\nb\n");
    }

    #[test]
    fn what_is_no_key() {
        assert_eq!(clean(keys(&["a b\n", " c\r\n", "", "a b"])).unwrap(), keys(&["a b", "c"]));
        for wrong in ["a\nb", "# a", "  #a", "a\rb"] {
            assert!(matches!(clean(keys(&["k", wrong])), Err(Error::NoKey(1))), "{wrong:?}");
        }
    }
}
