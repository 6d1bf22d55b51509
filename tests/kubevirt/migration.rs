//! VMs that are moved to another host while they run.

use serde_json::json;

use crate::lab::{HOSTS, Lab, SHARED, wait};
use crate::model::objects::{Kind, items, name, named, text, uid};
use crate::model::pace::Step;
use crate::patience::until;

/// Waits until a migration is in this phase.
async fn is_in(lab: &Lab, migration: &str, phase: &str) {
    until(&format!("the migration is {phase}"), async || {
        let migration = lab.api.get(&Kind::Migration.path(&format!("default/{migration}"))).await?;
        (migration["status"]["phase"] == phase).then_some(())
    })
    .await;
}

/// A lab with a VM that has a volume.
async fn lab() -> Lab {
    let lab = Lab::start().await;
    lab.claim("data", 8).await;
    lab.running("web").await;
    lab.plug("web", "data").await;
    lab.is_in("web", "data", "Ready").await;
    lab
}

/// The hosts from which and to which a VM can go.
async fn hosts(lab: &Lab) -> (String, &'static str) {
    let instance = lab.instance("web").await.unwrap();
    let from = text(&instance["status"]["nodeName"]).to_owned();
    let to = HOSTS.into_iter().find(|host| *host != from).unwrap();
    (from, to)
}

#[test]
fn a_vm_moves_with_its_volumes() {
    wait(async {
        let lab = lab().await;
        let (from, to) = hosts(&lab).await;
        lab.model.hold(Step::HandOver, "web");
        let migration = lab.model.migrate("default", "web", to).await;
        lab.model.reaches(Step::HandOver, "web").await;
        let instance = lab.instance("web").await.unwrap();
        let (labels, state) = (&instance["metadata"]["labels"], &instance["status"]["migrationState"]);
        assert_eq!(
            (&labels["kubevirt.io/nodeName"], &instance["status"]["nodeName"]),
            (&json!(from), &json!(from))
        );
        assert_eq!(labels["kubevirt.io/migrationTargetNodeName"], to);
        assert_eq!((&state["sourceNode"], &state["targetNode"]), (&json!(from), &json!(to)));
        assert_eq!(instance["status"]["activePods"].as_object().unwrap().len(), 2);
        let attachers = lab.attachers().await;
        let target = attachers.iter().find(|pod| pod["spec"]["nodeName"] == to).unwrap();
        assert_eq!(state["targetAttachmentPodUID"], uid(target));
        let mut attached = lab.attached("data").await;
        attached.sort();
        assert_eq!(attached, HOSTS);
        // What is asked for meanwhile is not plugged before it has moved.
        lab.claim("more", 8).await;
        lab.plug("web", "more").await;
        lab.is_in("web", "more", "MountedToPod").await;

        lab.model.release(Step::HandOver, "web");
        is_in(&lab, &migration, "Succeeded").await;
        let instance = lab.instance("web").await.unwrap();
        assert_eq!(instance["metadata"]["labels"]["kubevirt.io/nodeName"], to);
        assert!(instance["metadata"]["labels"]["kubevirt.io/migrationTargetNodeName"].is_null());
        assert_eq!(instance["status"]["nodeName"], to);
        assert_eq!(instance["status"]["migrationState"]["completed"], true);
        lab.is_in("web", "more", "Ready").await;
        until("only the target has the volume", async || (lab.attached("data").await == [to]).then_some(()))
            .await;
        let journal = lab.model.journal();
        assert_eq!(journal.held.len(), 2);
        assert!(journal.conflicts().is_empty());
    });
}

#[test]
fn a_migration_that_fails_leaves_the_vm_where_it_is() {
    wait(async {
        let lab = lab().await;
        let (from, to) = hosts(&lab).await;
        lab.model.fail(Step::HandOver, "web", "the memory changes too fast");
        let migration = lab.model.migrate("default", "web", to).await;
        is_in(&lab, &migration, "Failed").await;
        let instance = lab.instance("web").await.unwrap();
        assert_eq!(instance["status"]["nodeName"], from);
        let state = &instance["status"]["migrationState"];
        assert_eq!(
            (&state["failed"], &state["failureReason"]),
            (&json!(true), &json!("the memory changes too fast"))
        );
        until("the target has nothing", async || {
            (lab.attached("data").await == [from.as_str()]).then_some(())
        })
        .await;
        lab.model.succeed(Step::HandOver, "web");
        let migration = lab.model.migrate("default", "web", to).await;
        is_in(&lab, &migration, "Succeeded").await;
        assert_eq!(lab.instance("web").await.unwrap()["status"]["nodeName"], to);
    });
}

#[test]
fn a_vm_with_a_volume_for_one_node_cannot_move() {
    wait(async {
        let lab = lab().await;
        lab.claim_of(SHARED, "local", 8, "ReadWriteOnce").await;
        let movable = async || {
            let instance = lab.instance("web").await.unwrap();
            let conditions = &instance["status"]["conditions"];
            items(conditions).find(|it| it["type"] == "LiveMigratable").unwrap().clone()
        };
        assert_eq!(movable().await["status"], "True");
        lab.plug("web", "local").await;
        lab.is_in("web", "local", "Ready").await;
        let condition = movable().await;
        assert_eq!(
            (&condition["status"], &condition["reason"]),
            (&json!("False"), &json!("DisksNotLiveMigratable"))
        );
        let instance = lab.instance("web").await.unwrap();
        assert_eq!(name(&instance), "web");
        assert!(named(&instance["status"]["volumeStatus"], "local").is_some());
    });
}
