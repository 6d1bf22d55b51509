//! What the API server makes of `KubeVirt`'s kinds.

use http::{Method, StatusCode};
use serde_json::{Value, json};

use crate::client::{JSON, JSON_PATCH, MERGE, call};
use crate::lab::{Lab, wait};
use crate::model::objects::Kind;

async fn refused(lab: &Lab, change: impl FnOnce(&mut Value)) -> String {
    let mut vm = json!({
        "apiVersion": "kubevirt.io/v1",
        "kind": "VirtualMachine",
        "metadata": { "name": "web" },
        "spec": {
            "runStrategy": "Halted",
            "template": { "spec": { "domain": { "devices": { "disks": [{ "name": "root" }] } } } },
        },
    });
    change(&mut vm);
    let path = Kind::Vm.within("default");
    let (status, answer) = call(&lab.api, Method::POST, &path, JSON, Some(&vm)).await.unwrap();
    assert_eq!(status, StatusCode::UNPROCESSABLE_ENTITY, "{answer}");
    answer["message"].as_str().unwrap().to_owned()
}

#[test]
fn what_kubevirt_requires_is_required() {
    wait(async {
        let lab = Lab::start().await;
        let told = refused(&lab, |vm| vm["spec"] = json!({ "runStrategy": "Always" })).await;
        assert!(told.contains("spec.template"), "{told}");
        let told = refused(&lab, |vm| {
            vm["spec"]["template"]["spec"]["volumes"] =
                json!([{ "persistentVolumeClaim": { "claimName": "a" } }]);
        })
        .await;
        assert!(told.contains("volumes.name"), "{told}");
        let told = refused(&lab, |vm| {
            let disks = json!([{ "name": "root", "serial": 1 }]);
            vm["spec"]["template"]["spec"]["domain"]["devices"]["disks"] = disks;
        })
        .await;
        assert!(told.contains("disks.serial"), "{told}");
    });
}

#[test]
fn a_vm_has_a_status_subresource_and_an_instance_has_none() {
    wait(async {
        let lab = Lab::start().await;
        lab.running("web").await;
        let change = json!({ "status": { "printableStatus": "Nonsense", "phase": "Failed" } });
        lab.api.patch(&Kind::Vm.path("default/web"), &change).await.unwrap();
        let vm = lab.api.get(&Kind::Vm.path("default/web")).await.unwrap();
        assert_ne!(vm["status"]["printableStatus"], "Nonsense");
        let path = Kind::Vmi.path("default/web") + "/status";
        let (status, _) = call(&lab.api, Method::PATCH, &path, MERGE, Some(&change)).await.unwrap();
        assert_eq!(status, StatusCode::NOT_FOUND);
        // Whoever may change conditions may change all the rest.
        lab.api.patch(&Kind::Vmi.path("default/web"), &json!({ "status": { "VSOCKCID": 3 } })).await.unwrap();
        assert_eq!(lab.instance("web").await.unwrap()["status"]["VSOCKCID"], 3);
    });
}

#[test]
fn unknown_fields_are_dropped_and_lists_that_are_missing_take_nothing() {
    wait(async {
        let lab = Lab::start().await;
        let made = lab
            .vm_with("web", |vm| {
                vm["spec"]["runStrategy"] = json!("Halted");
                vm["spec"]["template"]["spec"]["nonsense"] = json!(1);
                vm["spec"]["template"]["spec"].as_object_mut().unwrap().remove("volumes");
                vm["spec"]["template"]["spec"]["domain"]["devices"] = json!({});
            })
            .await;
        assert!(made["spec"]["template"]["spec"]["nonsense"].is_null(), "{made}");
        let volume = json!({ "name": "data", "persistentVolumeClaim": { "claimName": "data" } });
        let change = json!([{ "op": "add", "path": "/spec/template/spec/volumes/-", "value": volume }]);
        let path = Kind::Vm.path("default/web");
        let (status, _) = call(&lab.api, Method::PATCH, &path, JSON_PATCH, Some(&change)).await.unwrap();
        assert_eq!(status, StatusCode::UNPROCESSABLE_ENTITY);
    });
}
