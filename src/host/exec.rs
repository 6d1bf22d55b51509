//! Programs in guests: forwards `guestlet.v1.Exec` of the admin API to the agents.
//!
//! ```text
//! guestctl ◀──stream──▶ api, admitted ◀──stream──▶ a connection of its own ◀──▶ agent
//! ```
//!
//! The input and output of a program use a connection that is dialled for it, beside the session: neither the
//! amount of data nor a slow reader delays the calls and events of the session. Nothing is buffered here: data in
//! transit is bounded by the flow-control windows of both connections, and data lost with one of them is sent
//! again when the client resumes.

use tokio_stream::Stream;
use tonic::{Code, Status, Streaming};

use super::asked::{Asked, Object};
use super::audit::Entry;
use super::beside::{self, BEGIN, Line, origin};
use super::caller::Behalf;
use super::fleet::Handle;
use super::machine::{self, Desks};
use super::text;
use crate::access::verb::{self, Verb};
use crate::transport::opening::first;
use crate::wire::proto::v1::exec_client::ExecClient;
use crate::wire::proto::v1::from_program::Message as FromIt;
use crate::wire::proto::v1::program_ended::How;
use crate::wire::proto::v1::to_program::Message;
use crate::wire::proto::v1::{FromProgram, ToProgram};

/// Limits on the bytes of one message of a client, and of an agent.
pub const MAX_REQUEST: usize = 512 << 10;
const MAX_ANSWER: usize = 128 << 10;
/// Capability that an agent reports if it can open PAM sessions.
const LOGIN: &str = "login";

/// First message of a client, which starts a program or attaches to one.
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
    /// Returns whether the program is to run in a PAM session.
    fn is_login(&self) -> bool {
        matches!(&self.0.message, Some(Message::Start(start)) if start.login.is_some())
    }

    /// Takes the name of the VM out of the message, because it means nothing to the guest.
    fn take_name(&mut self) -> String {
        match &mut self.0.message {
            Some(Message::Start(start)) => std::mem::take(&mut start.name),
            Some(Message::Attach(attach)) => std::mem::take(&mut attach.name),
            _ => String::new(),
        }
    }
}

/// Receives the first message of a client.
///
/// # Errors
/// If it is neither `start` nor `attach`, or does not arrive in time.
pub async fn opening(messages: &mut Streaming<ToProgram>) -> Result<Opening, Status> {
    let first = first(messages).await?;
    let first = first.filter(|first| matches!(first.message, Some(Message::Start(_) | Message::Attach(_))));
    let first = first.ok_or_else(|| Status::invalid_argument("the first message must be start or attach"))?;
    Ok(Opening(first))
}

/// Forwards the messages of an admitted client, beginning with `first`, to the agent of the VM that `first` names.
///
/// # Errors
/// If the agent cannot be reached, has too many streams, or refuses.
pub async fn run(
    desks: &Desks,
    fleet: &Handle,
    behalf: &Behalf,
    mut first: Opening,
    messages: Streaming<ToProgram>,
) -> Result<Relay, Status> {
    let name = first.take_name();
    let place =
        machine::place_for_stream(desks, fleet, &name, behalf.caller(), machine::Beside::Programs).await?;
    if first.is_login() && !machine::is_able(fleet, &name, LOGIN).await? {
        return Err(machine::too_old(&name));
    }
    let mut line = beside::dial(fleet, &name).await?;
    let answers = open(&mut line, behalf, first.0, messages).await?;
    Ok(Relay { line, answers, entry: None, _place: place, is_over: false })
}

/// Opens the stream to a program.
async fn open(
    line: &mut Line,
    behalf: &Behalf,
    first: ToProgram,
    messages: Streaming<ToProgram>,
) -> Result<Streaming<FromProgram>, Status> {
    let rest = futures_util::stream::unfold(messages, |mut messages| async {
        // A client that has disconnected or violates the protocol sends nothing more.
        let message = messages.message().await.ok().flatten()?;
        Some((message, messages))
    });
    let all = futures_util::StreamExt::chain(tokio_stream::once(first), rest);
    let mut exec =
        ExecClient::with_origin(line.client.clone(), origin()).max_decoding_message_size(MAX_ANSWER);
    let answers = line.drive(BEGIN, exec.run_program(behalf.state(all))).await?;
    Ok(answers.into_inner())
}

/// Relay for the agent's answers.
pub struct Relay {
    line: Line,
    answers: Streaming<FromProgram>,
    entry: Option<Entry>,
    _place: machine::Stream,
    is_over: bool,
}

impl Relay {
    /// Returns the stream of messages from the program; `entry` is the audit record of the call, and ends with the
    /// stream.
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
        let mut answer = self.line.next(&mut self.answers).await?;
        if let Some(FromIt::Ended(ended)) = answer.as_mut().and_then(|answer| answer.message.as_mut())
            && let Some(How::Unknown(why)) = &mut ended.how
        {
            *why = text::clean(why);
        }
        Ok(answer)
    }
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
}
