//! Words of a guest, made fit for tables and logs: bounded, and without anything that steers a terminal.

use std::collections::HashMap;
use std::fmt::Write as _;

use prost_types::Timestamp;

use crate::sys::error_chain;
use crate::wire::proto::v1::{self, event::Kind};

/// Longest text that is taken from a guest, in characters.
pub const MAX_TEXT: usize = 256;
/// Longest explanation that is kept, in characters.
const MAX_WORDS: usize = 4096;
/// Longest line of a log, in characters.
const MAX_LINE: usize = 1 << 16;
/// Most capabilities that are taken from a guest.
const MAX_CAPABILITIES: usize = 64;
/// Most serial numbers, and most partitions and holders, that are taken of one disk.
const MAX_SERIALS: usize = 8;
const MAX_PARTS: usize = 64;
/// Most uses of a disk that is gone.
const MAX_USES: usize = 64;
/// Most labels of a Node or a topology.
const MAX_LABELS: usize = 256;
/// Most taints, addresses and units.
const MAX_LISTED: usize = 64;
/// The year 10000 in seconds since 1970: later times cannot be written as RFC 3339 has it.
const YEAR_10000: i64 = 253_402_300_800;

/// Replaces what is not visible and cuts what is too long.
pub fn clean(text: &str) -> String {
    clean_to(text, MAX_TEXT)
}

/// The same of an explanation, which may be longer: it may name all that is in the way of something.
pub fn clean_words(text: &str) -> String {
    clean_to(text, MAX_WORDS)
}

/// The same of lines that somebody has logged: line feeds stay, and tabulators become spaces.
pub fn clean_lines(text: &str) -> String {
    let line = |line: &str| clean_to(&line.replace('\t', " "), MAX_LINE);
    text.split('\n').map(line).collect::<Vec<_>>().join("\n")
}

fn clean_to(text: &str, most: usize) -> String {
    let mut cleaned: String =
        text.chars().take(most).map(|one| if is_hidden(one) { '\u{fffd}' } else { one }).collect();
    if text.chars().nth(most).is_some() {
        cleaned.push('…');
    }
    // It may be kept for long.
    cleaned.shrink_to_fit();
    cleaned
}

/// A line of JSON from a guest, without its end; what is not visible in its strings is written as JSON can write it. None if it
/// is no JSON. The byte 0xFF, with which QGA begins some answers, is taken off.
pub fn clean_json(line: &[u8]) -> Option<String> {
    let text = std::str::from_utf8(line.strip_prefix(b"\xff").unwrap_or(line)).ok()?;
    serde_json::from_str::<serde::de::IgnoredAny>(text).ok()?;
    let mut cleaned = String::with_capacity(text.len());
    for one in text.trim_end().chars() {
        match one {
            // Between tokens: in strings they are not allowed.
            '\n' | '\r' | '\t' => cleaned.push(' '),
            one if is_hidden(one) => {
                for unit in one.encode_utf16(&mut [0; 2]) {
                    // Writing to a String cannot fail.
                    let _ = write!(cleaned, "\\u{unit:04x}");
                }
            }
            one => cleaned.push(one),
        }
    }
    Some(cleaned)
}

/// Control characters, and those that reorder or hide the text around them.
fn is_hidden(one: char) -> bool {
    one.is_control()
        || matches!(one, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}')
}

/// What a guest says of itself, cleaned.
pub fn clean_info(info: v1::GuestInfo) -> v1::GuestInfo {
    v1::GuestInfo {
        machine_id: clean(&info.machine_id),
        boot_id: clean(&info.boot_id),
        dmi_uuid: clean(&info.dmi_uuid).to_lowercase(),
        host_name: clean(&info.host_name),
        operating_system: info.operating_system.map(|system| v1::OperatingSystem {
            id: clean(&system.id),
            name: clean(&system.name),
            pretty_name: clean(&system.pretty_name),
            version_id: clean(&system.version_id),
        }),
        kernel_release: clean(&info.kernel_release),
        machine: clean(&info.machine),
        agent_version: clean(&info.agent_version),
        capabilities: info.capabilities.iter().take(MAX_CAPABILITIES).map(|name| clean(name)).collect(),
        heartbeat_interval_seconds: info.heartbeat_interval_seconds,
    }
}

/// Cleans an event of a guest where it is. Lists without a limit of their own are cut to what is shown.
pub fn clean_event(event: &mut v1::Event) {
    event.time = event.time.filter(can_be_written);
    event.kind.iter_mut().for_each(clean_kind);
}

/// Whether a guest's time is one that can be written as RFC 3339 has it.
pub fn can_be_written(time: &Timestamp) -> bool {
    (0..YEAR_10000).contains(&time.seconds) && (0..1_000_000_000).contains(&time.nanos)
}

fn clean_kind(kind: &mut Kind) {
    match kind {
        Kind::AgentReady(ready) => {
            tidy(&mut ready.run_id);
            ready.state.as_deref_mut().into_iter().for_each(clean_state);
        }
        Kind::ShutdownRequested(request) => tidy(&mut request.mode),
        Kind::InterfacesChanged(change) => change.interfaces.iter_mut().for_each(clean_interface),
        Kind::FileSystemMounted(mounted) => mounted.file_system.iter_mut().for_each(clean_file_system),
        Kind::FileSystemUnmounted(unmounted) => unmounted.file_system.iter_mut().for_each(clean_file_system),
        Kind::UserLoggedIn(login) => login.session.iter_mut().for_each(clean_session),
        Kind::UserLoggedOut(logout) => logout.session.iter_mut().for_each(clean_session),
        Kind::Thawed(thawed) => {
            tidy_all([&mut thawed.holder, &mut thawed.end, &mut thawed.problem]);
            tidy_all([&mut thawed.receipt, &mut thawed.level]);
        }
        Kind::Frozen(frozen) => tidy(&mut frozen.holder),
        Kind::DiskAdded(added) => added.disk.iter_mut().for_each(clean_disk),
        Kind::DiskRemoved(removed) => {
            removed.disk.iter_mut().for_each(clean_disk);
            tidy_list(&mut removed.in_use, MAX_USES);
        }
        Kind::DiskResized(resized) => resized.disk.iter_mut().for_each(clean_disk),
        Kind::DiskChanged(changed) => changed.disk.iter_mut().for_each(clean_disk),
        Kind::DiskMounted(mounted) => {
            mounted.disk.iter_mut().for_each(clean_disk);
            tidy_all([&mut mounted.mount_point, &mut mounted.r#type]);
        }
        Kind::DiskFailed(failed) => {
            failed.disk.iter_mut().for_each(clean_disk);
            tidy(&mut failed.problem);
        }
        Kind::TopologyChanged(changed) => changed.topology.iter_mut().for_each(clean_topology),
        Kind::TopologyRefused(refused) => tidy(&mut refused.problem),
        Kind::NodeChanged(changed) => changed.node.iter_mut().for_each(clean_node),
        Kind::HealthChanged(changed) => changed.health.iter_mut().for_each(clean_health),
        Kind::Heartbeat(_)
        | Kind::AgentStopping(_)
        | Kind::AgentStarted(_)
        | Kind::ShutdownBegun(_)
        | Kind::ClockJumped(_)
        | Kind::Suspending(_)
        | Kind::Resumed(_) => {}
    }
}

/// Cleans a text where it is: most of them have nothing to be cleaned.
fn tidy(text: &mut String) {
    let is_short = text.len() <= MAX_TEXT || text.chars().nth(MAX_TEXT).is_none();
    if is_short && !text.chars().any(is_hidden) {
        text.shrink_to_fit();
    } else {
        *text = clean(text);
    }
}

fn tidy_all<'t>(texts: impl IntoIterator<Item = &'t mut String>) {
    texts.into_iter().for_each(tidy);
}

/// Cuts a list, and gives back what the rest of it took.
fn cut<T>(list: &mut Vec<T>, most: usize) {
    list.truncate(most);
    list.shrink_to_fit();
}

fn tidy_list(list: &mut Vec<String>, most: usize) {
    cut(list, most);
    tidy_all(list);
}

fn clean_state(state: &mut v1::GuestState) {
    // How many these may have is limited by the settings: more are not even decoded.
    state.interfaces.iter_mut().for_each(clean_interface);
    state.file_systems.iter_mut().for_each(clean_file_system);
    state.users.iter_mut().for_each(clean_session);
    state.disks.iter_mut().for_each(clean_disk);
    state.topology.iter_mut().for_each(clean_topology);
    state.node.iter_mut().for_each(clean_node);
    state.health.iter_mut().for_each(clean_health);
    state.freeze.iter_mut().for_each(clean_freeze);
}

fn clean_freeze(freeze: &mut v1::LastFreeze) {
    tidy_all([&mut freeze.holder, &mut freeze.end, &mut freeze.problem]);
    tidy_all([&mut freeze.receipt, &mut freeze.level]);
    freeze.since = freeze.since.filter(can_be_written);
    // A time that cannot be written is an end all the same.
    freeze.ended =
        freeze.ended.map(|ended| if can_be_written(&ended) { ended } else { Timestamp::default() });
}

fn clean_labels(labels: &mut HashMap<String, String>) {
    let all = std::mem::take(labels).into_iter().take(MAX_LABELS);
    *labels = all.map(|(key, value)| (clean(&key), clean(&value))).collect();
}

fn clean_topology(topology: &mut v1::Topology) {
    tidy_all([&mut topology.region, &mut topology.zone, &mut topology.host]);
    clean_labels(&mut topology.labels);
}

fn clean_node(node: &mut v1::Node) {
    tidy_all([&mut node.name, &mut node.state, &mut node.reason, &mut node.ready, &mut node.ready_reason]);
    tidy_all([&mut node.provider_id, &mut node.kubelet_version]);
    clean_labels(&mut node.labels);
    tidy_list(&mut node.taints, MAX_LISTED);
    tidy_list(&mut node.addresses, MAX_LISTED);
}

fn clean_health(health: &mut v1::Health) {
    tidy(&mut health.cloud_init);
    tidy_list(&mut health.cloud_init_errors, MAX_LISTED);
    tidy_list(&mut health.failed_units, MAX_LISTED);
}

fn clean_disk(disk: &mut v1::Disk) {
    tidy_all([&mut disk.name, &mut disk.file, &mut disk.bus, &mut disk.alias, &mut disk.world_wide_name]);
    tidy_all([&mut disk.pci_address, &mut disk.scsi_address]);
    cut(&mut disk.serials, MAX_SERIALS);
    tidy_all(disk.serials.iter_mut().flat_map(|serial| [&mut serial.value, &mut serial.source]));
    cut(&mut disk.partitions, MAX_PARTS);
    tidy_all(disk.partitions.iter_mut().map(|partition| &mut partition.name));
    cut(&mut disk.holders, MAX_PARTS);
    tidy_all(
        disk.holders.iter_mut().flat_map(|holder| [&mut holder.name, &mut holder.alias, &mut holder.of]),
    );
}

fn clean_interface(interface: &mut v1::NetworkInterface) {
    tidy_all([&mut interface.name, &mut interface.hardware_address]);
    tidy_all(&mut interface.addresses);
}

fn clean_file_system(file_system: &mut v1::MountedFileSystem) {
    tidy_all([&mut file_system.mount_point, &mut file_system.source, &mut file_system.r#type]);
}

fn clean_session(session: &mut v1::UserSession) {
    tidy_all([&mut session.id, &mut session.user, &mut session.terminal, &mut session.remote_host]);
}

/// An error and what it came from, in one line, cleaned.
pub fn chain(error: &dyn std::error::Error) -> String {
    clean(&error_chain::words(error))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn texts() {
        assert_eq!(clean("Debian GNU/Linux 12 – ünïcödé 漢字"), "Debian GNU/Linux 12 – ünïcödé 漢字");
        assert_eq!(
            clean("a\u{1b}[2Jb\n\t\r\0\u{9b}"),
            "a\u{fffd}[2Jb\u{fffd}\u{fffd}\u{fffd}\u{fffd}\u{fffd}"
        );
        assert_eq!(clean("x\u{202e}y"), "x\u{fffd}y");
        assert_eq!(clean(&"ü".repeat(256)), "ü".repeat(256));
        assert_eq!(clean(&"ü".repeat(257)), "ü".repeat(256) + "…");
    }

    #[test]
    fn times_that_cannot_be_written_are_dropped() {
        for (seconds, can_be) in [(1_700_000_000, true), (i64::MAX, false), (-1, false)] {
            let time = Some(Timestamp { seconds, nanos: 5 });
            let mut event = v1::Event { time, ..v1::Event::default() };
            clean_event(&mut event);
            assert_eq!(event.time.is_some(), can_be, "{seconds}");
        }
    }

    proptest! {
        #[test]
        fn nothing_hidden_is_left(text: String) {
            let cleaned = clean(&text);
            prop_assert!(cleaned.chars().count() <= MAX_TEXT + 1);
            prop_assert!(!cleaned.chars().any(is_hidden));
            let mut tidied = text;
            tidy(&mut tidied);
            prop_assert_eq!(tidied, cleaned);
        }
    }
}
