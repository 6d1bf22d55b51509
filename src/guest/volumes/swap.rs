//! Swap spaces on disks: taken into use, and let go of.

use std::io;
use std::time::Duration;

use crate::guest::Guest;
use crate::guest::volumes::contents::contents;
use crate::guest::volumes::held::Held;
use crate::guest::volumes::{Error, PATIENCE, holding};
use crate::sys::block_device;
use crate::sys::root::Root;

const SWAPS: &str = "/proc/swaps";

/// Lets the kernel swap to the device that is held; whether it did so already.
///
/// # Errors
/// If there is no swap space on it, it is not the one that was meant, or the kernel does not take it.
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
        // The kernel went by its name.
        device.check().inspect_err(|_| drop(effects.swap_off(device.file())))
    };
    holding(held, PATIENCE, work).await??;
    Ok(false)
}

/// Lets go of the swap space on the device that is held; whether it was in use. What is in it moves back to memory first.
///
/// # Errors
/// If memory does not suffice; if it takes longer than `deadline`, and then it goes on.
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
        Ok::<_, io::Error>(in_use(&root)?.iter().any(same))
    };
    holding(held, PATIENCE, look).await?.map_err(|source| Error::unreadable(SWAPS.as_ref(), source))
}

/// The files of the devices that the kernel swaps to.
///
/// # Errors
/// If there is a list of them that cannot be read.
pub fn in_use(root: &Root) -> io::Result<Vec<String>> {
    match root.read(SWAPS) {
        Ok(file) => Ok(parse(&String::from_utf8_lossy(&file))),
        // A kernel without swap.
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(error),
    }
}

/// The devices of /proc/swaps; names with white space are passed over, as no device has one.
fn parse(file: &str) -> Vec<String> {
    let line = |line: &str| {
        let mut fields = line.split_ascii_whitespace();
        let (path, kind) = (fields.next()?, fields.next()?);
        (kind == "partition").then(|| path.to_owned())
    };
    file.lines().skip(1).filter_map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn swap_spaces_in_use() {
        let file = "Filename\t\t\t\tType\t\tSize\t\tUsed\t\tPriority\n/dev/vdb                                partition\t65532\t\t0\t\t-2\n\
            /swapfile                               file\t\t1024\t0\t-3\n/dev/dm-1 partition 1 0 -4\n";
        assert_eq!(parse(file), ["/dev/vdb", "/dev/dm-1"]);
        assert!(parse("").is_empty());
    }
}
