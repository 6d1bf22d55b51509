//! Connections over TCP with a peer that may vanish without a word.

use std::io;
use std::os::fd::AsFd;

use nix::sys::socket::{setsockopt, sockopt};

/// After how many seconds of silence a peer is asked whether it is there, and how often.
const IDLE: u32 = 10;
const INTERVAL: u32 = 5;
/// How often it may not answer.
const PROBES: u32 = 3;
/// Milliseconds after which a peer is gone that does not say that it has got what was sent.
const UNACKNOWLEDGED: u32 = 20_000;

/// Breaks the connection some 25 s after its peer is no longer there.
///
/// # Errors
/// If the kernel refuses it.
pub fn notice_silence(stream: &impl AsFd) -> io::Result<()> {
    setsockopt(stream, sockopt::KeepAlive, &true)?;
    setsockopt(stream, sockopt::TcpKeepIdle, &IDLE)?;
    setsockopt(stream, sockopt::TcpKeepInterval, &INTERVAL)?;
    setsockopt(stream, sockopt::TcpKeepCount, &PROBES)?;
    setsockopt(stream, sockopt::TcpUserTimeout, &UNACKNOWLEDGED)?;
    Ok(())
}
