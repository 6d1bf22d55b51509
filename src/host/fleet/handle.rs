//! How others ask the fleet.

use std::sync::Arc;

use prost_types::Timestamp;
use tokio::sync::{broadcast, mpsc, oneshot};

use super::super::limits::Limits;
use super::super::talk::Caller;
use crate::wire::proto::v1::{self, VirtualMachineEvent, virtual_machine_event};

/// What can be asked; every answer goes to its sender.
pub(super) enum Request {
    List(bool, oneshot::Sender<Vec<v1::VirtualMachine>>),
    Get(String, oneshot::Sender<Option<v1::VirtualMachine>>),
    Watch(Option<String>, Option<Timestamp>, oneshot::Sender<Option<Watched>>),
    Caller(String, oneshot::Sender<Option<Reach>>),
    Limits(String, oneshot::Sender<Option<Arc<Limits>>>),
    Tally(oneshot::Sender<Tally>),
    Note(String, Box<virtual_machine_event::Kind>),
}

/// Whether a guest can be called.
#[derive(Debug, Clone)]
pub enum Reach {
    /// Through this.
    Session(Box<Caller>),
    /// There is no session now.
    NoSession,
}

/// Events of the past, and those from then on.
#[derive(Debug)]
pub struct Watched {
    /// In the order in which they happened.
    pub past: Vec<Arc<VirtualMachineEvent>>,
    /// None is missing in between.
    pub coming: broadcast::Receiver<Arc<VirtualMachineEvent>>,
}

/// How many there are.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Tally {
    /// VMs.
    pub vms: usize,
    /// Open sessions.
    pub connected: usize,
    /// Sessions to be.
    pub connecting: usize,
    /// Refused guests.
    pub refused: usize,
    /// VMs that are off.
    pub gone: usize,
    /// Callback channels that guests use.
    pub callbacks: usize,
}

/// The fleet's task has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("guestlet-host is stopping")]
pub struct Stopped;

/// Asks the fleet.
#[derive(Debug, Clone)]
pub struct Handle(pub(super) mpsc::Sender<Request>);

impl std::fmt::Debug for Request {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("Request")
    }
}

impl Handle {
    /// All VMs, in the order of their names, with or without what their events have made of them.
    ///
    /// # Errors
    /// When the fleet has ended.
    pub async fn list(&self, with_state: bool) -> Result<Vec<v1::VirtualMachine>, Stopped> {
        self.ask(|reply| Request::List(with_state, reply)).await
    }

    /// One VM, if it is known.
    ///
    /// # Errors
    /// When the fleet has ended.
    pub async fn get(&self, name: String) -> Result<Option<v1::VirtualMachine>, Stopped> {
        self.ask(|reply| Request::Get(name, reply)).await
    }

    /// Events of all VMs from now on, and those remembered `since` then; none if `name` is given and unknown.
    /// Only those of the past are filtered by `name`.
    ///
    /// # Errors
    /// When the fleet has ended.
    pub async fn watch(
        &self,
        name: Option<String>,
        since: Option<Timestamp>,
    ) -> Result<Option<Watched>, Stopped> {
        self.ask(|reply| Request::Watch(name, since, reply)).await
    }

    /// Whether the guest of this name can be called; none if it is unknown. Calls fail when the session ends.
    ///
    /// # Errors
    /// When the fleet has ended.
    pub async fn caller(&self, name: String) -> Result<Option<Reach>, Stopped> {
        self.ask(|reply| Request::Caller(name, reply)).await
    }

    /// What the guest of this name may cost; none if it is unknown.
    ///
    /// # Errors
    /// When the fleet has ended.
    pub async fn limits(&self, name: String) -> Result<Option<Arc<Limits>>, Stopped> {
        self.ask(|reply| Request::Limits(name, reply)).await
    }

    /// How many VMs and sessions there are.
    ///
    /// # Errors
    /// When the fleet has ended.
    pub async fn tally(&self) -> Result<Tally, Stopped> {
        self.ask(Request::Tally).await
    }

    /// Tells everybody who watches what happened, and has it remembered with the VM of this name if that is known; it may
    /// be empty, for what concerns no VM.
    ///
    /// # Errors
    /// When the fleet has ended.
    pub async fn note(&self, name: String, kind: virtual_machine_event::Kind) -> Result<(), Stopped> {
        self.0.send(Request::Note(name, Box::new(kind))).await.map_err(|_| Stopped)
    }

    async fn ask<T>(&self, request: impl FnOnce(oneshot::Sender<T>) -> Request) -> Result<T, Stopped> {
        let (reply, answer) = oneshot::channel();
        self.0.send(request(reply)).await.map_err(|_| Stopped)?;
        answer.await.map_err(|_| Stopped)
    }
}
