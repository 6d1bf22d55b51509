//! What the API server makes of `KubeVirt`'s kinds.

use http::{Method, StatusCode};
use serde_json::{Value, json};

use crate::api::Api;
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
            "template": { "spec": { "domain": { "devices": {} } } },
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

/// A VM with one more volume and one more disk.
async fn with(lab: &Lab, name: &str, volume: Value, disk: Value) -> String {
    refused(lab, |vm| {
        vm["metadata"]["name"] = json!(name);
        let spec = &mut vm["spec"]["template"]["spec"];
        spec["volumes"] = json!([{ "name": "root", "containerDisk": { "image": "root" } }, volume]);
        spec["domain"]["devices"]["disks"] = json!([{ "name": "root" }, disk]);
    })
    .await
}

#[test]
fn what_the_schemas_allow_and_kubevirt_does_not_is_refused() {
    wait(async {
        let lab = Lab::start().await;
        let volume = |name: &str| json!({ "name": name, "persistentVolumeClaim": { "claimName": "data", "hotpluggable": true } });
        let disk = |name: &str| json!({ "name": name, "disk": { "bus": "scsi" } });
        let told = with(&lab, "a", volume("data"), disk("other")).await;
        assert!(told.contains("data has no disk"), "{told}");
        let told = with(&lab, "b", volume("root"), disk("root")).await;
        assert!(told.contains("two volumes have the name root"), "{told}");
        let told =
            with(&lab, "c", volume("data"), json!({ "name": "data", "disk": { "bus": "sata" } })).await;
        assert!(told.contains("bus"), "{told}");
        let mut odd = disk("data");
        odd["serial"] = json!("a/b");
        let told = with(&lab, "d", volume("data"), odd).await;
        assert!(told.contains("serial"), "{told}");
        let told = refused(&lab, |vm| {
            let spec = &mut vm["spec"]["template"]["spec"];
            spec["volumes"] = json!([{ "name": "root", "containerDisk": { "image": "root" } }]);
            spec["domain"]["devices"]["autoattachVSOCK"] = json!(true);
        })
        .await;
        assert!(told.contains("VSOCK"), "{told}");
    });
}

#[test]
fn only_kubevirt_changes_the_spec_of_an_instance() {
    wait(async {
        let lab = Lab::start().await;
        lab.running("web").await;
        let plane = lab.turn.plane();
        plane.kubeconfig("other", "system:serviceaccount:default:other", "system:masters");
        let other = Api::read(plane.folder.path(), "other");
        let path = Kind::Vmi.path("default/web");
        let change = json!({ "spec": { "terminationGracePeriodSeconds": 1 } });
        let (status, answer) = call(&other, Method::PATCH, &path, MERGE, Some(&change)).await.unwrap();
        assert_eq!(status, StatusCode::UNPROCESSABLE_ENTITY, "{answer}");
        let change = json!({ "status": { "reason": "nonsense" } });
        let (status, answer) = call(&other, Method::PATCH, &path, MERGE, Some(&change)).await.unwrap();
        assert_eq!(status, StatusCode::OK, "{answer}");
        // An account without a role may do nothing at all.
        plane.kubeconfig("nobody", "system:serviceaccount:default:nobody", "system:serviceaccounts");
        let nobody = Api::read(plane.folder.path(), "nobody");
        for (method, path) in [
            (Method::GET, path.as_str()),
            (
                Method::PUT,
                "/apis/subresources.kubevirt.io/v1/namespaces/default/virtualmachines/web/addvolume",
            ),
        ] {
            let (status, answer) = call(&nobody, method, path, JSON, Some(&json!({}))).await.unwrap();
            assert_eq!(status, StatusCode::FORBIDDEN, "{answer}");
        }
    });
}

#[test]
fn an_account_gets_a_token_that_expires() {
    wait(async {
        let lab = Lab::start().await;
        let accounts = "/api/v1/namespaces/default/serviceaccounts";
        lab.api.create(accounts, &json!({ "metadata": { "name": "controller" } })).await;
        let wish = json!({ "spec": { "expirationSeconds": 600 } });
        let token = lab.api.create(&format!("{accounts}/controller/token"), &wish).await["status"].take();
        assert!(token["expirationTimestamp"].is_string(), "{token}");
        let review = json!({ "spec": { "token": token["token"] } });
        let review = lab.api.create("/apis/authentication.k8s.io/v1/tokenreviews", &review).await;
        assert_eq!(review["status"]["user"]["username"], "system:serviceaccount:default:controller");
    });
}
