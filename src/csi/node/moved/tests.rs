//! Tests with a host half that reports where a share is, and a machine that only records mounts.

use std::collections::HashMap;
use std::convert::Infallible;
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};

use futures_util::StreamExt as _;
use http::{Request, Response};
use nix::errno::Errno;
use prost::Message as _;
use tokio::sync::{oneshot, watch};
use tonic::body::Body;
use tonic::codegen::Body as _;

use super::*;
use crate::csi::{Identity, Settings};
use crate::guest::pod_volumes::share::tests::{Bench, writable};
use crate::transport::callback::{Caller, Messages, open, response, serve};
use crate::wire::proto::csi::volume_capability::access_mode::Mode;
use crate::wire::proto::csi::volume_capability::{AccessMode, AccessType, MountVolume};
use crate::wire::proto::csi::{
    ControllerPublishVolumeResponse, NodeStageVolumeRequest, NodeUnstageVolumeRequest, VolumeCapability,
};
use crate::wire::proto::v1::CallbackBounds;
use crate::wire::proto::v1::callback_from_host::Message as FromHost;

/// Host half that reports this address for every share.
#[derive(Clone)]
struct Host(Arc<Mutex<&'static str>>);

impl tower_service::Service<Request<Body>> for Host {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        assert_eq!(request.uri().path(), "/csi.v1.Controller/ControllerPublishVolume");
        let server = *self.0.lock().unwrap();
        Box::pin(async move {
            let mut body = request.into_body();
            let frame = poll_fn(|context| Pin::new(&mut body).poll_frame(context)).await.unwrap().unwrap();
            // gRPC puts five bytes before a message.
            let asked = frame.into_data().unwrap().split_off(5);
            let asked = ControllerPublishVolumeRequest::decode(asked).unwrap();
            assert_eq!(asked.volume_context.get("guestlet.io/where").unwrap(), "1", "it only asks");
            let answer = ControllerPublishVolumeResponse { publish_context: context(server) };
            Ok(response(&answer.encode_to_vec()))
        })
    }
}

fn context(server: &str) -> HashMap<String, String> {
    let pair = |key: &str, value: &str| (format!("guestlet.io/nfs-{key}"), value.to_owned());
    [pair("server", server), pair("path", "/pvc-1")].into()
}

async fn caller(host: Host) -> Caller {
    let bounds = CallbackBounds { host_instance_id: "one".to_owned(), open_calls: 4, request_bytes: 4096 };
    let (give, taken) = oneshot::channel();
    let serving = serve(bounds, host, async |mut messages: Messages| {
        let Some(FromHost::Bounds(bounds)) = messages.next().await.unwrap().message else { panic!() };
        let (caller, calls) = open(&bounds, messages.map(Ok));
        give.send(caller).unwrap();
        Ok(Box::pin(calls))
    });
    #[allow(clippy::disallowed_methods, reason = "a test has tasks")]
    tokio::spawn(serving);
    taken.await.unwrap()
}

#[tokio::test]
async fn a_server_that_has_moved_is_asked_for_and_mounted_from() {
    let (bench, place) = (Bench::new(), Arc::new(Mutex::new("10.0.0.2")));
    let caller = caller(Host(Arc::clone(&place))).await;
    let settings = Settings {
        driver: "d".into(),
        kubelet_root: bench.kubelet.clone(),
        make_root: false,
        node_socket: "/nowhere".into(),
        controller_socket: None,
        topology: Vec::new(),
        stale_until: None,
    };
    let identity = Identity { node_id: "node".into(), ..Identity::default() };
    let known = watch::channel(Some(identity)).1;
    let service = Service::new(bench.guest.clone(), &settings, known, Arc::new(move || Ok(caller.clone())));

    // The address in kubelet's request is outdated, and another server has it now.
    let access_mode = Some(AccessMode { mode: Mode::MultiNodeMultiWriter.into() });
    let access_type = Some(AccessType::Mount(MountVolume::default()));
    let request = NodeStageVolumeRequest {
        volume_id: "v".into(),
        publish_context: context("10.0.0.1"),
        staging_target_path: bench.staging.to_str().unwrap().to_owned(),
        volume_capability: Some(VolumeCapability { access_mode, access_type }),
        ..NodeStageVolumeRequest::default()
    };
    for refusal in [Errno::EACCES, Errno::ETIMEDOUT] {
        *bench.machine.refusals.lock().unwrap() = vec![refusal];
        service.stage(request.clone()).await.unwrap();
        assert_eq!(bench.machine.shown(&bench.staging), Some(("10.0.0.2:/pvc-1".to_owned(), "rw")));
        let staged = NodeUnstageVolumeRequest {
            volume_id: "v".into(),
            staging_target_path: request.staging_target_path.clone(),
        };
        service.unstage(staged).await.unwrap();
    }
    service.stage(request.clone()).await.unwrap();
    // No server has the address any longer.
    *place.lock().unwrap() = "10.0.0.1";
    *bench.machine.refusals.lock().unwrap() = vec![Errno::EACCES];
    let unstaged = bench.kubelet.join("plugins/w/globalmount");
    std::fs::create_dir_all(unstaged.parent().unwrap()).unwrap();
    let other =
        NodeStageVolumeRequest { staging_target_path: unstaged.to_str().unwrap().to_owned(), ..request };
    assert_eq!(service.stage(other).await.unwrap_err().code(), tonic::Code::Internal);

    // The server moves while a pod uses the share, and a failure has been noticed.
    bench.publish("10.0.0.1", "a", &writable()).await.unwrap();
    *place.lock().unwrap() = "10.0.0.3";
    let is_found = || bench.machine.shown(&bench.pod("a")) == Some(("10.0.0.3:/pvc-1".to_owned(), "rw"));
    for millisecond in 0..30_000 {
        if is_found() {
            break;
        }
        // An attempt that fails because the machine is slow is repeated at the next notice.
        if millisecond % 1000 == 0 {
            service.0.lookouts.last.lock().unwrap().clear();
            service.look_after("v", bench.pod("a").to_str().unwrap().to_owned());
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    assert!(is_found(), "it has not been found again");
    assert_eq!(bench.machine.shown(&bench.staging), Some(("10.0.0.3:/pvc-1".to_owned(), "rw")));
    assert!(!service.0.lookouts.is_due("v"), "not every pod's every question is one to the host half");
    assert!(service.0.lookouts.is_due("w"));
}
