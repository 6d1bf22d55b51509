//! Harvester's shares: volumes that many guests have at once, by NFS.
//!
//! ```text
//! Disabled ─▶ Enabling ─▶ Enabled (with an endpoint) ─▶ Disabling ─▶ Disabled
//! ```
//! As in networkfs-manager, the tickets by which the volume is attached for its server go first, and the state is written after
//! that. They come back at `Disabled` only: one that is wanted again in between waits for its server for ever.

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
        let id = uid(&share).to_owned();
        let is_untied = self.untied.contains(&id);
        let none = |state: &str, status: &str| json!({ "endpoint": "", "state": state, "status": status, "type": "NFS" });
        let status = match (text(&share["status"]["state"]), is_wanted) {
            ("", _) => none("Disabled", "Unknown"),
            ("Disabled", true) => {
                self.untied.remove(&id);
                none("Enabling", "NotReady")
            }
            // Nothing attaches it, and so its server ends.
            ("Enabled", true) if is_untied => none("Enabling", "NotReady"),
            ("Enabling", true) if is_untied => return Ok(()),
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
                self.untied.insert(id.clone());
                if !self.may(Step::Untie, &claim, &format!("{id}-untie")) {
                    return Ok(());
                }
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
