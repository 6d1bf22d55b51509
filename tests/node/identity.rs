//! Whose VM a node of a guest cluster is.

use serde_json::Value;
use tonic::Code;

use crate::cluster::wait;
use crate::sidecar::refused;
use crate::whole::{MIB, Whole, ask};

/// harvester/harvester#6981: by a MAC address that many guests have a node was taken for a VM of another cluster, which got the
/// volume. #4396: by its host name a node was not found, or taken for another. All guests here call themselves `web-1.example`.
#[test]
fn a_volume_comes_to_the_vm_of_the_identifier_whatever_guests_call_themselves() {
    wait(async {
        let whole = Whole::start(1).await;
        let (web, db) = (whole.vm("web").await, whole.vm("db").await);
        // As a guest of the other cluster calls itself.
        let stranger = whole.vm_of("prod", "web-1.example").await;
        let (sidecar, node) = (web.sidecar().await, db.uid.clone());
        let others = [stranger.uid.clone(), stranger.name.clone(), "52:54:00:00:00:01".to_owned()];
        let id = ask(move || {
            let id = sidecar.create("pvc-1", 64 * MIB).unwrap().volume_id;
            for other in others {
                refused(sidecar.publish(&id, &other), Code::NotFound, &other);
            }
            sidecar.publish(&id, &node).unwrap();
            id
        })
        .await;
        let seen = |vm: &crate::whole::Vm| vm.guest.disks().seen.len();
        assert_eq!((seen(&web), seen(&db), seen(&stranger)), (0, 1, 0));
        let instance = whole.cluster.instance(&stranger.name).await.unwrap();
        let volumes = instance["spec"]["volumes"].as_array().unwrap();
        assert!(!volumes.iter().any(is_ours), "{volumes:?}");
        // Nor may the other cluster do anything with it.
        let (sidecar, node) = (stranger.sidecar().await, stranger.uid.clone());
        ask(move || refused(sidecar.publish(&id, &node), Code::NotFound, "")).await;
    });
}

fn is_ours(volume: &Value) -> bool {
    volume["name"].as_str().is_some_and(|name| name.starts_with("guestlet-"))
}
