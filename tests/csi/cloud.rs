//! The socket on which guestlet-ccm asks, passed on to a host half of the tests.

use std::time::Duration;

use guestlet::transport::{Both, http2};
use guestlet::wire::proto::v1::cloud_client::CloudClient;
use guestlet::wire::proto::v1::cloud_server::CloudServer;
use guestlet::wire::proto::v1::host_client::HostClient;
use guestlet::wire::proto::v1::{
    EnsureLoadBalancerRequest, ListLoadBalancersRequest, PingRequest, ServiceReference, WatchBounds,
    WatchInstancesRequest,
};
use tokio::net::UnixStream;
use tokio_util::sync::CancellationToken;
use tonic::Code;

use crate::cloud_host::{Host, instance};
use crate::host::host;
use crate::lab::{Lab, is_outside, serves, until, wait};

async fn connect(lab: &Lab) -> http2::Client {
    let stream = UnixStream::connect(lab.path("cloud/cloud.sock")).await.unwrap();
    let (client, mut connection) = http2::connect(stream).await.unwrap();
    tokio::spawn(async move { connection.ended().await });
    client
}

async fn client(lab: &Lab) -> CloudClient<http2::Client> {
    CloudClient::with_origin(connect(lab).await, http::Uri::from_static(http2::ORIGIN))
}

#[test]
fn the_socket_is_there_as_long_as_its_directory_is() {
    if is_outside() {
        return;
    }
    wait(async {
        let lab = Lab::unknown("");
        let (folder, socket) = (lab.path("cloud"), lab.path("cloud/cloud.sock"));
        tokio::time::sleep(Duration::from_millis(300)).await;
        assert!(!folder.exists(), "nothing is made where no pod is");
        for _ in 0..3 {
            std::fs::create_dir(&folder).unwrap();
            until("it is served", || serves(&socket));
            let mode =
                std::os::unix::fs::PermissionsExt::mode(&std::fs::metadata(&socket).unwrap().permissions());
            assert_eq!(mode & 0o777, 0o600);
            std::fs::remove_dir_all(&folder).unwrap();
        }
        std::fs::create_dir(&folder).unwrap();
        until("it is served", || serves(&socket));
        std::fs::remove_file(&socket).unwrap();
        until("it is served again", || serves(&socket));
    });
}

#[test]
fn calls_of_the_cloud_service_reach_the_host_half_and_no_others_do() {
    if is_outside() {
        return;
    }
    wait(async {
        let mut lab = Lab::unknown("");
        std::fs::create_dir(lab.path("cloud")).unwrap();
        until("it is served", || serves(&lab.path("cloud/cloud.sock")));
        let refused = client(&lab).await.list_load_balancers(ListLoadBalancersRequest {}).await.unwrap_err();
        assert_eq!(refused.code(), Code::Unavailable, "{refused}");
        assert!(refused.message().contains("no host half holds this guest"), "{refused}");

        let model = Host::new(lab.folder.path());
        let known = host("one", CancellationToken::new());
        lab.introduce_by(Both(known, CloudServer::new(model.clone()))).await;
        let mut client = client(&lab).await;
        let service = ServiceReference { namespace: "shop".into(), name: "web".into(), uid: "u".into() };
        let request =
            EnsureLoadBalancerRequest { service: Some(service), ..EnsureLoadBalancerRequest::default() };
        // Whoever holds the guest has to open the way first.
        let balancer = loop {
            match client.ensure_load_balancer(request.clone()).await {
                Ok(answer) => break answer.into_inner().load_balancer.unwrap(),
                Err(status) => assert_eq!(status.code(), Code::Unavailable, "{status}"),
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        };
        assert_eq!((balancer.name.as_str(), balancer.addresses.len()), ("lb-u", 1));
        // A long poll goes on beside other calls, and is answered when something happens.
        let first = client.watch_instances(WatchInstancesRequest::default()).await.unwrap().into_inner();
        assert!(first.complete && first.instances.is_empty());
        let bounds = Some(WatchBounds { position: first.position, wait_seconds: 20 });
        let mut other = client.clone();
        let waiting =
            tokio::spawn(async move { other.watch_instances(WatchInstancesRequest { bounds }).await });
        let all = client.list_load_balancers(ListLoadBalancersRequest {}).await.unwrap().into_inner();
        assert_eq!(all.load_balancers.len(), 1);
        model.set(instance("1", "n1", "192.0.2.11"));
        let news = waiting.await.unwrap().unwrap().into_inner();
        assert_eq!((news.complete, news.instances[0].vm_uid.as_str()), (false, "1"));

        let mut others = HostClient::with_origin(connect(&lab).await, http::Uri::from_static(http2::ORIGIN));
        let refused = others.ping(PingRequest::default()).await.unwrap_err();
        assert_eq!(refused.code(), Code::Unimplemented, "{refused}");
    });
}
