//! Parses QEMU's reports of failed disk requests. Pure.

use serde::Deserialize;
use serde_json::Value;

use crate::wire::proto::v1::IoOperation;

/// Disk request that failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failed {
    /// Name of the block node, or of the drive if the node has no name.
    pub node: String,
    /// Operation that failed.
    pub operation: IoOperation,
    /// True if there was no space left.
    pub no_space: bool,
    /// True if the error has stopped the VM.
    pub stopped: bool,
    /// Error text of the host's kernel.
    pub reason: String,
}

/// Data of the event `BLOCK_IO_ERROR`.
#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Told {
    #[serde(default)]
    device: String,
    #[serde(default)]
    node_name: String,
    operation: String,
    action: String,
    #[serde(default)]
    nospace: bool,
    #[serde(default)]
    reason: String,
}

impl Failed {
    /// Parses the event; `None` if the error is ignored, as the VM's settings may require.
    pub fn of_event(data: &Value) -> Option<Self> {
        let told = Told::deserialize(data).ok().filter(|told| told.action != "ignore")?;
        Some(Self {
            node: if told.node_name.is_empty() { told.device } else { told.node_name },
            operation: match told.operation.as_str() {
                "read" => IoOperation::Read,
                "write" => IoOperation::Write,
                _ => IoOperation::Unspecified,
            },
            no_space: told.nospace,
            stopped: told.action == "stop",
            reason: told.reason,
        })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn failed(node: &str, action: &str) -> Failed {
        let told = json!({
            "device": "", "node-name": node, "operation": "write", "action": action, "nospace": true,
            "reason": "No space left on device", "qom-path": "/machine/x",
        });
        Failed::of_event(&told).unwrap()
    }

    #[test]
    fn what_the_event_says() {
        let found = failed("guestlet-1", "stop");
        assert_eq!((found.operation, found.no_space, found.stopped), (IoOperation::Write, true, true));
        assert!(!failed("a", "report").stopped);
        let old = json!({"device": "drive0", "operation": "read", "action": "report"});
        let old = Failed::of_event(&old).unwrap();
        assert_eq!((old.node.as_str(), old.operation, old.no_space), ("drive0", IoOperation::Read, false));
        for other in [json!({"operation": "read", "action": "ignore"}), json!({}), json!(null)] {
            assert_eq!(Failed::of_event(&other), None, "{other}");
        }
    }
}
