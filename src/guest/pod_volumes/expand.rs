//! Grows a volume into the space that its disk has gained, while it is in use.

use std::path::Path;
use std::time::Duration;

use tokio::time::{Instant, timeout_at};

use crate::guest::Guest;
use crate::guest::disks::identity;
use crate::guest::pod_volumes::{Error, begin, look, place, share, unfrozen};
use crate::guest::volumes::grow::{Outcome, grow};
use crate::guest::volumes::held::Held;
use crate::sys::block;

/// Time limit for growing.
const TO_GROW: Duration = Duration::from_secs(30 * 60);
/// Time that a disk has to report its new size.
const TO_TELL: Duration = Duration::from_secs(5);
/// Longest pause between two looks at the size of the disk, as its change is not always reported.
const AGAIN: Duration = Duration::from_millis(500);

/// Request to expand a volume.
#[derive(Debug, Clone)]
pub struct Expand {
    /// Name of the volume.
    pub volume: String,
    /// Path where it is staged or published.
    pub path: String,
    /// Minimum size in bytes; 0 for any.
    pub required: u64,
    /// Maximum size in bytes; 0 for any.
    pub limit: u64,
}

/// Grows what is on a volume. Returns the size of its disk in bytes.
///
/// # Errors
/// If it is not mounted there, its disk is not as large as required, or what is on it does not grow.
pub async fn expand(guest: &Guest, wanted: &Expand) -> Result<u64, Error> {
    let _operation = begin(guest, &wanted.volume, "it is being expanded").await?;
    let missing = || Error::NotThere(wanted.path.clone().into());
    let place = place::of_volume(guest, &wanted.path).await?;
    let (shown, _) = place::look_at(guest, &place).await?;
    let shown = shown.ok_or_else(missing)?;
    if share::is_share(&shown.mount) {
        // The server has already grown it, and all its clients see that.
        return Ok(wanted.required);
    }
    let Some(number) = shown.number.filter(|_| !shown.gone) else { return Err(Error::Gone(place)) };
    let disk = block::place(&guest.root, number).map(|place| block::whole(&place).to_owned());
    let disk = disk.map_err(Error::system("find the disk of", place.clone()))?;
    let bytes = size(guest, &disk, wanted.required).await?;
    if bytes < wanted.required {
        let required = wanted.required;
        return Err(Error::Range(format!(
            "the disk has {bytes} bytes, not {required}: it has not grown yet"
        )));
    }
    if wanted.limit != 0 && bytes > wanted.limit {
        let limit = wanted.limit;
        return Err(Error::Range(format!("the disk has {bytes} bytes, which is more than {limit}")));
    }
    if !shown.is_device {
        if shown.mount.options.split(',').any(|option| option == "ro") {
            return Err(Error::ReadOnly(place));
        }
        let file = guest.root.path(&block::file(block::name(&disk)));
        let held = Held::called(guest, &file, "it is being expanded for kubelet").await?;
        unfrozen(guest)?;
        // As long as the mount exists, the device keeps its number.
        let (now, _) = place::look_at(guest, &place).await?;
        if held.disk() != disk || now.is_none_or(|now| now.gone || now.number != Some(number)) {
            return Err(Error::Gone(place));
        }
        grow_file_system(guest, &held).await?;
    }
    Ok(bytes)
}

/// Returns the size of the disk, as soon as it suffices or the disk has had its time to report it.
async fn size(guest: &Guest, disk: &str, required: u64) -> Result<u64, Error> {
    let bytes = block::bytes(&guest.root, disk);
    if required != 0 && bytes >= required {
        return Ok(bytes);
    }
    let mut changes = guest.disks.changes();
    let (root, place) = (guest.root.clone(), disk.to_owned());
    look(Path::new(disk), move || identity::have_asked_anew(&root, &place)).await?;
    let end = Instant::now() + TO_TELL;
    loop {
        let bytes = block::bytes(&guest.root, disk);
        let next = end.min(Instant::now() + AGAIN);
        if bytes >= required || Instant::now() >= end {
            return Ok(bytes);
        }
        let _ = timeout_at(next, changes.changed()).await;
    }
}

/// Grows what is on a whole disk.
pub(super) async fn grow_file_system(guest: &Guest, held: &Held) -> Result<(), Error> {
    for step in grow(guest, held, TO_GROW).await? {
        match step.outcome {
            Outcome::Grown { from, to } => {
                tracing::info!("{}: grown from {from} to {to} bytes", step.what);
            }
            Outcome::NotNeeded => {}
            Outcome::Refused(why) => {
                return Err(Error::NotGrown(format!("{} cannot be grown: {why}", step.what)));
            }
        }
    }
    Ok(())
}
