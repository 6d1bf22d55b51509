//! Programs in guests, for people: what `guestlet.v1.Exec` of the admin API hands on.
//!
//! ```text
//! guestctl ◀──stream──▶ api, admitted ◀──stream──▶ a connection of its own ◀──▶ agent
//! ```
//!
//! What a program reads and writes goes over a connection that is dialled for it, beside the session: however much that is, and
//! however slowly somebody reads it, the session's calls and events do not wait. Nothing is kept here: what is under way is
//! bounded by the windows of both connections, and what is lost with one is sent again by whoever resumes.

use std::time::Duration;

use tokio::sync::watch;
use tokio_stream::Stream;
use tonic::{Code, Status, Streaming};

use super::asked::{Asked, Object};
use super::audit::Entry;
use super::caller::Behalf;
use super::contact::{Proved, Reached, Speech};
use super::conversation::Loss;
use super::fleet::Handle;
use super::machine::{self, Desks};
use super::place::Told;
use super::talk::check_dmi;
use super::text;
use crate::access::verb::{self, Verb};
use crate::transport::http2;
use crate::wire::exec::{EXIT_CODE, SAID_BY_GUEST};
use crate::wire::proto::v1::exec_client::ExecClient;
use crate::wire::proto::v1::from_program::Message as FromIt;
use crate::wire::proto::v1::guest_client::GuestClient;
use crate::wire::proto::v1::program_ended::How;
use crate::wire::proto::v1::to_program::Message;
use crate::wire::proto::v1::{FromProgram, GetInfoRequest, ToProgram};

/// Bytes of one message of a client, and of an agent.
pub const MAX_REQUEST: usize = 512 << 10;
const MAX_ANSWER: usize = 128 << 10;
/// What an agent can that opens sessions by PAM.
const LOGIN: &str = "login";
/// How long the first message of a client may take, and an agent that is asked who it is.
const SOON: Duration = Duration::from_secs(10);
/// How long an agent may take to begin: a disk may be slow.
const BEGIN: Duration = Duration::from_secs(60);
/// How long what was received before a connection's end may take to be read.
pub(super) const LEFTOVERS: Duration = Duration::from_secs(1);

/// What a client says first.
pub struct Opening(ToProgram);

impl Asked for Opening {
    fn verb(&self) -> &'static Verb {
        if matches!(self.0.message, Some(Message::Attach(_))) { &verb::ATTACH } else { &verb::EXEC }
    }

    fn object(&self) -> Object<'_> {
        Object::Machine(match &self.0.message {
            Some(Message::Start(start)) => &start.name,
            Some(Message::Attach(attach)) => &attach.name,
            _ => "",
        })
    }

    fn subject(&self) -> String {
        match &self.0.message {
            Some(Message::Start(start)) => {
                let login = start.login.as_ref();
                let arguments = login.map_or(&start.arguments, |login| &login.arguments);
                let program = arguments.first().map(|program| String::from_utf8_lossy(program));
                let user = if start.user.is_empty() { "root" } else { &start.user };
                match login {
                    None => format!("{} as {user}", program.unwrap_or_default()),
                    Some(_) => format!("{} as {user} (login)", program.unwrap_or("a login shell".into())),
                }
            }
            Some(Message::Attach(attach)) => attach.id.clone(),
            _ => String::new(),
        }
    }
}

impl Opening {
    /// A program is to run in a session of PAM.
    fn is_login(&self) -> bool {
        matches!(&self.0.message, Some(Message::Start(start)) if start.login.is_some())
    }

    /// The VM's name, which is nothing to its guest.
    fn take_name(&mut self) -> String {
        match &mut self.0.message {
            Some(Message::Start(start)) => std::mem::take(&mut start.name),
            Some(Message::Attach(attach)) => std::mem::take(&mut attach.name),
            _ => String::new(),
        }
    }
}

/// What a client says first, if that is what begins a call.
///
/// # Errors
/// If it is not, or does not come soon.
pub async fn opening(messages: &mut Streaming<ToProgram>) -> Result<Opening, Status> {
    let first = tokio::time::timeout(SOON, messages.message()).await;
    let first = first.map_err(|_| Status::deadline_exceeded("nothing is asked for"))??;
    let first = first.filter(|first| matches!(first.message, Some(Message::Start(_) | Message::Attach(_))));
    let first =
        first.ok_or_else(|| Status::invalid_argument("the first message is neither start nor attach"))?;
    Ok(Opening(first))
}

/// Hands on what an admitted client says, of which `first` is the beginning, to the agent of the VM that it names.
///
/// # Errors
/// If that cannot be reached, has too many streams, or refuses.
pub async fn run(
    desks: &Desks,
    fleet: &Handle,
    behalf: &Behalf,
    mut first: Opening,
    messages: Streaming<ToProgram>,
) -> Result<Relay, Status> {
    let name = first.take_name();
    let place = machine::place_for_stream(desks, fleet, &name, behalf.caller()).await?;
    if first.is_login() && !machine::is_able(fleet, &name, LOGIN).await? {
        return Err(machine::too_old(&name));
    }
    let mut line = dial(fleet, &name).await?;
    let answers = line.open(behalf, first.0, messages).await?;
    Ok(Relay { line, answers, entry: None, _place: place, is_over: false })
}

/// A connection with an agent, beside its session.
pub(super) struct Line {
    /// For calls.
    pub(super) client: http2::Client,
    /// What they go over.
    pub(super) connection: http2::Connection,
    /// Changes no more when the VM is not known any more.
    pub(super) known: watch::Receiver<Told>,
}

/// Dials the agent of a guest that has a session, and makes sure that it is the same guest.
pub(super) async fn dial(fleet: &Handle, name: &str) -> Result<Line, Status> {
    let contact = fleet.contact(name.to_owned()).await?;
    let contact =
        contact.ok_or_else(|| Status::failed_precondition("there is no session with this guest now"))?;
    let (expected, known) = (contact.vm.ids.dmi.clone(), contact.topology.clone());
    let contact = contact.for_streams();
    let cut = |words: String| Status::unavailable(format!("the guest cannot be reached: {words}"));
    let reached = contact.reach(&mut Speech::default()).await;
    let Reached { stream, guest, .. } = reached.map_err(|end| cut(text::chain(&end)))?;
    if matches!(guest, Proved::First { .. }) {
        return Err(cut("its key is not known yet".to_owned()));
    }
    let connected = http2::connect(stream).await;
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

/// Completes when the VM is not known any more.
pub(super) async fn gone(known: &mut watch::Receiver<Told>) {
    while known.changed().await.is_ok() {}
}

pub(super) fn origin() -> http::Uri {
    http::Uri::from_static(http2::ORIGIN)
}

impl Line {
    /// The answer to a call, within a time.
    pub(super) async fn drive<T>(
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

    /// Opens the stream to a program.
    async fn open(
        &mut self,
        behalf: &Behalf,
        first: ToProgram,
        messages: Streaming<ToProgram>,
    ) -> Result<Streaming<FromProgram>, Status> {
        let rest = futures_util::stream::unfold(messages, |mut messages| async {
            // A client that is gone, or breaks the rules, sends nothing more.
            let message = messages.message().await.ok().flatten()?;
            Some((message, messages))
        });
        let all = futures_util::StreamExt::chain(tokio_stream::once(first), rest);
        let mut exec =
            ExecClient::with_origin(self.client.clone(), origin()).max_decoding_message_size(MAX_ANSWER);
        let answers = self.drive(BEGIN, exec.run_program(behalf.state(all))).await?;
        Ok(answers.into_inner())
    }
}

/// Hands on what an agent answers.
pub struct Relay {
    line: Line,
    answers: Streaming<FromProgram>,
    entry: Option<Entry>,
    _place: machine::Stream,
    is_over: bool,
}

impl Relay {
    /// What comes from the program; `entry` is the record of the call, which ends with it.
    pub fn into_stream(self, entry: Option<Entry>) -> impl Stream<Item = Result<FromProgram, Status>> {
        futures_util::stream::unfold(Self { entry, ..self }, |mut this| async {
            if this.is_over {
                return None;
            }
            let answer = this.next().await.transpose();
            this.is_over = !matches!(answer, Some(Ok(_)));
            if this.is_over
                && let Some(entry) = this.entry.take()
            {
                entry.end(
                    answer
                        .as_ref()
                        .map_or(Code::Ok, |ended| ended.as_ref().map_or_else(Status::code, |_| Code::Ok)),
                );
            }
            Some((answer?, this))
        })
    }

    async fn next(&mut self) -> Result<Option<FromProgram>, Status> {
        let answer = tokio::select! {
            biased;
            _ = self.line.connection.ended() => {
                let left = tokio::time::timeout(LEFTOVERS, self.answers.message()).await;
                left.unwrap_or_else(|_| Err(Status::unavailable("the guest closed the connection")))
            }
            () = gone(&mut self.line.known) => return Err(Status::unavailable("the VM is not known any more")),
            answer = self.answers.message() => answer,
        };
        let mut answer = answer.map_err(|status| said(&status))?;
        if let Some(FromIt::Ended(ended)) = answer.as_mut().and_then(|answer| answer.message.as_mut())
            && let Some(How::Unknown(why)) = &mut ended.how
        {
            *why = text::clean(why);
        }
        Ok(answer)
    }
}

/// What an agent said, cleaned; of one that has gone, that nothing was said.
pub(super) fn said(status: &Status) -> Status {
    if std::error::Error::source(status).is_some() && status.code() != Code::OutOfRange {
        return Status::unavailable("the connection with the guest broke");
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
    use crate::wire::proto::v1::{AttachProgram, StartProgram};

    #[test]
    fn a_record_names_the_program_and_the_user_and_no_arguments() {
        let arguments = ["/bin/cat", "/etc/secret"].map(|word| word.as_bytes().to_vec()).to_vec();
        let start = StartProgram { name: "web-1".into(), arguments, ..StartProgram::default() };
        let mut opening = Opening(ToProgram { message: Some(Message::Start(start)) });
        assert_eq!((opening.verb().words, opening.object()), ("exec", Object::Machine("web-1")));
        assert_eq!(opening.subject(), "/bin/cat as root");
        assert_eq!(opening.take_name(), "web-1");
        assert_eq!(opening.object(), Object::Machine(""));
        let attach =
            AttachProgram { name: "web-1".into(), id: "12345678".into(), ..AttachProgram::default() };
        let opening = Opening(ToProgram { message: Some(Message::Attach(attach)) });
        assert_eq!((opening.verb().words, opening.subject()), ("attach", "12345678".to_owned()));
    }

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
