//! Handles the outcome of a finished task: what is recorded, and who is notified.

use std::panic::resume_unwind;
use std::path::Path;
use std::sync::Arc;

use tokio::task::JoinError;

use super::{Done, Engine, Look, Release, Tried};
use crate::guest::disk_rules::apply::{Applied, Error};
use crate::guest::disk_rules::find::Device;
use crate::guest::disk_rules::rule::Rule;
use crate::guest::disks::identity::KnownDisk;
use crate::guest::messages;
use crate::sys::error_chain;
use crate::wire::proto::v1::DiskMounted;

/// Limit on attempts with a disk that does not respond, as each leaves a program behind that waits for the disk.
const MOST_HANGS: u32 = 6;

impl Engine {
    pub(super) fn done(&mut self, done: Result<(u64, Done), JoinError>) {
        let (id, done) = match done {
            Ok(done) => done,
            Err(error) => match error.try_into_panic() {
                Ok(panic) => resume_unwind(panic),
                Err(_) => return,
            },
        };
        self.doing.remove(&id);
        match done {
            Done::Applied(rule, device, outcome, look) => self.applied(rule, device, outcome, look),
            Done::Undone(point, Ok(there)) => {
                self.stuck.remove(&point);
                self.tried.remove(&point);
                self.patience.forget(&point);
                if there {
                    tracing::info!("{} is unmounted, as no rule wants it any more", point.display());
                }
            }
            Done::Undone(point, Err(error)) => {
                let why = error_chain::words(&error);
                if !self.is_news(&point, &error, &why) {
                    self.stuck.insert(point, (self.turn, why));
                    return;
                }
                tracing::warn!(
                    "{} is no longer wanted by any rule, but cannot be unmounted: {why}",
                    point.display()
                );
                let made = self.memory.kept().at(&point).cloned();
                let disk = made.and_then(|made| self.disk(made.disk.generation));
                if let Some(disk) = disk {
                    self.guest.events.tell(messages::disk_failed(&disk, why.clone()));
                }
                self.stuck.insert(point, (self.turn, why));
            }
            Done::Released(Release { disk, answer }, outcome) => {
                let failed = outcome.as_ref().err().map(|error| error_chain::words(error));
                let heard = answer.send(outcome).is_ok();
                match failed {
                    None if heard => tracing::info!("{} is released", disk.name),
                    None => tracing::warn!(
                        "{} is kept: the client that requested its release has disconnected",
                        disk.name
                    ),
                    Some(ref why) => tracing::warn!("{} is kept: {why}", disk.name),
                }
                self.tried.retain(|_, tried| tried.device.disk.generation != disk.generation);
                if failed.is_some() || !heard {
                    self.remember(|kept| kept.released.retain(|known| *known != disk));
                }
            }
            Done::Looked(device, touch, label) => {
                let key = (device.disk.generation, device.partition);
                self.labels.insert(key, (device.disk, touch, label));
            }
            Done::LookedAgain(point, look) => {
                if let Some(tried) = self.tried.get_mut(&point) {
                    if tried.look.found == look.found {
                        tried.look = look;
                    } else {
                        self.tried.remove(&point);
                    }
                }
            }
        }
    }

    fn disk(&self, generation: u64) -> Option<Arc<KnownDisk>> {
        self.guest.disks.all().iter().find(|disk| disk.generation == generation).cloned()
    }

    /// Returns whether a failure has to be reported. Where something was in use the operation is retried, and is
    /// reported again only if the reason has changed.
    fn is_news(&mut self, point: &Path, error: &Error, why: &str) -> bool {
        if error.may_end() && !(error.is_hang() && self.patience.tries(point) >= MOST_HANGS) {
            return self.patience.failed(point, why);
        }
        self.patience.forget(point);
        true
    }

    fn applied(&mut self, rule: Arc<Rule>, device: Device, outcome: Result<Applied, Error>, look: Look) {
        let why = outcome.as_ref().err().map(|error| error_chain::words(error));
        let news = if let (Err(error), Some(why)) = (&outcome, &why) {
            self.is_news(&rule.how.mount_point, error, why)
        } else {
            self.patience.forget(&rule.how.mount_point);
            true
        };
        let point = rule.how.mount_point.display().to_string();
        let disk = &device.disk;
        let fail = |problem: String| {
            tracing::warn!("{}: {}: {problem}", rule.origin, disk.name);
            self.guest.events.tell(messages::disk_failed(disk, problem));
        };
        let outcome = outcome.map_err(|_| why.unwrap_or_default());
        match &outcome {
            Ok(applied) => {
                if applied.new {
                    let made = if applied.formatted { "formatted and " } else { "" };
                    tracing::info!("{} ({}) is {made}mounted at {point}", device.file, applied.kind);
                    self.guest.events.tell(DiskMounted {
                        disk: Some(messages::disk(disk)),
                        mount_point: point.clone(),
                        r#type: applied.kind.clone(),
                    });
                }
                if let Some(remark) = &applied.remark {
                    fail(format!("{point}: {remark}"));
                }
            }
            Err(why) if news => fail(format!("{point}: {why}")),
            Err(_) => {}
        }
        self.tried.insert(rule.how.mount_point.clone(), Tried { rule, device, outcome, look });
    }
}
