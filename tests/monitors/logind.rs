use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::StreamExt as _;
use guestlet::guest::Guest;
use guestlet::guest::events::Kind;
use guestlet::guest::monitor::Settings;
use guestlet::wire::proto::v1::{
    Resumed, ShutdownBegun, Suspending, UserLoggedIn, UserLoggedOut, UserSession,
};
use zbus::message::Type;
use zbus::{Connection, MessageStream, ObjectPath, Variant, connection};

use crate::bus_daemon::{self, BusDaemon};
use crate::{beside, event, idle, silence};

const MANAGER: &str = "org.freedesktop.login1.Manager";

/// A D-Bus daemon of the test's own.
pub struct Bus {
    _daemon: BusDaemon,
    pub address: String,
}

impl Bus {
    /// Begins on a socket in `folder`.
    pub fn begin(folder: &Path) -> Self {
        let socket = folder.join("bus");
        let _ = std::fs::remove_file(&socket);
        Self { _daemon: BusDaemon::begin(&socket), address: bus_daemon::address(&socket) }
    }

    pub async fn connect(&self) -> Connection {
        connection::Builder::address(self.address.as_str()).build().await.unwrap()
    }
}

/// Id → class and user.
type Sessions = Arc<Mutex<BTreeMap<String, (&'static str, &'static str)>>>;

/// As much of logind as is asked for.
struct Logind {
    connection: Connection,
    sessions: Sessions,
    server: tokio::task::JoinHandle<()>,
}

impl Logind {
    async fn begin(bus: &Bus, sessions: &[(&str, &'static str, &'static str)]) -> Self {
        let connection = bus.connect().await;
        let sessions = sessions.iter().map(|(id, class, user)| ((*id).to_owned(), (*class, *user)));
        let sessions: Sessions = Arc::new(Mutex::new(sessions.collect()));
        let mut calls = MessageStream::from(&connection);
        let (server, known) = (connection.clone(), Arc::clone(&sessions));
        let server = tokio::spawn(async move {
            while let Some(Ok(call)) = calls.next().await {
                let header = call.header();
                if call.message_type() != Type::MethodCall {
                    continue;
                }
                let known = known.lock().unwrap().clone();
                match header.member().unwrap().as_str() {
                    "ListSessions" => {
                        let rows =
                            known.iter().map(|(id, (_, user))| (id.as_str(), 0_u32, *user, "", path(id)));
                        server.reply(&header, &rows.collect::<Vec<_>>()).await.unwrap();
                    }
                    "GetAll" => {
                        let asked = known.iter().find(|(id, _)| Some(&path(id)) == header.path());
                        if let Some((_, (class, user))) = asked {
                            server.reply(&header, &properties(class, user)).await.unwrap();
                        } else {
                            let name = "org.freedesktop.DBus.Error.UnknownObject";
                            server.reply_error(&header, name, &"it is gone").await.unwrap();
                        }
                    }
                    other => panic!("{other} was called"),
                }
            }
        });
        connection.request_name("org.freedesktop.login1").await.unwrap();
        Self { connection, sessions, server }
    }

    async fn log_in(&self, id: &str, class: &'static str, user: &'static str) {
        self.sessions.lock().unwrap().insert(id.to_owned(), (class, user));
        say(&self.connection, "SessionNew", &(id, path(id))).await;
    }

    async fn log_out(&self, id: &str) {
        self.sessions.lock().unwrap().remove(id);
        say(&self.connection, "SessionRemoved", &(id, path(id))).await;
    }

    async fn end(self) {
        self.server.abort();
        self.connection.close().await.unwrap();
    }
}

fn properties<'a>(class: &'a str, user: &'a str) -> HashMap<&'static str, Variant<'a>> {
    HashMap::from([
        ("Class", class.into()),
        ("Name", user.into()),
        ("TTY", "pts/0".into()),
        ("RemoteHost", "192.0.2.1".into()),
        ("Leader", 7_u32.into()),
    ])
}

fn path(id: &str) -> ObjectPath<'static> {
    ObjectPath::try_from(format!("/org/freedesktop/login1/session/_{id}")).unwrap()
}

async fn say<B: serde::Serialize + zbus::DynamicType>(connection: &Connection, member: &str, body: &B) {
    connection.emit_signal(None::<&str>, "/org/freedesktop/login1", MANAGER, member, body).await.unwrap();
}

fn session(id: &str, user: &str) -> UserSession {
    UserSession {
        id: id.to_owned(),
        user: user.to_owned(),
        terminal: "pts/0".to_owned(),
        remote_host: "192.0.2.1".to_owned(),
    }
}

fn logged_in(session: UserSession) -> Kind {
    UserLoggedIn { session: Some(session) }.into()
}

fn logged_out(session: UserSession) -> Kind {
    UserLoggedOut { session: Some(session) }.into()
}

fn settings(bus: &Bus) -> Settings {
    Settings { bus_address: Some(bus.address.clone()), ..Settings::default() }
}

#[tokio::test]
async fn sessions_sleep_and_shutdown() {
    let folder = tempfile::tempdir().unwrap();
    let bus = Bus::begin(folder.path());
    let logind =
        Logind::begin(&bus, &[("10", "user", "ten"), ("2", "user", "two"), ("c1", "greeter", "gdm")]).await;
    let guest = Guest::default();
    let (_, mut watcher) = guest.events.watch(None);
    beside(&guest, "logind", settings(&bus), async {
        assert_eq!(event(&mut watcher).await, logged_in(session("2", "two")));
        assert_eq!(event(&mut watcher).await, logged_in(session("10", "ten")));

        logind.log_in("11", "user", "eleven").await;
        logind.log_in("c2", "manager", "eleven").await;
        // Gone before it can be asked for.
        say(&logind.connection, "SessionNew", &("12", path("12"))).await;
        logind.log_out("12").await;
        logind.log_out("2").await;
        logind.log_out("c1").await;
        assert_eq!(event(&mut watcher).await, logged_in(session("11", "eleven")));
        assert_eq!(event(&mut watcher).await, logged_out(session("2", "two")));

        // Anybody can send a signal to everybody.
        let stranger = bus.connect().await;
        say(&stranger, "PrepareForShutdown", &true).await;
        say(&stranger, "SessionRemoved", &("11", path("11"))).await;
        for agent in 0..10 {
            let agent = format!(":1.{agent}");
            let path = "/org/freedesktop/login1";
            stranger
                .emit_signal(Some(agent.as_str()), path, MANAGER, "PrepareForShutdown", &true)
                .await
                .unwrap();
        }
        idle(&mut watcher).await;

        for (member, start, expected) in [
            ("PrepareForSleep", true, Suspending {}.into()),
            ("PrepareForSleep", false, Resumed {}.into()),
            ("PrepareForShutdown", true, Kind::from(ShutdownBegun {})),
        ] {
            say(&logind.connection, "PrepareForShutdown", &false).await;
            say(&logind.connection, "SomethingElse", &"?").await;
            say(&logind.connection, member, &start).await;
            assert_eq!(event(&mut watcher).await, expected);
        }

        // More than any queue holds, while questions are answered.
        for number in 100..400 {
            logind.log_in(&number.to_string(), "user", "many").await;
        }
        let everybody = async {
            while guest.events.state().1.users.len() < 302 {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(20), everybody).await.expect("the monitor is stuck");
    })
    .await;
}

#[tokio::test]
async fn logind_and_the_bus_may_go_and_come_back() {
    let folder = tempfile::tempdir().unwrap();
    let bus = Bus::begin(folder.path());
    let address = settings(&bus);
    let guest = Guest::default();
    let (_, mut watcher) = guest.events.watch(None);
    beside(&guest, "logind", address, async {
        silence(&mut watcher).await;
        let logind = Logind::begin(&bus, &[("1", "user", "one"), ("2", "user", "two")]).await;
        assert_eq!(event(&mut watcher).await, logged_in(session("1", "one")));
        assert_eq!(event(&mut watcher).await, logged_in(session("2", "two")));

        logind.end().await;
        silence(&mut watcher).await;
        let logind = Logind::begin(&bus, &[("2", "user", "two"), ("3", "user", "three")]).await;
        assert_eq!(event(&mut watcher).await, logged_out(session("1", "one")));
        assert_eq!(event(&mut watcher).await, logged_in(session("3", "three")));

        drop((logind, bus));
        silence(&mut watcher).await;
        guest.events.tick();
        silence_but_ticks(&mut watcher).await;
        let bus = Bus::begin(folder.path());
        let _logind = Logind::begin(&bus, &[("2", "user", "two"), ("4", "user", "four")]).await;
        // Nothing is tried without a tick.
        silence(&mut watcher).await;
        guest.events.tick();
        assert_eq!(event(&mut watcher).await, logged_out(session("3", "three")));
        assert_eq!(event(&mut watcher).await, logged_in(session("4", "four")));
    })
    .await;
}

async fn silence_but_ticks(watcher: &mut guestlet::guest::events::Watcher) {
    watcher.next().await;
    silence(watcher).await;
}
