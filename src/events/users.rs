//! Events about users who log in and out.

use super::Happening;
use super::state::{Change, Excess};
use crate::wire::proto::v1::{UserLoggedIn, UserLoggedOut, UserSession};
use crate::wire::weigh::List;

impl Happening for UserLoggedIn {
    fn words(&self) -> String {
        format!("user logged in: {}", words(self.session.as_ref()))
    }

    fn apply(&self, change: &mut Change<'_>) -> Result<(), Excess> {
        let Some(session) = &self.session else { return Ok(()) };
        change.add(List::Users, session, |state, cut| (&mut state.users, &mut cut.users))
    }
}

impl Happening for UserLoggedOut {
    fn words(&self) -> String {
        format!("user logged out: {}", words(self.session.as_ref()))
    }

    fn apply(&self, change: &mut Change<'_>) -> Result<(), Excess> {
        let Some(session) = &self.session else { return Ok(()) };
        let (state, cut, room) = change.parts();
        room.remove(&mut state.users, |known| known.id == session.id, &mut cut.users);
        Ok(())
    }
}

/// Describes a session, for example `ann on pts/0 from 192.0.2.9`.
pub fn words(session: Option<&UserSession>) -> String {
    let Some(session) = session else { return "-".to_owned() };
    let mut words = session.user.clone();
    for (before, part) in [(" on ", &session.terminal), (" from ", &session.remote_host)] {
        if !part.is_empty() {
            words = words + before + part;
        }
    }
    words
}
