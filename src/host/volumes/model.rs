//! All that can happen to a volume, two VMs and the host half: every order of requests, steps, ends and silences, with the
//! two functions that the program itself decides by ([`next`] and [`judge`]). What QEMU is believed to do is written down
//! here: it opens an image only if that is there and no other QEMU uses it, and carries out what it was sent before it
//! answers another connection. One that hangs may carry it out long after, when the volume is free: then it finds the
//! image in use or gone, or has it without being remembered, and repair takes it back.

use std::collections::{HashMap, VecDeque};

use super::super::backends::authority::{Open, Said, Verdict, judge};
use super::super::backends::volumes::{Holder, Place, Published};
use super::protocol::{Next, Request, next};

const VMS: usize = 2;
const NAMES: [&str; VMS] = ["0", "1"];

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Command {
    Add,
    Delete,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
#[allow(clippy::struct_excessive_bools, reason = "each of them changes by itself")]
struct Qemu {
    runs: bool,
    answers: bool,
    is_listed: bool,
    has_image: bool,
    /// Sent, and not carried out yet.
    pending: Option<Command>,
    /// The host half saw its process end.
    end_was_seen: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Wanted {
    Publish(usize),
    Unpublish { by_force: bool },
    Remove,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Doing {
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
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct State {
    image: bool,
    record: Option<Published>,
    qemus: [Qemu; VMS],
    operation: Option<Operation>,
}

/// What a model is of.
#[derive(Debug, Clone, Copy)]
struct World {
    /// The kernel can say whether an image is open.
    is_local: bool,
    /// People force volumes out of VMs.
    has_force: bool,
}

fn place(vm: usize) -> Place {
    Place { uuid: NAMES[vm].into(), vm: NAMES[vm].into() }
}

fn vm_of(uuid: &str) -> usize {
    NAMES.iter().position(|name| *name == uuid).unwrap()
}

fn published(vm: usize, leaving: bool) -> Published {
    let name = || NAMES[vm].to_owned();
    Published { uuid: name(), vm: name(), node: name(), read_only: false, leaving }
}

impl Qemu {
    fn new() -> Self {
        Self {
            runs: true,
            answers: true,
            is_listed: true,
            has_image: false,
            pending: None,
            end_was_seen: false,
        }
    }

    fn can_be_asked(&self) -> bool {
        self.is_listed && self.runs && self.answers
    }

    fn said(&self) -> Said {
        match self {
            Self { is_listed: false, .. } => Said::Unlisted,
            Self { runs: false, .. } => Said::Absent { ended: self.end_was_seen },
            Self { answers: false, .. } => Said::Silent(String::new()),
            Self { has_image: true, .. } => Said::Has(String::new()),
            _ => Said::HasNot,
        }
    }
}

impl State {
    fn new() -> Self {
        Self { image: true, record: None, qemus: [Qemu::new(), Qemu::new()], operation: None }
    }

    /// A QEMU carries out what it was sent.
    fn carry_out(&mut self, vm: usize) {
        let is_free = self.image && self.qemus.iter().all(|qemu| !qemu.has_image);
        let qemu = &mut self.qemus[vm];
        match qemu.pending.take() {
            Some(Command::Add) => qemu.has_image |= is_free,
            Some(Command::Delete) => qemu.has_image = false,
            None => {}
        }
    }

    fn holder(&self, world: World) -> Holder {
        let remembered = self.record.as_ref().map(|record| {
            let vm = vm_of(&record.uuid);
            (place(vm), self.qemus[vm].said())
        });
        let remembered = remembered.as_ref().map(|(place, said)| (place, said));
        let has = |qemu: &&Qemu| qemu.has_image;
        let open = if !world.is_local && self.image {
            Open::Untold(String::new())
        } else if let Some(vm) = self.qemus.iter().position(|qemu| qemu.has_image && qemu.can_be_asked()) {
            Open::By(place(vm))
        } else if self.qemus.iter().any(|qemu| has(&qemu)) {
            Open::BySomebody(String::new())
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
            } else {
                add(format!("{vm} starts"), &|state| {
                    state.qemus[vm] = Qemu { is_listed: state.qemus[vm].is_listed, ..Qemu::new() };
                });
            }
            add(format!("{vm} is listed or not"), &|state| state.qemus[vm].is_listed ^= true);
        }
        add("the host half is killed".into(), &|state| {
            state.operation = None;
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
                    let doing = Doing::Deciding(None);
                    add(format!("{wanted:?}"), &|state| {
                        state.operation = Some(Operation { wanted, doing: doing.clone() });
                    });
                }
                all.extend(self.repaired());
            }
            Some(operation) => all.extend(self.step(world, operation)),
        }
        all
    }

    /// What repair begins.
    fn repaired(&self) -> Vec<(String, Self)> {
        let mut all = Vec::new();
        for vm in (0..VMS).filter(|vm| self.qemus[*vm].can_be_asked() && self.qemus[*vm].pending.is_none()) {
            let mut state = self.clone();
            let (has, record) = (self.qemus[vm].has_image, self.record.as_ref());
            let is_its = record.filter(|record| record.uuid == NAMES[vm]);
            match (has, is_its) {
                (true, None) => {
                    let wanted = Wanted::Unpublish { by_force: false };
                    let doing = Doing::Deciding(None);
                    state.operation = Some(Operation { wanted, doing });
                    all.extend(state.take_back(vm).map(|state| ("repair takes it back".to_owned(), state)));
                }
                (false, Some(Published { leaving: true, .. })) => {
                    state.record = None;
                    all.push(("repair forgets".to_owned(), state));
                }
                (false, Some(_)) => {
                    let wanted = Wanted::Publish(vm);
                    state.operation = Some(Operation { wanted, doing: Doing::Deciding(None) });
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
        let mut state = self.sent(vm, Command::Delete, false)?;
        state.record = Some(state.record.unwrap_or_else(|| published(vm, true)));
        Some(state)
    }

    fn given_up(&self) -> Self {
        Self { operation: None, ..self.clone() }
    }

    fn step(&self, world: World, operation: &Operation) -> Vec<(String, Self)> {
        let holder = match &operation.doing {
            Doing::Deciding(holder) => holder.as_ref(),
            Doing::Sent { to, command, was_empty } => return self.answered(*to, *command, *was_empty),
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
            state.operation = Some(Operation { wanted: operation.wanted, doing: Doing::Deciding(holder) });
        };
        match decided {
            Next::Ask => {
                // Who answers has carried out, or dropped, what it was sent before.
                let asked: Vec<_> = (0..VMS).filter(|vm| self.qemus[*vm].can_be_asked()).collect();
                let mut outcomes = vec![state];
                for vm in asked {
                    let mut both = Vec::new();
                    for state in outcomes {
                        let (mut done, mut dropped) = (state.clone(), state);
                        done.carry_out(vm);
                        dropped.qemus[vm].pending = None;
                        both.extend([done, dropped]);
                    }
                    outcomes = both;
                }
                let heard = outcomes.into_iter().map(|mut state| {
                    let holder = state.holder(world);
                    let has = |vm: usize| state.qemus[vm].has_image;
                    let remembered = state.record.as_ref().is_some_and(|record| has(vm_of(&record.uuid)));
                    let held = if world.is_local { (0..VMS).any(has) } else { remembered };
                    assert!(holder != Holder::Off || !held, "held, and said to be free: {state:#?}");
                    deciding(&mut state, Some(holder));
                    (what.clone(), state)
                });
                heard.collect()
            }
            Next::Forget => {
                state.record = None;
                deciding(&mut state, None);
                vec![(what, state)]
            }
            Next::Plug => {
                let Wanted::Publish(vm) = operation.wanted else { panic!("{what}") };
                let Some(mut state) = self.sent(vm, Command::Add, self.record.is_none()) else {
                    return vec![(format!("{what} cannot be"), self.given_up())];
                };
                state.record = Some(published(vm, false));
                vec![(what, state)]
            }
            Next::Unplug(from) => {
                let Some(mut state) = self.sent(vm_of(&from.uuid), Command::Delete, false) else {
                    return vec![(format!("{what} cannot be"), self.given_up())];
                };
                state.record = Some(published(vm_of(&from.uuid), true));
                vec![(what, state)]
            }
            Next::TakeBack(from) => {
                let state = self.take_back(vm_of(&from.uuid)).unwrap_or_else(|| self.given_up());
                vec![(what, state)]
            }
            Next::Remove => {
                if world.is_local && self.qemus.iter().any(|qemu| qemu.has_image) {
                    return vec![(format!("{what}, and it is in use"), self.given_up())];
                }
                state = State { image: false, record: None, ..state.given_up() };
                vec![(what, state)]
            }
            Next::Done | Next::Refuse(_) => vec![(what, self.given_up())],
            Next::Resize(_) => panic!("nobody asked for that"),
        }
    }

    /// The answer to a command, which may be lost.
    fn answered(&self, to: usize, command: Command, was_empty: bool) -> Vec<(String, Self)> {
        let mut all = vec![("the connection is lost".to_owned(), self.given_up())];
        if self.qemus[to].pending.is_some() || !self.qemus[to].can_be_asked() {
            return all;
        }
        let mut state = self.clone();
        let has = self.qemus[to].has_image;
        match command {
            Command::Add => {
                // Refused: then nothing is remembered that was not remembered before.
                if !has && was_empty {
                    state.record = None;
                }
                all.push((format!("published: {has}"), state.given_up()));
            }
            Command::Delete => {
                assert!(!has, "QEMU has it again: {self:#?}");
                if self.record.as_ref().is_some_and(|record| record.uuid == NAMES[to]) {
                    state.record = None;
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
            if let Err(problem) = follower.check() {
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
    for (is_local, has_force) in [(true, false), (true, true), (false, false)] {
        let world = World { is_local, has_force };
        let states = explore(world);
        assert!(states > 1000, "{world:?}: nothing happens in {states} states");
    }
}
