//! Lookup of the users that commands name.

use std::io;

use crate::sys::accounts::{self, Account};
use crate::sys::root::Root;

/// Reason why no account was found.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The name is malformed, so that no user can have it.
    #[error("the user name is empty, too long, or has an invalid character")]
    Name,
    /// No user has this name.
    #[error("unknown user {0:?}")]
    Unknown(String),
    /// The lookup failed, so it is unknown whether the user exists.
    #[error("users cannot be looked up")]
    LookUp(#[source] io::Error),
}

/// Maximum length of a user's name in characters (useradd(8) allows 32; directory services have longer ones).
const MAX_NAME: usize = 256;

/// Checks that `name` can be the name of a user: it becomes a field of passwd(5) and an argument or input of
/// programs.
///
/// # Errors
/// [`Error::Name`] if it cannot.
pub fn check_name(name: &str) -> Result<(), Error> {
    let wrong = |character: char| matches!(character, ':' | '/' | ',') || character.is_control();
    if name.is_empty() || name.chars().count() > MAX_NAME || name.contains(wrong) {
        Err(Error::Name)
    } else {
        Ok(())
    }
}

/// Returns the account with this name. May block for as long as a name service does.
///
/// # Errors
/// If no such user exists, or the lookup fails.
pub fn find(root: &Root, name: &str) -> Result<Account, Error> {
    check_name(name)?;
    accounts::find(root, name).map_err(Error::LookUp)?.ok_or_else(|| Error::Unknown(name.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names() {
        for good in ["root", "a", "Max.Mustermann@example.org", "svc$", "ü", &"x".repeat(256)] {
            assert!(check_name(good).is_ok(), "{good}");
        }
        for wrong in ["", "a:b", "../etc", "a\nb", "a\0", "a\u{7f}", &"x".repeat(257)] {
            assert!(check_name(wrong).is_err(), "{wrong:?}");
        }
    }
}
