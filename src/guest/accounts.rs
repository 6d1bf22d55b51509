//! The users that commands name.

use std::io;

use crate::sys::accounts::{self, Account};
use crate::sys::root::Root;

/// Why there is no such user.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No user can be called so.
    #[error("the user name is empty, too long, or has an invalid character")]
    Name,
    /// Nobody is called so.
    #[error("unknown user {0:?}")]
    Unknown(String),
    /// It is not known whether there is.
    #[error("users cannot be looked up")]
    LookUp(#[source] io::Error),
}

/// Characters of a user's name (useradd(8) takes 32; directories have longer ones).
const MAX_NAME: usize = 256;

/// Whether something may be the name of a user: it is a word in the lines of passwd(5) and of what programs are told.
///
/// # Errors
/// [`Error::Name`] if it may not.
pub fn check_name(name: &str) -> Result<(), Error> {
    let wrong = |character: char| matches!(character, ':' | '/' | ',') || character.is_control();
    if name.is_empty() || name.chars().count() > MAX_NAME || name.contains(wrong) {
        Err(Error::Name)
    } else {
        Ok(())
    }
}

/// The account of that name. May block for as long as a name service does.
///
/// # Errors
/// If there is none.
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
