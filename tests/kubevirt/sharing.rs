//! Shares as the host half has Harvester serve them: what the API has of them, at every step.

use std::sync::Arc;
use std::time::Duration;

use guestlet::host::backends::kubevirt::hotplug::Patience;
use guestlet::host::backends::kubevirt::volumes::Claims;
use guestlet::host::backends::volumes::{
    Holder, NewVolume, Sharer, Shares as _, Volume, VolumeError, Volumes as _,
};
use serde_json::{Value, json};

use crate::claims::{claim_of, new, place, plug, quick, volumes_with};
use crate::lab::{Lab, NAMESPACE, NEVER, SHARED, wait};
use crate::model::objects::{Kind, text};
use crate::model::pace::Step;
use crate::patience::until;
use crate::pool::add_kind;

const HARVESTER: &str = "harvester-system";
const MANIFESTS: &str =
    include_str!("../../packaging/kubernetes/host/overlays/harvester/controller-shares-role.yaml");
const ROLES: &str = "/apis/rbac.authorization.k8s.io/v1/namespaces/harvester-system/roles";
const BINDINGS: &str = "/apis/rbac.authorization.k8s.io/v1/namespaces/harvester-system/rolebindings";
const CRD: &str =
    "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/networkfilesystems.harvesterhci.io";

fn documents() -> Vec<Value> {
    serde_saphyr::from_multiple(MANIFESTS).unwrap()
}

/// The host half's volumes, as a controller has them on Harvester.
async fn volumes(lab: &Lab) -> Arc<Claims> {
    volumes_for(lab, quick()).await
}

async fn volumes_for(lab: &Lab, patience: Patience) -> Arc<Claims> {
    lab.api.ensure("/api/v1/namespaces", &json!({ "metadata": { "name": HARVESTER } })).await;
    for document in documents() {
        let path = if document["kind"] == "Role" { ROLES } else { BINDINGS };
        lab.api.ensure(path, &document).await;
    }
    volumes_with(lab, patience).await
}

async fn make(volumes: &Claims, name: &str) -> Volume {
    volumes.create(NewVolume { is_share: true, ..new(SHARED, name) }).await.unwrap()
}

fn sharer(vm: &str) -> Sharer {
    Sharer {
        uuid: format!("uuid-{vm}"),
        vm: format!("{NAMESPACE}/{vm}"),
        node: vm.to_owned(),
        read_only: false,
    }
}

async fn claim(lab: &Lab, name: &str) -> Option<Value> {
    lab.api.get(&Kind::Claim.path(&format!("{NAMESPACE}/{}", claim_of(name)))).await
}

/// The object that serves a claim, if there is one.
async fn object(lab: &Lab, name: &str) -> Option<Value> {
    let claim = claim(lab, name).await?;
    lab.api.get(&Kind::Share.path(&format!("{HARVESTER}/{}", text(&claim["spec"]["volumeName"])))).await
}

async fn is_in(lab: &Lab, name: &str, state: &str) -> Value {
    until(&format!("{name} is {state}"), async || {
        object(lab, name).await.filter(|object| object["status"]["state"] == state)
    })
    .await
}

#[test]
fn a_share_is_served_while_a_node_may_mount_it() {
    wait(async {
        let lab = Lab::start().await;
        let volumes = volumes(&lab).await;
        volumes.check().await.unwrap();
        let made = make(&volumes, "data").await;
        assert_eq!(made.sharers, Some(Vec::new()));
        let first = volumes.share(&made.id, sharer("one")).await.unwrap();
        let serving = is_in(&lab, "data", "Enabled").await;
        assert_eq!(first.server, text(&serving["status"]["endpoint"]));
        assert_eq!(first.path, format!("/{}", text(&serving["metadata"]["name"])));
        assert_eq!(serving["metadata"]["finalizers"], Value::Null, "none of ours");
        let bound = claim(&lab, "data").await.unwrap();
        assert_eq!(bound["spec"]["volumeMode"], "Filesystem");
        assert_eq!(bound["spec"]["accessModes"], json!(["ReadWriteMany"]));
        assert_eq!(bound["metadata"]["finalizers"], json!(["kubernetes.io/pvc-protection"]));

        assert_eq!(volumes.find(&made.id).await.unwrap(), first);
        assert_eq!(volumes.share(&made.id, sharer("two")).await.unwrap(), first);
        assert_eq!(volumes.share(&made.id, sharer("two")).await.unwrap(), first, "once more is the same");
        let known = volumes.get(&made.id).await.unwrap().unwrap();
        assert_eq!(known.sharers, Some(vec![sharer("one"), sharer("two")]));
        assert_eq!((known.published, volumes.holder(&made.id).await.unwrap()), (None, Holder::Off));
        lab.running("web").await;
        let plugged = plug(&volumes, &made.id, &place(&lab, "web").await).await.unwrap_err();
        assert!(plugged.to_string().contains("is a share"), "{plugged}");

        volumes.unshare(&made.id, Some("uuid-one")).await.unwrap();
        assert_eq!(object(&lab, "data").await.unwrap()["spec"]["desiredState"], "Enabled");
        let refused = volumes.remove(&made.id).await.unwrap_err();
        assert!(matches!(&refused, VolumeError::InUse(why) if why.contains("default/two")), "{refused}");
        for _ in 0..2 {
            volumes.unshare(&made.id, Some("uuid-two")).await.unwrap();
        }
        is_in(&lab, "data", "Disabled").await;
        let name = text(&bound["spec"]["volumeName"]);
        volumes.remove(&made.id).await.unwrap();
        assert_eq!(claim(&lab, "data").await, None);
        assert_eq!(lab.api.get(&Kind::Share.path(&format!("{HARVESTER}/{name}"))).await, None);
    });
}

/// Harvester's networkfs-manager waits for ever for one that is wanted again while it ends.
#[test]
fn a_share_that_is_wanted_again_while_it_ends_is_served_when_it_has_ended() {
    wait(async {
        let lab = Lab::start().await;
        let volumes = volumes(&lab).await;
        let made = make(&volumes, "data").await;
        volumes.share(&made.id, sharer("one")).await.unwrap();
        lab.model.hold(Step::Unshare, &claim_of("data"));
        volumes.unshare(&made.id, None).await.unwrap();
        lab.model.reaches(Step::Unshare, &claim_of("data")).await;
        let late = volumes.share(&made.id, sharer("two")).await.unwrap_err();
        assert!(matches!(late, VolumeError::Waiting { .. }), "{late}");
        assert!(late.to_string().contains("is wanted Disabled, and is Disabling"), "{late}");
        lab.model.release(Step::Unshare, &claim_of("data"));
        volumes.share(&made.id, sharer("two")).await.unwrap();

        // Somebody has done it by hand.
        lab.model.hold(Step::Unshare, &claim_of("data"));
        volumes.unshare(&made.id, None).await.unwrap();
        lab.model.reaches(Step::Unshare, &claim_of("data")).await;
        let name = text(&object(&lab, "data").await.unwrap()["metadata"]["name"]).to_owned();
        let path = Kind::Share.path(&format!("{HARVESTER}/{name}"));
        lab.api.patch(&path, &json!({ "spec": { "desiredState": "Enabled" } })).await.unwrap();
        lab.model.release(Step::Unshare, &claim_of("data"));
        volumes.share(&made.id, sharer("three")).await.unwrap();
    });
}

/// networkfs-manager takes away by what the server's volume is attached, and says that it does so after that.
#[test]
fn a_share_is_not_wanted_again_before_its_end_has_been_said() {
    wait(async {
        let lab = Lab::start().await;
        let patience = Patience { settle: Duration::from_secs(1), ..quick() };
        let volumes = volumes_for(&lab, patience).await;
        let made = make(&volumes, "data").await;
        lab.running("web").await;
        let web = sharer_of(&lab, "web").await;
        until("it is served", async || volumes.share(&made.id, sharer("one")).await.ok()).await;
        lab.model.hold(Step::Untie, &claim_of("data"));
        volumes.unshare(&made.id, None).await.unwrap();
        lab.model.reaches(Step::Untie, &claim_of("data")).await;
        let late = volumes.share(&made.id, web.clone()).await.unwrap_err();
        assert!(late.to_string().contains("is wanted Disabled, and is Enabled"), "{late}");
        assert!(volumes.find(&made.id).await.is_err(), "it is on its way out");
        lab.model.release(Step::Untie, &claim_of("data"));
        until("it is served again", async || volumes.share(&made.id, web.clone()).await.ok()).await;

        // Somebody has done it by hand, and it waits for ever.
        lab.model.hold(Step::Untie, &claim_of("data"));
        let name = text(&object(&lab, "data").await.unwrap()["metadata"]["name"]).to_owned();
        let path = Kind::Share.path(&format!("{HARVESTER}/{name}"));
        lab.api.patch(&path, &json!({ "spec": { "desiredState": "Disabled" } })).await.unwrap();
        lab.model.reaches(Step::Untie, &claim_of("data")).await;
        lab.api.patch(&path, &json!({ "spec": { "desiredState": "Enabled" } })).await.unwrap();
        is_in(&lab, "data", "Enabling").await;
        lab.model.release(Step::Untie, &claim_of("data"));
        volumes.share(&made.id, web.clone()).await.unwrap_err();
        until("it is freed", async || {
            volumes.repair().await.unwrap();
            volumes.find(&made.id).await.ok()
        })
        .await;
    });
}

#[test]
fn one_share_that_is_wrong_keeps_no_other_from_being_put_right() {
    wait(async {
        let lab = Lab::start().await;
        let volumes = volumes(&lab).await;
        let names = ["bad", "gone", "label", "vm"];
        let mut ids = Vec::new();
        lab.running("web").await;
        for name in names {
            let made = make(&volumes, name).await;
            volumes.share(&made.id, sharer_of(&lab, "web").await).await.unwrap();
            ids.push(made.id);
        }
        let path = |name: &str| Kind::Claim.path(&format!("{NAMESPACE}/{}", claim_of(name)));
        let annotation =
            |text: Value| json!({ "metadata": { "annotations": { "guestlet.io/shared-with": text } } });
        lab.api.patch(&path("bad"), &annotation(json!("{"))).await.unwrap();
        let name = text(&object(&lab, "gone").await.unwrap()["metadata"]["name"]).to_owned();
        lab.api.delete(&Kind::Share.path(&format!("{HARVESTER}/{name}"))).await;
        let label = json!({ "metadata": { "labels": { "app.kubernetes.io/managed-by": null } } });
        lab.api.patch(&path("label"), &label).await.unwrap();
        // A VM that is gone, and one of the same name.
        volumes.share(&ids[3], sharer("nobody")).await.unwrap();
        volumes.share(&ids[3], Sharer { uuid: "other".into(), ..sharer("web") }).await.unwrap();
        let next = volumes_with(&lab, quick()).await;
        until("what was deleted is served, and who is gone is forgotten", async || {
            next.repair().await.unwrap();
            next.find(&ids[1]).await.ok()?;
            let sharers = next.get(&ids[3]).await.unwrap()?.sharers?;
            (sharers == [sharer_of(&lab, "web").await]).then_some(())
        })
        .await;
        for name in ["bad", "label", "vm"] {
            assert_eq!(
                object(&lab, name).await.unwrap()["spec"]["desiredState"],
                "Enabled",
                "{name} is in use"
            );
        }
    });
}

/// As the fleet knows a VM.
async fn sharer_of(lab: &Lab, vm: &str) -> Sharer {
    let machine = lab.api.get(&Kind::Vm.path(&format!("{NAMESPACE}/{vm}"))).await.unwrap();
    Sharer { uuid: text(&machine["metadata"]["uid"]).to_owned(), ..sharer(vm) }
}

#[test]
fn a_share_that_nobody_has_grows_when_it_is_served() {
    wait(async {
        let lab = Lab::start().await;
        let volumes = volumes(&lab).await;
        let made = make(&volumes, "data").await;
        let is_bound = async || (claim(&lab, "data").await?["status"]["phase"] == "Bound").then_some(());
        until("the claim is bound", is_bound).await;
        lab.model.hold(Step::Expand, &claim_of("data"));
        let size = made.size + (1 << 30);
        assert_eq!(volumes.grow(&made.id, size, None).await.unwrap(), size);
        let wanted = claim(&lab, "data").await.unwrap()["spec"]["resources"]["requests"]["storage"].clone();
        assert_eq!(wanted, json!(size.to_string()));
    });
}

/// An API server looks at rights before it looks for kinds: where there is no such kind, nobody has a right to it.
#[test]
fn without_the_role_for_shares_a_share_is_refused_in_words() {
    wait(async {
        let lab = Lab::start().await;
        let volumes = volumes(&lab).await;
        volumes.check().await.unwrap();
        lab.api.delete(&format!("{ROLES}/guestlet-controller-shares")).await;
        let refused = until("the right is gone", async || volumes.check().await.err()).await;
        assert!(matches!(refused, VolumeError::Refused(_)), "{refused}");
        assert!(refused.to_string().contains("or the controller lacks the permission for it"), "{refused}");
        volumes.repair().await.unwrap();
    });
}

#[test]
fn whoever_comes_after_one_that_ended_finds_what_it_was_at() {
    wait(async {
        let lab = Lab::start().await;
        let first = volumes(&lab).await;
        let made = make(&first, "data").await;
        let claim = claim_of("data");
        lab.model.hold(Step::Share, &claim);
        {
            let sharing = first.share(&made.id, sharer("one"));
            tokio::select! {
                outcome = sharing => panic!("{outcome:?}"),
                () = lab.model.reaches(Step::Share, &claim) => {}
            }
        }
        drop(first);
        let second = volumes(&lab).await;
        assert_eq!(second.list(None).await.unwrap()[0].sharers, Some(vec![sharer("one")]));
        lab.model.release(Step::Share, &claim);
        second.share(&made.id, sharer("one")).await.unwrap();

        // It ended between the claim and the object.
        let path = Kind::Claim.path(&format!("{NAMESPACE}/{}", claim_of("data")));
        let nobody = json!({ "metadata": { "annotations": { "guestlet.io/shared-with": null } } });
        lab.api.patch(&path, &nobody).await.unwrap();
        second.repair().await.unwrap();
        is_in(&lab, "data", "Disabled").await;
        // Somebody ends a share that nodes have.
        second.share(&made.id, sharer("one")).await.unwrap();
        let name = text(&object(&lab, "data").await.unwrap()["metadata"]["name"]).to_owned();
        let share = Kind::Share.path(&format!("{HARVESTER}/{name}"));
        lab.api.patch(&share, &json!({ "spec": { "desiredState": "Disabled" } })).await.unwrap();
        is_in(&lab, "data", "Disabled").await;
        second.repair().await.unwrap();
        is_in(&lab, "data", "Enabled").await;

        // Somebody deletes the claim, and what served it is nobody's.
        lab.api.delete(&path).await;
        drop(second);
        let third = volumes(&lab).await;
        until("what served it is gone", async || {
            third.repair().await.unwrap();
            lab.api.get(&share).await.is_none().then_some(())
        })
        .await;
    });
}

#[test]
fn a_share_that_is_not_served_says_how_far_it_is() {
    wait(async {
        let lab = Lab::start().await;
        let volumes = volumes(&lab).await;
        let never = volumes.create(NewVolume { is_share: true, ..new(NEVER, "never") }).await.unwrap();
        let error = volumes.share(&never.id, sharer("one")).await.unwrap_err();
        assert!(error.to_string().contains("has not bound the volume's claim"), "{error}");
        let made = make(&volumes, "data").await;
        lab.model.hold(Step::Share, &claim_of("data"));
        let error = volumes.share(&made.id, sharer("one")).await.unwrap_err();
        assert!(matches!(error, VolumeError::Waiting { .. }), "{error}");
        assert!(error.to_string().contains("is wanted Enabled, and is Enabling, NotReady"), "{error}");
        lab.model.release(Step::Share, &claim_of("data"));
        let export = volumes.share(&made.id, sharer("one")).await.unwrap();

        // Its server moves; whoever asks next is told where it is.
        let key = format!("{HARVESTER}{}", export.path);
        lab.model.move_share(&key, None).await;
        let error = volumes.share(&made.id, sharer("one")).await.unwrap_err();
        assert!(error.to_string().contains("Reconciling"), "{error}");
        lab.model.move_share(&key, Some("192.0.2.20")).await;
        assert_eq!(volumes.share(&made.id, sharer("one")).await.unwrap().server, "192.0.2.20");
    });
}

/// Two at once, as when a leader does not know yet that it is none any more: a share that is handed out is served.
#[test]
fn who_ends_a_share_and_who_serves_it_agree() {
    wait(async {
        let lab = Lab::start().await;
        lab.model.speed(Duration::from_millis(5));
        let (old, new) = tokio::join!(volumes(&lab), volumes(&lab));
        let made = make(&old, "data").await;
        for round in 0..20 {
            old.share(&made.id, sharer("one")).await.unwrap();
            let ending = async {
                tokio::time::sleep(Duration::from_millis(round)).await;
                until("it is ended", async || old.unshare(&made.id, Some("uuid-one")).await.ok()).await;
            };
            let serving = until("it is served", async || new.share(&made.id, sharer("two")).await.ok());
            tokio::join!(ending, serving);
            let object = object(&lab, "data").await.unwrap();
            assert_eq!(object["spec"]["desiredState"], "Enabled", "in round {round}: {object}");
            new.unshare(&made.id, Some("uuid-two")).await.unwrap();
        }
    });
}

#[test]
fn where_there_is_no_such_kind_a_share_is_refused_in_words() {
    wait(async {
        let lab = Lab::start().await;
        let volumes = volumes(&lab).await;
        let there = lab.api.get(CRD).await.unwrap();
        lab.api.delete(CRD).await;
        let refused = until("the kind is gone", async || volumes.check().await.err()).await;
        assert!(matches!(refused, VolumeError::Refused(_)), "{refused}");
        let words = "it has no NetworkFilesystem (harvesterhci.io/v1beta1)";
        assert!(refused.to_string().contains(words), "{refused}");
        // Nothing is asked for where there never was one.
        volumes.repair().await.unwrap();
        until("the kind is gone for good", async || lab.api.get(CRD).await.is_none().then_some(())).await;
        add_kind(&lab.api, include_str!("crds/networkfilesystems.yaml")).await;
        assert_eq!(text(&there["spec"]["names"]["kind"]), "NetworkFilesystem");
    });
}

/// All that the role is for, once; what did not work.
async fn all(lab: &Lab, volumes: &Claims, name: &str) -> Result<(), String> {
    let said = |what: &str, error: &dyn std::fmt::Display| format!("{what}: {error}");
    volumes.check().await.map_err(|error| said("check", &error))?;
    let made = make(volumes, name).await;
    volumes.share(&made.id, sharer("one")).await.map_err(|error| said("share", &error))?;
    volumes.unshare(&made.id, None).await.map_err(|error| said("unshare", &error))?;
    is_in(lab, name, "Disabled").await;
    volumes.remove(&made.id).await.map_err(|error| said("remove", &error))
}

#[test]
fn no_verb_of_the_role_for_shares_is_there_for_nothing() {
    wait(async {
        let lab = Lab::start().await;
        lab.model.speed(Duration::from_millis(10));
        let settle = Duration::from_secs(2);
        let volumes = volumes_for(&lab, Patience { settle, ..quick() }).await;
        all(&lab, &volumes, "whole").await.unwrap();
        let whole = documents().into_iter().find(|one| one["kind"] == "Role").unwrap();
        let verbs = whole["rules"][0]["verbs"].as_array().unwrap().clone();
        assert_eq!(whole["rules"].as_array().unwrap().len(), 1);
        for verb in verbs {
            let mut left = whole.clone();
            left["rules"][0]["verbs"].as_array_mut().unwrap().retain(|one| *one != verb);
            set(&lab, &left).await;
            let mut tries = 0;
            // The API server knows it a moment later.
            until(&format!("{verb} is missed"), async || {
                tries += 1;
                let name = format!("without-{}-{tries}", text(&verb));
                let outcome = tokio::time::timeout(Duration::from_secs(8), all(&lab, &volumes, &name)).await;
                outcome.map_or(true, |outcome| outcome.is_err()).then_some(())
            })
            .await;
            set(&lab, &whole).await;
        }
    });
}

async fn set(lab: &Lab, role: &Value) {
    let path = format!("{ROLES}/guestlet-controller-shares");
    until("the role is another one", async || {
        let mut new = role.clone();
        new["metadata"] = lab.api.get(&path).await?["metadata"].clone();
        lab.api.replace(&path, &new).await
    })
    .await;
}
