//! One call that is attached to a program.

use std::os::unix::process::ExitStatusExt as _;

use tokio_stream::Stream;
use tokio_util::sync::CancellationToken;
use tonic::{Status, Streaming};

use crate::guest::exec::Attached;
use crate::guest::exec::state::{Ended, News};
use crate::wire::proto::v1;
use crate::wire::proto::v1::from_program::Message as Told;
use crate::wire::proto::v1::program_ended::How;
use crate::wire::proto::v1::to_program::Message;

/// State of one call.
pub(super) struct Conversation {
    requests: Option<Streaming<v1::ToProgram>>,
    attached: Attached,
    stopping: CancellationToken,
    stage: Stage,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// Before the first message to the client.
    New,
    Open,
    /// After the client was informed of the program's end.
    Told,
    Over,
}

impl Conversation {
    pub fn new(requests: Streaming<v1::ToProgram>, attached: Attached, stopping: CancellationToken) -> Self {
        Self { requests: Some(requests), attached, stopping, stage: Stage::New }
    }

    pub fn into_stream(self) -> impl Stream<Item = Result<v1::FromProgram, Status>> {
        futures_util::stream::unfold(self, |mut this| async {
            let told = this.next().await.transpose()?;
            if told.is_err() {
                this.stage = Stage::Over;
            }
            Some((told.map(|message| v1::FromProgram { message: Some(message) }), this))
        })
    }

    async fn next(&mut self) -> Result<Option<Told>, Status> {
        match self.stage {
            Stage::Over => return Ok(None),
            Stage::New => {
                self.stage = Stage::Open;
                return Ok(Some(Told::Started(self.started())));
            }
            Stage::Open | Stage::Told => {}
        }
        loop {
            let is_told = self.stage == Stage::Told;
            let request = async {
                match &mut self.requests {
                    Some(requests) => requests.message().await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                biased;
                request = request => match request? {
                    None => self.requests = None,
                    Some(request) => if self.take(request)? {
                        self.stage = Stage::Over;
                        return Ok(None);
                    }
                },
                news = self.attached.next(), if !is_told => if let Some(told) = self.tell(news)? {
                    return Ok(Some(told));
                },
                () = self.stopping.cancelled() => return Err(Status::unavailable("the agent is stopping")),
            }
        }
    }

    fn started(&self) -> v1::ProgramStarted {
        let program = self.attached.program();
        let input = program.input();
        v1::ProgramStarted {
            id: program.id().to_owned(),
            has_terminal: program.has_terminal(),
            has_input: program.has_input(),
            input_taken: input.taken,
            input_received: Some(input.received),
            input_has_ended: input.has_ended,
            attachment: Some(self.attached.number()),
            input_attachment: input.from,
        }
    }

    /// Carries out a request of the client; returns whether it was the last one.
    fn take(&mut self, request: v1::ToProgram) -> Result<bool, Status> {
        let program = self.attached.program();
        let wrong = |words: &str| Err(Status::invalid_argument(words));
        match request.message {
            Some(Message::Input(input)) => {
                if !self.attached.give(input.offset, &input.data).ok_or_else(replaced)? {
                    return wrong("the input has a gap, comes after its end, or is more than was requested");
                }
            }
            Some(Message::EndOfInput(at)) => {
                if !self.attached.end_input(at).ok_or_else(replaced)? {
                    return wrong("the input does not end where it was announced");
                }
            }
            Some(Message::Resize(size)) => {
                if let Err(error) = program.resize(super::size(Some(size))) {
                    tracing::debug!("cannot resize a terminal: {error}");
                }
            }
            Some(Message::Signal(signal)) => super::send(program, signal)?,
            Some(Message::Taken(taken)) => self.attached.acknowledge([taken.output, taken.errors]),
            Some(Message::Detach(_)) => {
                program.detach();
                return Ok(true);
            }
            Some(Message::Forget(_)) => {
                program.forget();
                return Ok(true);
            }
            Some(Message::Start(_) | Message::Attach(_)) | None => {
                return wrong("a call handles one program only");
            }
        }
        Ok(false)
    }

    fn tell(&mut self, news: News) -> Result<Option<Told>, Status> {
        Ok(match news {
            News::Output(0, offset, data) => Some(Told::Output(v1::ProgramData { offset, data })),
            News::Output(_, offset, data) => Some(Told::Errors(v1::ProgramData { offset, data })),
            News::InputTaken(count) => Some(Told::InputTaken(count)),
            News::Ended(how) => {
                self.stage = Stage::Told;
                Some(Told::Ended(ended(&how)))
            }
            News::Replaced => return Err(replaced()),
            News::Forgotten => return Err(Status::not_found("the program is no longer known")),
            News::Nothing => None,
        })
    }
}

fn replaced() -> Status {
    Status::aborted("another client has attached to this program")
}

/// Converts the result of a program to a message.
pub(super) fn ended(ended: &Ended) -> v1::ProgramEnded {
    let number = |number: i32| u32::try_from(number).unwrap_or_default();
    let how = match &ended.status {
        Err(why) => How::Unknown(why.clone()),
        Ok(status) => match (status.code(), status.signal()) {
            (Some(code), _) => How::ExitCode(number(code)),
            (None, Some(signal)) => How::Signal(number(signal)),
            (None, None) => How::Unknown(status.to_string()),
        },
    };
    v1::ProgramEnded { how: Some(how), timed_out: ended.timed_out, output_cut_off: ended.cut_off }
}
