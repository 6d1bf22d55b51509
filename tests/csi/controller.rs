//! What the sidecars ask, passed on to a host half of the tests.

use std::sync::atomic::Ordering;
use std::time::Duration;

use guestlet::wire::proto::csi::{
    ControllerExpandVolumeRequest, ControllerGetCapabilitiesRequest, ControllerGetVolumeRequest,
    ControllerPublishVolumeRequest, ControllerUnpublishVolumeRequest, DeleteVolumeRequest,
    GetCapacityRequest, ListVolumesRequest, ProbeRequest, ValidateVolumeCapabilitiesRequest,
};
use tonic::Code;

use crate::kubelet::{controller, identity};
use crate::lab::{Lab, is_outside, serves, until, wait};
use crate::scripted::{Scripted, named};

async fn is_ready(lab: &Lab) -> bool {
    identity(&lab.controller()).await.probe(ProbeRequest {}).await.unwrap().into_inner().ready.unwrap()
}

#[test]
fn every_call_reaches_the_host_half_and_its_answer_comes_back() {
    if is_outside() {
        return;
    }
    wait(async {
        let mut lab = Lab::unknown("enabled = true");
        Scripted::default().answer_for(&mut lab).await;
        until("the sidecars are served", || serves(&lab.controller()));
        let mut client = controller(&lab.controller()).await;
        while !is_ready(&lab).await {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        let volume = client.create_volume(named("pvc-1")).await.unwrap().into_inner().volume.unwrap();
        assert_eq!(volume.volume_id, "pvc-1");
        assert_eq!(volume.volume_context["hostStorageClass"], "fast");
        let refused = client.create_volume(named("refused")).await.unwrap_err();
        assert_eq!((refused.code(), refused.message()), (Code::ResourceExhausted, "the pool is full"));

        macro_rules! passed_on {
            ($($call:ident($request:ident);)+) => {$(
                let answer = client.$call($request::default()).await.unwrap_err();
                assert_eq!((answer.code(), answer.message()), (Code::OutOfRange, stringify!($call)));
            )+};
        }
        passed_on! {
            delete_volume(DeleteVolumeRequest);
            controller_publish_volume(ControllerPublishVolumeRequest);
            controller_unpublish_volume(ControllerUnpublishVolumeRequest);
            validate_volume_capabilities(ValidateVolumeCapabilitiesRequest);
            list_volumes(ListVolumesRequest);
            get_capacity(GetCapacityRequest);
            controller_get_capabilities(ControllerGetCapabilitiesRequest);
            controller_expand_volume(ControllerExpandVolumeRequest);
            controller_get_volume(ControllerGetVolumeRequest);
        }
        // What nobody can mean goes no further.
        assert!(client.create_volume(named(&"n".repeat(1 << 20))).await.is_err());
        assert!(client.create_volume(named("pvc-2")).await.is_ok());
    });
}

/// Others have to come through to the host half, too.
#[test]
fn the_host_half_is_asked_few_at_a_time_and_for_all() {
    if is_outside() {
        return;
    }
    wait(async {
        let mut lab = Lab::unknown("enabled = true");
        let scripted = Scripted::default();
        scripted.answer_for(&mut lab).await;
        until("the sidecars are served", || serves(&lab.controller()));
        let client = controller(&lab.controller()).await;
        while !is_ready(&lab).await {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        let ask = || {
            let mut client = client.clone();
            tokio::spawn(async move { client.create_volume(named("slow")).await })
        };
        let calls: Vec<_> = std::iter::repeat_with(ask).take(60).collect();
        for call in calls {
            call.await.unwrap().unwrap();
        }
        let most = scripted.at_once.1.load(Ordering::SeqCst);
        assert!((2..=16).contains(&most), "{most} at a time");
    });
}

#[test]
fn without_a_way_to_the_host_the_sidecars_are_told_so_at_once() {
    if is_outside() {
        return;
    }
    wait(async {
        let mut lab = Lab::unknown("enabled = true");
        until("the sidecars are served", || serves(&lab.controller()));
        assert!(!is_ready(&lab).await);
        let mut client = controller(&lab.controller()).await;
        let refused = client.create_volume(named("pvc-1")).await.unwrap_err();
        assert_eq!(refused.code(), Code::Unavailable, "{refused}");
        assert!(refused.message().contains("no host half holds this guest"), "{refused}");

        let scripted = Scripted::default();
        for _ in 0..3 {
            scripted.answer_for(&mut lab).await;
            while !is_ready(&lab).await {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            assert!(client.create_volume(named("pvc-1")).await.is_ok());
            scripted.asked.notified().await;

            // The way ends under a call.
            let mut other = client.clone();
            let silent = tokio::spawn(async move { other.create_volume(named("silent")).await });
            scripted.asked.notified().await;
            lab.leave();
            let broken = silent.await.unwrap().unwrap_err();
            assert_eq!(broken.code(), Code::Unavailable, "{broken:?}");
            assert!(broken.message().contains("the outcome of the call is unknown"), "{broken}");
            while is_ready(&lab).await {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        }
    });
}

/// Issue 17: a provisioner that knew of topology asked for it after that was switched off, and made no volume any more.
#[test]
fn sidecars_that_know_another_topology_are_to_start_anew() {
    if is_outside() {
        return;
    }
    wait(async {
        let mut lab = Lab::unknown("enabled = true");
        assert!(answers(&mut lab).await, "there were none before");
        let kept = lab.path("csi.json");
        until("what they are told is kept", || kept.exists());
        let (settings, with) = (lab.path("agent.toml"), "enabled = true\ntopology = ['guestlet.io/host']");
        let without = std::fs::read_to_string(&settings).unwrap();
        std::fs::write(&settings, without.replace("enabled = true", with)).unwrap();
        // Also if it is ended before they have noticed.
        for _ in 0..2 {
            start_again(&mut lab);
            assert!(!answers(&mut lab).await, "they know no topology");
        }
        std::fs::write(&settings, without).unwrap();
        start_again(&mut lab);
        assert!(answers(&mut lab).await, "they know what is set");
    });
}

/// Gives the agent a host half, and waits until calls come through to it; whether the agent is ready then.
async fn answers(lab: &mut Lab) -> bool {
    Scripted::default().answer_for(lab).await;
    until("the sidecars are served", || serves(&lab.controller()));
    let mut client = controller(&lab.controller()).await;
    while client.create_volume(named("pvc-1")).await.is_err() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    is_ready(lab).await
}

/// Kills the agent and starts it again.
fn start_again(lab: &mut Lab) {
    lab.kill();
    lab.start();
    until("the agent listens", || serves(&lab.path("control.sock")));
}
