//! The agent's say about a disk of its guest: whether it sees one that was attached, and whether one may be taken away.
//!
//! An agent is asked if it has a session and the capability `disks`. One that cannot be asked says neither: a disk is
//! then not taken away, unless that is forced. A guest that is off has no disks to be taken away from.

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

/// What an agent says that it can, if it finds and releases disks.
pub(in crate::host) const CAPABILITY: &str = "disks";
/// How long a guest may take to see a disk.
const SEEN: Duration = Duration::from_secs(10);
/// How long an agent may take beyond what it waits for.
const ANSWER: Duration = Duration::from_secs(5);
/// How long a release may take: what is buffered is written. An agent gives up before.
const RELEASE: Duration = Duration::from_secs(60);
/// How long it may take where its outcome changes nothing.
const FORCED: Duration = Duration::from_secs(15);
/// How long is waited for an agent that is not there.
pub(in crate::host) const MEETING: Duration = Duration::from_secs(10);
/// After which time a guest that is busy with the disk is asked again.
const BUSY: Duration = Duration::from_millis(200);

/// Why an agent cannot be asked, in words.
pub(in crate::host) const PAUSED: &str = "the VM is paused, so its guest cannot be asked; resume it first";
pub(in crate::host) const NO_SESSION: &str = "there is no session with an agent in this guest";

/// The same of one that lacks the capability.
pub(in crate::host) fn too_old() -> String {
    format!("the agent in this guest is too old: it lacks the capability {CAPABILITY:?}")
}

/// The agent of one VM, asked about disks.
#[derive(Debug)]
pub struct Agent {
    fleet: Handle,
    vm: String,
    behalf: Option<Behalf>,
}

impl Agent {
    /// Of the VM with this name, on behalf of somebody, if not of the host half.
    pub fn new(fleet: &Handle, vm: &str, behalf: Option<&Behalf>) -> Self {
        Self { fleet: fleet.clone(), vm: vm.to_owned(), behalf: behalf.cloned() }
    }

    /// For calls, and whether another program has the session; or why there can be none.
    async fn calls(&self) -> Result<(Calls, bool), Unreleased> {
        let stopped = |error: super::super::fleet::Stopped| Unreleased::Unasked(error.to_string());
        let (agent, capabilities) = match self.fleet.caller(self.vm.clone()).await.map_err(stopped)? {
            Some(Reach::Session { agent, capabilities }) => (agent, capabilities),
            // It is not that it cannot answer: it has the disk until it runs again.
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

    /// The guest's name for the disk, as soon as the guest has it; or why there is none.
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

    /// Has the guest release the disk. While something is being done to it there, such as a release that was asked for
    /// before this program was started, that is waited for.
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

/// Why a guest has not released a disk, in words.
enum Unreleased {
    /// Its agent says that it keeps it.
    Kept(String),
    /// Something is being done to it.
    Busy(String),
    /// Its agent was not asked, or has not answered, or cannot do it.
    Unasked(String),
    /// It is not known what of these, for whoever has the session cannot be asked.
    Untold(String),
}

impl Unreleased {
    fn words(self) -> String {
        match self {
            Self::Kept(words) | Self::Busy(words) | Self::Unasked(words) | Self::Untold(words) => words,
        }
    }
}

/// The answer, or in words why there is none. Where another program has the session (`is_elsewhere`), only that says that the
/// agent cannot be asked ([`Code::NotFound`]); to hear nothing of that program says nothing of the guest.
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

/// What a detach tells the guest; and where it says why the guest did not release the disk, if that was `force`d.
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

/// Takes it away whatever the agent says.
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
            // Who asked may have gone.
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

/// As a detach that asks the guest, but one that cannot be asked, or does not answer, loses the disk: without its agent nothing
/// there uses it. That is not so of one that another program has plugged, which stays.
pub(in crate::host) fn bounded(agent: Agent) -> Box<dyn GuestSide> {
    Box::new(Bounded { agent })
}

/// For a guest that is off, and uses no disk any more.
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
    /// Waits for a session with the agent, but not for long: it may just be starting.
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
            // One that it does not know by this may be in use there all the same. One that it has released it finds again.
            self.agent.find(disk).await.map_err(|why| {
                DiskError::NotReleased(format!(
                    "the guest does not say that it has the disk {serial:?}: {why}; a program other than \
                     guestlet has plugged it, and may use it there. Start or upgrade the agent of that guest, \
                     or stop the VM; guestctl volumes detach --force does not ask it"
                ))
            })?;
        }
        let mut released = self.agent.release(disk, RELEASE).await;
        // An agent that was started again meanwhile is asked again; one that hangs is not.
        if matches!(released, Err(Unreleased::Unasked(_))) && begun.elapsed() < RELEASE {
            self.meet().await;
            released = self.agent.release(disk, RELEASE).await;
        }
        // Where the VM has just come to may not be known everywhere.
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
