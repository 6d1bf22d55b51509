//! `guestlet.v1.Journal`: the systemd journal, for the host half.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::sync::Semaphore;
use tonic::{Request, Response, Status};

use crate::guest::journal::{self, Error, LONGEST_WAIT, Question};
use crate::sys::error_chain;
use crate::wire::proto::v1;
use crate::wire::proto::v1::journal_server::{self, JournalServer};

/// Maximum number of concurrent reads, each with its own program; more than a host half needs.
const MOST: usize = 24;

/// The service; clones share its places.
#[derive(Debug, Clone)]
pub struct Service(Arc<Semaphore>);

impl Default for Service {
    fn default() -> Self {
        Self(Arc::new(Semaphore::new(MOST)))
    }
}

impl Service {
    /// The service as HTTP/2 serves it.
    pub fn into_server(self) -> JournalServer<Self> {
        JournalServer::new(self)
    }
}

fn question(request: v1::ReadJournalRequest) -> Result<Question, Status> {
    let v1::ReadJournalRequest { name: _, units, cursor, since, last, priority, wait_seconds } = request;
    let wait = Duration::from_secs(wait_seconds.into());
    if wait > LONGEST_WAIT {
        let seconds = LONGEST_WAIT.as_secs();
        return Err(Status::invalid_argument(format!(
            "wait_seconds is {wait_seconds}, and at most {seconds}"
        )));
    }
    let since = since.map(SystemTime::try_from).transpose();
    let since = since.map_err(|_| Status::invalid_argument("since is not a valid time"))?;
    Ok(Question { units, cursor, since, last, priority, wait })
}

fn entry(entry: journal::Entry) -> v1::JournalEntry {
    v1::JournalEntry {
        time: entry.time.map(Into::into),
        identifier: if entry.identifier.is_empty() { entry.command } else { entry.identifier },
        process_id: entry.process_id,
        unit: entry.unit,
        priority: entry.priority.map(Into::into),
        message: entry.message,
        left_out: entry.left_out,
    }
}

fn status(error: &Error) -> Status {
    let words = error_chain::words(error);
    match error {
        Error::Unit(_) | Error::Units(_) | Error::Cursor | Error::Priority(_) | Error::Since => {
            Status::invalid_argument(words)
        }
        // The program is killed when the agent stops; a repeated request is then answered.
        Error::Program(error) if error.is_killed() => Status::unavailable(words),
        Error::Missing => Status::failed_precondition(words),
        Error::Slow => Status::deadline_exceeded(words),
        Error::Program(_) | Error::Malformed(_) | Error::Read(_) => Status::internal(words),
    }
}

#[tonic::async_trait]
impl journal_server::Journal for Service {
    async fn read_journal(
        &self,
        request: Request<v1::ReadJournalRequest>,
    ) -> Result<Response<v1::ReadJournalResponse>, Status> {
        let _place = self.0.try_acquire().map_err(|_| {
            Status::resource_exhausted(format!(
                "the journal is read by {MOST} callers already; try again later"
            ))
        })?;
        let answer = journal::read(&question(request.into_inner())?).await.map_err(|error| status(&error))?;
        Ok(Response::new(v1::ReadJournalResponse {
            entries: answer.entries.into_iter().map(entry).collect(),
            cursor: answer.cursor,
            has_more: answer.has_more,
            has_gap: answer.has_gap,
        }))
    }
}
