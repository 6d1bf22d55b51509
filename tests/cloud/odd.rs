//! A host half, or an agent, that answers whatever comes to its mind.

use serde_json::json;

use crate::host::{Fault, instance};
use crate::lab::{Lab, annotation, quiet, text, wait};

#[test]
fn nonsense_changes_nothing_and_is_not_asked_for_without_end() {
    wait(async {
        let lab = Lab::start().await;
        let mut replica = lab.replica("a");
        lab.host.set(instance("1", "n1", "192.0.2.11"));
        lab.join("n1", "uuid-1").await;
        let node = lab.initialised("n1").await;
        lab.service("web", json!({})).await;
        let web = lab
            .service_is("web", "has an address", |web| {
                !annotation(web, "kube-vip.io/loadbalancerIPs").is_empty()
            })
            .await;
        quiet(1).await;
        lab.host.fault(Fault::Garbage);
        lab.service("late", json!({})).await;
        lab.host.world().calls.clear();
        quiet(10).await;
        assert!(replica.runs(), "{}", replica.log());
        for name in ["WatchInstances", "WatchLoadBalancers", "EnsureLoadBalancer"] {
            let calls = lab.host.calls(name);
            assert!(calls < 300, "{name}: {calls} calls in 10 s");
        }
        let same = |one: &serde_json::Value, other: &serde_json::Value| {
            (one["spec"].clone(), one["metadata"]["annotations"].clone())
                == (other["spec"].clone(), other["metadata"]["annotations"].clone())
        };
        assert!(same(&lab.node("n1").await.unwrap(), &node));
        assert!(same(&lab.get("web").await.unwrap(), &web));
        let late = lab.get("late").await.unwrap();
        assert_eq!(annotation(&late, "kube-vip.io/loadbalancerIPs"), "", "{late}");
        for event in lab.api.list("/api/v1/events").await {
            assert!(!text(&event["message"]).contains(char::is_control), "{event}");
        }
        // Sense again.
        lab.host.fault(Fault::None);
        lab.service_is("late", "has an address", |late| {
            !annotation(late, "kube-vip.io/loadbalancerIPs").is_empty()
        })
        .await;
    });
}

#[test]
fn a_host_that_never_answers_keeps_nobody_from_ending() {
    wait(async {
        let lab = Lab::start().await;
        let mut replica = lab.replica("a");
        lab.host.fault(Fault::Silent);
        lab.service("web", json!({})).await;
        replica.leads().await;
        quiet(3).await;
        replica.signal(nix::sys::signal::Signal::SIGTERM);
        assert!(replica.ended().await.success(), "{}", replica.log());
    });
}
