//! Copies of files from and to guests: forwards `guestlet.v1.Files` of the admin API to the agents, over a
//! separate connection for each call (`beside`). Nothing is buffered here: data in transit is bounded by the
//! flow-control windows of both connections. After an interruption, the client continues from the state of the
//! files.

use tokio_stream::Stream;
use tonic::{Code, Request, Response, Status, Streaming};

use super::asked::{Asked, Object};
use super::audit::Entry;
use super::beside::{self, BEGIN, Line, origin};
use super::caller::Behalf;
use super::fleet::Handle;
use super::machine::{self, Beside, Desks};
use super::text;
use crate::access::verb::{self, Verb};
use crate::transport::http2;
use crate::transport::opening::first;
use crate::wire::files::MAX_MESSAGE;
use crate::wire::proto::v1::files_client::FilesClient;
use crate::wire::proto::v1::{
    FileFailed, FromReader, FromWriter, OpenFiles, ToReader, ToWriter, from_reader, from_writer, to_reader,
    to_writer,
};

/// Message of a client, for one of the two kinds of calls.
pub trait Says: Sized + Send + 'static {
    /// Message that the agent answers with.
    type Answer: Answers;
    /// Verb of the call, for the access rules.
    const VERB: &'static Verb;

    /// Returns the opening request if this is the first message of a call.
    fn open(&self) -> Option<&OpenFiles>;

    /// Returns the opening request for modification, like `open`.
    fn open_mut(&mut self) -> Option<&mut OpenFiles>;

    /// Makes the call to the agent, with the stream of requests.
    fn call(
        client: FilesClient<http2::Client>,
        request: Request<impl Stream<Item = Self> + Send + 'static>,
    ) -> impl Future<Output = Result<Response<Streaming<Self::Answer>>, Status>> + Send;
}

/// Message of an agent.
pub trait Answers: Send + 'static {
    /// Returns the failure that the message reports, if any.
    fn failed(&mut self) -> Option<&mut FileFailed>;
}

/// Implements both traits for one kind of call.
macro_rules! kind {
    ($says:ty, $to:ident; $answer:ty, $from:ident; $verb:expr, $method:ident) => {
        impl Says for $says {
            type Answer = $answer;
            const VERB: &'static Verb = $verb;

            fn open(&self) -> Option<&OpenFiles> {
                match &self.request {
                    Some($to::Request::Open(open)) => Some(open),
                    _ => None,
                }
            }

            fn open_mut(&mut self) -> Option<&mut OpenFiles> {
                match &mut self.request {
                    Some($to::Request::Open(open)) => Some(open),
                    _ => None,
                }
            }

            async fn call(
                mut client: FilesClient<http2::Client>,
                request: Request<impl Stream<Item = Self> + Send + 'static>,
            ) -> Result<Response<Streaming<$answer>>, Status> {
                client.$method(request).await
            }
        }

        impl Answers for $answer {
            fn failed(&mut self) -> Option<&mut FileFailed> {
                match &mut self.answer {
                    Some($from::Answer::Failed(failed)) => Some(failed),
                    _ => None,
                }
            }
        }
    };
}

kind!(ToReader, to_reader; FromReader, from_reader; &verb::CP_FROM, read_files);
kind!(ToWriter, to_writer; FromWriter, from_writer; &verb::CP_TO, write_files);

/// First message of a client, which opens a copy.
pub struct Opening<S>(S);

impl<S: Says> Asked for Opening<S> {
    fn verb(&self) -> &'static Verb {
        S::VERB
    }

    fn object(&self) -> Object<'_> {
        Object::Machine(self.0.open().map_or("", |open| &open.name))
    }

    fn subject(&self) -> String {
        self.0.open().map(|open| text::clean(&String::from_utf8_lossy(&open.path))).unwrap_or_default()
    }
}

/// Receives the first message of a client.
///
/// # Errors
/// If it is not `open`, or does not arrive in time.
pub async fn opening<S: Says>(messages: &mut Streaming<S>) -> Result<Opening<S>, Status> {
    let first = first(messages).await?;
    let first = first.filter(|first| first.open().is_some());
    first.map(Opening).ok_or_else(|| Status::invalid_argument("the first message must be open"))
}

/// Forwards the messages of an admitted client, beginning with `first`, to the agent of the VM that `first` names.
///
/// # Errors
/// If the agent cannot be reached, has too many copies, or refuses.
pub async fn run<S: Says>(
    desks: &Desks,
    fleet: &Handle,
    behalf: &Behalf,
    first: Opening<S>,
    messages: Streaming<S>,
) -> Result<Relay<S::Answer>, Status> {
    let Opening(mut first) = first;
    // The VM's name means nothing to its guest.
    let name = first.open_mut().map(|open| std::mem::take(&mut open.name)).unwrap_or_default();
    let place = machine::place_for_stream(desks, fleet, &name, behalf.caller(), Beside::Copies).await?;
    let mut line = beside::dial(fleet, &name).await?;
    let rest = futures_util::stream::unfold(messages, |mut messages| async {
        // A client that has disconnected or violates the protocol sends nothing more.
        let message = messages.message().await.ok().flatten()?;
        Some((message, messages))
    });
    let all = futures_util::StreamExt::chain(tokio_stream::once(first), rest);
    let client =
        FilesClient::with_origin(line.client.clone(), origin()).max_decoding_message_size(MAX_MESSAGE);
    let answers = line.drive(BEGIN, S::call(client, behalf.state(all))).await?;
    Ok(Relay { line, answers: answers.into_inner(), entry: None, _place: place, is_over: false })
}

/// Relay for the agent's answers.
pub struct Relay<A> {
    line: Line,
    answers: Streaming<A>,
    entry: Option<Entry>,
    _place: machine::Stream,
    is_over: bool,
}

impl<A: Answers> Relay<A> {
    /// Returns the stream of messages from the agent; `entry` is the audit record of the call, and ends with the
    /// stream.
    pub fn into_stream(self, entry: Option<Entry>) -> impl Stream<Item = Result<A, Status>> {
        futures_util::stream::unfold(Self { entry, ..self }, |mut this| async {
            if this.is_over {
                return None;
            }
            let mut answer = this.line.next(&mut this.answers).await.transpose();
            this.is_over = !matches!(answer, Some(Ok(_)));
            if let Some(Ok(answer)) = &mut answer
                && let Some(failed) = answer.failed()
            {
                failed.message = text::clean_words(&failed.message);
            }
            if this.is_over
                && let Some(entry) = this.entry.take()
            {
                let code = match &answer {
                    Some(Err(status)) => status.code(),
                    _ => Code::Ok,
                };
                entry.end(code);
            }
            Some((answer?, this))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_names_the_path_and_the_direction() {
        let open =
            OpenFiles { name: "web-1".into(), path: b"/etc/a\x1b[2J".to_vec(), ..OpenFiles::default() };
        let reads = Opening(ToReader { request: Some(to_reader::Request::Open(open.clone())) });
        assert_eq!((reads.verb().words, reads.object()), ("cp from", Object::Machine("web-1")));
        assert_eq!(reads.subject(), "/etc/a\u{fffd}[2J");
        let writes = Opening(ToWriter { request: Some(to_writer::Request::Open(open)) });
        assert_eq!(writes.verb().words, "cp to");
    }
}
