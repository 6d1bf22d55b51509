//! Rules for disks as people write them, mend them, and are told of them.

use serde_json::{Value, json};

use crate::agent::Agent;
use crate::host::eventually;
use crate::status::ask;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rules_take_effect_when_they_are_written_and_wrong_ones_never() {
    let agent = Agent::start();
    let folder = agent.folder.path().join("disks.d");
    let list = || serde_json::from_slice::<Value>(&ask(&agent, "disks", &["-o", "json"]).stdout).unwrap();
    assert_eq!((&list()["rules"], &list()["rules_problem"]), (&json!([]), &Value::Null));

    // Nothing on this machine is called so.
    let rule = |place: &str| {
        format!("[[disk]]\nmatch = {{ serial = 'no-such-disk-anywhere' }}\nmount-point = '{place}'\n")
    };
    std::fs::create_dir(&folder).unwrap();
    std::fs::write(folder.join("10.toml"), rule("/srv/no-such/a")).unwrap();
    eventually("the rule is there", || list()["rules"][0]["state"] == "no-disk").await;
    let told = list()["rules"][0].clone();
    assert_eq!(told["reason"], "no disk has serial no-such-disk-anywhere", "{told}");
    assert!(told["origin"].as_str().unwrap().ends_with("disks.d/10.toml:1"), "{told}");
    eventually("the disks are known", || {
        let list = list();
        list["rules"][0]["others"].as_array().unwrap().len() == list["disks"].as_array().unwrap().len()
    })
    .await;

    for (text, problem) in [
        (format!("{}form = true\n", rule("/srv/no-such/b")), "20.toml:4: unknown field `form`"),
        (rule("/srv/no-such/a/"), "20.toml:3: /srv/no-such/a is also the mount point of the rule"),
        (rule("srv"), "20.toml:3: mount-point = \"srv\" is a relative path"),
        (format!("{}options = ['bind']\n", rule("/srv/x")), "20.toml:4: the mount option \"bind\" cannot be"),
        (format!("{}\nfile-system = 'swap'\n", rule("/srv/x")), "20.toml:3: swap space has no mount point"),
        (
            rule("/srv/x").replace("no-such-disk-anywhere", "000"),
            "20.toml:2: the serial number \"000\" is all",
        ),
    ] {
        std::fs::write(folder.join("20.toml"), text).unwrap();
        let told = || list()["rules_problem"].as_str().unwrap_or_default().to_owned();
        eventually(problem, || told().contains(problem)).await;
        assert_eq!(list()["rules"].as_array().unwrap().len(), 1);
    }
    let table = String::from_utf8(ask(&agent, "disks", &[]).stdout).unwrap();
    assert!(table.contains("\n/srv/no-such/a  no-disk  -") && table.contains("not in force: "), "{table}");

    std::fs::write(folder.join("20.toml"), rule("/srv/no-such/b")).unwrap();
    eventually("both are in force", || list()["rules"].as_array().unwrap().len() == 2).await;
    assert_eq!(list()["rules_problem"], Value::Null);
    std::fs::remove_dir_all(&folder).unwrap();
    eventually("none is in force", || list()["rules"] == json!([])).await;
    assert!(!std::path::Path::new("/srv/no-such").exists());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_starts_with_wrong_rules() {
    let mut agent = Agent::start();
    let folder = agent.folder.path().join("disks.d");
    std::fs::create_dir(&folder).unwrap();
    std::fs::write(folder.join("10.toml"), "disk = 1\n").unwrap();
    agent.kill_and_start();
    let told = || String::from_utf8(ask(&agent, "disks", &[]).stdout).unwrap();
    eventually("people are told", || told().contains("10.toml:1: invalid type: integer")).await;
}
