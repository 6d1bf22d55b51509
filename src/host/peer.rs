//! Peer of a connection to the admin API's socket: the user, as certified by the kernel, and what the name service
//! knows of this user.
//!
//! A name service may query other machines and hang. It is called on separate threads, of which there are few, and
//! with a deadline. A user who is not looked up in time is treated as one without a name or groups.

use std::sync::{Arc, LazyLock};
use std::time::Duration;

use tokio::sync::{Mutex, Semaphore};

use super::caller::Caller;
use crate::access::{Person, Rules};
use crate::sys::{blocking, users};

/// Timeout of the name service.
const PATIENCE: Duration = Duration::from_secs(2);
/// Limit of concurrent lookups, including those that have timed out but are still running.
const AT_A_TIME: usize = 8;
/// User ID of root. Its name is not looked up, so root can always use the admin API.
const ROOT: u32 = 0;

static PLACES: LazyLock<Arc<Semaphore>> = LazyLock::new(|| Arc::new(Semaphore::new(AT_A_TIME)));

/// Peer of one connection.
#[derive(Debug)]
pub struct Peer {
    uid: u32,
    gid: u32,
    own: u32,
    /// Result of the last lookup, and the rules whose groups were looked up with it.
    known: Mutex<Option<(Arc<Rules>, Person)>>,
}

/// Identity of a user, as far as it is known.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Known {
    /// User as access rules see it.
    pub person: Person,
    /// True if the name service did not answer in time.
    pub is_incomplete: bool,
}

impl Peer {
    /// Creates the peer for a process with these IDs.
    pub fn new(uid: u32, gid: u32) -> Arc<Self> {
        Arc::new(Self { uid, gid, own: users::own(), known: Mutex::default() })
    }

    /// Returns the user ID.
    pub fn uid(&self) -> u32 {
        self.uid
    }

    /// Returns whether the user may do everything: root, and the user that guestlet-host itself runs as.
    pub fn is_trusted(&self) -> bool {
        self.uid == ROOT || self.uid == self.own
    }

    /// Looks up the user, and its membership in the groups of these rules. The result is cached until the rules
    /// change.
    pub async fn known(&self, rules: &Arc<Rules>) -> Known {
        if self.uid == ROOT {
            let person = Person { uid: ROOT, name: Some("root".to_owned()), ..Person::default() };
            return Known { person, is_incomplete: false };
        }
        let mut known = self.known.lock().await;
        if let Some((of, person)) = &*known
            && Arc::ptr_eq(of, rules)
        {
            return Known { person: person.clone(), is_incomplete: false };
        }
        let Some(found) = in_time(look_up(self.uid, self.gid, rules.groups())).await else {
            tracing::warn!(uid = self.uid, "the name service does not look up a user in time");
            return Known { person: Person { uid: self.uid, ..Person::default() }, is_incomplete: true };
        };
        let person = Person { uid: self.uid, name: found.name, groups: found.groups };
        *known = Some((Arc::clone(rules), person.clone()));
        Known { person, is_incomplete: false }
    }
}

impl Known {
    /// Returns the user as the caller of a request.
    pub fn caller(&self) -> Caller {
        Caller::User { uid: self.person.uid, name: self.person.name.clone() }
    }
}

async fn look_up(uid: u32, gid: u32, groups: Vec<String>) -> Option<users::Found> {
    let place = Arc::clone(&PLACES).acquire_owned().await.ok()?;
    let work = move || {
        let found = users::find(uid, gid, &groups);
        drop(place);
        found
    };
    blocking::attempt(work).await.ok()
}

async fn in_time<T>(work: impl Future<Output = Option<T>>) -> Option<T> {
    tokio::time::timeout(PATIENCE, work).await.ok().flatten()
}

/// Returns a description of each user and group of the rules that the name service does not know.
pub async fn unknown_names(rules: &Arc<Rules>) -> Vec<String> {
    let rules = Arc::clone(rules);
    let place = Arc::clone(&PLACES).acquire_owned();
    let work = async move {
        let place = place.await.ok()?;
        let work = move || {
            let users = rules.iter().flat_map(|rule| &rule.users).filter(|name| !users::is_user(name));
            let groups = rules.iter().flat_map(|rule| &rule.groups).filter(|name| !users::is_group(name));
            let mut words: Vec<_> = users.map(|name| format!("user {name:?}")).collect();
            words.extend(groups.map(|name| format!("group {name:?}")));
            words.dedup();
            drop(place);
            words
        };
        blocking::attempt(work).await.ok()
    };
    in_time(work).await.unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::access::Rule;

    #[tokio::test]
    async fn a_user_is_looked_up_anew_when_the_rules_are_others() {
        let rules = |group: &str| {
            Arc::new(Rules::new(vec![Rule { groups: vec![group.to_owned()], ..Rule::default() }]))
        };
        let peer = Peer::new(4_000_000_000, 7);
        let (before, after) = (rules("8"), rules("7"));
        assert!(peer.known(&before).await.person.groups.is_empty());
        let known = peer.known(&after).await;
        assert_eq!((known.person.groups, known.is_incomplete), (["7".to_owned()].into(), false));
        assert!(
            !peer.is_trusted() && Peer::new(0, 0).is_trusted() && Peer::new(users::own(), 9).is_trusted()
        );
    }

    #[tokio::test(start_paused = true)]
    async fn a_name_service_that_hangs_costs_a_user_the_name_and_nobody_else() {
        let places = Arc::clone(&PLACES).acquire_many_owned(u32::try_from(AT_A_TIME).unwrap()).await.unwrap();
        let rules = Arc::new(Rules::default());
        let known = Peer::new(4_000_000_001, 7).known(&rules).await;
        assert_eq!((known.person.name.as_deref(), known.is_incomplete), (None, true));
        assert_eq!(Peer::new(0, 0).known(&rules).await.caller().to_string(), "uid:0 root");
        drop(places);
    }

    #[tokio::test]
    async fn names_that_nobody_has_are_told() {
        let rule = Rule {
            users: vec!["root".into(), "no-such-user".into()],
            groups: vec!["no-such-group".into(), "7".into()],
            ..Rule::default()
        };
        let words = unknown_names(&Arc::new(Rules::new(vec![rule]))).await;
        assert_eq!(words, ["user \"no-such-user\"", "group \"no-such-group\""]);
    }
}
