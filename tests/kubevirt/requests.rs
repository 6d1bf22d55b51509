//! Volumes that are plugged by the subresources addvolume and removevolume.

use http::{Method, StatusCode};
use serde_json::{Value, json};

use crate::client::{JSON, call};
use crate::lab::{Lab, wait};
use crate::model::objects::{Kind, named, text};
use crate::model::pace::Step;

fn options(claim: &str) -> Value {
    json!({
        "name": claim,
        "disk": { "disk": { "bus": "scsi" }, "serial": claim },
        "volumeSource": { "persistentVolumeClaim": { "claimName": claim } },
    })
}

#[test]
fn a_request_is_accepted_before_anything_happens() {
    wait(async {
        let lab = Lab::start().await;
        lab.set_gates(&["HotplugVolumes"]).await;
        lab.claim("data", 8).await;
        lab.running("web").await;
        lab.model.hold(Step::Copy, "web");
        assert_eq!(lab.call("web", "addvolume", &options("data")).await.0, StatusCode::ACCEPTED);
        let vm = lab.api.get(&Kind::Vm.path("default/web")).await.unwrap();
        assert_eq!(vm["status"]["volumeRequests"][0]["addVolumeOptions"]["name"], "data");
        assert!(named(&vm["spec"]["template"]["spec"]["volumes"], "data").is_none());
        // The name is there for whoever asks next, but nothing that could be taken away.
        assert_eq!(lab.call("web", "addvolume", &options("data")).await.0, StatusCode::CONFLICT);
        let gone = json!({ "name": "data" });
        assert_eq!(lab.call("web", "removevolume", &gone).await.0, StatusCode::CONFLICT);

        lab.model.release(Step::Copy, "web");
        lab.is_in("web", "data", "Ready").await;
        let disks = lab.model.journal();
        assert_eq!(disks.plugged().next().unwrap().serial, "data");
        let vm = lab.api.get(&Kind::Vm.path("default/web")).await.unwrap();
        let volume = named(&vm["spec"]["template"]["spec"]["volumes"], "data").unwrap();
        assert_eq!(volume["persistentVolumeClaim"], json!({ "claimName": "data", "hotpluggable": true }));

        assert_eq!(lab.call("web", "removevolume", &gone).await.0, StatusCode::ACCEPTED);
        lab.has_left("web", "data").await;
        assert_eq!(lab.call("web", "removevolume", &gone).await.0, StatusCode::CONFLICT);
        assert_eq!(lab.call("web", "removevolume", &json!({ "name": "root" })).await.0, StatusCode::CONFLICT);
        assert_eq!(lab.call("nobody", "addvolume", &options("data")).await.0, StatusCode::NOT_FOUND);
        assert_eq!(lab.model.journal().requests.len(), 7);
    });
}

#[test]
fn a_request_changes_the_spec_where_that_is_declarative() {
    wait(async {
        let lab = Lab::start().await;
        lab.claim("data", 8).await;
        lab.running("web").await;
        assert_eq!(lab.call("web", "addvolume", &options("data")).await.0, StatusCode::ACCEPTED);
        let vm = lab.api.get(&Kind::Vm.path("default/web")).await.unwrap();
        assert!(named(&vm["spec"]["template"]["spec"]["volumes"], "data").is_some());
        assert!(vm["status"]["volumeRequests"].is_null());
        lab.is_in("web", "data", "Ready").await;
        assert_eq!(lab.call("web", "removevolume", &json!({ "name": "data" })).await.0, StatusCode::ACCEPTED);
        lab.has_left("web", "data").await;
    });
}

#[test]
fn nothing_is_plugged_without_a_gate() {
    wait(async {
        let lab = Lab::start().await;
        lab.set_gates(&["VSOCK"]).await;
        lab.claim("data", 8).await;
        lab.running("web").await;
        let (status, answer) = lab.call("web", "addvolume", &options("data")).await;
        assert_eq!(status, StatusCode::BAD_REQUEST);
        assert!(text(&answer["message"]).contains("gate"), "{answer}");
        lab.plug("web", "data").await;
        // A VM that is looked at later has run for as long.
        lab.running("later").await;
        let instance = lab.instance("web").await.unwrap();
        assert!(named(&instance["spec"]["volumes"], "data").is_none());

        lab.set_gates(&["DeclarativeHotplugVolumes"]).await;
        lab.is_in("web", "data", "Ready").await;
    });
}

#[test]
fn an_instance_of_a_vm_takes_requests_only_where_they_count() {
    wait(async {
        let lab = Lab::start().await;
        lab.claim("data", 8).await;
        lab.running("web").await;
        let path =
            "/apis/subresources.kubevirt.io/v1/namespaces/default/virtualmachineinstances/web/addvolume";
        let options = options("data");
        let ask = async || call(&lab.api, Method::PUT, path, JSON, Some(&options)).await.unwrap().0;
        assert_eq!(ask().await, StatusCode::BAD_REQUEST);
        lab.set_gates(&["HotplugVolumes"]).await;
        assert_eq!(ask().await, StatusCode::ACCEPTED);
        lab.is_in("web", "data", "Ready").await;
    });
}
