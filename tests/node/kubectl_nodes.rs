//! Verbs of `guestctl --kubeconfig` that are about all nodes.

use std::process::{Command, Stdio};

use guestlet::wire::proto::v1::event::Kind;
use guestlet::wire::proto::v1::{Node, NodeChanged};
use serde_json::json;

use crate::cluster::wait;
use crate::kubectl::{Desk, ctl, names, state, value, words};
use crate::lab::{Watch, assert_fails};
use crate::patience::until;

pub fn node_changed(name: &str) -> Kind {
    let node = Node { name: name.into(), ready: "True".into(), state: "current".into(), ..Node::default() };
    Kind::NodeChanged(NodeChanged { node: Some(node) })
}

#[test]
fn what_all_nodes_say_is_shown_as_one() {
    wait(async {
        let desk = Desk::start().await;
        let admin = &desk.admin;
        for (guest, name) in desk.guests.iter().zip(["node-of-web", "node-of-mail"]) {
            guest.happen(node_changed(name));
        }
        let nodes = until("both are nodes", async || {
            let nodes = value(admin, &["nodes"]).await;
            (nodes.as_array().unwrap().len() == 2).then_some(nodes)
        })
        .await;
        assert_eq!(names(&nodes), ["default/mail", "default/web"]);
        assert_eq!(nodes[1]["node"]["name"], "node-of-web");
        assert_eq!(value(admin, &["nodes", "-n", "guestlet-system"]).await, json!([]));

        let topology = value(admin, &["topology"]).await;
        assert_eq!(names(&topology["hosts"]), ["host-1", "host-2"]);
        assert_eq!(topology["hosts"][0]["topology"]["zone"], "zone-1");
        assert_eq!(names(&topology["virtual_machines"]), ["default/mail", "default/web"]);
        let table = words(admin, &["topology"]).await;
        assert!(table.contains("\nhost-1 ") && table.contains("\ndefault/mail "), "{table}");

        let keys = value(admin, &["trust", "ls"]).await;
        for (number, node) in desk.nodes.iter().enumerate() {
            let own = node.words(&["trust", "ls", "-o", "json"]);
            let own: serde_json::Value = serde_json::from_str(&own).unwrap();
            assert_eq!(keys["nodes"][number]["host_key"], own["host_key"]);
        }
        assert_eq!(names(&keys["guests"]), ["default/mail", "default/web"]);

        words(admin, &["ping", "web", "-c", "1"]).await;
        words(admin, &["ping", "mail", "-c", "1"]).await;
        let calls = value(admin, &["audit"]).await;
        let pings = calls.as_array().unwrap().iter().filter(|call| call["host"]["verb"] == "ping");
        let pings: Vec<_> = pings.map(|call| [&call["host"]["vm"], &call["host"]["host"]]).collect();
        assert_eq!(json!(pings), json!([["default/web", "host-1"], ["default/mail", "host-2"]]));
        let of_web = value(admin, &["audit", "--vm", "web", "--since", "1h"]).await;
        assert_eq!((of_web.as_array().unwrap().len(), &of_web[0]["host"]["verb"]), (1, &json!("ping")));

        // There is no controller.
        let found = ctl(admin, &["doctor"]).await;
        let table = String::from_utf8(found.stdout).unwrap();
        assert_eq!(found.status.code(), Some(5), "{table}");
        for line in [
            "ok     API server",
            "2 of 2 connected",
            "WRONG  controller",
            "ok     all nodes: guestlet-host",
            "ok     VM default/web",
            "ok     VM default/mail",
        ] {
            assert!(table.contains(line), "{line}: {table}");
        }

        // Where one says nothing, the others do.
        state(
            &desk.bench.api,
            "guestlet-node-host-2",
            &json!({ "waiting": { "reason": "ContainerCreating" } }),
        )
        .await;
        let partial = ctl(admin, &["topology", "-o", "json"]).await;
        assert_fails(&partial, 1, "warning: node host-2: the pod guestlet-node-host-2");
        assert_fails(&partial, 1, "1 of the nodes could not be reached");
        let partial: serde_json::Value = serde_json::from_slice(&partial.stdout).unwrap();
        assert_eq!(names(&partial["virtual_machines"]), ["default/web"]);
        let found = ctl(admin, &["doctor"]).await;
        let table = String::from_utf8(found.stdout).unwrap();
        assert!(
            table.contains("WRONG  host-2: guestlet-host") && table.contains("ContainerCreating"),
            "{table}"
        );
        let there = ctl(admin, &["doctor", "--node", "host-1"]).await;
        let there = String::from_utf8(there.stdout).unwrap();
        assert!(there.contains("VM default/web") && !there.contains("host-2"), "{there}");
    });
}

#[test]
fn a_watch_goes_on_when_the_host_half_of_a_node_was_restarted() {
    wait(async {
        let mut desk = Desk::start().await;
        let mut command = Command::new(env!("CARGO_BIN_EXE_guestctl"));
        command.env_remove("HTTPS_PROXY").env_remove("https_proxy").arg("--kubeconfig").arg(&desk.admin);
        command.args(["watch", "-o", "json", "--heartbeats"]).stdin(Stdio::null());
        let watch = Watch::of(command);
        // Both nodes are heard of.
        let mut seen = Vec::new();
        until("both are heard of", async || {
            seen.extend(watch.so_far());
            let has =
                |name: &str| seen.iter().any(|line: &String| line.contains(&format!("\"name\":\"{name}\"")));
            (has("default/web") && has("default/mail")).then_some(())
        })
        .await;
        desk.nodes[1].kill();
        desk.nodes[1].again();
        desk.nodes[1].until_session("default/mail", "connected");
        // What happens before it is connected again is not shown, and this is said.
        let mut number = 0;
        until("a new event is shown", async || {
            number += 1;
            desk.guests[1].happen(node_changed(&format!("after-{number}")));
            let lines = watch.so_far();
            lines.iter().any(|line| line.contains("node-changed") && line.contains("after-")).then_some(())
        })
        .await;
        watch.stop();
        let (_, complaint) = watch.end();
        assert!(
            complaint.contains("node host-2: guestlet-host closed the connection; events may be missing"),
            "{complaint}"
        );
    });
}
