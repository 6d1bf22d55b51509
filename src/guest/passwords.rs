//! Passwords of users, set by the system's own chpasswd(8).

use std::time::Duration;

use crate::guest::{Guest, accounts};
use crate::sys::blocking;
use crate::sys::program;
pub use crate::sys::program::Secret;

const PROGRAM: &str = "/usr/sbin/chpasswd";

/// Timeout for chpasswd: it calls PAM, whose modules may query anything.
const DEADLINE: Duration = Duration::from_secs(30);

/// Maximum length of a password in bytes; chpasswd(8) accepts lines of 8 KiB.
const MAX_LENGTH: usize = 4096;

/// Reason why no password was set.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The user was not found.
    #[error(transparent)]
    Account(#[from] accounts::Error),
    /// The password is too long, or has a character that would begin a new line or field of chpasswd's input.
    #[error("the password is too long, or has an invalid character")]
    Password,
    /// chpasswd failed, or refused the password.
    #[error("the password of {user} is not set")]
    Program {
        /// Name of the user.
        user: String,
        /// Error of the program.
        source: program::Error,
    },
}

/// Sets the password of a user; with `crypted` it is already in the form of crypt(5).
///
/// # Errors
/// If the user is unknown, the password is invalid, or chpasswd refuses it.
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
