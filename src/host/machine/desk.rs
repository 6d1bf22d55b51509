//! Limits how many calls of one guest are under way at a time, and how fast its answers may come. A guest that
//! does not answer delays only its own callers. Answers that people request do not count as excessive output of
//! the guest (`limits.bytes-per-second`).

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;
use tonic::Status;

use super::streams::{Bounds, Stream, Streams};
use crate::host::caller::Caller;
use crate::host::handed_on::Turn;
use crate::host::limits::Limits;
use crate::host::rate::Allowance;

/// Calls of one guest and kind that are under way at a time.
const AT_A_TIME: usize = 3;
/// Calls of one guest and kind that are under way or wait for their turn.
const WAITING: usize = 32;
/// Calls of one guest that wait for something in the guest. An agent accepts 24, from all callers together.
const PATIENT: Bounds = Bounds { of: "calls that wait for entries", all: 16, others: 12, of_one: 6 };
/// Programs of one guest with clients, and clients that forward connections. An agent accepts 64 in all.
const STREAMS: Bounds =
    Bounds { of: "programs with clients and forwarding clients", all: 48, others: 32, of_one: 16 };
/// Copies of files from and to one guest. An agent accepts 16 in all.
const COPIES: Bounds = Bounds { of: "copies of files under way", all: 12, others: 8, of_one: 4 };
/// Interval at which the byte allowance is checked again.
const LOOK: Duration = Duration::from_millis(100);
/// Time without calls after which the desk of a VM is forgotten.
const IDLE: Duration = Duration::from_secs(60);

/// Desks by the names of their VMs, each with the time of its last call.
type Table = BTreeMap<String, (Instant, Arc<Desk>)>;

/// Desks of all VMs; clones share them.
#[derive(Debug, Clone, Default)]
pub struct Desks(Arc<Mutex<Table>>);

/// Calls of one guest that wait or are under way.
#[derive(Debug)]
pub struct Desk {
    usual: Queue,
    urgent: Queue,
    search: Queue,
    patient: Streams,
    /// Connections beside the session: `streams` for programs and forwarding clients, `copies` for copies of files.
    streams: Streams,
    copies: Streams,
    /// Allowance for the bytes of answers.
    pace: Mutex<Allowance>,
}

/// Purpose of a connection beside the session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Beside {
    /// Input and output of programs.
    Programs,
    /// Connections to listening ports in the guest.
    Forwards,
    /// Copied files.
    Copies,
}

impl Beside {
    /// Returns the capability of agents that support these calls. (Running programs has always been a part of
    /// `machine`.)
    pub fn capability(self) -> &'static str {
        match self {
            Self::Programs => "machine",
            Self::Forwards => "forward",
            Self::Copies => "files",
        }
    }

    /// Returns the error for calls where another program has the session.
    pub fn elsewhere(self) -> &'static str {
        match self {
            Self::Programs => "programs are run in a guest on its own host only",
            Self::Forwards => "ports of a guest are reached on its own host only",
            Self::Copies => "files are copied from and to a guest on its own host only",
        }
    }
}

/// Calls that wait for their turns.
#[derive(Debug)]
struct Queue {
    waiting: Arc<Semaphore>,
    places: Arc<Semaphore>,
}

impl Queue {
    /// Creates a queue from which so many calls may be under way.
    fn of(places: usize) -> Self {
        Self { waiting: Arc::new(Semaphore::new(WAITING)), places: Arc::new(Semaphore::new(places)) }
    }
}

/// Permission for one call, which is under way until this is dropped.
#[derive(Debug)]
#[allow(dead_code, reason = "held, not looked at")]
pub enum Place {
    /// The call holds its permits in a queue.
    InTurn(OwnedSemaphorePermit, OwnedSemaphorePermit),
    /// The call runs beside the queues, within the caller's own limit.
    Own(Stream),
}

impl Desks {
    /// Returns the desk of the VM with this name. Forgets desks that have been idle for a while.
    pub fn of(&self, name: &str, limits: &Limits) -> Arc<Desk> {
        let now = Instant::now();
        let mut desks = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        desks.retain(|_, (last, desk)| {
            desk.is_in_use() || Arc::strong_count(desk) > 1 || now.duration_since(*last) < IDLE
        });
        let (last, desk) = desks.entry(name.to_owned()).or_insert_with(|| (now, Arc::new(Desk::new(limits))));
        *last = now;
        Arc::clone(desk)
    }
}

impl Desk {
    /// Reports whether there are connections beside the session.
    fn is_in_use(&self) -> bool {
        self.streams.is_in_use() || self.copies.is_in_use()
    }

    /// Returns the connections beside the session of this kind.
    pub fn beside(&self, beside: Beside) -> &Streams {
        match beside {
            Beside::Programs | Beside::Forwards => &self.streams,
            Beside::Copies => &self.copies,
        }
    }

    /// Creates a desk. Its answers may use a quarter of the guest's burst, besides one large answer for each call
    /// under way, and half of its rate in the long run. The rest is for the guest's events.
    fn new(limits: &Limits) -> Self {
        #[allow(clippy::cast_precision_loss, reason = "nobody allows that many bytes")]
        let burst = limits.byte_burst() as f64 / 4.0;
        let pace = Allowance::new(Instant::now(), burst, f64::from(limits.bytes_per_second) / 2.0);
        let [patient, streams, copies] = [PATIENT, STREAMS, COPIES].map(Streams::within);
        let [usual, urgent, search] = [AT_A_TIME; 3].map(Queue::of);
        Self { usual, urgent, search, patient, streams, copies, pace: Mutex::new(pace) }
    }

    /// Waits for the turn of this caller's call, behind earlier calls of the same kind.
    ///
    /// # Errors
    /// If too many calls wait.
    pub async fn place(&self, turn: Turn, caller: &Caller) -> Result<Place, Status> {
        let Queue { waiting, places } = match turn {
            Turn::Usual => &self.usual,
            Turn::Urgent => &self.urgent,
            Turn::Search => &self.search,
            Turn::Patient => return self.patient.place(caller).map(Place::Own),
        };
        let too_many = |_| {
            Status::resource_exhausted(format!("{WAITING} calls of this guest are pending; try again later"))
        };
        let waiting = Arc::clone(waiting).try_acquire_owned().map_err(too_many)?;
        let place = Arc::clone(places).acquire_owned().await;
        let place = place.map_err(|_| Status::internal("calls of this guest have no places"))?;
        Ok(Place::InTurn(waiting, place))
    }

    /// Counts an answer with so many bytes, and returns when further ones may come.
    pub async fn count(&self, bytes: usize) {
        #[allow(clippy::cast_precision_loss, reason = "no answer is that large")]
        let bytes = bytes as f64;
        let take = || self.pace.lock().unwrap_or_else(PoisonError::into_inner).take(Instant::now(), bytes);
        while !take() {
            tokio::time::sleep(LOOK).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn so_many_are_under_way_and_so_many_wait() {
        let desk = Desks::default().of("a", &Limits::default());
        let caller = Caller::User { uid: 1, name: None };
        let mut under_way = Vec::new();
        for _ in 0..AT_A_TIME {
            under_way.push(desk.place(Turn::Usual, &caller).await.unwrap());
        }
        let waiting: Vec<_> =
            (AT_A_TIME..WAITING).map(|_| Box::pin(desk.place(Turn::Usual, &caller))).collect();
        let mut waiting = futures_util::future::join_all(waiting);
        assert!(futures_util::poll!(&mut waiting).is_pending());
        assert_eq!(
            desk.place(Turn::Usual, &caller).await.unwrap_err().code(),
            tonic::Code::ResourceExhausted
        );
        desk.place(Turn::Urgent, &caller).await.unwrap();
        desk.place(Turn::Search, &caller).await.unwrap();
        desk.place(Turn::Patient, &caller).await.unwrap();
        drop(under_way);
        drop(waiting);
        desk.place(Turn::Usual, &caller).await.unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn answers_come_no_faster_than_half_of_what_the_guest_may_send() {
        let limits = Limits { message_bytes: 1024, bytes_per_second: 1024, ..Limits::default() };
        let desk = Desks::default().of("a", &limits);
        let begun = Instant::now();
        for _ in 0..4 {
            desk.count(1024).await;
        }
        // A burst of 2 KiB, and then 512 bytes a second.
        let took = begun.elapsed();
        assert!(took >= Duration::from_secs(4) && took < Duration::from_secs(5), "{took:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_desk_is_forgotten_when_nobody_has_asked_for_long() {
        let (desks, limits) = (Desks::default(), Limits::default());
        let first = desks.of("a", &limits);
        assert!(Arc::ptr_eq(&first, &desks.of("a", &limits)));
        drop(first);
        tokio::time::advance(IDLE).await;
        drop(desks.of("b", &limits));
        assert_eq!(desks.0.lock().unwrap().len(), 1);
    }
}
