//! How kubelet finds the driver, whatever becomes of its folders, of the agent and of who this guest is.

use std::os::unix::fs::MetadataExt as _;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::sync::atomic::Ordering;

use guestlet::wire::proto::csi::{
    GetPluginCapabilitiesRequest, GetPluginInfoRequest, NodeGetInfoRequest, ProbeRequest,
};
use tonic::Code;

use crate::disk::Machine;
use crate::host::MOST_VOLUMES;
use crate::kubelet::{identity, node, register};
use crate::lab::{DRIVER, Lab, NODE, is_outside, run, serves, until, wait};

async fn is_registered(lab: &Lab) {
    until("the driver is offered", || serves(&lab.registration()) && serves(&lab.socket()));
    let info = register(&lab.registration()).await;
    assert_eq!((info.r#type.as_str(), info.name.as_str()), ("CSIPlugin", DRIVER));
    assert_eq!(info.supported_versions, ["1.0.0"]);
    let info = node(info.endpoint.as_ref()).await.node_get_info(NodeGetInfoRequest {}).await;
    assert_eq!(info.unwrap().into_inner().node_id, NODE);
}

#[test]
fn nothing_is_offered_before_it_is_known_who_this_guest_is() {
    if is_outside() {
        return;
    }
    wait(async {
        let mut lab = Lab::unknown("topology = ['guestlet.io/host']");
        assert!(!lab.root().exists());
        // kubelet comes late.
        std::fs::create_dir(lab.root()).unwrap();
        until("the socket is there", || serves(&lab.socket()));
        let ready = identity(&lab.socket()).await.probe(ProbeRequest {}).await.unwrap().into_inner().ready;
        assert_eq!(ready, Some(false));
        let refused = node(&lab.socket()).await.node_get_info(NodeGetInfoRequest {}).await.unwrap_err();
        assert_eq!(refused.code(), Code::Unavailable, "{refused}");
        assert!(!lab.registration().exists());

        lab.introduce().await;
        // Not before it is known where it is, since that is asked for.
        until("it is known who this is", || lab.path("identity.json").exists());
        assert!(!lab.registration().exists());
        lab.runs_on("one").await;
        is_registered(&lab).await;
        let mut about = identity(&lab.socket()).await;
        assert_eq!(about.probe(ProbeRequest {}).await.unwrap().into_inner().ready, Some(true));
        let info = about.get_plugin_info(GetPluginInfoRequest {}).await.unwrap().into_inner();
        assert_eq!((info.name.as_str(), info.vendor_version.as_str()), (DRIVER, guestlet::VERSION));
        let can = about.get_plugin_capabilities(GetPluginCapabilitiesRequest {}).await.unwrap().into_inner();
        assert_eq!(can.capabilities.len(), 3);
        let info = node(&lab.socket()).await.node_get_info(NodeGetInfoRequest {}).await.unwrap().into_inner();
        assert_eq!(info.max_volumes_per_node, 16);
        let segments = info.accessible_topology.unwrap().segments;
        assert_eq!(segments.get("guestlet.io/host").map(String::as_str), Some("one"));
        assert!(lab.log().contains("kubelet has registered the driver"), "{}", lab.log());

        // The guest moves: kubelet has to ask again.
        let made =
            || std::fs::metadata(lab.registration()).map(|file| (file.ctime(), file.ctime_nsec())).ok();
        let before = made();
        lab.runs_on("two").await;
        until("the driver is offered again", || made().is_some_and(|now| Some(now) != before));
        is_registered(&lab).await;
        let info = node(&lab.socket()).await.node_get_info(NodeGetInfoRequest {}).await.unwrap().into_inner();
        assert_eq!(info.accessible_topology.unwrap().segments["guestlet.io/host"], "two");
    });
}

#[test]
fn whatever_becomes_of_the_folders_the_sockets_come_back() {
    if is_outside() {
        return;
    }
    wait(async {
        let mut lab = Lab::new().await;
        is_registered(&lab).await;
        let root = lab.root().display().to_string();
        for script in [
            format!("rm {root}/plugins_registry/*"),
            format!("rm -r {root}/plugins {root}/plugins_registry"),
            format!("mv {root}/plugins {root}/plugins.old"),
            // The agent may be putting things back meanwhile.
            format!("until rm -rf {root} 2> /dev/null; do :; done; mkdir -p {root}"),
            // Put in place late, over what was there.
            format!("mount -t tmpfs late {root}"),
            format!("umount -l {root}"),
        ] {
            // A file that is new may have the number of one that is gone.
            let which = |path: PathBuf| {
                let found = std::fs::symlink_metadata(path).ok()?;
                Some((found.dev(), found.ino(), found.ctime(), found.ctime_nsec()))
            };
            let before = (which(lab.registration()), which(lab.socket()));
            run(&script);
            until(&script, || (which(lab.registration()), which(lab.socket())) != before);
            is_registered(&lab).await;
        }
        // The agent ends, in one way or the other, and comes again: it knows by itself who it is.
        lab.kill();
        assert!(lab.registration().exists());
        lab.start();
        is_registered(&lab).await;
        run(&format!("kill {}", lab.agent.id()));
        lab.agent.wait().unwrap();
        assert!(!lab.registration().exists() && !lab.socket().exists());
        // What somebody else listens on stays theirs.
        let other = UnixListener::bind(lab.socket()).unwrap();
        lab.start();
        until("it is said", || lab.log().contains("is in use by another process"));
        drop(other);
        std::fs::remove_file(lab.socket()).unwrap();
        is_registered(&lab).await;
    });
}

/// Issue 16: on a machine with a kubelet, agents of tests served it.
#[test]
fn the_agents_of_tests_leave_the_machines_kubelet_alone() {
    if crate::traps::is_outside() {
        return;
    }
    let traps = crate::traps::Traps::set();
    wait(async {
        let mut lab = Lab::new().await;
        assert!(lab.socket().exists() && lab.registration().exists());
        lab.kill();
        lab.start();
        until("it serves again", || serves(&lab.socket()));
        lab.disks();
    });
    traps.are_untouched();
}

/// Which takes asking again: a disk that comes may have taken a place.
#[test]
fn kubelet_is_told_how_many_volumes_there_can_be_now() {
    if is_outside() {
        return;
    }
    let machine = Machine::new();
    wait(async {
        let lab = Lab::new().await;
        is_registered(&lab).await;
        let made =
            || std::fs::metadata(lab.registration()).map(|file| (file.ctime(), file.ctime_nsec())).ok();
        let before = made();
        MOST_VOLUMES.store(15, Ordering::Relaxed);
        let _disk = machine.plugged("one", 16);
        until("the driver is offered again", || made().is_some_and(|now| Some(now) != before));
        is_registered(&lab).await;
        let info = node(&lab.socket()).await.node_get_info(NodeGetInfoRequest {}).await.unwrap().into_inner();
        assert_eq!(info.max_volumes_per_node, 15);
    });
}
