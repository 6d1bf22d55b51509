//! One client's conversation.
//!
//! Requests are answered one after the other, in their order. Only while one takes its time (`PATIENCE`) the
//! commands that are always answered (guest-ping, guest-info, guest-sync, guest-fsfreeze-thaw …) overtake it, so
//! that a slow freeze or a hanging disk looks to nobody like a dead agent:
//!
//! ```text
//!            request                   ended: its answer
//! Reading ────────────▶ Working ──────────────────────────▶ Reading
//!    ▲                     │ after PATIENCE
//!    │ ended               ▼
//!    └───────────────── Overdue: "always" commands are answered, others are set aside
//! ```
//!
//! A client that has waited for long (`GIVES_UP`) and then sends guest-sync has given up on what it asked before:
//! that ends without an answer, which the client would take for the answer to something else.
//!
//! When the agent ends, no more is read, and what was asked for is answered.
//!
//! A client that does not read its answers is not read from either; it costs its own task some memory and
//! nobody else anything.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::io;
use std::ops::Range;
use std::pin::Pin;
use std::task::Poll;
use std::time::{Duration, Instant};

use futures_util::StreamExt as _;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::time::{sleep, sleep_until, timeout};

use crate::qga::arguments::Arguments;
use crate::qga::call::Call;
use crate::qga::error::Error;
use crate::qga::reply::Line;
use crate::qga::request::Request;
use crate::qga::room::Share;
use crate::qga::table::{self, COMMANDS, Command, Run};
use crate::qga::{Context, reply};
use crate::sys::memory;
use crate::wire::qga::{Decoder, Frame, Malformed};

/// Bytes asked for by one read.
const READ: usize = 16 * 1024;
/// How long one client may keep the agent busy before others have their turn.
const TURN: Duration = Duration::from_millis(1);
/// How long a message may rest unfinished.
const STALL: Duration = Duration::from_secs(60);
/// Answers are gathered up to this size while more requests are at hand.
const GATHER: usize = 64 * 1024;
/// How long a command may take before others overtake it.
const PATIENCE: Duration = Duration::from_millis(100);
/// How long a client has waited for an answer that it does not want any more when it sends guest-sync; one that
/// does so sooner has sent both at once, and waits for both.
const GIVES_UP: Duration = Duration::from_secs(1);
/// Messages, and their bytes, that are set aside while a command takes its time; then no more is read.
const SET_ASIDE: (usize, usize) = (64, 1 << 20);
/// Commands of one client that are under way at the same time.
const UNDER_WAY: usize = 8;

/// Bytes of one client, in both directions, that are more than its usual small talk.
const LARGE: usize = 256 * 1024;
/// How long a client that has moved much is silent before what that took is given back.
const REST: Duration = Duration::from_millis(300);

/// What the end of what a client sends means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// It has said its last and waits for its answers: a socket closed for writing.
    Said,
    /// Nobody is there any more: a port without a host.
    Gone,
}

/// How a conversation ended.
#[must_use = "commands that are still under way end only if somebody awaits them"]
pub struct Ended<'c> {
    /// An error if the stream broke, as it does when a client goes away without reading its answers.
    pub result: io::Result<()>,
    under_way: Vec<Work<'c>>,
}

impl Ended<'_> {
    /// Waits until everything that the client has asked for has ended, too.
    ///
    /// # Errors
    /// If the stream broke.
    pub async fn finish(mut self) -> io::Result<()> {
        while !self.under_way.is_empty() {
            drop(finished(&mut self.under_way).await);
        }
        self.result
    }
}

/// Talks to one client until it closes the stream. `peer` names it in the log.
pub async fn run<'c, S>(stream: S, peer: &'c str, context: &'c Context, end: End) -> Ended<'c>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let mut session = Session {
        stream,
        answers: Vec::new(),
        set_aside: VecDeque::new(),
        set_aside_bytes: 0,
        coming: Share::default(),
        under_way: Vec::new(),
        turn: Instant::now(),
        heard: Instant::now(),
        moved: 0,
        peer,
        context,
    };
    let result = session.run(Decoder::new(), end).await;
    if session.moved >= LARGE {
        memory::give_back_freed();
    }
    Ended { result, under_way: session.under_way }
}

struct Session<'c, S> {
    stream: S,
    answers: Vec<u8>,
    set_aside: VecDeque<SetAside>,
    set_aside_bytes: usize,
    /// Of the message that is being read.
    coming: Share,
    under_way: Vec<Work<'c>>,
    turn: Instant,
    /// When the client last said something: whatever is at hand had come by then.
    heard: Instant,
    /// Bytes that came and went since memory was last given back.
    moved: usize,
    peer: &'c str,
    context: &'c Context,
}

/// A message that has to wait for its turn.
struct SetAside {
    message: Vec<u8>,
    since: Instant,
    abandoned: bool,
    _share: Share,
}

/// A command that has not ended yet.
struct Work<'c> {
    future: Pin<Box<dyn Future<Output = Option<Line>> + Send + 'c>>,
    command: &'static Command,
    since: Instant,
    /// The client does not wait for the answer any more.
    abandoned: bool,
    _share: Share,
}

impl<S: AsyncRead + AsyncWrite + Unpin> Session<'_, S> {
    async fn run(&mut self, mut decoder: Decoder, mut end: End) -> io::Result<()> {
        let stopping = &self.context.stopping;
        let mut ended = false;
        loop {
            self.answer_what_is_at_hand(&mut decoder).await?;
            if let Err(error) = self.context.room.fit(&mut self.coming, decoder.partial_length()) {
                self.context.complaints.say(self.peer, &error.desc);
                decoder.drop_partial();
                decoder.shrink();
                self.coming = Share::default();
                self.append(reply::line(Err(error), None)).await?;
            }
            self.send().await?;
            if ended && (end == End::Gone || self.under_way.is_empty()) {
                if decoder.is_partial() {
                    self.context.complaints.say(self.peer, &"the stream ended within a message");
                }
                return Ok(());
            }
            let reads = !ended && self.has_room();
            let partial = decoder.is_partial();
            let input = decoder.input();
            if reads {
                input.reserve(READ);
            }
            let overdue = self.patience_ends();
            tokio::select! {
                biased;
                line = finished(&mut self.under_way) => {
                    self.append(line).await?;
                }
                () = stopping.cancelled(), if !ended => {
                    (ended, end) = (true, End::Said);
                }
                () = sleep_until(overdue.unwrap_or_else(Instant::now).into()), if overdue.is_some() => {}
                () = sleep(REST), if self.moved >= LARGE && self.under_way.is_empty() => {
                    decoder.shrink();
                    memory::give_back_freed();
                    self.moved = 0;
                }
                read = read(&mut self.stream, input, partial), if reads => if let Some(length) = read? {
                    self.moved += length;
                    self.heard = Instant::now();
                    ended = length == 0;
                } else {
                    let problem = "a message was not finished in time; it is dropped";
                    self.context.complaints.say(self.peer, &problem);
                    decoder = Decoder::new();
                },
            }
            tokio::task::consume_budget().await;
            self.turn = Instant::now();
        }
    }

    /// When others may overtake the command that began last, if that is still to come.
    fn patience_ends(&self) -> Option<Instant> {
        let ends = self.under_way.last()?.since + PATIENCE;
        (ends > Instant::now()).then_some(ends)
    }

    fn has_room(&self) -> bool {
        self.patience_ends().is_none()
            && self.under_way.len() < UNDER_WAY
            && self.set_aside.len() < SET_ASIDE.0
            && self.set_aside_bytes < SET_ASIDE.1
    }

    async fn answer_what_is_at_hand(&mut self, decoder: &mut Decoder) -> io::Result<()> {
        while self.under_way.is_empty()
            && let Some(next) = self.set_aside.pop_front()
        {
            self.set_aside_bytes -= next.message.len();
            self.request(&next.message, true, next.abandoned).await?;
        }
        while self.has_room()
            && let Some(frame) = decoder.next()
        {
            match frame {
                Frame::Message(message) => self.request(&message, self.under_way.is_empty(), false).await?,
                Frame::Malformed(why) => {
                    // By the byte 0xFF a client that has lost its place begins anew.
                    if why != Malformed::Stray(0xff) {
                        self.context.complaints.say(self.peer, &why);
                    }
                    self.append(reply::line(Err(why.into()), None)).await?;
                }
            }
        }
        Ok(())
    }

    /// Begins with what a message asks for; if another command is at work, only with what is always answered.
    async fn request(&mut self, message: &[u8], free: bool, abandoned: bool) -> io::Result<()> {
        // Others have their turn, however much this client has sent.
        if self.turn.elapsed() >= TURN {
            tokio::task::yield_now().await;
            self.turn = Instant::now();
        }
        let request = match Request::parse(message) {
            Ok(request) => request,
            Err(error) => {
                self.context.complaints.say(self.peer, &error.desc);
                return self.append(reply::line(Err(error), None)).await;
            }
        };
        let (command, arguments) = match command(&request, self.context) {
            Ok(found) => found,
            Err(error) => return self.append(reply::line(Err(error), request.id())).await,
        };
        if !free && !command.always {
            let share = match self.context.room.take(message.len()) {
                Ok(share) => share,
                Err(error) => return self.append(reply::line(Err(error), request.id())).await,
            };
            self.set_aside_bytes += message.len();
            let message = message.to_owned();
            self.set_aside.push_back(SetAside { message, since: self.heard, abandoned, _share: share });
            return Ok(());
        }
        if command.is_sync() {
            let waited = |since| self.heard.saturating_duration_since(since) >= GIVES_UP;
            for work in &mut self.under_way {
                work.abandoned |= waited(work.since);
            }
            for waiting in &mut self.set_aside {
                waiting.abandoned |= waited(waiting.since);
            }
        }
        match command.run {
            Run::Now(run) => {
                let call = Call::new(self.context, arguments, self.peer);
                let watch = call.watch(command);
                let outcome = run(&call);
                watch.ended(outcome.as_ref().err());
                if !abandoned && (command.success_response || outcome.is_err()) {
                    self.append(reply::line(outcome, request.id())).await?;
                }
            }
            Run::Later(_) => {
                let place = |part: &str| within(message, part);
                let arguments = arguments.text().map(place);
                let id = request.id().map(place);
                let share = match self.context.room.take(message.len()) {
                    Ok(share) => share,
                    Err(error) => return self.append(reply::line(Err(error), request.id())).await,
                };
                let work = perform(message.to_owned(), command, arguments, id, self.context, self.peer);
                self.under_way.push(Work {
                    future: Box::pin(work),
                    command,
                    since: Instant::now(),
                    abandoned,
                    _share: share,
                });
            }
        }
        Ok(())
    }

    /// Adds a line to the answers, without a copy where it is the first.
    async fn append(&mut self, line: Line) -> io::Result<()> {
        if self.answers.is_empty() {
            self.answers = line.text;
        } else {
            self.answers.extend_from_slice(&line.text);
        }
        if let Some((mut parts, last)) = line.rest {
            self.send().await?;
            while let Some(part) = parts.next().await {
                self.moved += part.len();
                self.stream.write_all(&part).await?;
            }
            self.answers = last;
        }
        if self.answers.len() >= GATHER { self.send().await } else { Ok(()) }
    }

    async fn send(&mut self) -> io::Result<()> {
        if self.answers.is_empty() {
            return Ok(());
        }
        self.moved += self.answers.len();
        self.stream.write_all(&self.answers).await?;
        self.stream.flush().await?;
        self.answers = Vec::new();
        Ok(())
    }
}

/// Reads more; `None` if nothing comes for too long in the middle of a message.
async fn read<S: AsyncRead + Unpin>(
    stream: &mut S,
    input: &mut Vec<u8>,
    partial: bool,
) -> io::Result<Option<usize>> {
    let reading = stream.read_buf(input);
    if partial { timeout(STALL, reading).await.ok().transpose() } else { reading.await.map(Some) }
}

/// The answer of the next command that ends; never, if none is under way.
async fn finished(under_way: &mut Vec<Work<'_>>) -> Line {
    poll_fn(|waker| {
        let mut place = 0;
        while place < under_way.len() {
            match under_way[place].future.as_mut().poll(waker) {
                Poll::Pending => place += 1,
                Poll::Ready(line) => {
                    let work = under_way.remove(place);
                    if work.abandoned {
                        tracing::debug!("{}: ended after its client had given up", work.command.name);
                    }
                    return Poll::Ready(line.filter(|_| !work.abandoned).unwrap_or_default());
                }
            }
        }
        Poll::Pending
    })
    .await
}

/// Carries out a command that has to wait for something, and makes the line that answers it, if one does.
async fn perform(
    message: Vec<u8>,
    command: &'static Command,
    arguments: Option<Range<usize>>,
    id: Option<Range<usize>>,
    context: &Context,
    peer: &str,
) -> Option<Line> {
    let part = |place: Range<usize>| std::str::from_utf8(&message[place]).unwrap_or_default();
    let call = Call::new(context, Arguments::new(arguments.map(part)), peer);
    let watch = call.watch(command);
    let outcome = match command.run {
        Run::Now(run) => run(&call),
        Run::Later(run) => run(&call).await,
    };
    watch.ended(outcome.as_ref().err());
    (command.success_response || outcome.is_err()).then(|| reply::line(outcome, id.map(part)))
}

/// Where `part`, which is a part of it, stands in `message`.
fn within(message: &[u8], part: &str) -> Range<usize> {
    let start = part.as_ptr().addr().saturating_sub(message.as_ptr().addr());
    start..start + part.len()
}

/// The command that is asked for, if it may be called.
fn command<'a>(request: &Request<'a>, context: &Context) -> Result<(&'static Command, Arguments<'a>), Error> {
    let (name, arguments) = request.call()?;
    let place = table::find(&name).ok_or_else(|| Error::unknown(&name))?;
    if context.allows(place) { Ok((&COMMANDS[place], arguments)) } else { Err(context.refusal(&name)) }
}
