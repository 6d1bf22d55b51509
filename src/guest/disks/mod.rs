//! Disks: which there are, what tells each from others, and who uses it. ([`block_devices`](super::block_devices) tells QGA clients
//! of them.)
//!
//! [`room`] has every whole disk with all that tells it from others ([`identity`]), finds the one that is meant ([`lookup`]) and
//! waits for it. What is there is kept by [`tracker`], which the monitor of disks drives; [`uses`] says what a disk is used for,
//! [`openers`] who else has it open, and [`release`] lets go of one that is to be unplugged; [`releases`] remembers where disks were.
//!
//! [`location`] reads the place of a disk out of its path in sysfs (pure, but for what it is given to look things up with). Hosts
//! match it with what they gave the guest, so that the numbers are those of QEMU's command line.

pub mod identity;
pub mod location;
pub mod lookup;
pub mod openers;
pub mod release;
pub mod releases;
pub mod room;
pub mod tracker;
pub mod uses;

#[cfg(test)]
mod tests;
