//! Holds applications after the hooks and before anything is frozen, and releases them after the thaw. The keeper
//! waits for them no longer than for hooks and applications together.

use std::collections::BTreeSet;
use std::time::Instant;

use crate::guest::freeze::applications::RELEASE;
use crate::guest::freeze::applications::discovery::{Candidate, Way, find};
use crate::guest::freeze::cycle::{Cycle, Message, Next, Stop};
use crate::guest::freeze::error::Error;
use crate::guest::freeze::marker::Told;
use crate::guest::freeze::receipts::now;
use crate::guest::freeze::recover::tell_applications;
use crate::receipt::{Application, Level};
use crate::sys::block_stack::Device;
use crate::sys::process_group::thread;

/// Problem that the marker records for applications: a process that reads the marker does not know what became of
/// them.
const LEFT: &str = "the agent that held it has ended";

impl Cycle {
    pub(super) fn hold_applications(&mut self) -> Result<(), Stop> {
        let settings = self.settings.applications.clone();
        if !settings.auto && settings.listed.is_empty() {
            return Ok(());
        }
        self.stage("applications");
        let until = self.hooks_until.min(Instant::now() + settings.deadline);
        let (outbox, root) = (self.outbox.clone(), self.guest.root.clone());
        thread("discovery", move || drop(outbox.send(Message::Found(find(&root, &settings)))))
            .map_err(|error| Stop::Failed(Error::Thread(error)))?;
        let found = loop {
            match self.next(Some(until)) {
                Next::Message(Message::Found(found)) => break found,
                Next::Message(_) | Next::Application => {}
                Next::Stop(Stop::Deadline) => {
                    self.applications.fail("looking for applications took too long");
                    return self.require_held();
                }
                Next::Stop(stop) => return Err(stop),
            }
        };
        if found.is_empty() {
            return self.require_held();
        }
        self.notes.receipt.times.hooks_begun.get_or_insert_with(now);
        for one in &found {
            if let Ok(Way::Commands(commands)) = &one.way {
                self.marked.applications.push(Told::from(commands));
            }
        }
        if !self.marked.applications.is_empty() {
            self.marked.receipt = Some(Box::new(self.notes.receipt.clone()));
            // In this order, so that every marker has a guardian, and no command is run that nobody would undo.
            self.guard();
            self.mark()?;
        }
        let (last, first): (Vec<_>, Vec<_>) = found.into_iter().partition(Candidate::is_held_last);
        let begun = Instant::now();
        let left = until.saturating_duration_since(begun);
        // An application that hangs in the first group leaves the others a part of the time.
        let first_until = if last.is_empty() { until } else { begun + left * 3 / 4 };
        for (group, until) in [(first, first_until), (last, until)] {
            self.hold(group, until)?;
        }
        self.notes.receipt.times.hooks_ended = Some(now());
        let told = self.applications.told(|_| true).into_iter();
        self.notes.receipt.applications = told
            .map(|one| Application {
                level: Level::FileSystem,
                problem: if one.problem.is_empty() { LEFT.to_owned() } else { one.problem },
                ..one
            })
            .collect();
        self.require_held()
    }

    /// Starts to hold these applications and waits for them until `until`. Those that are not held by then are
    /// given up.
    fn hold(&mut self, found: Vec<Candidate>, until: Instant) -> Result<(), Stop> {
        let outbox = self.outbox.clone();
        self.applications.add(found, &self.guest.root, until, move |place, report| {
            drop(outbox.send(Message::Application(place, report)));
        });
        while self.applications.is_awaited() {
            match self.next(Some(until)) {
                Next::Message(_) | Next::Application => {}
                Next::Stop(Stop::Deadline) => self.applications.give_up(),
                Next::Stop(stop) => return Err(stop),
            }
        }
        Ok(())
    }

    /// Fails if the settings require that all applications are held, and one is not.
    fn require_held(&self) -> Result<(), Stop> {
        self.require(self.applications.why_not_held(|_| true))
    }

    /// Fails if the settings require that all applications are held and their data frozen, and this is not so for
    /// one.
    pub(super) fn require_applications(&self) -> Result<(), Stop> {
        let frozen = self.devices_frozen();
        self.require(self.applications.why_not_held(|device| frozen.contains(&device)))
    }

    fn require(&self, why_not: Option<String>) -> Result<(), Stop> {
        match why_not.filter(|_| self.settings.applications.required) {
            None => Ok(()),
            Some(why_not) => Err(Stop::Failed(Error::Application(why_not))),
        }
    }

    fn devices_frozen(&self) -> BTreeSet<Device> {
        let lost = &self.notes.lost;
        self.targets_frozen()
            .map(|target| target.device)
            .filter(|device| !lost.contains_key(device))
            .collect()
    }

    /// Waits for the applications that are being released, and runs the thaw commands of those that another agent
    /// has held.
    pub(super) fn finish_applications(&mut self) {
        let until = Instant::now() + RELEASE;
        if self.applications.is_awaited() {
            self.stage("releasing applications");
        }
        while self.applications.is_awaited() {
            match self.next(Some(until)) {
                Next::Message(_) | Next::Application | Next::Stop(Stop::Asked | Stop::Failed(_)) => {}
                Next::Stop(Stop::Deadline) => self.applications.give_up(),
            }
        }
        let left = std::mem::take(&mut self.left_applications);
        self.problems.extend(tell_applications(&left, RELEASE));
        self.marked.applications.clear();
        if self.complete && self.settings.applications.required {
            let told = self.applications_told().into_iter();
            let problems = told.filter(|one| one.level < Level::Application);
            self.problems.extend(problems.map(|one| {
                format!(
                    "{} ({}): {}: the snapshot is not application-consistent",
                    one.name, one.instance, one.problem
                )
            }));
        }
    }

    /// Returns the entries of the applications for the receipt.
    pub(super) fn applications_told(&self) -> Vec<Application> {
        let frozen = self.devices_frozen();
        self.applications.told(|device| frozen.contains(&device))
    }
}
