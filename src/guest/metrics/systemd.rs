//! Units that have failed, as systemd says, org.freedesktop.systemd1(5).

use std::time::Duration;

use tokio::sync::Mutex;
use zbus::{Connection, OwnedObjectPath, OwnedVariant, connection};

use crate::guest::metrics::{Things, put, whole};
use crate::metrics::{Sample, table};
use crate::sys::root::Root;

/// How long it may take.
const DEADLINE: Duration = Duration::from_secs(1);
/// Most failed units that are named.
const NAMED: usize = 10;

const NAME: &str = "org.freedesktop.systemd1";
const PATH: &str = "/org/freedesktop/systemd1";
const MANAGER: &str = "org.freedesktop.systemd1.Manager";
const PROPERTIES: &str = "org.freedesktop.DBus.Properties";

/// A unit, as it is listed: its name, and what else is said of it.
type Listed = (String, String, String, String, String, String, OwnedObjectPath, u32, String, OwnedObjectPath);

/// Asks systemd. The connection is kept: to make one costs more than all the rest, and an open one costs nothing while it is idle.
#[derive(Debug, Default)]
pub(super) struct Systemd(Mutex<Option<Connection>>);

/// The units that have failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Failed {
    count: u32,
    names: Vec<String>,
}

impl Failed {
    /// Puts how many there are; each of them by itself is returned.
    pub(super) fn samples(&self, samples: &mut Vec<Sample>) -> Things {
        put(samples, &table::UNITS_FAILED, &[], whole(self.count.into()));
        let one = |name: &String| {
            let mut samples = Vec::new();
            put(&mut samples, &table::UNIT_FAILED, &[name], 1.0);
            samples
        };
        self.names.iter().map(one).collect()
    }
}

impl Systemd {
    /// Which units have failed; none if there is no systemd on the bus, or it does not answer.
    pub(super) async fn failed(&self, root: &Root) -> Option<Failed> {
        let asked = async {
            let mut place = self.0.lock().await;
            // It is given back only if it was answered.
            let connection = match place.take() {
                Some(connection) => connection,
                None => connect(root).await?,
            };
            let failed = ask(&connection).await?;
            *place = Some(connection);
            Ok::<_, zbus::Error>(failed)
        };
        match tokio::time::timeout(DEADLINE, asked).await {
            Ok(Ok(failed)) => Some(failed),
            Ok(Err(error)) => {
                tracing::debug!("systemd does not report which units have failed: {error}");
                None
            }
            Err(_) => None,
        }
    }
}

async fn connect(root: &Root) -> zbus::Result<Connection> {
    let builder = if root.is_the_machine() {
        connection::Builder::system()
    } else {
        let socket = root.path("/run/dbus/system_bus_socket");
        connection::Builder::address(format!("unix:path={}", socket.display()).as_str())
    };
    builder.method_timeout(DEADLINE).build().await
}

async fn ask(connection: &Connection) -> zbus::Result<Failed> {
    let body = (MANAGER, "NFailedUnits");
    let reply = connection.call_method(Some(NAME), PATH, Some(PROPERTIES), "Get", &body).await?;
    let count: OwnedVariant = reply.body().deserialize()?;
    let count: u32 = count.downcast_ref()?;
    if count == 0 {
        return Ok(Failed { count, names: Vec::new() });
    }
    let states: &[&str] = &["failed"];
    let reply =
        connection.call_method(Some(NAME), PATH, Some(MANAGER), "ListUnitsFiltered", &(states,)).await?;
    let listed: Vec<Listed> = reply.body().deserialize()?;
    let mut names: Vec<_> = listed.into_iter().map(|unit| unit.0).collect();
    names.sort();
    names.truncate(NAMED);
    Ok(Failed { count, names })
}
