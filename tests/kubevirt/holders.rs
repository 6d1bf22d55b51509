//! Who holds a volume, where that cannot be told, and what it costs to find it out.

use std::sync::Arc;

use futures_util::StreamExt as _;
use guestlet::host::backends::volumes::{Holder, VolumeError, Volumes as _};
use http::Method;
use serde_json::json;
use tokio::task::JoinSet;

use crate::api::read;
use crate::claims::{LET_GO, claim_of, domains, make, new, place, plug, volumes, willing};
use crate::client::JSON;
use crate::lab::{Lab, NAMESPACE, SHARED, wait};
use crate::model::objects::Kind;

/// The label is all that its claim is found by among others, and people can take it off.
#[test]
fn a_claim_that_has_lost_what_it_is_known_by_is_not_taken_for_gone() {
    wait(async {
        let lab = Lab::start().await;
        lab.running("web").await;
        let (volumes, web) = (volumes(&lab).await, place(&lab, "web").await);
        let made = make(&volumes, "data").await;
        plug(&volumes, &made.id, &web).await.unwrap();
        let claim = Kind::Claim.path(&format!("{NAMESPACE}/{}", claim_of("data")));
        let take_off = async |part: &str, key: &str| {
            let before = lab.api.get(&claim).await.unwrap()["metadata"][part][key].clone();
            lab.api.patch(&claim, &json!({ "metadata": { part: { key: null } } })).await.unwrap();
            before
        };
        let lost = [
            ("labels", "app.kubernetes.io/managed-by", "the label app.kubernetes.io/managed-by=guestlet"),
            ("annotations", "guestlet.io/cluster", "the annotation guestlet.io/cluster"),
        ];
        for (part, key, words) in lost {
            let before = take_off(part, key).await;
            let answers = [
                volumes.get(&made.id).await.map(drop),
                volumes.remove(&made.id).await,
                volumes.unplug(&made.id, &web.vm, LET_GO, willing()).await,
                volumes.holder(&made.id).await.map(drop),
                volumes.create(new(SHARED, "data")).await.map(drop),
            ];
            for answer in answers {
                let error = answer.unwrap_err();
                assert!(matches!(error, VolumeError::Damaged(_)), "{error}");
                assert!(error.to_string().contains(words), "{error}");
            }
            assert_eq!(domains(&lab, &made.id), [web.vm.as_str()]);
            lab.api.patch(&claim, &json!({ "metadata": { part: { key: before } } })).await.unwrap();
        }
        volumes.unplug(&made.id, &web.vm, LET_GO, willing()).await.unwrap();
        volumes.remove(&made.id).await.unwrap();
    });
}

/// How often the API server has answered lists of a resource in single namespaces, or in all.
async fn lists_of(lab: &Lab, resource: &str, scope: &str) -> u64 {
    let answer = lab.api.open(Method::GET, "/metrics", String::new(), JSON).await.unwrap();
    let metrics = String::from_utf8(read(answer.body).await.unwrap()).unwrap();
    let is_meant = |line: &&str| {
        let has = |label: &str, value: &str| line.contains(&format!("{label}=\"{value}\""));
        line.starts_with("apiserver_request_total{")
            && has("verb", "LIST")
            && has("resource", resource)
            && has("scope", scope)
    };
    let count = |line: &str| line.rsplit(' ').next().unwrap().parse::<u64>().unwrap();
    metrics.lines().filter(is_meant).map(count).sum()
}

/// Fills the cluster with pods and VolumeAttachments that have nothing to do with guestlet.
async fn crowd(lab: &Lab, count: usize) {
    let making = (0..count).map(|number| async move {
        let volume =
            json!({ "name": "x", "persistentVolumeClaim": { "claimName": format!("other-{number}") } });
        let pod = json!({
            "metadata": { "name": format!("other-{number}"), "annotations": { "filler": "x".repeat(4096) } },
            "spec": {
                "nodeName": "elsewhere",
                "containers": [{ "name": "x", "image": "registry.test/x" }],
                "volumes": [volume],
            },
        });
        lab.api.create(&Kind::Pod.within(NAMESPACE), &pod).await;
        let attachment = json!({
            "metadata": { "name": format!("other-{number}") },
            "spec": {
                "attacher": "others.test",
                "nodeName": "elsewhere",
                "source": { "persistentVolumeName": format!("other-{number}") },
            },
        });
        lab.api.create(&Kind::Attachment.all(), &attachment).await;
    });
    futures_util::stream::iter(making).buffer_unordered(32).collect::<Vec<()>>().await;
}

#[test]
fn what_many_ask_at_once_is_read_once_for_all_page_by_page() {
    wait(async {
        let lab = Lab::start().await;
        lab.running("web").await;
        let (volumes, web) = (volumes(&lab).await, place(&lab, "web").await);
        let made = make(&volumes, "data").await;
        plug(&volumes, &made.id, &web).await.unwrap();
        crowd(&lab, 600).await;
        let count = async || {
            (lists_of(&lab, "pods", "namespace").await, lists_of(&lab, "volumeattachments", "cluster").await)
        };
        let before = count().await;
        let mut asking = JoinSet::new();
        for _ in 0..20 {
            let (volumes, id) = (Arc::clone(&volumes), made.id.clone());
            asking.spawn(async move { volumes.holder(&id).await.unwrap() });
        }
        for holder in asking.join_all().await {
            assert_eq!(holder, Holder::On(web.clone()));
        }
        let after = count().await;
        // Of three pages each. Who comes while one is read shares the next one; they do not come all at once.
        let most = 3 * 8;
        assert!(after.0 - before.0 <= most && after.1 - before.1 <= most, "{before:?} {after:?}");

        // What uses it is found on the last page as well.
        volumes.unplug(&made.id, &web.vm, LET_GO, willing()).await.unwrap();
        let claim = claim_of("data");
        let user = json!({
            "metadata": { "name": "zz-user" },
            "spec": {
                "containers": [{ "name": "x", "image": "registry.test/x" }],
                "volumes": [{ "name": "x", "persistentVolumeClaim": { "claimName": claim } }],
            },
        });
        lab.api.create(&Kind::Pod.within(NAMESPACE), &user).await;
        let held = volumes.holder(&made.id).await.unwrap();
        assert!(matches!(&held, Holder::Unknown(why) if why.contains("the pod zz-user")), "{held:?}");
    });
}
