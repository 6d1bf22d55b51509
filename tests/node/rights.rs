//! The packaged manifests: what the account may do suffices, and nothing of it is too much.

use std::process::Child;

use k8s_openapi::api::apps::v1::DaemonSet;
use k8s_openapi::api::core::v1::{ConfigMap, Namespace, ServiceAccount};
use k8s_openapi::api::rbac::v1::{ClusterRole, ClusterRoleBinding};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::bench::{Bench, NODE, guest_that_reads, host_of, one, packaged};
use crate::cluster::wait;

/// A process that ends with the test, however that ends.
struct Ends(Child);

impl Drop for Ends {
    fn drop(&mut self) {
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

/// A role's rules, each with one resource and one verb.
fn single() -> Vec<Value> {
    let role = one("node.yaml", "ClusterRole");
    let mut all = Vec::new();
    for rule in role["rules"].as_array().unwrap() {
        for resource in rule["resources"].as_array().unwrap() {
            for verb in rule["verbs"].as_array().unwrap() {
                let group = &rule["apiGroups"];
                all.push(json!({ "apiGroups": group, "resources": [resource], "verbs": [verb] }));
            }
        }
    }
    all
}

#[test]
fn each_verb_that_is_taken_away_is_missed() {
    wait(async {
        let bench = Bench::start().await;
        let web = bench.instance("web", NODE).await;
        let all = single();
        assert_eq!(all.len(), 8, "{all:?}");
        for (number, without) in all.iter().enumerate() {
            let (user, rest) = (format!("without-{number}"), all.iter().filter(|rule| *rule != without));
            let rules = json!(rest.collect::<Vec<_>>());
            crate::bench::grant(&bench.api, &user, &user, &rules).await;
            // Each makes the objects anew.
            bench.api.delete(&format!("{}/web", crate::bench::GUESTS)).await;
            let lab = host_of(&bench.turn.plane().kubeconfig(&user, &user, "nobody"), NODE);
            lab.write();
            let _guest = guest_that_reads(&lab, &web, "77777777-5c0f-4a8e-9d1b-0d7a2f3b4c5d");
            let _daemon = Ends(lab.daemon("log").spawn().unwrap());
            let (verb, resource) = (&without["verbs"][0], &without["resources"][0]);
            let words = format!("cannot {} resource {resource}", verb.as_str().unwrap());
            // What is made by a patch is refused in other words.
            let is_refused = |log: &str| {
                log.contains(&words)
                    || (verb == "create" && log.contains("guests.guestlet.io \"web\" is forbidden"))
            };
            lab.until(&words, || is_refused(&lab.log()));
        }
    });
}

/// The object of this kind; fails on a field that the schema does not have.
fn object<T: Serialize + DeserializeOwned>(file: &str, kind: &str) -> T {
    let found = one(file, kind);
    let object: T = serde_json::from_value(found.clone()).unwrap();
    assert_eq!(serde_json::to_value(&object).unwrap(), found, "{kind}: fields that the schema does not have");
    object
}

#[test]
fn the_manifests_fit_the_api_and_each_other() {
    let namespace: Namespace = object("namespace.yaml", "Namespace");
    let _: CustomResourceDefinition = object("crd.yaml", "CustomResourceDefinition");
    let account: ServiceAccount = object("node.yaml", "ServiceAccount");
    let role: ClusterRole = object("node.yaml", "ClusterRole");
    let binding: ClusterRoleBinding = object("node.yaml", "ClusterRoleBinding");
    let settings: ConfigMap = object("node.yaml", "ConfigMap");
    let set: DaemonSet = object("node.yaml", "DaemonSet");
    assert_eq!(Some(binding.role_ref.name), role.metadata.name);
    let subject = &binding.subjects.unwrap()[0];
    assert_eq!(Some(&subject.name), account.metadata.name.as_ref());
    for place in [&subject.namespace, &account.metadata.namespace, &set.metadata.namespace] {
        assert_eq!(*place, namespace.metadata.name);
    }
    let pod = set.spec.unwrap().template.spec.unwrap();
    assert_eq!((pod.service_account_name, pod.host_pid), (account.metadata.name, Some(true)));
    assert_eq!((pod.host_network, pod.host_ipc), (None, None));
    let container = &pod.containers[0];
    let capabilities = container.security_context.as_ref().unwrap().capabilities.as_ref().unwrap();
    assert_eq!(capabilities.drop, Some(vec!["ALL".to_owned()]));
    let wanted = ["SYS_ADMIN", "SYS_PTRACE", "NET_BIND_SERVICE"].map(str::to_owned);
    assert_eq!(capabilities.add, Some(wanted.to_vec()));

    // What the pod is started with is what the program takes, and its settings are good.
    let lab = crate::lab::Lab::new();
    std::fs::write(lab.settings(), &settings.data.unwrap()["host.toml"]).unwrap();
    let arguments = container.args.clone().unwrap();
    assert_eq!(arguments[..2], ["node", "--config"]);
    let check = lab.daemon("log").args(["node", "--check"]).env("NODE_NAME", NODE).status().unwrap();
    assert!(check.success(), "{}", lab.log());
    assert_eq!(container.env.as_ref().unwrap()[0].name, "NODE_NAME");
    let customized = packaged("kustomization.yaml");
    let files = ["namespace.yaml", "crd.yaml", "node.yaml"];
    assert_eq!(customized[0]["resources"], json!(files));
}
