//! The operating system's boundary: every path, every parser of what the kernel says, every effect.
//!
//! Paths go through [`root::Root`]; parsers are pure functions of bytes; `unsafe` and calls that a test
//! cannot lay out as files stay in the file that is about them. To add one: a file for its subject.

pub mod activation;
#[cfg(feature = "agent")]
pub mod block;
#[cfg(feature = "agent")]
pub mod blocking;
#[cfg(feature = "agent")]
pub mod calendar;
#[cfg(feature = "agent")]
pub mod clock;
#[cfg(feature = "agent")]
pub mod daemon;
#[cfg(any(feature = "agent", feature = "host"))]
pub mod descriptor;
#[cfg(feature = "agent")]
pub mod disk_serial;
#[cfg(feature = "agent")]
pub mod diskstats;
#[cfg(feature = "agent")]
pub mod effects;
pub mod error_chain;
#[cfg(feature = "agent")]
pub mod files;
#[cfg(feature = "host")]
pub mod host_name;
#[cfg(feature = "agent")]
pub mod link_news;
pub mod logging;
#[cfg(feature = "agent")]
pub mod memory;
#[cfg(feature = "agent")]
pub mod mountinfo;
#[cfg(feature = "agent")]
pub mod net_dev;
#[cfg(feature = "agent")]
pub mod nvme;
#[cfg(feature = "agent")]
pub mod open;
#[cfg(feature = "agent")]
pub mod os_release;
#[cfg(feature = "agent")]
pub mod pid_file;
#[cfg(feature = "agent")]
pub mod proc_stat;
#[cfg(feature = "agent")]
pub mod program;
pub mod root;
#[cfg(feature = "agent")]
pub mod routes;
pub mod service;
#[cfg(feature = "agent")]
pub mod sysfs;
#[cfg(feature = "agent")]
pub mod ticker;
#[cfg(feature = "agent")]
pub mod udev;
#[cfg(feature = "agent")]
pub mod usage;
#[cfg(feature = "agent")]
pub mod utmp;
