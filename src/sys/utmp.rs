//! Parser of utmp(5), where systems that still have it write down who is logged in.

use std::mem::{MaybeUninit, size_of};
use std::time::Duration;

use nix::libc;

/// Login session of a user.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Login name.
    pub user: String,
    /// When, since the epoch.
    pub since: Duration,
}

/// Parses the login sessions, in the order of the file. A truncated record is skipped.
pub fn parse(file: &[u8]) -> Vec<Entry> {
    file.chunks_exact(size_of::<libc::utmpx>()).filter_map(record).collect()
}

fn record(bytes: &[u8]) -> Option<Entry> {
    let mut record = MaybeUninit::<libc::utmpx>::zeroed();
    let length = bytes.len().min(size_of::<libc::utmpx>());
    // SAFETY: the target is a value of at least that length of its own.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), record.as_mut_ptr().cast(), length) };
    // SAFETY: it holds integers only, for which all bytes are values, and each is initialised.
    let record = unsafe { record.assume_init() };
    if record.ut_type != libc::USER_PROCESS {
        return None;
    }
    let name: Vec<u8> =
        record.ut_user.iter().map(|byte| byte.cast_unsigned()).take_while(|byte| *byte != 0).collect();
    // Both are narrower on some architectures.
    #[allow(clippy::useless_conversion, clippy::unnecessary_fallible_conversions, reason = "as above")]
    let (seconds, microseconds) =
        (u64::try_from(record.ut_tv.tv_sec).ok()?, u64::try_from(record.ut_tv.tv_usec).unwrap_or_default());
    let since = Duration::from_secs(seconds).checked_add(Duration::from_micros(microseconds))?;
    Some(Entry { user: String::from_utf8_lossy(&name).into_owned(), since })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A record as x86-64 has it: type, process, line, id, user, host, …, session, seconds, microseconds.
    fn bytes(kind: i16, user: &[u8], seconds: i32, microseconds: i32) -> Vec<u8> {
        let mut record = vec![0; 384];
        record[..2].copy_from_slice(&kind.to_le_bytes());
        record[8..12].copy_from_slice(b"tty1");
        record[44..44 + user.len()].copy_from_slice(user);
        record[340..344].copy_from_slice(&seconds.to_le_bytes());
        record[344..348].copy_from_slice(&microseconds.to_le_bytes());
        record
    }

    #[test]
    #[cfg(target_arch = "x86_64")]
    fn users_and_nobody_else() {
        let longest = [b'x'; 32];
        let mut file = [
            bytes(2, b"reboot", 1, 0),
            bytes(7, b"root", 1_795_272_819, 250_000),
            bytes(8, b"gone", 5, 0),
            bytes(7, &longest, 7, 0),
            bytes(7, b"before", -1, 0),
        ]
        .concat();
        file.extend([0; 100]);
        let entries = parse(&file);
        assert_eq!(
            entries,
            [
                Entry { user: "root".to_owned(), since: Duration::from_millis(1_795_272_819_250) },
                Entry { user: "x".repeat(32), since: Duration::from_secs(7) },
            ]
        );
        assert!(parse(b"").is_empty());
    }
}
