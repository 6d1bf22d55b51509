//! One client's conversation: requests are answered one after the other, in their order.
//!
//! A client that does not read its answers is not read from either; it costs its own task some memory and
//! nobody else anything.

use std::io;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};

use crate::qga::error::Error;
use crate::qga::request::{Arguments, Request};
use crate::qga::table::{self, COMMANDS, Command, Outcome, Run};
use crate::qga::{Context, reply};
use crate::wire::qga::{Decoder, Frame, Malformed};

/// Bytes asked for by one read.
const READ: usize = 16 * 1024;
/// How long one client may keep the agent busy before others have their turn.
const TURN: Duration = Duration::from_millis(1);
/// How long a message may rest unfinished.
const STALL: Duration = Duration::from_secs(60);
/// Answers are gathered up to this size while more requests are at hand.
const GATHER: usize = 64 * 1024;

/// Talks to one client until it closes the stream. `peer` names it in the log.
///
/// # Errors
/// If the stream breaks, as it does when a client goes away without reading its answers.
pub async fn run<S>(mut stream: S, peer: &str, context: &Context) -> io::Result<()>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let mut decoder = Decoder::new();
    let mut answers = Vec::new();
    let mut turn = Instant::now();
    loop {
        while let Some(frame) = decoder.next() {
            // Others have their turn, however much this client has sent.
            if turn.elapsed() >= TURN {
                tokio::task::yield_now().await;
                turn = Instant::now();
            }
            if answers.len() >= GATHER {
                send(&mut stream, &mut answers).await?;
            }
            let message = match frame {
                Frame::Message(message) => message,
                Frame::Malformed(why) => {
                    // By the byte 0xFF a client that has lost its place begins anew.
                    if why != Malformed::Stray(0xff) {
                        context.complaints.say(peer, &why);
                    }
                    append(&mut answers, reply::line(Err(why.into()), None));
                    continue;
                }
            };
            let request = match Request::parse(&message) {
                Ok(request) => request,
                Err(error) => {
                    context.complaints.say(peer, &error.desc);
                    append(&mut answers, reply::line(Err(error), None));
                    continue;
                }
            };
            let (command, arguments) = match command(&request, context) {
                Ok(found) => found,
                Err(error) => {
                    append(&mut answers, reply::line(Err(error), request.id));
                    continue;
                }
            };
            let outcome = match command.run {
                Run::Now(run) => run(context, arguments),
                Run::Later(run) => {
                    send(&mut stream, &mut answers).await?;
                    run(context, arguments).await
                }
            };
            log(command, peer, &outcome);
            if command.success_response || outcome.is_err() {
                append(&mut answers, reply::line(outcome, request.id));
            }
        }
        send(&mut stream, &mut answers).await?;
        let partial = decoder.is_partial();
        let input = decoder.input();
        input.reserve(READ);
        let reading = stream.read_buf(input);
        let length = if partial {
            let Ok(length) = tokio::time::timeout(STALL, reading).await else {
                context.complaints.say(peer, &"a message was not finished in time; it is dropped");
                decoder = Decoder::new();
                continue;
            };
            length?
        } else {
            reading.await?
        };
        tokio::task::consume_budget().await;
        turn = Instant::now();
        if length == 0 {
            if decoder.is_partial() {
                context.complaints.say(peer, &"the stream ended within a message");
            }
            return Ok(());
        }
    }
}

/// The command that is asked for, if it may be called.
fn command<'a>(request: &Request<'a>, context: &Context) -> Result<(&'static Command, Arguments<'a>), Error> {
    let (name, arguments) = request.call()?;
    let place = table::find(&name).ok_or_else(|| Error::unknown(&name))?;
    if context.policy.allows(place) { Ok((&COMMANDS[place], arguments)) } else { Err(Error::disabled(&name)) }
}

fn log(command: &Command, peer: &str, outcome: &Outcome) {
    match outcome {
        Ok(_) => tracing::debug!("{peer}: {}", command.name),
        Err(error) => tracing::debug!("{peer}: {}: {}", command.name, error.desc),
    }
}

/// Adds a line to the answers, without a copy where it is the first.
fn append(answers: &mut Vec<u8>, line: Vec<u8>) {
    if answers.is_empty() {
        *answers = line;
    } else {
        answers.extend_from_slice(&line);
    }
}

async fn send<S: AsyncWrite + Unpin>(stream: &mut S, answers: &mut Vec<u8>) -> io::Result<()> {
    if answers.is_empty() {
        return Ok(());
    }
    stream.write_all(answers).await?;
    stream.flush().await?;
    *answers = Vec::new();
    Ok(())
}

/// Says what clients of a channel do wrong: at most one line a second, however much they send and however often
/// they come.
#[derive(Debug, Default)]
pub struct Complaints(Mutex<Said>);

#[derive(Debug, Default)]
struct Said {
    last: Option<Instant>,
    unsaid: u64,
}

impl Complaints {
    /// Logs the problem, or counts it.
    pub fn say(&self, peer: &str, problem: &dyn std::fmt::Display) {
        let mut said = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if said.last.is_some_and(|last| last.elapsed() < Duration::from_secs(1)) {
            said.unsaid += 1;
            return;
        }
        match std::mem::take(&mut said.unsaid) {
            0 => tracing::warn!("{peer}: {problem}"),
            unsaid => tracing::warn!("{peer}: {problem} (and {unsaid} problems more before)"),
        }
        said.last = Some(Instant::now());
    }
}
