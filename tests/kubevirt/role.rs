//! The controller's role, as it is installed: it suffices, and no verb of it is there for nothing.

use std::sync::Arc;
use std::time::Duration;

use guestlet::host::backends::Problems;
use guestlet::host::backends::kubevirt::hotplug::Patience;
use guestlet::host::backends::kubevirt::volumes::Claims;
use guestlet::host::backends::volumes::{Holder, Volumes as _};
use serde_json::{Value, json};
use tokio::sync::watch;

use crate::api::Api;
use crate::claims::{make_in, place, plug, quick, volumes, volumes_that_tell, volumes_with, willing};
use crate::clusters::Clusters;
use crate::lab::{Lab, NEVER, wait};
use crate::model::objects::text;
use crate::patience::until;
use crate::plane::ControlPlane;
use crate::pool::{self, add_kind};
use crate::roster::Known;
use crate::{leader, nodes, snapshots};

const MANIFESTS: &str = include_str!("../../packaging/kubernetes/host/base/controller-role.yaml");
/// What nodes write of guests.
pub const GUESTS: &str = include_str!("../../packaging/kubernetes/host/base/crd.yaml");
const ROLES: &str = "/apis/rbac.authorization.k8s.io/v1/clusterroles";
const BINDINGS: &str = "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings";
/// How KubeVirt is told to plug a volume.
const BY_SPEC: &str = "DeclarativeHotplugVolumes";
const BY_REQUEST: &str = "HotplugVolumes";
/// Whom the API server takes the controller for.
pub const ACCOUNT: &str = "system:serviceaccount:guestlet-system:guestlet-controller";
/// Where its own objects are.
pub const OWN: &str = "guestlet-system";

fn documents() -> Vec<Value> {
    serde_saphyr::from_multiple(MANIFESTS).unwrap()
}

fn role(kind: &str) -> Value {
    documents().into_iter().find(|one| one["kind"] == kind).unwrap()
}

/// Gives the controller its roles.
pub async fn install(api: &Api) {
    api.ensure("/api/v1/namespaces", &json!({ "metadata": { "name": OWN } })).await;
    for document in documents() {
        match text(&document["kind"]) {
            "ClusterRole" => api.ensure(ROLES, &document).await,
            "ClusterRoleBinding" => api.ensure(BINDINGS, &document).await,
            "Role" => api.ensure(&within("roles"), &document).await,
            "RoleBinding" => api.ensure(&within("rolebindings"), &document).await,
            // It is known by its certificate here.
            kind => assert_eq!(kind, "ServiceAccount"),
        }
    }
}

/// Where roles of the controller's own namespace are, or their bindings.
fn within(kind: &str) -> String {
    format!("/apis/rbac.authorization.k8s.io/v1/namespaces/{OWN}/{kind}")
}

/// Asks as the controller.
pub async fn client(plane: &ControlPlane) -> kube::Client {
    client_with(plane, |_| ()).await
}

/// The same with a change of how the API server is reached.
pub async fn client_with(plane: &ControlPlane, change: impl FnOnce(&mut kube::Config)) -> kube::Client {
    let mut config = config(plane).await;
    change(&mut config);
    kube::Client::try_from(config).unwrap()
}

/// How the controller asks the API server.
pub async fn config(plane: &ControlPlane) -> kube::Config {
    let config = plane.kubeconfig("controller", ACCOUNT, "system:serviceaccounts");
    guestlet::kubernetes::connect::config(Some(&config)).await.unwrap()
}

/// Every verb of the role: the place of its rule, and its own in that.
pub fn verbs(role: &Value) -> Vec<(usize, usize, usize)> {
    let mut all = Vec::new();
    for (rule, of) in role["rules"].as_array().unwrap().iter().enumerate() {
        for resource in 0..of["resources"].as_array().unwrap().len() {
            all.extend((0..of["verbs"].as_array().unwrap().len()).map(|verb| (rule, resource, verb)));
        }
    }
    all
}

/// The role without one verb for one kind, and what that was.
pub fn without(whole: &Value, (rule, resource, verb): (usize, usize, usize)) -> (Value, String) {
    let mut left = whole.clone();
    let rules = left["rules"].as_array_mut().unwrap();
    let of = rules[rule].clone();
    let mut taken = of.clone();
    let kind = of["resources"][resource].clone();
    let name = format!("{} {}", text(&of["verbs"][verb]), text(&kind));
    rules[rule]["resources"].as_array_mut().unwrap().remove(resource);
    taken["resources"] = json!([kind]);
    taken["verbs"].as_array_mut().unwrap().remove(verb);
    rules.push(taken);
    rules
        .retain(|rule| ["resources", "verbs"].iter().all(|list| !rule[*list].as_array().unwrap().is_empty()));
    (left, name)
}

async fn set(api: &Api, roles: &str, role: &Value) {
    set_of(api, roles, "guestlet-controller", role).await;
}

/// Puts a role in the place of that of this name.
pub async fn set_of(api: &Api, roles: &str, name: &str, role: &Value) {
    let path = format!("{roles}/{name}");
    until("the role is another one", async || {
        let mut new = role.clone();
        new["metadata"] = api.get(&path).await?["metadata"].clone();
        api.replace(&path, &new).await
    })
    .await;
}

/// The host half's volumes where nothing is waited for long.
async fn hasty(lab: &Lab) -> Arc<Claims> {
    let settle = Duration::from_secs(3);
    volumes_with(lab, Patience { settle, ..quick() }).await
}

/// All that the role is for, once, where volumes are plugged by this feature gate; what did not work.
async fn all(lab: &Lab, volumes: &Claims, round: usize, gate: &str) -> Result<(), String> {
    let web = place(lab, "web").await;
    let said = |what: &str, error: &dyn std::fmt::Display| format!("{what}: {error}");
    lab.set_gates(&[gate]).await;
    let new = crate::claims::new(crate::lab::SHARED, &format!("data-{round}"));
    let made = volumes.create(new).await.map_err(|error| said("create", &error))?;
    if !volumes.list(None).await.is_ok_and(|all| all.iter().any(|one| one.id == made.id)) {
        return Err("list: it is not among them".to_owned());
    }
    plug(volumes, &made.id, &web).await.map_err(|error| said("plug", &error))?;
    let grown = volumes.grow(&made.id, 2 * made.size, Some(&web.vm)).await;
    grown.map_err(|error| said("grow", &error))?;
    let unplugged = volumes.unplug(&made.id, &web.vm, Duration::from_secs(10), willing()).await;
    unplugged.map_err(|error| said("unplug", &error))?;
    match volumes.holder(&made.id).await {
        Ok(Holder::Off) => {}
        other => return Err(format!("holder: {other:?}")),
    }
    volumes.remove(&made.id).await.map_err(|error| said("remove", &error))
}

#[test]
fn no_verb_of_the_role_is_there_for_nothing() {
    wait(async {
        let lab = Lab::start().await;
        add_kind(&lab.api, GUESTS).await;
        lab.running("web").await;
        lab.model.speed(Duration::from_millis(10));
        let whole = role("ClusterRole");
        let asked = hasty(&lab).await;
        for (round, gate) in [BY_SPEC, BY_REQUEST].into_iter().enumerate() {
            all(&lab, &asked, 1000 + round, gate).await.unwrap();
        }
        snapshots::is_said(lab.turn.plane(), &lab.api).await.unwrap();
        let mut for_nothing = Vec::new();
        for (round, verb) in (1..).zip(verbs(&whole)) {
            let (role, name) = without(&whole, verb);
            let gate = if name.contains('/') { BY_REQUEST } else { BY_SPEC };
            set(&lab.api, ROLES, &role).await;
            let mut is_missed = false;
            // The API server may know it a moment later.
            for again in 0..3 {
                // One that begins now: watches that stand are not looked at again.
                let outcome = tokio::time::timeout(Duration::from_secs(8), async {
                    let volumes = hasty(&lab).await;
                    all(&lab, &volumes, 100 * again + round, gate).await
                });
                is_missed = outcome.await.map_or(true, |outcome| outcome.is_err());
                if is_missed {
                    break;
                }
            }
            // Watches are made up for by looking now and then, and words about what is stuck are for people.
            if !is_missed && !is_told_of(&lab, &name).await {
                for_nothing.push(name);
            }
            set(&lab.api, ROLES, &whole).await;
        }
        assert!(for_nothing.is_empty(), "{for_nothing:?}");
    });
}

#[test]
fn no_verb_of_the_role_in_its_own_namespace_is_there_for_nothing() {
    wait(async {
        let turn = pool::take().await;
        let api = Api::read(turn.plane().folder.path(), "test");
        install(&api).await;
        let roles = within("roles");
        let whole = role("Role");
        let all = verbs(&whole);
        assert_eq!(all.len(), 6, "{whole}");
        for verb in all {
            let works = async || {
                leader::is_led(turn.plane(), &api).await?;
                nodes::is_certified(turn.plane(), &api).await
            };
            until("the whole role suffices", async || works().await.ok()).await;
            let (role, name) = without(&whole, verb);
            set(&api, &roles, &role).await;
            // It is known a moment later.
            until(&format!("{name} is missed"), async || works().await.err()).await;
            set(&api, &roles, &whole).await;
        }
    });
}

/// Whether somebody misses this verb although everything works without it.
async fn is_told_of(lab: &Lab, verb: &str) -> bool {
    match verb {
        "list events" => {
            let volumes = volumes(lab).await;
            let never = make_in(&volumes, NEVER, "never").await;
            let web = place(lab, "web").await;
            let error = plug(&volumes, &never.id, &web).await.unwrap_err().to_string();
            error.contains("no reason is given")
        }
        "create tokenreviews" => nodes::is_certified(lab.turn.plane(), &lab.api).await.is_err(),
        of_clusters if of_clusters.ends_with(" guests") || of_clusters.ends_with(" nodes") => {
            let words = if of_clusters.ends_with(" guests") { "guests' objects" } else { "Nodes" };
            let problems = watch::Sender::new(Problems::new());
            let _clusters = Clusters::with(lab, problems.clone()).await;
            until(&format!("people are told that {words} cannot be watched"), async || {
                problems.borrow().keys().any(|what| what.contains(words)).then_some(())
            })
            .await;
            true
        }
        of_snapshots if of_snapshots.contains("snapshot") => {
            let is_missed = async || snapshots::is_said(lab.turn.plane(), &lab.api).await.err();
            until(&format!("{of_snapshots} is missed"), is_missed).await;
            true
        }
        // Without it, changes are seen late, when all are listed again.
        watch if watch.starts_with("watch ") => {
            let words = match watch {
                "watch virtualmachines" => "VirtualMachines",
                "watch virtualmachineinstances" => "VirtualMachineInstances",
                "watch persistentvolumeclaims" => "claims",
                "watch storageclasses" => "storage classes",
                other => panic!("who follows these? {other}"),
            };
            let problems = watch::Sender::new(Problems::new());
            let _volumes = volumes_that_tell(lab, quick(), problems.clone()).await;
            // Last: its credentials are read by a thread of its own, and must not be written again meanwhile.
            let _known = Known::with(lab, problems.clone()).await;
            let is_told = || problems.borrow().keys().any(|what| what.contains(words));
            until(&format!("people are told that {words} cannot be watched"), async || {
                is_told().then_some(())
            })
            .await;
            true
        }
        _ => false,
    }
}
