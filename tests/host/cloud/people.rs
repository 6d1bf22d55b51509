//! What people see of load balancers, and do to them.

use std::time::Duration;

use serde_json::Value;

use super::{SMALL, USUAL, started, tcp, wanted};
use crate::lab::{Watch, assert_fails};

#[test]
fn people_see_who_has_which_address_and_give_it_back() {
    let vms = started(&USUAL, &format!("{SMALL}\nclusters = ['dev', 'prod']"));
    let (a, c) = (vms.of("a"), vms.of("c"));
    let watch = Watch::start(&vms.lab, &["-o", "json"]);
    a.ensure(wanted("web")).unwrap();
    let event = |state: &str| -> Value {
        let line = watch.until(|line| line.contains("load-balancer-changed") && line.contains(state));
        serde_json::from_str(&line).unwrap()
    };
    let told = event("\"ready\"");
    assert_eq!((&told["cluster"], &told["service"]), (&"dev".into(), &"web".into()));
    assert_eq!(told["addresses"], serde_json::json!(["192.0.2.1"]));
    c.ensure(wanted("theirs")).unwrap();
    let mut share = wanted("shares");
    share.share_with = Some(super::service("web"));
    share.ports = vec![tcp(80, 30081)];
    a.ensure(share).unwrap();
    let told = event("\"failed\"");
    assert_eq!(told["reason"], "PortInUse");

    let list = |arguments: &[&str]| -> Vec<Value> {
        let text = vms.lab.words(&[&["lb", "ls", "-o", "json"], arguments].concat());
        serde_json::from_str(&text).unwrap()
    };
    let services = |list: &[Value]| -> Vec<String> {
        list.iter().map(|one| one["service"].as_str().unwrap().to_owned()).collect()
    };
    assert_eq!(list(&[]).len(), 3);
    let dev = list(&["--cluster", "dev"]);
    let mut names = services(&dev);
    names.sort();
    assert_eq!(names, ["shares", "web"]);
    let web = dev.iter().find(|one| one["service"] == "web").unwrap();
    assert_eq!(
        (&web["state"], &web["uid"], &web["orphan"]),
        (&"ready".into(), &"uid-web".into(), &false.into())
    );
    assert_eq!(web["ports"], serde_json::json!(["80/TCP"]));
    let table = vms.lab.words(&["lb", "ls", "-o", "wide"]);
    assert!(table.contains("shop/web") && table.contains("has TCP port 80 at the same address"), "{table}");
    let pools = vms.lab.words(&["pools"]);
    let row = pools.lines().find(|line| line.starts_with("small")).unwrap();
    let words: Vec<_> = row.split_whitespace().collect();
    assert_eq!(words[..5], ["small", "2", "4", "192.0.2.1-192.0.2.4", "dev,prod"]);

    let missing = ["lb", "rm", "uid-web", "--cluster", "other"];
    assert_fails(&vms.lab.ctl(&missing), 1, "has no load balancer of a Service uid-web");
    let removed = vms.lab.words(&["lb", "rm", "uid-theirs", "--cluster", "prod"]);
    assert!(removed.contains("released"), "{removed}");
    assert!(c.list().is_empty());
    event("\"gone\"");
}

#[test]
fn what_a_cluster_without_vms_has_goes_by_itself_if_the_administrator_says_so() {
    let mut vms = started(&USUAL, &format!("load-balancers.release-after-seconds = 2\n{SMALL}"));
    vms.of("a").ensure(wanted("web")).unwrap();
    let c = vms.of("c");
    // The one whose address is shared has the lesser name, and is given back last.
    c.ensure(wanted("a-first")).unwrap();
    let mut share = wanted("shares");
    share.share_with = Some(super::service("a-first"));
    share.ports = vec![tcp(81, 30081)];
    c.ensure(share).unwrap();
    let watch = Watch::start(&vms.lab, &["-o", "json"]);
    // The time begins with the table's end: a cluster that has a VM keeps what it has.
    std::thread::sleep(Duration::from_secs(7));
    assert_eq!(vms.kept(), 3);
    vms.lab.edit("cluster = 'prod'", "cluster = 'another'");
    watch.until(|line| line.contains("load-balancer-changed") && line.contains("\"gone\""));
    vms.lab.until("the cluster has none", || {
        vms.lab.words(&["lb", "ls", "-o", "json", "--cluster", "prod"]).trim() == "[]"
    });
    assert_eq!(vms.kept(), 1);
    assert!(vms.lab.log().contains("had no VM of the cluster for 2 s, so its 2 load balancers are released"));
}
