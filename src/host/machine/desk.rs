//! How much is asked of one guest at a time, and how fast. A guest that does not answer keeps up those who ask it, and nobody
//! else; and what people have it say is no reason to take it for one that says too much (`limits.bytes-per-second`).

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

/// Calls of one guest of the same kind that are under way at a time.
const AT_A_TIME: usize = 3;
/// Calls of one guest that are under way or wait for their turn.
const WAITING: usize = 32;
/// Calls of one guest that wait for something there. An agent takes 24, whoever asks.
const PATIENT: Bounds = Bounds { of: "calls that wait for entries", all: 16, others: 12, of_one: 6 };
/// Programs of one guest with clients, and clients that forward connections. An agent takes 64 in all.
const STREAMS: Bounds =
    Bounds { of: "programs with clients and forwarding clients", all: 48, others: 32, of_one: 16 };
/// Copies of files from and to one guest. An agent takes 16 in all.
const COPIES: Bounds = Bounds { of: "copies of files under way", all: 12, others: 8, of_one: 4 };
/// How soon it is looked again whether the guest may say more.
const LOOK: Duration = Duration::from_millis(100);
/// After how long a VM of which nobody asks anything is forgotten.
const IDLE: Duration = Duration::from_secs(60);

/// By the names of VMs: when something was asked last, and what is under way.
type Table = BTreeMap<String, (Instant, Arc<Desk>)>;

/// The desks of all VMs; clones share them.
#[derive(Debug, Clone, Default)]
pub struct Desks(Arc<Mutex<Table>>);

/// What is asked of one guest.
#[derive(Debug)]
pub struct Desk {
    usual: Queue,
    urgent: Queue,
    search: Queue,
    patient: Streams,
    /// Of connections beside the session: those with programs and with forwarding clients, and those of copies.
    streams: Streams,
    copies: Streams,
    /// Bytes of answers.
    pace: Mutex<Allowance>,
}

/// What goes over connections beside the session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Beside {
    /// What programs read and write.
    Programs,
    /// Connections with what listens in the guest.
    Forwards,
    /// Files that are copied.
    Copies,
}

impl Beside {
    /// What an agent says that it can, if it answers these calls. (Those that run programs have always had that with the rest.)
    pub fn capability(self) -> &'static str {
        match self {
            Self::Programs => "machine",
            Self::Forwards => "forward",
            Self::Copies => "files",
        }
    }

    /// What is said where another program has the session.
    pub fn elsewhere(self) -> &'static str {
        match self {
            Self::Programs => "programs are run in a guest on its own host only",
            Self::Forwards => "ports of a guest are reached on its own host only",
            Self::Copies => "files are copied from and to a guest on its own host only",
        }
    }
}

/// Calls that take their turns.
#[derive(Debug)]
struct Queue {
    waiting: Arc<Semaphore>,
    places: Arc<Semaphore>,
}

impl Queue {
    /// So many may be under way, and none is.
    fn of(places: usize) -> Self {
        Self { waiting: Arc::new(Semaphore::new(WAITING)), places: Arc::new(Semaphore::new(places)) }
    }
}

/// A call of a guest is under way until this is dropped.
#[derive(Debug)]
#[allow(dead_code, reason = "held, not looked at")]
pub enum Place {
    /// Behind others.
    InTurn(OwnedSemaphorePermit, OwnedSemaphorePermit),
    /// Beside them.
    Own(Stream),
}

impl Desks {
    /// That of the VM of this name.
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
    /// There are connections beside the session.
    fn is_in_use(&self) -> bool {
        self.streams.is_in_use() || self.copies.is_in_use()
    }

    /// The connections beside the session of this kind.
    pub fn beside(&self, beside: Beside) -> &Streams {
        match beside {
            Beside::Programs | Beside::Forwards => &self.streams,
            Beside::Copies => &self.copies,
        }
    }

    /// A quarter of what the guest may send at once, beside as many large answers as are under way, and half of what it may in
    /// the long run: the rest is for its events.
    fn new(limits: &Limits) -> Self {
        #[allow(clippy::cast_precision_loss, reason = "nobody allows that many bytes")]
        let burst = limits.byte_burst() as f64 / 4.0;
        let pace = Allowance::new(Instant::now(), burst, f64::from(limits.bytes_per_second) / 2.0);
        let [patient, streams, copies] = [PATIENT, STREAMS, COPIES].map(Streams::within);
        let [usual, urgent, search] = [AT_A_TIME; 3].map(Queue::of);
        Self { usual, urgent, search, patient, streams, copies, pace: Mutex::new(pace) }
    }

    /// Waits for the turn of this caller's call, behind those of the same kind.
    ///
    /// # Errors
    /// If too many wait.
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

    /// An answer has come that has so many bytes: returns when as many more may come.
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
