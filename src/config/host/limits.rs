//! The `[limits]` table: limits on the resources that one guest may use. For missing keys, the host half has
//! defaults.
//!
//! To add one: a field, and its line in `check`.

use serde::Deserialize;
use toml::Spanned;

use super::super::Error;
use super::Source;

/// Limits that are set explicitly.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[allow(missing_docs, reason = "they are described where they are used, at host::limits")]
pub struct LimitSettings {
    pub message_bytes: Option<u32>,
    pub bytes_per_second: Option<u32>,
    pub events_per_second: Option<u32>,
    pub event_burst: Option<u32>,
    pub events_kept: Option<u32>,
    pub history_bytes: Option<u32>,
    pub state_bytes: Option<u32>,
    pub interfaces: Option<u32>,
    pub addresses: Option<u32>,
    pub file_systems: Option<u32>,
    pub users: Option<u32>,
    pub disks: Option<u32>,
    pub calls_per_second: Option<u32>,
    pub open_calls: Option<u32>,
    pub unread_seconds: Option<u32>,
    pub busy_seconds: Option<u32>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub(super) struct LimitsFragment {
    message_bytes: Option<Spanned<u32>>,
    bytes_per_second: Option<Spanned<u32>>,
    events_per_second: Option<Spanned<u32>>,
    event_burst: Option<Spanned<u32>>,
    events_kept: Option<Spanned<u32>>,
    history_bytes: Option<Spanned<u32>>,
    state_bytes: Option<Spanned<u32>>,
    interfaces: Option<Spanned<u32>>,
    addresses: Option<Spanned<u32>>,
    file_systems: Option<Spanned<u32>>,
    users: Option<Spanned<u32>>,
    disks: Option<Spanned<u32>>,
    calls_per_second: Option<Spanned<u32>>,
    open_calls: Option<Spanned<u32>>,
    unread_seconds: Option<Spanned<u32>>,
    busy_seconds: Option<Spanned<u32>>,
}

const KIB: u32 = 1024;
const MIB: u32 = 1024 * KIB;

/// Merges the settings of this fragment into those before.
pub(super) fn check(
    source: &Source,
    found: &LimitsFragment,
    limits: &mut LimitSettings,
) -> Result<(), Error> {
    let table = [
        ("message-bytes", &found.message_bytes, &mut limits.message_bytes, 4 * KIB, 16 * MIB),
        ("bytes-per-second", &found.bytes_per_second, &mut limits.bytes_per_second, 4 * KIB, 1024 * MIB),
        ("events-per-second", &found.events_per_second, &mut limits.events_per_second, 1, 100_000),
        ("event-burst", &found.event_burst, &mut limits.event_burst, 16, 100_000),
        ("events-kept", &found.events_kept, &mut limits.events_kept, 0, 100_000),
        ("history-bytes", &found.history_bytes, &mut limits.history_bytes, 0, 64 * MIB),
        ("state-bytes", &found.state_bytes, &mut limits.state_bytes, 16 * KIB, 1024 * MIB),
        ("interfaces", &found.interfaces, &mut limits.interfaces, 1, 65_536),
        ("addresses", &found.addresses, &mut limits.addresses, 1, 65_536),
        ("file-systems", &found.file_systems, &mut limits.file_systems, 1, 65_536),
        ("users", &found.users, &mut limits.users, 1, 65_536),
        ("disks", &found.disks, &mut limits.disks, 1, 65_536),
        ("calls-per-second", &found.calls_per_second, &mut limits.calls_per_second, 1, 100_000),
        ("open-calls", &found.open_calls, &mut limits.open_calls, 1, 1024),
        ("unread-seconds", &found.unread_seconds, &mut limits.unread_seconds, 1, 3600),
        ("busy-seconds", &found.busy_seconds, &mut limits.busy_seconds, 1, 60),
    ];
    for (key, found, limit, least, most) in table {
        let Some(found) = found else { continue };
        let number = *found.get_ref();
        if !(least..=most).contains(&number) {
            let problem = format!("limits.{key} = {number}: use {least} to {most}");
            return Err(source.wrong(found, problem));
        }
        *limit = Some(number);
    }
    Ok(())
}
