//! The two ends of a copy: what is asked of them, and what they answer.

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

/// How long an end may say nothing: an agent says every 5 s that it is at work.
const SILENCE: Duration = Duration::from_secs(60);

/// A message of an end that says nothing but that.
pub trait Working {
    /// Whether it is one.
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

/// What an end answers.
pub enum Answers<A> {
    /// A thread of this process.
    Here(mpsc::Receiver<A>),
    /// The guest of the VM of this name.
    There {
        /// The call.
        stream: Box<Streaming<A>>,
        /// The VM's name.
        name: String,
        /// The way to it.
        door: Box<Door>,
    },
}

impl<A: Working> Answers<A> {
    /// The next message that says something.
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

/// An end: what is asked of it, and what it has answered.
pub struct End<T, A> {
    say: mpsc::Sender<T>,
    answers: Answers<A>,
    /// What was answered while there was no room for a question.
    heard: VecDeque<A>,
}

/// The end that is read.
pub type Reading = End<ToReader, FromReader>;
/// The end that is written to.
pub type Writing = End<ToWriter, FromWriter>;

impl<T, A: Working> End<T, A> {
    /// Takes questions by this channel, and answers them so.
    pub fn new(say: mpsc::Sender<T>, answers: Answers<A>) -> Self {
        Self { say, answers, heard: VecDeque::new() }
    }

    /// Says something. Meanwhile it is heard what is answered: a call is carried on by whoever waits for its answers.
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

/// How long an end may take to hear that nothing more is asked of it.
const FAREWELL: Duration = Duration::from_secs(5);

impl<A: Working> Answers<A> {
    /// Waits until the end has heard that nothing more is asked of it: then its call ends as it went, and not as one that was broken off.
    async fn end(mut self) {
        let all = async { while self.next().await.is_ok() {} };
        let _ = tokio::time::timeout(FAREWELL, all).await;
    }
}

impl Reading {
    /// Asks for nothing more.
    pub async fn end(self) {
        drop(self.say);
        self.answers.end().await;
    }

    /// Asks for something.
    pub async fn ask(&mut self, request: to_reader::Request) -> Result<(), Trouble> {
        self.tell(ToReader { request: Some(request) }).await
    }

    /// What is answered next, if it is no failure.
    pub async fn next(&mut self) -> Result<from_reader::Answer, Trouble> {
        match self.hear().await?.answer {
            Some(from_reader::Answer::Failed(failed)) => Err(Trouble::Failed(failed)),
            Some(answer) => Ok(answer),
            None => Err(Trouble::closed()),
        }
    }
}

impl Writing {
    /// Asks for nothing more.
    pub async fn end(self) {
        drop(self.say);
        self.answers.end().await;
    }

    /// Asks for something.
    pub async fn ask(&mut self, request: to_writer::Request) -> Result<(), Trouble> {
        self.tell(ToWriter { request: Some(request) }).await
    }

    /// What is answered next, if it is no failure.
    pub async fn next(&mut self) -> Result<from_writer::Answer, Trouble> {
        match self.hear().await?.answer {
            Some(from_writer::Answer::Failed(failed)) => Err(Trouble::Failed(failed)),
            Some(answer) => Ok(answer),
            None => Err(Trouble::closed()),
        }
    }

    /// Asks for something that is answered when it is done.
    pub async fn done(&mut self, request: to_writer::Request) -> Result<FileDone, Trouble> {
        self.ask(request).await?;
        loop {
            match self.next().await? {
                from_writer::Answer::Done(done) => return Ok(done),
                // Of what was written before.
                from_writer::Answer::Written(_) => {}
                _ => return Err(unexpected()),
            }
        }
    }
}

/// An end does not keep to what was agreed on.
pub fn unexpected() -> Trouble {
    Trouble::fatal("the other end sent an unexpected answer; is it of another release?")
}
