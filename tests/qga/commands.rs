//! What each command answers.

use serde_json::{Value, json};

use crate::agent::Agent;

#[test]
fn sync_gives_the_id_back_and_its_delimited_form_begins_with_ff() {
    let agent = Agent::start();
    let mut client = agent.client();
    for id in [0, 1, -1, i64::MAX, i64::MIN] {
        let message = json!({"execute": "guest-sync", "arguments": {"id": id}});
        assert_eq!(client.ask(&message.to_string()), json!({"return": id}));
    }
    client.send(b"{\"execute\":\"guest-sync-delimited\",\"arguments\":{\"id\":7}}");
    assert_eq!(client.line(), b"\xff{\"return\":7}");
}

#[test]
fn an_id_of_any_kind_comes_back_as_it_was_also_with_errors() {
    let agent = Agent::start();
    let mut client = agent.client();
    for id in [json!(1), json!("x\"y"), json!(null), json!([1, {"a": [true]}]), json!(1.5), json!({})] {
        let message = json!({"execute": "guest-ping", "id": id});
        assert_eq!(client.ask(&message.to_string()), json!({"return": {}, "id": id}));
        for wrong in [
            json!({"execute": "guest-nothing", "id": id}),
            json!({"execute": "guest-ping", "arguments": {"x": 1}, "id": id}),
            json!({"id": id}),
            json!({"execute": 5, "id": id}),
            json!({"execute": "guest-ping", "arguments": [], "id": id}),
            json!({"execute": "guest-ping", "surprise": 1, "id": id}),
        ] {
            let answer = client.ask(&wrong.to_string());
            assert!(answer["error"]["class"].is_string(), "{wrong}: {answer}");
            assert_eq!(answer["id"], id, "{wrong}");
        }
    }
}

#[test]
fn answers_come_in_the_order_of_their_requests() {
    let agent = Agent::start();
    let mut client = agent.client();
    let file = agent.folder.path().join("agent.toml");
    let requests = [
        json!({"execute": "guest-fsfreeze-thaw", "arguments": {"x": 1}, "id": 0}),
        json!({"execute": "guest-fsfreeze-status", "id": 1}),
        json!({"execute": "guest-file-open", "arguments": {"path": file}, "id": 2}),
        json!({"execute": "guest-nothing", "id": 3}),
        json!({"execute": "guest-get-disks", "id": 4}),
        json!({"execute": "guest-ping", "id": 5}),
    ];
    client.send(requests.iter().map(Value::to_string).collect::<String>().as_bytes());
    for place in 0..requests.len() {
        assert_eq!(client.answer()["id"], place);
    }
}

#[test]
fn info_lists_every_command_with_whether_success_is_answered() {
    let agent = Agent::start();
    let info = agent.client().call("guest-info");
    let commands = info["supported_commands"].as_array().unwrap();
    let find = |name: &str| commands.iter().find(|command| command["name"] == name).unwrap();
    assert_eq!(find("guest-ping"), &json!({"name": "guest-ping", "enabled": true, "success-response": true}));
    assert_eq!(find("guest-shutdown")["success-response"], false);
    assert_eq!(commands.len(), guestlet::qga::table::COMMANDS.len());
}

#[test]
fn a_blocked_command_is_not_found_and_says_so() {
    let agent = Agent::start_with(&["-b", "guest-get-osinfo,guest-shutdown"]);
    let mut client = agent.client();
    let answer = client.ask(r#"{"execute":"guest-get-osinfo"}"#);
    assert_eq!(answer["error"]["class"], "CommandNotFound");
    assert!(answer["error"]["desc"].as_str().unwrap().contains("has been disabled"), "{answer}");
    let info = client.call("guest-info");
    let disabled: Vec<_> = info["supported_commands"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|command| command["enabled"] == false)
        .map(|command| command["name"].as_str().unwrap())
        .collect();
    assert_eq!(disabled, ["guest-get-osinfo", "guest-shutdown"]);
}

#[test]
fn wrong_arguments_are_named_and_do_nothing() {
    let agent = Agent::start();
    let mut client = agent.client();
    let cases = [
        (json!({"execute": "guest-sync"}), "\"id\" is missing"),
        (json!({"execute": "guest-sync", "arguments": {"id": "1"}}), "\"id\" must be an integer of 64 bits"),
        (json!({"execute": "guest-sync", "arguments": {"id": 1.5}}), "\"id\" must be an integer of 64 bits"),
        (json!({"execute": "guest-sync", "arguments": {"id": 1, "x": 2}}), "Parameter 'x' is unexpected"),
        (
            json!({"execute": "guest-sync", "arguments": {"id": u64::MAX}}),
            "\"id\" must be an integer of 64 bits",
        ),
        (json!({"execute": "guest-shutdown", "arguments": {"mode": "explode"}}), "\"mode\" must be one of"),
        (json!({"execute": "guest-shutdown", "arguments": {"mode": 1}}), "\"mode\" must be a string"),
        (
            json!({"execute": "guest-shutdown", "arguments": {"force": true}}),
            "Parameter 'force' is unexpected",
        ),
    ];
    for (message, named) in cases {
        let answer = client.ask(&message.to_string());
        assert_eq!(answer["error"]["class"], "GenericError", "{message}: {answer}");
        let description = answer["error"]["desc"].as_str().unwrap();
        assert!(description.contains(named), "{message}: {description}");
    }
    assert_eq!(client.call("guest-ping"), json!({}));
}

#[test]
fn the_system_is_described() {
    let agent = Agent::start();
    let mut client = agent.client();
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap();
    assert_eq!(client.call("guest-get-host-name"), json!({"host-name": name.trim()}));
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let system = client.call("guest-get-osinfo");
    assert_eq!(system["kernel-release"], release.trim());
    let interfaces = client.call("guest-network-get-interfaces");
    let loopback = interfaces.as_array().unwrap().iter().find(|interface| interface["name"] == "lo").unwrap();
    assert!(
        loopback["ip-addresses"]
            .as_array()
            .unwrap()
            .contains(&json!({"ip-address": "127.0.0.1", "ip-address-type": "ipv4", "prefix": 8})),
        "{loopback}"
    );
    assert!(matches!(loopback["statistics"]["rx-bytes"], Value::Number(_)));
}

#[test]
fn several_clients_are_served_at_once() {
    let agent = Agent::start();
    let mut clients: Vec<_> = (0..10).map(|_| agent.client()).collect();
    for client in &mut clients {
        client.send(b"{\"execute\":");
    }
    for client in clients.iter_mut().rev() {
        assert_eq!(client.ask("\"guest-ping\"}"), json!({"return": {}}));
    }
}
