//! What goes over the streams: framings and messages. Pure: bytes in, values out, no I/O.

pub mod proto;
pub mod qga;
