//! The packaged role: what the account may do suffices, and nothing of it is too much.

use std::process::Child;

use serde_json::{Value, json};

use crate::bench::{Bench, NODE, guest_that_reads, host_of, one};
use crate::cluster::wait;

/// A process that ends with the test, however that ends.
pub struct Ends(pub Child);

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
        assert_eq!(all.len(), 11, "{all:?}");
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

#[test]
fn the_lease_of_the_controller_is_read_by_a_right_in_its_namespace_alone() {
    wait(async {
        // A cluster with the role of the whole cluster alone; with the other one, tests of volumes find the controller.
        let bench = Bench::start().await;
        let lab = bench.host().start();
        lab.until("the node may not read the Lease", || {
            let doctor = String::from_utf8(lab.ctl(&["doctor"]).stdout).unwrap();
            lab.log().contains("cannot get resource \"leases\"")
                && doctor.contains("guestlet's controller cannot be reached")
        });
    });
}
