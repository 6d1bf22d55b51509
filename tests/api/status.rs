//! `guestlet status`, as people and programs in the guest use it.

use std::process::Output;

use serde_json::Value;
use tokio_util::sync::CancellationToken;

use crate::agent::Agent;
use crate::host::{Callback, Control, eventually, next};

fn status(agent: &Agent, arguments: &[&str]) -> Output {
    ask(agent, "status", arguments)
}

pub fn ask(agent: &Agent, question: &str, arguments: &[&str]) -> Output {
    crate::agent::launch::guestlet()
        .arg(question)
        .args(arguments)
        .arg("--settings")
        .arg(agent.folder.path().join("agent.toml"))
        .output()
        .unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn it_tells_who_holds_the_guest_and_what_it_is_called_there() {
    let agent = Agent::start();
    let folder = agent.folder.path();
    let alone = String::from_utf8(status(&agent, &[]).stdout).unwrap();
    assert!(alone.contains("no host half holds this guest"), "{alone}");

    let control = Control::dial(folder).await;
    let mut events = control.watch("one", None).await.unwrap();
    next(&mut events).await;
    let silent = String::from_utf8(status(&agent, &[]).stdout).unwrap();
    assert!(silent.contains("known there as  not known: this host half accepts no requests"), "{silent}");
    let _callback = Callback::dial(folder, "one", CancellationToken::new()).await;
    eventually("the identity is kept", || folder.join("identity.json").exists()).await;

    let held = String::from_utf8(status(&agent, &[]).stdout).unwrap();
    for words in ["host-of-one", "shop/web-1", "blue", "control.sock"] {
        assert!(held.contains(words), "{words}: {held}");
    }
    let json: Value = serde_json::from_slice(&status(&agent, &["-o", "json"]).stdout).unwrap();
    assert_eq!(json["host"]["instance_id"], "one");
    assert_eq!(json["identity"]["vm_uid"], "6f1c6a4e-8f0a-4a57-9a52-0d6d5d4c2b11");
    assert!(json["events"]["sequence"].as_u64().unwrap() >= 1);
    let kept: Value = serde_json::from_slice(&std::fs::read(folder.join("identity.json")).unwrap()).unwrap();
    assert_eq!(kept["provider_id"], json["identity"]["provider_id"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn it_shows_the_disks_of_this_machine() {
    let agent = Agent::start();
    let list = || serde_json::from_slice::<Value>(&ask(&agent, "disks", &["-o", "json"]).stdout).unwrap();
    let physical = std::fs::read_dir("/sys/block").unwrap().filter(|entry| {
        let path = entry.as_ref().unwrap().path();
        let is_disc_drive = path.file_name().unwrap().to_str().unwrap().starts_with("sr");
        !path.canonicalize().unwrap().starts_with("/sys/devices/virtual/block") && !is_disc_drive
    });
    let physical = physical.count();
    eventually("the disks are known", || list()["disks"].as_array().unwrap().len() == physical).await;
    let (listed, table) = (list(), String::from_utf8(ask(&agent, "disks", &[]).stdout).unwrap());
    assert!(table.starts_with("NAME ") && table.lines().count() == physical + 1, "{table}");
    for disk in listed["disks"].as_array().unwrap() {
        let name = disk["name"].as_str().unwrap();
        let sectors = std::fs::read_to_string(format!("/sys/block/{name}/size")).unwrap();
        assert_eq!(disk["bytes"].as_u64().unwrap(), 512 * sectors.trim().parse::<u64>().unwrap());
        assert!(table.contains(&format!("\n{name} ")), "{table}");
    }
}

#[test]
fn without_an_agent_it_says_how_to_start_one() {
    let mut agent = Agent::start();
    agent.child.kill().unwrap();
    agent.child.wait().unwrap();
    let output = status(&agent, &[]);
    assert_eq!(output.status.code(), Some(1));
    let words = String::from_utf8(output.stderr).unwrap();
    assert!(
        words.contains("the agent is not running") && words.contains("systemctl start guestlet"),
        "{words}"
    );
}
