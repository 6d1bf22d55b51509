//! Sets owner, group and permissions of what a rule has mounted.

use std::sync::Arc;

use nix::errno::Errno;

use crate::guest::disk_rules::apply::{Error, look, mounts};
use crate::guest::disk_rules::made::Made;
use crate::guest::disk_rules::rule::How;
use crate::guest::volumes::held::Held;
use crate::guest::{Guest, accounts};
use crate::sys::{accounts as names, folders};

/// Returns the numeric IDs of the user and the group that the rule names.
pub(super) async fn owners(guest: &Guest, how: &How) -> Result<(Option<u32>, Option<u32>), Error> {
    let (root, owner, group) = (guest.root.clone(), how.owner.clone(), how.group.clone());
    let find = move || {
        let user = match owner.as_deref().map(|name| (name, name.parse())) {
            None => None,
            Some((_, Ok(number))) => Some(number),
            Some((name, Err(_))) => Some(accounts::find(&root, name).map_err(Error::Owner)?.user.as_raw()),
        };
        let group = match group.as_deref().map(|name| (name, name.parse())) {
            None => None,
            Some((_, Ok(number))) => Some(number),
            Some((name, Err(_))) => {
                let found = names::group(&root, name).map_err(Error::Groups)?;
                Some(found.ok_or_else(|| Error::NoGroup(name.to_owned()))?.as_raw())
            }
        };
        Ok((user, group))
    };
    look("the list of users", find).await?
}

/// Sets owner, group and mode of the root directory of the mount, as the rule says.
pub(super) async fn give(
    guest: &Guest,
    mounted: &Made,
    held: &Held,
    owners: (Option<u32>, Option<u32>),
) -> Result<(), Error> {
    let (user, group) = owners;
    let permissions = mounted.how.mode;
    if user.is_none() && group.is_none() && permissions.is_none() {
        return Ok(());
    }
    let list = mounts(guest).await?;
    let Some(mount) = list.into_iter().find(|mount| mounted.is(mount)) else {
        return Err(Error::Give(Errno::ESTALE.into()));
    };
    let (effects, held) = (Arc::clone(&guest.effects), held.clone());
    let give = move || {
        let folder = effects.open_mount(&mount).map_err(Error::Give)?;
        // The path has been resolved to this mount; check once more that the mount is of the held device.
        held.check()?;
        folders::give(folder, user, group, permissions).map_err(Error::Give)
    };
    look("the file system", give).await?
}
