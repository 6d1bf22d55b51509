//! Instances as nobody would make them, and all the others that must not suffer.

use serde_json::json;

use crate::agent::Agent;
use crate::bench::{Bench, NODE, guest, names, socket};
use crate::cluster::wait;

#[test]
fn the_longest_names_and_two_vms_with_one_dmi_uuid_are_served() {
    wait(async {
        let bench = Bench::start().await;
        let long = "n".repeat(253);
        let instances = [bench.instance(&long, NODE).await, bench.instance("web", NODE).await];
        let lab = bench.host().start();
        let guests = instances.each_ref().map(|instance| guest(&lab, instance));
        for name in [&long, "web"] {
            lab.until_session(&format!("default/{name}"), "connected");
        }
        assert!(guests.iter().all(|guest| guest.open() == 1));
    });
}

/// A VirtualMachineInstance that nobody made from a VirtualMachine, and of whose DMI nothing is said.
#[test]
fn a_real_agent_is_reached_in_an_instance_without_a_vm() {
    wait(async {
        let bench = Bench::start().await;
        let bare = bench
            .instance_with("bare", NODE, |bare| {
                bare["metadata"].as_object_mut().unwrap().remove("ownerReferences");
                bare["spec"]["domain"].as_object_mut().unwrap().remove("firmware");
            })
            .await;
        let lab = bench.host().start();
        let mut agent = Agent::start(&lab.path("agent"), &socket(&lab, &bare));
        let vm = lab.until_session("default/bare", "connected");
        assert_eq!(vm["uuid"], bare["metadata"]["uid"]);
        let told = lab.path("agent").join("topology.json");
        lab.until("the agent knows where it runs", || {
            let told = std::fs::read_to_string(&told).unwrap_or_default();
            told.contains("\"zone-1\"") && told.contains(NODE)
        });
        agent.stop();
        lab.until_session("default/bare", "connecting");
    });
}

#[test]
fn what_says_little_of_itself_is_listed_all_the_same() {
    wait(async {
        let bench = Bench::start().await;
        bench
            .instance_with("blank", NODE, |blank| {
                blank["spec"] = json!({ "domain": { "devices": {} } });
                blank.as_object_mut().unwrap().remove("status");
            })
            .await;
        let web = bench.instance("web", NODE).await;
        let lab = bench.host().start();
        let _guest = guest(&lab, &web);
        lab.until_session("default/web", "connected");
        assert_eq!(names(&lab), ["default/blank", "default/web"]);
        assert_eq!(lab.info("default/blank")["power"], "off");
    });
}
