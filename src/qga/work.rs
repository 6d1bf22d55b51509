//! Commands of one client that have begun and were not answered yet, or have not ended.

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

/// Command that has begun, or another answer that keeps its place in the order.
pub(super) struct Work<'c> {
    state: State<'c>,
    /// Time when the request arrived.
    pub asked: Instant,
    /// Time when the command was begun.
    pub begun: Instant,
    /// Command that is carried out.
    pub command: &'static Command,
    /// Field `id` of the answer.
    pub id: Option<String>,
    _share: Share,
}

enum State<'c> {
    /// The command is under way.
    Running(Pin<Box<dyn Future<Output = Line> + Send + 'c>>),
    /// The command has ended, and its answer waits for its turn.
    Ended(Line),
}

impl<'c> Work<'c> {
    /// Begins a command that has to wait for something. `message` is the text that contains `request`.
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

    /// Returns whether the command has ended, so that its answer is available.
    pub fn has_ended(&self) -> bool {
        matches!(self.state, State::Ended(_))
    }

    /// Wraps an answer that is known already.
    pub fn ended(command: &'static Command, asked: Instant, line: Line) -> Self {
        Self { state: State::Ended(line), asked, begun: asked, command, id: None, _share: Share::default() }
    }
}

/// Commands of one client that are under way, or not answered yet.
#[derive(Default)]
pub(super) struct Works<'c> {
    /// Commands that the client waits for, in the order of the answers.
    pub turn: VecDeque<Work<'c>>,
    /// Abandoned commands: still under way, but no client waits for them.
    left: Vec<(Work<'c>, Leaving)>,
}

impl Works<'_> {
    /// Returns whether all commands have ended and were answered.
    pub fn is_empty(&self) -> bool {
        self.turn.is_empty() && self.left.is_empty()
    }

    /// Returns the number of abandoned commands.
    pub fn left(&self) -> usize {
        self.left.len()
    }

    /// Abandons the first command in turn: it continues, but gets no answer.
    pub fn leave(&mut self, room: &Room) {
        if let Some(work) = self.turn.pop_front()
            && let State::Running(_) = work.state
        {
            let leaving = room.leave(work.command.name);
            self.left.push((work, leaving));
        }
    }

    /// Returns the next answer once it is available, or `None` when an abandoned command has ended. Never completes if
    /// there are no commands.
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

/// Carries out a command that has to wait for something, and returns the line that answers it; empty if it has no
/// answer.
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

/// Returns the byte range of `part`, which is a subslice of `message`.
fn within(message: &[u8], part: &str) -> Range<usize> {
    let start = part.as_ptr().addr().saturating_sub(message.as_ptr().addr());
    start..start + part.len()
}
