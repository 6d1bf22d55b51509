//! Output of a receipt for users.

use super::envelope::Verdict;
use super::{Level, Moment, Receipt};
use crate::text;

/// Formats a receipt as lines of names and values.
pub fn words(receipt: &Receipt, verdict: &str) -> String {
    let mut lines: Vec<(&str, String)> = vec![
        ("Receipt", receipt.id.clone()),
        ("Level", receipt.level.word().to_owned()),
        ("Signature", verdict.to_owned()),
        ("Guest", guest(receipt)),
        ("For", caller(receipt)),
        ("Ended", end(receipt)),
    ];
    for (place, reason) in receipt.reasons.iter().enumerate() {
        lines.insert(2 + place, (if place == 0 { "Not more" } else { "" }, reason.clone()));
    }
    let times = &receipt.times;
    for (name, moment) in [
        ("Asked", &times.asked),
        ("Hooks begun", &times.hooks_begun),
        ("Hooks ended", &times.hooks_ended),
        ("Frozen", &times.frozen),
        ("Thaw asked", &times.thaw_asked),
        ("Thawed", &times.thawed),
    ] {
        lines.extend(moment.as_ref().map(|moment| (name, self::moment(moment))));
    }
    lines.push(("Snapshot", cut(receipt)));
    list(&mut lines, "Hooks", receipt.hooks.iter().cloned());
    list(
        &mut lines,
        "Applications",
        receipt.applications.iter().map(|one| {
            let evidence = one.evidence.iter().map(|(name, value)| format!(" {name}={value}"));
            let evidence = evidence.collect::<String>();
            let problem = if one.problem.is_empty() { String::new() } else { format!("; {}", one.problem) };
            format!("{} ({}): {}{evidence}{problem}", one.name, one.instance, one.level.word())
        }),
    );
    list(
        &mut lines,
        "File systems",
        receipt.volumes.iter().map(|one| {
            let disks =
                one.disks.iter().map(|disk| format!(" on {} [{}]", disk.file, text::or_dash(&disk.serial)));
            let disks = disks.collect::<String>();
            let problem = if one.problem.is_empty() { String::new() } else { format!("; {}", one.problem) };
            let uuid = text::or_dash(&one.uuid);
            let level = one.level.word();
            format!("{} ({} {uuid}){disks}: {level}{problem}", one.mount_point, one.kind)
        }),
    );
    list(
        &mut lines,
        "Not frozen",
        receipt.not_frozen.iter().map(|one| format!("{} ({}): {}", one.mount_point, one.kind, one.reason)),
    );
    if receipt.left_out > 0 {
        lines.push(("Left out", format!("{} entries of these lists", receipt.left_out)));
    }
    let colon = |key: &str| if key.is_empty() { String::new() } else { format!("{key}:") };
    text::table(&lines.into_iter().map(|(key, value)| [colon(key), value]).collect::<Vec<_>>())
}

fn list(lines: &mut Vec<(&str, String)>, name: &'static str, entries: impl Iterator<Item = String>) {
    lines.extend(std::iter::once(name).chain(std::iter::repeat("")).zip(entries));
}

fn guest(receipt: &Receipt) -> String {
    let guest = &receipt.guest;
    format!(
        "{} ({}), boot {}",
        text::or_dash(&guest.host_name),
        text::or_dash(&guest.dmi_uuid),
        text::or_dash(&guest.boot_id)
    )
}

fn caller(receipt: &Receipt) -> String {
    let over = match receipt.caller.over.as_str() {
        "qga" => ", over QGA",
        "guestlet" => ", over the guestlet API",
        _ => "",
    };
    format!("{}{over}", text::or_dash(&receipt.caller.name))
}

fn end(receipt: &Receipt) -> String {
    let problem = &receipt.end.problem;
    let problem = if problem.is_empty() { String::new() } else { format!(": {problem}") };
    format!("{}{problem}", receipt.end.how)
}

/// Formats a moment, for example `2026-11-26T18:00:00.5Z (1234.567 s after the boot)`.
fn moment(moment: &Moment) -> String {
    let (seconds, rest) = (moment.boottime_ms / 1000, moment.boottime_ms % 1000);
    format!("{} ({seconds}.{rest:03} s after the boot)", moment.time)
}

/// Describes when the snapshot was taken, as far as that is known.
fn cut(receipt: &Receipt) -> String {
    let times = &receipt.times;
    match (&receipt.cut, &times.frozen, &times.thaw_asked) {
        (Some(cut), ..) => {
            let id = if cut.id.is_empty() { String::new() } else { format!("{}: ", cut.id) };
            let failed = if cut.exit_status == 0 { "" } else { ", failed" };
            format!("{id}{}, {}–{} by the caller's clock{failed}", cut.text, cut.begun, cut.ended)
        }
        (None, Some(frozen), Some(asked)) if receipt.level > Level::Crash => {
            format!("window {}–{}: the caller's log must show the snapshot in it", frozen.time, asked.time)
        }
        _ => "not known".to_owned(),
    }
}

/// Describes the outcome of the signature check, for users; `whose` says whose key it is.
pub fn verdict(verdict: &Verdict, whose: &str) -> String {
    match verdict {
        Verdict::Signed(key) => format!("signed by {key}{whose}"),
        Verdict::Unsigned => "unsigned: there is no proof of who wrote it".to_owned(),
        Verdict::Altered(why) => format!("altered: {why}"),
        Verdict::Unreadable(why) => format!("unreadable: {why}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::receipt::{Caller, End, Times};

    #[test]
    fn a_receipt_is_told_in_lines() {
        let at = |boottime_ms| Some(Moment { boottime_ms, time: format!("t{boottime_ms}") });
        let receipt = Receipt {
            id: "ab".to_owned(),
            level: Level::FileSystem,
            reasons: vec!["no application took part".to_owned()],
            caller: Caller { name: "a QGA client".to_owned(), over: "qga".to_owned() },
            end: End { how: "asked".to_owned(), problem: String::new() },
            times: Times { frozen: at(1500), thaw_asked: at(2000), ..Times::default() },
            ..Receipt::default()
        };
        let text = words(&receipt, "unsigned");
        for line in [
            "Receipt:    ab",
            "Level:      filesystem",
            "Not more:   no application took part",
            "For:        a QGA client, over QGA",
            "Frozen:     t1500 (1.500 s after the boot)",
            "Snapshot:   window t1500–t2000: the caller's log must show the snapshot in it",
        ] {
            let words = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
            assert!(text.lines().any(|found| words(found) == words(line)), "{line}\n{text}");
        }
    }
}
