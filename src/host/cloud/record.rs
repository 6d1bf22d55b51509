//! Record of one load balancer, stored in a file of its own. Pure.
//!
//! ```text
//!  (no record) ──requested──▶ kept ──released──▶ released ──pruned, or its address is another's──▶ (no record)
//!                                                   └──requested again by the same name, with another UID: a new record
//! ```
//!
//! A released record holds no address; it remembers which address the Service of that name had. `version` and
//! `readers` work as in the records of volumes: a program that may use a record keeps the fields that it does not
//! know, and one that may not use it allocates none of the record's addresses.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::wanted::{Service, Wanted};
use crate::addresses;

/// Version of the record format that this program writes, and the newest that it can read.
const VERSION: u32 = 1;

/// Stage in the life of a load balancer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Stage {
    /// Its Service uses it.
    Kept,
    /// Its Service has released it; only its former addresses are remembered.
    Released,
}

/// Address that belongs to a load balancer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Held {
    /// IPv4 or IPv6 address, unique among the kept records.
    pub address: IpAddr,
    /// Name of the pool that it was taken from.
    pub pool: String,
}

/// Persistent state of a load balancer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    version: u32,
    /// First version whose programs may use the record; by default `version`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    readers: Option<u32>,
    /// Identifier, unique on this host.
    pub id: String,
    /// Cluster of the Service.
    pub cluster: String,
    /// Service that the load balancer is for.
    pub service: Service,
    /// Whether the load balancer is in use or released.
    pub stage: Stage,
    /// Addresses of its own, at most one of each family. Empty if it shares another's address, or uses DHCP.
    pub addresses: Vec<Held>,
    /// Configuration that is in force; `None` if there has never been one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub met: Option<Wanted>,
    /// Latest requested configuration, if it is not the one in force.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub asked: Option<Wanted>,
    /// Time of its release, in seconds since 1970.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub released: Option<u64>,
    /// Fields of a newer version, which are kept as they are.
    #[serde(flatten)]
    rest: Map<String, Value>,
}

/// Record that cannot be used.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Damaged {
    /// Reason why the record cannot be used.
    pub problem: String,
    /// Addresses that it holds; `None` if they cannot all be read.
    pub addresses: Option<Vec<IpAddr>>,
}

impl Record {
    /// Creates the record of a load balancer that has no address yet.
    pub fn new(id: String, cluster: String, service: Service) -> Self {
        Self {
            version: VERSION,
            readers: None,
            id,
            cluster,
            service,
            stage: Stage::Kept,
            addresses: Vec::new(),
            met: None,
            asked: None,
            released: None,
            rest: Map::new(),
        }
    }

    /// Serialises the record for its file.
    ///
    /// # Errors
    /// Never in practice: all fields can be written as JSON.
    pub fn encode(&self) -> serde_json::Result<Vec<u8>> {
        let mut bytes = serde_json::to_vec_pretty(self)?;
        bytes.push(b'\n');
        Ok(bytes)
    }

    /// Parses a record that was stored under the identifier `id`.
    ///
    /// # Errors
    /// A description of the damage, if it is not a record, has another identifier, or may only be used by newer
    /// programs.
    pub fn decode(id: &str, bytes: &[u8]) -> Result<Self, Damaged> {
        #[derive(Deserialize)]
        struct Form {
            version: u32,
            readers: Option<u32>,
        }

        let damaged = |problem: String| Damaged { problem, addresses: held(bytes) };
        let form: Form = serde_json::from_slice(bytes).map_err(|error| damaged(error.to_string()))?;
        let readers = form.readers.unwrap_or(form.version);
        if readers > VERSION {
            let version = form.version;
            return Err(damaged(format!(
                "it has version {version}, for programs that support version {readers}, but this one supports \
                 {VERSION}; run a newer guestlet-host"
            )));
        }
        let record: Self = serde_json::from_slice(bytes).map_err(|error| damaged(error.to_string()))?;
        if record.id != id {
            return Err(damaged(format!("it is the record of {}", record.id)));
        }
        Ok(record)
    }

    /// Reports whether its Service uses it, as opposed to having released it.
    pub fn is_kept(&self) -> bool {
        self.stage == Stage::Kept
    }
}

/// Reads only the addresses from a record that cannot be used otherwise. Returns `None` if some may be unreadable.
fn held(bytes: &[u8]) -> Option<Vec<IpAddr>> {
    let found: Value = serde_json::from_slice(bytes).ok()?;
    if found.get("stage").and_then(Value::as_str) == Some("released") {
        return Some(Vec::new());
    }
    let address = |one: &Value| addresses::parse(one.get("address")?.as_str()?).ok();
    found.get("addresses")?.as_array()?.iter().map(address).collect()
}

#[cfg(test)]
mod tests {
    use super::super::wanted::tests::request;
    use super::*;
    use proptest::prelude::*;

    fn record() -> Record {
        let (service, wanted) = Wanted::read(request("web", "u-1")).unwrap();
        let addresses = vec![Held { address: "192.0.2.7".parse().unwrap(), pool: "lan".into() }];
        Record { addresses, met: Some(wanted), ..Record::new("aa".into(), "dev".into(), service) }
    }

    #[test]
    fn records_stay_readable() {
        let kept = br#"{"version": 1, "id": "aa", "cluster": "dev",
            "service": {"namespace": "shop", "name": "web", "uid": "u-1"}, "stage": "kept",
            "addresses": [{"address": "192.0.2.7", "pool": "lan"}],
            "met": {"ipam": "pool", "network": "", "addresses": [], "families": ["ipv4"], "all_families": false,
              "ports": [{"name": "", "protocol": "tcp", "port": 80, "node_port": 30080}], "share": null,
              "announcing": "kube-vip", "check": null, "local": false, "local_port": 0, "backends": [], "sources": [],
              "affinity_seconds": 0}}"#;
        assert_eq!(Record::decode("aa", kept), Ok(record()));
        let text = String::from_utf8_lossy(kept);
        let address = Some(vec!["192.0.2.7".parse().unwrap()]);
        for (wrong, words, addresses) in [
            (text.replace(": 1,", ": 2,"), "it has version 2", address.clone()),
            (text.replace("cluster", "clusters"), "missing field `cluster`", address.clone()),
            (text.replace("\"aa\"", "\"bb\""), "it is the record of bb", address),
            (text.replace("192.0.2.7", "192.0.2.x"), "invalid IP address", None),
            (text.replace(": 1,", ": 2,").replace("kept", "released"), "it has version 2", Some(vec![])),
            (text[..80].to_owned(), "EOF", None),
        ] {
            let damaged = Record::decode("aa", wrong.as_bytes()).unwrap_err();
            assert!(damaged.problem.contains(words), "{damaged:?}");
            assert_eq!(damaged.addresses, addresses, "{words}");
        }
    }

    #[test]
    fn what_a_newer_program_keeps_survives() {
        let mut kept: Value = serde_json::from_slice(&record().encode().unwrap()).unwrap();
        kept["version"] = 7.into();
        kept["readers"] = 1.into();
        kept["class"] = "gold".into();
        let mut record = Record::decode("aa", &serde_json::to_vec(&kept).unwrap()).unwrap();
        record.asked = record.met.clone();
        kept["asked"] = kept["met"].clone();
        assert_eq!(serde_json::from_slice::<Value>(&record.encode().unwrap()).unwrap(), kept);
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(bytes: Vec<u8>) {
            let _ = Record::decode("aa", &bytes);
        }
    }
}
