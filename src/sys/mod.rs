//! Boundary to the operating system: all paths, all parsers of what the kernel reports, and all effects.
//!
//! Paths go through [`root::Root`]; parsers are pure functions of bytes; `unsafe` and calls that a test cannot
//! represent as files stay in the file for their subject. To add one, add a file for its subject.

#[cfg(feature = "agent")]
pub mod accounts;
pub mod activation;
#[cfg(feature = "host")]
pub mod allocation;
#[cfg(feature = "agent")]
pub mod as_user;
#[cfg(any(feature = "agent", feature = "ctl"))]
pub mod beneath;
#[cfg(feature = "agent")]
pub mod block;
#[cfg(feature = "agent")]
pub mod block_device;
#[cfg(feature = "agent")]
pub mod block_stack;
#[cfg(any(feature = "agent", feature = "ctl", feature = "host"))]
pub mod blocking;
pub mod calendar;
#[cfg(feature = "host")]
pub mod capabilities;
#[cfg(feature = "agent")]
pub mod cgroup;
#[cfg(feature = "agent")]
pub mod clock;
#[cfg(feature = "agent")]
pub mod confidential;
#[cfg(feature = "host")]
pub mod connections;
#[cfg(feature = "agent")]
pub mod crc32;
#[cfg(feature = "agent")]
pub mod daemon;
#[cfg(any(feature = "agent", feature = "ctl", feature = "host"))]
pub mod descriptor;
#[cfg(feature = "host")]
pub mod directory;
#[cfg(feature = "agent")]
pub mod disk_serial;
#[cfg(feature = "agent")]
pub mod diskstats;
#[cfg(feature = "agent")]
pub mod effects;
pub mod error_chain;
#[cfg(any(feature = "agent", feature = "ctl"))]
pub mod extended_attributes;
#[cfg(feature = "agent")]
pub mod file_news;
pub mod files;
#[cfg(feature = "agent")]
pub mod folder_news;
#[cfg(feature = "agent")]
pub mod folders;
#[cfg(feature = "host")]
pub mod host_name;
#[cfg(feature = "agent")]
pub mod inotify;
#[cfg(feature = "host")]
pub mod interface_addresses;
#[cfg(feature = "host")]
pub mod ip_forwarding;
#[cfg(feature = "host")]
pub mod lease;
#[cfg(feature = "agent")]
pub mod link_news;
pub mod logging;
#[cfg(feature = "agent")]
pub mod memory;
#[cfg(feature = "agent")]
pub mod mount_point;
#[cfg(feature = "agent")]
pub mod mountinfo;
#[cfg(feature = "agent")]
pub mod mounting;
#[cfg(feature = "host")]
pub mod neighbours;
#[cfg(feature = "kubevirt")]
pub mod net_namespace;
#[cfg(feature = "host")]
mod netlink;
#[cfg(feature = "agent")]
pub mod nvme;
#[cfg(feature = "agent")]
pub mod open;
#[cfg(feature = "agent")]
pub mod os_release;
#[cfg(feature = "agent")]
pub mod partition_table;
#[cfg(feature = "agent")]
pub mod pid_file;
#[cfg(feature = "kubevirt")]
pub mod pod_cgroup;
#[cfg(feature = "agent")]
pub mod proc_stat;
#[cfg(any(feature = "agent", feature = "kubevirt"))]
pub mod process;
#[cfg(any(feature = "agent", feature = "host"))]
pub mod process_end;
#[cfg(feature = "agent")]
pub mod process_group;
#[cfg(any(feature = "agent", feature = "host"))]
pub mod program;
#[cfg(feature = "host")]
pub mod pseudo_terminal;
#[cfg(feature = "agent")]
pub mod refused;
pub mod root;
#[cfg(feature = "agent")]
pub mod routes;
#[cfg(feature = "agent")]
pub mod rtnetlink;
#[cfg(feature = "agent")]
pub mod scsi_inquiry;
pub mod service;
#[cfg(feature = "agent")]
pub mod smbios;
#[cfg(any(feature = "agent", feature = "ctl", feature = "host"))]
pub mod socket;
#[cfg(feature = "agent")]
pub mod spawn;
#[cfg(feature = "agent")]
pub mod spawn_manner;
#[cfg(feature = "agent")]
pub mod superblock;
#[cfg(feature = "agent")]
pub mod swaps;
#[cfg(feature = "agent")]
pub mod sysfs;
#[cfg(any(feature = "ccm", feature = "host"))]
pub mod tcp;
#[cfg(any(feature = "agent", feature = "ctl"))]
pub mod terminal;
#[cfg(feature = "agent")]
pub mod ticker;
#[cfg(feature = "agent")]
pub mod udev;
#[cfg(feature = "agent")]
pub mod uevents;
#[cfg(feature = "agent")]
pub mod unattached;
#[cfg(any(feature = "agent", feature = "host"))]
pub mod usage;
#[cfg(feature = "agent")]
pub mod user_files;
#[cfg(feature = "agent")]
pub mod user_identity;
#[cfg(feature = "host")]
pub mod users;
#[cfg(feature = "agent")]
pub mod utmp;
#[cfg(feature = "agent")]
pub mod vital_product_data;
#[cfg(feature = "agent")]
pub mod zeros;
