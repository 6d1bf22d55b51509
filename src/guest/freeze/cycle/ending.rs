//! End of a freeze: the thaw, the hooks, and the answers to the clients.

use std::collections::BTreeSet;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crate::guest::freeze::By;
use crate::guest::freeze::Thawed;
use crate::guest::freeze::cycle::{ANSWER, Cycle, Message, Next, Stop};
use crate::guest::freeze::end::{End, Spoiled};
use crate::guest::freeze::error::Error;
use crate::guest::freeze::receipts::{Told, now};
use crate::guest::freeze::recover::tell_thaws;
use crate::guest::freeze::targets::Thaws;
use crate::sys::block_stack::Device;
use crate::sys::logging;
use crate::wire::proto::v1;

impl Cycle {
    /// Thaws and runs the hooks; returns how many file systems were frozen. With `all`, as after a request for a
    /// thaw, all targets are thawed, else only those that this freeze has frozen.
    pub(super) fn undo(&mut self, all: bool) -> u64 {
        self.cancelled.store(true, Ordering::SeqCst);
        let mut thawed = 0;
        if self.deadline.is_some() {
            self.stage("thawing");
            thawed = self.thaw(all);
            self.notes.receipt.times.thawed = Some(now());
            if let Some(clerk) = &self.guest.freezer.0.clerk {
                clerk.go_on();
            }
            self.guest.freezer.0.restricted.store(false, Ordering::SeqCst);
            logging::resume();
            // From here on the guardian, if it takes over, only has the hooks to run.
            if let Some(guardian) = &mut self.guardian {
                guardian.calm();
            }
            if let Some(running) = &mut self.guest.freezer.0.state().running {
                running.until = None;
                running.file_systems.clear();
            }
            let later = std::mem::take(&mut self.guest.freezer.0.state().after_thaw);
            for work in later {
                work();
            }
        }
        self.applications.release();
        let hooks = std::mem::take(&mut self.marked.hooks);
        let each = self.settings.hook_deadline;
        let problems = tell_thaws(&hooks, each, self.settings.hooks_deadline, |hook| {
            self.stage(&format!("hook {} thaw", hook.display()));
        });
        self.problems.extend(problems);
        self.finish_applications();
        self.finish_claim();
        self.undone = true;
        thawed
    }

    fn thaw(&mut self, all: bool) -> u64 {
        let targets: Vec<_> =
            if all { self.targets.clone() } else { self.targets_frozen().cloned().collect() };
        let mut thaws = Thaws::begin(&self.guest.effects, &targets);
        let begun = Instant::now();
        loop {
            // A file system that is frozen this late is thawed by the thread that froze it, or reported below.
            thaws.finish(Duration::from_millis(if self.freezing { 0 } else { 500 }));
            if self.freezing {
                match self.next(Some(Instant::now() + Duration::from_millis(200))) {
                    Next::Message(Message::Froze(place, Ok(()))) => {
                        self.frozen.insert(place);
                        if let Some(target) = self.targets.get(place) {
                            let late = Thaws::begin(&self.guest.effects, std::slice::from_ref(target));
                            thaws.ended.extend(late.ended);
                        }
                    }
                    Next::Message(Message::AllTried) => self.freezing = false,
                    // The freeze may be waiting for a file system that somebody else has frozen, so thaw all.
                    Next::Stop(Stop::Asked) => {
                        let others = Thaws::begin(&self.guest.effects, &self.targets);
                        thaws.ended.extend(others.ended);
                    }
                    Next::Message(_) | Next::Application | Next::Stop(_) => {}
                }
            }
            if !self.freezing && thaws.left.is_empty() {
                break;
            }
            if begun.elapsed() > ANSWER {
                let left = thaws.left.iter().map(|device| self.name(*device)).collect::<Vec<_>>().join(" ");
                let left = if self.freezing { self.not_frozen_yet() } else { left };
                self.take_requests();
                self.answer_stuck(&left);
            }
        }
        self.judge(&thaws)
    }

    /// Answers the requests for a thaw with the file systems that are still being thawed.
    pub(super) fn answer_stuck(&mut self, left: &str) {
        for answer in self.waiting.drain(..) {
            let _ = answer.send(Err(Error::Stuck(left.to_owned())));
        }
    }

    /// Returns how many file systems were frozen, and records problems with the others.
    fn judge(&mut self, thaws: &Thaws) -> u64 {
        let mut ours: BTreeSet<Device> = self.targets_frozen().map(|target| target.device).collect();
        let mut thawed = BTreeSet::new();
        let mut problems = Vec::new();
        for (device, result) in &thaws.ended {
            match result {
                Ok(0) => {}
                Ok(_) => drop(thawed.insert(*device)),
                Err(error) => {
                    ours.remove(device);
                    self.notes.lost.insert(*device, format!("it cannot be thawed: {error}"));
                    problems.push(format!("{} is not: {error}", self.name(*device)));
                }
            }
        }
        self.problems.extend(problems);
        if self.complete && self.sure {
            for device in ours.difference(&thawed) {
                self.notes.lost.insert(*device, "it had already been thawed by somebody else".to_owned());
                self.problems.push(format!(
                    "{} was no longer frozen, because somebody else had thawed it: the snapshot is not consistent",
                    self.name(*device)
                ));
            }
        } else if !self.complete {
            // The freezing thread has itself thawed some of them.
            thawed.extend(ours);
        }
        thawed.len() as u64
    }

    fn name(&self, device: Device) -> String {
        let target = self.targets.iter().find(|target| target.device == device);
        target.map(|target| target.mount_point.clone()).unwrap_or_default()
    }

    /// Sends an event about the end: not every client that froze requests a thaw, or reads the answer to a freeze.
    fn tell_end(&self, spoiled: Option<&Spoiled>, receipt: Option<&Told>) {
        let (end, problem) = self.outcome(spoiled);
        self.guest.events.tell(v1::Thawed {
            by_itself: end == End::Deadline,
            holder: self.marked.holder.clone(),
            end: end.word().to_owned(),
            problem,
            receipt: receipt.map(|told| told.id.clone()).unwrap_or_default(),
            level: receipt.map(|told| told.level).unwrap_or_default().to_owned(),
        });
    }

    /// Ends the cycle: other freezes are possible again, and the waiting requests are answered.
    pub(super) fn leave(mut self, thawed: Option<u64>, by_itself: bool) {
        let holder = self.marked.holder.clone();
        let spoil = |end, reason| {
            Some(Spoiled { end, holder: holder.clone(), reason, told: true, receipt: String::new() })
        };
        let spoiled = if by_itself {
            let seconds = self.settings.deadline.as_secs();
            spoil(End::Deadline, format!("the freeze ended by itself after {seconds} s"))
        } else if self.by == By::Person && self.complete {
            spoil(End::Person, "the freeze was ended by a person in the guest".to_owned())
        } else {
            None
        };
        for problem in &self.problems {
            tracing::warn!("after the thaw: {problem}");
        }
        match (&spoiled, thawed) {
            (Some(Spoiled { reason, .. }), _) => {
                tracing::warn!(
                    "thawed: {reason}; a snapshot for {holder} that was not complete by then is not consistent"
                );
            }
            (None, Some(count)) => tracing::info!("thawed {count} file systems"),
            (None, None) => {}
        }
        let receipt = self.receipt(spoiled.as_ref());
        if self.undone {
            // In this order: until here the marker matches the receipt, for a process that thaws in place of this
            // agent.
            self.marker.remove();
            if let Some(guardian) = self.guardian.take() {
                guardian.dismiss();
            }
        }
        if self.complete || self.notes.failure.is_some() {
            self.tell_end(spoiled.as_ref(), receipt.as_ref());
        }
        if let Some(spoiled) = spoiled.as_ref().filter(|_| !by_itself || self.waiting.is_empty()) {
            self.marker.spoil(spoiled);
        }
        let mut waiting = {
            let mut state = self.guest.freezer.0.state();
            while let Ok(message) = self.inbox.try_recv() {
                if let Message::Thaw(answer, ..) = message {
                    self.waiting.push(answer);
                }
            }
            // Clients that are answered here must not be told again.
            if self.anew {
                state.spoiled = spoiled.clone().filter(|_| !by_itself || self.waiting.is_empty());
            }
            state.running = None;
            std::mem::take(&mut self.waiting).into_iter()
        };
        if by_itself && waiting.len() > 0 {
            self.marker.forget_spoiled();
        }
        if let Some(first) = waiting.next() {
            let outcome = match (spoiled.filter(|_| by_itself), thawed) {
                (Some(spoiled), _) => Err(Error::Spoiled(spoiled.reason)),
                (None, _) if !self.problems.is_empty() => Err(Error::AfterThaw(self.problems.join("; "))),
                (None, count) => Ok(Thawed { file_systems: count.unwrap_or_default(), receipt }),
            };
            let _ = first.send(outcome);
        }
        for answer in waiting {
            let _ = answer.send(Ok(Thawed::default()));
        }
        if let Some(clerk) = &self.guest.freezer.0.clerk {
            clerk.work();
        }
        // Last, because a task that waits for the end of all freezes may end the agent.
        self.guest.freezer.0.over.send_modify(|over| *over += 1);
    }
}
