//! Session with one client.
//!
//! Requests are carried out one after the other, and answered in their order, as in qemu-ga: a client that sends
//! several at once without ids can match the answers to them by their order.
//!
//! ```text
//!            request                  ended: its answer
//! Reading ────────────▶ Working ───────────────────────────────────────────▶ Reading
//!    ▲                     │ after PATIENCE: reads on, requests are queued
//!    │ ended: its answer   ▼
//!    ├───────────────── Overdue ── guest-sync comes, and GIVES_UP is over ──▶ Reading, all before it is dropped
//!    └─────────────────────┴────── ping, info, status or thaw wait, or the queue is full, and LATE is over:
//!                                  an error is its answer
//! ```
//!
//! A disk or a hook that hangs must not make the agent look dead, and no request may be carried out after its
//! client has stopped waiting for it. So a command that takes too long is abandoned, and continues in the
//! background:
//!
//! - With guest-sync a client declares its earlier requests void. Those that have not begun are dropped, and those
//!   under way end without an answer. As the client may have sent them together with the guest-sync, they still
//!   get a moment (`GIVES_UP`).
//! - The other commands that are always answered wait for their turn for `LATE` at most: then the command that
//!   hangs is answered with an error. A freeze or a thaw has a limit of its own, and is waited for.
//! - guest-fsfreeze-thaw takes effect before its turn, so that it can end a freeze that is under way; the freeze
//!   is answered first.
//! - The number of abandoned commands under way is limited (`Works::left`, [`Room::may_wait`]). Beyond it a
//!   command that would have to wait is answered with an error.
//!
//! When the agent ends, nothing more is read, and requests received before are answered.
//!
//! A client that does not read its answers is not read from either: it costs some memory of its own task, and does
//! not affect other clients. The memory for large answers is limited for all clients together ([`Room::answer`]),
//! and a client of a socket that leaves one unread is disconnected.
//!
//! [`Room::may_wait`]: crate::qga::room::Room::may_wait
//! [`Room::answer`]: crate::qga::room::Room::answer

use std::io;
use std::time::{Duration, Instant};

use futures_util::StreamExt as _;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::time::{sleep, sleep_until, timeout};

use crate::policy::asker::QGA;
use crate::qga::call::Call;
use crate::qga::error::Error;
use crate::qga::queue::{Asked, Queue, What};
use crate::qga::reply::Line;
use crate::qga::request::Request;
use crate::qga::room::Share;
use crate::qga::table::{Command, Run};
use crate::qga::work::{Work, Works};
use crate::qga::{Context, command, reply};
use crate::sys::memory;
use crate::wire::qga::{Decoder, Frame, Malformed};

/// Size of one read, in bytes.
const READ: usize = 16 * 1024;
/// Time for which one client may keep the agent busy before others have their turn.
const TURN: Duration = Duration::from_millis(1);
/// Time for which a message may stay unfinished, or a part of a large answer unread.
const STALL: Duration = Duration::from_secs(60);
/// Size up to which answers are collected while more requests are available.
const GATHER: usize = 64 * 1024;
/// Time that a command may take before more requests are read.
const PATIENCE: Duration = Duration::from_millis(100);
/// Time for which requests before a guest-sync are still waited for: both may have been sent at once.
const GIVES_UP: Duration = Duration::from_secs(1);
/// Time for which a command may delay those that are always answered. libvirt waits as long for an answer.
const LATE: Duration = Duration::from_secs(5);
/// Maximum number of abandoned commands of one client.
const LEFT: usize = 8;
/// Interval of checking that a client that has closed its sending side still waits for an answer.
const LOOK: Duration = Duration::from_secs(5);

/// Bytes in both directions above which a client's traffic counts as large.
const LARGE: usize = 256 * 1024;
/// Time of silence after which memory used for large messages of a client is returned to the system.
const REST: Duration = Duration::from_millis(300);

/// Meaning of the end of a client's input.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// The client sends nothing more but waits for its answers: a socket that was shut down for writing.
    Said,
    /// The client has disconnected: a port without a host.
    Gone,
}

/// End of a session, with the commands that are still under way.
#[must_use = "commands that are still under way end only if somebody awaits them"]
pub struct Ended<'c> {
    /// Result of the stream: an error if it broke, as when a client disconnects without reading its answers.
    pub result: io::Result<()>,
    works: Works<'c>,
}

impl Ended<'_> {
    /// Waits until all commands of the client have ended as well.
    ///
    /// # Errors
    /// If the stream broke.
    pub async fn finish(mut self) -> io::Result<()> {
        while !self.works.is_empty() {
            drop(self.works.progress().await);
        }
        self.result
    }
}

/// Serves one client until it closes the stream. `peer` is its name in the log.
pub async fn run<'c, S>(stream: S, peer: &'c str, context: &'c Context, end: End) -> Ended<'c>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let mut session = Session {
        stream,
        answers: Vec::new(),
        queue: Queue::default(),
        coming: Share::default(),
        works: Works::default(),
        turn: Instant::now(),
        heard: Instant::now(),
        moved: 0,
        end,
        peer,
        context,
    };
    let result = session.run(Decoder::new()).await;
    if session.moved >= LARGE {
        memory::give_back_freed();
    }
    let mut works = session.works;
    while !works.turn.is_empty() {
        works.leave(&context.room);
    }
    Ended { result, works }
}

struct Session<'c, S> {
    stream: S,
    answers: Vec<u8>,
    /// Requests that have not begun.
    queue: Queue,
    /// Memory reserved for the message that is being read.
    coming: Share,
    works: Works<'c>,
    turn: Instant,
    /// Time of the last read: every message that is available arrived by then.
    heard: Instant,
    /// Bytes received and sent since memory was last returned to the system.
    moved: usize,
    /// Meaning of the end of the stream.
    end: End,
    peer: &'c str,
    context: &'c Context,
}

impl<S: AsyncRead + AsyncWrite + Unpin> Session<'_, S> {
    async fn run(&mut self, mut decoder: Decoder) -> io::Result<()> {
        let stopping = &self.context.stopping;
        let mut ended = false;
        loop {
            self.answer_what_is_at_hand(&mut decoder).await?;
            if let Err(error) = self.context.room.fit(&mut self.coming, decoder.partial_length()) {
                self.context.complaints.say(self.peer, &error.desc);
                decoder.drop_partial();
                decoder.shrink();
                self.coming = Share::default();
                self.put(reply::line(Err(error), None)).await?;
            }
            self.send().await?;
            if ended && (self.end == End::Gone || self.is_idle()) {
                if decoder.is_partial() {
                    self.context.complaints.say(self.peer, &"the stream ended within a message");
                }
                return Ok(());
            }
            let reads = !ended && self.has_room(Instant::now());
            let partial = decoder.is_partial();
            let input = decoder.input();
            if reads {
                input.reserve(READ);
            }
            let due = self.due(Instant::now());
            tokio::select! {
                biased;
                line = self.works.progress() => if let Some(line) = line {
                    self.append(line).await?;
                },
                () = stopping.cancelled(), if !ended => {
                    (ended, self.end) = (true, End::Said);
                }
                () = sleep_until(due.unwrap_or_else(Instant::now).into()), if due.is_some() => {}
                () = sleep(REST), if self.moved >= LARGE && self.works.is_empty() => {
                    decoder.shrink();
                    memory::give_back_freed();
                    self.moved = 0;
                }
                () = sleep(LOOK), if ended => {
                    // A client that has disconnected cannot be told from one that waits until something is
                    // written to it. White space between answers has no meaning.
                    self.stream.write_all(b" ").await?;
                    self.stream.flush().await?;
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

    /// Returns whether no request waits for an answer.
    fn is_idle(&self) -> bool {
        self.works.turn.is_empty() && self.queue.is_empty()
    }

    fn has_room(&self, now: Instant) -> bool {
        !self.queue.is_full() && self.works.turn.front().is_none_or(|work| work.begun + PATIENCE <= now)
    }

    /// Returns when the session must act even if nothing arrives.
    fn due(&self, now: Instant) -> Option<Instant> {
        let front = self.works.turn.front()?;
        let dropped = self.queue.has(Command::is_sync).then(|| front.asked + GIVES_UP);
        let times = [Some(front.begun + PATIENCE), dropped, self.late(front)];
        times.into_iter().flatten().filter(|time| *time > now).min()
    }

    /// Returns when this command is abandoned, if one that must not wait is queued behind it or the queue is full.
    fn late(&self, front: &Work<'_>) -> Option<Instant> {
        if self.queue.is_full() {
            return Some(front.begun + LATE);
        }
        let waits = self.works.turn.iter().skip(1).any(|work| work.command.always)
            || self.queue.has(|command| command.always);
        let bound = if front.command.is_freeze() { self.context.guest.freezer.longest() } else { LATE };
        waits.then(|| front.begun + bound)
    }

    async fn answer_what_is_at_hand(&mut self, decoder: &mut Decoder) -> io::Result<()> {
        self.advance().await?;
        while self.has_room(Instant::now())
            && let Some(frame) = decoder.next()
        {
            match frame {
                Frame::Message(message) if self.is_idle() => self.begin(&message, self.heard).await?,
                Frame::Message(message) => self.enqueue(&message).await?,
                Frame::Malformed(why) => {
                    // A client that has lost its place in the stream sends the byte 0xFF to start again: no error to log.
                    if why != Malformed::Stray(0xff) {
                        self.context.complaints.say(self.peer, &why);
                    }
                    self.put(reply::line(Err(why.into()), None)).await?;
                }
            }
            self.advance().await?;
        }
        Ok(())
    }

    /// Processes the queue as far as possible now.
    async fn advance(&mut self) -> io::Result<()> {
        while !self.is_idle() {
            let now = Instant::now();
            if self.queue.has(Command::is_sync) {
                self.drop_what_is_old(now);
            }
            if let Some(front) = self.works.turn.front() {
                if front.has_ended() {
                    return Ok(());
                }
                if self.late(front).is_some_and(|late| late <= now) {
                    self.give_up().await?;
                    continue;
                }
                let thaws = self.works.turn.len() == 1
                    && self.queue.front().is_some_and(|asked| {
                        asked.command().is_some_and(Command::is_thaw) && asked.since >= front.asked + GIVES_UP
                    });
                if !thaws {
                    return Ok(());
                }
            }
            let Some(Asked { since, what }) = self.queue.pop() else { return Ok(()) };
            match what {
                What::Message(message, _, _share) => self.begin(&message, since).await?,
                What::Answer(line) => self.answer(since, line).await?,
            }
        }
        Ok(())
    }

    /// Abandons commands under way and drops queued requests that came before a guest-sync and are older than
    /// `GIVES_UP`.
    fn drop_what_is_old(&mut self, now: Instant) {
        let is_old = |asked: Instant| asked + GIVES_UP <= now;
        while self.works.turn.front().is_some_and(|work| is_old(work.asked)) {
            self.works.leave(&self.context.room);
        }
        if !self.works.turn.is_empty() {
            return;
        }
        let is_sync = |asked: &Asked| asked.command().is_some_and(Command::is_sync);
        while self.queue.front().is_some_and(|next| !is_sync(next) && is_old(next.since)) {
            if let Some(dropped) = self.queue.pop()
                && let Some(command) = dropped.command()
            {
                tracing::debug!("{}: {} is not begun: guest-sync came after it", self.peer, command.name);
            }
        }
    }

    /// Answers the command whose turn it is with an error, because one behind it must not wait.
    async fn give_up(&mut self) -> io::Result<()> {
        let Some(front) = self.works.turn.front() else { return Ok(()) };
        let name = front.command.name;
        let text = format!(
            "{name} has not ended within {} s and continues; its outcome is not known",
            front.begun.elapsed().as_secs()
        );
        tracing::warn!("{}: {text}", self.peer);
        let line = reply::line(Err(Error::generic(text)), front.id.as_deref());
        self.works.leave(&self.context.room);
        self.append(line).await
    }

    /// Queues a message.
    async fn enqueue(&mut self, message: &[u8]) -> io::Result<()> {
        let request = match Request::parse(message) {
            Ok(request) => request,
            Err(error) => {
                self.context.complaints.say(self.peer, &error.desc);
                return self.put(reply::line(Err(error), None)).await;
            }
        };
        let share = match self.context.room.take(message.len()) {
            Ok(share) => share,
            Err(error) => return self.put(reply::line(Err(error), request.id())).await,
        };
        // Only for the order of the queue: whether the command may be called is decided again when it begins.
        let command = command(&request, self.context, &QGA).ok().map(|(command, _)| command);
        let what = What::Message(message.to_owned(), command, share);
        self.queue.push(Asked { since: self.heard, what });
        Ok(())
    }

    /// Carries out the request in a message.
    async fn begin(&mut self, message: &[u8], asked: Instant) -> io::Result<()> {
        // Give other clients a turn, however much this one has sent.
        if self.turn.elapsed() >= TURN {
            tokio::task::yield_now().await;
            self.turn = Instant::now();
        }
        let request = match Request::parse(message) {
            Ok(request) => request,
            Err(error) => {
                self.context.complaints.say(self.peer, &error.desc);
                return self.answer(asked, reply::line(Err(error), None)).await;
            }
        };
        let (command, arguments) = match command(&request, self.context, &QGA) {
            Ok(found) => found,
            Err(error) => {
                if let Ok((name, _)) = request.call() {
                    self.context.write_down_refusal(&name, self.peer, &QGA);
                }
                return self.answer(asked, reply::line(Err(error), request.id())).await;
            }
        };
        match command.run {
            Run::Now(run) => {
                let call = Call::new(self.context, arguments, self.peer, &QGA);
                let watch = call.watch(command);
                let outcome = run(&call);
                watch.ended(outcome.as_ref().err());
                if command.success_response || outcome.is_err() {
                    self.answer(asked, reply::line(outcome, request.id())).await?;
                }
            }
            Run::Later(_) => {
                let may_wait = self.may_wait(command).and_then(|()| self.context.room.take(message.len()));
                let share = match may_wait {
                    Ok(share) => share,
                    Err(error) => {
                        return self.answer(asked, reply::line(Err(error), request.id())).await;
                    }
                };
                let who = (self.context, self.peer);
                let work = Work::begin(message, &request, (command, arguments), who, (asked, share));
                self.works.turn.push_back(work);
            }
        }
        Ok(())
    }

    /// Checks that a command that has to wait for something may begin.
    fn may_wait(&self, command: &Command) -> Result<(), Error> {
        // A thaw is not refused because other commands hang; a thaw that hangs has a limit of its own.
        let most = if command.always { 2 * LEFT } else { LEFT };
        if self.works.left() >= most {
            let text = format!("{most} commands of this client that were given up have not ended");
            return Err(Error::generic(text));
        }
        if command.always { Ok(()) } else { self.context.room.may_wait(command.name) }
    }

    /// Answers a message that is not a valid request, after the requests before it.
    async fn put(&mut self, line: Line) -> io::Result<()> {
        // Queued even behind a single command, because the queue is bounded: answers to malformed messages must not pile
        // up behind a command that hangs.
        if self.is_idle() {
            return self.answer(self.heard, line).await;
        }
        self.queue.push(Asked { since: self.heard, what: What::Answer(line) });
        Ok(())
    }

    /// Adds an answer after those of the commands under way.
    async fn answer(&mut self, asked: Instant, line: Line) -> io::Result<()> {
        match self.works.turn.back() {
            None => self.append(line).await,
            Some(before) => {
                let work = Work::ended(before.command, asked, line);
                self.works.turn.push_back(work);
                Ok(())
            }
        }
    }

    /// Adds a line to the answers; without a copy if it is the first.
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
                self.send_part(&part).await?;
            }
            self.answers = last;
        }
        if self.answers.len() >= GATHER { self.send().await } else { Ok(()) }
    }

    /// Sends a part of a large answer, whose memory is then not available to others. So a client that leaves it unread
    /// is disconnected, where the stream belongs to one client. On a port the next client could not tell where an
    /// answer begins.
    async fn send_part(&mut self, part: &[u8]) -> io::Result<()> {
        let sending = self.stream.write_all(part);
        if self.end == End::Gone {
            return sending.await;
        }
        timeout(STALL, sending).await.unwrap_or_else(|_| {
            self.context.complaints.say(self.peer, &"it does not read its answer; the stream is closed");
            Err(io::ErrorKind::TimedOut.into())
        })
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

/// Reads more bytes; returns `None` if nothing arrives for too long in the middle of a message.
async fn read<S: AsyncRead + Unpin>(
    stream: &mut S,
    input: &mut Vec<u8>,
    partial: bool,
) -> io::Result<Option<usize>> {
    let reading = stream.read_buf(input);
    if partial { timeout(STALL, reading).await.ok().transpose() } else { reading.await.map(Some) }
}
