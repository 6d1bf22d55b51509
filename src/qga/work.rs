//! Commands of one client that have begun and have not been answered, or have not ended.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::ops::Range;
use std::pin::Pin;
use std::task::Poll;
use std::time::Instant;

use crate::policy::asker::QGA;
use crate::qga::Context;
use crate::qga::arguments::Arguments;
use crate::qga::call::Call;
use crate::qga::reply::Line;
use crate::qga::request::Request;
use crate::qga::room::{Leaving, Room, Share};
use crate::qga::table::Command;

/// A command that was begun, or another answer that has its place in the order.
pub(super) struct Work<'c> {
    state: State<'c>,
    /// When the client asked for it.
    pub asked: Instant,
    /// When it was begun.
    pub begun: Instant,
    /// The command.
    pub command: &'static Command,
    /// The `id` to answer it with.
    pub id: Option<String>,
    _share: Share,
}

enum State<'c> {
    /// It has not ended.
    Running(Pin<Box<dyn Future<Output = Line> + Send + 'c>>),
    /// Its answer waits for its turn.
    Ended(Line),
}

impl<'c> Work<'c> {
    /// Begins with a command that has to wait for something. `message` is what it was asked for with.
    pub fn begin(
        message: &[u8],
        request: &Request<'_>,
        (command, arguments): (&'static Command, Arguments<'_>),
        (context, peer): (&'c Context, &'c str),
        (asked, share): (Instant, Share),
    ) -> Self {
        let place = |part: &str| within(message, part);
        let arguments = arguments.text().map(place);
        let id = request.id().map(place);
        let work = perform(message.to_owned(), command, arguments, id, context, peer);
        Self {
            state: State::Running(Box::pin(work)),
            asked,
            begun: Instant::now(),
            command,
            id: request.id().map(str::to_owned),
            _share: share,
        }
    }

    /// Whether its answer is there.
    pub fn has_ended(&self) -> bool {
        matches!(self.state, State::Ended(_))
    }

    /// An answer that is known already.
    pub fn ended(command: &'static Command, asked: Instant, line: Line) -> Self {
        Self { state: State::Ended(line), asked, begun: asked, command, id: None, _share: Share::default() }
    }
}

/// All of them.
#[derive(Default)]
pub(super) struct Works<'c> {
    /// Those whose answers are waited for, in the order of the answers.
    pub turn: VecDeque<Work<'c>>,
    /// Those that nobody waits for any more.
    left: Vec<(Work<'c>, Leaving)>,
}

impl Works<'_> {
    /// Whether all have ended and were answered.
    pub fn is_empty(&self) -> bool {
        self.turn.is_empty() && self.left.is_empty()
    }

    /// How many go on and are not waited for.
    pub fn left(&self) -> usize {
        self.left.len()
    }

    /// Nobody waits for the next answer any more; what makes it goes on.
    pub fn leave(&mut self, room: &Room) {
        if let Some(work) = self.turn.pop_front()
            && let State::Running(_) = work.state
        {
            let leaving = room.leave(work.command.name);
            self.left.push((work, leaving));
        }
    }

    /// The next answer, when it is there; nothing when a command has ended that nobody waits for. Never completes where
    /// there is none.
    pub async fn progress(&mut self) -> Option<Line> {
        poll_fn(|waker| {
            for work in &mut self.turn {
                if let State::Running(future) = &mut work.state
                    && let Poll::Ready(line) = future.as_mut().poll(waker)
                {
                    work.state = State::Ended(line);
                }
            }
            let before = self.left.len();
            self.left.retain_mut(|(work, _)| match &mut work.state {
                State::Running(future) => future.as_mut().poll(waker).is_pending(),
                State::Ended(_) => false,
            });
            match self.turn.pop_front() {
                Some(Work { state: State::Ended(line), .. }) => return Poll::Ready(Some(line)),
                Some(running) => self.turn.push_front(running),
                None => {}
            }
            if self.left.len() < before { Poll::Ready(None) } else { Poll::Pending }
        })
        .await
    }
}

/// Carries out a command that has to wait for something, and makes the line that answers it; an empty one if none does.
async fn perform(
    message: Vec<u8>,
    command: &'static Command,
    arguments: Option<Range<usize>>,
    id: Option<Range<usize>>,
    context: &Context,
    peer: &str,
) -> Line {
    let part = |place: Range<usize>| std::str::from_utf8(&message[place]).unwrap_or_default();
    let call = Call::new(context, Arguments::new(arguments.map(part)), peer, &QGA);
    call.carry_out(command, id.map(part)).await
}

/// Where `part`, which is a part of it, stands in `message`.
fn within(message: &[u8], part: &str) -> Range<usize> {
    let start = part.as_ptr().addr().saturating_sub(message.as_ptr().addr());
    start..start + part.len()
}
