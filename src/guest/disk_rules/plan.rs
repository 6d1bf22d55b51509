//! Decides what is to be done, from the rules, the disks, and what rules have mounted. Pure.
//!
//! ```text
//!             no disk fits ─┐           ┌─ several fit: none is used
//!                           ▼           ▼
//! rule ─▶ verdicts on all disks ─▶ one fits ─▶ it was released, or an unmount comes first: wait
//!                                         ├─▶ not mounted by a rule: apply ─▶ done
//!                                         ├─▶ mounted as it says: done
//!                                         └─▶ mounted by a rule, but no longer: let go
//! mounted by a rule, and no rule wants it so any longer, or its disk has vanished ─▶ undo
//! ```

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::guest::disk_rules::find::{Device, Labels, Verdict, verdicts};
use crate::guest::disk_rules::made::{Made, Standing};
use crate::guest::disk_rules::rule::Rule;
use crate::guest::disks::identity::KnownDisk;
use crate::guest::disks::lookup::describe;

/// Input of the decision: rules are compared with this state.
#[derive(Debug, Clone, Default)]
pub struct View {
    /// All disks of the guest.
    pub disks: Vec<Arc<KnownDisk>>,
    /// Generations of the disks that are never touched, as the system is on them.
    pub system: BTreeSet<u64>,
    /// Labels that have been read so far.
    pub labels: Labels,
    /// Mounts made by rules.
    pub made: Vec<Seen>,
    /// Generations of disks that were released.
    pub released: BTreeSet<u64>,
    /// Mount points where somebody else has mounted the device that a rule wants there.
    pub foreign: BTreeSet<PathBuf>,
}

/// Mount made by a rule, with its present state.
#[derive(Debug, Clone)]
pub struct Seen {
    /// Record made when it was mounted.
    pub made: Made,
    /// State of the mount now.
    pub standing: Standing,
    /// True if the disk has disappeared.
    pub gone: bool,
}

/// Decision on one rule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Finding {
    /// No disk matches.
    NoDisk(String),
    /// Several devices match, so none is used.
    Several(String),
    /// One device matches, but has to wait for the given reason.
    Waits(Arc<KnownDisk>, String),
    /// The mount that the rule had made was unmounted by hand, and stays unmounted.
    LetGo(Device),
    /// The device is to be mounted, or its mount is not yet complete.
    Apply(Device),
    /// The device is mounted as the rule says.
    Done(Device),
}

/// Decisions for all rules and mounts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// Decision on each rule.
    pub findings: Vec<Finding>,
    /// Verdict of each rule on each disk.
    pub verdicts: Vec<Vec<Verdict>>,
    /// Mount points at which the mount of a rule is to be unmounted, deepest first.
    pub undo: Vec<PathBuf>,
}

/// Decides on every rule and every mount.
pub fn plan(rules: &[Rule], view: &View) -> Plan {
    let verdicts: Vec<_> =
        rules.iter().map(|rule| verdicts(&rule.matcher, &view.disks, &view.system, &view.labels)).collect();
    let mut undo = BTreeSet::new();
    for seen in &view.made {
        let point = &seen.made.how.mount_point;
        let rule = rules.iter().zip(&verdicts).find(|(rule, _)| rule.how.mount_point == *point);
        if !rule.is_some_and(|(rule, verdicts)| stays(seen, rule, verdicts, view)) {
            undo.insert(point.clone());
        }
    }
    // A mount on top of one that is to be unmounted has to be unmounted as well.
    let on_top = |point: &Path| undo.iter().any(|undone| point != undone && point.starts_with(undone));
    let above: Vec<_> = view.made.iter().map(|seen| seen.made.how.mount_point.clone()).collect();
    let above: Vec<_> = above.into_iter().filter(|point| on_top(point)).collect();
    undo.extend(above);

    let mut findings = vec![None; rules.len()];
    let mut order: Vec<_> = (0..rules.len()).collect();
    order.sort_by_key(|rule| &rules[*rule].how.mount_point);
    for index in order {
        let waits = waits_for(&rules[index], rules, &findings, view);
        findings[index] = Some(finding(&rules[index], &verdicts[index], view, &undo, waits));
    }
    let mut undo: Vec<_> = undo.into_iter().collect();
    undo.reverse();
    Plan { findings: findings.into_iter().flatten().collect(), verdicts, undo }
}

/// Returns whether the rule for this mount point still wants the mount as it is, or may do so.
fn stays(seen: &Seen, rule: &Rule, verdicts: &[Verdict], view: &View) -> bool {
    if seen.gone || seen.made.how.mounts_otherwise(&rule.how) {
        return false;
    }
    let generation = seen.made.disk.generation;
    let of_disk = view.disks.iter().zip(verdicts).find(|(disk, _)| disk.generation == generation);
    match of_disk {
        // A disk that has not been read yet, or does not respond, is not known to be a different one.
        None | Some((_, Verdict::Unknown(_))) => true,
        Some((disk, Verdict::Not(_))) => disk.silent || view.system.contains(&generation),
        Some((_, Verdict::Fits(devices))) => devices.iter().any(|device| seen.made.is_of(device)),
    }
}

/// Returns which other rule has to be applied first, because this rule's mount point is inside its mount.
fn waits_for(rule: &Rule, rules: &[Rule], findings: &[Option<Finding>], view: &View) -> Option<String> {
    let point = &rule.how.mount_point;
    let below = rules.iter().zip(findings).find(|(other, finding)| {
        let below = &other.how.mount_point;
        let done = matches!(finding, Some(Finding::Done(_))) || view.foreign.contains(below);
        below != point && point.starts_with(below) && !done
    });
    below.map(|(other, _)| format!("until {} is mounted", other.how.mount_point.display()))
}

fn finding(
    rule: &Rule,
    verdicts: &[Verdict],
    view: &View,
    undo: &BTreeSet<PathBuf>,
    waits: Option<String>,
) -> Finding {
    let fits: Vec<&Device> = verdicts
        .iter()
        .filter_map(|verdict| match verdict {
            Verdict::Fits(devices) => Some(devices),
            _ => None,
        })
        .flatten()
        .collect();
    let device = match fits.as_slice() {
        [] => return Finding::NoDisk(format!("no disk has {}", rule.matcher)),
        [device] => *device,
        several => {
            let named = |device: &&Device| match device.partition {
                Some(number) => format!("partition {number} of {}", describe(&device.disk)),
                None => describe(&device.disk),
            };
            let named: Vec<_> = several.iter().take(8).map(named).collect();
            return Finding::Several(format!(
                "{} match, so none is used: {}",
                several.len(),
                named.join("; ")
            ));
        }
    };
    let wait = |why: &str| Finding::Waits(Arc::clone(&device.disk), why.to_owned());
    let point = &rule.how.mount_point;
    if view.released.contains(&device.disk.generation) {
        return wait("the disk was released; it will be mounted again when it is plugged in again");
    }
    if undo.contains(point) {
        return wait("what is mounted there has to be unmounted first");
    }
    if let Some(seen) = view.made.iter().find(|seen| seen.made.how.mount_point == *point) {
        return match seen.standing {
            Standing::Unmounted if seen.made.mount.is_some() => Finding::LetGo(device.clone()),
            Standing::Mounted | Standing::Covered(_) if is_done(&seen.made, rule, device) => {
                Finding::Done(device.clone())
            }
            _ => Finding::Apply(device.clone()),
        };
    }
    match waits {
        Some(why) => wait(&why),
        None if device.partition.is_none() && !device.disk.partitions.is_empty() => {
            wait("the disk has partitions; choose one with match.partition")
        }
        None => Finding::Apply(device.clone()),
    }
}

fn is_done(made: &Made, rule: &Rule, device: &Device) -> bool {
    made.done && made.how == rule.how && (!rule.how.grow || made.grown == device.disk.bytes)
}
