//! Instances as nobody would make them, and all the others that must not suffer.

use serde_json::{Value, json};

use crate::agent::Agent;
use crate::bench::{Bench, NODE, guest, host_of, names, socket};
use crate::cluster::wait;
use crate::patience::until;
use crate::rights::Ends;

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

/// Whoever may make VirtualMachineInstances says whose they are.
#[test]
fn one_that_calls_itself_a_run_of_another_vm_is_not_taken_for_it() {
    wait(async {
        let bench = Bench::start().await;
        let web = bench.instance("web", NODE).await;
        let owner = bench.owner("web").await;
        let other = bench
            .instance_with("other", NODE, |other| {
                other["metadata"]["ownerReferences"][0]["name"] = json!("web");
                other["metadata"]["ownerReferences"][0]["uid"] = json!(owner);
            })
            .await;
        let lab = bench.host().start();
        let _guests = [guest(&lab, &web), guest(&lab, &other)];
        for (name, uuid) in [("web", &json!(owner)), ("other", &other["metadata"]["uid"])] {
            let vm = lab.until_session(&format!("default/{name}"), "connected");
            assert_eq!(vm["uuid"], *uuid, "{name}");
        }
    });
}

/// A pod's token expires, and kubelet writes the next one into the same file.
#[test]
fn a_token_that_is_refused_is_told_and_the_next_one_is_read() {
    wait(async {
        let bench = Bench::start().await;
        bench.instance("web", NODE).await;
        let (accounts, name) = ("/api/v1/namespaces/guestlet-system/serviceaccounts", "guestlet-node");
        bench.api.ensure("/api/v1/namespaces", &json!({ "metadata": { "name": "guestlet-system" } })).await;
        let token = async || {
            bench.api.ensure(accounts, &json!({ "metadata": { "name": name } })).await;
            let answer = bench.api.create(&format!("{accounts}/{name}/token"), &json!({ "spec": {} })).await;
            answer["status"]["token"].as_str().unwrap().to_owned()
        };
        // None expires within ten minutes. That of an account that was made again is as bad.
        let old = token().await;
        bench.api.delete(&format!("{accounts}/{name}")).await;
        let new = token().await;
        let file = bench.turn.plane().folder.path().join("token");
        std::fs::write(&file, old).unwrap();
        let config = bench.turn.plane().kubeconfig("token", "nobody", "nobody");
        let mut by_token: Value = serde_json::from_slice(&std::fs::read(&config).unwrap()).unwrap();
        by_token["users"][0]["user"] = json!({ "tokenFile": file });
        std::fs::write(&config, by_token.to_string()).unwrap();
        let lab = host_of(&config, NODE);
        lab.write();
        let _daemon = Ends(lab.daemon("log").spawn().unwrap());
        let told = || String::from_utf8(lab.ctl(&["doctor"]).stdout).unwrap();
        lab.until("people are told", || told().contains("this node's VMs cannot be read"));
        assert!(told().contains("Unauthorized"), "{}", told());
        // Nor is Prometheus kept waiting for VMs that nobody knows.
        let metrics = crate::takeover::get(&lab, "/metrics");
        assert!(metrics.starts_with("HTTP/1.1 503"), "{metrics}");
        assert!(metrics.contains("the list of VMs is not known yet"), "{metrics}");
        std::fs::write(&file, new).unwrap();
        // It is read once a minute.
        until("the node knows its VMs", async || {
            lab.ctl(&["info", "default/web"]).status.success().then_some(())
        })
        .await;
        assert!(!told().contains("VMs cannot be read"), "{}", told());
        assert!(crate::takeover::get(&lab, "/metrics").starts_with("HTTP/1.1 200"));
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
