//! Where the host is: told to each guest at its connect and at each edit, shown to people.

use guestlet::wire::proto::v1::event::Kind;
use guestlet::wire::proto::v1::{GuestInfo, Health, HealthChanged, Node, NodeChanged};
use serde_json::{Value, json};
use tonic::Code;

use crate::guest::{Door, Guest, Manner, info};
use crate::lab::{Lab, uuid};

fn able(number: u8) -> GuestInfo {
    let info = info(&uuid(number), "boot-1");
    GuestInfo { capabilities: [info.capabilities, vec!["topology".into()]].concat(), ..info }
}

fn guest(lab: &Lab, name: &str, number: u8) -> Guest {
    Guest::start(&lab.path(&format!("{name}.sock")), Door::Unix, Manner::Good, able(number))
}

fn zones(guest: &Guest) -> Vec<String> {
    guest.places().told.iter().map(|topology| topology.zone.clone()).collect()
}

fn shown(lab: &Lab, name: &str) -> Value {
    let all: Value = serde_json::from_str(&lab.words(&["topology", "-o", "json"])).unwrap();
    all["virtual_machines"].as_array().unwrap().iter().find(|vm| vm["name"] == name).unwrap().clone()
}

#[test]
fn an_edit_reaches_every_guest_and_ends_no_session() {
    let lab =
        Lab::new().set("topology = { zone = 'a', region = 'eu', host = 'h1', labels = { rack = '7' } }");
    let mut lab = lab.guest("a", 1).guest("b", 2).start();
    let (a, b) = (guest(&lab, "a", 1), guest(&lab, "b", 2));
    let current = |name: &str, zone: &str| {
        let vm = shown(&lab, name);
        vm["state"] == "current" && vm["topology"]["acknowledged"]["zone"] == zone
    };
    lab.until("both know", || current("a", "a") && current("b", "a"));
    let told = a.places().told[0].clone();
    assert_eq!((told.region.as_str(), told.host.as_str()), ("eu", "h1"));
    assert_eq!(told.labels, [("rack".to_owned(), "7".to_owned())].into());

    let before = lab.info("a");
    lab.edit("zone = 'a'", "zone = 'b'");
    let current = |name: &str, zone: &str| shown(&lab, name)["topology"]["acknowledged"]["zone"] == zone;
    lab.until("both know the other", || current("a", "b") && current("b", "b"));
    let after = lab.info("a");
    assert_eq!((&after["since"], &after["sessions"]), (&before["since"], &before["sessions"]));
    assert_eq!((zones(&a), zones(&b)), (vec!["a".into(), "b".into()], vec!["a".into(), "b".into()]));
    let table = lab.words(&["topology"]);
    assert!(table.contains("(this host)  -        eu      b     h1    rack=7"), "{table}");

    // A wrong one is refused as a whole, and the one before stays.
    lab.edit("zone = 'b'", "zone = 'no zone'");
    lab.until("people are told", || {
        String::from_utf8(lab.ctl(&["ls"]).stderr)
            .unwrap()
            .contains("host.toml:4: topology.zone = \"no zone\": ")
    });
    assert_eq!(zones(&a).len(), 2);

    // A new session is told again.
    drop(b);
    let b = guest(&lab, "b", 2);
    lab.until("it is told again", || zones(&b) == ["b"]);
}

#[test]
fn a_guest_that_refuses_or_cannot_be_told_is_shown() {
    let mut lab = Lab::new().set("topology = { zone = 'a' }").guest("a", 1).guest("b", 2);
    lab.write();
    let a = guest(&lab, "a", 1);
    let b = Guest::start(&lab.path("b.sock"), Door::Unix, Manner::Good, info(&uuid(2), "boot-1"));
    a.places().refusal = Some((Code::InvalidArgument, "I will not \u{1b}[2J".into()));
    lab.again();
    let problem = |name: &str| shown(&lab, name)["topology"]["problem"].clone();
    lab.until("both are shown", || problem("a") != "" && problem("b") != "");
    assert_eq!(problem("a"), "the guest does not accept it: I will not \u{fffd}[2J");
    assert_eq!(problem("b"), "cannot send the topology to the agent in this guest");
    assert_eq!(a.places().told.len(), 1, "what is wrong is not told again");
    assert_eq!((b.places().told.len(), shown(&lab, "b")["state"].clone()), (0, json!("problem")));

    // What passes is tried again.
    a.places().refusal = Some((Code::Internal, "no room".into()));
    lab.edit("zone = 'a'", "zone = 'b'");
    lab.until("it is tried again", || a.places().told.len() > 2);
    a.places().refusal = None;
    lab.until("the guest knows", || shown(&lab, "a")["state"] == "current");
    assert_eq!(lab.info("a")["sessions"], 1);
}

#[test]
fn what_a_guest_is_in_its_cluster_is_shown() {
    let lab = Lab::new().guest("a", 1).guest("b", 2).start();
    let (a, _b) = (guest(&lab, "a", 1), guest(&lab, "b", 2));
    lab.until_session("a", "connected");
    assert_eq!(lab.words(&["nodes", "-o", "json"]).trim(), "[]");
    let labels = [("topology.kubernetes.io/zone".to_owned(), "z".to_owned())].into();
    let node = Node {
        name: "worker-7\u{1b}[2J".into(),
        state: "current".into(),
        ready: "False".into(),
        ready_reason: "no network".into(),
        addresses: vec!["InternalIP 192.0.2.7".into(); 100],
        taints: vec!["a=b:NoSchedule".into()],
        labels,
        ..Node::default()
    };
    a.happen(Kind::NodeChanged(NodeChanged { node: Some(node) }));
    let health =
        Health { cloud_init: "done".into(), failed_units: vec!["x.service".into()], ..Health::default() };
    a.happen(Kind::HealthChanged(HealthChanged { health: Some(health) }));
    lab.until("both are known", || {
        lab.words(&["info", "a"]).contains("failed units: x.service, cloud-init done")
    });
    let nodes: Value = serde_json::from_str(&lab.words(&["nodes", "-o", "json"])).unwrap();
    assert_eq!((nodes.as_array().unwrap().len(), &nodes[0]["name"]), (1, &json!("a")));
    let node = &nodes[0]["node"];
    assert_eq!((&node["name"], &node["ready"]), (&json!("worker-7\u{fffd}[2J"), &json!("False")));
    assert_eq!(node["addresses"].as_array().unwrap().len(), 64, "there is an end to it");
    let table = lab.words(&["nodes"]);
    assert!(table.contains("a=b:NoSchedule  no network"), "{table}");
    assert!(lab.words(&["ls", "-o", "wide"]).contains("worker-7"));
    a.happen(Kind::NodeChanged(NodeChanged { node: None }));
    lab.until("it is none any more", || lab.words(&["nodes", "-o", "json"]).trim() == "[]");
}
