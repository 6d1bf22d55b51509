//! Harvester's shares: volumes that many guests have at once, by NFS.
//!
//! ```text
//! Disabled ─▶ Enabling ─▶ Enabled (with an endpoint) ─▶ Disabling ─▶ Disabled
//! ```

use serde_json::json;

use super::objects::{Kind, is_deleted, text, uid};
use super::pace::Step;
use super::storage::claim_named;
use super::world::{Done, World, now};

impl World {
    pub(super) async fn share(&mut self, key: &str) -> Done {
        let Some(share) = self.get(Kind::Share, key) else { return Ok(()) };
        if is_deleted(&share) {
            return Ok(());
        }
        let volume = text(&share["spec"]["networkFSName"]);
        let claim = self.objects.get(Kind::Volume, volume).map_or(volume, claim_named).to_owned();
        let is_wanted = share["spec"]["desiredState"] == "Enabled";
        let none = |state: &str, status: &str| json!({ "endpoint": "", "state": state, "status": status, "type": "NFS" });
        let status = match (text(&share["status"]["state"]), is_wanted) {
            ("", _) => none("Disabled", "Unknown"),
            ("Disabled", true) => none("Enabling", "NotReady"),
            ("Enabling", true) if self.may(Step::Share, &claim, &format!("{}-share", uid(&share))) => {
                let changed =
                    json!({ "type": "EndpointChanged", "status": "True", "lastTransitionTime": now() });
                json!({
                    "endpoint": super::SHARES,
                    "state": "Enabled",
                    "status": "Ready",
                    "type": "NFS",
                    "conditions": [changed],
                })
            }
            ("Enabled" | "Enabling", false) => {
                json!({ "state": "Disabling", "endpoint": share["status"]["endpoint"] })
            }
            // One that is wanted again in between stays as it is.
            ("Disabling", false) if self.may(Step::Unshare, &claim, &format!("{}-unshare", uid(&share))) => {
                none("Disabled", "NotReady")
            }
            _ => return Ok(()),
        };
        self.patch_status(Kind::Share, &share, &status).await.map(drop)
    }
}
