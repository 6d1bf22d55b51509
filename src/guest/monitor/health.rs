//! Health of the guest's startup and services: cloud-init, by the files that it writes, and the units that systemd
//! reports as failed.
//!
//! systemd has no signal for a failed unit alone, only signals for every state change of every unit. So it is
//! queried at every sixth tick of the agent, which needs no wakeup of its own.

use std::convert::Infallible;
use std::io;
use std::time::Duration;

use serde_json::Value;
use tokio::time::sleep;
use zbus::{OwnedObjectPath, connection};

use crate::guest::Guest;
use crate::guest::monitor::QUIET;
use crate::sys::blocking;
use crate::sys::file_news::FileNews;
use crate::wire::proto::v1::{Health, HealthChanged};

/// Files that cloud-init writes at its end, and while it runs.
const RESULT: &str = "/run/cloud-init/result.json";
const STATUS: &str = "/run/cloud-init/status.json";
/// Ticks between two queries of systemd.
const TICKS: u32 = 6;
/// Timeout for the answer of systemd.
const DEADLINE: Duration = Duration::from_secs(20);
/// Maximum number of units and of error messages.
const MOST: usize = 32;
/// Maximum length of an error message in characters.
const MAX_TEXT: usize = 200;

/// Unit as systemd lists it: its name, then fields that are not used.
type Unit = (String, String, String, String, String, String, OwnedObjectPath, u32, String, OwnedObjectPath);

pub(super) async fn watch(guest: Guest, address: Option<String>) -> io::Result<Infallible> {
    let mut news = FileNews::begin([RESULT, STATUS].map(|path| guest.root.path(path)).to_vec());
    let mut known = Health::default();
    let mut units = failed_units(address.as_deref()).await.unwrap_or_default();
    loop {
        let root = guest.root.clone();
        let (cloud_init, cloud_init_errors) = blocking::run(move || {
            cloud_init(root.read(RESULT).ok().as_deref(), root.read(STATUS).ok().as_deref())
        })
        .await;
        let health =
            Health { cloud_init: cloud_init.to_owned(), cloud_init_errors, failed_units: units.clone() };
        if health != known {
            known.clone_from(&health);
            guest.events.tell(HealthChanged { health: Some(health) });
        }
        let asked = async {
            for _ in 0..TICKS {
                guest.events.next_tick().await;
            }
            failed_units(address.as_deref()).await
        };
        tokio::select! {
            changed = news.changed() => {
                changed?;
                sleep(QUIET).await;
            }
            // Without an answer the last known list is kept.
            asked = asked => match asked {
                Ok(asked) => units = asked,
                Err(error) => tracing::debug!("systemd does not report which units have failed: {error}"),
            }
        }
    }
}

/// Returns the failed units, sorted by name.
async fn failed_units(address: Option<&str>) -> zbus::Result<Vec<String>> {
    let asking = async {
        let builder = match address {
            Some(address) => connection::Builder::address(address),
            None => connection::Builder::system(),
        };
        let connection = builder.method_timeout(DEADLINE).build().await?;
        let name = "org.freedesktop.systemd1";
        let manager = "org.freedesktop.systemd1.Manager";
        let states = (vec!["failed"],);
        let reply = connection
            .call_method(Some(name), "/org/freedesktop/systemd1", Some(manager), "ListUnitsFiltered", &states)
            .await?;
        let mut units: Vec<Unit> = reply.body().deserialize()?;
        units.sort_unstable_by(|one, other| one.0.cmp(&other.0));
        Ok(units.into_iter().take(MOST).map(|unit| unit.0).collect())
    };
    match tokio::time::timeout(DEADLINE, asking).await {
        Ok(units) => units,
        Err(_) => Err(zbus::Error::from(io::Error::from(io::ErrorKind::TimedOut))),
    }
}

/// Returns the state of cloud-init in one word, and its errors. Pure.
fn cloud_init(result: Option<&[u8]>, status: Option<&[u8]>) -> (&'static str, Vec<String>) {
    let parse = |bytes: Option<&[u8]>| bytes.and_then(|bytes| serde_json::from_slice::<Value>(bytes).ok());
    let (result, status) = (parse(result), parse(status));
    let Some(result) = result else {
        return (if status.is_some() { "running" } else { "" }, Vec::new());
    };
    let complaint = |text: &Value| text.as_str().map(|text| text.chars().take(MAX_TEXT).collect::<String>());
    let list = |list: &Value| list.as_array().into_iter().flatten().filter_map(complaint).collect::<Vec<_>>();
    let mut errors = list(&result["v1"]["errors"]);
    errors.truncate(MOST);
    if !errors.is_empty() {
        return ("error", errors);
    }
    // Recoverable errors are listed by stage, and then by severity.
    let mut stages =
        status.iter().filter_map(|status| status["v1"].as_object()).flat_map(|stages| stages.values());
    let degraded = stages.any(|stage| {
        let grave = stage["recoverable_errors"].as_object().into_iter().flat_map(|grave| grave.values());
        grave.into_iter().any(|complaints| complaints.as_array().is_some_and(|list| !list.is_empty()))
    });
    (if degraded { "degraded" } else { "done" }, Vec::new())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cloud_init_came_to() {
        let degraded =
            r#"{"v1": {"stage": null, "init": {"errors": [], "recoverable_errors": {"WARNING": ["x"]}}}}"#;
        let fine = r#"{"v1": {"stage": null, "init": {"errors": [], "recoverable_errors": {}}}}"#;
        let done = r#"{"v1": {"datasource": "NoCloud", "errors": []}}"#;
        let failed = r#"{"v1": {"datasource": "NoCloud", "errors": ["('scripts-user', RuntimeError())"]}}"#;
        for (result, status, expected, errors) in [
            (None, None, "", 0),
            (None, Some(fine), "running", 0),
            (Some("{"), Some(fine), "running", 0),
            (Some(done), Some(fine), "done", 0),
            (Some(done), None, "done", 0),
            (Some(done), Some(degraded), "degraded", 0),
            (Some(failed), Some(degraded), "error", 1),
            (Some("[1]"), Some("[]"), "done", 0),
        ] {
            let told = cloud_init(result.map(str::as_bytes), status.map(str::as_bytes));
            assert_eq!((told.0, told.1.len()), (expected, errors), "{result:?} {status:?}");
        }
    }
}
