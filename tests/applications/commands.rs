//! Applications with commands of their own.

use crate::lab::{
    Agent, FILE_SYSTEMS, THAW, inside, is_outside, kept, level, newest, nothing_is_frozen, refusal, thaw,
    until,
};

/// Settings for applications of these names, whose scripts are `/etc/NAME` and are run as `nobody`.
fn settings(names: &[&str], data: &str) -> String {
    let table = |name: &&str| {
        format!(
            "[[freeze.application]]\nname = '{name}'\nuser = 'nobody'\nfreeze = ['/etc/{name}', 'freeze']\n\
             thaw = ['/etc/{name}', 'thaw']\ndata = ['{data}']\n"
        )
    };
    let tables: String = names.iter().map(table).collect();
    format!("[freeze]\napplications-deadline = 2\n{tables}")
}

/// A script that writes down what it is told, and then does this at a freeze.
fn script(name: &str, at_freeze: &str) {
    let text = format!("#!/bin/sh\necho $1 $(id -u) >> /tmp/{name}\n[ $1 = thaw ] || {{ {at_freeze}\n}}\n");
    std::fs::write(format!("/etc/{name}"), text).unwrap();
    inside(&format!("chmod 755 /etc/{name}; rm -f /tmp/{name}"));
}

fn told(name: &str) -> String {
    std::fs::read_to_string(format!("/tmp/{name}")).unwrap_or_default().trim().replace('\n', ", ")
}

#[test]
fn commands_hold_and_release_an_application() {
    if is_outside("") {
        return;
    }
    script("shop", "true");
    let agent = Agent::start(&settings(&["shop"], "/data"));
    let mut client = agent.client();
    assert_eq!(client.call("guest-fsfreeze-freeze"), FILE_SYSTEMS);
    assert_eq!(told("shop"), "freeze 65534");
    let receipt = thaw(&mut client);
    assert_eq!((&receipt["level"], level(&receipt, "nobody")), (&"application".into(), ("application", "")));
    assert_eq!(told("shop"), "freeze 65534, thaw 65534");
    drop(agent);

    // One whose data are not frozen.
    let agent = Agent::start(&settings(&["shop"], "/srv"));
    let receipt = agent.freeze_and_thaw();
    let (reached, why) = level(&receipt, "nobody");
    assert!(reached == "crash" && why.contains("/srv are on /, which was not frozen"), "{receipt:#}");
    drop(agent);

    // One that fails, and one that does not end, are told of the thaw all the same.
    script("fails", "echo it is broken; exit 3");
    script("hangs", "sleep 1000");
    let agent = Agent::start(&settings(&["fails", "hangs"], "/data"));
    let receipt = agent.freeze_and_thaw();
    let applications = receipt["applications"].as_array().unwrap();
    for (name, words) in [("fails", "exit status: 3"), ("hangs", "in time")] {
        let one = applications.iter().find(|one| one["name"] == name).unwrap();
        assert!(one["level"] == "filesystem" && one["problem"].as_str().unwrap().contains(words), "{one:#}");
        until("it is told of the thaw", || told(name) == "freeze 65534, thaw 65534");
    }
    assert!(receipt["applications"].to_string().contains("it is broken"), "{receipt:#}");
    drop(agent);
    let agent = Agent::start(
        &settings(&["fails"], "/data").replace("[freeze]\n", "[freeze]\nrequire = 'application'\n"),
    );
    script("fails", "exit 3");
    let refused = agent.client().ask(crate::lab::FREEZE);
    assert!(refusal(&refused).contains("fails (nobody): /etc/fails failed"), "{refused}");
    nothing_is_frozen();
    until("it is told of the thaw", || told("fails") == "freeze 65534, thaw 65534");
    drop(agent);

    // Whoever kills the agent does not leave it held.
    script("shop", "true");
    let agent = Agent::start(&settings(&["shop"], "/data"));
    assert_eq!(agent.client().call("guest-fsfreeze-freeze"), FILE_SYSTEMS);
    agent.kill();
    nothing_is_frozen();
    until("it is told of the thaw", || told("shop") == "freeze 65534, thaw 65534");
    until("the marker goes", || !std::fs::exists("/run/qga.state.isfrozen").unwrap());
    let before = kept();
    let agent = Agent::again();
    assert!(refusal(&agent.client().ask(THAW)).contains("the agent crashed"));
    let receipt = newest(&before);
    assert_eq!((&receipt["level"], level(&receipt, "nobody").0), (&"crash".into(), "crash"), "{receipt:#}");
    assert_eq!(told("shop"), "freeze 65534, thaw 65534");
}
