//! All that can happen to a volume, two VMs and the host half: every order of requests, steps, ends and silences, with the
//! two functions that the program itself decides by ([`next`] and [`judge`]). What QEMU is believed to do is written down
//! here: it opens an image only if that is there and no other QEMU uses it, and carries out what it was sent before it
//! answers another connection. One that hangs may carry it out long after, when the volume is free: then it finds the
//! image in use or gone, or has it without being remembered, and repair takes it back.
//!
//! Another program may plug and unplug the volume, too, in its own way. What it has plugged is taken only from the VM that is said to
//! have it, and repair neither takes it away nor puts it back.

use std::collections::{HashMap, VecDeque};

use super::super::backends::authority::{Open, Verdict, judge};
use super::super::backends::volumes::{Holder, Published};
use super::protocol::{Next, Request, next};

mod facts;

use facts::{Command, NAMES, Qemu, VMS, place, published, vm_of};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Wanted {
    Publish(usize),
    Unpublish { by_force: bool },
    Remove,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Doing {
    /// It is looked what another program has plugged.
    Begun,
    /// Another VM has it than the record's.
    Conceding,
    Deciding(Option<Holder>),
    /// It was sent to this VM; the record was empty before.
    Sent {
        to: usize,
        command: Command,
        was_empty: bool,
    },
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Operation {
    wanted: Wanted,
    doing: Doing,
    /// It has written the record, of what another program had plugged.
    has_recognised: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct State {
    image: bool,
    record: Option<Published>,
    /// Nobody has asked for what the record says: it is of what another program had plugged, and was to be taken away.
    is_found: bool,
    qemus: [Qemu; VMS],
    operation: Option<Operation>,
}

/// What a model is of.
#[derive(Debug, Clone, Copy)]
struct World {
    /// The kernel can say whether an image is open. Where it cannot, as on NFS, the locks say it that QEMU has on an image, but
    /// they do not say that nobody has it.
    is_local: bool,
    /// People force volumes out of VMs.
    has_force: bool,
    /// Another program plugs it, too.
    has_others: bool,
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
        Self { image: true, record: None, is_found: false, qemus, operation: None }
    }

    fn is_free(&self) -> bool {
        self.image && self.qemus.iter().all(|qemu| !qemu.has_image)
    }

    /// A QEMU carries out what it was sent.
    fn carry_out(&mut self, vm: usize) {
        let is_free = self.is_free();
        self.qemus[vm].carry_out(is_free);
    }

    fn forget(&mut self) {
        (self.record, self.is_found) = (None, false);
    }

    fn holder(&self, world: World) -> Holder {
        let remembered = self.record.as_ref().map(|record| {
            let vm = vm_of(&record.uuid);
            (place(vm), self.qemus[vm].said())
        });
        let remembered = remembered.as_ref().map(|(place, said)| (place, said));
        let has = |qemu: &&Qemu| qemu.has_image;
        let open = if let Some(vm) = self.qemus.iter().position(|qemu| qemu.has_image && qemu.can_be_asked())
        {
            Open::By(place(vm))
        } else if self.qemus.iter().any(|qemu| has(&qemu)) {
            // By the kernel, or by the locks that QEMU has on it wherever it is.
            Open::BySomebody(String::new())
        } else if !world.is_local && self.image {
            Open::Untold(String::new())
        } else {
            Open::Nobody
        };
        match judge(remembered, Some(open)) {
            Verdict::Is(Holder::Unknown(_)) => Holder::Unknown(String::new()),
            Verdict::Is(Holder::On(found)) => Holder::On(place(vm_of(&found.uuid))),
            Verdict::Is(Holder::Off) => Holder::Off,
            Verdict::Look => panic!("the image was looked at"),
        }
    }

    /// All that can be next.
    fn followers(&self, world: World) -> Vec<(String, Self)> {
        let mut all = Vec::new();
        let mut add = |what: String, change: &dyn Fn(&mut Self)| {
            let mut state = self.clone();
            change(&mut state);
            if state != *self {
                all.push((what, state));
            }
        };
        for vm in 0..VMS {
            let qemu = &self.qemus[vm];
            if qemu.runs {
                add(format!("{vm} ends"), &|state| {
                    let seen = &mut state.qemus[vm];
                    *seen = Qemu {
                        runs: false,
                        end_was_seen: seen.is_listed,
                        is_listed: seen.is_listed,
                        ..Qemu::new()
                    };
                });
                add(format!("{vm} answers or not"), &|state| state.qemus[vm].answers ^= true);
                add(format!("{vm} carries out"), &|state| state.carry_out(vm));
                if world.has_others && qemu.has_image == qemu.as_is {
                    let is_free = self.is_free();
                    add(format!("another program meddles with {vm}"), &|state| {
                        state.qemus[vm].is_meddled_with(is_free);
                    });
                }
            } else {
                add(format!("{vm} starts"), &|state| {
                    state.qemus[vm] = Qemu { is_listed: state.qemus[vm].is_listed, ..Qemu::new() };
                });
            }
            add(format!("{vm} is listed or not"), &|state| state.qemus[vm].is_listed ^= true);
        }
        add("the host half is killed".into(), &|state| {
            state.operation = None;
            // Between the record and the guest's answer: it is taken for one that somebody has asked for.
            state.is_found = false;
            for qemu in &mut state.qemus {
                qemu.end_was_seen = false;
            }
        });
        match &self.operation {
            None => {
                let mut wanted = vec![Wanted::Unpublish { by_force: false }, Wanted::Remove];
                wanted.extend((0..VMS).map(Wanted::Publish));
                if world.has_force {
                    wanted.push(Wanted::Unpublish { by_force: true });
                }
                for wanted in wanted.into_iter().filter(|_| self.image) {
                    add(format!("{wanted:?}"), &|state| state.operation = Some(wanted.begun(world)));
                }
                all.extend(self.repaired(world));
            }
            Some(operation) => all.extend(self.step(world, operation)),
        }
        all
    }

    /// What repair begins.
    fn repaired(&self, world: World) -> Vec<(String, Self)> {
        let mut all = Vec::new();
        for vm in (0..VMS).filter(|vm| self.qemus[*vm].can_be_asked() && self.qemus[*vm].pending.is_none()) {
            let mut state = self.clone();
            let (has, record) = (self.qemus[vm].has_image, self.record.as_ref());
            let is_its = record.filter(|record| record.uuid == NAMES[vm]);
            match (has, is_its) {
                (true, None) if self.qemus[vm].as_is => {}
                (true, None) => {
                    state.operation = Some(Wanted::Unpublish { by_force: false }.begun(world));
                    all.extend(state.take_back(vm).map(|state| ("repair takes it back".to_owned(), state)));
                }
                (false, Some(Published { leaving: true, .. })) => {
                    state.forget();
                    all.push(("repair forgets".to_owned(), state));
                }
                (false, Some(_)) => {
                    assert!(!self.is_found, "nobody has asked for what repair plugs: {self:#?}");
                    state.operation = Some(Wanted::Publish(vm).begun(world));
                    all.push(("repair plugs".to_owned(), state));
                }
                (true, Some(_)) | (false, None) => {}
            }
        }
        all
    }

    /// With a command on its way; none if the VM cannot be told it.
    fn sent(&self, to: usize, command: Command, was_empty: bool) -> Option<Self> {
        let mut state = self.clone();
        if !state.qemus[to].can_be_asked() || state.qemus[to].pending.is_some() {
            return None;
        }
        state.qemus[to].pending = Some(command);
        state.operation.as_mut()?.doing = Doing::Sent { to, command, was_empty };
        Some(state)
    }

    fn take_back(&self, vm: usize) -> Option<Self> {
        // What another program has plugged is that program's.
        let mut state = self.sent(vm, Command::Delete { as_is: false }, false)?;
        if self.qemus[vm].as_is {
            return None;
        }
        state.record = Some(state.record.unwrap_or_else(|| published(vm, true)));
        Some(state)
    }

    fn given_up(&self) -> Self {
        Self { operation: None, ..self.clone() }
    }

    /// With an error: what was found of another program's is that program's again if it stays.
    fn failed(&self, operation: &Operation) -> Self {
        let mut state = self.given_up();
        if operation.has_recognised && state.record.as_ref().is_some_and(|record| !record.leaving) {
            state.forget();
        }
        state
    }

    /// Who answers has carried out, or dropped, what it was sent before: each state with who holds it then.
    fn asked(&self, world: World) -> Vec<(Self, Holder)> {
        let mut outcomes = vec![self.clone()];
        for vm in (0..VMS).filter(|vm| self.qemus[*vm].can_be_asked()) {
            let mut both = Vec::new();
            for state in outcomes {
                let (mut done, mut dropped) = (state.clone(), state);
                done.carry_out(vm);
                dropped.qemus[vm].pending = None;
                both.extend([done, dropped]);
            }
            outcomes = both;
        }
        let held = |state: Self| {
            let holder = state.holder(world);
            (state, holder)
        };
        outcomes.into_iter().map(held).collect()
    }

    /// What another program has plugged, as far as it counts for a request to take the volume away.
    fn looked(&self, world: World, operation: &Operation) -> Vec<(String, Self)> {
        let doing = |doing, has_recognised| Some(Operation { doing, has_recognised, ..operation.clone() });
        let Some(record) = &self.record else {
            let is_found = |vm: &usize| self.qemus[*vm].as_is && self.qemus[*vm].can_be_asked();
            // Whoever asks means one of them, or none.
            let mut all: Vec<_> = (0..VMS)
                .filter(is_found)
                .map(|vm| Self { record: Some(published(vm, false)), is_found: true, ..self.clone() })
                .collect();
            all.push(self.clone());
            for state in &mut all {
                state.operation = doing(Doing::Deciding(None), state.is_found);
            }
            return all.into_iter().map(|state| ("it looks for others'".to_owned(), state)).collect();
        };
        let follow = |(mut state, holder): (Self, Holder)| {
            let other = holder.other_than(Some(record)).map(|other| vm_of(&other.uuid));
            let next = match other {
                Some(other) if state.qemus[other].as_is => Doing::Conceding,
                _ => Doing::Deciding(None),
            };
            state.operation = doing(next, false);
            ("it looks whether another VM has it".to_owned(), state)
        };
        self.asked(world).into_iter().map(follow).collect()
    }

    fn step(&self, world: World, operation: &Operation) -> Vec<(String, Self)> {
        let holder = match &operation.doing {
            Doing::Begun => return self.looked(world, operation),
            Doing::Conceding => {
                let mut state = self.given_up();
                state.forget();
                return vec![("it is conceded".to_owned(), state)];
            }
            Doing::Deciding(holder) => holder.as_ref(),
            Doing::Sent { to, command, was_empty } => {
                return self.answered(operation, *to, *command, *was_empty);
            }
        };
        let request = match operation.wanted {
            Wanted::Publish(vm) => Request::Publish { uuid: NAMES[vm], read_only: false },
            Wanted::Unpublish { by_force } => Request::Unpublish { by_force },
            Wanted::Remove => Request::Remove { is_listed: false },
        };
        let mut state = self.clone();
        let decided = next(request, self.record.as_ref(), holder);
        let what = format!("{:?}: {decided:?}", operation.wanted);
        let deciding = |state: &mut Self, holder| {
            state.operation = Some(Operation { doing: Doing::Deciding(holder), ..operation.clone() });
        };
        match decided {
            Next::Ask => {
                let heard = self.asked(world).into_iter().map(|(mut state, holder)| {
                    let held = state.qemus.iter().any(|qemu| qemu.has_image);
                    assert!(holder != Holder::Off || !held, "held, and said to be free: {state:#?}");
                    deciding(&mut state, Some(holder));
                    (what.clone(), state)
                });
                heard.collect()
            }
            Next::Forget => {
                state.forget();
                deciding(&mut state, None);
                vec![(what, state)]
            }
            Next::Plug => {
                let Wanted::Publish(vm) = operation.wanted else { panic!("{what}") };
                let Some(mut state) = self.sent(vm, Command::Add, self.record.is_none()) else {
                    return vec![(format!("{what} cannot be"), self.given_up())];
                };
                (state.record, state.is_found) = (Some(published(vm, false)), false);
                vec![(what, state)]
            }
            Next::Unplug(from) => {
                let vm = vm_of(&from.uuid);
                let refused = (format!("{what}, and it stays"), self.failed(operation));
                let as_is = self.qemus[vm].as_is;
                let Some(mut state) = self.sent(vm, Command::Delete { as_is }, false) else {
                    return vec![refused];
                };
                (state.record, state.is_found) = (Some(published(vm, true)), false);
                vec![refused, (what, state)]
            }
            Next::TakeBack(from) => {
                let state = self.take_back(vm_of(&from.uuid));
                let state = state.unwrap_or_else(|| self.failed(operation));
                vec![(what, state)]
            }
            Next::Remove => {
                // It is claimed until its image is gone: as the kernel has it, or by the locks that QEMU looks for.
                if self.qemus.iter().any(|qemu| qemu.has_image) {
                    return vec![(format!("{what}, and it is in use"), self.given_up())];
                }
                state = State { image: false, record: None, is_found: false, ..state.given_up() };
                vec![(what, state)]
            }
            Next::Done => vec![(what, self.given_up())],
            Next::Refuse(_) => vec![(what, self.failed(operation))],
            Next::Resize(_) => panic!("nobody asked for that"),
        }
    }

    /// The answer to a command, which may be lost.
    fn answered(
        &self,
        operation: &Operation,
        to: usize,
        command: Command,
        was_empty: bool,
    ) -> Vec<(String, Self)> {
        let mut all = vec![("the connection is lost".to_owned(), self.failed(operation))];
        if self.qemus[to].pending.is_some() || !self.qemus[to].can_be_asked() {
            return all;
        }
        let mut state = self.clone();
        let has = self.qemus[to].has_image;
        match command {
            Command::Add => {
                // Refused: then nothing is remembered that was not remembered before.
                if !has && was_empty {
                    state.forget();
                }
                all.push((format!("published: {has}"), state.given_up()));
            }
            // Another program has plugged it again meanwhile, here or elsewhere: nobody has seen it free.
            Command::Delete { .. } if self.qemus.iter().any(|qemu| qemu.as_is) => {
                all.push(("it is in use again".to_owned(), self.failed(operation)));
            }
            Command::Delete { .. } => {
                assert!(!has, "QEMU has it again: {self:#?}");
                if self.record.as_ref().is_some_and(|record| record.uuid == NAMES[to]) {
                    state.forget();
                    all.push(("unpublished".to_owned(), state.given_up()));
                    return all;
                }
                if let Some(operation) = &mut state.operation {
                    operation.doing = Doing::Deciding(None);
                }
                all.push(("taken back".to_owned(), state));
            }
        }
        all
    }

    fn check(&self) -> Result<(), &'static str> {
        let writers = self.qemus.iter().filter(|qemu| qemu.has_image).count();
        if writers > 1 {
            return Err("two VMs write to one image");
        }
        if writers > 0 && !self.image {
            return Err("an image that is open was removed");
        }
        Ok(())
    }

    /// What has become of it when all VMs answer, whatever they were sent is done, nobody meddles, guests are willing, and the volume is
    /// taken away from the VM that the record names.
    fn left(&self, world: World) -> Self {
        let mut state = self.given_up();
        for vm in 0..VMS {
            (state.qemus[vm].answers, state.qemus[vm].is_listed) = (true, true);
            state.carry_out(vm);
        }
        state.operation = Some(Wanted::Unpublish { by_force: false }.begun(world));
        while let Some(operation) = state.operation.clone() {
            if let Doing::Sent { to, .. } = operation.doing {
                state.carry_out(to);
            }
            state = state.step(world, &operation).pop().unwrap().1;
        }
        state
    }
}

/// Looks at all states that can be, and returns how many there are.
fn explore(world: World) -> usize {
    let mut known = HashMap::from([(State::new(), None)]);
    let mut waiting = VecDeque::from([State::new()]);
    while let Some(state) = waiting.pop_front() {
        for (what, follower) in state.followers(world) {
            if known.contains_key(&follower) {
                continue;
            }
            known.insert(follower.clone(), Some((what, state.clone())));
            let is_stuck = || world.is_local && follower.left(world).record.is_some();
            let checked = follower
                .check()
                .and_then(|()| if is_stuck() { Err("no request leaves the record") } else { Ok(()) });
            if let Err(problem) = checked {
                let mut way = Vec::new();
                let mut at = Some(&follower);
                while let Some((what, before)) = at.and_then(|at| known[at].as_ref()) {
                    way.push(what.as_str());
                    at = Some(before);
                }
                way.reverse();
                panic!("{problem} in {world:?}: {way:#?}\n{follower:#?}");
            }
            waiting.push_back(follower);
        }
    }
    known.len()
}

#[test]
fn no_order_of_events_gives_a_volume_two_writers_or_loses_it() {
    let worlds = (0..8).map(|bits| World {
        is_local: bits & 1 > 0,
        has_force: bits & 2 > 0,
        has_others: bits & 4 > 0,
    });
    for world in worlds {
        let states = explore(world);
        assert!(states > 1000, "{world:?}: nothing happens in {states} states");
    }
}
