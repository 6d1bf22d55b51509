//! The accounts of users: passwd(5), and whatever else the name service knows.

use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::path::PathBuf;

use nix::unistd::{Gid, Group, Uid, User};

use crate::sys::root::Root;

/// User account, as the name service describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Account {
    /// Login name.
    pub name: String,
    /// User ID.
    pub user: Uid,
    /// The user's own group.
    pub group: Gid,
    /// Home directory, as /etc/passwd names it.
    pub home: PathBuf,
}

/// Looks up an account by name in /etc/passwd and then, on the machine itself, in the name service (LDAP and
/// the like), which may take long.
///
/// # Errors
/// If neither can be queried.
pub fn find(root: &Root, name: &str) -> io::Result<Option<Account>> {
    let file = match root.read("/etc/passwd") {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
        file => file?,
    };
    if let Some(account) = parse(&file, name) {
        return Ok(Some(account));
    }
    if !root.is_the_machine() {
        return Ok(None);
    }
    let found = User::from_name(name)?;
    Ok(found.map(|user| Account { name: user.name, user: user.uid, group: user.gid, home: user.dir }))
}

/// Looks up a group by name in /etc/group and then, on the machine itself, in the name service.
///
/// # Errors
/// If neither can be queried.
pub fn group(root: &Root, name: &str) -> io::Result<Option<Gid>> {
    let file = match root.read("/etc/group") {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
        file => file?,
    };
    let found = parse_group(&file, name);
    if found.is_some() || !root.is_the_machine() {
        return Ok(found);
    }
    Ok(Group::from_name(name)?.map(|group| group.gid))
}

fn parse_group(file: &[u8], name: &str) -> Option<Gid> {
    file.split(|byte| *byte == b'\n').find_map(|line| {
        let mut fields = line.split(|byte| *byte == b':');
        if fields.next()? != name.as_bytes() {
            return None;
        }
        Some(Gid::from_raw(std::str::from_utf8(fields.nth(1)?).ok()?.parse().ok()?))
    })
}

fn parse(file: &[u8], name: &str) -> Option<Account> {
    file.split(|byte| *byte == b'\n').find_map(|line| {
        let mut fields = line.split(|byte| *byte == b':');
        if fields.next()? != name.as_bytes() {
            return None;
        }
        let (_password, user, group, _comment, home) =
            (fields.next()?, fields.next()?, fields.next()?, fields.next()?, fields.next()?);
        let number = |text: &[u8]| std::str::from_utf8(text).ok()?.parse::<u32>().ok();
        Some(Account {
            name: name.to_owned(),
            user: Uid::from_raw(number(user)?),
            group: Gid::from_raw(number(group)?),
            home: PathBuf::from(std::ffi::OsStr::from_bytes(home)),
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_passwd() {
        let file = b"root:x:0:0:root:/root:/bin/bash\nbroken:x:one:1::/:\n+nis\n:x:1:1::/:/bin/sh\n\
            me:x:1000:1001:M\xe9,,,:/home/me\xff:/bin/sh\nme:x:7:7::/other:/bin/sh\nshort:x:1:1\n";
        let me = parse(file, "me").unwrap();
        assert_eq!((me.user.as_raw(), me.group.as_raw()), (1000, 1001));
        assert_eq!(me.home.as_os_str().as_bytes(), b"/home/me\xff");
        assert_eq!(parse(file, "root").unwrap().home, PathBuf::from("/root"));
        for nobody in ["broken", "+nis", "short", "x", "me:x"] {
            assert_eq!(parse(file, nobody), None, "{nobody}");
        }
    }

    #[test]
    fn lines_of_group() {
        let file = b"root:x:0:\nbroken:x:one:\nshort:x\n\nusers:x:100:me,you\nusers:x:7:\n";
        assert_eq!(parse_group(file, "users"), Some(Gid::from_raw(100)));
        for nobody in ["broken", "short", "", "x"] {
            assert_eq!(parse_group(file, nobody), None, "{nobody}");
        }
        assert_eq!(group(&Root::default(), "root").unwrap(), Some(Gid::from_raw(0)));
    }

    #[test]
    fn root_is_there_and_nobody_of_a_strange_name() {
        let root = Root::default();
        assert_eq!(find(&root, "root").unwrap().unwrap().user.as_raw(), 0);
        assert_eq!(find(&root, "../etc").unwrap(), None);
    }
}
