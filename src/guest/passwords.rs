//! Passwords of users, set by the system's own chpasswd(8).

use std::time::Duration;

use crate::guest::{Guest, accounts};
use crate::sys::blocking;
use crate::sys::program;
pub use crate::sys::program::Secret;

const PROGRAM: &str = "/usr/sbin/chpasswd";

/// How long it may take: it asks PAM, which may ask anything.
const DEADLINE: Duration = Duration::from_secs(30);

/// Bytes of a password; chpasswd(8) takes lines of 8 KiB.
const MAX_LENGTH: usize = 4096;

/// Why no password was set.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Whose it would be.
    #[error(transparent)]
    Account(#[from] accounts::Error),
    /// It would be more than one line, or more than one field.
    #[error("the password is too long, or has an invalid character")]
    Password,
    /// chpasswd did not do it.
    #[error("the password of {user} is not set")]
    Program {
        /// The user's name.
        user: String,
        /// What it says.
        source: program::Error,
    },
}

/// Sets the password of a user; `crypted` if it is one already as crypt(5) makes it.
///
/// # Errors
/// If there is no such user, it is no password, or chpasswd refuses it.
pub async fn set(guest: &Guest, user: String, password: Secret, crypted: bool) -> Result<(), Error> {
    accounts::check_name(&user)?;
    let wrong = |byte: &u8| matches!(byte, b'\n' | b'\r' | 0) || (crypted && *byte == b':');
    if password.bytes().len() > MAX_LENGTH || password.bytes().iter().any(wrong) {
        return Err(Error::Password);
    }
    let root = guest.root.clone();
    let name = user.clone();
    blocking::run(move || accounts::find(&root, &name)).await?;
    let line = Secret::new([user.as_bytes(), b":", password.bytes(), b"\n"].concat());
    let arguments: &[&str] = if crypted { &["-e"] } else { &[] };
    let program = guest.root.path(PROGRAM);
    match program::run_with_input(&program.to_string_lossy(), arguments, &line, DEADLINE).await {
        Ok(_) => Ok(()),
        Err(error) => Err(Error::Program { user, source: error.without(password.bytes()) }),
    }
}
