//! Volumes that many guests have at once, by NFS.

use serde_json::{Value, json};

use crate::lab::{Lab, wait};
use crate::model::objects::{Kind, text};
use crate::model::pace::Step;
use crate::patience::until;

const HARVESTER: &str = "harvester-system";

async fn is_in(lab: &Lab, volume: &str, state: &str) -> Value {
    until(&format!("{volume} is {state}"), async || {
        let share = lab.api.get(&Kind::Share.path(&format!("{HARVESTER}/{volume}"))).await?;
        (share["status"]["state"] == state).then(|| share["status"].clone())
    })
    .await
}

#[test]
fn a_share_has_an_endpoint_while_it_is_enabled() {
    wait(async {
        let lab = Lab::start().await;
        lab.claim("data", 8).await;
        let claim = until("the claim is bound", async || {
            let claim = lab.api.get(&Kind::Claim.path("default/data")).await?;
            (claim["status"]["phase"] == "Bound").then_some(claim)
        })
        .await;
        let volume = text(&claim["spec"]["volumeName"]);
        lab.api.ensure("/api/v1/namespaces", &json!({ "metadata": { "name": HARVESTER } })).await;
        let share = json!({
            "apiVersion": "harvesterhci.io/v1beta1",
            "kind": "NetworkFilesystem",
            "metadata": { "name": volume },
            "spec": { "networkFSName": volume, "desiredState": "Disabled" },
        });
        lab.api.create(&Kind::Share.within(HARVESTER), &share).await;
        is_in(&lab, volume, "Disabled").await;

        let path = Kind::Share.path(&format!("{HARVESTER}/{volume}"));
        let want = async |state: &str| {
            lab.api.patch(&path, &json!({ "spec": { "desiredState": state } })).await.unwrap();
        };
        lab.model.hold(Step::Share, "data");
        want("Enabled").await;
        assert_eq!(is_in(&lab, volume, "Enabling").await["status"], "NotReady");
        lab.model.release(Step::Share, "data");
        let status = is_in(&lab, volume, "Enabled").await;
        assert_eq!((&status["status"], &status["type"]), (&json!("Ready"), &json!("NFS")));
        assert!(!text(&status["endpoint"]).is_empty());

        lab.model.move_share(&format!("{HARVESTER}/{volume}"), None).await;
        assert_eq!(is_in(&lab, volume, "Enabled").await["status"], "Reconciling");
        lab.model.move_share(&format!("{HARVESTER}/{volume}"), Some("192.0.2.20")).await;
        assert_eq!(is_in(&lab, volume, "Enabled").await["endpoint"], "192.0.2.20");

        want("Disabled").await;
        assert_eq!(is_in(&lab, volume, "Disabled").await["endpoint"], "");
    });
}
