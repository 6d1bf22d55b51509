//! Disks of the guest: which exist, what distinguishes them, and what uses them.
//! ([`block_devices`](super::block_devices) reports them to QGA clients.)
//!
//! [`room`] has every whole disk with its identity ([`identity`]), finds the one that a selector means
//! ([`lookup`]) and waits for it. The state is kept by [`tracker`], which the monitor of disks drives; [`uses`]
//! reports what a disk is used for, [`openers`] who else has it open, and [`release`] releases one that is to be
//! unplugged; [`releases`] remembers where disks were.
//!
//! [`location`] derives the location of a disk from its path in sysfs (pure, except for the look-up functions that
//! it is given). Hosts match it with what they gave the guest, so that the numbers are those of QEMU's command
//! line.

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
