//! Nothing is lost: from every possible state, all requests succeed as soon as nothing more goes wrong. All VMs
//! are then listed and answer, pending commands are carried out, guests let go of disks when asked, no other
//! program interferes, and callers repeat refused requests.
//!
//! A VM that is off may remain off, except where the kernel cannot say whether an image is open. There, either a
//! person who knows that the VM has ended must say so (`--force`), or the VM must start again and answer for
//! itself.

use std::collections::HashSet;

use super::{Doing, Has, Qemu, State, VMS, Wanted, World};

/// Limit of steps, which is more than any request takes.
const MANY: usize = 40;
/// Number of times that a request is repeated.
const TIMES: usize = 3;

/// States that have been checked. Many states become the same when nothing more goes wrong.
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
    /// Returns the state from which nothing goes wrong any longer. VMs that are off are started if `is_started`.
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

    /// Completes a VM's pending command, and has its guest let go of a disk if asked to.
    fn settled(&self, world: World, vm: usize) -> Self {
        let mut state = self.carried_out(vm, world).swap_remove(0);
        if state.qemus[vm].has.is_asked() {
            state.qemus[vm].has = Has::Node;
        }
        state
    }

    /// Completes the operation that is under way.
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

    /// Repeats a request until it is done.
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
        // A published volume may be published again to the same VM.
        if let Some(record) = state.record.filter(|record| !record.leaving && !others(&state)) {
            let vm = record.vm;
            if state.qemus[vm].runs && state.qemus[1 - vm].has == Has::Nothing {
                state = state.publishes(world, vm)?;
            }
        }
        // Without the kernel's answer, only a person can say that a VM which is off no longer has the volume.
        let by_force = !world.is_local && !state.has_all_running();
        // A disk that another program has plugged stays.
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
