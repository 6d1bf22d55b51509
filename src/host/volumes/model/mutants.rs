//! Programs with one fault each, which the model has to detect.

use super::super::super::backends::authority::{Open, Said, Verdict, judge};
use super::super::super::backends::volumes::{Holder, Place, Published};
use super::super::protocol::{Next, Refusal, Request, next};
use super::{PROGRAM, Program, explore, worlds};

type Record<'r> = Option<&'r Published>;

/// Fault: a volume that is being unplugged is plugged as if it were not.
fn publish_while_leaving_plugs(request: Request<'_>, record: Record<'_>, holder: Option<&Holder>) -> Next {
    match (request, record) {
        (Request::Publish { uuid, .. }, Some(record)) if record.uuid == uuid => Next::Plug,
        _ => next(request, record, holder),
    }
}

/// Fault: a VM that cannot be asked is assumed not to have the volume.
fn unknown_is_off(request: Request<'_>, record: Record<'_>, holder: Option<&Holder>) -> Next {
    let holder = holder.map(|holder| match holder {
        Holder::Unknown(_) => Holder::Off,
        holder => holder.clone(),
    });
    next(request, record, holder.as_ref())
}

/// Fault: a volume without a record is assumed to be in no VM.
fn nothing_comes_back(request: Request<'_>, record: Record<'_>, holder: Option<&Holder>) -> Next {
    match (request, record) {
        (Request::Unpublish { .. }, None) => Next::Done,
        _ => next(request, record, holder),
    }
}

/// Fault: a volume is never unplugged from a VM that is not the one of its record.
fn nothing_is_taken_back(request: Request<'_>, record: Record<'_>, holder: Option<&Holder>) -> Next {
    match next(request, record, holder) {
        Next::TakeBack(place) => Next::Refuse(Refusal::Held(place)),
        next => next,
    }
}

/// Fault: a volume is removed whatever its record says.
fn remove_minds_no_record(request: Request<'_>, record: Record<'_>, holder: Option<&Holder>) -> Next {
    match request {
        Request::Remove { .. } => Next::Remove,
        _ => next(request, record, holder),
    }
}

/// Fault: a volume that was being unplugged from a VM is never plugged again, although the VM no longer has it.
fn what_has_left_stays_away(request: Request<'_>, record: Record<'_>, holder: Option<&Holder>) -> Next {
    match (request, record, next(request, record, holder)) {
        (Request::Publish { .. } | Request::Unpublish { .. }, Some(record), Next::Forget)
            if record.leaving =>
        {
            Next::Refuse(Refusal::Leaving)
        }
        (.., next) => next,
    }
}

fn silent_is_off(remembered: Option<(&Place, &Said)>, open: Option<Open>) -> Verdict {
    match remembered {
        Some((place, Said::Silent(_))) => judge(Some((place, &Said::HasNot)), open),
        remembered => judge(remembered, open),
    }
}

fn absent_has_ended(remembered: Option<(&Place, &Said)>, open: Option<Open>) -> Verdict {
    match remembered {
        Some((place, Said::Unlisted | Said::Absent { .. })) => {
            judge(Some((place, &Said::Absent { ended: true })), open)
        }
        remembered => judge(remembered, open),
    }
}

fn somebody_is_nobody(remembered: Option<(&Place, &Said)>, open: Option<Open>) -> Verdict {
    let open = open.map(|open| if matches!(open, Open::BySomebody(_)) { Open::Nobody } else { open });
    judge(remembered, open)
}

#[test]
fn a_program_that_is_wrong_in_one_place_is_found() {
    let mutants = [
        ("a publish while it leaves plugs", Program { next: publish_while_leaving_plugs, ..PROGRAM }),
        ("who is unknown has it not", Program { next: unknown_is_off, ..PROGRAM }),
        ("nothing comes back", Program { next: nothing_comes_back, ..PROGRAM }),
        ("nothing is taken back", Program { next: nothing_is_taken_back, ..PROGRAM }),
        ("what is published is removed", Program { next: remove_minds_no_record, ..PROGRAM }),
        ("what has left stays away", Program { next: what_has_left_stays_away, ..PROGRAM }),
        ("who is silent has it not", Program { judge: silent_is_off, ..PROGRAM }),
        ("who is absent has ended", Program { judge: absent_has_ended, ..PROGRAM }),
        ("what somebody has is free", Program { judge: somebody_is_nobody, ..PROGRAM }),
        ("locks are not minded", Program { minds_locks: false, ..PROGRAM }),
        ("nodes are not closed", Program { closes_nodes: false, ..PROGRAM }),
        ("a guest that refuses keeps it", Program { forgets_that_it_leaves: true, ..PROGRAM }),
    ];
    for (what, program) in mutants {
        assert!(worlds(program).any(|world| explore(world).is_err()), "nothing is wrong although {what}");
    }
}
