//! Wire formats: framings and messages of the streams. Pure: bytes in, values out, no I/O.

pub mod codec;
#[cfg(any(feature = "agent", feature = "ctl", feature = "host"))]
pub mod exec;
#[cfg(any(feature = "agent", feature = "ctl", feature = "host"))]
pub mod files;
#[cfg(any(feature = "kubevirt", feature = "ctl"))]
pub mod guest_object;
pub mod heap;
#[cfg(feature = "host")]
pub mod hybrid;
pub mod messages;
pub mod proto;
pub mod qga;
#[cfg(feature = "host")]
pub mod qmp;
#[cfg(any(feature = "agent", feature = "host"))]
pub mod switches;
pub mod weigh;
