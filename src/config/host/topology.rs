//! The `[topology]` table: the region, zone and name of this host.

use std::collections::BTreeMap;

use serde::Deserialize;
use toml::Spanned;

use super::super::Error;
use super::Source;
use crate::labels;

/// Maximum number of labels.
const MOST_LABELS: usize = 64;
/// Maximum length of the host's name, in bytes.
const MAX_HOST: usize = 253;

/// Topology of this host. Texts that are not set are empty.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TopologySettings {
    /// Region, as the value of a label.
    pub region: String,
    /// Zone, as the value of a label.
    pub zone: String,
    /// Name of the host, if not its host name.
    pub host: Option<String>,
    /// Further labels for the guests' Nodes; only those that a kubelet may set.
    pub labels: BTreeMap<String, String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub(super) struct TopologyFragment {
    region: Option<Spanned<String>>,
    zone: Option<Spanned<String>>,
    host: Option<Spanned<String>>,
    labels: BTreeMap<Spanned<String>, Spanned<String>>,
}

/// Merges the settings of this fragment into those before; labels add up.
pub(super) fn check(
    source: &Source,
    found: &TopologyFragment,
    topology: &mut TopologySettings,
) -> Result<(), Error> {
    let places = [("region", &found.region, &mut topology.region), ("zone", &found.zone, &mut topology.zone)];
    for (key, found, place) in places {
        let Some(found) = found else { continue };
        labels::check_value(found.get_ref())
            .map_err(|why| source.wrong(found, format!("topology.{key} = {:?}: {why}", found.get_ref())))?;
        place.clone_from(found.get_ref());
    }
    if let Some(host) = &found.host {
        let name = host.get_ref();
        if name.is_empty() || name.len() > MAX_HOST || name.contains(|c: char| c.is_control()) {
            let problem =
                format!("topology.host is empty, longer than {MAX_HOST} bytes, or has control characters");
            return Err(source.wrong(host, problem));
        }
        topology.host = Some(name.clone());
    }
    for (key, value) in &found.labels {
        labels::check_settable(key.get_ref())
            .map_err(|why| source.wrong(key, format!("topology.labels: {:?}: {why}", key.get_ref())))?;
        labels::check_value(value.get_ref()).map_err(|why| {
            source
                .wrong(value, format!("topology.labels: {:?} = {:?}: {why}", key.get_ref(), value.get_ref()))
        })?;
        topology.labels.insert(key.get_ref().clone(), value.get_ref().clone());
        if topology.labels.len() > MOST_LABELS {
            return Err(source.wrong(key, format!("topology.labels has more than {MOST_LABELS} labels")));
        }
    }
    Ok(())
}
