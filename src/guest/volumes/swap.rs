//! Enables and disables swap spaces on disks.

use std::io;
use std::time::Duration;

use crate::guest::Guest;
use crate::guest::volumes::contents::contents;
use crate::guest::volumes::held::Held;
use crate::guest::volumes::{Error, PATIENCE, holding};
use crate::sys::{block_device, swaps};

/// Enables swapping to the device that is held. Returns whether it was enabled already.
///
/// # Errors
/// If the device has no swap space, is not the one that was meant, or the kernel refuses it.
pub async fn on(guest: &Guest, held: &Held) -> Result<bool, Error> {
    if is_used(guest, held).await? {
        return Ok(true);
    }
    let found = contents(guest, held.file()).await?;
    if found.kind() != Some("swap") {
        return Err(Error::NoFileSystem { device: held.file().to_owned(), found: found.words() });
    }
    let (effects, device) = (guest.effects.clone(), held.clone());
    let work = move || {
        device.check()?;
        let done = effects.swap_on(device.file());
        done.map_err(|source| Error::Swap { device: device.file().to_owned(), source })?;
        // The kernel found the device by its name.
        device.check().inspect_err(|_| drop(effects.swap_off(device.file())))
    };
    holding(held, PATIENCE, work).await??;
    Ok(false)
}

/// Disables the swap space on the device that is held. Returns whether it was in use. Its contents are moved back
/// to memory first.
///
/// # Errors
/// If there is not enough memory; if it takes longer than `deadline`, and it then continues.
pub async fn off(guest: &Guest, held: &Held, deadline: Duration) -> Result<bool, Error> {
    if !is_used(guest, held).await? {
        return Ok(false);
    }
    let (effects, device) = (guest.effects.clone(), held.clone());
    let work = move || {
        device.check()?;
        let done = effects.swap_off(device.file());
        done.map_err(|source| Error::Swap { device: device.file().to_owned(), source })
    };
    holding(held, deadline, work).await??;
    Ok(true)
}

async fn is_used(guest: &Guest, held: &Held) -> Result<bool, Error> {
    let (root, number) = (guest.root.clone(), held.number());
    let look = move || {
        let same = |path: &String| block_device::number_at(path.as_ref()) == Some(number);
        Ok::<_, io::Error>(swaps::devices(&root)?.iter().any(same))
    };
    holding(held, PATIENCE, look).await?.map_err(|source| Error::unreadable("/proc/swaps".as_ref(), source))
}
