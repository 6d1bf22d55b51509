//! The packaged manifests: they are what the API server takes, what they say of each other is so, and what the pods are started
//! with is what the programs take.

use std::path::Path;

use k8s_openapi::api::apps::v1::{DaemonSet, Deployment};
use k8s_openapi::api::core::v1::{ConfigMap, Container, Namespace, PodSpec, ServiceAccount};
use k8s_openapi::api::networking::v1::NetworkPolicy;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::api::rbac::v1::{ClusterRole, ClusterRoleBinding, Role, RoleBinding};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::bench::{NODE, one, packaged};

/// The object of this kind; fails on a field that the schema does not have.
pub fn object<T: Serialize + DeserializeOwned>(file: &str, kind: &str) -> T {
    let found = one(file, kind);
    let object: T = serde_json::from_value(found.clone()).unwrap();
    assert_eq!(serde_json::to_value(&object).unwrap(), found, "{kind}: fields that the schema does not have");
    object
}

/// What an environment variable of a container is.
fn field(container: &Container, name: &str) -> String {
    let all = container.env.as_ref().unwrap();
    let variable = all.iter().find(|one| one.name == name).unwrap_or_else(|| panic!("no {name}"));
    let from = variable.value_from.as_ref().unwrap();
    from.field_ref.as_ref().unwrap().field_path.clone()
}

/// Whether a container has no more rights than these capabilities give it.
fn is_confined(container: &Container, added: Option<Vec<String>>) {
    let context = container.security_context.as_ref().unwrap();
    assert_eq!((context.privileged, context.allow_privilege_escalation), (None, Some(false)));
    assert_eq!(context.read_only_root_filesystem, Some(true));
    let capabilities = context.capabilities.clone().unwrap();
    assert_eq!((capabilities.drop, capabilities.add), (Some(vec!["ALL".to_owned()]), added));
}

/// Where a container finds a volume.
fn mount<'a>(container: &'a Container, name: &str) -> &'a str {
    let all = container.volume_mounts.as_ref().unwrap();
    &all.iter().find(|one| one.name == name).unwrap_or_else(|| panic!("no {name}")).mount_path
}

#[test]
fn the_manifests_fit_the_api_and_each_other() {
    let namespace: Namespace = object("namespace.yaml", "Namespace");
    let _: CustomResourceDefinition = object("crd.yaml", "CustomResourceDefinition");
    let account: ServiceAccount = object("node.yaml", "ServiceAccount");
    let role: ClusterRole = object("node.yaml", "ClusterRole");
    let binding: ClusterRoleBinding = object("node.yaml", "ClusterRoleBinding");
    let own: Role = object("node.yaml", "Role");
    let own_binding: RoleBinding = object("node.yaml", "RoleBinding");
    let settings: ConfigMap = object("node.yaml", "ConfigMap");
    let set: DaemonSet = object("node.yaml", "DaemonSet");
    assert_eq!(Some(binding.role_ref.name), role.metadata.name);
    assert_eq!(Some(own_binding.role_ref.name), own.metadata.name);
    for subjects in [&binding.subjects, &own_binding.subjects] {
        let subject = &subjects.as_ref().unwrap()[0];
        assert_eq!(Some(&subject.name), account.metadata.name.as_ref());
        assert_eq!(subject.namespace, namespace.metadata.name);
    }
    for place in [&own.metadata, &own_binding.metadata, &account.metadata, &set.metadata, &settings.metadata]
    {
        assert_eq!(place.namespace, namespace.metadata.name);
    }
    let pod = set.spec.unwrap().template.spec.unwrap();
    assert_eq!((&pod.service_account_name, pod.host_pid), (&account.metadata.name, Some(true)));
    assert_eq!((pod.host_network, pod.host_ipc), (None, None));
    let container = &pod.containers[0];
    let wanted = ["SYS_ADMIN", "SYS_PTRACE", "NET_BIND_SERVICE"].map(str::to_owned);
    is_confined(container, Some(wanted.to_vec()));
    assert_eq!(field(container, "NODE_NAME"), "spec.nodeName");
    assert_eq!(field(container, "POD_NAMESPACE"), "metadata.namespace");
    assert_eq!(mount(container, "settings"), "/etc/guestlet");

    // It may read no Lease but the controller's, and its token is for the controller alone.
    let leases = &own.rules.unwrap()[0];
    assert_eq!(leases.resource_names, Some(vec!["guestlet-controller".to_owned()]));
    let volume = pod.volumes.as_ref().unwrap().iter().find(|one| one.name == "token").unwrap();
    let source = &volume.projected.as_ref().unwrap().sources.as_ref().unwrap()[0];
    let token = source.service_account_token.as_ref().unwrap();
    assert_eq!((token.audience.as_deref(), token.path.as_str()), (Some("guestlet-controller"), "token"));
    assert_eq!(mount(container, "token"), "/var/run/secrets/guestlet");

    // What the pod is started with is what the program takes, and its settings are good.
    let lab = crate::lab::Lab::new();
    std::fs::write(lab.settings(), &settings.data.unwrap()["host.toml"]).unwrap();
    let arguments = container.args.clone().unwrap();
    assert_eq!(arguments[..2], ["node", "--config"]);
    let check = lab.daemon("log").args(["node", "--check"]).env("NODE_NAME", NODE).status().unwrap();
    assert!(check.success(), "{}", lab.log());
}

/// The pod of the controller.
fn controller() -> (Deployment, PodSpec) {
    let deployment: Deployment = object("controller.yaml", "Deployment");
    let pod = deployment.spec.clone().unwrap().template.spec.unwrap();
    (deployment, pod)
}

#[test]
fn the_controller_has_no_rights_on_its_host() {
    let (deployment, pod) = controller();
    assert_eq!((pod.host_network, pod.host_pid, pod.host_ipc), (None, None, None));
    assert_eq!(pod.volumes.as_ref().unwrap().iter().find(|one| one.host_path.is_some()), None);
    let context = pod.security_context.as_ref().unwrap();
    assert_eq!(context.run_as_non_root, Some(true));
    assert_ne!(context.run_as_user.unwrap(), 0);
    assert_eq!(context.seccomp_profile.as_ref().unwrap().type_, "RuntimeDefault");
    let container = &pod.containers[0];
    is_confined(container, None);
    for (name, path) in
        [("POD_NAME", "metadata.name"), ("POD_NAMESPACE", "metadata.namespace"), ("POD_IP", "status.podIP")]
    {
        assert_eq!(field(container, name), path);
    }
    assert_eq!(container.args.as_ref().unwrap()[..2], ["controller", "--config"]);
    // What it is started with it takes, and it writes where it may alone.
    let settings: ConfigMap = object("controller.yaml", "ConfigMap");
    let settings = settings.data.unwrap()["host.toml"].clone();
    let lab = crate::lab::Lab::new();
    std::fs::write(lab.settings(), &settings).unwrap();
    let arguments = ["controller", "--check", "--name", "controller-0", "--address", "192.0.2.7"];
    assert!(lab.daemon("log").args(arguments).status().unwrap().success(), "{}", lab.log());
    let run = mount(container, "run");
    assert_eq!(run, "/run/guestlet-host");
    assert!(settings.contains(&format!("trust.state-dir = \"{run}/")), "{settings}");
    let account: ServiceAccount = object("controller-role.yaml", "ServiceAccount");
    assert_eq!(
        (pod.service_account_name, deployment.metadata.namespace),
        (account.metadata.name, account.metadata.namespace)
    );
}

/// KubeVirt's agent of a node sets its label to "false" whenever it starts again. A pod whose node does not fit any more is deleted.
#[test]
fn nodes_keep_their_pod_whatever_kubevirt_says_of_them() {
    let set: DaemonSet = object("node.yaml", "DaemonSet");
    let pod = set.spec.unwrap().template.spec.unwrap();
    assert_eq!(pod.node_selector, None);
    let affinity = pod.affinity.unwrap().node_affinity.unwrap();
    let terms = affinity.required_during_scheduling_ignored_during_execution.unwrap().node_selector_terms;
    let fits = |labels: &[(&str, &str)]| {
        terms.iter().any(|term| {
            let mut wanted = term.match_expressions.iter().flatten();
            assert!(term.match_fields.is_none());
            wanted.all(|one| match (one.operator.as_str(), &one.values) {
                ("Exists", None) => labels.iter().any(|(key, _)| *key == one.key),
                other => panic!("{other:?}"),
            })
        })
    };
    let linux = ("kubernetes.io/os", "linux");
    for (labels, expected) in [
        (vec![linux, ("kubevirt.io/schedulable", "true")], true),
        (vec![linux, ("kubevirt.io/schedulable", "false")], true),
        (vec![linux], false),
    ] {
        assert_eq!(fits(&labels), expected, "{labels:?}");
    }
}

#[test]
fn the_controller_is_two_that_nodes_alone_reach() {
    let (deployment, pod) = controller();
    let spec = deployment.spec.unwrap();
    assert_eq!(spec.replicas, Some(2));
    let labels = spec.template.metadata.unwrap().labels;
    let budget: PodDisruptionBudget = object("controller.yaml", "PodDisruptionBudget");
    let policy: NetworkPolicy = object("network-policy.yaml", "NetworkPolicy");
    let policy = policy.spec.unwrap();
    for selector in [budget.spec.unwrap().selector, policy.pod_selector, Some(spec.selector)] {
        assert_eq!(selector.unwrap().match_labels, labels);
    }
    let port = |name: &str| {
        let all = pod.containers[0].ports.as_ref().unwrap();
        all.iter().find(|one| one.name.as_deref() == Some(name)).unwrap().container_port
    };
    let settings: ConfigMap = object("controller.yaml", "ConfigMap");
    let settings = settings.data.unwrap()["host.toml"].clone();
    let [from_nodes, from_all] = policy.ingress.as_deref().unwrap() else { panic!("{:?}", policy.ingress) };
    for (rule, name, key) in [(from_nodes, "controller", "controller"), (from_all, "metrics", "metrics")] {
        let port = port(name);
        assert_eq!(rule.ports.as_ref().unwrap()[0].port, Some(IntOrString::Int(port)));
        assert!(settings.contains(&format!("{key} = \"[::]:{port}\"")), "{settings}");
    }
    let set: DaemonSet = object("node.yaml", "DaemonSet");
    let nodes = set.spec.unwrap().template.metadata.unwrap().labels;
    let from = from_nodes.from.as_ref().unwrap();
    assert_eq!(from.len(), 1);
    assert_eq!(from[0].pod_selector.as_ref().unwrap().match_labels, nodes);
    assert_eq!((&from[0].namespace_selector, &from_all.from), (&None, &None));
}

/// The names of the manifests in a directory of packaging/kubernetes/host, without its kustomization.
fn files(directory: &str) -> Vec<String> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("packaging/kubernetes/host").join(directory);
    let names = std::fs::read_dir(folder).unwrap().map(|one| one.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<_> = names.filter(|name| name != "kustomization.yaml").collect();
    names.sort();
    names
}

#[test]
fn each_manifest_is_installed() {
    let kustomization = |of: &str| packaged(&format!("../{of}/kustomization.yaml")).remove(0);
    for directory in ["base", "components/policies", "components/guests-here"] {
        let mut listed: Vec<String> =
            serde_json::from_value(kustomization(directory)["resources"].take()).unwrap();
        listed.sort();
        assert_eq!(listed, files(directory), "{directory}");
    }
    for (overlay, resources) in [
        ("overlays/kubevirt", json!(["../../base"])),
        (
            "overlays/harvester",
            json!(["../../base", "controller-shares-role.yaml", "controller-balancers-role.yaml"]),
        ),
    ] {
        let overlay = kustomization(overlay);
        assert_eq!(overlay["resources"], resources);
        assert_eq!(
            overlay["components"],
            json!(["../../components/policies", "../../components/guests-here"])
        );
    }
    assert_eq!(kustomization(".")["resources"], json!(["overlays/kubevirt"]));
    // A patch of what is not there would be refused only by whoever installs it.
    let patch = kustomization("overlays/harvester")["patches"][0]["patch"].take();
    let patch: Value = serde_saphyr::from_str(patch.as_str().unwrap()).unwrap();
    let volume = &patch["spec"]["template"]["spec"]["volumes"][0];
    let set: DaemonSet = object("node.yaml", "DaemonSet");
    let volumes = set.spec.unwrap().template.spec.unwrap().volumes.unwrap();
    assert!(volumes.iter().any(|one| volume["name"] == one.name.as_str() && one.host_path.is_some()));
}
