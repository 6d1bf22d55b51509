//! `guestctl freeze` and `guestctl thaw`.

use std::time::{Duration, SystemTime};

use serde::Serialize;

use super::{SOON, answer};
use crate::ctl::Error;
use crate::ctl::client::Daemon;
use crate::ctl::json::rfc3339;
use crate::ctl::print::Printer;
use crate::ctl::words::age;
use crate::wire::proto::v1::{
    FreezeFileSystemsRequest, FreezeFileSystemsResponse, FreezeState, GetFreezeRequest, SnapshotCut,
    ThawFileSystemsRequest, ThawFileSystemsResponse,
};

/// Result of a freeze, for programs.
#[derive(Debug, Serialize)]
struct Frozen {
    mount_points: Vec<String>,
    seconds_left: u32,
}

/// Result of a thaw, for programs.
#[derive(Debug, Serialize)]
#[allow(clippy::struct_field_names, reason = "it is the key that programs read")]
struct Thawed {
    thawed: u32,
    receipt: String,
    level: String,
    reasons: Vec<String>,
}

/// State of the freeze, for programs.
#[derive(Debug, Serialize)]
struct Standing {
    frozen: bool,
    stage: String,
    holder: String,
    since: Option<String>,
    mount_points: Vec<String>,
    seconds_left: Option<u32>,
    spoiled: String,
}

/// Step before or after an operation that needs frozen file systems.
#[derive(Debug, Clone)]
pub enum Step {
    /// Freeze the file systems at these mount points, or all.
    Freeze {
        /// Mount points to freeze; empty for all.
        mounts: Vec<String>,
        /// Deadline of the freeze.
        within: Duration,
    },
    /// Thaw everything, with a description of the snapshot that was taken.
    Thaw(Option<SnapshotCut>),
}

/// Result of a step.
#[derive(Debug)]
pub enum Stepped {
    /// Frozen file systems.
    Frozen(FreezeFileSystemsResponse),
    /// Thawed file systems.
    Thawed(ThawFileSystemsResponse),
}

/// Carries out one of the steps.
///
/// # Errors
/// Fails if the guest cannot be reached, or refuses.
pub async fn step(daemon: &Daemon, name: &str, step: &Step) -> Result<Stepped, Error> {
    match step {
        Step::Freeze { mounts, within } => {
            ask_freeze(daemon, name, mounts.clone(), *within).await.map(Stepped::Frozen)
        }
        Step::Thaw(cut) => ask_thaw(daemon, name, Vec::new(), cut.clone(), SOON).await.map(Stepped::Thawed),
    }
}

async fn ask_freeze(
    daemon: &Daemon,
    name: &str,
    mount_points: Vec<String>,
    within: Duration,
) -> Result<FreezeFileSystemsResponse, Error> {
    let request = FreezeFileSystemsRequest { name: name.to_owned(), mount_points };
    answer(daemon.freeze().freeze_file_systems(request), name, within).await
}

async fn ask_thaw(
    daemon: &Daemon,
    name: &str,
    mount_points: Vec<String>,
    cut: Option<SnapshotCut>,
    within: Duration,
) -> Result<ThawFileSystemsResponse, Error> {
    let request = ThawFileSystemsRequest { name: name.to_owned(), mount_points, cut };
    answer(daemon.freeze().thaw_file_systems(request), name, within).await
}

/// Describes the receipt, such as `receipt 0123…: filesystem`; `None` without a receipt.
pub fn receipt_words(thawed: &ThawFileSystemsResponse) -> Option<String> {
    let ThawFileSystemsResponse { receipt, level, .. } = thawed;
    (!receipt.is_empty()).then(|| format!("receipt {receipt}: {level}"))
}

/// Returns why the level of the receipt is not higher.
pub fn why(thawed: &ThawFileSystemsResponse) -> Option<String> {
    let ThawFileSystemsResponse { receipt, level, reasons, .. } = thawed;
    (!receipt.is_empty() && !reasons.is_empty())
        .then(|| format!("not more than {level}: {}", reasons.join("; ")))
}

/// Freezes, and shows what is frozen and for how long.
///
/// # Errors
/// Fails if nothing was frozen, or that is not known.
pub async fn freeze(
    daemon: &Daemon,
    printer: &mut Printer,
    name: String,
    mounts: Vec<String>,
    within: Duration,
) -> Result<(), Error> {
    let frozen = ask_freeze(daemon, &name, mounts, within).await?;
    let words = words(&frozen);
    let FreezeFileSystemsResponse { mount_points, seconds_left } = frozen;
    Ok(printer.value(&Frozen { mount_points, seconds_left }, || words + "\n")?)
}

/// Describes a freeze, such as `frozen: / /data; thawed by itself after 119 s`.
pub fn words(frozen: &FreezeFileSystemsResponse) -> String {
    if frozen.mount_points.is_empty() {
        return "nothing is frozen: the guest has no file system that can be frozen".to_owned();
    }
    let (mounts, left) = (frozen.mount_points.join(" "), frozen.seconds_left);
    format!("frozen: {mounts}; the guest thaws by itself after {left} s")
}

/// Thaws, and shows how many file systems were frozen.
///
/// # Errors
/// Fails if the freeze had ended before, or something stays frozen.
pub async fn thaw(
    daemon: &Daemon,
    printer: &mut Printer,
    name: String,
    mounts: Vec<String>,
    within: Duration,
) -> Result<(), Error> {
    let answer = ask_thaw(daemon, &name, mounts, None, within).await?;
    if let Some(why) = why(&answer) {
        printer.note(&why);
    }
    let receipt = receipt_words(&answer).map(|words| words + "\n").unwrap_or_default();
    let ThawFileSystemsResponse { thawed, receipt: id, level, reasons } = answer;
    let words = || format!("thawed: {thawed} file systems\n{receipt}");
    Ok(printer.value(&Thawed { thawed, receipt: id, level, reasons }, words)?)
}

/// Shows whether file systems are frozen.
///
/// # Errors
/// Fails if the guest cannot be reached.
pub async fn status(daemon: &Daemon, printer: &mut Printer, name: String) -> Result<(), Error> {
    let request = GetFreezeRequest { name: name.clone() };
    let state = answer(daemon.freeze().get_freeze(request), &name, SOON).await?;
    let words = standing_words(&state, SystemTime::now());
    let standing = Standing {
        frozen: !state.stage.is_empty(),
        stage: state.stage,
        holder: state.holder,
        since: state.since.map(rfc3339),
        mount_points: state.mount_points,
        seconds_left: state.seconds_left,
        spoiled: state.spoiled,
    };
    Ok(printer.value(&standing, || words + "\n")?)
}

fn standing_words(state: &FreezeState, now: SystemTime) -> String {
    if !state.stage.is_empty() {
        let FreezeState { stage: step, holder, .. } = state;
        let age = age(state.since.as_ref(), now);
        let mounts = state.mount_points.join(" ");
        let left = state.seconds_left.map(|left| format!("; the guest thaws by itself after {left} s"));
        return format!("{step}, for {holder}, for {age}: {mounts}{}", left.unwrap_or_default());
    }
    match state.spoiled.as_str() {
        "" => "nothing is frozen".to_owned(),
        spoiled => format!("nothing is frozen any more: {spoiled}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn how_things_stand_is_said() {
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(100);
        assert_eq!(standing_words(&FreezeState::default(), now), "nothing is frozen");
        let state = FreezeState {
            stage: "frozen".into(),
            holder: "the host half for uid:0 root".into(),
            since: Some(prost_types::Timestamp { seconds: 90, nanos: 0 }),
            mount_points: vec!["/".into(), "/data".into()],
            seconds_left: Some(110),
            spoiled: String::new(),
        };
        let expected = "frozen, for the host half for uid:0 root, for 10s: / /data; the guest thaws by itself after 110 s";
        assert_eq!(standing_words(&state, now), expected);
        let spoiled = FreezeState { spoiled: "the freeze ended by itself".into(), ..FreezeState::default() };
        assert_eq!(standing_words(&spoiled, now), "nothing is frozen any more: the freeze ended by itself");
    }
}
