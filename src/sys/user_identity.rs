//! Account data of a user that a program is started with, from the name service. It may query servers over a
//! network, so a caller needs a thread for it.

use std::ffi::CString;
use std::io;
use std::path::PathBuf;

use nix::unistd::{Gid, Uid, User, getgrouplist};

use crate::sys::spawn_manner::Identity;

/// A user of this machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Account {
    /// Login name.
    pub name: String,
    /// User ID and group IDs.
    pub identity: Identity,
    /// Home directory.
    pub home: PathBuf,
    /// Login shell.
    pub shell: PathBuf,
}

/// The user of this name, or of this number.
///
/// # Errors
/// If the name service does not say.
pub fn find(user: &str) -> io::Result<Option<Account>> {
    let mut found = User::from_name(user)?;
    if found.is_none()
        && let Ok(number) = user.parse()
    {
        found = User::from_uid(Uid::from_raw(number))?;
    }
    found.map(account).transpose()
}

/// The user of this number.
///
/// # Errors
/// If the name service does not say.
pub fn with_number(uid: u32) -> io::Result<Option<Account>> {
    User::from_uid(Uid::from_raw(uid))?.map(account).transpose()
}

fn account(user: User) -> io::Result<Account> {
    let groups = getgrouplist(&CString::new(user.name.as_str())?, user.gid)?;
    let identity = Identity {
        uid: user.uid.as_raw(),
        gid: user.gid.as_raw(),
        groups: groups.into_iter().map(Gid::as_raw).collect(),
    };
    let shell = if user.shell.as_os_str().is_empty() { "/bin/sh".into() } else { user.shell };
    Ok(Account { name: user.name, identity, home: user.dir, shell })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_is_found_by_name_and_by_number() {
        let root = find("root").unwrap().unwrap();
        assert_eq!((root.identity.uid, root.name.as_str()), (0, "root"));
        assert!(root.identity.groups.contains(&0) && root.home.is_absolute() && root.shell.is_absolute());
        assert_eq!(find("0").unwrap(), Some(root.clone()));
        assert_eq!((with_number(0).unwrap(), with_number(4_000_000_000).unwrap()), (Some(root), None));
        for unknown in ["no-such-user", "4000000000", "", "root\n"] {
            assert_eq!(find(unknown).unwrap(), None, "{unknown:?}");
        }
    }
}
