//! Which claims of Harvester's are volumes: those that are given to guestlet, with any name that a claim may have.

use std::time::Duration;

use guestlet::host::backends::kubevirt::hotplug::Patience;
use guestlet::host::backends::volumes::{VolumeError, Volumes as _};
use serde_json::json;

use super::{CLAIM, SIZE, id, started};
use crate::claims::{LET_GO, domains, place, plug, quick, volumes, volumes_with, willing};
use crate::lab::{Lab, NAMESPACE, wait};
use crate::model::objects::Kind;
use crate::patience::until;

#[test]
fn only_what_is_given_and_labelled_with_its_cluster_is_a_volume_of_that_cluster() {
    wait(async {
        let lab = Lab::start().await;
        lab.running("web").await;
        let (volumes, web) = (volumes(&lab).await, place(&lab, "web").await);
        lab.harvester_claim("given-to-nobody", 16, "shop").await;
        lab.claim("missed", 16).await;
        lab.claim("of-nobody", 16).await;
        lab.give("of-nobody").await;
        lab.harvester_claim("was-ours", 16, "shop").await;
        let published = json!({ "metadata": { "annotations": { "guestlet.io/published": "{}" } } });
        lab.api.patch(&Kind::Claim.path("default/was-ours"), &published).await.unwrap();
        let files = json!({
            "metadata": { "name": "files", "labels": {
                "guestcluster.harvesterhci.io/name": "shop", "app.kubernetes.io/managed-by": "guestlet",
            } },
            "spec": {
                "accessModes": ["ReadWriteMany"], "volumeMode": "Filesystem",
                "resources": { "requests": { "storage": "16Mi" } },
            },
        });
        lab.api.create(&Kind::Claim.within(NAMESPACE), &files).await;
        for (claim, owner, words) in [
            (
                "given-to-nobody",
                "default/shop",
                "label persistentvolumeclaim given-to-nobody app.kubernetes.io/managed-by=",
            ),
            ("of-nobody", "", "lacks the label guestcluster.harvesterhci.io/name"),
            (
                "missed",
                "",
                "label persistentvolumeclaim missed app.kubernetes.io/managed-by=guestlet guestcluster.",
            ),
            ("was-ours", "default/shop", "is not assigned to guestlet"),
            ("files", "default/shop", "a share made by Harvester's driver"),
        ] {
            let id = id(claim);
            let answers = [
                volumes.get(&id).await.map(drop),
                volumes.holder(&id).await.map(drop),
                plug(&volumes, &id, &web).await.map(drop),
                volumes.unplug(&id, &web.vm, LET_GO, willing()).await,
                volumes.grow(&id, 2 * SIZE, None).await.map(drop),
                volumes.remove(&id).await,
            ];
            for answer in answers {
                match answer {
                    Err(VolumeError::NotGiven { cluster, words: told }) => {
                        assert_eq!(cluster, owner, "{claim}");
                        assert!(told.contains(words), "{told}");
                    }
                    other => panic!("{claim}: {other:?}"),
                }
            }
            assert!(lab.api.get(&Kind::Claim.path(&format!("default/{claim}"))).await.is_some());
        }
        assert_eq!(volumes.list(None).await.unwrap(), []);
        for (id, is_possible) in
            [("default.x", true), ("other.x", false), ("shop.x", false), ("no claim", true)]
        {
            assert_eq!(volumes.may_be_of(id, "default/shop"), is_possible, "{id}");
        }
    });
}

/// Who makes a claim of the same name while the one before is going does not lose it.
#[test]
fn a_claim_that_comes_after_one_that_is_removed_stays() {
    wait(async {
        let (lab, volumes) = started(&[]).await;
        let (id, path) = (id(CLAIM), Kind::Claim.path(&format!("{NAMESPACE}/{CLAIM}")));
        let before = lab.api.get(&path).await.unwrap();
        let held = json!({ "metadata": { "finalizers": ["example.com/held"] } });
        lab.api.patch(&path, &held).await.unwrap();
        // Between two looks of who removes it.
        let patience = Patience { poll: Duration::from_secs(3), ..quick() };
        let slow = volumes_with(&lab, patience).await;
        let successor = async {
            until("it is deleted", async || {
                let claim = lab.api.get(&path).await.unwrap();
                (!claim["metadata"]["deletionTimestamp"].is_null()).then_some(())
            })
            .await;
            lab.api.patch(&path, &json!({ "metadata": { "finalizers": null } })).await;
            until("it is gone", async || lab.api.get(&path).await.is_none().then_some(())).await;
            lab.harvester_claim(CLAIM, SIZE >> 20, "shop").await;
            lab.give(CLAIM).await;
        };
        let (removed, ()) = tokio::join!(slow.remove(&id), successor);
        removed.unwrap();
        let now = lab.api.get(&path).await.unwrap();
        assert_ne!(now["metadata"]["uid"], before["metadata"]["uid"]);
        assert!(now["metadata"]["deletionTimestamp"].is_null());
        drop(volumes);
    });
}

/// A name of any length that a claim may have; the identifier of one is too long for CSI, and not for people.
#[test]
fn a_claim_with_the_longest_name_is_plugged_in_guestlets_own_way() {
    wait(async {
        let (lab, volumes) = started(&["web"]).await;
        let web = place(&lab, "web").await;
        let name = format!("{}.{}", "a".repeat(63), ["b"; 95].join("."));
        assert_eq!(name.len(), 253);
        lab.harvester_claim(&name, 16, "shop").await;
        lab.give(&name).await;
        let long = id(&name);
        assert_eq!(volumes.handle(&long), long, "without its namespace it would be read as another one's");
        let serial = plug(&volumes, &long, &web).await.unwrap();
        assert_eq!(serial.len(), 36);
        assert_eq!(domains(&lab, &long), [web.vm.as_str()]);
        volumes.unplug(&long, &web.vm, LET_GO, willing()).await.unwrap();
        volumes.remove(&long).await.unwrap();
    });
}
