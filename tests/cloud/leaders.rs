//! Replicas: one is at work, and when it is killed, stopped or held up, another.

use nix::sys::signal::Signal;
use serde_json::json;

use crate::host::instance;
use crate::lab::{LEASE, Lab, annotation, quiet, text, wait};
use crate::patience::until;

#[test]
fn when_the_leader_is_killed_another_goes_on() {
    wait(async {
        let lab = Lab::start().await;
        let first = lab.replica("first");
        first.leads().await;
        let second = lab.replica("second");
        quiet(1).await;
        assert!(!second.log().contains(" is the leader: "));
        first.signal(Signal::SIGKILL);
        lab.service("web", json!({})).await;
        lab.host.set(instance("1", "n1", "192.0.2.11"));
        lab.join("n1", "uuid-1").await;
        second.leads().await;
        lab.initialised("n1").await;
        lab.service_is("web", "has an address", |web| {
            !annotation(web, "kube-vip.io/loadbalancerIPs").is_empty()
        })
        .await;
    });
}

#[test]
fn a_leader_that_is_told_to_end_gives_the_lease_back() {
    wait(async {
        let lab = Lab::start().await;
        let mut first = lab.replica("first");
        first.leads().await;
        first.signal(Signal::SIGTERM);
        assert!(first.ended().await.success());
        let lease = lab.api.get(LEASE).await.unwrap();
        assert_eq!(text(&lease["spec"]["holderIdentity"]), "");
    });
}

#[test]
fn a_leader_that_was_held_up_changes_nothing_when_it_goes_on_and_ends() {
    wait(async {
        let lab = Lab::start().await;
        let mut first = lab.replica("first");
        first.leads().await;
        first.signal(Signal::SIGSTOP);
        let second = lab.replica("second");
        second.leads().await;
        lab.host.set(instance("1", "n1", "192.0.2.11"));
        lab.join("n1", "uuid-1").await;
        lab.initialised("n1").await;
        first.signal(Signal::SIGCONT);
        assert!(!first.ended().await.success());
        assert!(first.log().contains("no longer the leader"), "{}", first.log());
        let holder = until("the second one leads on", async || lab.api.get(LEASE).await).await;
        assert!(text(&holder["spec"]["holderIdentity"]).starts_with("second"));
    });
}
