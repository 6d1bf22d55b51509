//! Finds the disk of a volume, and waits for it.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, timeout_at};

use crate::guest::Guest;
use crate::guest::disks::identity::{KnownDisk, Serial};
use crate::guest::disks::location::Bus;
use crate::guest::disks::lookup::{self, Selector};
use crate::guest::disks::release;
use crate::guest::pod_volumes::{Error, unfrozen};
use crate::guest::volumes::{self, held::Held};
use crate::sys::{blocking, sysfs};

/// Time limit for the appearance of a disk that was reported as plugged.
pub(super) const LONGEST: Duration = Duration::from_secs(30);
/// Time within which a disk that is being plugged appears; one that was released never appears by itself.
const ON_ITS_WAY: Duration = Duration::from_millis(300);
/// Time within which a disk that no longer responds is reported as removed.
const LEAVING: Duration = Duration::from_secs(2);
/// Length in bytes from which a volume's name is distinctive enough to be searched for within a disk's names.
const ENOUGH: usize = 8;
/// Prefixes that libvirt puts before the given name.
const ALIAS_PREFIXES: [&str; 3] = ["drive-ua-", "ua-", "drive-"];

/// Properties by which the disk of a volume is recognised.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wanted {
    /// Name of the volume.
    pub volume: String,
    /// Serial number of the disk, if the host half has given one.
    pub serial: Option<String>,
    /// Bus of the disk, if the host half has given it.
    pub bus: Option<Bus>,
}

impl Wanted {
    fn words(&self) -> String {
        match &self.serial {
            Some(serial) => format!("serial number {serial:?}"),
            None => "by its name".to_owned(),
        }
    }
}

/// Disk that was found for a volume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    /// Disk that matches.
    pub disk: Arc<KnownDisk>,
    /// True if the disk reports all that it is recognised by. Otherwise a different disk may be meant, and this one
    /// only shares part of the name: it is never formatted.
    pub sure: bool,
}

/// Returns the one disk that reports all that the volume's disk is recognised by, if it is present. Pure.
///
/// # Errors
/// If several disks match, or the properties cannot identify a disk.
pub fn choose_sure(disks: &[Arc<KnownDisk>], wanted: &Wanted) -> Result<Option<Arc<KnownDisk>>, Error> {
    let by = selector(wanted)?;
    let is_it = |disk: &&Arc<KnownDisk>| {
        lookup::is_whole(disk, &by) || wanted.serial.is_none() && is_called(disk, &wanted.volume)
    };
    one(disks.iter().filter(is_it).collect(), wanted)
}

/// Returns the one disk that is meant, if it is present: the one that reports all that it is recognised by; else
/// one that has room for only the beginning; else, if no serial number was given, one with the volume's name
/// within one of its own. Pure.
///
/// # Errors
/// If several disks match, or the properties cannot identify a disk.
pub fn choose(disks: &[Arc<KnownDisk>], wanted: &Wanted) -> Result<Option<Found>, Error> {
    if let Some(disk) = choose_sure(disks, wanted)? {
        return Ok(Some(Found { disk, sure: true }));
    }
    let mut found = lookup::matching(disks, &selector(wanted)?);
    if found.is_empty() && wanted.serial.is_none() && wanted.volume.len() >= ENOUGH {
        found = disks.iter().filter(|disk| names(disk).any(|name| name.contains(&wanted.volume))).collect();
    }
    Ok(one(found, wanted)?.map(|disk| Found { disk, sure: false }))
}

fn selector(wanted: &Wanted) -> Result<Selector, Error> {
    let by = Selector::Serial(wanted.serial.clone().unwrap_or_else(|| wanted.volume.clone()));
    lookup::usable(&by).map_err(|why| Error::Unusable(format!("{by} {why}")))?;
    Ok(by)
}

fn one(mut found: Vec<&Arc<KnownDisk>>, wanted: &Wanted) -> Result<Option<Arc<KnownDisk>>, Error> {
    if let Some(bus) = wanted.bus {
        found.retain(|disk| disk.bus == bus);
    }
    match found.as_slice() {
        [] => Ok(None),
        [disk] => Ok(Some(Arc::clone(disk))),
        several => Err(Error::Ambiguous {
            volume: wanted.volume.clone(),
            disks: several.iter().take(8).map(|disk| lookup::describe(disk)).collect(),
        }),
    }
}

/// Returns all names of a disk: its alias and its serial numbers.
fn names(disk: &KnownDisk) -> impl Iterator<Item = String> + '_ {
    disk.alias.clone().into_iter().chain(disk.serials.iter().map(Serial::text))
}

/// Returns whether a disk has exactly this name, apart from libvirt's prefixes.
fn is_called(disk: &KnownDisk, name: &str) -> bool {
    names(disk).any(|called| {
        let bare = ALIAS_PREFIXES.iter().find_map(|prefix| called.strip_prefix(prefix));
        called == name || bare == Some(name)
    })
}

/// Returns the disk that is meant, if it is known now.
///
/// # Errors
/// The errors of [`choose`].
pub fn known(guest: &Guest, wanted: &Wanted) -> Result<Option<Found>, Error> {
    choose(&guest.disks.all(), wanted)
}

/// Holds `disk`, if it is still the one that is meant: it may have been replaced while it was waited for.
///
/// # Errors
/// [`volumes::Error::Another`] if it is not; the errors of [`Held::of`] and [`choose`].
pub(super) async fn hold(guest: &Guest, wanted: &Wanted, disk: &KnownDisk) -> Result<Held, Error> {
    let held = Held::of(guest, disk, None, "it is being staged for kubelet").await?;
    unfrozen(guest)?;
    let same = |now: Found| (now.disk.generation, now.disk.sequence) == (disk.generation, disk.sequence);
    if known(guest, wanted)?.is_some_and(same) {
        return Ok(held);
    }
    let why = "the volume's disk was replaced, or was removed";
    Err(volumes::Error::Another { device: held.file().to_owned(), why }.into())
}

/// Waits for the disk that is meant, and returns it as soon as it is known. A disk that does not appear is scanned
/// for on the SCSI buses, as it may have been released. An uncertain match is used only if no other disk has
/// appeared in time.
///
/// # Errors
/// The errors of [`choose`]; also if the disk does not appear in time.
pub async fn find(guest: &Guest, wanted: &Wanted, within: Duration) -> Result<Found, Error> {
    let found = wait(guest, wanted, within).await?;
    if let Some(serial) = &wanted.serial {
        // The disk is in use again, so an earlier release no longer counts.
        let _ = release::find(guest, &Selector::Serial(serial.clone()), Duration::ZERO).await;
    }
    Ok(found)
}

async fn wait(guest: &Guest, wanted: &Wanted, within: Duration) -> Result<Found, Error> {
    let begun = Instant::now();
    let sure = |disk| Found { disk, sure: true };
    if let Some(disk) = until(guest, wanted, begun + ON_ITS_WAY).await? {
        return Ok(sure(disk));
    }
    let end = begun + within;
    let come = if matches!(wanted.bus, Some(bus) if bus != Bus::Scsi) {
        until(guest, wanted, end).await?
    } else {
        tracing::info!("looking for the disk of the volume {} on the SCSI buses", wanted.volume);
        // The disk may be in a place where the kernel still shows one that was unplugged.
        guest.disks.doubt();
        let root = guest.root.clone();
        // The loop below does not depend on the scan: disks that it finds are reported like all others.
        let scan = blocking::run(move || {
            for host in sysfs::numbers(&root, "/sys/class/scsi_host", "host").unwrap_or_default() {
                let path = format!("/sys/class/scsi_host/host{host}/scan");
                if let Err(error) = sysfs::write(&root, &path, "- - -") {
                    tracing::warn!("cannot look for disks on SCSI bus {host}: {error}");
                }
            }
        });
        tokio::select! {
            found = until(guest, wanted, end) => found?,
            () = scan => until(guest, wanted, end).await?,
        }
    };
    if let Some(disk) = come {
        return Ok(sure(disk));
    }
    let found = known(guest, wanted)?.ok_or_else(|| Error::NoDisk {
        volume: wanted.volume.clone(),
        by: wanted.words(),
        seconds: within.as_secs(),
    })?;
    tracing::warn!(
        "volume {}: no disk has appeared that is certain to be its own; {} has a matching name, and is used \
         if it has a file system",
        wanted.volume,
        lookup::describe(&found.disk)
    );
    Ok(found)
}

/// Returns the disk that is certainly meant, if it becomes known before `end`.
async fn until(guest: &Guest, wanted: &Wanted, end: Instant) -> Result<Option<Arc<KnownDisk>>, Error> {
    seen(guest, end, || choose_sure(&guest.disks.all(), wanted).transpose()).await.transpose()
}

/// Returns whether a disk that could not be used is disappearing: its name remains for a moment after it stops
/// responding.
pub(super) async fn leaves(guest: &Guest, disk: &KnownDisk) -> bool {
    let is_it = |known: &Arc<KnownDisk>| {
        (&known.name, known.generation, known.sequence) == (&disk.name, disk.generation, disk.sequence)
    };
    let gone = || (!guest.disks.all().iter().any(is_it)).then_some(());
    seen(guest, Instant::now() + LEAVING, gone).await.is_some()
}

/// Calls `look` at every change of the disks until it finds something or `end` is reached.
async fn seen<T>(guest: &Guest, end: Instant, look: impl Fn() -> Option<T>) -> Option<T> {
    // Subscribed before the first look, so that no change is missed in between.
    let mut changes = guest.disks.changes();
    loop {
        changes.borrow_and_update();
        if let Some(found) = look() {
            return Some(found);
        }
        timeout_at(end, changes.changed()).await.ok()?.ok()?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::guest::disks::identity::Source;

    fn disk(name: &str, bus: Bus, alias: Option<&str>, serial: Option<(Source, &str)>) -> Arc<KnownDisk> {
        Arc::new(KnownDisk {
            name: name.to_owned(),
            file: format!("/dev/{name}"),
            place: String::new(),
            number: (8, 0),
            generation: 1,
            sequence: None,
            bus,
            pci: None,
            scsi: None,
            serials: serial
                .and_then(|(source, text)| Serial::new(source, text.as_bytes()))
                .into_iter()
                .collect(),
            alias: alias.map(str::to_owned),
            wwn: None,
            bytes: 1,
            sector: 512,
            read_only: false,
            rotational: false,
            partitions: Vec::new(),
            holders: Vec::new(),
            silent: false,
        })
    }

    fn chosen(disks: &[Arc<KnownDisk>], volume: &str, serial: Option<&str>, bus: Option<Bus>) -> String {
        let serial = serial.map(str::to_owned);
        let wanted = Wanted { volume: volume.to_owned(), serial, bus };
        let sure = choose_sure(disks, &wanted);
        match choose(disks, &wanted) {
            Ok(Some(found)) => {
                assert_eq!(sure.unwrap(), found.sure.then(|| found.disk.clone()));
                format!("{}{}", found.disk.name, if found.sure { "" } else { "?" })
            }
            Ok(None) => "none".to_owned(),
            Err(error) => error.to_string(),
        }
    }

    #[test]
    fn a_disk_is_known_by_its_serial_number_or_else_by_its_name() {
        let volume = "pvc-0a1b2c3d-1111-2222-3333-444455556666";
        let disks = [
            disk("sda", Bus::Scsi, Some("drive-ua-pvc-0a1b2c3d-1111-2222-3333-444455556666"), None),
            disk("sdb", Bus::Scsi, Some("pvc-0a1b2c3d-1111-2222-3333-4444555566667"), None),
            disk("vda", Bus::Virtio, None, Some((Source::Virtio, "0123456789abcdef0123"))),
            disk("sdc", Bus::Scsi, None, Some((Source::Page80, "0123456789abcdef0123"))),
            disk("sdd", Bus::Scsi, None, Some((Source::Page80, "twice"))),
            disk("sde", Bus::Scsi, None, Some((Source::Page80, "twice"))),
        ];
        assert_eq!(chosen(&disks, volume, None, None), "sda");
        // A part of a name counts only if nothing matches better, and does not allow everything.
        assert_eq!(chosen(&disks[1..], volume, None, None), "sdb?");
        assert_eq!(chosen(&disks, "pvc-0", None, None), "none");
        assert!(chosen(&disks, "pvc-0a1b2c3d", None, None).contains("any of several disks: sda"));
        // With a serial number from the host half, only that counts.
        assert_eq!(chosen(&disks, volume, Some("other"), None), "none");
        assert_eq!(chosen(&disks, volume, Some("0123456789abcdef0123"), Some(Bus::Virtio)), "vda");
        assert_eq!(chosen(&disks, volume, Some("0123456789abcdef0123"), Some(Bus::Scsi)), "sdc");
        assert!(chosen(&disks, volume, Some("twice"), None).contains("sdd"));
        assert!(chosen(&disks, volume, Some("000"), None).contains("all zeros"));
        assert!(chosen(&disks, volume, Some(""), None).contains("is empty"));
    }

    #[test]
    fn the_beginning_of_a_name_makes_nothing_sure() {
        let volume = "pvc-0a1b2c3d-1111-2222-3333-444455556666";
        let cut = disk("vda", Bus::Virtio, None, Some((Source::Virtio, &volume[..20])));
        let other = "pvc-0a1b2c3d-1111-2ccc-3333-444455556666";
        for wanted in [volume, "pvc-0a1b2c3d-1111-2222-9999-444455556666"] {
            assert_eq!(chosen(std::slice::from_ref(&cut), wanted, None, None), "vda?");
            assert_eq!(chosen(std::slice::from_ref(&cut), "x", Some(wanted), None), "vda?");
        }
        assert_eq!(chosen(std::slice::from_ref(&cut), other, None, None), "none");
        assert_eq!(chosen(std::slice::from_ref(&cut), "x", Some(&volume[..20]), None), "vda");
        // The disk that reports the full name matches, not the other.
        let whole = disk("sda", Bus::Scsi, Some(&format!("ua-{volume}")), None);
        assert_eq!(chosen(&[cut, whole], volume, None, None), "sda");
    }
}
