//! Events of the kernel for block devices that appear, change or disappear: uevents, netlink(7).
//!
//! A message is text: a line `action@path`, then `KEY=value` lines, each ended by a NUL byte. Programs can
//! send messages to the same group, so only those from the kernel are accepted.

use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};

use nix::errno::Errno;
use nix::sys::socket::sockopt::{RcvBuf, RcvBufForce};
use nix::sys::socket::{
    AddressFamily, NetlinkAddr, SockFlag, SockProtocol, SockType, bind, recvfrom, setsockopt, socket,
};
use tokio::io::Interest;

use crate::sys::descriptor::wait;

/// The kernel's own messages; group 2 is udev's.
const KERNEL: u32 = 1;
/// Bytes of messages that may wait to be read. It is a limit: nothing is set aside.
const WAITING: usize = 16 << 20;
/// Bytes of one message: the kernel makes none longer than 2 KiB and a path.
const LONGEST: usize = 8192;

/// Action that a message reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Added device.
    Add,
    /// Removed device, or one that is about to be removed.
    Remove,
    /// Anything else: look at it again.
    Change,
    /// A SCSI device has begun anew: it may be another one than before. The place is that of the device, not of its disk.
    Reset,
}

/// Event of a block device, or of the SCSI device below one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Uevent {
    /// Action of the event.
    pub action: Action,
    /// The device's place below /sys/devices, such as `/sys/devices/…/block/vda/vda1`.
    pub place: String,
    /// True for a partition, false for a whole disk.
    pub partition: bool,
    /// Sequence number of the disk (since Linux 5.15), which is never reused until the next boot.
    pub disk: Option<u64>,
}

/// Item that the subscription returns.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Heard {
    /// Event that was received.
    Uevent(Uevent),
    /// Messages were lost: everything may have changed.
    Overrun,
}

/// Parses a message; `None` if it does not concern a block device, or does not come from the kernel.
pub fn parse(message: &[u8]) -> Option<Uevent> {
    let mut lines = message.split(|byte| *byte == 0);
    if !lines.next()?.contains(&b'@') {
        return None;
    }
    let (mut action, mut path, mut subsystem, mut disk) = (None, None, None, None);
    let (mut partition, mut made_up, mut reset) = (false, false, false);
    for line in lines {
        let Some((key, value)) = std::str::from_utf8(line).ok().and_then(|line| line.split_once('=')) else {
            continue;
        };
        match key {
            "ACTION" => {
                action = Some(match value {
                    "add" => Action::Add,
                    "remove" => Action::Remove,
                    _ => Action::Change,
                });
            }
            "DEVPATH" => path = Some(value),
            "SUBSYSTEM" => subsystem = Some(value),
            "DEVTYPE" => partition = value == "partition",
            // A program wrote to the device's uevent file, to make udev process it again: nothing has happened to the
            // device.
            "SYNTH_UUID" => made_up = true,
            // A device reports these for its first request after it was created, and when its identity has changed.
            "SDEV_UA" => reset = ["POWER_ON_RESET_OCCURRED", "INQUIRY_DATA_HAS_CHANGED"].contains(&value),
            "DISKSEQ" => disk = value.parse().ok(),
            _ => {}
        }
    }
    let path = path.filter(|path| path.starts_with('/'))?;
    if subsystem == Some("scsi") && reset {
        return Some(Uevent {
            action: Action::Reset,
            place: format!("/sys{path}"),
            partition: false,
            disk: None,
        });
    }
    if subsystem != Some("block") {
        return None;
    }
    let action = if made_up { Action::Change } else { action? };
    Some(Uevent { action, place: format!("/sys{path}"), partition, disk })
}

/// A subscription to uevents.
#[derive(Debug)]
pub struct Uevents(OwnedFd);

impl Uevents {
    /// Subscribes to all events from now on.
    ///
    /// # Errors
    /// The errors of socket(2) and bind(2).
    pub fn subscribe() -> io::Result<Self> {
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let kind = SockProtocol::NetlinkKObjectUEvent;
        let socket = socket(AddressFamily::Netlink, SockType::Raw, flags, kind)?;
        if setsockopt(&socket, RcvBufForce, &WAITING).is_err() {
            // As much as one without privileges may have.
            setsockopt(&socket, RcvBuf, &WAITING)?;
        }
        bind(socket.as_raw_fd(), &NetlinkAddr::new(0, KERNEL))?;
        Ok(Self(socket))
    }

    /// Waits for the next event of a block device. Dropping the future loses none.
    ///
    /// # Errors
    /// The errors of recvfrom(2).
    pub async fn next(&self) -> io::Result<Heard> {
        loop {
            match self.at_hand()? {
                Some(heard) => return Ok(heard),
                None => wait(self.0.as_fd(), Interest::READABLE).await?,
            }
        }
    }

    /// Returns the next event of a block device, if one has arrived already.
    ///
    /// # Errors
    /// The errors of recvfrom(2).
    pub fn at_hand(&self) -> io::Result<Option<Heard>> {
        let mut buffer = [0; LONGEST];
        loop {
            match recvfrom::<NetlinkAddr>(self.0.as_raw_fd(), &mut buffer) {
                Ok((_, Some(sender))) if sender.pid() != 0 => {}
                Ok((LONGEST.., _)) | Err(Errno::ENOBUFS) => return Ok(Some(Heard::Overrun)),
                Ok((length, _)) => {
                    if let Some(uevent) = parse(buffer.get(..length).unwrap_or_default()) {
                        return Ok(Some(Heard::Uevent(uevent)));
                    }
                }
                Err(Errno::EAGAIN) => return Ok(None),
                Err(Errno::EINTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Message captured on Linux 6.1.
    const CAPTURED: &str = "add@/devices/pci0000:00/0000:00:04.0/virtio2/host0/target0:0:0/0:0:0:3/block/sdb/sdb2\0\
        ACTION=add\0DEVPATH=/devices/pci0000:00/0000:00:04.0/virtio2/host0/target0:0:0/0:0:0:3/block/sdb/sdb2\0\
        SUBSYSTEM=block\0MAJOR=8\0MINOR=18\0DEVNAME=sdb2\0DEVTYPE=partition\0DISKSEQ=12\0PARTN=2\0SEQNUM=1234\0";

    #[test]
    fn captured_messages() {
        let place = "/sys/devices/pci0000:00/0000:00:04.0/virtio2/host0/target0:0:0/0:0:0:3/block/sdb/sdb2";
        let expected =
            Uevent { action: Action::Add, place: place.to_owned(), partition: true, disk: Some(12) };
        assert_eq!(parse(CAPTURED.as_bytes()), Some(expected.clone()));
        let old = CAPTURED.replace("add", "unbind").replace("DISKSEQ=12\0", "");
        assert_eq!(
            parse(old.as_bytes()),
            Some(Uevent { action: Action::Change, disk: None, ..expected.clone() })
        );
        let gone = CAPTURED.replace("add", "remove").replace("partition", "disk");
        let disk = Uevent { action: Action::Remove, partition: false, ..expected };
        assert_eq!(parse(gone.as_bytes()), Some(disk.clone()));
        let made_up = gone + "SYNTH_UUID=0\0";
        assert_eq!(parse(made_up.as_bytes()), Some(Uevent { action: Action::Change, ..disk }));
    }

    #[test]
    fn devices_that_begin_anew() {
        let device = "change@/devices/x/host0/target0:0:2/0:0:2:1\0ACTION=change\0\
            DEVPATH=/devices/x/host0/target0:0:2/0:0:2:1\0SUBSYSTEM=scsi\0DEVTYPE=scsi_device\0DRIVER=sd\0";
        let told = |more: &str| parse(format!("{device}{more}\0SEQNUM=7\0").as_bytes());
        let place = "/sys/devices/x/host0/target0:0:2/0:0:2:1".to_owned();
        let reset = Uevent { action: Action::Reset, place, partition: false, disk: None };
        assert_eq!(told("SDEV_UA=POWER_ON_RESET_OCCURRED"), Some(reset));
        assert_eq!(told("SDEV_UA=REPORTED_LUNS_DATA_HAS_CHANGED"), None);
        assert_eq!(told("SDEV_MEDIA_CHANGE=1"), None);
    }

    #[test]
    fn what_is_not_about_a_block_device_is_passed_over() {
        for message in [
            "",
            "add@/devices/x\0ACTION=add\0DEVPATH=/devices/x\0SUBSYSTEM=net\0",
            "add@/devices/x\0ACTION=add\0SUBSYSTEM=block\0",
            "add@/devices/x\0DEVPATH=/devices/x\0SUBSYSTEM=block\0",
            // udev's own messages begin with another head.
            "libudev\0ACTION=add\0DEVPATH=/devices/x\0SUBSYSTEM=block\0",
        ] {
            assert_eq!(parse(message.as_bytes()), None, "{message:?}");
        }
    }

    proptest! {
        #[test]
        fn any_bytes_will_do(bytes: Vec<u8>, cut in 0..CAPTURED.len()) {
            let _ = parse(&bytes);
            let _ = parse(&CAPTURED.as_bytes()[..cut]);
            let message = [CAPTURED.as_bytes(), b"\0", &bytes].concat();
            prop_assert!(parse(&message).is_none_or(|uevent| uevent.place.starts_with("/sys/")));
        }
    }
}
