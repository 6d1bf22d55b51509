//! One call, and its connections.
//!
//! What comes on the call is read whatever becomes of a connection, as long as what is to be sent is taken; each connection is a future
//! of its own among those that run here, and all of them are dropped with the call.

use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::stream::{FuturesUnordered, StreamExt as _};
use tokio::sync::mpsc;
use tokio_stream::Stream;
use tokio_util::sync::CancellationToken;
use tonic::{Status, Streaming};

use super::{Desk, Open, Refused};
use crate::transport::carry::flow::{Breach, INITIAL, PART};
use crate::transport::carry::{Link, Manner, Outbox, Said, carry};
use crate::wire::proto::v1;
use crate::wire::proto::v1::from_target::Message as Told;
use crate::wire::proto::v1::to_target::Message;

/// Bytes that a target may be slow to take, of a connection that is one of few.
const WIDE: usize = 256 << 10;
/// Time that a target may take to receive pending data after its client has broken the connection, or ended
/// the call.
const PATIENCE: Duration = Duration::from_secs(10);
/// Answers that may wait before more is read.
const MAX_WAITING: usize = 1024;

/// Message to the client.
pub(super) enum Answer {
    Connected(u32),
    Refused(u32, Refused),
    Of(u32, Said),
}

impl From<(u32, Said)> for Answer {
    fn from((number, said): (u32, Said)) -> Self {
        Self::Of(number, said)
    }
}

/// Ends with the number of the connection.
type Connection = Pin<Box<dyn Future<Output = u32> + Send>>;

/// State of one call.
pub(super) struct Conversation {
    requests: Streaming<v1::ToTarget>,
    desk: Arc<Desk>,
    stopping: CancellationToken,
    stage: Stage,
    links: BTreeMap<u32, Arc<Link>>,
    /// The greatest number of a connection so far.
    newest: u32,
    running: FuturesUnordered<Connection>,
    outbox: Outbox<Answer>,
    answers: mpsc::UnboundedReceiver<Answer>,
}

#[derive(Clone, Copy)]
enum Stage {
    /// Before the first message to the client.
    New,
    Open,
    /// The client has finished sending; the connections have until this time to end.
    Ending(tokio::time::Instant),
    Over,
}

/// Next event of the call.
enum Next {
    Answer(Answer),
    Request(Option<v1::ToTarget>),
    Ended(u32),
    Late,
}

impl Conversation {
    pub fn new(requests: Streaming<v1::ToTarget>, desk: Arc<Desk>, stopping: CancellationToken) -> Self {
        let (outbox, answers) = Outbox::new();
        Self {
            requests,
            desk,
            stopping,
            stage: Stage::New,
            links: BTreeMap::new(),
            newest: 0,
            running: FuturesUnordered::new(),
            outbox,
            answers,
        }
    }

    pub fn into_stream(self) -> impl Stream<Item = Result<v1::FromTarget, Status>> {
        futures_util::stream::unfold(self, |mut this| async {
            let told = this.next().await.transpose()?;
            if told.is_err() {
                this.stage = Stage::Over;
            }
            Some((told.map(|message| v1::FromTarget { message: Some(message) }), this))
        })
    }

    async fn next(&mut self) -> Result<Option<Told>, Status> {
        loop {
            let deadline = match self.stage {
                Stage::New => {
                    self.stage = Stage::Open;
                    return Ok(Some(Told::Opened(v1::ForwardOpened {})));
                }
                Stage::Open => None,
                Stage::Ending(deadline) => Some(deadline),
                Stage::Over => return Ok(None),
            };
            let may_read = deadline.is_none() && self.answers.len() < MAX_WAITING;
            let late = async {
                match deadline {
                    Some(deadline) => tokio::time::sleep_until(deadline).await,
                    None => std::future::pending().await,
                }
            };
            // Polled in random order, so that neither a client that sends much nor one that receives much starves the
            // other direction.
            let next = tokio::select! {
                Some(answer) = self.answers.recv() => Next::Answer(answer),
                request = self.requests.message(), if may_read => Next::Request(request?),
                Some(number) = self.running.next(), if !self.running.is_empty() => Next::Ended(number),
                () = late => Next::Late,
                () = self.stopping.cancelled() => return Err(Status::unavailable("the agent is stopping")),
            };
            match next {
                Next::Answer(answer) => return Ok(Some(told(answer))),
                Next::Request(Some(request)) => self.take(request)?,
                Next::Request(None) => self.end(),
                Next::Ended(number) => drop(self.links.remove(&number)),
                Next::Late => self.stage = Stage::Over,
            }
            let is_ending = matches!(self.stage, Stage::Ending(_));
            if is_ending && self.running.is_empty() && self.answers.is_empty() {
                self.stage = Stage::Over;
            }
        }
    }

    /// Ends the input of the client: the data that it has sent is still delivered to the targets, and nothing else
    /// continues.
    fn end(&mut self) {
        self.stage = Stage::Ending(tokio::time::Instant::now() + PATIENCE);
        for link in self.links.values().filter(|link| !link.has_ended()) {
            link.reset();
        }
    }

    /// Carries out a request of the client.
    fn take(&mut self, request: v1::ToTarget) -> Result<(), Status> {
        match request.message {
            Some(Message::Connect(connect)) => self.connect(connect),
            Some(Message::Data(v1::ForwardData { number, data })) => {
                if data.len() > PART * 2 {
                    return Err(wrong(number, "more than 16 KiB of data at once"));
                }
                self.of(number, |link| link.receive(&data))
            }
            Some(Message::Credit(v1::ForwardCredit { number, bytes })) => {
                self.of(number, |link| link.grant(bytes))
            }
            Some(Message::End(number)) => self.of(number, Link::end),
            Some(Message::Reset(v1::ForwardReset { number, .. })) => self.of(number, |link| {
                link.reset();
                Ok(())
            }),
            Some(Message::Open(_)) | None => Err(Status::invalid_argument("a call is opened once")),
        }
    }

    /// Tells a connection something, unless it has ended meanwhile.
    fn of(&self, number: u32, tell: impl FnOnce(&Link) -> Result<(), Breach>) -> Result<(), Status> {
        match self.links.get(&number) {
            Some(link) => tell(link).map_err(|breach| wrong(number, &breach.to_string())),
            None if (1..=self.newest).contains(&number) => Ok(()),
            None => Err(wrong(number, "it was not begun")),
        }
    }

    fn connect(&mut self, connect: v1::ConnectTarget) -> Result<(), Status> {
        let v1::ConnectTarget { number, target } = connect;
        if number <= self.newest {
            return Err(wrong(number, "its number is not greater than those before"));
        }
        self.newest = number;
        let allowed = match self.desk.allow(&target) {
            Ok(allowed) => allowed,
            Err(refused) => {
                self.outbox.say(Answer::Refused(number, refused));
                return Ok(());
            }
        };
        let link = Arc::new(Link::default());
        self.links.insert(number, Arc::clone(&link));
        let (desk, outbox) = (Arc::clone(&self.desk), self.outbox.clone());
        self.running.push(Box::pin(async move {
            let socket = match desk.connect(&allowed).await {
                Ok(socket) => socket,
                Err(refused) => {
                    outbox.say(Answer::Refused(number, refused));
                    return number;
                }
            };
            outbox.say(Answer::Connected(number));
            let window = if allowed.counted.is_among_few { WIDE } else { INITIAL };
            let manner = Manner { window, patience: Some(PATIENCE) };
            let mut open =
                Open { desk: &desk, noted: &allowed.noted, link: &link, begun: Instant::now(), ended: None };
            open.ended = Some(carry(number, socket, &link, &outbox, manner).await);
            drop(open);
            number
        }));
        Ok(())
    }
}

/// A client has broken the rules.
fn wrong(number: u32, how: &str) -> Status {
    Status::invalid_argument(format!("connection {number}: {how}"))
}

fn told(answer: Answer) -> Told {
    match answer {
        Answer::Connected(number) => Told::Connected(number),
        Answer::Refused(number, (because, reason)) => {
            Told::Refused(v1::TargetRefused { number, because: because.into(), reason })
        }
        Answer::Of(number, said) => (number, said).into(),
    }
}
