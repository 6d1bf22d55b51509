//! What a host half tells is kept for people and programs, and the last good one stays.

use std::process::Stdio;

use guestlet::wire::proto::v1::{Topology, event::Kind};
use serde_json::Value;
use tonic::Code;

use crate::agent::Agent;
use crate::host::Control;
use crate::lab::{Holder, ask, ask_command, file, told, zone};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_last_good_topology_is_kept_for_people_and_programs() {
    let mut agent = Agent::start();
    assert!(told(&agent)["topology"].is_null());
    let mut holder = Holder::take(&agent, "one").await;
    let labels = [("example.com/rack".to_owned(), "r7".to_owned())].into();
    holder.tell(Topology { labels, ..zone("a") }).await.unwrap();
    let kept: Value = serde_json::from_slice(&std::fs::read(file(&agent)).unwrap()).unwrap();
    assert_eq!((&kept["version"], &kept["zone"], &kept["host"]), (&1.into(), &"a".into(), &"h-a".into()));
    assert_eq!(
        (&kept["labels"]["example.com/rack"], &kept["host_half"]),
        (&"r7".into(), &"host-of-one".into())
    );
    let changed = |kind: &Kind| match kind {
        Kind::TopologyChanged(changed) => changed.topology.as_ref().map(|topology| topology.zone.clone()),
        _ => None,
    };
    assert_eq!(holder.until(changed).await, "a");
    let table = String::from_utf8(ask(&agent, &[]).stdout).unwrap();
    for words in
        ["zone            a\n", "label           example.com/rack=r7\n", "reported by     host-of-one, "]
    {
        assert!(table.contains(words), "{words:?}: {table}");
    }

    // What Kubernetes would refuse, and who does not hold the guest.
    for (bad, why) in [
        (zone("zoné"), "the zone is not a label"),
        (zone(&"z".repeat(64)), "64 bytes"),
        (Topology { labels: [("k8s.io/a".into(), "b".into())].into(), ..zone("b") }, "NodeRestriction"),
    ] {
        let status = holder.tell(bad).await.unwrap_err();
        assert_eq!(status.code(), Code::InvalidArgument);
        assert!(status.message().contains(why), "{status}");
        let refused = |kind: &Kind| match kind {
            Kind::TopologyRefused(refused) => Some(refused.problem.clone()),
            _ => None,
        };
        assert!(holder.until(refused).await.contains(why));
        assert!(told(&agent)["problem"].as_str().unwrap().contains(why));
    }
    assert_eq!(holder.tell_as("two", zone("b")).await.unwrap_err().code(), Code::FailedPrecondition);
    assert_eq!(told(&agent)["topology"]["zone"], "a");

    // Another run of the agent knows it, and so does who watches.
    drop(holder);
    agent.kill_and_start();
    assert_eq!(told(&agent)["topology"]["zone"], "a");
    let control = Control::dial(agent.folder.path()).await;
    let mut events = control.watch("two", None).await.unwrap();
    let Some(Kind::AgentReady(ready)) = crate::host::next(&mut events).await.kind else { panic!() };
    assert_eq!(ready.state.unwrap().topology.unwrap().zone, "a");
    drop((events, control));
    let moved = Holder::take(&agent, "two").await;
    moved.tell(zone("b")).await.unwrap();
    assert_eq!(told(&agent)["host_half"], "host-of-two");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_starts_before_it_is_known_can_wait() {
    let agent = Agent::start();
    let late = ask(&agent, &["--wait", "1s"]);
    let words = String::from_utf8(late.stderr).unwrap();
    assert_eq!(late.status.code(), Some(1));
    assert!(words.contains("no host half has told this guest in time where it runs"), "{words}");

    let waiting =
        ask_command(&agent, &["--wait", "60s", "-o", "json"]).stdout(Stdio::piped()).spawn().unwrap();
    let holder = Holder::take(&agent, "one").await;
    holder.tell(zone("a")).await.unwrap();
    let output = tokio::task::spawn_blocking(|| waiting.wait_with_output().unwrap()).await.unwrap();
    let told: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((output.status.success(), &told["topology"]["zone"]), (true, &"a".into()));

    let folder = tempfile::tempdir().unwrap();
    let settings = folder.path().join("agent.toml");
    std::fs::write(&settings, crate::agent::settings_in(folder.path())).unwrap();
    let nobody = crate::agent::launch::guestlet()
        .args(["topology", "--wait", "1s", "--settings"])
        .arg(&settings)
        .output()
        .unwrap();
    let words = String::from_utf8(nobody.stderr).unwrap();
    assert!(words.contains("the agent is not running"), "{words}");
}

/// Issue 16: on a Kubernetes node, agents of tests would label the machine's Node.
#[test]
fn the_agents_of_tests_leave_the_machines_node_alone() {
    if crate::traps::is_outside() {
        return;
    }
    let traps = crate::traps::Traps::set();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async {
        let agent = Agent::start_set(&["-v"], "[topology]\nreport-only = false\n");
        let holder = Holder::take(&agent, "one").await;
        holder.tell(zone("a")).await.unwrap();
        assert_eq!(told(&agent)["topology"]["zone"], "a");
        tokio::time::sleep(std::time::Duration::from_secs(1)).await;
        let removed = ask(&agent, &[]);
        assert!(removed.status.success(), "{removed:?}");
    });
    traps.are_untouched();
}
