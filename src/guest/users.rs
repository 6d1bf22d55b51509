//! Users that are logged in, by utmp(5) or, on systems that no longer have it, by logind.

use std::time::Duration;

use crate::guest::Guest;
use crate::guest::logind::{self, Logind};
use crate::sys::{blocking, utmp};

/// User that is logged in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct User {
    /// Name of the user.
    pub name: String,
    /// Begin of the user's first session, since the epoch.
    pub since: Duration,
}

/// Error: the users that are logged in are not known.
#[derive(Debug, thiserror::Error)]
#[error("logind does not report who is logged in: {0}")]
pub struct Error(String);

/// Returns the users that are logged in, each once, in the order of the system's list; empty if the system keeps
/// none.
///
/// # Errors
/// If there is no utmp file, and logind does not answer.
pub async fn users(guest: &Guest) -> Result<Vec<User>, Error> {
    let root = guest.root.clone();
    let file = blocking::run(move || root.read("/run/utmp").or_else(|_| root.read("/var/run/utmp"))).await;
    if let Ok(file) = file {
        let entries = utmp::parse(&file).into_iter();
        return Ok(once_each(entries.map(|entry| User { name: entry.user, since: entry.since })));
    }
    let sessions = match Logind::find(&guest.root).await {
        Ok(logind) => logind.sessions().await.map_err(|error| Error(error.to_string()))?,
        Err(logind::Error::Absent(why)) => {
            tracing::debug!("neither utmp nor logind is there: {why}");
            Vec::new()
        }
        Err(error) => return Err(Error(error.to_string())),
    };
    let sessions = sessions.into_iter();
    Ok(once_each(sessions.map(|session| User { name: session.user, since: session.since })))
}

fn once_each(sessions: impl Iterator<Item = User>) -> Vec<User> {
    let mut users: Vec<User> = Vec::new();
    for session in sessions {
        match users.iter_mut().find(|user| user.name == session.name) {
            Some(user) => user.since = user.since.min(session.since),
            None => users.push(session),
        }
    }
    users
}
