//! What a controller does that leads no more, or cannot lead yet; and what its nodes say of guests that cannot be asked.

use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;

use guestlet::wire::proto::v1::GuestInfo;
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use tonic::Code;

use crate::bench::{ROLES, grant, packaged, socket};
use crate::cluster::wait;
use crate::guest::{Door, Guest, Manner, info};
use crate::lab::{DEADLINE, Lab};
use crate::patience::until;
use crate::sidecar::refused;
use crate::whole::{LEASE, MIB, Whole, again, ask};

/// The claims of a cluster, and what is wanted of its VM.
async fn written(whole: &Whole) -> (Vec<Value>, Value) {
    let api = &whole.cluster.api;
    let claims = api.list("/api/v1/namespaces/default/persistentvolumeclaims").await;
    let vm = api.get("/apis/kubevirt.io/v1/namespaces/default/virtualmachines/web").await.unwrap();
    (claims, vm["spec"].clone())
}

/// It stands still with a call of a node under way, which it reads only when another one leads.
#[test]
fn a_leader_that_was_frozen_changes_nothing_when_it_goes_on() {
    wait(async {
        let mut whole = Whole::start(2).await;
        let web = whole.vm("web").await;
        let first = whole.leader().await;
        let sidecar = web.sidecar().await;
        let id = ask(move || sidecar.create("pvc-1", 64 * MIB).unwrap().volume_id).await;
        whole.controllers[first].signal(Signal::SIGSTOP);
        let (sidecar, node, volume) = (web.sidecar().await, web.uid.clone(), id.clone());
        ask(move || again(|| sidecar.publish(&volume, &node))).await;
        assert_eq!(whole.leader().await, 1 - first);
        let (sidecar, node, volume) = (web.sidecar().await, web.uid.clone(), id.clone());
        ask(move || again(|| sidecar.unpublish(&volume, &node))).await;
        let before = until("the volume is free", async || {
            let now = written(&whole).await;
            (now.0[0]["metadata"]["annotations"]["guestlet.io/published"].is_null()).then_some(now)
        })
        .await;
        whole.controllers[first].signal(Signal::SIGCONT);
        // Whoever has lost the Lease ends.
        assert!(!whole.controllers[first].ended().success());
        assert_eq!(written(&whole).await, before, "what it was asked for before is not done any more");
        let lease = whole.cluster.api.get(LEASE).await.unwrap();
        let holder = lease["spec"]["holderIdentity"].as_str().unwrap();
        assert!(holder.starts_with(&format!("controller-{}", 1 - first)), "{lease}");
    });
}

fn readiness(lab: &Lab) -> String {
    get(lab, "/readyz")
}

/// What a host half answers at a path of its page for Prometheus and kubelet.
pub fn get(lab: &Lab, path: &str) -> String {
    let mut stream = UnixStream::connect(lab.path("run/metrics.sock")).unwrap();
    stream.set_read_timeout(Some(DEADLINE)).unwrap();
    write!(stream, "GET {path} HTTP/1.1\r\nHost: guestlet\r\nConnection: close\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

#[test]
fn a_controller_that_cannot_read_its_volumes_says_so_and_is_not_ready() {
    wait(async {
        let whole = Whole::start(0).await;
        let api = &whole.cluster.api;
        let mut rules = packaged("controller-role.yaml")
            .into_iter()
            .find(|object| object["kind"] == "ClusterRole")
            .map(|mut role| role["rules"].take())
            .unwrap();
        let all = rules.clone();
        for rule in rules.as_array_mut().unwrap() {
            if rule["resources"].as_array().unwrap().contains(&json!("persistentvolumeclaims")) {
                rule["verbs"].as_array_mut().unwrap().retain(|verb| verb != "list");
            }
        }
        assert_ne!(rules, all);
        grant(api, "half-blind", "half-blind", &rules).await;
        let kubeconfig = whole.cluster.turn.plane().kubeconfig("half-blind", "half-blind", "nobody");
        let lab = whole.controller_as(&kubeconfig, 0).start();
        lab.until("it says why it is not ready", || {
            let answer = readiness(&lab);
            answer.starts_with("HTTP/1.1 503") && answer.contains("have not been read yet")
        });
        let refused = lab.ctl(&["volumes", "ls"]);
        let words = String::from_utf8(refused.stderr).unwrap();
        assert!(!refused.status.success() && words.contains("have not been read yet"), "{words}");
        let doctor = String::from_utf8(lab.ctl(&["doctor"]).stdout).unwrap();
        assert!(doctor.contains("the claims of volumes cannot be read"), "{doctor}");

        let path = format!("{ROLES}/half-blind");
        api.patch(&path, &json!({ "rules": all })).await.unwrap();
        lab.until("it is ready", || readiness(&lab).starts_with("HTTP/1.1 200"));
        assert!(lab.ctl(&["volumes", "ls"]).status.success());
    });
}

/// Its agent is there and obeys another host half, or is gone for a moment: neither says that nobody uses the disk.
#[test]
fn a_guest_that_has_an_agent_keeps_its_disk_while_that_cannot_be_asked() {
    wait(async {
        let whole = Whole::start(1).await;
        let (web, other) = (whole.vm("web").await, whole.vm("other").await);
        let id = web.with_volume().await;
        let instance = whole.cluster.instance("web").await.unwrap();
        let lab = &whole.nodes[instance["status"]["nodeName"].as_str().unwrap()];
        let dmi = instance["spec"]["domain"]["firmware"]["uuid"].as_str().unwrap_or_default().to_owned();
        whole.shut("web", web.guest);
        lab.until_vm("default/web", |vm| vm["session"] == "connecting");
        let unpublish = async |code: Code, words: &'static str| {
            let (sidecar, node, id) = (other.sidecar().await, web.uid.clone(), id.clone());
            ask(move || refused(sidecar.unpublish(&id, &node), code, words)).await;
            let status = whole.cluster.instance("web").await.unwrap()["status"]["volumeStatus"].clone();
            assert!(status.as_array().unwrap().iter().any(|one| one["phase"] == "Ready"), "{status}");
        };
        unpublish(Code::Unavailable, "there is no session with an agent in this guest yet").await;

        let info = info(&dmi, "boot-1");
        let capabilities = [info.capabilities.clone(), vec!["disks".into()]].concat();
        let info = GuestInfo { capabilities, ..info };
        let _held = Guest::start(&socket(lab, &instance), Door::Hybrid, Manner::Held, info);
        lab.until_session("default/web", "refused");
        unpublish(Code::FailedPrecondition, "the session with the agent in this guest is refused").await;
    });
}
