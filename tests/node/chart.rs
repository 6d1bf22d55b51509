//! The Helm chart is made of the manifests: with the values that it comes with, it is what kustomize installs, and other values
//! reach the place that they are for.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};

use crate::bench::packaged;

/// What is installed, but for the namespace, which Helm has to find.
const MANIFESTS: [&str; 8] = [
    "base/crd.yaml",
    "base/node.yaml",
    "base/controller-role.yaml",
    "base/controller.yaml",
    "base/network-policy.yaml",
    "components/policies/controller.yaml",
    "components/policies/node.yaml",
    "components/guests-here/guests-here.yaml",
];

fn all_of(files: impl IntoIterator<Item = &'static str>) -> Vec<Value> {
    files.into_iter().flat_map(|file| packaged(&format!("../{file}"))).collect()
}

/// The chart, and the values that it comes with.
struct Chart {
    _folder: tempfile::TempDir,
    path: PathBuf,
    values: Value,
}

fn chart() -> Chart {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("chart");
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("packaging/kubernetes/chart.sh");
    assert!(Command::new(script).arg("1.2.3").arg(&path).status().unwrap().success());
    let values = serde_saphyr::from_str(&std::fs::read_to_string(path.join("values.yaml")).unwrap()).unwrap();
    Chart { _folder: folder, path, values }
}

/// The value that a template names by `.Values.a.b`.
fn named<'a>(values: &'a Value, name: &str) -> &'a Value {
    let path = name.strip_prefix(".Values").unwrap_or_else(|| panic!("{name}")).replace('.', "/");
    values.pointer(&path).unwrap_or_else(|| panic!("no {name}"))
}

/// What Helm makes of one action of a template; those that the chart uses, and no others.
fn evaluated(action: &str, values: &Value) -> String {
    let words: Vec<_> = action.trim_start_matches('-').split_whitespace().collect();
    match words.as_slice() {
        ["toYaml", name, "|", "nindent", depth] => {
            // JSON is YAML.
            format!("\n{}{}", " ".repeat(depth.parse().unwrap()), named(values, name))
        }
        ["toJson", name] => named(values, name).to_string(),
        [name] => {
            let value = named(values, name);
            value.as_str().map_or_else(|| value.to_string(), str::to_owned)
        }
        _ => panic!("{action}"),
    }
}

/// Whether Helm leaves out a template, which begins with its condition: one value that is false.
fn is_left_out(template: &str, values: &Value) -> bool {
    let condition = template.lines().next().and_then(|line| line.strip_prefix("{{- if .Values."));
    let name = condition.and_then(|rest| rest.strip_suffix(" }}"));
    name.is_some_and(|name| *named(values, &format!(".Values.{name}")) == json!(false))
}

/// What Helm makes of a template in the namespace guestlet-system of a cluster that has admission policies.
fn rendered(template: &str, values: &Value) -> String {
    let is_control =
        |line: &&str| line.starts_with("{{- if ") || line.starts_with("{{- fail ") || *line == "{{- end }}";
    let mut rendered = String::new();
    for line in template.lines().filter(|line| !is_control(line)) {
        let mut rest = line;
        while let Some((before, (action, after))) =
            rest.split_once("{{").map(|(before, after)| (before, after.split_once("}}").unwrap()))
        {
            let before = if action.starts_with('-') { before.trim_end() } else { before };
            rendered += &(before.to_owned() + &evaluated(action, values));
            rest = after;
        }
        rendered += &(rest.to_owned() + "\n");
    }
    rendered
}

/// All that is installed, in an order that does not depend on files.
fn sorted(mut objects: Vec<Value>) -> Vec<Value> {
    objects.retain(|object| !object.is_null());
    objects.sort_by_key(|object| format!("{} {}", object["kind"], object["metadata"]["name"]));
    objects
}

fn installed(chart: &Chart, values: &Value) -> Vec<Value> {
    let files = ["templates", "crds"].map(|folder| std::fs::read_dir(chart.path.join(folder)).unwrap());
    let objects = files.into_iter().flatten().flat_map(|file| {
        let text = std::fs::read_to_string(file.unwrap().path()).unwrap();
        if is_left_out(&text, values) {
            return Vec::new();
        }
        let text = rendered(&text, values);
        serde_saphyr::from_multiple::<Value>(&text).unwrap_or_else(|error| panic!("{error}: {text}"))
    });
    sorted(objects.collect())
}

#[test]
fn the_chart_installs_what_kustomize_installs() {
    let chart = chart();
    let wanted = sorted(all_of(MANIFESTS));
    let made = installed(&chart, &chart.values);
    assert_eq!(made.len(), wanted.len());
    for (made, wanted) in made.iter().zip(&wanted) {
        assert_eq!(made, wanted);
    }
    let about: Value =
        serde_saphyr::from_str(&std::fs::read_to_string(chart.path.join("Chart.yaml")).unwrap()).unwrap();
    assert_eq!((&about["version"], &about["appVersion"]), (&json!("1.2.3"), &json!("1.2.3")));
}

#[test]
fn on_harvester_the_chart_has_what_its_overlay_has() {
    let chart = chart();
    let plain = installed(&chart, &chart.values);
    let mut values = chart.values.clone();
    assert_eq!(std::mem::replace(&mut values["harvester"], json!(true)), json!(false));
    let mut on_harvester = installed(&chart, &values);
    on_harvester.retain(|object| !plain.contains(object));
    let wanted = sorted(all_of([
        "overlays/harvester/controller-shares-role.yaml",
        "overlays/harvester/controller-balancers-role.yaml",
    ]));
    assert_eq!((wanted.len(), on_harvester), (4, wanted));
}

#[test]
fn each_value_of_the_chart_reaches_its_place() {
    let chart = chart();
    let pod = "/spec/template/spec";
    let (node, controller) = ("\"DaemonSet\" \"guestlet-node\"", "\"Deployment\" \"guestlet-controller\"");
    let (node_map, controller_map) =
        ("\"ConfigMap\" \"guestlet-node\"", "\"ConfigMap\" \"guestlet-controller\"");
    let own = |at: &str| format!("{pod}{at}");
    let cases = [
        (
            "/image/tag",
            json!("9"),
            node,
            own("/containers/0/image"),
            json!("registry.example.org/guestlet-host:9"),
        ),
        (
            "/image/tag",
            json!("9"),
            node,
            own("/initContainers/0/image"),
            json!("registry.example.org/guestlet-host:9"),
        ),
        (
            "/image/repository",
            json!("r"),
            controller,
            own("/containers/0/image"),
            json!(concat!("r:", env!("CARGO_PKG_VERSION"))),
        ),
        ("/node/affinity", json!({"a": "b"}), node, own("/affinity"), json!({"a": "b"})),
        ("/controller/affinity", json!({"a": "b"}), controller, own("/affinity"), json!({"a": "b"})),
        ("/node/tolerations", json!([{"key": "a"}]), node, own("/tolerations"), json!([{"key": "a"}])),
        (
            "/node/resources",
            json!({"limits": {}}),
            node,
            own("/containers/0/resources"),
            json!({"limits": {}}),
        ),
        ("/node/settings", json!("a = \"1\"\n"), node_map, "/data/host.toml".into(), json!("a = \"1\"\n")),
        ("/node/keys", json!("/opt/k"), node, own("/volumes/2/hostPath/path"), json!("/opt/k")),
        ("/node/kubelet", json!("/k"), node, own("/volumes/3/hostPath/path"), json!("/k/seccomp/guestlet")),
        ("/controller/replicas", json!(3), controller, "/spec/replicas".into(), json!(3)),
        ("/controller/tolerations", json!([]), controller, own("/tolerations"), json!([])),
        ("/controller/resources", json!({}), controller, own("/containers/0/resources"), json!({})),
        (
            "/controller/settings",
            json!("a = 1\n"),
            controller_map,
            "/data/host.toml".into(),
            json!("a = 1\n"),
        ),
    ];
    for (value, new, object, at, wanted) in cases {
        let mut values = chart.values.clone();
        *values.pointer_mut(value).unwrap_or_else(|| panic!("no {value}")) = new;
        let made = installed(&chart, &values);
        let is_it = |one: &&Value| format!("{} {}", one["kind"], one["metadata"]["name"]) == object;
        let made = made.iter().find(is_it).unwrap_or_else(|| panic!("no {object}"));
        assert_eq!(made.pointer(&at), Some(&wanted), "{value}");
    }
}
