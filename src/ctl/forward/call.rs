//! Call of `guestlet.v1.Forward`, and the connections that it carries.

use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::stream::{FuturesUnordered, StreamExt as _};
use tokio::sync::mpsc;
use tonic::{Code, Status, Streaming};

use crate::ctl::Error;
use crate::ctl::client::Daemon;
use crate::sys::socket::Socket;
use crate::text::target::Target;
use crate::transport::carry::flow::{Breach, INITIAL};
use crate::transport::carry::{Ended, Link, Manner, Outbox, Said, carry};
use crate::wire::exec::SAID_BY_GUEST;
use crate::wire::proto::v1::from_target::Message as Told;
use crate::wire::proto::v1::to_target::Message;
use crate::wire::proto::v1::{
    ConnectTarget, ForwardCredit, ForwardData, ForwardReset, FromTarget, OpenForward, ToTarget,
};

/// Window of a connection in bytes, which a slow client may leave unread: that of the first connections, and
/// that of others.
const WIDE: usize = 256 << 10;
const WIDE_CONNECTIONS: usize = 64;
/// Timeout for guestlet-host to begin: longer than that of guestlet-host for an agent.
const OPENING: Duration = Duration::from_secs(60);
/// Timeout for the end of a call, in which sent data reaches its target.
const FAREWELL: Duration = Duration::from_secs(12);

/// Requested connection: the client's socket, and the target.
pub type Wanted = (Socket, Target);
/// Connection in progress; its result has its number, and how it ended.
pub type Carried = Pin<Box<dyn Future<Output = (u32, Ended)> + Send>>;

/// Message to the guest.
enum Saying {
    Open(String),
    Connect(u32, Target),
    Of(u32, Said),
}

impl From<(u32, Said)> for Saying {
    fn from((number, said): (u32, Said)) -> Self {
        Self::Of(number, said)
    }
}

impl From<Saying> for ToTarget {
    fn from(saying: Saying) -> Self {
        let message = match saying {
            Saying::Open(name) => Message::Open(OpenForward { name }),
            Saying::Connect(number, target) => {
                Message::Connect(ConnectTarget { number, target: target.to_string() })
            }
            Saying::Of(number, said) => (number, said).into(),
        };
        Self { message: Some(message) }
    }
}

/// Reasons why there is no call, or no longer.
pub enum Lost {
    /// Temporary failure; another call may succeed.
    Passing(String),
    /// Final failure; another call would be refused as well.
    Final(Error),
}

impl Lost {
    /// Converts the reason to an error, where no other call is tried.
    pub fn into_error(self) -> Error {
        match self {
            Self::Passing(words) => Error::Program(words),
            Self::Final(error) => error,
        }
    }
}

/// Event of a call.
pub enum Event {
    /// A connection was not made; with its target, and the reason.
    Refused(Target, String),
    /// A connection has ended.
    Ended(Ended),
}

/// Call that carries connections to targets in a guest.
pub struct Call {
    answers: Streaming<FromTarget>,
    outbox: Outbox<Saying>,
    /// Connections that are being made.
    waiting: BTreeMap<u32, Wanted>,
    links: BTreeMap<u32, Arc<Link>>,
    running: FuturesUnordered<Carried>,
    newest: u32,
}

impl Call {
    /// Opens a call for the VM of this name.
    ///
    /// # Errors
    /// Fails if it is refused.
    pub async fn open(daemon: &Daemon, name: &str) -> Result<Self, Lost> {
        let (outbox, said) = Outbox::new();
        outbox.say(Saying::Open(name.to_owned()));
        let mut client = daemon.forward();
        let begin = async {
            let mut answers = client.forward_connections(sent(said)).await?.into_inner();
            let first = answers.message().await?;
            Ok((first, answers))
        };
        let opened = tokio::time::timeout(OPENING, begin).await;
        let opened = opened.map_err(|_| Lost::Passing(Error::Silent.to_string()))?;
        let (first, answers) = opened.map_err(|status| refused(&status, name))?;
        if !matches!(first.and_then(|first| first.message), Some(Told::Opened(_))) {
            return Err(broken("its first message is not opened"));
        }
        let (waiting, links, running) = (BTreeMap::new(), BTreeMap::new(), FuturesUnordered::new());
        Ok(Self { answers, outbox, waiting, links, running, newest: 0 })
    }

    /// Returns the number of connections, including those that are being made.
    pub fn connections(&self) -> usize {
        self.waiting.len() + self.running.len()
    }

    /// Starts a connection to a target.
    pub fn connect(&mut self, (socket, target): Wanted) {
        // When the numbers are used up, the guest refuses the connection, and another call starts again.
        self.newest = self.newest.saturating_add(1);
        self.outbox.say(Saying::Connect(self.newest, target.clone()));
        self.waiting.insert(self.newest, (socket, target));
    }

    /// Waits for the next event.
    ///
    /// # Errors
    /// Fails if the call has ended.
    pub async fn next(&mut self) -> Result<Event, Lost> {
        loop {
            tokio::select! {
                answer = self.answers.message() => match answer {
                    Ok(Some(FromTarget { message: Some(told) })) => if let Some(event) = self.take(told)? {
                        return Ok(event);
                    },
                    Ok(Some(FromTarget { message: None })) => {}
                    Ok(None) => return Err(Lost::Passing("the guest has ended the stream".to_owned())),
                    Err(status) => return Err(refused(&status, "")),
                },
                Some((number, ended)) = self.running.next(), if !self.running.is_empty() => {
                    self.links.remove(&number);
                    return Ok(Event::Ended(ended));
                }
            }
        }
    }

    fn take(&mut self, told: Told) -> Result<Option<Event>, Lost> {
        match told {
            Told::Connected(number) => self.carry(number),
            Told::Refused(refused) => {
                if let Some((socket, target)) = self.waiting.remove(&refused.number) {
                    socket.abort();
                    return Ok(Some(Event::Refused(target, refused.reason)));
                }
            }
            Told::Data(ForwardData { number, data }) => self.of(number, |link| link.receive(&data))?,
            Told::Credit(ForwardCredit { number, bytes }) => self.of(number, |link| link.grant(bytes))?,
            Told::End(number) => self.of(number, Link::end)?,
            Told::Reset(ForwardReset { number, .. }) => self.of(number, |link| {
                link.reset();
                Ok(())
            })?,
            Told::Opened(_) => return Err(broken("it is opened twice")),
        }
        Ok(None)
    }

    /// Starts to carry a connection that was made.
    fn carry(&mut self, number: u32) {
        let Some((socket, _)) = self.waiting.remove(&number) else { return };
        let link = Arc::new(Link::default());
        let window = if self.running.len() < WIDE_CONNECTIONS { WIDE } else { INITIAL };
        self.links.insert(number, Arc::clone(&link));
        let outbox = self.outbox.clone();
        let manner = Manner { window, patience: None };
        self.running.push(Box::pin(async move {
            let ended = carry(number, socket, &link, &outbox, manner).await;
            (number, ended)
        }));
    }

    fn of(&self, number: u32, tell: impl FnOnce(&Link) -> Result<(), Breach>) -> Result<(), Lost> {
        match self.links.get(&number) {
            Some(link) => tell(link).map_err(|breach| broken(&breach.to_string())),
            None if number <= self.newest => Ok(()),
            None => Err(broken("it names a connection that was not begun")),
        }
    }

    /// Ends the call after its connections have ended normally, so that sent data still reaches its targets.
    pub async fn farewell(self) {
        let Self { mut answers, .. } = self;
        let rest = async { while let Ok(Some(_)) = answers.message().await {} };
        let _ = tokio::time::timeout(FAREWELL, rest).await;
    }

    /// Breaks the connections. Each future completes when its client has received what had arrived for it.
    pub fn lose(self) -> FuturesUnordered<Carried> {
        for link in self.links.values() {
            link.reset();
        }
        for (socket, _) in self.waiting.into_values() {
            socket.abort();
        }
        self.running
    }
}

/// Converts queued messages for the stream. Capacity for data becomes available again as they are sent.
fn sent(said: mpsc::UnboundedReceiver<Saying>) -> impl tokio_stream::Stream<Item = ToTarget> {
    futures_util::stream::unfold(said, |mut said| async { Some((ToTarget::from(said.recv().await?), said)) })
}

fn broken(how: &str) -> Lost {
    Lost::Final(Error::Program(format!("the guest violates the protocol: {how}")))
}

/// Interprets the status at the end of a call.
fn refused(status: &Status, name: &str) -> Lost {
    if std::error::Error::source(status).is_some() {
        return Lost::Passing("guestlet-host closed the connection".to_owned());
    }
    let by_guest = status.metadata().contains_key(SAID_BY_GUEST);
    if crate::ctl::outage::may_pass(status.code(), by_guest) {
        return Lost::Passing(status.message().to_owned());
    }
    Lost::Final(match status.code() {
        Code::Unimplemented if status.message().is_empty() => {
            Error::Program("guestlet-host is too old to forward connections; update it".to_owned())
        }
        Code::NotFound if !by_guest && !name.is_empty() => Error::UnknownVm(name.to_owned()),
        _ => Error::Program(status.message().to_owned()),
    })
}
