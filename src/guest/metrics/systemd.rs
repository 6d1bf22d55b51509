//! Failed units, as reported by systemd; see org.freedesktop.systemd1(5).

use std::time::Duration;

use tokio::sync::Mutex;
use zbus::{Connection, OwnedObjectPath, OwnedVariant, connection};

use crate::guest::metrics::{Things, put, whole};
use crate::metrics::{Sample, table};
use crate::sys::root::Root;

/// Deadline for the answer of systemd, connecting included.
const DEADLINE: Duration = Duration::from_secs(1);
/// Maximum number of failed units that are reported by name.
const NAMED: usize = 10;

const NAME: &str = "org.freedesktop.systemd1";
const PATH: &str = "/org/freedesktop/systemd1";
const MANAGER: &str = "org.freedesktop.systemd1.Manager";
const PROPERTIES: &str = "org.freedesktop.DBus.Properties";

/// Unit as systemd lists it: its name, and other properties.
type Listed = (String, String, String, String, String, String, OwnedObjectPath, u32, String, OwnedObjectPath);

/// Client of systemd. The connection is kept: making one costs more than the query itself, and an idle one costs
/// nothing.
#[derive(Debug, Default)]
pub(super) struct Systemd(Mutex<Option<Connection>>);

/// Units that have failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Failed {
    count: u32,
    names: Vec<String>,
}

impl Failed {
    /// Adds the number of failed units to `samples`, and returns the sample of each unit.
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
    /// Returns the units that have failed, or `None` if systemd is not on the bus or does not answer.
    pub(super) async fn failed(&self, root: &Root) -> Option<Failed> {
        let asked = async {
            let mut place = self.0.lock().await;
            // The connection is put back only after an answer: one that failed or timed out is dropped.
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
