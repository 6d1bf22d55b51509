//! Connection to an agent beside its session, for long-lived streams: neither the amount of data nor a slow reader
//! delays the calls and events of the session.

use std::time::Duration;

use tokio::sync::watch;
use tonic::{Status, Streaming};

use super::contact::{Contact, Proved, Reached, Speech};
use super::conversation::Loss;
use super::fleet::Handle;
use super::place::Told;
use super::talk::check_dmi;
use super::text;
use crate::transport::http2;
use crate::wire::exec::{EXIT_CODE, SAID_BY_GUEST};
use crate::wire::proto::v1::GetInfoRequest;
use crate::wire::proto::v1::guest_client::GuestClient;

/// Timeout of the call that checks the identity of the agent.
const SOON: Duration = Duration::from_secs(10);
/// Timeout of an agent for beginning a stream; long, because a disk may be slow.
pub const BEGIN: Duration = Duration::from_secs(60);
/// Time for reading what was received before the end of a connection.
const LEFTOVERS: Duration = Duration::from_secs(1);

/// Connection to an agent, beside its session.
pub struct Line {
    /// HTTP/2 client for calls over this connection.
    pub client: http2::Client,
    connection: http2::Connection,
    /// Watch that closes when the VM is no longer known.
    known: watch::Receiver<Told>,
}

/// Dials the agent of a guest that has a session, and makes sure that it is the same guest.
///
/// # Errors
/// If there is no session, or the agent cannot be reached.
pub async fn dial(fleet: &Handle, name: &str) -> Result<Line, Status> {
    let contact = fleet.contact(name.to_owned()).await?;
    let contact =
        contact.ok_or_else(|| Status::failed_precondition("there is no session with this guest now"))?;
    let contact = contact.for_streams();
    match reach(&contact, contact.speech).await {
        // The guest may have been given keys since its session began.
        Err(_) if contact.speech == Speech::Plain => reach(&contact, Speech::Secured).await,
        line => line,
    }
}

/// Dials the agent of a guest that is assumed to use this speech.
async fn reach(contact: &Contact, mut speech: Speech) -> Result<Line, Status> {
    let (expected, known) = (contact.vm.ids.dmi.clone(), contact.topology.clone());
    let cut = |words: String| Status::unavailable(format!("the guest cannot be reached: {words}"));
    let reached = contact.reach(&mut speech).await;
    let Reached { stream, guest, .. } = reached.map_err(|end| cut(text::chain(&end)))?;
    if matches!(guest, Proved::First { .. }) {
        return Err(cut("its key is not known yet".to_owned()));
    }
    let connected = http2::connect_for_streams(stream).await;
    let (client, connection) = connected.map_err(|error| cut(text::chain(&Loss::Broken(error))))?;
    let mut line = Line { client, connection, known };
    if guest == Proved::Nothing
        && let Some(expected) = expected
    {
        let mut guest = GuestClient::with_origin(line.client.clone(), origin());
        let info = line.drive(SOON, guest.get_info(GetInfoRequest {})).await?;
        check_dmi(&info.into_inner().dmi_uuid, &expected).map_err(|refusal| cut(text::chain(&refusal)))?;
    }
    Ok(line)
}

/// Completes when the VM is no longer known.
async fn gone(known: &mut watch::Receiver<Told>) {
    while known.changed().await.is_ok() {}
}

/// Returns the origin for requests over this connection.
pub fn origin() -> http::Uri {
    http::Uri::from_static(http2::ORIGIN)
}

impl Line {
    /// Waits for the answer to a call, at most for a time.
    ///
    /// # Errors
    /// The agent's errors; also if it does not answer in time, or the connection ends.
    pub async fn drive<T>(
        &mut self,
        within: Duration,
        call: impl Future<Output = Result<T, Status>>,
    ) -> Result<T, Status> {
        let answer = async {
            tokio::select! {
                biased;
                answer = call => answer.map_err(|status| said(&status)),
                _ = self.connection.ended() => Err(Status::unavailable("the guest closed the connection")),
            }
        };
        let late =
            || Status::deadline_exceeded(format!("the guest does not answer within {} s", within.as_secs()));
        tokio::time::timeout(within, answer).await.unwrap_or_else(|_| Err(late()))
    }

    /// Returns the next message of a stream over this connection; `None` at its end.
    ///
    /// # Errors
    /// The agent's errors; `UNAVAILABLE` if the connection ends or the VM is no longer known.
    pub async fn next<T>(&mut self, answers: &mut Streaming<T>) -> Result<Option<T>, Status> {
        let answer = tokio::select! {
            biased;
            _ = self.connection.ended() => {
                let left = tokio::time::timeout(LEFTOVERS, answers.message()).await;
                left.unwrap_or_else(|_| Err(Status::unavailable("the guest closed the connection")))
            }
            () = gone(&mut self.known) => return Err(Status::unavailable("the VM is no longer known")),
            answer = answers.message() => answer,
        };
        answer.map_err(|status| said(&status))
    }
}

/// Returns the status of an agent with its text cleaned; if the connection broke, a status that says so.
fn said(status: &Status) -> Status {
    if std::error::Error::source(status).is_some() && status.code() != tonic::Code::OutOfRange {
        return Status::unavailable("the connection to the guest broke");
    }
    let mut cleaned = Status::new(status.code(), text::clean_words(status.message()));
    let metadata = cleaned.metadata_mut();
    metadata.insert(SAID_BY_GUEST, tonic::metadata::MetadataValue::from_static("1"));
    for code in ["126", "127"] {
        if status.metadata().get(EXIT_CODE).is_some_and(|said| said == code) {
            metadata.insert(EXIT_CODE, tonic::metadata::MetadataValue::from_static(code));
        }
    }
    cleaned
}

#[cfg(test)]
mod tests {
    use super::*;
    use tonic::Code;

    #[test]
    fn what_a_guest_says_is_cleaned() {
        let mut status = Status::not_found("\u{1b}[2J");
        status.metadata_mut().insert(EXIT_CODE, "127".parse().unwrap());
        let status = said(&status);
        assert_eq!((status.code(), status.message()), (Code::NotFound, "\u{fffd}[2J"));
        assert_eq!(status.metadata().get(EXIT_CODE).unwrap(), "127");
        assert!(status.metadata().get(SAID_BY_GUEST).is_some());
    }
}
