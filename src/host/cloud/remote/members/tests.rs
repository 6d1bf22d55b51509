use super::*;
use crate::host::backends::kubevirt::interfaces::Interface;

/// Builds the VirtualMachine `ns/<vm>` of the cluster `ns/dev`.
fn wanted(vm: &str, uid: &str) -> Facts {
    let interface = Interface { network: "ns/lan".into(), ..Interface::default() };
    Facts {
        name: format!("ns/{vm}"),
        uid: uid.into(),
        lasting: uid.into(),
        cluster: "ns/dev".into(),
        power: PowerState::Off,
        interfaces: vec![interface],
        instance_type: "u1.medium".into(),
        ..Facts::default()
    }
}

/// Builds a run of this VirtualMachine.
fn run(vm: &str, uid: &str, node: &str) -> Facts {
    let mut facts = Facts { instance_type: String::new(), ..wanted(vm, uid) };
    facts.uid = format!("run-of-{uid}");
    facts.node = node.into();
    (facts.power, facts.has_agent) = (PowerState::Running, true);
    facts.interfaces[0].addresses = ["192.0.2.7", "fe80::1", "127.0.0.1", "junk"].map(str::to_owned).into();
    facts
}

fn report(vm: &str, run: &str, node: &str) -> Report {
    Report { name: format!("ns/{vm}"), run: run.into(), node: node.into() }
}

fn host(name: &str, zone: &str) -> Host {
    let labels = [("topology.kubernetes.io/zone", zone), ("example.com/rack", "r7")];
    let labels = labels.map(|(key, value)| (key.to_owned(), value.to_owned())).into();
    Host { name: name.into(), labels }
}

/// Formats news as words.
fn words(news: &[News]) -> Vec<String> {
    let word = |news: &News| match news {
        News::There(cluster, one) => format!(
            "{cluster} {} {:?} as {:?} in {:?} at {:?}",
            one.vm_uid,
            one.power(),
            one.node_name,
            one.topology.as_ref().map(|place| place.zone.as_str()).unwrap_or_default(),
            one.interfaces.iter().flat_map(|one| &one.addresses).collect::<Vec<_>>(),
        ),
        News::Gone(cluster, uid) => format!("{cluster} {uid} gone"),
    };
    news.iter().map(word).collect()
}

/// Builds an index with `a`, which runs on h1, and `b`, which is off.
fn begun() -> Members {
    let mut members = Members::default();
    let vms = vec![Arc::new(wanted("a", "ua")), Arc::new(wanted("b", "ub"))];
    assert_eq!(members.hear_vms(Kind::Wanted, Heard::All(vms)), []);
    assert_eq!(members.hear_hosts(Heard::All(vec![host("h1", "z1"), host("h2", "z2")])), []);
    assert_eq!(members.hear_reports(Heard::All(vec![report("a", "run-of-ua", "node-a")])), []);
    assert!(!members.is_complete());
    let told = words(&members.hear_vms(Kind::Runs, Heard::All(vec![Arc::new(run("a", "ua", "h1"))])));
    let expected = [
        r#"ns/dev ua Running as "node-a" in "z1" at ["192.0.2.7"]"#,
        r#"ns/dev ub Stopped as "" in "" at []"#,
    ];
    assert_eq!(told, expected);
    members
}

#[test]
fn vms_are_told_when_all_is_known_and_then_as_they_change() {
    let mut members = begun();
    assert!(members.is_complete() && members.has("ns/dev") && !members.has("ns/prod"));
    let moved = members.hear_vms(Kind::Runs, Heard::There(Arc::new(run("a", "ua", "h2"))));
    assert_eq!(words(&moved), [r#"ns/dev ua Running as "node-a" in "z2" at ["192.0.2.7"]"#]);
    let edited = members.hear_hosts(Heard::There(host("h2", "z9")));
    assert_eq!(words(&edited), [r#"ns/dev ua Running as "node-a" in "z9" at ["192.0.2.7"]"#]);
    assert_eq!(members.hear_hosts(Heard::There(host("h1", "z7"))), [], "none of it runs there");
    let racked = members.set_labels(&["example.com/rack".to_owned()]);
    let News::There(_, told) = &racked[0] else { panic!("{racked:?}") };
    let place = told.topology.clone().unwrap();
    assert_eq!((place.host.as_str(), place.labels["example.com/rack"].as_str()), ("h2", "r7"));
    assert_eq!((told.instance_type.as_str(), told.addresses_current), ("u1.medium", true));
    assert_eq!(members.set_labels(&["example.com/rack".to_owned()]), []);
    let off = members.hear_vms(Kind::Runs, Heard::Gone(Arc::new(run("a", "ua", "h2"))));
    assert_eq!(words(&off), [r#"ns/dev ua Stopped as "" in "" at []"#]);
    let gone = members.hear_vms(Kind::Wanted, Heard::Gone(Arc::new(wanted("a", "ua"))));
    assert_eq!(words(&gone), ["ns/dev ua gone"]);
    assert_eq!((members.name("ns/dev", "ua"), members.name("ns/dev", "ub")), (None, Some("ns/b")));
}

/// Regression test for harvester/harvester#4947 and #11580, where a Node was looked up by the VM's name.
#[test]
fn the_name_of_a_node_is_what_the_agent_in_that_very_run_says() {
    let mut members = begun();
    let renamed = members.hear_reports(Heard::There(report("a", "run-of-ua", "another")));
    assert_eq!(words(&renamed), [r#"ns/dev ua Running as "another" in "z1" at ["192.0.2.7"]"#]);
    let stale = members.hear_reports(Heard::There(report("a", "a-run-before", "another")));
    assert_eq!(words(&stale), [r#"ns/dev ua Running as "" in "z1" at ["192.0.2.7"]"#]);
}

#[test]
fn one_that_changes_its_cluster_leaves_the_other() {
    let mut members = begun();
    let moved = Facts { cluster: "ns/prod".into(), ..run("a", "ua", "h1") };
    let told = words(&members.hear_vms(Kind::Runs, Heard::There(Arc::new(moved))));
    assert_eq!(told, ["ns/dev ua gone", r#"ns/prod ua Running as "node-a" in "z1" at ["192.0.2.7"]"#]);
    let none = Facts { cluster: String::new(), ..run("a", "ua", "h1") };
    let told = words(&members.hear_vms(Kind::Runs, Heard::There(Arc::new(none))));
    assert_eq!(told, ["ns/prod ua gone"]);
    // The VM is created anew under the same name.
    let again = words(&members.hear_vms(Kind::Wanted, Heard::There(Arc::new(wanted("b", "uc")))));
    assert_eq!(again, ["ns/dev ub gone", r#"ns/dev uc Stopped as "" in "" at []"#]);
}

#[test]
fn the_networks_of_a_cluster_are_those_of_its_vms() {
    let mut members = begun();
    assert_eq!(members.networks("ns/dev"), ["ns/lan".to_owned()].into());
    let mut other = run("a", "ua", "h1");
    other.interfaces[0].network = "infra/wan".into();
    drop(members.hear_vms(Kind::Runs, Heard::There(Arc::new(other))));
    assert_eq!(members.networks("ns/dev"), ["infra/wan".to_owned(), "ns/lan".to_owned()].into());
    assert_eq!(members.networks("ns/prod"), [].into());
}
