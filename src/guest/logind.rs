//! Calls to systemd-logind, org.freedesktop.login1(5), that more than one verb needs.

use std::collections::HashMap;
use std::fmt;
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;
use zbus::{Connection, DynamicType, OwnedObjectPath, OwnedVariant, connection};

use crate::sys::root::Root;

/// Timeout for an answer.
const DEADLINE: Duration = Duration::from_secs(20);

const NAME: &str = "org.freedesktop.login1";
const PATH: &str = "/org/freedesktop/login1";
const MANAGER: &str = "org.freedesktop.login1.Manager";

/// Flag `SD_LOGIND_SKIP_INHIBITORS` of systemd: proceeds in spite of inhibitor locks.
const SKIP_INHIBITORS: u64 = 1 << 4;
/// Argument `interactive` of logind's methods: polkit must not prompt for a password.
const NOT_INTERACTIVE: bool = false;

/// Reason why logind gives no answer.
#[derive(Debug)]
pub(super) enum Error {
    /// The system bus or logind is missing.
    Absent(String),
    /// logind refuses the call, or does not answer.
    Failed(zbus::Error),
}

impl fmt::Display for Error {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Absent(why) => formatter.write_str(why),
            Self::Failed(error) => error.fmt(formatter),
        }
    }
}

impl Error {
    /// Returns whether logind is too old for the call: it does not know the method, or does not take these arguments.
    pub(super) fn is_too_old(&self) -> bool {
        let name = match self {
            Self::Failed(zbus::Error::MethodError(name, ..)) => name.as_str(),
            Self::Failed(zbus::Error::FDO(error)) => match &**error {
                zbus::fdo::Error::UnknownMethod(_) | zbus::fdo::Error::InvalidArgs(_) => return true,
                _ => return false,
            },
            _ => return false,
        };
        ["UnknownMethod", "InvalidArgs"]
            .iter()
            .any(|kind| name == format!("org.freedesktop.DBus.Error.{kind}"))
    }
}

/// Connection to logind on the system bus.
pub(super) struct Logind {
    connection: Connection,
    /// Unique name of logind on the bus: unlike its well-known name, calls to it never start logind.
    owner: String,
}

/// Session of a user.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Session {
    pub(super) user: String,
    /// Begin of the session, since the epoch.
    pub(super) since: Duration,
}

impl Logind {
    /// Connects to logind, if it runs.
    pub(super) async fn find(root: &Root) -> Result<Self, Error> {
        let bus = async {
            let builder = if root.is_the_machine() {
                connection::Builder::system()
            } else {
                let socket = root.path("/run/dbus/system_bus_socket");
                connection::Builder::address(format!("unix:path={}", socket.display()).as_str())
            };
            let connection = builder.method_timeout(DEADLINE).build().await?;
            let bus = "org.freedesktop.DBus";
            let owner =
                connection.call_method(Some(bus), "/org/freedesktop/DBus", Some(bus), "GetNameOwner", &NAME);
            let owner: String = owner.await?.body().deserialize()?;
            Ok::<_, zbus::Error>(Self { connection, owner })
        };
        match tokio::time::timeout(DEADLINE, bus).await {
            Ok(found) => found.map_err(|error| Error::Absent(error.to_string())),
            Err(_) => Err(Error::Absent("the system bus does not answer".to_owned())),
        }
    }

    /// Calls a method of logind's manager object.
    pub(super) async fn call<B, T>(&self, method: &str, body: &B) -> Result<T, Error>
    where
        B: Serialize + DynamicType + Sync,
        T: DeserializeOwned + zbus::Type,
    {
        let call = self.connection.call_method(Some(self.owner.as_str()), PATH, Some(MANAGER), method, body);
        let reply = call.await.map_err(Error::Failed)?;
        reply.body().deserialize().map_err(Error::Failed)
    }

    /// Calls a method that shuts down or suspends, and overrides inhibitor locks of the kind "block": the host could
    /// do the same without asking the guest at all.
    pub(super) async fn overriding_inhibitors(&self, method: &str) -> Result<(), Error> {
        match self.call(&format!("{method}WithFlags"), &SKIP_INHIBITORS).await {
            // Before version 257 the flag is unknown, and root overrides inhibitors without it.
            Err(error) if error.is_too_old() => self.call(method, &NOT_INTERACTIVE).await,
            done => done,
        }
    }

    /// Returns the sessions of users. One that ends in the meantime is left out.
    pub(super) async fn sessions(&self) -> Result<Vec<Session>, Error> {
        let listed: Vec<(String, u32, String, String, OwnedObjectPath)> =
            self.call("ListSessions", &()).await?;
        let mut sessions = Vec::new();
        for (id, _, _, _, path) in listed {
            let properties = "org.freedesktop.DBus.Properties";
            let interface = "org.freedesktop.login1.Session";
            let owner = Some(self.owner.as_str());
            let reply = self
                .connection
                .call_method(owner, path.as_str(), Some(properties), "GetAll", &interface)
                .await;
            match reply.and_then(|reply| reply.body().deserialize()) {
                Ok(properties) => sessions.extend(session(&properties)),
                Err(error) => tracing::debug!("cannot look up session {id}: {error}"),
            }
        }
        Ok(sessions)
    }
}

/// Returns the session with these properties if it is a user's: not that of a greeter, a lock screen, a service or
/// the manager of a user's services.
fn session(properties: &HashMap<String, OwnedVariant>) -> Option<Session> {
    let text = |name: &str| properties.get(name).and_then(|value| value.downcast_ref::<&str>().ok());
    let class = text("Class")?;
    let since = properties.get("Timestamp").and_then(|value| value.downcast_ref::<u64>().ok())?;
    (class == "user" || class.starts_with("user-"))
        .then(|| Some(Session { user: text("Name")?.to_owned(), since: Duration::from_micros(since) }))
        .flatten()
}
