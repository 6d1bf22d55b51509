//! Who is logged in, by utmp(5) or, where systems have given that up, by logind.

use std::time::Duration;

use crate::guest::Guest;
use crate::guest::logind::{self, Logind};
use crate::sys::{blocking, utmp};

/// Somebody who is logged in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct User {
    /// The user's name.
    pub name: String,
    /// When the first of the sessions began, since the epoch.
    pub since: Duration,
}

/// Why it is not known who is logged in.
#[derive(Debug, thiserror::Error)]
#[error("logind does not report who is logged in: {0}")]
pub struct Error(String);

/// Everybody who is logged in, once each, in the order in which they are listed; nobody where nothing keeps a list.
///
/// # Errors
/// If logind, as the only one to ask, is there and does not answer.
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
