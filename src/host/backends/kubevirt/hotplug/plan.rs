//! Decides the next request to KubeVirt about the volumes of one VM. Pure.
//!
//! One attachment pod carries all volumes that are hot-plugged into a VM, and each change makes KubeVirt start
//! a new pod for the whole set. While that pod is pending there is no other, and changes in quick succession
//! starve all of them. Orders are therefore collected and submitted in sets:
//!
//! ```text
//!  wishes ─┐                ┌─ fulfilled: the caller gets its answer
//!  seen ───┼──▶ plan ───────┤
//!  overdue ┘                └─ Submit: a set of removals, or a set of additions     (only when the previous set has settled)
//!                              Wait: for a change in the API
//!                              Rest: there are no wishes
//! ```
//!
//! * Removals come before additions, and never together with them: KubeVirt has had races between the two.
//! * A volume that does not settle in time is *overdue*. One that guestlet is adding is removed again, because
//!   it blocks all later ones. One that another program is adding is left alone, and is named in the errors of
//!   the orders that wait for it.
//! * Overdue volumes do not hold up removals, because a removal may be what unblocks the rest. Nor does
//!   anything in a VM that has not started: KubeVirt changes nothing in it before it starts, and a single
//!   missing volume keeps it from starting.

use std::collections::{BTreeMap, BTreeSet};

use super::seen::{Seen, Stage};

/// Requested change of a volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wish {
    /// The VM is to have the volume.
    Plug,
    /// The VM is to release the volume.
    Unplug,
}

/// Next action.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// Add these volumes to the VM's spec; none of them is in it.
    Plug(Vec<String>),
    /// Remove these volumes from the VM's spec; all of them are in it, and their removal has not been requested.
    Unplug(Vec<String>),
    /// Wait for a change; lists the volumes that are waited for, with their stages.
    Wait(Vec<(String, Stage)>),
    /// No wishes are left.
    Rest,
}

/// Decisions that follow from the present state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// Volumes whose wishes are fulfilled.
    pub fulfilled: Vec<String>,
    /// Next action for the remaining wishes.
    pub step: Step,
}

/// Decides the next action for these wishes, by the names of the volumes. `overdue` names the volumes that have
/// been changing for too long.
pub fn plan(seen: &Seen, wishes: &BTreeMap<String, Wish>, overdue: &BTreeSet<String>) -> Plan {
    let is_fulfilled = |(name, wish): &(&String, &Wish)| {
        matches!((wish, seen.stage(name)), (Wish::Plug, Stage::Ready) | (Wish::Unplug, Stage::Absent))
    };
    let (fulfilled, open): (Vec<_>, Vec<_>) = wishes.iter().partition(is_fulfilled);
    let fulfilled = fulfilled.into_iter().map(|(name, _)| name.clone()).collect();
    Plan { fulfilled, step: step(seen, &open, overdue) }
}

fn step(seen: &Seen, open: &[(&String, &Wish)], overdue: &BTreeSet<String>) -> Step {
    if open.is_empty() {
        return Step::Rest;
    }
    let unplug: Vec<String> = open
        .iter()
        .filter(|(name, wish)| **wish == Wish::Unplug && seen.can_be_taken_out(name))
        .map(|(name, _)| (*name).clone())
        .collect();
    let on_their_way = seen.on_their_way();
    if !unplug.is_empty() {
        let holds_back = |(name, _): &(String, Stage)| !overdue.contains(name) && !unplug.contains(name);
        return if seen.run().has_started && on_their_way.iter().any(holds_back) {
            Step::Wait(on_their_way)
        } else {
            Step::Unplug(unplug)
        };
    }
    let plug: Vec<String> = open
        .iter()
        .filter(|(name, wish)| **wish == Wish::Plug && seen.stage(name) == Stage::Absent)
        .map(|(name, _)| (*name).clone())
        .collect();
    if plug.is_empty() || !on_their_way.is_empty() {
        return Step::Wait(on_their_way);
    }
    Step::Plug(plug)
}

#[cfg(test)]
mod tests {
    use super::super::super::gates::Way;
    use super::super::seen::tests::{asked, seen};
    use super::*;

    fn wishes(plug: &[&str], unplug: &[&str]) -> BTreeMap<String, Wish> {
        let all =
            |names: &[&str], wish| names.iter().map(|name| ((*name).to_owned(), wish)).collect::<Vec<_>>();
        all(plug, Wish::Plug).into_iter().chain(all(unplug, Wish::Unplug)).collect()
    }

    fn names(names: &[&str]) -> Vec<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    fn decide(seen: &Seen, wishes: &BTreeMap<String, Wish>, overdue: &[&str]) -> Plan {
        plan(seen, wishes, &overdue.iter().map(|name| (*name).to_owned()).collect())
    }

    #[test]
    fn what_is_wanted_at_once_is_told_at_once() {
        let quiet = seen(&["x"], &["x"], &[("x", "Ready")]);
        let plan = decide(&quiet, &wishes(&["a", "b", "x"], &["gone"]), &[]);
        assert_eq!(plan.fulfilled, names(&["gone", "x"]));
        assert_eq!(plan.step, Step::Plug(names(&["a", "b"])));
    }

    #[test]
    fn the_next_set_waits_until_the_one_before_has_settled() {
        let busy = seen(&["x"], &["x"], &[("x", "AttachedToNode")]);
        for wanted in [wishes(&["a"], &[]), wishes(&["a", "x"], &[])] {
            assert!(matches!(decide(&busy, &wanted, &[]).step, Step::Wait(_)));
            // A second set while one is stuck would not help.
            assert!(matches!(decide(&busy, &wanted, &["x"]).step, Step::Wait(_)));
        }
    }

    #[test]
    fn what_a_run_has_alone_holds_nothing_up() {
        let mut alone = seen(&["x"], &["v", "x"], &[("v", "Ready"), ("x", "Ready")]);
        assert!(matches!(decide(&alone, &wishes(&["a"], &[]), &[]).step, Step::Wait(_)));
        alone.way = Some(Way::Subresource);
        assert_eq!(decide(&alone, &wishes(&["a"], &[]), &[]).step, Step::Plug(names(&["a"])));
        assert_eq!(decide(&alone, &wishes(&["a"], &["x"]), &[]).step, Step::Unplug(names(&["x"])));
        let plan = decide(&alone, &wishes(&["v"], &[]), &[]);
        assert!(plan.fulfilled.is_empty() && matches!(plan.step, Step::Wait(_)), "{plan:?}");
    }

    #[test]
    fn removals_go_first_and_alone() {
        let settled = seen(&["x", "y"], &["x", "y"], &[("x", "Ready"), ("y", "Ready")]);
        let plan = decide(&settled, &wishes(&["a"], &["x"]), &[]);
        assert_eq!(plan.step, Step::Unplug(names(&["x"])));
        let leaving = seen(&["y"], &["y"], &[("x", "Detaching"), ("y", "Ready")]);
        assert!(matches!(decide(&leaving, &wishes(&["a"], &["x"]), &[]).step, Step::Wait(_)));
        let left = seen(&["y"], &["y"], &[("y", "Ready")]);
        let plan = decide(&left, &wishes(&["a"], &["x"]), &[]);
        assert_eq!((plan.fulfilled, plan.step), (names(&["x"]), Step::Plug(names(&["a"]))));
    }

    #[test]
    fn what_is_stuck_is_taken_out_and_holds_no_removal_back() {
        let stuck = seen(&["x", "y"], &["x", "y"], &[("x", "Pending"), ("y", "Ready")]);
        // Its own pending change does not delay the removal.
        assert_eq!(decide(&stuck, &wishes(&[], &["x"]), &[]).step, Step::Unplug(names(&["x"])));
        assert!(matches!(decide(&stuck, &wishes(&[], &["y"]), &[]).step, Step::Wait(_)));
        assert_eq!(decide(&stuck, &wishes(&[], &["y"]), &["x"]).step, Step::Unplug(names(&["y"])));
    }

    #[test]
    fn in_a_vm_that_has_not_started_nothing_holds_a_removal_back() {
        let mut starting = seen(&["x", "y"], &["x", "y"], &[("x", "AttachedToNode"), ("y", "MountedToPod")]);
        let unplug = Step::Unplug(vec!["y".to_owned()]);
        assert!(matches!(decide(&starting, &wishes(&[], &["y"]), &[]).step, Step::Wait(_)));
        starting.instance.as_mut().unwrap().status.phase = "Scheduled".to_owned();
        assert_eq!(decide(&starting, &wishes(&[], &["y"]), &[]).step, unplug);
    }

    #[test]
    fn kubevirt_is_asked_once() {
        let coming = asked(seen(&[], &[], &[]), &["x"], &[]);
        let going = asked(seen(&["x"], &["x"], &[("x", "Ready")]), &[], &["x"]);
        for seen in [coming, going] {
            for wishes in [wishes(&["x"], &[]), wishes(&[], &["x"])] {
                assert!(matches!(decide(&seen, &wishes, &[]).step, Step::Wait(_)), "{seen:?} {wishes:?}");
            }
        }
    }

    #[test]
    fn a_vm_that_is_off_loses_a_volume_at_once() {
        let off = Seen { instance: None, ..seen(&["x", "y"], &[], &[]) };
        let plan = decide(&off, &wishes(&[], &["x"]), &[]);
        assert_eq!(plan.step, Step::Unplug(names(&["x"])));
        assert_eq!(decide(&off, &wishes(&[], &[]), &[]).step, Step::Rest);
    }

    #[test]
    fn a_name_that_comes_again_waits_for_its_status() {
        let late = seen(&[], &[], &[("x", "UnMountedFromPod")]);
        assert!(matches!(decide(&late, &wishes(&["x"], &[]), &[]).step, Step::Wait(_)));
    }
}
