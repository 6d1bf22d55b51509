//! The `[topology]` table: where this host is.

use std::collections::BTreeMap;

use serde::Deserialize;
use toml::Spanned;

use super::super::Error;
use super::Source;
use crate::labels;

/// Most labels.
const MOST_LABELS: usize = 64;
/// Longest name of the host, in bytes.
const MAX_HOST: usize = 253;

/// Where this host is. What is not set is empty.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TopologySettings {
    /// The region, a label's value.
    pub region: String,
    /// The zone, a label's value.
    pub zone: String,
    /// The host's name, if not its own.
    pub host: Option<String>,
    /// Further labels for the guests' Nodes, which a kubelet may set.
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

/// Takes what this fragment sets; labels add up.
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
