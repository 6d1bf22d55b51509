//! Release of disks by guests: asks the agent whether it sees a disk that was attached, and whether a disk may be
//! detached.
//!
//! An agent is asked if it has a session and the capability `disks`. If it cannot be asked, neither is known, and
//! the disk is not detached unless that is forced. A guest that is off does not have to be asked, because it uses
//! no disks.

use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::{Instant, sleep};
use tonic::{Code, Status};

use super::super::backends::disks::{self, DiskError, GuestSide, Known};
use super::super::caller::Behalf;
use super::super::calls::Calls;
use super::super::fleet::{Handle, Reach};
use super::super::text;
use crate::wire::proto::v1::disk_selector::By;
use crate::wire::proto::v1::{DiskSelector, FindDiskRequest, ReleaseDiskRequest};

/// Capability that an agent reports if it can find and release disks.
pub(in crate::host) const CAPABILITY: &str = "disks";
/// Time for a guest to detect an attached disk.
const SEEN: Duration = Duration::from_secs(10);
/// Extra time for an agent to answer, on top of the wait that was requested of it.
const ANSWER: Duration = Duration::from_secs(5);
/// Timeout of a release, in which buffered data is written to the disk. The agent has a shorter timeout.
const RELEASE: Duration = Duration::from_secs(60);
/// Timeout of a release whose outcome does not matter, because the detach is forced.
const FORCED: Duration = Duration::from_secs(15);
/// Time to wait for an agent without a session.
pub(in crate::host) const MEETING: Duration = Duration::from_secs(10);
/// Interval at which a guest that is busy with the disk is asked again.
const BUSY: Duration = Duration::from_millis(200);

/// Messages for an agent that cannot be asked.
pub(in crate::host) const PAUSED: &str = "the VM is paused, so its guest cannot be asked; resume it first";
pub(in crate::host) const NO_SESSION: &str = "there is no session with an agent in this guest";

/// Returns the message for an agent that lacks the capability.
pub(in crate::host) fn too_old() -> String {
    format!("the agent in this guest is too old: it lacks the capability {CAPABILITY:?}")
}

/// Agent of one VM, for requests about disks.
#[derive(Debug)]
pub struct Agent {
    fleet: Handle,
    vm: String,
    behalf: Option<Behalf>,
}

impl Agent {
    /// Creates the agent of the VM with this name, for calls on behalf of a caller, or of the host half itself.
    pub fn new(fleet: &Handle, vm: &str, behalf: Option<&Behalf>) -> Self {
        Self { fleet: fleet.clone(), vm: vm.to_owned(), behalf: behalf.cloned() }
    }

    /// Returns the agent's calls, and whether another program has the session; or the reason why it cannot be called.
    async fn calls(&self) -> Result<(Calls, bool), Unreleased> {
        let stopped = |error: super::super::fleet::Stopped| Unreleased::Unasked(error.to_string());
        let (agent, capabilities) = match self.fleet.caller(self.vm.clone()).await.map_err(stopped)? {
            Some(Reach::Session { agent, capabilities }) => (agent, capabilities),
            // A paused guest counts as refusing, not as unreachable: it has the disk in use again as soon as it is resumed.
            Some(Reach::Paused) => {
                return Err(Unreleased::Kept(PAUSED.to_owned()));
            }
            Some(Reach::Untold) => {
                let words = "the node of this guest cannot be reached now";
                return Err(Unreleased::Untold(words.to_owned()));
            }
            Some(Reach::NoSession) | None if !self.fleet.has_sessions() => {
                let words = "the VM is running, but it is not known here yet where";
                return Err(Unreleased::Untold(words.to_owned()));
            }
            Some(Reach::NoSession) | None => {
                return Err(Unreleased::Unasked(NO_SESSION.to_owned()));
            }
        };
        if capabilities.iter().any(|one| one == CAPABILITY) {
            let is_elsewhere = agent.is_elsewhere();
            Ok((agent.on_behalf_of_any(self.behalf.clone()), is_elsewhere))
        } else {
            Err(Unreleased::Unasked(too_old()))
        }
    }

    /// Waits until the guest sees the disk, and returns the guest's name for it; or the reason why it does not see it.
    pub(in crate::host) async fn find(&self, disk: &Known) -> Result<String, String> {
        let (calls, is_elsewhere) = self.calls().await.map_err(Unreleased::words)?;
        let wait_milliseconds = u32::try_from(SEEN.as_millis()).unwrap_or(u32::MAX);
        let request = FindDiskRequest { disk: Some(selector(disk)), wait_milliseconds };
        let answer =
            within(SEEN + ANSWER, is_elsewhere, calls.find_disk(request)).await.map_err(Unreleased::words)?;
        match answer.disk {
            Some(disk) => Ok(text::clean(&disk.name)),
            None => Err(format!("it has not done so within {} s", SEEN.as_secs())),
        }
    }

    /// Asks the guest to release the disk. If the guest is busy with the disk, for example because of a release
    /// requested before this program was started, the request is repeated.
    async fn release(&self, disk: &Known, patience: Duration) -> Result<(), Unreleased> {
        let begun = Instant::now();
        let end = begun + patience;
        let limits = self.fleet.limits(self.vm.clone()).await;
        let limits = limits.map_err(|error| Unreleased::Unasked(error.to_string()))?.unwrap_or_default();
        let busy_end = end.min(begun + limits.busy);
        let answer = loop {
            let (calls, is_elsewhere) = self.calls().await?;
            let request = ReleaseDiskRequest { disk: Some(selector(disk)) };
            let left = end.saturating_duration_since(Instant::now());
            match within(left, is_elsewhere, calls.release_disk(request)).await {
                Err(Unreleased::Busy(_)) if Instant::now() + BUSY < busy_end => sleep(BUSY).await,
                answer => break answer?,
            }
        };
        let (vm, serial) = (&self.vm, disk.text());
        let name = answer.disk.map(|disk| text::clean(&disk.name));
        tracing::info!(vm, serial, name, removed = answer.removed, "the guest has released a disk");
        Ok(())
    }
}

fn selector(disk: &Known) -> DiskSelector {
    let by = match &disk.by {
        disks::By::Serial(serial) => By::Serial(serial.clone()),
        disks::By::Alias(alias) => By::Alias(alias.clone()),
    };
    DiskSelector { by: Some(by) }
}

/// Reason why a guest has not released a disk, with its message.
enum Unreleased {
    /// The agent refuses to release it.
    Kept(String),
    /// The agent is busy with the disk.
    Busy(String),
    /// The agent was not asked, has not answered, or lacks the capability.
    Unasked(String),
    /// Unknown which of these applies, because the program that has the session cannot be reached.
    Untold(String),
}

impl Unreleased {
    fn words(self) -> String {
        match self {
            Self::Kept(words) | Self::Busy(words) | Self::Unasked(words) | Self::Untold(words) => words,
        }
    }
}

/// Returns the answer, or the reason why there is none. If another program has the session (`is_elsewhere`), only
/// [`Code::NotFound`] from it means that the agent cannot be asked. No answer from that program says nothing about
/// the guest.
async fn within<T>(
    patience: Duration,
    is_elsewhere: bool,
    call: impl Future<Output = Result<tonic::Response<T>, Status>>,
) -> Result<T, Unreleased> {
    match tokio::time::timeout(patience, call).await {
        Ok(Ok(answer)) => Ok(answer.into_inner()),
        Ok(Err(status)) if std::error::Error::source(&status).is_some() => {
            Err(Unreleased::Unasked("the session with the agent ended".to_owned()))
        }
        Ok(Err(status)) => {
            let words = text::clean_words(status.message());
            Err(match status.code() {
                Code::Aborted => Unreleased::Busy(words),
                Code::FailedPrecondition | Code::PermissionDenied | Code::Internal => Unreleased::Kept(words),
                Code::NotFound | Code::Unimplemented => Unreleased::Unasked(words),
                _ if is_elsewhere => Unreleased::Untold(words),
                _ => Unreleased::Unasked(words),
            })
        }
        Err(_) => {
            let words = format!("the agent does not answer within {} s", patience.as_secs());
            Err(if is_elsewhere { Unreleased::Untold(words) } else { Unreleased::Unasked(words) })
        }
    }
}

/// Returns the guest's side of a detach, and a channel that receives the reason why the guest did not release the
/// disk if the detach was forced (`force`) against it.
pub(in crate::host) fn side(agent: Agent, force: bool) -> (Box<dyn GuestSide>, oneshot::Receiver<String>) {
    let (forced, told) = oneshot::channel();
    if force {
        (Box::new(Forced { agent, told: std::sync::Mutex::new(Some(forced)) }), told)
    } else {
        (Box::new(agent), told)
    }
}

#[tonic::async_trait]
impl GuestSide for Agent {
    async fn release(&self, disk: &Known) -> Result<(), DiskError> {
        Self::release(self, disk, RELEASE).await.map_err(|why| {
            let (serial, why) = (disk.text(), why.words());
            DiskError::NotReleased(format!(
                "the guest does not release the disk {serial:?}: {why}; it stays attached unless --force is given"
            ))
        })
    }

    async fn stays(&self, disk: &Known) {
        let (vm, serial) = (&self.vm, disk.text());
        match self.find(disk).await {
            Ok(name) => {
                self.fleet.log().info(
                    vm,
                    serial,
                    &format!("a disk stays attached, and its guest sees it again: {name}"),
                );
            }
            Err(why) => {
                self.fleet.log().warn(
                    vm,
                    serial,
                    &format!("a disk stays attached, but its guest does not see it: {why}"),
                );
            }
        }
    }
}

/// Guest's side of a forced detach, which does not depend on the agent's answer.
struct Forced {
    agent: Agent,
    told: std::sync::Mutex<Option<oneshot::Sender<String>>>,
}

#[tonic::async_trait]
impl GuestSide for Forced {
    async fn release(&self, disk: &Known) -> Result<(), DiskError> {
        if let Err(why) = self.agent.release(disk, FORCED).await {
            let (vm, serial, why) = (&self.agent.vm, disk.text(), why.words());
            tracing::warn!(vm, serial, why, "a disk is detached by force");
            let told = self.told.lock().unwrap_or_else(std::sync::PoisonError::into_inner).take();
            // The caller may have stopped waiting.
            drop(told.map(|told| told.send(why)));
        }
        Ok(())
    }

    async fn stays(&self, disk: &Known) {
        self.agent.stays(disk).await;
    }

    fn is_forced(&self) -> bool {
        true
    }
}

/// Returns the guest's side of a detach that detaches the disk as well if the agent cannot be asked or does not
/// answer: without its agent, nothing in the guest uses the disk. The exception is a disk that another program has
/// attached, which then stays attached.
pub(in crate::host) fn bounded(agent: Agent) -> Box<dyn GuestSide> {
    Box::new(Bounded { agent })
}

/// Returns the guest's side of a detach for a guest that is off, and so uses no disk.
pub(in crate::host) fn nobody() -> Box<dyn GuestSide> {
    Box::new(Nobody)
}

struct Nobody;

#[tonic::async_trait]
impl GuestSide for Nobody {
    async fn release(&self, _: &Known) -> Result<(), DiskError> {
        Ok(())
    }

    async fn stays(&self, _: &Known) {}
}

struct Bounded {
    agent: Agent,
}

impl Bounded {
    /// Waits briefly for a session with the agent, which may just be starting.
    async fn meet(&self) {
        drop(self.agent.fleet.meet(&self.agent.vm, MEETING).await);
    }
}

#[tonic::async_trait]
impl GuestSide for Bounded {
    async fn release(&self, disk: &Known) -> Result<(), DiskError> {
        let (vm, serial) = (&self.agent.vm, disk.text());
        let begun = Instant::now();
        self.meet().await;
        if disk.is_adopted {
            // The guest may use such a disk without knowing it by this name. A disk that it has already released is found
            // again.
            self.agent.find(disk).await.map_err(|why| {
                DiskError::NotReleased(format!(
                    "the guest does not confirm that it has the disk {serial:?}: {why}; a program other than \
                     guestlet has plugged it, and may use it there. Start or upgrade the agent of that \
                     guest, or stop the VM; guestctl volumes detach --force does not ask it"
                ))
            })?;
        }
        let mut released = self.agent.release(disk, RELEASE).await;
        // An agent that was restarted meanwhile is asked again; one that hangs is not.
        if matches!(released, Err(Unreleased::Unasked(_))) && begun.elapsed() < RELEASE {
            self.meet().await;
            released = self.agent.release(disk, RELEASE).await;
        }
        // After a migration, the new node of the VM may not be known everywhere yet.
        while matches!(released, Err(Unreleased::Untold(_))) && begun.elapsed() < MEETING {
            sleep(BUSY).await;
            released = self.agent.release(disk, RELEASE).await;
        }
        match released {
            Ok(()) => Ok(()),
            Err(Unreleased::Untold(why)) => Err(DiskError::Untold(format!(
                "it is not known whether the guest releases the volume: {why}; repeat the call"
            ))),
            Err(Unreleased::Kept(why) | Unreleased::Busy(why)) => {
                Err(DiskError::NotReleased(format!("the guest does not release the volume: {why}")))
            }
            Err(Unreleased::Unasked(why)) if disk.is_adopted => Err(DiskError::NotReleased(format!(
                "the guest does not confirm that it releases the volume: {why}; a program other than guestlet \
                 has plugged it, and may use it there. Start or upgrade the agent of that guest, or stop the \
                 VM; guestctl volumes detach --force does not ask it"
            ))),
            Err(Unreleased::Unasked(why)) => {
                let words = format!("a disk is detached although its guest was not asked: {why}");
                self.agent.fleet.log().warn(vm, serial, &words);
                Ok(())
            }
        }
    }

    async fn stays(&self, disk: &Known) {
        self.agent.stays(disk).await;
    }
}
