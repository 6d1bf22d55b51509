//! Service `guestlet.v1.Files`: files that a host half copies for users. The copying itself is done by
//! [`crate::copies`], on a thread for each call; this module decides who may copy, and how many copies run at
//! a time.

mod check;
mod conversation;

use std::pin::Pin;
use std::sync::Arc;

use tokio::sync::mpsc;
use tokio_stream::Stream;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status, Streaming};

use crate::copies::reader::Reader;
use crate::copies::records::Records;
use crate::copies::writer::Writer;
use crate::copies::{MAX_MESSAGE, WAITING};
use crate::guest::Guest;
use crate::policy::audit::{Noted, printable};
use crate::policy::{Asker, Role};
use crate::rpc::guard::Gate;
use crate::rpc::guest::may_work;
use crate::sys::blocking;
use crate::transport::opening;
use crate::transport::seats::{Seat, Seats};
use crate::wire::proto::v1::files_server::{self, FilesServer};
use crate::wire::proto::v1::{
    FileFailed, FileFailure, FromReader, FromWriter, OpenFiles, ToReader, ToWriter, from_reader, from_writer,
    to_reader, to_writer,
};
use check::Check;
use conversation::Conversation;

/// Calls that are under way, in all and of one caller: each takes a thread, and some 3 MiB.
const ALL: u32 = 16;
const OF_ONE: u32 = 8;

/// A call is under way until its last clone is dropped.
type Place = Arc<Seat<String>>;

fn too_many() -> Status {
    Status::resource_exhausted(format!(
        "at most {ALL} copies from or to this guest can run at a time, and {OF_ONE} of one caller; try again later"
    ))
}

/// Implementation of the gRPC service.
#[derive(Debug, Clone)]
pub struct Service {
    guest: Guest,
    gate: Gate,
    records: Records,
    /// Concurrent calls of each caller.
    places: Seats<String>,
    stopping: CancellationToken,
}

impl Service {
    /// Copies files of this guest, as far as the rules of `gate` let it, until `stopping`. What is interrupted is kept in `records`.
    pub fn new(guest: Guest, gate: Gate, records: Records, stopping: CancellationToken) -> Self {
        Self { guest, gate, records, places: Seats::new(OF_ONE, ALL), stopping }
    }

    /// The service as HTTP/2 serves it.
    pub fn into_server(self) -> FilesServer<Self> {
        FilesServer::new(self).max_decoding_message_size(MAX_MESSAGE)
    }

    /// Prepares a call: reads its first message, takes a place, and opens the channels for its work.
    async fn begin<T, A>(
        &self,
        request: Request<Streaming<T>>,
        verb: &'static str,
        role: Role,
    ) -> Result<Begun<T, A>, Status>
    where
        T: Asks,
    {
        let asker = request.extensions().get::<Asker>().cloned();
        let asker = asker.ok_or_else(|| Status::internal("the caller is not known"))?;
        let noted = request.extensions().get::<Arc<Noted>>().cloned().unwrap_or_default();
        let mut requests = request.into_inner();
        let first = opening::first(&mut requests).await?;
        let first = first.filter(|first| first.open().is_some());
        let first = first.ok_or_else(|| Status::invalid_argument("the first message must be open"))?;
        let subject = first.open().map(|open| printable(&String::from_utf8_lossy(&open.path)));
        let _ = noted.subject.set(subject.unwrap_or_default());
        may_work()?;
        let place = self.places.take(format!("{}\n{}", asker.who(), asker.caller()));
        let place = Arc::new(place.ok_or_else(too_many)?);
        let check = Check::new(self.gate.clone(), asker, self.guest.freezer.clone(), verb, role, &noted);
        let (say, requested) = mpsc::channel(WAITING);
        let (tell, answers) = mpsc::channel(WAITING);
        // Cannot fail, because the channel is empty and has room for this message.
        drop(say.try_send(first));
        Ok(Begun { check, noted, place, requests, say, requested, tell, answers })
    }
}

/// A call that has begun.
struct Begun<T, A> {
    check: Check,
    noted: Arc<Noted>,
    place: Place,
    requests: Streaming<T>,
    say: mpsc::Sender<T>,
    requested: mpsc::Receiver<T>,
    tell: mpsc::Sender<A>,
    answers: mpsc::Receiver<A>,
}

/// Message with a request.
trait Asks {
    /// Returns the open request, if the message is one.
    fn open(&self) -> Option<&OpenFiles>;
}

impl Asks for ToReader {
    fn open(&self) -> Option<&OpenFiles> {
        match &self.request {
            Some(to_reader::Request::Open(open)) => Some(open),
            _ => None,
        }
    }
}

impl Asks for ToWriter {
    fn open(&self) -> Option<&OpenFiles> {
        match &self.request {
            Some(to_writer::Request::Open(open)) => Some(open),
            _ => None,
        }
    }
}

/// A message that answers.
trait Answers: Send + 'static {
    /// Makes a message that the work is still in progress.
    fn working() -> Self;

    /// Returns the failure, if the message reports one.
    fn failed(&self) -> Option<&FileFailed>;
}

impl Answers for FromReader {
    fn working() -> Self {
        Self { answer: Some(from_reader::Answer::Working(true)) }
    }

    fn failed(&self) -> Option<&FileFailed> {
        match &self.answer {
            Some(from_reader::Answer::Failed(failed)) => Some(failed),
            _ => None,
        }
    }
}

impl Answers for FromWriter {
    fn working() -> Self {
        Self { answer: Some(from_writer::Answer::Working(true)) }
    }

    fn failed(&self) -> Option<&FileFailed> {
        match &self.answer {
            Some(from_writer::Answer::Failed(failed)) => Some(failed),
            _ => None,
        }
    }
}

/// Waits for the first answer, which may be a refusal to open the file, and returns the stream of all answers.
async fn converse<T: Send + 'static, A: Answers>(
    begun: Unopened<T, A>,
    noted: &Noted,
    stopping: CancellationToken,
) -> Result<Response<Pin<Box<dyn Stream<Item = Result<A, Status>> + Send>>>, Status> {
    let Unopened { place, requests, say, mut answers } = begun;
    let first = tokio::select! {
        first = answers.recv() => first,
        () = stopping.cancelled() => None,
    };
    let first = first.ok_or_else(|| Status::unavailable("the agent is stopping"))?;
    if let Some(failed) = first.failed().filter(|failed| failed.kind() == FileFailure::Denied) {
        let _ = noted.denied.set(failed.message.clone());
        return Err(Status::permission_denied(failed.message.clone()));
    }
    let conversation = Conversation {
        first: Some(first),
        requests: Some(requests),
        say: Some(say),
        waiting: None,
        answers,
        stopping,
        place,
    };
    Ok(Response::new(Box::pin(conversation.into_stream())))
}

struct Unopened<T, A> {
    place: Place,
    requests: Streaming<T>,
    say: mpsc::Sender<T>,
    answers: mpsc::Receiver<A>,
}

#[tonic::async_trait]
impl files_server::Files for Service {
    type ReadFilesStream = Pin<Box<dyn Stream<Item = Result<FromReader, Status>> + Send>>;
    type WriteFilesStream = Pin<Box<dyn Stream<Item = Result<FromWriter, Status>> + Send>>;

    async fn read_files(
        &self,
        request: Request<Streaming<ToReader>>,
    ) -> Result<Response<Self::ReadFilesStream>, Status> {
        let Begun { check, noted, place, requests, say, requested, tell, answers } =
            self.begin(request, "ReadFiles", Role::FilesRead).await?;
        let held = place.clone();
        let reader = Reader { guard: check, base: "/".into(), answers: tell };
        blocking::let_go(move || (reader.run(requested), drop(held)).0);
        converse(Unopened { place, requests, say, answers }, &noted, self.stopping.clone()).await
    }

    async fn write_files(
        &self,
        request: Request<Streaming<ToWriter>>,
    ) -> Result<Response<Self::WriteFilesStream>, Status> {
        let Begun { check, noted, place, requests, say, requested, tell, answers } =
            self.begin(request, "WriteFiles", Role::FilesWrite).await?;
        if self.guest.freezer.restricts() {
            let held = self.guest.freezer.held();
            return Err(Status::failed_precondition(format!(
                "nothing can be written while file systems are frozen: {held}"
            )));
        }
        let held = place.clone();
        let records = self.records.clone();
        let writer = Writer { guard: check, base: "/".into(), records, answers: tell };
        blocking::let_go(move || (writer.run(requested), drop(held)).0);
        converse(Unopened { place, requests, say, answers }, &noted, self.stopping.clone()).await
    }
}
