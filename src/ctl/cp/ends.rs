//! Two ends of a copy: the requests to them, and their answers.

use std::collections::VecDeque;
use std::time::Duration;

use tokio::sync::mpsc;
use tonic::Streaming;

use super::trouble::Trouble;
use crate::ctl::Error;
use crate::ctl::door::Door;
use crate::wire::proto::v1::{
    FileDone, FromReader, FromWriter, ToReader, ToWriter, from_reader, from_writer, to_reader, to_writer,
};

/// Longest silence of an end: an agent reports every 5 s that it is working.
const SILENCE: Duration = Duration::from_secs(60);

/// Messages that may only report that an end is working.
pub trait Working {
    /// Returns whether this message only reports that the end is working.
    fn is_working(&self) -> bool;
}

impl Working for FromReader {
    fn is_working(&self) -> bool {
        matches!(self.answer, None | Some(from_reader::Answer::Working(_)))
    }
}

impl Working for FromWriter {
    fn is_working(&self) -> bool {
        matches!(self.answer, None | Some(from_writer::Answer::Working(_)))
    }
}

/// Source of an end's answers.
pub enum Answers<A> {
    /// Thread of this process.
    Here(mpsc::Receiver<A>),
    /// Guest of the VM of this name.
    There {
        /// Stream of the call.
        stream: Box<Streaming<A>>,
        /// Name of the VM.
        name: String,
        /// Connection path to the guest.
        door: Box<Door>,
    },
}

impl<A: Working> Answers<A> {
    /// Returns the next message that is not only a report of working.
    async fn next(&mut self) -> Result<A, Trouble> {
        loop {
            let answer = match self {
                Self::Here(answers) => answers.recv().await.ok_or_else(Trouble::closed)?,
                Self::There { stream, name, door } => {
                    match tokio::time::timeout(SILENCE, stream.message()).await {
                        Ok(Ok(answer)) => answer.ok_or_else(Trouble::closed)?,
                        Ok(Err(status)) => return Err(Trouble::of_call(status, name, door)),
                        Err(_) => return Err(Trouble::Lost(Error::Silent)),
                    }
                }
            };
            if !answer.is_working() {
                return Ok(answer);
            }
        }
    }
}

/// End of a copy, with the channels of its requests and answers.
pub struct End<T, A> {
    say: mpsc::Sender<T>,
    answers: Answers<A>,
    /// Answers received while a request was waiting to be sent.
    heard: VecDeque<A>,
}

/// End that is read from.
pub type Reading = End<ToReader, FromReader>;
/// End that is written to.
pub type Writing = End<ToWriter, FromWriter>;

impl<T, A: Working> End<T, A> {
    /// Creates an end from the channel for its requests and the source of its answers.
    pub fn new(say: mpsc::Sender<T>, answers: Answers<A>) -> Self {
        Self { say, answers, heard: VecDeque::new() }
    }

    /// Sends a message. Answers are received meanwhile, because a call makes progress only while its answers are
    /// read.
    async fn tell(&mut self, message: T) -> Result<(), Trouble> {
        let Self { say, answers, heard } = self;
        let mut sent = std::pin::pin!(say.send(message));
        loop {
            tokio::select! {
                biased;
                sent = &mut sent => return sent.map_err(|_| Trouble::closed()),
                answer = answers.next() => heard.push_back(answer?),
            }
        }
    }

    async fn hear(&mut self) -> Result<A, Trouble> {
        match self.heard.pop_front() {
            Some(answer) => Ok(answer),
            None => self.answers.next().await,
        }
    }
}

/// Time for an end to notice that there are no further requests.
const FAREWELL: Duration = Duration::from_secs(5);

impl<A: Working> Answers<A> {
    /// Waits until the end has noticed that there are no further requests, so that its call ends normally, and
    /// not as an interrupted one.
    async fn end(mut self) {
        let all = async { while self.next().await.is_ok() {} };
        let _ = tokio::time::timeout(FAREWELL, all).await;
    }
}

impl Reading {
    /// Ends the requests, and waits until the end has noticed.
    pub async fn end(self) {
        drop(self.say);
        self.answers.end().await;
    }

    /// Sends a request.
    pub async fn ask(&mut self, request: to_reader::Request) -> Result<(), Trouble> {
        self.tell(ToReader { request: Some(request) }).await
    }

    /// Returns the next answer that is not a failure.
    pub async fn next(&mut self) -> Result<from_reader::Answer, Trouble> {
        match self.hear().await?.answer {
            Some(from_reader::Answer::Failed(failed)) => Err(Trouble::Failed(failed)),
            Some(answer) => Ok(answer),
            None => Err(Trouble::closed()),
        }
    }
}

impl Writing {
    /// Ends the requests, and waits until the end has noticed.
    pub async fn end(self) {
        drop(self.say);
        self.answers.end().await;
    }

    /// Sends a request.
    pub async fn ask(&mut self, request: to_writer::Request) -> Result<(), Trouble> {
        self.tell(ToWriter { request: Some(request) }).await
    }

    /// Returns the next answer that is not a failure.
    pub async fn next(&mut self) -> Result<from_writer::Answer, Trouble> {
        match self.hear().await?.answer {
            Some(from_writer::Answer::Failed(failed)) => Err(Trouble::Failed(failed)),
            Some(answer) => Ok(answer),
            None => Err(Trouble::closed()),
        }
    }

    /// Sends a request, and waits until it is done.
    pub async fn done(&mut self, request: to_writer::Request) -> Result<FileDone, Trouble> {
        self.ask(request).await?;
        loop {
            match self.next().await? {
                from_writer::Answer::Done(done) => return Ok(done),
                // These are progress reports of earlier writes.
                from_writer::Answer::Written(_) => {}
                _ => return Err(unexpected()),
            }
        }
    }
}

/// Returns the error for an end that violates the protocol.
pub fn unexpected() -> Trouble {
    Trouble::fatal("the other end sent an unexpected answer; is it of another release?")
}
