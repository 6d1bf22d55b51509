//! Steps of the host half in the model, one after the other, until the operation ends. Of several possible next
//! steps, the last is the one that is taken if nothing goes wrong.

use super::super::protocol::{Next, Request};
use super::facts::at;
use super::{Command, Doing, Has, Held, NAMES, Operation, Qemu, Record, State, Steps, VMS, Wanted, World};

impl State {
    /// Returns the operations that repair may begin.
    pub fn repaired(&self, world: World) -> Steps {
        let mut all = Vec::new();
        for vm in (0..VMS).filter(|vm| self.qemus[*vm].is_ready()) {
            let mut state = *self;
            let (has, is_its) = (self.qemus[vm].has, self.record.filter(|record| record.vm == vm));
            match (has.is_disk(), is_its) {
                (true, None) if has.is_as_is() => {}
                (true, None) => {
                    state.operation = Some(Wanted::Unpublish { by_force: false }.begun(world));
                    all.extend(state.take_back(vm).map(|state| ("repair takes it back", state)));
                }
                (false, Some(Record { leaving: true, .. })) => {
                    state.qemus[vm].has = Has::Nothing;
                    state.forget();
                    all.push(("repair forgets", state));
                }
                (false, Some(_)) => {
                    if self.is_found {
                        state.wrong = Some("repair plugs what nobody has asked for");
                    }
                    state.operation = Some(Wanted::Publish(vm).begun(world));
                    all.push(("repair plugs", state));
                }
                (true, Some(_)) | (false, None) => {}
            }
        }
        all
    }

    /// Sends a command to a VM; returns `None` if the VM cannot take it.
    fn sent(&self, to: usize, command: Command, was_empty: bool) -> Option<Self> {
        let mut state = *self;
        if !state.qemus[to].is_ready() {
            return None;
        }
        state.qemus[to].pending = Some(command);
        state.operation.as_mut()?.doing = Doing::Sent { to, command, was_empty };
        Some(state)
    }

    fn take_back(&self, vm: usize) -> Option<Self> {
        // A disk that another program has plugged is not taken back.
        let mut state = self.sent(vm, Command::Delete { as_is: false }, false)?;
        if self.qemus[vm].has.is_as_is() {
            return None;
        }
        state.record = Some(state.record.unwrap_or(Record { vm, leaving: true }));
        Some(state)
    }

    pub fn given_up(&self) -> Self {
        Self { operation: None, ..*self }
    }

    /// Ends a request to unpublish with success: its caller takes the volume to be free.
    fn unpublished(&self, world: World, operation: Operation) -> Self {
        let mut state = self.given_up();
        let has = state.qemus.iter().any(|qemu| qemu.has.is_disk() && !qemu.has.is_as_is());
        // Where other programs plug the volume too, one that gives way to them may be plugged late.
        let is_wrong = has && !state.was_wrong && !world.has_others;
        if is_wrong && operation.wanted == (Wanted::Unpublish { by_force: false }) {
            state.wrong = Some("unpublished, and a VM has it");
        }
        state
    }

    /// Ends the operation with an error. A record that it wrote for another program's disk is removed if the disk
    /// stays.
    fn failed(&self, operation: Operation) -> Self {
        let mut state = self.given_up();
        if operation.has_recognised && state.record.is_some_and(|record| !record.leaving) {
            state.forget();
        }
        state
    }

    /// Asks the VMs for the holder. A VM that answers has carried out or dropped its earlier command. Returns each
    /// possible state with the holder in it.
    fn asked(&self, world: World) -> Vec<(Self, Held)> {
        let mut outcomes = vec![*self];
        for vm in (0..VMS).filter(|vm| self.qemus[*vm].can_be_asked() && self.qemus[*vm].pending.is_some()) {
            let mut all = Vec::new();
            for mut state in outcomes {
                all.extend(state.carried_out(vm, world));
                state.qemus[vm].pending = None;
                all.push(state);
            }
            outcomes = all;
        }
        outcomes.into_iter().map(|state| (state, state.held(world))).collect()
    }

    /// Looks for what another program has plugged, as far as it matters for a request to unpublish the volume.
    fn looked(&self, world: World, operation: Operation) -> Steps {
        let doing = |doing, has_recognised| Some(Operation { doing, has_recognised, ..operation });
        let Some(record) = self.record else {
            let is_found = |vm: &usize| self.qemus[*vm].has.is_as_is() && self.qemus[*vm].can_be_asked();
            // The request may name any of these VMs, or none.
            let mut all: Vec<_> = (0..VMS)
                .filter(is_found)
                .map(|vm| Self { record: Some(Record { vm, leaving: false }), is_found: true, ..*self })
                .collect();
            all.push(*self);
            for state in &mut all {
                state.operation = doing(Doing::Deciding(None), state.is_found);
            }
            return all.into_iter().map(|state| ("it looks for others'", state)).collect();
        };
        let follow = |(mut state, held): (Self, Held)| {
            let other = held.holder().other_than(Some(&record.published()));
            let next = match other.as_ref().map(at) {
                Some(other) if state.qemus[other].has.is_as_is() => Doing::Conceding,
                _ => Doing::Deciding(None),
            };
            state.operation = doing(next, false);
            ("it looks whether another VM has it", state)
        };
        self.asked(world).into_iter().map(follow).collect()
    }

    pub fn step(&self, world: World, operation: Operation) -> Steps {
        let held = match operation.doing {
            Doing::Begun => return self.looked(world, operation),
            Doing::Conceding => {
                let mut state = self.given_up();
                state.forget();
                return vec![("it is conceded", state)];
            }
            Doing::Deciding(held) => held,
            Doing::Sent { to, command, was_empty } => {
                return self.answered(world, operation, to, command, was_empty);
            }
        };
        let request = match operation.wanted {
            Wanted::Publish(vm) => Request::Publish { uuid: NAMES[vm], read_only: false },
            Wanted::Unpublish { by_force } => Request::Unpublish { by_force },
            Wanted::Remove => Request::Remove { is_listed: false },
        };
        let mut state = *self;
        let (record, holder) = (self.record.map(Record::published), held.map(Held::holder));
        let decided = (world.program.next)(request, record.as_ref(), holder.as_ref());
        let deciding = |state: &mut Self, held| {
            state.operation = Some(Operation { doing: Doing::Deciding(held), ..operation });
        };
        match decided {
            Next::Ask => {
                let heard = self.asked(world).into_iter().map(|(mut state, held)| {
                    if held == Held::Off && state.qemus.iter().any(|qemu| qemu.has.is_disk()) {
                        state.wrong = Some("it is held, and said to be free");
                    }
                    deciding(&mut state, Some(held));
                    ("it is asked who holds it", state)
                });
                heard.collect()
            }
            Next::Forget => {
                let may_have =
                    self.qemus.iter().any(|qemu| qemu.has != Has::Nothing || qemu.pending.is_some());
                let is_by_force = operation.wanted == Wanted::Unpublish { by_force: true };
                state.was_wrong |= may_have && is_by_force && held == Some(Held::Unknown);
                state.forget();
                deciding(&mut state, None);
                vec![("it is forgotten", state)]
            }
            Next::Plug => {
                let Wanted::Publish(vm) = operation.wanted else { panic!("nobody asked for that") };
                self.plugged(operation, vm)
            }
            Next::Unplug(from) => {
                let vm = at(&from);
                let mut refused = self.failed(operation);
                // Where another program also unplugs the disk, it decides whether the volume is still to leave.
                if world.program.forgets_that_it_leaves || world.has_others {
                    refused.leaves(false);
                }
                let refused = ("the guest keeps it", refused);
                let as_is = self.qemus[vm].has.is_as_is();
                let Some(mut state) = self.sent(vm, Command::Delete { as_is }, false) else {
                    return vec![refused];
                };
                (state.record, state.is_found) = (Some(Record { vm, leaving: true }), false);
                vec![refused, ("it is unplugged", state)]
            }
            Next::TakeBack(from) => {
                let state = self.take_back(at(&from));
                let state = state.unwrap_or_else(|| self.failed(operation));
                vec![("it is taken back", state)]
            }
            Next::Remove => {
                self.removed(world).into_iter().map(|state| ("it is removed, or in use", state)).collect()
            }
            Next::Done => vec![("it is done", self.unpublished(world, operation))],
            Next::Refuse(_) => vec![("it is refused", self.failed(operation))],
            Next::Resize(_) => panic!("nobody asked for that"),
        }
    }

    /// Removes the image, unless it is seen to be in use. If it is open, or that cannot be determined, the VMs are
    /// asked first, and close the nodes left over from former disks.
    fn removed(&self, world: World) -> Vec<Self> {
        let mut all = Vec::new();
        let is_open = !world.is_local || self.qemus.iter().any(|qemu| qemu.has != Has::Nothing);
        let asked = if is_open && world.program.closes_nodes {
            self.asked(world).into_iter().map(|(state, _)| state).collect()
        } else {
            vec![*self]
        };
        for mut state in asked {
            if is_open && world.program.closes_nodes {
                let has_node = |qemu: &&mut Qemu| qemu.has == Has::Node && qemu.can_be_asked();
                state.qemus.iter_mut().filter(has_node).for_each(|qemu| qemu.has = Has::Nothing);
            }
            let is_seen = |qemu: &Qemu| {
                let is_locked = qemu.has.is_disk() && world.program.minds_locks;
                world.is_local && qemu.has != Has::Nothing || is_locked
            };
            if !state.qemus.iter().any(is_seen) {
                (state.image, state.record, state.is_found) = (false, None, false);
            }
            all.push(state.given_up());
        }
        all
    }

    /// Records that this VM has the volume, and sends the next command that is needed for it.
    fn plugged(&self, operation: Operation, vm: usize) -> Steps {
        let (was_empty, state) = match operation.doing {
            Doing::Sent { was_empty, .. } => (was_empty, *self),
            _ if !self.qemus[vm].is_ready() => return vec![("it cannot be plugged", self.given_up())],
            _ => {
                let record = Some(Record { vm, leaving: false });
                (self.record.is_none(), Self { record, is_found: false, ..*self })
            }
        };
        let command = match state.qemus[vm].has {
            Has::Nothing => Command::Open,
            Has::Node => Command::Plug,
            Has::Disk { is_asked, .. } => {
                let mut state = state.given_up();
                // The guest would write to a disk that is about to vanish.
                if is_asked && !state.was_wrong {
                    state.wrong = Some("published, and the guest was asked to let go of it");
                }
                return vec![("it is there", state)];
            }
        };
        let lost = ("the connection is lost", state.given_up());
        match state.sent(vm, command, was_empty) {
            Some(sent) => vec![lost, ("it is plugged", sent)],
            None => vec![lost],
        }
    }

    /// Takes in the answer to a command, which may also be lost.
    fn answered(
        &self,
        world: World,
        operation: Operation,
        to: usize,
        command: Command,
        was_empty: bool,
    ) -> Steps {
        let mut all = vec![("the connection is lost", self.failed(operation))];
        if !self.qemus[to].is_ready() {
            return all;
        }
        let mut state = *self;
        let has = self.qemus[to].has;
        match (command, has) {
            (Command::Open, Has::Nothing) | (Command::Plug, Has::Nothing | Has::Node) => {
                // Refused: a record that did not exist before is removed. A node that cannot be closed stays.
                if was_empty {
                    state.forget();
                }
                all.push(("it is refused, and its node stays", state.given_up()));
                state.qemus[to].has = Has::Nothing;
                all.push(("it is refused", state.given_up()));
            }
            (Command::Open | Command::Plug, _) => {
                all.extend(self.plugged(operation, to));
            }
            // Another program has plugged it again meanwhile, in this VM or another, so it was not seen to be free.
            (Command::Delete { .. }, _) if self.qemus.iter().any(|qemu| qemu.has.is_as_is()) => {
                all.push(("it is in use again", self.failed(operation)));
            }
            (Command::Delete { .. }, Has::Disk { is_asked, .. }) => {
                if !is_asked {
                    state.wrong = Some("a VM has it again");
                }
                all.push(("the guest has not let go of it in time", state.failed(operation)));
                state.qemus[to].has = Has::DISK;
                state.leaves(false);
                all.push(("the guest's kernel refuses", state.failed(operation)));
            }
            (Command::Delete { .. }, Has::Nothing | Has::Node) => {
                state.qemus[to].has = Has::Nothing;
                if self.record.is_some_and(|record| record.vm == to) {
                    state.forget();
                    all.push(("it is unpublished", state.unpublished(world, operation)));
                    return all;
                }
                if let Some(operation) = &mut state.operation {
                    operation.doing = Doing::Deciding(None);
                }
                all.push(("taken back", state));
            }
        }
        all
    }
}
