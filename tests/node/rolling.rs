//! An upgrade: every program of guestlet in the host cluster is replaced, one after the other, as a DaemonSet and a Deployment do it,
//! while volumes come and go.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde_json::Value;
use tonic::{Code, Status};

use crate::cluster::{HOSTS, wait};
use crate::guest::Guest;
use crate::lab::DEADLINE;
use crate::sidecar::Asking;
use crate::whole::{MIB, Whole, ask};

/// Repeats a call as sidecars do, each time on the stream that there is then.
fn repeat<T>(guest: &Guest, call: impl Fn(&Asking) -> Result<T, Status>) -> T {
    let end = Instant::now() + DEADLINE;
    loop {
        match call(&Asking(guest.client())) {
            Ok(answer) => return answer,
            Err(status) => {
                // It is of the stream and no answer, or the answer says so.
                let is_broken = std::error::Error::source(&status).is_some();
                let is_to_be_repeated = [Code::Unavailable, Code::Aborted, Code::DeadlineExceeded];
                assert!(is_broken || is_to_be_repeated.contains(&status.code()), "{status:?}");
                assert!(Instant::now() < end, "{status:?}");
                std::thread::sleep(Duration::from_millis(100));
            }
        }
    }
}

/// Makes, publishes, takes away and deletes volumes until the upgrade is over; how many.
fn churn(guest: &Guest, node: &str, is_over: &AtomicBool) -> usize {
    let mut rounds = 0;
    while rounds == 0 || !is_over.load(Ordering::Relaxed) {
        let name = format!("pvc-{node}-{rounds}");
        let id = repeat(guest, |sidecar| sidecar.create(&name, 64 * MIB)).volume_id;
        let context = repeat(guest, |sidecar| sidecar.publish(&id, node));
        let serial = &context["guestlet.io/serial"];
        assert!(guest.disks().seen.contains_key(serial), "published is what the guest sees");
        repeat(guest, |sidecar| sidecar.unpublish(&id, node));
        assert!(!guest.disks().seen.contains_key(serial), "taken away is what the guest does not see");
        repeat(guest, |sidecar| sidecar.delete(&id));
        rounds += 1;
    }
    rounds
}

#[test]
fn all_programs_are_replaced_while_volumes_come_and_go() {
    wait(async {
        let mut whole = Whole::start(2).await;
        let vms = [whole.vm("web").await, whole.vm("db").await];
        // It stays plugged all the time.
        let kept = vms[0].with_volume().await;
        let before = vms[0].guest.disks().seen.clone();
        let is_over = Arc::new(AtomicBool::new(false));
        let churns: Vec<_> = vms
            .iter()
            .map(|vm| {
                let (guest, node, is_over) = (Arc::clone(&vm.guest), vm.uid.clone(), Arc::clone(&is_over));
                tokio::task::spawn_blocking(move || churn(&guest, &node, &is_over))
            })
            .collect();

        for host in HOSTS {
            let lab = whole.nodes.get_mut(host).unwrap();
            assert!(lab.stop().success());
            lab.again();
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
        for number in [0, 1] {
            assert!(whole.controllers[number].stop().success());
            whole.controllers[number].again();
            whole.leader().await;
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
        is_over.store(true, Ordering::Relaxed);
        for churn in churns {
            assert!(churn.await.unwrap() > 0);
        }

        for vm in &vms {
            let instance = whole.cluster.instance(&vm.name).await.unwrap();
            let lab = &whole.nodes[instance["status"]["nodeName"].as_str().unwrap()];
            lab.until_vm(&format!("default/{}", vm.name), |vm| {
                vm["session"] == "connected" && vm["callback"] == "open"
            });
        }
        assert_eq!(vms[0].guest.disks().seen, before, "what is used stays where it is");
        let serial = before.keys().next().unwrap();
        assert!(!vms[0].guest.disks().asked.contains(&format!("release {serial}")));
        let (sidecar, node, id) = (vms[0].sidecar().await, vms[0].uid.clone(), kept.clone());
        ask(move || assert_eq!(sidecar.all(), [(id, vec![node])], "nothing else is left")).await;
        let claims = whole.cluster.api.list("/api/v1/namespaces/default/persistentvolumeclaims").await;
        let names: Vec<_> =
            claims.iter().filter_map(|claim: &Value| claim["metadata"]["name"].as_str()).collect();
        assert_eq!(names.len(), 1, "{names:?}");
        assert!(kept.ends_with(names[0]), "{kept} {names:?}");
    });
}
