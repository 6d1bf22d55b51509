//! The dashboards for Grafana: valid, and made of metrics that there are.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::Path;

use guestlet::metrics::table::FAMILIES;
use serde_json::Value;

use crate::host;
use crate::lab::Lab;
use crate::prometheus::program;

/// All of them, by the names of their files.
fn dashboards() -> Vec<(String, Value)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("packaging/grafana");
    let files = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let read = |path: std::path::PathBuf| {
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        (name, serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap())
    };
    files.map(read).collect()
}

/// The queries of a dashboard, as Prometheus gets them.
fn queries(dashboard: &Value) -> Vec<String> {
    let panels = dashboard["panels"].as_array().unwrap();
    let targets = panels.iter().flat_map(|panel| panel["targets"].as_array().unwrap());
    let text = |target: &Value| target["expr"].as_str().unwrap().to_owned();
    targets.map(text).map(|query| query.replace("$__rate_interval", "5m").replace("$vm", "web")).collect()
}

/// The names of our metrics in a text.
fn names(text: &str) -> BTreeSet<&str> {
    let words = text.split(|one: char| !(one.is_ascii_alphanumeric() || one == '_'));
    words.filter(|word| word.starts_with("guestlet_")).collect()
}

#[test]
fn dashboards_are_whole_and_ask_for_what_there_is() {
    let all = dashboards();
    assert_eq!(all.len(), 2);
    // One that was asked is counted, whatever became of it.
    let lab = Lab::made("", "", host::Lab::new().set("[[scrape]]\njob = 'node'\ntarget = '9100'"));
    assert!(lab.get("/guests/web/node/metrics", "*/*").0.starts_with("HTTP/1.1 502 "));
    let of_host = lab.get("/host/metrics", "text/plain").1;
    let mut known: BTreeSet<String> = names(&of_host).into_iter().map(str::to_owned).collect();
    known.extend(FAMILIES.iter().map(|family| family.full_name()));

    let (mut uids, mut rules) = (BTreeSet::new(), "groups:\n- name: dashboards\n  rules:\n".to_owned());
    for (file, dashboard) in &all {
        assert!(uids.insert(dashboard["uid"].as_str().unwrap()), "{file}");
        let panels = dashboard["panels"].as_array().unwrap();
        let ids: BTreeSet<_> = panels.iter().map(|panel| panel["id"].as_u64().unwrap()).collect();
        assert!(panels.len() > 10 && ids.len() == panels.len(), "{file}");
        for panel in panels {
            let place = &panel["gridPos"];
            assert!(place["x"].as_u64().unwrap() + place["w"].as_u64().unwrap() <= 24, "{file}: {panel}");
            assert_eq!(
                panel["datasource"]["uid"], "${datasource}",
                "{file}: no data source of somebody's own"
            );
        }
        for query in queries(dashboard) {
            let names = names(&query);
            assert!(!names.is_empty(), "{file}: {query}");
            for name in names {
                assert!(known.contains(name), "{file}: there is no metric {name}: {query}");
            }
            let number = rules.lines().count();
            writeln!(rules, "  - {{ record: 'a{number}', expr: {} }}", Value::from(query)).unwrap();
        }
    }
    // Prometheus understands each query.
    let path = lab.host.path("dashboards.yml");
    std::fs::write(&path, &rules).unwrap();
    let output = program("promtool").args(["check", "rules"]).arg(&path).output().unwrap();
    assert!(output.status.success(), "{output:?}\n{rules}");
}
