//! That nothing is lost: from every state that can be all requests end in success as soon as nothing more goes wrong. Then all VMs are
//! listed and answer, whatever they were sent is done, guests let go of what they are asked to, nobody meddles, and whoever asks
//! repeats what was refused.
//!
//! A VM that is off may remain off, except where the kernel cannot say whether an image is open: there only somebody who knows that
//! it has ended can say so (`--force`), or it starts again and says it itself.

use std::collections::HashSet;

use super::{Doing, Has, Qemu, State, VMS, Wanted, World};

/// More steps than any request takes.
const MANY: usize = 40;
/// How often a request is repeated.
const TIMES: usize = 3;

/// What was looked at: many states come to the same when nothing more goes wrong.
#[derive(Debug, Default)]
pub struct Successes(HashSet<State>);

impl Successes {
    pub fn check(&mut self, state: &State, world: World) -> Result<(), &'static str> {
        for calm in [state.calm(world, true), state.calm(world, false)] {
            if self.0.insert(calm) {
                calm.succeeds(world)?;
            }
        }
        Ok(())
    }
}

impl State {
    /// The same, from when on nothing goes wrong; VMs that are off are started, or stay off.
    fn calm(&self, world: World, is_started: bool) -> Self {
        let mut state = *self;
        for vm in 0..VMS {
            let qemu = &mut state.qemus[vm];
            qemu.runs |= is_started;
            (qemu.answers, qemu.is_listed) = (true, true);
            state = state.settled(world, vm);
        }
        state
    }

    /// A VM has done what it was to do.
    fn settled(&self, world: World, vm: usize) -> Self {
        let mut state = self.carried_out(vm, world).swap_remove(0);
        if state.qemus[vm].has.is_asked() {
            state.qemus[vm].has = Has::Node;
        }
        state
    }

    /// The operation that is under way is done to its end.
    fn ended(mut self, world: World) -> Result<Self, &'static str> {
        for _ in 0..MANY {
            let Some(operation) = self.operation else { return Ok(self) };
            if let Doing::Sent { to, .. } = operation.doing {
                self = self.settled(world, to);
            }
            self = self.step(world, operation).pop().ok_or("an operation has no end")?.1;
        }
        Err("an operation goes on for ever")
    }

    /// A request, repeated until it is done.
    fn done(
        mut self,
        world: World,
        wanted: Wanted,
        is_done: impl Fn(&Self) -> bool,
        problem: &'static str,
    ) -> Result<Self, &'static str> {
        for _ in 0..TIMES {
            self.operation = Some(wanted.begun(world));
            self = self.ended(world)?;
            if is_done(&self) {
                return self.wrong.map_or(Ok(self), Err);
            }
        }
        Err(problem)
    }

    fn has_all_running(&self) -> bool {
        self.qemus.iter().all(|qemu| qemu.runs)
    }

    fn succeeds(self, world: World) -> Result<(), &'static str> {
        let mut state = self.ended(world)?;
        if !state.image {
            return Ok(());
        }
        let others = |state: &Self| state.qemus.iter().any(|qemu| qemu.has.is_as_is());
        // What is there may be published again to where it is.
        if let Some(record) = state.record.filter(|record| !record.leaving && !others(&state)) {
            let vm = record.vm;
            if state.qemus[vm].runs && state.qemus[1 - vm].has == Has::Nothing {
                state = state.publishes(world, vm)?;
            }
        }
        // Nobody else can say then that a VM which is off has it no more.
        let by_force = !world.is_local && !state.has_all_running();
        // What another program has plugged stays.
        let has = |qemu: &Qemu| qemu.has.is_disk() && !qemu.has.is_as_is();
        let is_free = |state: &Self| state.record.is_none() && !state.qemus.iter().any(has);
        let freed =
            state.done(world, Wanted::Unpublish { by_force }, is_free, "no request leaves the record")?;
        if others(&freed) {
            return Ok(());
        }
        for vm in (0..VMS).filter(|vm| freed.qemus[*vm].runs) {
            freed.publishes(world, vm)?;
        }
        let is_removed = |state: &Self| !state.image;
        freed.done(world, Wanted::Remove, is_removed, "no request removes it").map(drop)
    }

    fn publishes(self, world: World, vm: usize) -> Result<Self, &'static str> {
        let is_published = |state: &Self| {
            let is_remembered = state.record.is_some_and(|one| one.vm == vm && !one.leaving);
            is_remembered && state.qemus[vm].has == Has::DISK
        };
        self.done(world, Wanted::Publish(vm), is_published, "no request publishes it")
    }
}
