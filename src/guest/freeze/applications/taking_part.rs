//! State of the applications of one freeze, for its receipt. The keeper owns it.

use std::collections::BTreeMap;
use std::sync::mpsc::{Sender, channel};
use std::time::Instant;

use super::Place;
use super::discovery::Candidate;
use super::driver::{Event, Report, drive};
use crate::guest::freeze::receipts::now;
use crate::receipt::{Application, Level, Moment};
use crate::sys::block_stack::Device;
use crate::sys::process_group::thread;
use crate::sys::root::Root;

/// Applications of one freeze, in the order in which they were added. Reports refer to them by index.
#[derive(Debug, Default)]
pub struct Participants(Vec<Participant>);

#[derive(Debug)]
struct Participant {
    name: String,
    instance: String,
    driver: Option<Sender<Event>>,
    state: State,
    held: Option<Held>,
}

#[derive(Debug, PartialEq, Eq)]
enum State {
    Asked,
    Held,
    Releasing,
    Released,
    Failed(String),
}

/// Report of an application when it was held.
#[derive(Debug)]
struct Held {
    from: Moment,
    to: Option<Moment>,
    version: String,
    positions: BTreeMap<String, String>,
    after: BTreeMap<String, String>,
    places: Vec<Place>,
}

impl Participants {
    /// Starts to hold these applications as well, until `until`. `report` is called from their threads.
    pub fn add(
        &mut self,
        found: Vec<Candidate>,
        root: &Root,
        until: Instant,
        report: impl Fn(usize, Report) + Clone + Send + 'static,
    ) {
        for one in found {
            let place = self.0.len();
            let (name, instance) = (one.name.clone(), one.instance.clone());
            let (sender, events) = channel();
            let (own, root, report) = (sender.clone(), root.clone(), report.clone());
            let begun = thread("application", move || {
                drive(&root, one, until, (&own, &events), |said| report(place, said));
            });
            let (driver, state) = match begun {
                Ok(()) => (Some(sender), State::Asked),
                Err(error) => (None, State::Failed(format!("there is no thread for it: {error}"))),
            };
            self.0.push(Participant { name, instance, driver, state, held: None });
        }
    }

    /// Adds a failure of the search itself.
    pub fn fail(&mut self, problem: &str) {
        self.0.push(Participant {
            name: "applications".to_owned(),
            instance: String::new(),
            driver: None,
            state: State::Failed(problem.to_owned()),
            held: None,
        });
    }

    /// Returns whether there are no applications.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Records the report of one of them. Reports of an application that was given up are ignored.
    pub fn note(&mut self, place: usize, report: Report) {
        let Some(one) = self.0.get_mut(place) else { return };
        match (report, &one.state) {
            (Report::Held { version, positions, places }, State::Asked) => {
                let (from, after) = (now(), BTreeMap::new());
                one.held = Some(Held { from, to: None, version, positions, after, places });
                one.state = State::Held;
            }
            (Report::Released(after), State::Releasing) => {
                if let Some(held) = &mut one.held {
                    (held.after, held.to) = (after, Some(now()));
                }
                one.state = State::Released;
            }
            (Report::Failed(problem), State::Asked | State::Held | State::Releasing) => one.fail(problem),
            (_, State::Failed(_) | State::Released) => {}
            (_, State::Asked | State::Held | State::Releasing) => {
                one.fail("its process does not follow the protocol".to_owned());
            }
        }
    }

    /// Returns whether a report is outstanding: that one is held, or was released.
    pub fn is_awaited(&self) -> bool {
        self.0.iter().any(|one| matches!(one.state, State::Asked | State::Releasing))
    }

    /// Gives up the applications that have not responded.
    pub fn give_up(&mut self) {
        for one in &mut self.0 {
            if matches!(one.state, State::Asked | State::Releasing) {
                one.fail("it did not answer in time".to_owned());
            }
        }
    }

    /// Requests the release of those that are held, and gives up the others.
    pub fn release(&mut self) {
        for one in &mut self.0 {
            match one.state {
                State::Held => {
                    one.tell(Event::Release);
                    one.state = State::Releasing;
                }
                State::Asked => one.fail("the freeze ended before it was held".to_owned()),
                State::Releasing | State::Released | State::Failed(_) => {}
            }
        }
    }

    /// Returns why not all of them are held with all their data frozen, or that none was found.
    pub fn why_not_held(&self, is_frozen: impl Fn(Device) -> bool) -> Option<String> {
        if self.0.is_empty() {
            return Some("no application was found".to_owned());
        }
        let weak = self.0.iter().find_map(|one| {
            let told = one.told(&is_frozen);
            (one.state != State::Held || told.level == Level::Crash).then_some(told)
        })?;
        Some(format!("{} ({}): {}", weak.name, weak.instance, weak.problem))
    }

    /// Returns the outcome for each; `is_frozen` tells whether a file system was frozen from the beginning to the
    /// end.
    pub fn told(&self, is_frozen: impl Fn(Device) -> bool) -> Vec<Application> {
        self.0.iter().map(|one| one.told(&is_frozen)).collect()
    }
}

impl Participant {
    fn tell(&self, event: Event) {
        if let Some(driver) = &self.driver {
            // The driver may have ended.
            let _ = driver.send(event);
        }
    }

    fn fail(&mut self, problem: String) {
        self.tell(Event::GiveUp);
        if let Some(held) = &mut self.held {
            held.to = Some(now());
        }
        self.state = State::Failed(problem);
    }

    fn told(&self, is_frozen: &impl Fn(Device) -> bool) -> Application {
        let missing = self.held.iter().flat_map(|held| &held.places).find(|place| !is_frozen(place.device));
        let (level, problem) = match (&self.state, missing) {
            (_, Some(Place { directory, mount_point, .. })) => {
                (Level::Crash, format!("its data in {directory} are on {mount_point}, which was not frozen"))
            }
            (State::Released, None) => (Level::Application, String::new()),
            (State::Failed(problem), None) => (Level::FileSystem, problem.clone()),
            (State::Asked | State::Held | State::Releasing, None) => {
                (Level::FileSystem, "it is not known whether it was held until the thaw".to_owned())
            }
        };
        let mut evidence = Vec::new();
        if let Some(held) = &self.held {
            let mut add = |name: &str, value: &str| evidence.push((name.to_owned(), value.to_owned()));
            if !held.version.is_empty() {
                add("version", &held.version);
            }
            add("held-from", &held.from.time);
            if let Some(to) = &held.to {
                add("held-to", &to.time);
            }
            held.positions.iter().for_each(|(name, value)| add(name, value));
            for (name, value) in &held.after {
                add(&format!("after.{name}"), value);
            }
        }
        Application { name: self.name.clone(), instance: self.instance.clone(), level, problem, evidence }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(state: State) -> Participants {
        let (name, instance) = ("postgresql".to_owned(), "/run/x".to_owned());
        Participants(vec![Participant { name, instance, driver: None, state, held: None }])
    }

    fn held() -> Report {
        Report::Held {
            version: "15".to_owned(),
            positions: BTreeMap::from([("lsn".to_owned(), "0/1".to_owned())]),
            places: vec![Place {
                directory: "/data".to_owned(),
                device: (8, 1),
                mount_point: "/".to_owned(),
            }],
        }
    }

    fn released() -> Report {
        Report::Released(BTreeMap::from([("lsn".to_owned(), "0/2".to_owned())]))
    }

    fn level(all: &Participants) -> (Level, String) {
        let told = all.told(|device| device == (8, 1)).remove(0);
        (told.level, told.problem)
    }

    #[test]
    fn held_until_released_is_application() {
        let mut all = one(State::Asked);
        assert!(all.is_awaited());
        all.note(0, held());
        assert!(!all.is_awaited());
        assert_eq!(level(&all).0, Level::FileSystem, "it is not released yet");
        all.release();
        assert!(all.is_awaited());
        all.note(0, released());
        assert_eq!(level(&all), (Level::Application, String::new()));
        let told = all.told(|_| true).remove(0);
        let names: Vec<_> = told.evidence.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["version", "held-from", "held-to", "lsn", "after.lsn"]);
        // Data that were not frozen make the hold worthless.
        let (told, problem) = {
            let told = all.told(|_| false).remove(0);
            (told.level, told.problem)
        };
        assert_eq!(told, Level::Crash);
        assert!(problem.contains("/data are on /, which was not frozen"), "{problem}");
    }

    type Step = fn(&mut Participants);

    #[test]
    fn whatever_else_happens_is_not() {
        let lost = || Report::Failed("lost".to_owned());
        // Lost while held, before and after the release was requested; given up; unsolicited answers.
        let steps: [(&str, &[Step]); 7] = [
            ("lost", &[|all| all.note(0, held()), |all| all.note(0, Report::Failed("lost".to_owned()))]),
            ("in time", &[Participants::give_up, |all| all.note(0, held()), Participants::release]),
            ("before it was held", &[Participants::release, |all| all.note(0, held())]),
            ("in time", &[|all| all.note(0, held()), Participants::release, Participants::give_up]),
            ("follow the protocol", &[|all| all.note(0, released())]),
            ("follow the protocol", &[|all| all.note(0, held()), |all| all.note(0, held())]),
            ("follow the protocol", &[|all| all.note(0, held()), |all| all.note(0, released())]),
        ];
        for (words, steps) in steps {
            let mut all = one(State::Asked);
            for step in steps {
                step(&mut all);
            }
            all.release();
            all.note(0, released());
            let (level, problem) = level(&all);
            assert!(level == Level::FileSystem && problem.contains(words), "{words}: {level:?} {problem}");
        }
        let mut all = one(State::Asked);
        all.note(0, lost());
        all.note(7, lost());
        assert_eq!(level(&all), (Level::FileSystem, "lost".to_owned()));
    }
}
