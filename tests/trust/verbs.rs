//! What people on the host read and change of a guest by verbs of their own: with the roles that the guest's owner gives, and
//! its records of that. The agent is this machine's: what would change something is about users and parts that it has not.

use std::io::Write as _;
use std::process::{Output, Stdio};

use guestlet::policy::verbs::ONLY_BY_QGA;
use guestlet::qga::table::COMMANDS;
use serde_json::Value;

use crate::agent::{Agent, key_line, lab, until_speaks};
use crate::host::{Lab, assert_fails};

/// A user whom no machine has.
const NOBODY: &str = "guestlet-test-nobody-7";
const PASSWORD: &str = "Geh3im:und lang";

/// An agent that knows the host half by its key, with these settings and this file of records.
fn keyed(lab: &Lab, settings: &str) -> Agent {
    let mut web = Agent::new(lab, "web");
    web.give("host.pub", &key_line(lab));
    std::fs::create_dir(web.file("agent.d")).unwrap();
    configure(&web, settings);
    web.start();
    until_speaks(lab, "web", "keyed");
    web
}

fn configure(web: &Agent, settings: &str) {
    let audit = format!("[audit]\nfile = \"{}\"\n", web.file("audit.jsonl").display());
    std::fs::write(web.file("agent.d/all.toml"), audit + settings).unwrap();
}

fn passwd(lab: &Lab) -> Output {
    let mut command = lab.ctl_command(&["passwd", "web", NOBODY]);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    writeln!(child.stdin.take().unwrap(), "{PASSWORD}").unwrap();
    child.wait_with_output().unwrap()
}

/// What would change something, the role that it needs, and what it says when that is given.
fn changes(keys: &str) -> Vec<(Vec<&str>, &'static str, &'static str)> {
    let nobody = "unknown user \"guestlet-test-nobody-7\"";
    vec![
        (vec!["time", "web", "--set", "2099-01-01T00:00:00Z"], "power", "outside the years 1970 to 2069"),
        (vec!["cpus", "web", "--offline", "9999999"], "power", "there is no processor 9999999"),
        (vec!["memory", "web", "--offline", "99999999999"], "power", "1 of 1 blocks were not switched"),
        (vec!["keys", "ls", "web", NOBODY], "accounts", nobody),
        (vec!["keys", "add", "web", NOBODY, keys], "accounts", nobody),
        (vec!["keys", "rm", "web", NOBODY, keys], "accounts", nobody),
    ]
}

#[test]
fn each_needs_its_role_and_leaves_a_record_without_the_password() {
    let lab = lab(&["web"]).start();
    let mut web = keyed(&lab, "");
    let keys = lab.path("keys");
    std::fs::write(&keys, "ssh-rsa A\n").unwrap();
    let keys = keys.to_str().unwrap();

    // With the key alone.
    let time: Value = serde_json::from_str(&lab.words(&["time", "web", "-o", "json"])).unwrap();
    assert!(time["time"].as_str().unwrap().ends_with('Z'), "{time}");
    for verb in ["cpus", "network", "users"] {
        let value: Value = serde_json::from_str(&lab.words(&[verb, "web", "-o", "json"])).unwrap();
        assert!(value.is_array(), "{verb}: {value}");
    }
    assert!(lab.words(&["network", "web"]).contains("127.0.0.1/8"));
    for (words, role, _) in changes(keys) {
        let said = format!("no grant gives the role {role} to the host half SHA256:");
        assert_fails(&lab.ctl(&words), 1, &said);
    }
    assert_fails(&passwd(&lab), 1, "no grant gives the role accounts to the host half SHA256:");

    configure(&web, "[[grant]]\nhost = \"*\"\nroles = [\"power\", \"accounts\"]\n");
    web.restart();
    lab.until("the agent is back", || lab.ctl(&["keys", "ls", "web", NOBODY]).stderr.ends_with(b"-7\"\n"));
    for (words, _, said) in changes(keys) {
        assert_fails(&lab.ctl(&words), 1, said);
    }
    assert_fails(&passwd(&lab), 1, "unknown user \"guestlet-test-nobody-7\"");
    let records = std::fs::read_to_string(web.file("audit.jsonl")).unwrap();
    let record = |verb: &str, decision: &str| {
        let all = records.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        let mut found = all.filter(|one| one["verb"] == verb && one["decision"] == decision);
        found.next_back().unwrap_or_else(|| panic!("{verb}: {records:?}"))
    };
    for (verb, role, subject) in [
        ("SetPassword", "accounts", NOBODY),
        ("ListAuthorizedKeys", "accounts", NOBODY),
        ("AddAuthorizedKeys", "accounts", NOBODY),
        ("RemoveAuthorizedKeys", "accounts", NOBODY),
        ("SetProcessors", "power", "9999999 off"),
        ("SetMemoryBlocks", "power", "99999999999 off"),
        ("SetTime", "power", "4070908800.000000000 s"),
    ] {
        assert_eq!(record(verb, "denied")["role"], role);
        let allowed = record(verb, "allowed");
        assert_eq!((&allowed["role"], &allowed["subject"]), (&role.into(), &subject.into()), "{allowed}");
        assert_eq!(allowed["caller"], "uid:0 root", "{allowed}");
    }
    for text in [records.clone(), web.log(), lab.log()] {
        assert!(!text.contains("Geh3im") && !text.contains("ssh-rsa"), "{text}");
    }
}

#[test]
fn what_the_settings_of_qga_forbid_is_forbidden_of_the_verbs() {
    let lab = lab(&["web"]).start();
    let blocked = "[qga]\nblock-rpcs = [\"guest-get-timezone\", \"guest-get-vcpus\", \"guest-ssh-get-authorized-keys\", \
                   \"guest-network-get-route\"]\n[qga.passwords]\nallow = false\n\
                   [[grant]]\nhost = \"*\"\nroles = [\"accounts\"]\n";
    let _web = keyed(&lab, blocked);
    for (words, command) in [
        (&["time", "web"][..], "guest-get-timezone"),
        (&["cpus", "web"], "guest-get-vcpus"),
        (&["network", "web", "--routes"], "guest-network-get-route"),
        (&["keys", "ls", "web", NOBODY], "guest-ssh-get-authorized-keys"),
    ] {
        let said = format!("the settings of [qga] in this guest do not allow {command}");
        assert_fails(&lab.ctl(words), 1, &said);
    }
    let output = passwd(&lab);
    assert_fails(&output, 1, "password");
    assert!(!String::from_utf8_lossy(&output.stderr).contains("unknown user"), "{output:?}");
    assert!(lab.words(&["users", "web"]).starts_with("USER"));
    assert!(lab.words(&["network", "web"]).starts_with("NAME"));
}

/// The verb of `guestctl` that does the work of these commands of QGA.
const COUNTERPARTS: &[(&[&str], &[&str])] = &[
    (&["guest-exec"], &["exec", "web", "--", "/bin/true"]),
    (&["guest-file-open"], &["cp", "web:/etc/hostname", "-"]),
    (&["guest-fsfreeze-freeze", "guest-fsfreeze-freeze-list"], &["freeze", "web"]),
    (&["guest-fsfreeze-status"], &["freeze", "web", "--status"]),
    (&["guest-fsfreeze-thaw"], &["thaw", "web"]),
    (&["guest-fstrim"], &["trim", "web"]),
    (&["guest-get-cpustats", "guest-get-diskstats", "guest-get-load"], &["metrics", "web"]),
    (&["guest-get-fsinfo"], &["fs", "web"]),
    (&["guest-get-memory-block-info", "guest-get-memory-blocks"], &["memory", "web"]),
    (&["guest-get-time", "guest-get-timezone"], &["time", "web"]),
    (&["guest-get-users"], &["users", "web"]),
    (&["guest-get-vcpus"], &["cpus", "web"]),
    (&["guest-network-get-interfaces"], &["network", "web"]),
    (&["guest-network-get-route"], &["network", "web", "--routes"]),
    (&["guest-set-memory-blocks"], &["memory", "web", "--offline", "99999999999"]),
    (&["guest-set-time"], &["time", "web", "--set", "2099-01-01T00:00:00Z"]),
    (&["guest-set-user-password"], &["passwd", "web", NOBODY]),
    (&["guest-set-vcpus"], &["cpus", "web", "--offline", "9999999"]),
    (&["guest-shutdown"], &["shutdown", "web"]),
    (&["guest-ssh-add-authorized-keys"], &["keys", "add", "web", NOBODY, "-"]),
    (&["guest-ssh-get-authorized-keys"], &["keys", "ls", "web", NOBODY]),
    (&["guest-ssh-remove-authorized-keys"], &["keys", "rm", "web", NOBODY, "-"]),
    (&["guest-suspend-disk"], &["suspend", "web", "--to", "disk"]),
    (&["guest-suspend-hybrid"], &["suspend", "web", "--to", "both"]),
    (&["guest-suspend-ram"], &["suspend", "web"]),
];

/// Each command of QGA has a verb of `guestctl`, which is refused where that command is, or is reached by `guestctl qga`.
#[test]
fn every_command_of_qga_has_a_counterpart() {
    let counterparts = COUNTERPARTS.iter().flat_map(|(commands, _)| commands.iter().copied());
    let mut known: Vec<_> = counterparts.clone().chain(ONLY_BY_QGA.iter().copied()).collect();
    known.sort_unstable();
    assert_eq!(known, COMMANDS.iter().map(|command| command.name).collect::<Vec<_>>());

    let lab = lab(&["web"]).start();
    let blocked: Vec<_> = counterparts.map(|name| format!("\"{name}\"")).collect();
    let mut web = keyed(&lab, &format!("[qga]\nblock-rpcs = [{}]\n", blocked.join(", ")));
    let input = lab.path("input");
    std::fs::write(&input, "ssh-rsa A\n").unwrap();
    let ask = |words: &[&str]| {
        let input = std::fs::File::open(&input).unwrap();
        lab.ctl_command(words).stdin(input).output().unwrap()
    };
    for (commands, words) in COUNTERPARTS {
        let output = ask(words);
        let said = String::from_utf8_lossy(&output.stderr);
        let names_it = commands.iter().any(|command| said.contains(&format!("do not allow {command}")));
        assert!(!output.status.success() && names_it, "{words:?}: {output:?}");
    }
    for command in ONLY_BY_QGA {
        let output = ask(&["qga", "web", &format!("{{\"execute\":\"{command}\"}}")]);
        let answer: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
        assert!(answer.get("return").is_some() || answer.get("error").is_some(), "{command}: {output:?}");
        assert!(!String::from_utf8_lossy(&output.stderr).contains("is not known"), "{command}: {output:?}");
    }
    web.stop();
}
