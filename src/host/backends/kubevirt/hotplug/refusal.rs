//! Refuses orders that KubeVirt cannot fulfil, or must not receive, in the present state of the VM. Pure.

use std::time::Duration;

use super::super::objects::Volume;
use super::plan::Wish;
use super::queue::Order;
use super::seen::{Seen, Stage};
use crate::host::backends::volumes::VolumeError;

/// Value of `updateVolumesStrategy` with which KubeVirt does not apply changes of volumes to a running VM.
const MIGRATION: &str = "Migration";

/// Returns the answer to an order that KubeVirt cannot fulfil in the present state. `released` is the validity
/// of a guest's release of a disk that another program has plugged.
pub fn refusal(seen: &Seen, order: &Order, released: Duration) -> Option<Result<(), VolumeError>> {
    let name = order.disk.volume();
    let refused = |words: String| Some(Err(VolumeError::Refused(words)));
    let is_other = seen.vm.metadata.uid.as_deref().is_none_or(|uid| !uid.eq_ignore_ascii_case(&order.uid));
    match order.wish {
        // The caller determines the present holder itself.
        Wish::Unplug if is_other => return Some(Ok(())),
        Wish::Plug if is_other => {
            return refused("the VM was recreated under the same name; repeat the call".to_owned());
        }
        Wish::Unplug | Wish::Plug => {}
    }
    if let Some(other) =
        seen.listed(&name).and_then(|volume| volume.claim()).filter(|claim| *claim != order.disk.claim.name)
    {
        return refused(format!(
            "the VM lists a volume {name} that uses another claim, {other}; remove it from the VM's spec"
        ));
    }
    let is_fixed =
        |volume: &Volume| !volume.persistent_volume_claim.as_ref().is_some_and(|it| it.hotpluggable);
    if order.disk.as_is && seen.listed(&name).is_some_and(is_fixed) {
        return refused(format!("the volume {name} is a fixed part of the VM, and is not removed from it"));
    }
    let listed = seen.vm.spec.template.spec.volumes.iter().map(|one| (&one.name, one.claim()));
    let coming = seen.vm.asked_for().map(|one| (&one.name, one.volume_source.claim()));
    let of_claim =
        |(other, claim): &(&String, Option<&str>)| *claim == Some(&order.disk.claim.name) && **other != name;
    if let Some((other, _)) = listed.chain(coming).find(of_claim)
        && order.wish == Wish::Plug
    {
        return refused(format!(
            "the VM lists the claim {} already, as a volume {other} that guestlet has not plugged; remove it \
             from the VM's spec",
            order.disk.claim.name
        ));
    }
    // The volume of this claim may have a different name.
    let running = seen.instance.iter().flat_map(|run| &run.spec.volumes);
    let is_meant = |volume: &&Volume| {
        volume.name == name || order.wish == Wish::Plug && volume.claim() == Some(&order.disk.claim.name)
    };
    if let Some(volume) = running.filter(is_meant).find(|volume| seen.stage(&volume.name) == Stage::Alone) {
        let (volume, claim) = (&volume.name, &order.disk.claim);
        let vm = seen.vm.metadata.name.as_deref().unwrap_or_default();
        return refused(format!(
            "the VM {vm} has a volume {volume} only while it runs, which it does not list: it was plugged at its \
             VirtualMachineInstance, as by virtctl addvolume without --persist, and is taken away there; stop the VM, or \
             virtctl --namespace {} removevolume {vm} --volume-name={volume}",
            claim.namespace
        ));
    }
    let is_so =
        matches!((order.wish, seen.stage(&name)), (Wish::Plug, Stage::Ready) | (Wish::Unplug, Stage::Absent));
    let strategy = seen.vm.spec.update_volumes_strategy.as_deref();
    if strategy == Some(MIGRATION) && seen.instance.is_some() && !is_so {
        return refused(format!(
            "the VM's spec.updateVolumesStrategy is {MIGRATION}, with which KubeVirt plugs and unplugs \
             nothing while the VM runs; remove it from the VM's spec"
        ));
    }
    if order.wish == Wish::Unplug
        && seen.can_be_taken_out(&name)
        && let Some(words) = must_be_asked(seen, order, released)
    {
        return Some(Err(VolumeError::Waiting { words: words.to_owned(), detail: words.to_owned() }));
    }
    if order.wish == Wish::Plug && has_ended(seen) {
        let words = "the VM is off".to_owned();
        return Some(Err(VolumeError::Waiting { words: words.clone(), detail: words }));
    }
    None
}

/// Reports whether no guest runs in a VM, nor will without a new start.
fn has_ended(seen: &Seen) -> bool {
    seen.instance.as_ref().is_none_or(|run| matches!(run.status.phase.as_str(), "Succeeded" | "Failed"))
}

/// Returns the reason why the guest has to be asked before KubeVirt is requested to remove its disk, if it has
/// to be.
fn must_be_asked(seen: &Seen, order: &Order, released: Duration) -> Option<&'static str> {
    let run = seen.run();
    if run.has_started && run != order.released.run {
        return Some("the VM was started after its guest was asked to release the volume; repeat the call");
    }
    let is_theirs = order.disk.as_is && !order.released.by_force;
    if !is_theirs || has_ended(seen) {
        return None;
    }
    // KubeVirt removes nothing before the guest runs. The guest then finds the disk, and may mount it without its
    // agent's knowledge.
    if seen.waits_to_start().is_some() {
        return Some(
            "the VM is starting with the volume, which a program other than guestlet has plugged, and its \
             guest cannot be asked for it yet; repeat the call",
        );
    }
    let is_old = order.released.at.is_none_or(|at| at.elapsed() >= released);
    is_old.then_some(
        "the guest released the volume, which a program other than guestlet has plugged, too long ago to rely \
         on: the VM's volumes were changed in between; repeat the call",
    )
}

#[cfg(test)]
mod tests {
    use tokio::sync::oneshot;
    use tokio::time::Instant;

    use super::super::super::gates::Way;
    use super::super::super::names::Claim;
    use super::super::patch::Disk;
    use super::super::seen::tests::seen;
    use super::super::seen::{Released, Run};
    use super::*;

    const LASTS: Duration = Duration::from_secs(10);

    #[test]
    fn what_a_run_has_alone_is_named() {
        let claim = Claim { namespace: "dev".to_owned(), name: "data".to_owned() };
        let ours = claim.volume();
        for volume in [ours.as_str(), "data", "other"] {
            let mut there = seen(&[], &[volume], &[(volume, "Ready")]);
            there.vm.metadata.uid = Some("vm".to_owned());
            there.way = Some(Way::Subresource);
            let source = |seen: &mut Seen, name: &str| {
                let volume = &mut seen.instance.as_mut().unwrap().spec.volumes[0];
                volume.persistent_volume_claim.as_mut().unwrap().claim_name = name.to_owned();
            };
            let words = |seen: &Seen, wish| {
                let (answer, _answered) = oneshot::channel();
                let disk = Disk { claim: claim.clone(), read_only: false, as_is: false };
                let released = Released { run: seen.run(), ..Released::default() };
                let order = Order { uid: "vm".to_owned(), disk, wish, released, answer };
                refusal(seen, &order, LASTS).map(|outcome| outcome.unwrap_err().to_string())
            };
            source(&mut there, "data");
            let named = format!("removevolume a --volume-name={volume}");
            assert!(words(&there, Wish::Plug).unwrap().contains(&named));
            let told = words(&there, Wish::Unplug);
            assert_eq!(told.is_some_and(|told| told.contains(&named)), volume == ours, "{volume}");
            if volume != ours {
                source(&mut there, "x");
                assert_eq!(words(&there, Wish::Plug), None, "it is another claim's");
            }
            there.way = Some(Way::Declarative);
            assert_eq!(words(&there, Wish::Plug), None, "KubeVirt takes it away");
        }
    }

    #[test]
    fn a_guest_that_was_not_asked_keeps_its_disk() {
        let claim = Claim { namespace: "dev".to_owned(), name: "data".to_owned() };
        let name = claim.volume();
        let mut there = seen(&[&name], &[&name], &[(&name, "Ready")]);
        there.vm.metadata.uid = Some("vm".to_owned());
        let source = there.vm.spec.template.spec.volumes[0].persistent_volume_claim.as_mut();
        source.unwrap().claim_name.clone_from(&claim.name);
        let refused = |seen: &Seen, as_is, released: Released| {
            let (answer, _answered) = oneshot::channel();
            let disk = Disk { claim: claim.clone(), read_only: false, as_is };
            let order = Order { uid: "vm".to_owned(), disk, wish: Wish::Unplug, released, answer };
            match refusal(seen, &order, LASTS) {
                None => false,
                Some(Err(VolumeError::Waiting { .. })) => true,
                other => panic!("{other:?}"),
            }
        };
        let is_refused = |seen: &Seen, run| refused(seen, false, Released { run, at: None, by_force: false });
        assert!(!is_refused(&there, there.run()));
        // Before, the VM was off, or had another run, or had not started.
        let of_another = Run { uid: Some("run-0".to_owned()), has_started: true };
        for before in [Run::default(), of_another, Run { has_started: false, ..there.run() }] {
            assert!(is_refused(&there, before));
        }
        // The VM is about to start or off, and so has no guest yet.
        there.instance.as_mut().unwrap().status.phase = "Scheduled".to_owned();
        assert!(!is_refused(&there, Run::default()));
        there.instance = None;
        assert!(!is_refused(&there, Run::default()));

        // For a disk that another program has plugged, the starting guest may use it without guestlet's knowledge.
        let mut theirs = seen(&["data"], &["data"], &[("data", "Ready")]);
        theirs.vm.metadata.uid = Some("vm".to_owned());
        let run = theirs.run();
        let is_refused = |seen: &Seen, run: &Run, by_force| {
            refused(seen, true, Released { run: run.clone(), at: Some(Instant::now()), by_force })
        };
        assert!(!is_refused(&theirs, &run, false));
        // A release is valid for a limited time only, except for disks that guestlet has plugged.
        let before = Instant::now().checked_sub(LASTS);
        for at in [None, before] {
            for (by_force, expected) in [(false, true), (true, false)] {
                let released = Released { run: run.clone(), at, by_force };
                assert_eq!(refused(&theirs, true, released), expected, "{at:?} {by_force}");
            }
        }
        for phase in ["", "Pending", "Scheduling", "Scheduled"] {
            theirs.instance.as_mut().unwrap().status.phase = phase.to_owned();
            for run in [Run::default(), run.clone(), theirs.run()] {
                assert!(is_refused(&theirs, &run, false) && !is_refused(&theirs, &run, true), "{phase:?}");
            }
        }
        theirs.instance.as_mut().unwrap().status.phase = "Succeeded".to_owned();
        assert!(!is_refused(&theirs, &run, false));
        theirs.instance = None;
        assert!(!is_refused(&theirs, &Run::default(), false));
    }
}
