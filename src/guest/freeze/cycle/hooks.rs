//! Runs the hooks before anything is frozen, within a time limit for each and one for all together.

use std::path::Path;
use std::time::{Duration, Instant};

use crate::guest::freeze::cycle::{Cycle, Message, Next, Stop};
use crate::guest::freeze::error::{Error, Failure, denial_hint, last_words};
use crate::guest::freeze::receipts::now;
use crate::sys::process_group::{Ended, Group};

/// Boolean of the `SELinux` policy that allows qemu-ga to run hooks with more rights than its own.
const HOOK_BOOLEAN: &str = "virt_qemu_ga_run_unconfined";

impl Cycle {
    pub(super) fn tell_hooks(&mut self) -> Result<(), Stop> {
        self.hooks_until = Instant::now() + self.settings.hooks_deadline;
        if !self.hooks.is_empty() {
            self.notes.receipt.times.hooks_begun = Some(now());
        }
        for hook in self.hooks.clone() {
            self.stage(&format!("hook {}", hook.display()));
            self.marked.hooks.push(hook.clone());
            self.notes.receipt.hooks.push(hook.display().to_string());
            self.marked.receipt = Some(Box::new(self.notes.receipt.clone()));
            // In this order, so that every marker has a guardian.
            self.guard();
            self.mark()?;
            self.tell_hook(&hook)?;
            self.notes.receipt.times.hooks_ended = Some(now());
        }
        Ok(())
    }

    fn tell_hook(&mut self, hook: &Path) -> Result<(), Stop> {
        let outbox = self.outbox.clone();
        let failed = |failure| Stop::Failed(Error::Hook { hook: hook.to_owned(), failure });
        let left = self.hooks_until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            // The hook is not run, so it needs no thaw.
            self.marked.hooks.pop();
            self.notes.receipt.hooks.pop();
            return Err(failed(Failure::NoTime(self.settings.hooks_deadline)));
        }
        let group =
            Group::start(hook, &["freeze"], None, move |end| drop(outbox.send(Message::HookEnded(end))));
        let group = group.map_err(|error| {
            // The hook was not run, so it needs no thaw.
            self.marked.hooks.pop();
            self.notes.receipt.hooks.pop();
            let hint = denial_hint(&self.guest.root, &error, HOOK_BOOLEAN);
            failed(Failure::Denied(error, hint))
        })?;
        let allowed = self.settings.hook_deadline.min(left);
        let until = Instant::now() + allowed;
        let next = loop {
            match self.next(Some(until)) {
                Next::Message(Message::HookEnded(ended)) => break Ok(ended),
                Next::Message(_) | Next::Application => {}
                Next::Stop(stop) => break Err(stop),
            }
        };
        match next {
            Ok(Ended { status, tail }) => match status {
                Ok(status) if status.success() => Ok(()),
                Ok(status) => Err(failed(Failure::Failed(status, last_words(&tail)))),
                Err(error) => Err(failed(Failure::Unusable(error))),
            },
            Err(stop) => {
                group.kill();
                // Wait briefly for the end of its output, unless even that hangs.
                let tail = match self.inbox.recv_timeout(Duration::from_secs(1)) {
                    Ok(Message::HookEnded(end)) => last_words(&end.tail),
                    Ok(Message::Thaw(answer, by, cut)) => {
                        self.note(answer, by, cut);
                        String::new()
                    }
                    _ => String::new(),
                };
                match stop {
                    Stop::Deadline if allowed < self.settings.hook_deadline => {
                        Err(failed(Failure::TimedOutTogether(self.settings.hooks_deadline, tail)))
                    }
                    Stop::Deadline => Err(failed(Failure::TimedOut(allowed, tail))),
                    stop => Err(stop),
                }
            }
        }
    }
}
