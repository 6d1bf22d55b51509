//! Volumes, from a guest through its node and the controller to `KubeVirt`, and back.

use guestlet::wire::proto::v1::{AskRequest, JoinRequest, RunningVirtualMachine};
use serde_json::{Value, json};
use tonic::Code;

use crate::cluster::{HOSTS, wait};
use crate::patience::until;
use crate::sidecar::refused;
use crate::whole::{Connected, LEASE, MIB, Whole, again, ask};

#[test]
fn a_volume_comes_to_a_guest_by_its_node_and_the_controller_and_goes_again() {
    wait(async {
        let whole = Whole::start(1).await;
        let (web, db) = (whole.vm("web").await, whole.vm("db").await);
        let (sidecar, other) = (web.sidecar().await, db.sidecar().await);
        let (node, logs) = (db.uid.clone(), whole.logs());
        let (volume, context) = ask(move || {
            let volume =
                sidecar.create("pvc-1", 64 * MIB).unwrap_or_else(|status| panic!("{status:?}\n{logs}"));
            // Whichever guest of the cluster asks.
            let context =
                sidecar.publish(&volume.volume_id, &node).unwrap_or_else(|status| panic!("{status:?}"));
            assert_eq!(other.all(), [(volume.volume_id.clone(), vec![node])]);
            (volume, context)
        })
        .await;
        assert_eq!(volume.accessible_topology, [], "any node of the cluster may have it");
        let serial = &context["guestlet.io/serial"];
        assert_eq!(context["guestlet.io/bus"], "scsi");
        assert_eq!(db.guest.disks().seen.keys().collect::<Vec<_>>(), [serial]);
        let instance = whole.cluster.instance("db").await.unwrap();
        let status = instance["status"]["volumeStatus"].as_array().unwrap();
        assert!(
            status.iter().any(|one| one["phase"] == "Ready" && one["hotplugVolume"].is_object()),
            "{status:?}"
        );

        let (sidecar, id, node) = (web.sidecar().await, volume.volume_id.clone(), db.uid.clone());
        ask(move || sidecar.unpublish(&id, &node).unwrap()).await;
        assert!(
            db.guest.disks().asked.contains(&format!("release {serial}")),
            "{:?}",
            db.guest.disks().asked
        );
        assert!(db.guest.disks().seen.is_empty());
        let behalf = format!("vm:default/{}", web.name);
        let released = db.guest.behalves().into_iter().rfind(|one| one.method == "ReleaseDisk").unwrap();
        assert_eq!(released.caller, Some(behalf), "the guest is told who asks");
        let (sidecar, id) = (web.sidecar().await, volume.volume_id);
        ask(move || sidecar.delete(&id).unwrap()).await;
        let claims = whole.cluster.api.list("/api/v1/namespaces/default/persistentvolumeclaims").await;
        assert_eq!(claims, [] as [Value; 0]);
    });
}

#[test]
fn a_volume_that_its_guest_does_not_see_is_not_published() {
    wait(async {
        let whole = Whole::start(1).await;
        let web = whole.vm("web").await;
        *whole.domains.blind.lock().unwrap() = true;
        let (sidecar, node) = (web.sidecar().await, web.uid.clone());
        let id = ask(move || {
            let id = sidecar.create("pvc-1", 64 * MIB).unwrap().volume_id;
            let words = "the volume is plugged, but its guest does not confirm that it sees it";
            refused(sidecar.publish(&id, &node), Code::Unavailable, words);
            id
        })
        .await;
        let serial = whole.domains.plugged.lock().unwrap()[0].serial.clone();
        web.guest.disks().seen.insert(serial.clone(), "sdb".to_owned());
        let (sidecar, node) = (web.sidecar().await, web.uid.clone());
        let context = ask(move || sidecar.publish(&id, &node).unwrap()).await;
        assert_eq!(context["guestlet.io/serial"], serial);
    });
}

#[test]
fn another_replica_takes_over_when_the_one_that_leads_is_killed() {
    wait(async {
        let mut whole = Whole::start(2).await;
        let web = whole.vm("web").await;
        let first = whole.leader().await;
        let sidecar = web.sidecar().await;
        let id = ask(move || sidecar.create("pvc-1", 64 * MIB).unwrap().volume_id).await;

        // A standby knows what there is, and changes nothing.
        let standby = &whole.controllers[1 - first];
        standby.until("it lists the volume", || standby.words(&["volumes", "ls"]).contains("pvc-1"));
        let refused = standby.ctl(&["volumes", "rm", &id]);
        let words = String::from_utf8(refused.stderr).unwrap();
        assert!(words.contains("this replica of the controller is not the leader"), "{words}");

        whole.controllers[first].kill();
        let (sidecar, node, volume) = (web.sidecar().await, web.uid.clone(), id.clone());
        // It says that nobody can be asked, for as long as the Lease is valid, and is repeated.
        ask(move || again(|| sidecar.publish(&volume, &node))).await;
        assert_eq!(whole.leader().await, 1 - first);

        // One that is told to end gives the Lease back, and nobody waits for long.
        whole.controllers[first].again();
        assert!(whole.controllers[1 - first].stop().success());
        // One that had not given it back would still be named in it, for as long as it is valid.
        let lease = whole.cluster.api.get(LEASE).await.unwrap();
        let holder = lease["spec"]["holderIdentity"].as_str().unwrap_or_default().to_owned();
        assert!(!holder.starts_with(&format!("controller-{}", 1 - first)), "{lease}");
        let (sidecar, node) = (web.sidecar().await, web.uid.clone());
        ask(move || {
            again(|| sidecar.unpublish(&id, &node));
            again(|| sidecar.delete(&id));
        })
        .await;
        assert_eq!(whole.leader().await, first);
        // With nobody to take it, it stays as it was given back.
        assert!(whole.controllers[first].stop().success());
        let lease = whole.cluster.api.get(LEASE).await.unwrap();
        assert_eq!(lease["spec"]["holderIdentity"].as_str().unwrap_or_default(), "", "{lease}");
    });
}

#[test]
fn a_node_can_do_nothing_for_vms_of_other_nodes() {
    wait(async {
        let whole = Whole::start(1).await;
        let web = whole.vm("web").await;
        let instance = whole.cluster.instance("web").await.unwrap();
        let own = instance["status"]["nodeName"].as_str().unwrap();
        let other = HOSTS.into_iter().find(|host| *host != own).unwrap();
        let request = |uid: &Value| AskRequest {
            vm: Some(RunningVirtualMachine {
                namespace: "default".into(),
                name: "web".into(),
                uid: uid.as_str().unwrap().into(),
            }),
            method: "/csi.v1.Controller/ListVolumes".into(),
            request: Vec::new(),
        };
        let uid = &instance["metadata"]["uid"];
        let ask = async |client: &mut Connected, request: AskRequest| {
            client.calls.ask(request).await.map(|answer| answer.into_inner().answer)
        };

        // One that shows no certificate, whatever it says.
        let mut nobody = whole.connect(None).await;
        refused(ask(&mut nobody, request(uid)).await, Code::Unauthenticated, "join first");
        for token in ["", "a.b.c", "not a token at all"] {
            let join = JoinRequest { token: token.into(), certificate_signing_request: vec![0; 64] };
            let joined = nobody.calls.join(join).await.map(drop);
            refused(joined, Code::Unauthenticated, "the token of the node is refused");
        }

        let mut stranger = whole.join(other).await;
        let words = format!("does not run on the node {other}");
        refused(ask(&mut stranger, request(uid)).await, Code::Unavailable, &words);
        let mut owner = whole.join(own).await;
        assert_eq!(ask(&mut owner, request(uid)).await.unwrap(), Vec::<u8>::new(), "there are no volumes");
        // Nor for one that is no more, by the name of one that is.
        let gone = json!("00000000-0000-4000-8000-000000000000");
        refused(ask(&mut owner, request(&gone)).await, Code::Unavailable, "does not run on the node");
        let mut bad = request(uid);
        bad.vm.as_mut().unwrap().name = "../../../api/v1/secrets".into();
        refused(ask(&mut owner, bad).await, Code::InvalidArgument, "vm has no namespace, or no name");
        let method = "/guestlet.v1.Admin/RemoveVolume".to_owned();
        let bad = AskRequest { method, ..request(uid) };
        refused(ask(&mut owner, bad).await, Code::PermissionDenied, "is not supported for guests on nodes");
        drop(web);
    });
}

#[test]
fn who_says_nothing_or_nonsense_to_the_controller_holds_up_nobody() {
    wait(async {
        let whole = Whole::start(1).await;
        let address = whole.address().await;
        let mut silent = Vec::new();
        for number in 0..200 {
            // From the address of another pod.
            let socket = tokio::net::TcpSocket::new_v4().unwrap();
            socket.bind("127.0.0.2:0".parse().unwrap()).unwrap();
            let stream = socket.connect(address.parse().unwrap()).await.unwrap();
            if number % 2 == 0 {
                let nonsense = vec![u8::try_from(number).unwrap(); 4096];
                // It may be closed already.
                drop(stream.try_write(&nonsense));
            }
            silent.push(stream);
        }
        let web = whole.vm("web").await;
        let sidecar = web.sidecar().await;
        ask(move || sidecar.create("pvc-1", 64 * MIB).unwrap()).await;
    });
}

/// harvester/harvester#10889: after a migration nothing was attached, and what was attached already could not be once more.
#[test]
fn a_vm_that_is_migrated_keeps_its_volumes_and_is_served_by_its_new_node() {
    wait(async {
        let whole = Whole::start(1).await;
        let web = whole.vm("web").await;
        let id = web.with_volume().await;
        let instance = whole.cluster.instance("web").await.unwrap();
        let from = instance["status"]["nodeName"].as_str().unwrap().to_owned();
        let to = HOSTS.into_iter().find(|host| *host != from).unwrap();
        whole.cluster.model.migrate("default", "web", to).await;
        let moved = until("it has moved", async || {
            let now = whole.cluster.instance("web").await?;
            (now["status"]["nodeName"] == to).then_some(now)
        })
        .await;
        let seen = web.guest.disks().seen.clone();
        let web = whole.boot("web", &moved);
        web.guest.disks().seen = seen;
        let (sidecar, node, volume) = (web.sidecar().await, web.uid.clone(), id.clone());
        ask(move || {
            // Repeated, as a sidecar does that was started again.
            again(|| sidecar.publish(&volume, &node));
            again(|| sidecar.unpublish(&volume, &node));
        })
        .await;
        let asked = web.guest.disks().asked.clone();
        assert!(asked.iter().any(|one| one.starts_with("release ")), "by way of {to}: {asked:?}");
        let sidecar = web.sidecar().await;
        ask(move || sidecar.delete(&id).unwrap()).await;
    });
}

#[test]
fn a_guest_whose_node_cannot_be_asked_keeps_its_disk() {
    wait(async {
        let mut whole = Whole::start(1).await;
        let web = whole.vm("web").await;
        let id = web.with_volume().await;
        let instance = whole.cluster.instance("web").await.unwrap();
        let host = instance["status"]["nodeName"].as_str().unwrap().to_owned();
        let node = whole.nodes.get_mut(host.as_str()).unwrap();
        node.kill();
        let leader = &whole.controllers[0];
        leader.until("the node attends no more", || leader.log().contains("a node has disconnected"));
        let detached = leader.ctl(&["volumes", "detach", &id]);
        let words = String::from_utf8(detached.stderr).unwrap();
        assert!(words.contains("the node of this guest cannot be reached now"), "{words}");
        let status = whole.cluster.instance("web").await.unwrap()["status"]["volumeStatus"].clone();
        assert!(status.as_array().unwrap().iter().any(|one| one["phase"] == "Ready"), "{status}");
        assert_eq!(web.guest.disks().asked.iter().filter(|one| one.starts_with("release")).count(), 0);

        // As soon as its node is there again, it is asked, however soon after that its session comes.
        whole.nodes.get_mut(host.as_str()).unwrap().again();
        let leader = &whole.controllers[0];
        leader.until("the volume is detached", || leader.ctl(&["volumes", "detach", &id]).status.success());
        let asked = web.guest.disks().asked.clone();
        assert!(asked.iter().any(|one| one.starts_with("release ")), "{asked:?}");
    });
}

/// Its cluster would wait for ever to use the volume elsewhere: the node has it no more, and what the other VM has is none of guestlet's.
#[test]
fn a_node_is_left_although_an_administrator_has_plugged_its_volume_into_another_vm() {
    wait(async {
        let whole = Whole::start(1).await;
        let (web, db) = (whole.vm("web").await, whole.vm("db").await);
        let id = web.with_volume().await;
        let claim = id.rsplit_once('.').unwrap().1;
        whole.cluster.plug_as("db", "backup", claim, json!({ "disk": { "bus": "scsi" } })).await;
        whole.cluster.is_in("db", "backup", "Ready").await;
        let (sidecar, node, volume) = (web.sidecar().await, web.uid.clone(), id.clone());
        ask(move || again(|| sidecar.unpublish(&volume, &node))).await;
        assert_eq!(web.guest.disks().seen.len(), 0);
        assert_eq!(whole.cluster.entry("db", "backup").await.unwrap()["phase"], "Ready");
        assert!(!db.guest.disks().asked.iter().any(|one| one.starts_with("release")));
        let (sidecar, node) = (db.sidecar().await, db.uid.clone());
        ask(move || {
            refused(sidecar.publish(&id, &node), Code::FailedPrecondition, "as its volume backup");
        })
        .await;
    });
}
