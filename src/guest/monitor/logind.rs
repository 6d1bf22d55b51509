//! Events of systemd-logind, org.freedesktop.login1(5): sessions of users, suspension, shutdown.
//!
//! ```text
//! connect ──▶ subscribe ──▶ is logind there? ──yes──▶ list sessions ──▶ follow its signals
//!    ▲                             └──no, or it ended──▶ wait for it ─────▲      │
//!    └──── at the agent's next tick ◀──── the bus is lost, or does not answer ◀──┘
//! ```
//!
//! The monitor does not start logind: where it is not on the bus, the monitor waits for it. Sessions are kept when
//! logind or the bus is restarted, and compared with the new list.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::convert::Infallible;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt as _;
use zbus::message::Type;
use zbus::names::{InterfaceName, MemberName, UniqueName};
use zbus::{Connection, Message, MessageStream, OwnedObjectPath, OwnedVariant};

use crate::guest::Guest;
use crate::guest::events::Hub;
use crate::wire::proto::v1::{Resumed, ShutdownBegun, Suspending, UserLoggedIn, UserLoggedOut, UserSession};

const BUS: &str = "org.freedesktop.DBus";
const LOGIND: &str = "org.freedesktop.login1";
const MANAGER: &str = "org.freedesktop.login1.Manager";

/// Timeout for an answer.
const DEADLINE: Duration = Duration::from_secs(20);

/// Signals of logind that are handled; the monitor subscribes to no others.
const SIGNALS: [&str; 4] = ["SessionNew", "SessionRemoved", "PrepareForSleep", "PrepareForShutdown"];

pub(super) async fn watch(guest: Guest, address: Option<String>) -> Result<Infallible, Infallible> {
    let mut sessions = Sessions::default();
    let mut said = false;
    loop {
        let mut connected = false;
        let error = match follow(&guest.events, address.as_deref(), &mut sessions, &mut connected).await {
            Ok(()) => "the connection was closed".to_owned(),
            Err(error) => error.to_string(),
        };
        // Logged once per outage.
        if !said || connected {
            tracing::info!("no events from logind until the system bus answers: {error}");
            said = true;
        }
        guest.events.next_tick().await;
    }
}

/// Known sessions, by their identifier.
type Sessions = BTreeMap<String, UserSession>;

/// Follows logind until the connection to the bus is lost.
async fn follow(
    hub: &Arc<Hub>,
    address: Option<&str>,
    sessions: &mut Sessions,
    connected: &mut bool,
) -> zbus::Result<()> {
    let builder = match address {
        Some(address) => zbus::connection::Builder::address(address),
        None => zbus::connection::Builder::system(),
    };
    let connection = builder.method_timeout(DEADLINE).build().await?;
    let stream = MessageStream::from(&connection);
    let mut follower = Follower { hub, connection, stream, waiting: VecDeque::new(), logind: None, sessions };
    follower.subscribe().await?;
    follower.find_logind().await?;
    *connected = true;
    loop {
        if let Some(signal) = follower.waiting.pop_front() {
            follower.handle(signal).await?;
        } else {
            match follower.stream.next().await {
                Some(message) => follower.receive(&message?),
                None => return Ok(()),
            }
        }
    }
}

/// Message on the bus that the monitor handles.
#[derive(Debug, PartialEq, Eq)]
enum Signal {
    /// logind appeared on the bus, or disappeared from it.
    Owner,
    SessionNew(String, OwnedObjectPath),
    SessionRemoved(String),
    Sleep(bool),
    Shutdown(bool),
}

struct Follower<'a> {
    hub: &'a Hub,
    connection: Connection,
    /// All messages, in the order in which they were sent.
    stream: MessageStream,
    /// Signals that arrived while the monitor waited for an answer.
    waiting: VecDeque<Signal>,
    /// Unique name of logind on the bus. Any client may send signals; only those from this name are trusted.
    logind: Option<String>,
    sessions: &'a mut Sessions,
}

impl Follower<'_> {
    async fn subscribe(&mut self) -> zbus::Result<()> {
        let owner = format!(
            "type='signal',sender='{BUS}',interface='{BUS}',member='NameOwnerChanged',arg0='{LOGIND}'"
        );
        self.call(BUS, "/org/freedesktop/DBus", BUS, "AddMatch", &owner).await?;
        for member in SIGNALS {
            let rule = format!("type='signal',sender='{LOGIND}',interface='{MANAGER}',member='{member}'");
            self.call(BUS, "/org/freedesktop/DBus", BUS, "AddMatch", &rule).await?;
        }
        Ok(())
    }

    async fn find_logind(&mut self) -> zbus::Result<()> {
        match self.call(BUS, "/org/freedesktop/DBus", BUS, "GetNameOwner", &LOGIND).await {
            Ok(reply) => self.logind = Some(reply.body().deserialize()?),
            Err(zbus::Error::FDO(error)) if matches!(*error, zbus::fdo::Error::NameHasNoOwner(_)) => {}
            Err(error) => return Err(error),
        }
        self.list().await
    }

    /// Updates the known sessions from logind's list.
    async fn list(&mut self) -> zbus::Result<()> {
        let Some(logind) = self.logind.clone() else { return Ok(()) };
        let reply = self.call(&logind, "/org/freedesktop/login1", MANAGER, "ListSessions", &()).await?;
        let listed: Vec<(String, u32, String, String, OwnedObjectPath)> = reply.body().deserialize()?;
        let mut listed: Vec<_> = listed.into_iter().map(|(id, _, _, _, path)| (id, path)).collect();
        // Sort numerically: 2 comes before 10.
        listed.sort_unstable_by(|(one, _), (other, _)| (one.len(), one).cmp(&(other.len(), other)));
        let gone: Vec<String> = {
            let known = self.sessions.keys();
            known.filter(|id| listed.iter().all(|(listed, _)| listed != *id)).cloned().collect()
        };
        for id in gone {
            self.logged_out(&id);
        }
        for (id, path) in listed {
            self.logged_in(id, path).await;
        }
        Ok(())
    }

    async fn handle(&mut self, signal: Signal) -> zbus::Result<()> {
        match signal {
            Signal::Owner => self.list().await?,
            Signal::SessionNew(id, path) => self.logged_in(id, path).await,
            Signal::SessionRemoved(id) => self.logged_out(&id),
            Signal::Sleep(true) => self.hub.tell(Suspending {}),
            Signal::Sleep(false) => self.hub.tell(Resumed {}),
            Signal::Shutdown(true) => self.hub.tell(ShutdownBegun {}),
            // The shutdown was cancelled, or failed.
            Signal::Shutdown(false) => {}
        }
        Ok(())
    }

    async fn logged_in(&mut self, id: String, path: OwnedObjectPath) {
        let Some(logind) = self.logind.clone().filter(|_| !self.sessions.contains_key(&id)) else { return };
        let interface = "org.freedesktop.login1.Session";
        let reply =
            self.call(&logind, path.as_str(), "org.freedesktop.DBus.Properties", "GetAll", &interface).await;
        match reply.and_then(|reply| reply.body().deserialize()) {
            Ok(properties) => {
                if let Some(session) = session(&id, &properties) {
                    self.sessions.insert(id, session.clone());
                    self.hub.tell(UserLoggedIn { session: Some(session) });
                }
            }
            // The session may have ended already.
            Err(error) => tracing::debug!("cannot look up session {id}: {error}"),
        }
    }

    fn logged_out(&mut self, id: &str) {
        if let Some(session) = self.sessions.remove(id) {
            self.hub.tell(UserLoggedOut { session: Some(session) });
        }
    }

    /// Calls a method. Messages that arrive before the answer are queued: a stream that is not read would hold up the
    /// answer.
    async fn call<B>(
        &mut self,
        destination: &str,
        path: &str,
        interface: &str,
        member: &str,
        body: &B,
    ) -> zbus::Result<Message>
    where
        B: serde::Serialize + zbus::DynamicType + Sync,
    {
        let connection = self.connection.clone();
        let mut call = pin!(connection.call_method(Some(destination), path, Some(interface), member, body));
        loop {
            tokio::select! {
                biased;
                reply = &mut call => return reply,
                message = self.stream.next() => match message {
                    Some(message) => self.receive(&message?),
                    None => return (&mut call).await,
                },
            }
        }
    }

    fn receive(&mut self, message: &Message) {
        let known = self.logind.as_deref();
        let signal = match understand(message, known) {
            Ok(Some(Heard::Owner(owner))) => {
                self.logind = owner;
                Signal::Owner
            }
            Ok(Some(Heard::Signal(signal))) => signal,
            Ok(None) => return,
            Err(error) => {
                tracing::debug!("received a signal that is not understood: {error}");
                return;
            }
        };
        self.waiting.push_back(signal);
    }
}

enum Heard {
    /// Unique name of logind on the bus from now on.
    Owner(Option<String>),
    Signal(Signal),
}

fn understand(message: &Message, logind: Option<&str>) -> zbus::Result<Option<Heard>> {
    let header = message.header();
    if message.message_type() != Type::Signal {
        return Ok(None);
    }
    let sender = header.sender().map(UniqueName::as_str);
    let interface = header.interface().map(InterfaceName::as_str);
    let member = header.member().map(MemberName::as_str);
    let body = message.body();
    if (sender, interface, member) == (Some(BUS), Some(BUS), Some("NameOwnerChanged")) {
        let (name, _before, now): (String, String, String) = body.deserialize()?;
        return Ok((name == LOGIND).then(|| Heard::Owner(Some(now).filter(|now| !now.is_empty()))));
    }
    if sender.is_none() || sender != logind || interface != Some(MANAGER) {
        return Ok(None);
    }
    Ok(Some(Heard::Signal(match member {
        Some("SessionNew") => {
            let (id, path) = body.deserialize()?;
            Signal::SessionNew(id, path)
        }
        Some("SessionRemoved") => {
            let (id, _path): (_, OwnedObjectPath) = body.deserialize()?;
            Signal::SessionRemoved(id)
        }
        Some("PrepareForSleep") => Signal::Sleep(body.deserialize()?),
        Some("PrepareForShutdown") => Signal::Shutdown(body.deserialize()?),
        _ => return Ok(None),
    })))
}

/// Returns the session with these properties if it is a user's: not that of a greeter, a lock screen, a service or
/// the manager of a user's services.
fn session(id: &str, properties: &HashMap<String, OwnedVariant>) -> Option<UserSession> {
    let text = |name: &str| {
        let value = properties.get(name).and_then(|value| value.downcast_ref::<&str>().ok());
        value.unwrap_or_default().to_owned()
    };
    // Also user-early (root's, while the system boots), user-light and user-incomplete.
    let class = text("Class");
    (class == "user" || class.starts_with("user-")).then(|| UserSession {
        id: id.to_owned(),
        user: text("Name"),
        terminal: text("TTY"),
        remote_host: text("RemoteHost"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_users_have_sessions() {
        for (class, expected) in [
            ("user", true),
            ("user-early", true),
            ("user-incomplete", true),
            ("user-light", true),
            ("username", false),
            ("greeter", false),
            ("lock-screen", false),
            ("background", false),
            ("manager", false),
            ("", false),
        ] {
            let properties = [("Class", class), ("Name", "me"), ("TTY", "tty1")].map(|(name, value)| {
                (name.to_owned(), OwnedVariant::from(zbus::Str::from(value.to_owned())))
            });
            let session = session("7", &HashMap::from(properties));
            assert_eq!(session.is_some(), expected, "{class}");
            if let Some(session) = session {
                assert_eq!((session.user.as_str(), session.terminal.as_str()), ("me", "tty1"));
            }
        }
    }
}
