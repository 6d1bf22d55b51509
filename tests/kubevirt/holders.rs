//! Who holds a volume, where that cannot be told, and what it costs to find it out.

use guestlet::host::backends::volumes::{VolumeError, Volumes as _};
use serde_json::json;

use crate::claims::{LET_GO, claim_of, domains, make, new, place, plug, volumes, willing};
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
        let lose = async |part: &str, key: &str| {
            let before = lab.api.get(&claim).await.unwrap()["metadata"][part][key].clone();
            lab.api.patch(&claim, &json!({ "metadata": { part: { key: null } } })).await.unwrap();
            before
        };
        let lost = [
            ("labels", "app.kubernetes.io/managed-by", "the label app.kubernetes.io/managed-by=guestlet"),
            ("annotations", "guestlet.io/cluster", "the annotation guestlet.io/cluster"),
        ];
        for (part, key, words) in lost {
            let before = lose(part, key).await;
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
