//! What people on the host may have a guest do: by commands of QGA and by the verbs that do the same, each with the roles that the
//! guest's owner gives to whoever asks.

use std::process::Output;

use serde_json::{Value, json};

use crate::agent::{Agent, key_line, lab, until, until_speaks};
use crate::host::{Lab, assert_fails};

#[allow(clippy::needless_pass_by_value, reason = "calls read better so")]
fn qga(lab: &Lab, command: &str, arguments: Value) -> Output {
    let command = json!({ "execute": command, "arguments": arguments }).to_string();
    lab.ctl(&["qga", "web", &command])
}

/// What a command returns, which must succeed.
#[track_caller]
fn returned(lab: &Lab, command: &str, arguments: Value) -> Value {
    let output = qga(lab, command, arguments);
    assert!(output.status.success(), "{command}: {output:?}");
    let answer: Value = serde_json::from_slice(&output.stdout).unwrap();
    answer["return"].clone()
}

/// An agent that knows the host half by its key, and gives it these grants beside `status`.
fn keyed(lab: &Lab, grants: &str) -> Agent {
    let mut web = Agent::new(lab, "web");
    web.give("host.pub", &key_line(lab));
    std::fs::create_dir(web.file("agent.d")).unwrap();
    std::fs::write(web.file("agent.d/grants.toml"), grants).unwrap();
    web.start();
    until_speaks(lab, "web", "keyed");
    web
}

fn grant(more: &str) -> String {
    format!("[[grant]]\nhost = \"*\"\n{more}\n")
}

#[test]
fn each_command_needs_its_own_role_of_whoever_asks() {
    let lab = lab(&["web"]).start();
    let web = keyed(&lab, "[audit]\nfile = \"/dev/null\"\n");
    // With the key alone.
    assert!(returned(&lab, "guest-get-osinfo", json!({}))["kernel-release"].is_string());
    assert_eq!(returned(&lab, "guest-sync", json!({ "id": 7 })), 7);
    for (command, arguments, role) in [
        ("guest-exec", json!({ "path": "/bin/true" }), "exec"),
        ("guest-file-open", json!({ "path": "/etc/hostname" }), "files-read"),
        ("guest-set-user-password", json!({ "username": "x", "password": "", "crypted": false }), "accounts"),
        ("guest-shutdown", json!({}), "power"),
        ("guest-fsfreeze-freeze", json!({}), "freeze"),
        ("guest-fsfreeze-thaw", json!({}), "freeze"),
        ("guest-fstrim", json!({}), "disks"),
        ("guest-get-load", json!({}), "metrics"),
    ] {
        let output = qga(&lab, command, arguments);
        let words = format!(
            "CommandNotFound: Command {command} has been disabled: no grant gives the role {role} to"
        );
        assert_fails(&output, 1, &words);
        assert_fails(&output, 1, &format!("roles = [\"{role}\"]"));
    }
    let info = returned(&lab, "guest-info", json!({}));
    let enabled = |name: &str| {
        let all = info["supported_commands"].as_array().unwrap();
        all.iter().find(|one| one["name"] == name).unwrap()["enabled"].clone()
    };
    assert_eq!((enabled("guest-ping"), enabled("guest-exec")), (true.into(), false.into()));
    // The verbs say the same of the same roles.
    for (words, role) in [
        (&["shutdown", "web"][..], "power"),
        (&["reboot", "web"], "power"),
        (&["suspend", "web"], "power"),
        (&["freeze", "web"], "freeze"),
        (&["freeze", "web", "--status"], "freeze"),
        (&["thaw", "web"], "freeze"),
        (&["trim", "web"], "disks"),
    ] {
        let output = lab.ctl(words);
        assert_fails(&output, 1, &format!("no grant gives the role {role} to the host half SHA256:"));
        assert_fails(&output, 1, "for uid:0");
    }
    assert!(lab.words(&["fs", "web"]).starts_with("MOUNT POINT"));
    web.until_it_says("guest-exec: denied: no grant gives the role exec");
    assert!(web.log().contains(" for uid:0 root: guest-exec: denied"), "{}", web.log());
    assert!(web.log().contains(" for uid:0 root: Shutdown: denied"), "{}", web.log());
}

#[test]
fn grants_limit_programs_and_files_and_are_for_one_caller() {
    let lab = lab(&["web"]).start();
    let secret = lab.path("secret");
    std::fs::write(&secret, "x").unwrap();
    let open = lab.path("open");
    std::fs::write(&open, "words").unwrap();
    let grants = grant(&format!(
        "caller = \"uid:0 *\"\nroles = [\"exec\", \"files-read\"]\nexec = {{ paths = [\"/bin/echo\", \"/usr/bin/echo\"] }}\n\
         files = {{ paths = [\"{}\"] }}",
        open.canonicalize().unwrap().display()
    ));
    let _web = keyed(&lab, &grants);
    let started = returned(
        &lab,
        "guest-exec",
        json!({ "path": "/bin/echo", "arg": ["hello"], "capture-output": true }),
    );
    let pid = started["pid"].clone();
    let ended = std::cell::RefCell::new(Value::Null);
    until("it ends", || {
        let now = returned(&lab, "guest-exec-status", json!({ "pid": pid }));
        let is_over = now["exited"] == true;
        *ended.borrow_mut() = now;
        is_over
    });
    let ended = ended.into_inner();
    assert_eq!((&ended["exitcode"], &ended["out-data"]), (&0.into(), &"aGVsbG8K".into()));
    assert_fails(
        &qga(&lab, "guest-exec", json!({ "path": "/bin/sh" })),
        1,
        "no grant lets the host half SHA256:",
    );
    let output = qga(&lab, "guest-exec", json!({ "path": "/bin/echo", "env": ["LD_PRELOAD=/x"] }));
    assert_fails(&output, 1, "see exec.paths and exec.users of the grants");
    let output = qga(&lab, "guest-file-open", json!({ "path": secret.to_str().unwrap() }));
    assert_fails(&output, 1, "see files.paths of the grants");
    let handle = returned(&lab, "guest-file-open", json!({ "path": open.to_str().unwrap() }));
    let read = returned(&lab, "guest-file-read", json!({ "handle": handle }));
    assert_eq!(read["buf-b64"], "d29yZHM=");
    let output = qga(&lab, "guest-file-read", json!({ "handle": handle, "count": 1 << 20 }));
    assert_fails(&output, 1, "over a session, an answer carries at most 96 KiB");
    // Not with writing.
    let output = qga(&lab, "guest-file-open", json!({ "path": open.to_str().unwrap(), "mode": "w" }));
    assert_fails(&output, 1, "no grant");
    assert_eq!(std::fs::read_to_string(&open).unwrap(), "words");
}

#[test]
fn what_one_has_opened_or_started_is_of_no_use_to_another() {
    let rules = "[[access]]\nusers = ['4000001']\nroles = ['qga']";
    let lab = crate::agent::listed(Lab::new().set(rules), &["web"]).start();
    let _web = keyed(&lab, &grant("roles = [\"exec\", \"files-read\"]"));
    let file = lab.path("file");
    std::fs::write(&file, "words").unwrap();
    let handle = returned(&lab, "guest-file-open", json!({ "path": file.to_str().unwrap() }));
    let started = returned(&lab, "guest-exec", json!({ "path": "/bin/true" }));
    let other = |command: &str, arguments: Value| {
        let command = json!({ "execute": command, "arguments": arguments }).to_string();
        lab.ctl_as(4_000_001, &["qga", "web", &command]).output().unwrap()
    };
    assert!(other("guest-ping", json!({})).status.success());
    assert_fails(&other("guest-file-read", json!({ "handle": handle })), 1, "belongs to no open file");
    assert_fails(&other("guest-file-close", json!({ "handle": handle })), 1, "belongs to no open file");
    assert_fails(&other("guest-exec-status", started.clone()), 1, "belongs to no program");
    assert_eq!(returned(&lab, "guest-file-read", json!({ "handle": handle }))["count"], 5);
    returned(&lab, "guest-exec-status", started);
}

#[test]
fn without_keys_programs_and_files_are_off_until_the_settings_give_them() {
    let lab = lab(&["web"]).start();
    let mut web = Agent::new(&lab, "web");
    web.start();
    lab.until_session("web", "connected");
    assert!(returned(&lab, "guest-get-load", json!({}))["load1m"].is_number());
    for (command, arguments, role) in [
        ("guest-exec", json!({ "path": "/bin/true" }), "exec"),
        ("guest-file-open", json!({ "path": "/etc/hostname" }), "files-read"),
    ] {
        let output = qga(&lab, command, arguments);
        assert_fails(&output, 1, &format!("no grant gives the role {role} to a host half without a key"));
        assert_fails(&output, 1, "add a [[grant]] with host = \"plain\"");
    }
    std::fs::create_dir(web.file("agent.d")).unwrap();
    let grants = "[[grant]]\nhost = \"plain\"\nprofile = \"qemu-ga\"\n";
    std::fs::write(web.file("agent.d/grants.toml"), grants).unwrap();
    web.restart();
    lab.until("the agent is back", || {
        qga(&lab, "guest-exec", json!({ "path": "/bin/true" })).status.success()
    });

    // What the settings of QGA forbid stays forbidden, in both languages.
    let blocked = "[qga]\nblock-rpcs = [\"guest-exec\", \"guest-get-fsinfo\", \"guest-shutdown\"]\n";
    std::fs::write(web.file("agent.d/blocked.toml"), blocked).unwrap();
    web.restart();
    lab.until("the agent is back", || qga(&lab, "guest-ping", json!({})).status.success());
    let output = qga(&lab, "guest-exec", json!({ "path": "/bin/true" }));
    assert_fails(&output, 1, "Command guest-exec has been disabled: the command is not allowed");
    for (words, command) in [(["fs", "web"], "guest-get-fsinfo"), (["shutdown", "web"], "guest-shutdown")] {
        let said = format!("the settings of [qga] in this guest do not allow {command}");
        assert_fails(&lab.ctl(&words), 1, &said);
    }
}

#[test]
fn what_is_no_command_is_an_error_of_the_protocol() {
    let lab = lab(&["web"]).start();
    let mut web = Agent::new(&lab, "web");
    web.start();
    lab.until_session("web", "connected");
    let deep = "[".repeat(2000);
    for (text, words) in [
        ("", "it is empty, or has no end"),
        ("{", "it is empty, or has no end"),
        ("nonsense", "a command must be a JSON object"),
        ("{\"execute\":\"guest-ping\"}{\"execute\":\"guest-ping\"}", "there is more than one command"),
        ("{\"execute\":\"guest-nothing\"}", "The command \"guest-nothing\" is not known"),
        ("{\"execute\":\"guest-ping\",\"arguments\":{\"x\":1}}", "Parameter 'x' is unexpected"),
        (deep.as_str(), "nested deeper than"),
    ] {
        assert_fails(&lab.ctl(&["qga", "web", text]), 1, words);
    }
    // As QEMU reads and writes it, and from standard input.
    let output = lab.ctl(&["qga", "web", "{'execute':'guest-sync-delimited','arguments':{'id':1},'id':[2]}"]);
    assert_eq!(String::from_utf8_lossy(&output.stdout), "{\"return\":1,\"id\":[2]}\n");
    let mut command = lab.ctl_command(&["qga", "web", "-"]);
    command.stdin(std::process::Stdio::piped()).stdout(std::process::Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut input = child.stdin.take().unwrap();
    std::io::Write::write_all(&mut input, b"{\"execute\": \"guest-ping\"}\n").unwrap();
    drop(input);
    let output = child.wait_with_output().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout), "{\"return\":{}}\n");
}
