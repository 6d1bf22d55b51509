//! VMs that come, go, and are made again.

use serde_json::{Value, json};

use crate::bench::{Bench, INSTANCES, NODE, guest, names, until_names};
use crate::cluster::wait;
use crate::patience::until;

#[test]
fn vms_of_the_node_are_found_reached_and_known_by_what_lasts() {
    wait(async {
        let bench = Bench::start().await;
        let web = bench.instance("web", NODE).await;
        bench.instance("elsewhere", "host-2").await;
        let lab = bench.host().start();
        assert_eq!(names(&lab), ["default/web"]);
        let first = guest(&lab, &web);
        let owner = bench.owner("web").await;
        let known = lab.until_session("default/web", "connected");
        assert_eq!((&known["uuid"], &known["cluster"]), (&json!(owner), &json!("default/dev")));
        lab.until("the guest knows who it is", || first.identity().is_some());
        let identity = first.identity().unwrap();
        assert_eq!(identity.provider_id, format!("guestlet://{owner}"));
        assert_eq!(identity.host.unwrap().host_name, NODE);

        bench.instance("db", NODE).await;
        until_names(&lab, &["default/db", "default/web"]);
        bench.delete("db").await;
        until_names(&lab, &["default/web"]);

        // Started again: the same VM, and another machine.
        bench.delete("web").await;
        let again = bench.instance("web", NODE).await;
        let second = guest(&lab, &again);
        let known = lab.until_session("default/web", "connected");
        lab.until("the first is let go", || first.open() == 0 && second.open() > 0);
        assert_eq!(known["uuid"], owner);
        assert_ne!(web["metadata"]["uid"], again["metadata"]["uid"]);

        // Made again: another VM of the same name.
        bench.unmake("web").await;
        let made = bench.instance("web", NODE).await;
        let other = bench.owner("web").await;
        assert_ne!(other, owner);
        let third = guest(&lab, &made);
        let known = lab.until_vm("default/web", |vm| vm["uuid"] == *other && vm["session"] == "connected");
        lab.until("the second is let go", || second.open() == 0 && third.open() > 0);
        assert_eq!(known["sessions"], 1);
    });
}

#[test]
fn phases_and_the_condition_paused_are_what_the_hypervisor_says() {
    wait(async {
        let bench = Bench::start().await;
        let web = bench.instance("web", NODE).await;
        let lab = bench.host().start();
        let _guest = guest(&lab, &web);
        lab.until_session("default/web", "connected");
        let path = format!("{INSTANCES}/web");
        let set =
            async |status: Value| drop(bench.api.patch(&path, &json!({ "status": status })).await.unwrap());
        set(json!({ "conditions": [{ "type": "Paused", "status": "True" }] })).await;
        lab.until_vm("default/web", |vm| vm["power"] == "paused");
        set(json!({ "conditions": [], "phase": "Unknown" })).await;
        let vm = lab.until_vm("default/web", |vm| vm["power"] == "unknown");
        assert_eq!(vm["power_problem"], "its VirtualMachineInstance is in the phase Unknown");
        set(json!({ "phase": "Succeeded" })).await;
        lab.until_vm("default/web", |vm| vm["power"] == "off" && vm["session"] != "connected");
        set(json!({ "phase": "Running" })).await;
        lab.until_session("default/web", "connected");
    });
}

#[test]
fn sessions_stay_while_the_api_server_is_away() {
    wait(async {
        let mut bench = Bench::start().await;
        let web = bench.instance("web", NODE).await;
        let lab = bench.host().start();
        let guest = guest(&lab, &web);
        lab.until_session("default/web", "connected");
        bench.turn.kill_api_server();
        let warned = || {
            String::from_utf8(lab.ctl(&["ls"]).stderr).unwrap().contains("what is known of them may be stale")
        };
        lab.until("people are told", warned);
        let doctor = String::from_utf8(lab.ctl(&["doctor"]).stdout).unwrap();
        assert!(doctor.contains("this node's VMs cannot be read"), "{doctor}");
        assert_eq!(names(&lab), ["default/web"]);
        bench.turn.start_api_server();
        until("the API server is ready", async || bench.api.is_ready().await.then_some(())).await;
        bench.instance("db", NODE).await;
        until_names(&lab, &["default/db", "default/web"]);
        lab.until("all is well again", || !warned());
        let known = lab.info("default/web");
        assert_eq!((&known["session"], &known["sessions"]), (&json!("connected"), &json!(1)));
        assert_eq!(guest.open(), 1);
    });
}
