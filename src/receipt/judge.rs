//! Decides on the consistency of a snapshot from the facts of its receipt alone. Any level above `crash` has to be
//! proved: all file systems were frozen at the same time, stayed frozen, and were thawed because a client
//! requested it, in this order.

use super::{Cut, Level, Receipt};

/// Tolerance in milliseconds, by which the duration of the snapshot on the caller's clock may exceed that of the
/// freeze.
const SLACK: u64 = 1000;

/// Sets the levels of a receipt, and the reasons why they are not higher, from the rest of it.
pub fn judge(receipt: &mut Receipt) {
    let mut reasons = spoiled(receipt);
    let is_spoiled = !reasons.is_empty();
    for volume in &mut receipt.volumes {
        let is_whole = !is_spoiled && volume.problem.is_empty();
        volume.level = if is_whole { Level::FileSystem } else { Level::Crash };
    }
    for volume in receipt.volumes.iter().filter(|volume| !volume.problem.is_empty()) {
        reasons.push(format!("{}: {}", volume.mount_point, volume.problem));
    }
    for held in receipt.not_frozen.iter().filter(|one| one.is_held) {
        reasons.push(format!("{}: {}", held.mount_point, held.reason));
    }
    if receipt.volumes.is_empty() {
        reasons.push("no file system was frozen".to_owned());
    }
    if !reasons.is_empty() {
        for application in &mut receipt.applications {
            application.level = application.level.min(Level::Crash);
        }
        receipt.level = Level::Crash;
        receipt.reasons = reasons;
        return;
    }
    for application in receipt.applications.iter().filter(|one| one.level < Level::Application) {
        let problem = if application.problem.is_empty() { "it says no more" } else { &application.problem };
        reasons.push(format!("{} ({}): {problem}", application.name, application.instance));
    }
    if receipt.applications.is_empty() {
        reasons.push(match receipt.hooks.len() {
            0 => "no application took part".to_owned(),
            1 => "no application took part; a hook was run, but nothing proves what it did".to_owned(),
            count => {
                format!("no application took part; {count} hooks were run, but nothing proves what they did")
            }
        });
    }
    receipt.level = if reasons.is_empty() { Level::Application } else { Level::FileSystem };
    receipt.reasons = reasons;
}

/// Returns the reasons why the freeze as a whole proves nothing; empty if there are none.
fn spoiled(receipt: &Receipt) -> Vec<String> {
    let mut reasons = Vec::new();
    let end = &receipt.end;
    match end.how.as_str() {
        "asked" => {}
        "failed" => reasons.push(format!("the freeze failed: {}", end.problem)),
        "deadline" => reasons.push("no thaw was requested before the deadline".to_owned()),
        "person" => reasons.push("a person in the guest ended the freeze".to_owned()),
        "crash" => reasons.push("the agent ended before the freeze did".to_owned()),
        "hang" => reasons.push("the agent did not thaw; its guardian did".to_owned()),
        other => reasons.push(format!("the freeze did not end by a thaw ({other})")),
    }
    let times = &receipt.times;
    let moments = (&times.frozen, &times.thaw_asked, &times.thawed);
    if let (Some(frozen), Some(asked), Some(thawed)) = moments {
        if frozen.boottime_ms > asked.boottime_ms || asked.boottime_ms > thawed.boottime_ms {
            reasons.push("the freeze was not complete before its thaw".to_owned());
        }
        let frozen_for = asked.boottime_ms.saturating_sub(frozen.boottime_ms);
        reasons.extend(receipt.cut.as_ref().and_then(|cut| not_inside(cut, frozen_for)));
    } else if reasons.is_empty() {
        reasons.push("it is not known when everything was frozen, or thawed".to_owned());
    }
    reasons
}

/// Returns the reason why, by its caller's account, a snapshot was not taken within `frozen_for` milliseconds.
fn not_inside(cut: &Cut, frozen_for: u64) -> Option<String> {
    if cut.exit_status != 0 {
        return Some(format!("the caller's snapshot failed (exit status {})", cut.exit_status));
    }
    (cut.took_ms > frozen_for.saturating_add(SLACK)).then(|| {
        format!(
            "the caller says that its snapshot took {} ms, and everything was frozen for {frozen_for} ms",
            cut.took_ms
        )
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::receipt::{Application, End, Moment, NotFrozen, Times, Volume};

    fn moment(boottime_ms: u64) -> Moment {
        Moment { boottime_ms, time: String::new() }
    }

    fn good() -> Receipt {
        Receipt {
            end: End { how: "asked".to_owned(), problem: String::new() },
            times: Times {
                frozen: Some(moment(100)),
                thaw_asked: Some(moment(200)),
                thawed: Some(moment(210)),
                ..Times::default()
            },
            volumes: vec![Volume { mount_point: "/".to_owned(), ..Volume::default() }],
            ..Receipt::default()
        }
    }

    fn level(receipt: Receipt) -> (Level, String) {
        let mut receipt = receipt;
        judge(&mut receipt);
        (receipt.level, receipt.reasons.join("; "))
    }

    #[test]
    fn a_thaw_in_time_makes_file_systems_good() {
        assert_eq!(level(good()), (Level::FileSystem, "no application took part".to_owned()));
        let (level, words) = level(Receipt { hooks: vec!["/hook".to_owned()], ..good() });
        assert_eq!(level, Level::FileSystem);
        assert!(words.contains("a hook was run"), "{words}");
    }

    #[test]
    fn whatever_is_not_proved_is_crash() {
        let volume = |problem: &str| Volume { problem: problem.to_owned(), ..good().volumes.remove(0) };
        let cut = |exit_status, took_ms| Some(Cut { took_ms, exit_status, ..Cut::default() });
        let held = NotFrozen { is_held: true, reason: "held".to_owned(), ..NotFrozen::default() };
        let times = |times| Receipt { times, ..good() };
        let cases = [
            (times(Times { frozen: None, ..good().times }), "is not known"),
            (times(Times { frozen: Some(moment(201)), ..good().times }), "not complete"),
            (times(Times { thawed: Some(moment(199)), ..good().times }), "not complete"),
            (Receipt { volumes: vec![volume("thawed by others")], ..good() }, "/: thawed by others"),
            (Receipt { volumes: Vec::new(), ..good() }, "no file system"),
            (Receipt { not_frozen: vec![held], ..good() }, "held"),
            (Receipt { cut: cut(3, 10), ..good() }, "failed (exit status 3)"),
            (Receipt { cut: cut(0, 5000), ..good() }, "5000 ms"),
        ];
        for (receipt, words) in cases {
            let (level, found) = level(receipt);
            assert_eq!(level, Level::Crash, "{words}");
            assert!(found.contains(words), "{words}: {found}");
        }
        for how in ["deadline", "person", "crash", "hang", "failed", "", "later"] {
            let end = End { how: how.to_owned(), problem: String::new() };
            assert_eq!(level(Receipt { end, ..good() }).0, Level::Crash, "{how}");
        }
        assert_eq!(level(Receipt { cut: cut(0, 100), ..good() }).0, Level::FileSystem);
    }

    #[test]
    fn the_weakest_application_counts() {
        let one = |level, problem: &str| Application {
            name: "postgresql".to_owned(),
            problem: problem.to_owned(),
            level,
            ..Application::default()
        };
        let with = |applications| level(Receipt { applications, ..good() });
        assert_eq!(with(vec![one(Level::Application, "")]), (Level::Application, String::new()));
        let (level, words) =
            with(vec![one(Level::Application, ""), one(Level::FileSystem, "it did not answer")]);
        assert_eq!(level, Level::FileSystem);
        assert!(words.contains("it did not answer"), "{words}");
    }

    proptest! {
        /// For any facts: the level is above crash only after a thaw that was requested, of file systems that were frozen
        /// in time.
        #[test]
        fn never_more_than_is_proved(
            how in "(asked|deadline|person|crash|hang|failed|)",
            frozen in proptest::option::of(0u64..10), asked in proptest::option::of(0u64..10),
            thawed in proptest::option::of(0u64..10), problem in "(|x)", held: bool, status in 0i32..2,
        ) {
            let mut receipt = good();
            receipt.end.how.clone_from(&how);
            receipt.times = Times {
                frozen: frozen.map(moment), thaw_asked: asked.map(moment), thawed: thawed.map(moment), ..Times::default()
            };
            receipt.volumes[0].problem.clone_from(&problem);
            receipt.not_frozen.push(NotFrozen { is_held: held, ..NotFrozen::default() });
            receipt.cut = Some(Cut { exit_status: status, ..Cut::default() });
            judge(&mut receipt);
            let in_order = matches!((frozen, asked, thawed), (Some(a), Some(b), Some(c)) if a <= b && b <= c);
            let proved = how == "asked" && in_order && problem.is_empty() && !held && status == 0;
            prop_assert_eq!(receipt.level > Level::Crash, proved);
            prop_assert_eq!(receipt.reasons.is_empty(), false);
        }
    }
}
