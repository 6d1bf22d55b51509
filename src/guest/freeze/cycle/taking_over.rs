//! Takes over a freeze that another agent, or an earlier run of this one, has left.

use std::sync::atomic::Ordering;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use crate::guest::freeze::cycle::{ANSWER, Answer, Cycle, EndOnPanic};
use crate::guest::freeze::error::Error;
use crate::guest::freeze::marker::Found;
use crate::guest::freeze::recover::marked;
use crate::receipt::Receipt;
use crate::sys::logging;
use crate::sys::process_group::thread;

impl Cycle {
    /// Refuses a freeze because another agent has begun one. If that agent has ended, this one takes its freeze
    /// over to end it.
    pub(super) fn give_way(self, found: &Found, answer: Answer) {
        let path = self.marker.path();
        let other = match found {
            Found::Freeze(freeze) if self.marker.is_alive(freeze) => Some(freeze.process.0),
            _ => None,
        };
        let whose = other.map_or("an agent that is no longer running".to_owned(), |id| {
            format!("the agent with process {id}")
        });
        let words = format!("{whose} began a freeze that is not over ({}); thaw first", path.display());
        tracing::warn!("not frozen: {words}");
        let refused = Err(Error::Busy(words));
        if other.is_some() {
            self.leave(None, false);
            let _ = answer.send(refused);
        } else {
            self.guest.freezer.0.restricted.store(true, Ordering::SeqCst);
            if let Some(running) = &mut self.guest.freezer.0.state().running {
                found.holder().clone_into(&mut running.holder);
            }
            let _ = answer.send(refused);
            self.resume(found);
        }
    }

    /// Takes over a freeze that an earlier run of the agent has left.
    pub(in crate::guest::freeze) fn resume(mut self, found: &Found) {
        let _end = EndOnPanic;
        self.deadline = Some(Instant::now() + self.settings.deadline);
        self.anew = true;
        found.holder().clone_into(&mut self.marked.holder);
        self.sure = *found != Found::Unknown;
        if let Some(clerk) = &self.guest.freezer.0.clerk {
            clerk.be_quiet(Duration::ZERO);
        }
        found.holder().clone_into(&mut self.notes.receipt.caller.name);
        if let Found::Freeze(freeze) = found {
            if let Some(receipt) = &freeze.receipt {
                self.notes.receipt = Receipt::clone(receipt);
            }
            if freeze.file_systems.is_empty() {
                self.notes.failure = Some("the agent ended before anything was frozen".to_owned());
            }
            self.hooks.clone_from(&freeze.hooks);
            self.marked.hooks.clone_from(&freeze.hooks);
            self.marked.applications.clone_from(&freeze.applications);
            self.left_applications.clone_from(&freeze.applications);
            self.marked.file_systems.clone_from(&freeze.file_systems);
            self.marked.receipt.clone_from(&freeze.receipt);
        }
        match marked(&self.guest, found) {
            Ok((targets, problems)) => {
                self.targets = targets;
                self.problems = problems;
            }
            Err(error) => self.problems.push(error.to_string()),
        }
        self.claim();
        logging::pause();
        self.frozen = (0..self.targets.len()).collect();
        self.guard();
        if let Some(guardian) = &mut self.guardian {
            guardian.alert();
        }
        self.settle();
        self.keep();
    }

    /// Writes a marker that names this process. The marker may be on a frozen disk, so it is written by another
    /// thread, and the keeper does not wait for it before the thaw. Until then the marker of the agent that has
    /// ended serves the same purpose.
    fn claim(&mut self) {
        let (marker, freeze) = (self.marker.clone(), self.marked.clone());
        let (done, claimed) = channel();
        let begun = thread("marker", move || {
            marker.forget_spoiled();
            if let Err(error) = marker.write(&freeze) {
                tracing::warn!("cannot write {}: {error}", marker.path().display());
            }
            // The receiver may no longer exist.
            let _ = done.send(());
        });
        match begun {
            Ok(()) => self.claimed = Some(claimed),
            Err(error) => tracing::warn!("cannot write {}: {error}", self.marker.path().display()),
        }
    }

    /// Waits, after the thaw, until the marker has been written, because a marker written later would be left
    /// behind. Only a freeze by somebody else can block the write at this point; the waiting requests for a thaw
    /// are then answered with an error.
    pub(super) fn finish_claim(&mut self) {
        let Some(claimed) = self.claimed.take() else { return };
        let begun = Instant::now();
        while let Err(RecvTimeoutError::Timeout) = claimed.recv_timeout(Duration::from_millis(200)) {
            if begun.elapsed() > ANSWER {
                self.take_requests();
                self.answer_stuck(&self.marker.path().display().to_string());
            }
        }
    }
}
