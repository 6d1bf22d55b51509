//! Model of a volume, two VMs and the host half: a test explores every order of requests, steps, crashes and
//! silences, with the two functions that decide in the program itself ([`next`] and [`judge`]). `facts` states the
//! assumptions about QEMU: it opens any image that exists, gives it to a disk only if no other QEMU has a disk of
//! it, and carries out a command before it answers on another connection. A QEMU that hangs may carry out a
//! command long after, when the volume is free. Then it finds the image in use or removed, or it gets the volume
//! without a record and repair takes it back. A guest may let go of a disk long after it was asked to.
//!
//! Another program may plug and unplug the volume, too, in its own way. A volume that it has plugged is unplugged
//! only on a request that names the VM that has it, and repair neither unplugs it nor puts it back.
//!
//! **Where the kernel cannot say whether an image is open**, as on NFS, other QEMUs are seen only by the locks of
//! their disks. The program has QEMU lock each image that it plugs (`locking`). If an image cannot be locked or
//! checked for locks, that is an error. So a disk is always seen. A block node of a raw image that no disk uses
//! holds no lock (seen with QEMU 10.0), and is seen only if its VM is asked. The image may be removed meanwhile.
//! The node then never becomes a disk, unless a person has wrongly stated by force that a VM that had the volume
//! does not have it.
//!
//! **A second host half is not modelled.** A process that uses a pool has locked its directory (`.lock`, flock(2),
//! which ends with the process), and without the lock nothing of the pool is read or written: see
//! `a_pool_is_of_one_program` among the tests of the pools. The model does include that a host half is killed and
//! another one starts, and that commands which the first has sent to a QEMU outlive it. Another host, with other
//! directories and QEMUs, shares no volume. Where the backend is the API of a cluster, the leading replica writes
//! a record only if the record is still as it was read; the tests of that backend cover this.
//!
//! Each state is checked in two ways: `check` (nothing bad has happened) and `success` (everything succeeds as
//! soon as nothing more goes wrong). `mutants` shows that both would notice faults: it runs the model with
//! programs that are wrong in one place.

use std::collections::{HashMap, VecDeque};

use super::super::backends::authority::{Open, Said, Verdict, judge};
use super::super::backends::volumes::{Holder, Place, Published};
use super::protocol::{Next, Request, next};

mod facts;
mod mutants;
mod steps;
mod success;

use facts::{Command, Has, Held, NAMES, Qemu, Record, VMS, place};
use success::Successes;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Wanted {
    Publish(usize),
    Unpublish { by_force: bool },
    Remove,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Doing {
    /// About to look for what another program has plugged.
    Begun,
    /// A VM other than that of the record has it.
    Conceding,
    Deciding(Option<Held>),
    /// A command was sent to this VM. `was_empty`: there was no record before.
    Sent {
        to: usize,
        command: Command,
        was_empty: bool,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Operation {
    wanted: Wanted,
    doing: Doing,
    /// True if this operation has written the record of a volume that another program had plugged.
    has_recognised: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct State {
    image: bool,
    record: Option<Record>,
    /// True if no request has caused the record: it describes a volume that another program had plugged, and that was
    /// to be unpublished.
    is_found: bool,
    /// True if a person has stated by force that no VM has the volume, although one had it.
    was_wrong: bool,
    /// Violation of the protocol, if one has happened.
    wrong: Option<&'static str>,
    qemus: [Qemu; VMS],
    operation: Option<Operation>,
}

/// Possible next events, each with the resulting state.
type Steps = Vec<(&'static str, State)>;

/// Variant of the environment and the program that is explored.
#[derive(Debug, Clone, Copy)]
struct World {
    /// True if the kernel can say whether an image is open.
    is_local: bool,
    /// True if people detach volumes by force.
    has_force: bool,
    /// Another program plugs the volume, too.
    has_others: bool,
    program: Program,
}

/// Function with the signature of [`next`].
type Decide = fn(Request<'_>, Option<&Published>, Option<&Holder>) -> Next;
/// Function with the signature of [`judge`].
type Judge = fn(Option<(&Place, &Said)>, Option<Open>) -> Verdict;

/// Behaviour of the host half, correct or with one fault.
#[derive(Debug, Clone, Copy)]
struct Program {
    next: Decide,
    judge: Judge,
    /// Fault: a guest that has refused to let go of the disk is assumed to keep it, although QEMU may have asked it
    /// before.
    forgets_that_it_leaves: bool,
    /// True if an image is removed only when no QEMU has locked it.
    minds_locks: bool,
    /// True if nodes that no disk uses are closed before an image is removed.
    closes_nodes: bool,
}

const PROGRAM: Program =
    Program { next, judge, forgets_that_it_leaves: false, minds_locks: true, closes_nodes: true };

impl World {
    /// Reports whether the host half speaks to QEMU itself, which opens an image and plugs it in two steps. Disks of
    /// other programs are supported only where a management layer does both in one step.
    fn has_nodes(self) -> bool {
        !self.has_others
    }
}

impl Wanted {
    fn begun(self, world: World) -> Operation {
        let doing = match self {
            Self::Unpublish { .. } if world.has_others => Doing::Begun,
            _ => Doing::Deciding(None),
        };
        Operation { wanted: self, doing, has_recognised: false }
    }
}

impl State {
    fn new() -> Self {
        let qemus = [Qemu::new(), Qemu::new()];
        let (record, wrong, operation) = (None, None, None);
        Self { image: true, record, is_found: false, was_wrong: false, wrong, qemus, operation }
    }

    fn is_locked_for(&self, vm: usize) -> bool {
        self.qemus.iter().enumerate().any(|(other, qemu)| other != vm && qemu.has.is_disk())
    }

    /// Returns all possible states after a QEMU has carried out its pending command, the wanted one first.
    fn carried_out(&self, vm: usize, world: World) -> Vec<Self> {
        let (is_there, is_locked) = (self.image, self.is_locked_for(vm));
        let outcomes = self.qemus[vm].carried_out(is_there, is_locked, world.has_nodes());
        let with = |qemu| {
            let mut state = *self;
            state.qemus[vm] = qemu;
            state
        };
        outcomes.into_iter().map(with).collect()
    }

    fn forget(&mut self) {
        (self.record, self.is_found) = (None, false);
    }

    fn leaves(&mut self, is_leaving: bool) {
        if let Some(record) = &mut self.record {
            record.leaving = is_leaving;
        }
    }

    fn held(&self, world: World) -> Held {
        let remembered = self.record.map(|record| (place(record.vm), self.qemus[record.vm].said()));
        let remembered = remembered.as_ref().map(|(place, said)| (place, said));
        let has = |qemu: &Qemu| qemu.has != Has::Nothing;
        // A local kernel sees every open image; otherwise only the locks of disks show.
        let is_seen =
            self.qemus.iter().any(|qemu| if world.is_local { has(qemu) } else { qemu.has.is_disk() });
        let says = |qemu: &Qemu| is_seen && has(qemu) && qemu.can_be_asked();
        let open = if let Some(vm) = self.qemus.iter().position(says) {
            Open::By(place(vm))
        } else if is_seen {
            Open::BySomebody(String::new())
        } else if !world.is_local && self.image {
            Open::Untold(String::new())
        } else {
            Open::Nobody
        };
        match (world.program.judge)(remembered, Some(open)) {
            Verdict::Is(holder) => holder.into(),
            Verdict::Look => panic!("the image was looked at"),
        }
    }

    /// Returns an equivalent state, without differences that no longer matter.
    fn simple(mut self) -> Self {
        self.qemus = self.qemus.map(Qemu::simple);
        // The VM that was wrongly said not to have the volume no longer has it.
        self.was_wrong &= self.qemus.iter().any(|qemu| qemu.has != Has::Nothing || qemu.pending.is_some());
        self
    }

    /// Returns all possible next events and states.
    fn followers(&self, world: World) -> Steps {
        let mut all = Vec::new();
        for vm in 0..VMS {
            self.happens_to(vm, world, &mut all);
        }
        let mut killed = Self { operation: None, ..*self };
        // Killed between writing the record and the guest's answer, the next run takes the record for a requested one.
        killed.is_found = false;
        for qemu in &mut killed.qemus {
            qemu.end_was_seen = false;
        }
        all.push(("the host half is killed", killed));
        match &self.operation {
            None => {
                let mut wanted = vec![Wanted::Unpublish { by_force: false }, Wanted::Remove];
                wanted.extend((0..VMS).map(Wanted::Publish));
                if world.has_force {
                    wanted.push(Wanted::Unpublish { by_force: true });
                }
                for wanted in wanted.into_iter().filter(|_| self.image) {
                    let state = Self { operation: Some(wanted.begun(world)), ..*self };
                    all.push(("a request", state));
                }
                all.extend(self.repaired(world));
            }
            Some(operation) => all.extend(self.step(world, *operation)),
        }
        for (_, state) in &mut all {
            *state = state.simple();
        }
        all.retain(|(_, state)| state != self);
        all
    }

    /// Adds the events of a VM that do not depend on the host half.
    fn happens_to(&self, vm: usize, world: World, all: &mut Steps) {
        let mut add = |what: &'static str, change: &dyn Fn(&mut Qemu)| {
            let mut state = *self;
            change(&mut state.qemus[vm]);
            all.push((what, state));
        };
        let qemu = &self.qemus[vm];
        let is_listed = qemu.is_listed;
        add("a VM is listed or not", &|qemu| qemu.is_listed ^= true);
        if !qemu.runs {
            add("a VM starts", &|qemu| *qemu = Qemu { is_listed, ..Qemu::new() });
            return;
        }
        add("a VM ends", &|qemu| {
            *qemu = Qemu { runs: false, end_was_seen: is_listed, is_listed, ..Qemu::new() }
        });
        add("a VM answers or not", &|qemu| qemu.answers ^= true);
        if qemu.has.is_asked() {
            add("a guest lets go of the disk", &|qemu| qemu.has = Has::Node);
        }
        if world.has_others && (qemu.has == Has::Nothing || qemu.has.is_as_is()) {
            let is_free = self.image && !self.is_locked_for(vm);
            add("a VM is meddled with by another program", &|qemu| qemu.is_meddled_with(is_free));
        }
        if qemu.pending.is_some() {
            let done = self.carried_out(vm, world).into_iter();
            all.extend(done.map(|state| ("a VM carries out what it was sent", state)));
        }
    }

    fn check(&self) -> Result<(), &'static str> {
        let writers = self.qemus.iter().filter(|qemu| qemu.has.is_disk()).count();
        if writers > 1 {
            return Err("two VMs write to one image");
        }
        if writers > 0 && !self.image && !self.was_wrong {
            return Err("an image that is open was removed");
        }
        self.wrong.map_or(Ok(()), Err)
    }
}

/// Explores all possible states, and returns their number.
///
/// # Errors
/// A description of the first wrong state, and of the events that lead to it.
fn explore(world: World) -> Result<usize, String> {
    let first = State::new();
    let mut known = HashMap::from([(first, None)]);
    let mut waiting = VecDeque::from([first]);
    let mut successes = Successes::default();
    while let Some(state) = waiting.pop_front() {
        for (what, follower) in state.followers(world) {
            if known.contains_key(&follower) {
                continue;
            }
            known.insert(follower, Some((what, state)));
            if let Err(problem) = follower.check().and_then(|()| successes.check(&follower, world)) {
                let mut way = vec![format!("{follower:?}")];
                let mut at = &follower;
                while let Some((what, before)) = &known[at] {
                    way.extend([(*what).to_owned(), format!("{before:?}")]);
                    at = before;
                }
                way.reverse();
                return Err(format!("{problem} in {world:?}: {way:#?}"));
            }
            waiting.push_back(follower);
        }
    }
    Ok(known.len())
}

fn worlds(program: Program) -> impl Iterator<Item = World> {
    (0..8).map(move |bits| World {
        is_local: bits & 1 > 0,
        has_force: bits & 2 > 0,
        has_others: bits & 4 > 0,
        program,
    })
}

fn explore_all(has_others: bool) {
    for world in worlds(PROGRAM).filter(|world| world.has_others == has_others) {
        let states = explore(world).unwrap_or_else(|problem| panic!("{problem}"));
        assert!(states > 5000, "{world:?}: nothing happens in {states} states");
    }
}

#[test]
fn no_order_of_events_gives_a_volume_two_writers_or_loses_it() {
    explore_all(false);
}

#[test]
fn nor_does_one_in_which_another_program_plugs_it_too() {
    explore_all(true);
}
