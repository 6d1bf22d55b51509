//! `topology.json` in the runtime directory: the last topology from the host half, for programs in the guest.
//!
//! ```json
//! {"version": 1, "region": "eu", "zone": "a", "host": "h1", "labels": {"example.com/rack": "r1"},
//!  "host_half": "h1", "since": 1700000000}
//! ```
//!
//! As long as `version` is 1, keys may be added but never change their meaning; `since` is in seconds since 1970.

use std::io;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};

use crate::guest::topology::{Known, Topology};
use crate::sys::files;

const NAME: &str = "topology.json";
const VERSION: u64 = 1;

/// Replaces the file atomically.
pub(super) fn write(folder: &Path, known: &Known) -> io::Result<()> {
    let Known { topology, host_half, since } = known;
    let text = json!({
        "version": VERSION,
        "region": topology.region,
        "zone": topology.zone,
        "host": topology.host,
        "labels": topology.labels,
        "host_half": host_half,
        "since": since.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs(),
    });
    files::replace(&folder.join(NAME), format!("{text:#}\n").as_bytes())
}

/// Reads the file; `None` if it is missing, or of another version.
pub(super) fn read(folder: &Path) -> Option<Known> {
    let value: Value = serde_json::from_slice(&files::read(&folder.join(NAME))?).ok()?;
    if value["version"] != VERSION {
        return None;
    }
    let text = |key: &str| value[key].as_str().map(str::to_owned);
    let labels = value["labels"].as_object()?;
    let label = |(key, value): (&String, &Value)| Some((key.clone(), value.as_str()?.to_owned()));
    let topology = Topology {
        region: text("region")?,
        zone: text("zone")?,
        host: text("host")?,
        labels: labels.iter().map(label).collect::<Option<_>>()?,
    };
    let since: SystemTime = UNIX_EPOCH.checked_add(Duration::from_secs(value["since"].as_u64()?))?;
    Some(Known { topology, host_half: text("host_half")?, since })
}
