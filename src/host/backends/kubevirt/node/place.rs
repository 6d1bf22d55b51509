//! Location of a node, taken from its Node object: its VMs run there.

use std::borrow::Cow;
use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::Resource;
use kube::core::ClusterResourceScope;
use serde::{Deserialize, Deserializer};

use crate::labels::{REGION, ZONE};
use crate::wire::proto::v1::Topology;

/// Node object, reduced to its labels.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Labelled {
    /// Metadata: name, version and labels are kept.
    pub metadata: ObjectMeta,
}

impl<'d> Deserialize<'d> for Labelled {
    fn deserialize<D: Deserializer<'d>>(from: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        struct Bare {
            metadata: ObjectMeta,
        }
        let ObjectMeta { name, resource_version, labels, .. } = Bare::deserialize(from)?.metadata;
        Ok(Self { metadata: ObjectMeta { name, resource_version, labels, ..ObjectMeta::default() } })
    }
}

/// Returns the location to report to guests on the node `name` with these labels. Of the other labels, those in
/// `further` are included.
pub fn topology(name: &str, labels: &BTreeMap<String, String>, further: &[String]) -> Topology {
    let value = |key: &str| labels.get(key).cloned().unwrap_or_default();
    let told = further.iter().filter_map(|key| Some((key.clone(), labels.get(key)?.clone())));
    Topology {
        region: value(REGION),
        zone: value(ZONE),
        host: name.to_owned(),
        // A label without a value is left out.
        labels: told.filter(|(_, value)| !value.is_empty()).collect(),
    }
}

impl Resource for Labelled {
    type DynamicType = ();
    type Scope = ClusterResourceScope;

    fn kind((): &()) -> Cow<'_, str> {
        "Node".into()
    }

    fn group((): &()) -> Cow<'_, str> {
        "".into()
    }

    fn version((): &()) -> Cow<'_, str> {
        "v1".into()
    }

    fn plural((): &()) -> Cow<'_, str> {
        "nodes".into()
    }

    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }

    fn meta_mut(&mut self) -> &mut ObjectMeta {
        &mut self.metadata
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_of_a_node_are_where_its_guests_are() {
        let labels = [
            (REGION, "north"),
            (ZONE, "north-1"),
            ("kubernetes.io/hostname", "another"),
            ("example.com/rack", "r7"),
            ("example.com/empty", ""),
            ("example.com/other", "x"),
        ];
        let labels = labels.map(|(key, value)| (key.to_owned(), value.to_owned())).into();
        let further = ["example.com/rack", "example.com/empty", "example.com/none"].map(str::to_owned);
        let told = topology("n1", &labels, &further);
        assert_eq!(
            (told.region.as_str(), told.zone.as_str(), told.host.as_str()),
            ("north", "north-1", "n1")
        );
        assert_eq!(told.labels, [("example.com/rack".to_owned(), "r7".to_owned())].into());
        let bare = topology("n1", &BTreeMap::new(), &further);
        assert_eq!(bare, Topology { host: "n1".into(), ..Topology::default() });
    }
}
