//! `guestctl manifests`, and the host half's own `DaemonSet`, held against the schemas of the Kubernetes API.

use std::process::{Command, Output};

use k8s_openapi::Resource;
use k8s_openapi::api::apps::v1::{DaemonSet, Deployment};
use k8s_openapi::api::core::v1::{ConfigMap, Container, Namespace, ServiceAccount};
use k8s_openapi::api::rbac::v1::{ClusterRole, ClusterRoleBinding, Role, RoleBinding};
use k8s_openapi::api::storage::v1::{CSIDriver, StorageClass};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

fn guestctl(arguments: &[&str]) -> Output {
    // Nothing is asked of a daemon.
    let mut command = Command::new(env!("CARGO_BIN_EXE_guestctl"));
    command.env("GUESTLET_HOST_SOCKET", "/nonexistent").arg("manifests").args(arguments).output().unwrap()
}

fn documents(arguments: &[&str]) -> Vec<Value> {
    let output = guestctl(arguments);
    assert!(output.status.success(), "{output:?}");
    serde_saphyr::from_multiple(&String::from_utf8(output.stdout).unwrap()).unwrap()
}

/// The object of a document; fails on a field that the schema does not have.
fn object<T: Resource + Serialize + DeserializeOwned>(documents: &[Value]) -> T {
    let is_meant =
        |document: &&Value| document["kind"] == T::KIND && document["apiVersion"] == T::API_VERSION;
    let meant: Vec<_> = documents.iter().filter(is_meant).collect();
    assert_eq!(meant.len(), 1, "{}", T::KIND);
    let object: T = serde_json::from_value(meant[0].clone()).unwrap();
    assert_eq!(&serde_json::to_value(&object).unwrap(), meant[0], "fields that the schema does not have");
    object
}

#[test]
fn the_manifests_fit_the_api_and_each_other() {
    let documents = documents(&[]);
    assert_eq!(documents.len(), 8);
    let driver: CSIDriver = object(&documents);
    let class: StorageClass = object(&documents);
    let account: ServiceAccount = object(&documents);
    let cluster_role: ClusterRole = object(&documents);
    let cluster_binding: ClusterRoleBinding = object(&documents);
    let role: Role = object(&documents);
    let binding: RoleBinding = object(&documents);
    let deployment: Deployment = object(&documents);

    assert_eq!(driver.metadata.name.as_ref(), Some(&class.provisioner));
    for (reference, name) in [
        (&cluster_binding.role_ref.name, &cluster_role.metadata.name),
        (&binding.role_ref.name, &role.metadata.name),
    ] {
        assert_eq!(Some(reference), name.as_ref());
    }
    let names = [&account.metadata.name, &account.metadata.namespace];
    for subjects in [&cluster_binding.subjects, &binding.subjects] {
        let subject = &subjects.as_ref().unwrap()[0];
        assert_eq!([&Some(subject.name.clone()), &subject.namespace], names);
    }

    let pod = deployment.spec.unwrap().template.spec.unwrap();
    assert_eq!(pod.service_account_name, account.metadata.name);
    let volume = &pod.volumes.as_ref().unwrap()[0];
    let socket = volume.host_path.as_ref().unwrap();
    assert_eq!(socket.path, "/var/lib/kubelet/plugins/driver.harvesterhci.io/controller");
    assert_eq!(pod.containers.len(), 4);
    for container in &pod.containers {
        let (_, version) = container.image.as_ref().unwrap().rsplit_once(":v").unwrap();
        assert!(version.split('.').count() == 3, "{version}");
        assert_eq!(container.volume_mounts.as_ref().unwrap()[0].name, volume.name);
        let confined = container.security_context.as_ref().unwrap();
        assert_eq!(confined.allow_privilege_escalation, Some(false));
        assert_eq!(container.liveness_probe.is_some(), container.name != "liveness");
    }
    probes_reach_the_one_that_answers(&pod.containers);
    // Nothing in a cluster needs its secrets for this.
    for rule in cluster_role.rules.unwrap().into_iter().chain(role.rules.unwrap()) {
        let resources = rule.resources.unwrap();
        assert!(!resources.iter().any(|name| name == "secrets" || name == "*"), "{resources:?}");
        assert!(!rule.verbs.iter().any(|verb| verb == "*"), "{resources:?}");
    }
}

/// A probe's port is a number: a name would be looked for in the container of the probe, which serves none.
#[track_caller]
fn probes_reach_the_one_that_answers(containers: &[Container]) {
    let liveness = containers.iter().find(|container| container.name == "liveness").unwrap();
    let port = liveness.ports.as_ref().unwrap()[0].container_port;
    assert!(liveness.args.as_ref().unwrap().contains(&format!("--http-endpoint=:{port}")));
    for container in containers.iter().filter(|container| container.name != "liveness") {
        let probe = container.liveness_probe.as_ref().unwrap().http_get.as_ref().unwrap();
        assert_eq!(probe.port, IntOrString::Int(port), "{}", container.name);
    }
}

/// What is there for nodes on several hosts are comments, until somebody wants it.
#[test]
fn with_the_lines_for_several_hosts_pods_go_where_volumes_can_be_made() {
    let text = String::from_utf8(guestctl(&[]).stdout).unwrap();
    let is_meant = |block: &str| block.starts_with("For nodes on several hosts");
    let (mut all, mut meant) = (String::new(), false);
    for line in text.lines() {
        let comment = line.trim_start().strip_prefix("# ");
        meant = comment.is_some_and(|comment| meant || is_meant(comment));
        let is_heading = comment.is_some_and(is_meant);
        let line = if meant && !is_heading { line.replacen("# ", "", 1) } else { line.to_owned() };
        all = all + &line + "\n";
    }
    let documents: Vec<Value> = serde_saphyr::from_multiple(&all).unwrap();
    assert_eq!(object::<CSIDriver>(&documents).spec.storage_capacity, Some(true));
    let rules = object::<ClusterRole>(&documents).rules.unwrap();
    let may = |verb: &str, resource: &str| {
        rules.iter().any(|rule| {
            rule.resources.as_ref().is_some_and(|all| all.iter().any(|one| one == resource))
                && rule.verbs.iter().any(|one| one == verb)
        })
    };
    assert!(may("create", "csistoragecapacities") && may("get", "replicasets"));
    let pod = object::<Deployment>(&documents).spec.unwrap().template.spec.unwrap();
    let provisioner = pod.containers.iter().find(|container| container.name == "provisioner").unwrap();
    let arguments = provisioner.args.as_ref().unwrap();
    for argument in ["--strict-topology", "--enable-capacity", "--capacity-ownerref-level=2"] {
        assert!(arguments.iter().any(|one| one == argument), "{arguments:?}");
    }
    let variables: Vec<_> = provisioner.env.iter().flatten().map(|one| one.name.as_str()).collect();
    assert_eq!(variables, ["NAMESPACE", "POD_NAME"]);
}

#[test]
fn another_driver_and_another_kubelet_root_are_in_all_places() {
    let arguments = ["--driver", "disks.example.org", "--kubelet-root", "/srv/kubelet"];
    let documents = documents(&arguments);
    let driver: CSIDriver = object(&documents);
    assert_eq!(driver.metadata.name.as_deref(), Some("disks.example.org"));
    let deployment: Deployment = object(&documents);
    let volumes = deployment.spec.unwrap().template.spec.unwrap().volumes.unwrap();
    let path = &volumes[0].host_path.as_ref().unwrap().path;
    assert_eq!(path, "/srv/kubelet/plugins/disks.example.org/controller");

    for (bad, words) in
        [(["--driver", "a/b"], "domain name"), (["--kubelet-root", "kubelet"], "absolute path")]
    {
        let output = guestctl(&bad);
        assert_eq!(output.status.code(), Some(2));
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(error.contains(words), "{error}");
    }
}

#[test]
fn the_host_half_fits_a_cluster_and_may_do_nothing_in_it() {
    let documents: Vec<Value> =
        serde_saphyr::from_multiple(include_str!("../../packaging/kubernetes/guestlet-host.yaml")).unwrap();
    assert_eq!(documents.len(), 3);
    let namespace: Namespace = object(&documents);
    let settings: ConfigMap = object(&documents);
    let host: DaemonSet = object(&documents);
    assert_eq!(host.metadata.namespace, namespace.metadata.name);
    assert_eq!(settings.metadata.namespace, namespace.metadata.name);
    let spec = host.spec.unwrap();
    let (labels, pod) = (spec.template.metadata.unwrap().labels, spec.template.spec.unwrap());
    assert_eq!(spec.selector.match_labels, labels);
    assert_eq!((pod.automount_service_account_token, pod.service_account_name), (Some(false), None));

    let volumes = pod.volumes.unwrap();
    let [container] = pod.containers.as_slice() else { panic!("one container") };
    let mounts = container.volume_mounts.as_ref().unwrap();
    for mount in mounts {
        assert!(volumes.iter().any(|volume| volume.name == mount.name), "{}", mount.name);
    }
    // It reads the settings that the ConfigMap has.
    let [option, path] = container.args.as_deref().unwrap() else { panic!("{:?}", container.args) };
    let (folder, name) = path.rsplit_once('/').unwrap();
    let mount = mounts.iter().find(|mount| mount.mount_path == folder).unwrap();
    let source = volumes.iter().find(|volume| volume.name == mount.name).unwrap().config_map.as_ref();
    assert_eq!((option.as_str(), &source.unwrap().name), ("--config", &settings.metadata.name.unwrap()));
    assert!(settings.data.unwrap().contains_key(name));

    let confined = container.security_context.as_ref().unwrap();
    assert_ne!(confined.privileged, Some(true));
    assert_eq!(confined.allow_privilege_escalation, Some(false));
    assert_eq!(confined.read_only_root_filesystem, Some(true));
    assert_eq!(confined.capabilities.as_ref().unwrap().drop, Some(vec!["ALL".to_owned()]));
}
