//! A system bus of the test's own, with as much of logind on it as is asked for.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use futures_util::StreamExt as _;
use zbus::message::Type;
use zbus::{Connection, MessageStream, ObjectPath, Variant, connection};

use crate::bus_daemon::{self, BusDaemon};
use crate::laid_out::LaidOut;

/// Class, user, and when the session began, in microseconds.
pub type Session = (&'static str, &'static str, u64);

/// How logind is.
#[derive(Debug, Default, Clone)]
pub struct Kind {
    pub sessions: Vec<Session>,
    /// What it says of whether it can do something.
    pub can: &'static str,
    /// The flags that it knows; nothing, if it knows no methods with flags.
    pub flags: Option<u64>,
    /// It refuses everything that ends something.
    pub refuses: bool,
}

/// logind, as long as this lives.
pub struct Logind {
    _daemon: BusDaemon,
    calls: Arc<Mutex<Vec<String>>>,
    _connection: Connection,
}

impl Logind {
    /// Begins on the bus of that machine.
    pub fn begin(on: &LaidOut, kind: Kind) -> Self {
        let socket = on.path("/run/dbus/system_bus_socket");
        std::fs::create_dir_all(socket.parent().unwrap()).unwrap();
        let daemon = BusDaemon::begin(&socket);
        let address = bus_daemon::address(&socket);
        let calls = Arc::new(Mutex::new(Vec::new()));
        let connection = on.runtime.block_on(async {
            let connection = connection::Builder::address(address.as_str()).build().await.unwrap();
            let (server, calls) = (connection.clone(), Arc::clone(&calls));
            let stream = MessageStream::from(&connection);
            tokio::spawn(serve(server, stream, kind, calls));
            connection.request_name("org.freedesktop.login1").await.unwrap();
            connection
        });
        Self { _daemon: daemon, calls, _connection: connection }
    }

    /// The methods that were called so far and took effect, with their argument.
    pub fn done(&self) -> Vec<String> {
        self.calls.lock().unwrap().clone()
    }
}

async fn serve(server: Connection, mut stream: MessageStream, kind: Kind, calls: Arc<Mutex<Vec<String>>>) {
    while let Some(Ok(call)) = stream.next().await {
        let header = call.header();
        if call.message_type() != Type::MethodCall {
            continue;
        }
        let fail = |name: &str| {
            let name = format!("org.freedesktop.DBus.Error.{name}");
            let (server, header) = (&server, &header);
            async move { server.reply_error(header, name.as_str(), &"not so").await.unwrap() }
        };
        let member = header.member().unwrap().to_string();
        match member.as_str() {
            "ListSessions" => {
                let sessions = kind.sessions.iter().enumerate();
                let rows = sessions.map(|(id, (_, user, _))| (id.to_string(), 0_u32, *user, "", path(id)));
                server.reply(&header, &rows.collect::<Vec<_>>()).await.unwrap();
            }
            "GetAll" => {
                let mut sessions = kind.sessions.iter().enumerate();
                match sessions.find(|(id, (_, user, _))| Some(&path(*id)) == header.path() && *user != "gone")
                {
                    Some((_, (class, user, since))) => {
                        let properties: HashMap<_, Variant<'_>> = HashMap::from([
                            ("Class", (*class).into()),
                            ("Name", (*user).into()),
                            ("Timestamp", (*since).into()),
                        ]);
                        server.reply(&header, &properties).await.unwrap();
                    }
                    None => fail("UnknownObject").await,
                }
            }
            can if can.starts_with("Can") => server.reply(&header, &kind.can).await.unwrap(),
            _ if kind.refuses => fail("AccessDenied").await,
            with_flags if with_flags.ends_with("WithFlags") => {
                let flags: u64 = call.body().deserialize().unwrap();
                match kind.flags {
                    None => fail("UnknownMethod").await,
                    Some(known) if flags & !known != 0 => fail("InvalidArgs").await,
                    Some(_) => {
                        calls.lock().unwrap().push(format!("{member}({flags})"));
                        server.reply(&header, &()).await.unwrap();
                    }
                }
            }
            "PowerOff" | "Halt" | "Reboot" | "Suspend" | "Hibernate" | "HybridSleep" => {
                let interactive: bool = call.body().deserialize().unwrap();
                calls.lock().unwrap().push(format!("{member}({interactive})"));
                server.reply(&header, &()).await.unwrap();
            }
            _ => fail("UnknownMethod").await,
        }
    }
}

fn path(id: usize) -> ObjectPath<'static> {
    ObjectPath::try_from(format!("/org/freedesktop/login1/session/_{id}")).unwrap()
}
