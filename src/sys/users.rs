//! Users of this machine, as its name service knows them. It may query servers over a network, so a caller
//! needs a thread for it, and a timeout.

use std::collections::BTreeSet;
use std::ffi::CString;

use nix::unistd::{Gid, Group, Uid, User, getgrouplist};

/// Result of the lookup of a user.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Found {
    /// Login name; `None` if the user is unknown.
    pub name: Option<String>,
    /// Requested groups that the user belongs to, in the form in which they were given.
    pub groups: BTreeSet<String>,
}

/// The user of a process with these IDs, and whether that is a member of these groups, which are names or numbers.
pub fn find(uid: u32, gid: u32, groups: &[String]) -> Found {
    let user = User::from_uid(Uid::from_raw(uid)).ok().flatten();
    let mut member: BTreeSet<u32> = [gid].into();
    if let Some(user) = &user {
        member.insert(user.gid.as_raw());
        let listed =
            CString::new(user.name.as_str()).ok().and_then(|name| getgrouplist(&name, user.gid).ok());
        member.extend(listed.into_iter().flatten().map(Gid::as_raw));
    }
    let groups = groups.iter().filter(|group| group_id(group).is_some_and(|gid| member.contains(&gid)));
    Found { groups: groups.cloned().collect(), name: user.map(|user| user.name) }
}

/// Returns whether a user of this name exists. A number always counts as a user, and so does any name while
/// the name service fails.
pub fn is_user(name: &str) -> bool {
    name.parse::<u32>().is_ok() || matches!(User::from_name(name), Ok(Some(_)) | Err(_))
}

/// Returns whether a group of this name exists. A number always counts as a group, and so does any name while
/// the name service fails.
pub fn is_group(name: &str) -> bool {
    name.parse::<u32>().is_ok() || matches!(Group::from_name(name), Ok(Some(_)) | Err(_))
}

/// The user that this process runs as.
pub fn own() -> u32 {
    Uid::effective().as_raw()
}

fn group_id(group: &str) -> Option<u32> {
    let known = || Some(Group::from_name(group).ok()??.gid.as_raw());
    group.parse().ok().or_else(known)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_have_names_and_groups() {
        let groups = ["root", "0", "daemon", "no-such-group"].map(str::to_owned);
        let root = find(0, 0, &groups);
        assert_eq!(root.name.as_deref(), Some("root"));
        assert!(root.groups.contains("root") && root.groups.contains("0"), "{root:?}");
        assert!(!root.groups.contains("no-such-group"), "{root:?}");
        // No user has this number; the group is the one of the process.
        let unknown = find(4_000_000_000, 0, &groups);
        assert_eq!((unknown.name, unknown.groups), (None, ["root", "0"].map(str::to_owned).into()));
    }

    #[test]
    fn names_that_nobody_has() {
        assert!(is_user("root") && is_group("root") && is_user("4000000000"));
        assert!(!is_user("no-such-user") && !is_group("no-such-group"));
    }
}
