//! Who may ask the host half for what. Other users are those that every system has; this is for root.

use std::os::unix::fs::PermissionsExt as _;
use std::process::{Output, Stdio};

use guestlet::access::verb;
use serde_json::Value;

use crate::guest::{Door, Guest, Manner, info};
use crate::lab::{Lab, Watch, assert_fails, text, uuid};

/// The user `daemon`, in the group of the same name.
const DAEMON: u32 = 1;
/// The user `bin`, whom no rule of these tests names.
const BIN: u32 = 2;
/// A user that has no name.
const NAMELESS: u32 = 3_999_999_999;

fn guest(lab: &Lab, name: &str, number: u8) -> Guest {
    let path = lab.path(&format!("{name}.sock"));
    Guest::start(&path, Door::Unix, Manner::Good, info(&uuid(number), "boot-1"))
}

/// Asks as this user. Whoever reads standard input finds a line there.
fn ask(lab: &Lab, uid: u32, arguments: &[&str]) -> Output {
    let input = std::fs::File::open("/etc/passwd").unwrap();
    lab.ctl_as(uid, arguments).stdin(input).output().unwrap()
}

fn words(lab: &Lab, uid: u32, arguments: &[&str]) -> String {
    let output = ask(lab, uid, arguments);
    assert!(output.status.success(), "{uid} {arguments:?}: {output:?}\n{}", lab.log());
    String::from_utf8(output.stdout).unwrap()
}

fn names(list: &str) -> Vec<String> {
    let list: Value = serde_json::from_str(list).unwrap();
    list.as_array().unwrap().iter().map(|vm| vm["name"].as_str().unwrap().to_owned()).collect()
}

fn mode(lab: &Lab) -> u32 {
    std::fs::metadata(lab.socket()).unwrap().permissions().mode() & 0o777
}

/// Two VMs of the cluster dev, and one of prod.
fn lab(rule: &str) -> Lab {
    Lab::new()
        .set(&format!("[[access]]\n{rule}"))
        .vm("web-1", 1, "unix-socket = '@web-1.sock'\ncluster = 'dev'")
        .vm("web-2", 2, "unix-socket = '@web-2.sock'\ncluster = 'prod'")
        .vm("db-1", 3, "unix-socket = '@db-1.sock'\ncluster = 'dev'")
}

#[test]
fn without_rules_the_socket_is_for_root_alone_and_rules_take_effect_at_once() {
    let mut lab = Lab::new().guest("web-1", 1).guest("db-1", 2).start();
    assert_eq!(mode(&lab), 0o600);
    assert_fails(&ask(&lab, DAEMON, &["ls"]), 1, "permission denied on ");

    let rule =
        "[[access]]\nusers = ['daemon']\nverbs = ['ls', 'status']\nvms = ['web-*']\n[[vm]]\nname = 'web-1'";
    lab.edit("[[vm]]\nname = 'web-1'", rule);
    lab.until("the socket is open", || mode(&lab) == 0o666);
    assert!(!lab.log().contains("cannot be reached"), "{}", lab.log());
    assert_eq!(names(&words(&lab, DAEMON, &["ls", "-o", "json"])), ["web-1"]);
    let denied = "uid:2 bin may not do \"ls\": no [[access]] table in the settings of guestlet-host allows it; one like this \
                  would: users = [\"bin\"], verbs = [\"ls\"]";
    assert_fails(&ask(&lab, BIN, &["ls"]), 1, denied);
    assert_eq!(names(&lab.words(&["ls", "-o", "json"])), ["db-1", "web-1"], "root sees all");

    lab.edit("vms = ['web-*']", "vms = ['*']");
    lab.until("it is in force", || names(&words(&lab, DAEMON, &["ls", "-o", "json"])).len() == 2);
    // A mistake opens nothing, and shuts nothing.
    lab.edit("verbs = ['ls', 'status']", "verbs = ['ls', 'statos']");
    let settings = std::fs::read_to_string(lab.settings()).unwrap();
    let line = settings.lines().position(|line| line.contains("statos")).unwrap() + 1;
    let wrong = format!(
        "{}:{line}: verbs has the unknown verb \"statos\"; the verbs are ls, info,",
        text(&lab.settings())
    );
    lab.until("root is told", || String::from_utf8_lossy(&lab.ctl(&["ls"]).stderr).contains(&wrong));
    let output = ask(&lab, DAEMON, &["ls"]);
    let warning = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && warning.contains("as root, guestctl doctor shows why"), "{output:?}");
    assert!(!warning.contains("statos"), "{output:?}");

    let run = lab.path("run");
    std::fs::set_permissions(&run, std::fs::Permissions::from_mode(0o700)).unwrap();
    lab.edit("verbs = ['ls', 'statos']\n", "verbs = ['ls', 'info']\n");
    let words = format!(
        "{} cannot be reached by those who may use it: its directory is not searchable by others",
        text(&lab.socket())
    );
    lab.until("root is told", || lab.log().contains(&words));
    std::fs::set_permissions(&run, std::fs::Permissions::from_mode(0o755)).unwrap();

    lab.edit("[[access]]\nusers = ['daemon']\nverbs = ['ls', 'info']\nvms = ['*']\n", "");
    lab.until("the socket is shut", || mode(&lab) == 0o600);
    assert_fails(&ask(&lab, DAEMON, &["ls"]), 1, "permission denied on ");
}

#[test]
fn a_user_sees_those_vms_that_the_rules_cover() {
    let lab =
        lab("groups = ['daemon']\nroles = ['read']\nvms = ['web-*', 'none-*']\nclusters = ['dev']").start();
    let web = guest(&lab, "web-1", 1);
    let (_web, _db) = (guest(&lab, "web-2", 2), guest(&lab, "db-1", 3));
    for name in ["web-1", "web-2", "db-1"] {
        lab.until_session(name, "connected");
    }
    assert_eq!(names(&words(&lab, DAEMON, &["ls", "-o", "json"])), ["web-1"]);
    assert!(words(&lab, DAEMON, &["info", "web-1"]).contains("connected"));
    assert!(words(&lab, DAEMON, &["ping", "web-1", "-c", "1"]).starts_with("web-1: 1 in "));

    // Whether there is such a VM is not said, and nothing else differs in the words.
    let denial = |name: &str| {
        let output = ask(&lab, DAEMON, &["info", name]);
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        String::from_utf8(output.stderr).unwrap().replace(name, "NAME")
    };
    let words_of_denial = denial("db-1");
    assert!(
        words_of_denial.contains("users = [\"daemon\"], verbs = [\"info\"], vms = [\"NAME\"]"),
        "{words_of_denial}"
    );
    for name in ["web-2", "db-2", "web-3", "none-1"] {
        assert_eq!(denial(name), words_of_denial, "{name}");
    }

    let watch = Watch::of(lab.ctl_as(DAEMON, &["watch", "--heartbeats", "-o", "json"]));
    for _ in 0..20 {
        let event: Value = serde_json::from_str(&watch.until(|_| true)).unwrap();
        assert_eq!(event["name"], "web-1", "{event}");
    }
    // Also of a VM that is gone, the cluster that it had counts.
    drop(web);
    watch.until(|line| line.contains("session-closed"));
    let metrics = || {
        let asked = ["--silent", "--unix-socket", &text(&lab.path("run/metrics.sock")), "http://x/metrics"]
            .map(str::to_owned);
        String::from_utf8(std::process::Command::new("curl").args(asked).output().unwrap().stdout).unwrap()
    };
    assert!(metrics().contains("\nguestlet_host_denied_calls_total 5\n"), "{}", metrics());
}

#[test]
fn a_watch_sees_no_more_when_the_rule_is_gone() {
    let mut lab = lab("users = ['daemon']\nverbs = ['watch']\nvms = ['web-1']").start();
    let _web = guest(&lab, "web-1", 1);
    lab.until_session("web-1", "connected");
    let watch = Watch::of(lab.ctl_as(DAEMON, &["watch", "--heartbeats"]));
    watch.until(|line| line.contains("heartbeat"));
    lab.edit("verbs = ['watch']", "verbs = ['ls']");
    lab.until("the rule is gone", || ask(&lab, DAEMON, &["ls"]).status.success());
    watch.so_far();
    let all = Watch::start(&lab, &[]);
    (0..5).for_each(|_| drop(all.until(|line| line.contains("web-1  heartbeat"))));
    assert_eq!(watch.so_far(), Vec::<String>::new());
}

/// One command for each verb that is done to something, with what no rule covers.
const DENIED: &[(&str, &[&str])] = &[
    ("info", &["info", "db-1"]),
    ("watch", &["watch", "db-1"]),
    ("ping", &["ping", "db-1"]),
    ("disks", &["disks", "db-1"]),
    ("disk ls", &["disk", "ls", "db-1"]),
    ("disk attach", &["disk", "attach", "db-1", "--serial", "a", "--size", "1G"]),
    ("disk attach --file", &["disk", "attach", "db-1", "--serial", "a", "--file", "/etc/shadow"]),
    ("disk detach", &["disk", "detach", "db-1", "--serial", "a"]),
    ("disk resize", &["disk", "resize", "db-1", "--serial", "a", "--size", "2G"]),
    ("disk rm", &["disk", "rm", "db-1", "--serial", "a"]),
    ("disk volumes", &["disk", "volumes", "db-1"]),
    ("volumes create", &["volumes", "create", "v", "--cluster", "dev", "--size", "1G"]),
    ("volumes attach", &["volumes", "attach", "v", "web-1"]),
    ("volumes detach", &["volumes", "detach", "v"]),
    ("volumes expand", &["volumes", "expand", "v", "--size", "2G"]),
    ("volumes rm", &["volumes", "rm", "v"]),
    ("lb rm", &["lb", "rm", "u", "--cluster", "dev"]),
    ("pools", &["pools"]),
    ("trust ls", &["trust", "show", "db-1"]),
    ("trust accept", &["trust", "accept", "db-1"]),
    ("trust forget", &["trust", "forget", "db-1"]),
    ("trust rotate", &["trust", "rotate", "db-1"]),
    ("trust bootstrap", &["trust", "bootstrap", "db-1"]),
    ("trust rotate --host", &["trust", "rotate", "--host"]),
    ("freeze", &["freeze", "db-1"]),
    ("freeze --status", &["freeze", "db-1", "--status"]),
    ("thaw", &["thaw", "db-1"]),
    ("receipts ls", &["receipts", "ls", "db-1"]),
    ("receipts show", &["receipts", "verify", "db-1", "0123456789abcdef0123456789abcdef"]),
    ("trim", &["trim", "db-1"]),
    ("fs", &["fs", "db-1"]),
    ("shutdown", &["shutdown", "db-1"]),
    ("reboot", &["reboot", "db-1"]),
    ("suspend", &["suspend", "db-1"]),
    ("suspend --to disk", &["suspend", "db-1", "--to", "disk"]),
    ("suspend --to both", &["suspend", "db-1", "--to", "both"]),
    ("qga", &["qga", "db-1", "{\"execute\":\"guest-ping\"}"]),
    ("exec", &["exec", "db-1", "--", "true"]),
    ("forward", &["forward", "db-1", "0:22"]),
    ("attach", &["attach", "db-1", "0123abcd"]),
    ("console", &["console", "db-1"]),
    ("ps", &["ps", "db-1"]),
    ("kill", &["kill", "db-1", "0123abcd"]),
    ("cp from", &["cp", "db-1:/a", "/nowhere/b"]),
    ("cp to", &["cp", "/etc/hostname", "db-1:/a"]),
    ("time", &["time", "db-1"]),
    ("time --set", &["time", "db-1", "--set", "hardware"]),
    ("cpus", &["cpus", "db-1"]),
    ("cpus --online", &["cpus", "db-1", "--offline", "1"]),
    ("memory", &["memory", "db-1"]),
    ("memory --online", &["memory", "db-1", "--offline", "1"]),
    ("network", &["network", "db-1"]),
    ("network --routes", &["network", "db-1", "--routes"]),
    ("users", &["users", "db-1"]),
    ("logs", &["logs", "db-1"]),
    ("metrics", &["metrics", "db-1"]),
    ("passwd", &["passwd", "db-1", "me"]),
    ("keys ls", &["keys", "ls", "db-1", "me"]),
    ("keys add", &["keys", "add", "db-1", "me", "-"]),
    ("keys rm", &["keys", "rm", "db-1", "me", "-"]),
];

#[test]
fn every_verb_is_denied_where_no_rule_covers_what_it_is_done_to() {
    let lab = lab("users = ['daemon']\nroles = ['all']\nvms = ['web-1', '6f1c*']").start();
    for (verb, command) in DENIED {
        // 1 could be a program's.
        let code = if matches!(*verb, "exec" | "attach") { 125 } else { 1 };
        let expected = format!("uid:1 daemon may not do {verb:?} with ");
        assert_fails(&ask(&lab, DAEMON, command), code, &expected);
        let nothing_of_it = format!("uid:2 bin may not do {verb:?}");
        assert_fails(&ask(&lab, BIN, command), code, &nothing_of_it);
    }
    // A UUID is no name, whatever it looks like.
    let forget = ["trust", "forget", &uuid(3)];
    assert_fails(&ask(&lab, DAEMON, &forget), 1, "uid:1 daemon may not do \"trust forget\"");
    // What is left has no object, and shows what the caller may see.
    let mut left: Vec<_> = verb::VERBS.iter().map(|verb| verb.words).collect();
    left.retain(|words| DENIED.iter().all(|(verb, _)| verb != words));
    assert_eq!(left, ["ls", "status", "volumes ls", "lb ls"]);
    assert_eq!(names(&words(&lab, DAEMON, &["ls", "-o", "json"])), ["web-1"]);
    assert_eq!(names(&words(&lab, DAEMON, &["volumes", "ls", "-o", "json"])), Vec::<String>::new());
    assert_eq!(words(&lab, DAEMON, &["lb", "ls", "-o", "json"]).trim(), "[]");
    assert_eq!(words(&lab, DAEMON, &["disk", "volumes", "-o", "json"]).trim(), "[]");
    // What is covered goes through to where it fails for another reason.
    assert_fails(&ask(&lab, DAEMON, &["ping", "web-1"]), 1, "there is no session with this guest now");
    for verb in ["ls", "volumes ls", "lb ls", "status"] {
        assert!(verb::VERBS.iter().any(|known| known.words == verb));
    }
}

#[test]
fn a_file_of_the_host_is_attached_only_by_those_who_may_do_that_by_name() {
    let lab = lab("users = ['daemon']\nroles = ['disks']\nvms = ['web-1']").start();
    let attach =
        |how: &[&str]| ask(&lab, DAEMON, &[&["disk", "attach", "web-1", "--serial", "a"], how].concat());
    assert_fails(
        &attach(&["--file", "/etc/shadow"]),
        1,
        "may not do \"disk attach --file\" with the VM \"web-1\"",
    );
    let allowed = attach(&["--size", "1G"]);
    assert!(!String::from_utf8_lossy(&allowed.stderr).contains("may not do"), "{allowed:?}");
}

#[test]
fn users_without_a_name_are_known_by_number_and_unknown_names_are_told() {
    let lab = lab(&format!(
        "users = ['{NAMELESS}', 'no-such-user']\ngroups = ['no-such-group']\nverbs = ['ls']\nvms = ['db-1']"
    ))
    .start();
    assert_eq!(names(&words(&lab, NAMELESS, &["ls", "-o", "json"])), ["db-1"]);
    let denied = format!("uid:{NAMELESS} may not do \"info\" with the VM \"db-1\"");
    assert_fails(&ask(&lab, NAMELESS, &["info", "db-1"]), 1, &denied);
    for name in ["user \"no-such-user\"", "group \"no-such-group\""] {
        let warning = format!("an [[access]] table names the {name}, which does not exist");
        lab.until("it is said", || lab.log().contains(&warning));
    }
}

#[test]
fn one_user_cannot_take_all_places() {
    let lab = lab("users = ['daemon', 'bin']\nverbs = ['watch', 'ls']").start();
    let _web = guest(&lab, "web-1", 1);
    lab.until_session("web-1", "connected");
    let watching: Vec<_> = (0..8)
        .map(|_| {
            let watch = Watch::of(lab.ctl_as(DAEMON, &["watch", "--heartbeats"]));
            watch.until(|line| line.contains("heartbeat"));
            watch
        })
        .collect();
    assert_fails(&ask(&lab, DAEMON, &["ls"]), 1, "guestlet-host closed the connection");
    assert!(ask(&lab, BIN, &["ls"]).status.success());
    assert!(lab.ctl(&["ls"]).status.success());
    drop(watching);
    lab.until("there is room again", || ask(&lab, DAEMON, &["ls"]).status.success());
}

#[test]
fn a_guest_is_told_on_whose_behalf_it_is_called() {
    let lab = lab("users = ['daemon']\nverbs = ['ping']").start();
    let web = guest(&lab, "web-1", 1);
    lab.until_session("web-1", "connected");
    lab.words(&["ping", "web-1", "-c", "2"]);
    words(&lab, DAEMON, &["ping", "web-1", "-c", "1"]);
    let mut nameless = lab.ctl_as(NAMELESS, &["ping", "web-1"]);
    assert!(!nameless.stdout(Stdio::null()).status().unwrap().success());

    let (asked_for, own): (Vec<_>, Vec<_>) = web.behalves().into_iter().partition(|one| one.method == "Ping");
    let callers: Vec<_> = asked_for.iter().map(|one| one.caller.as_deref().unwrap()).collect();
    assert_eq!(callers, ["uid:0 root", "uid:0 root", "uid:1 daemon"]);
    let ids: Vec<_> = asked_for.iter().map(|one| one.audit_id.clone().unwrap()).collect();
    assert!(ids.iter().all(|id| id.len() == 32 && id.bytes().all(|one| one.is_ascii_hexdigit())), "{ids:?}");
    assert!(ids[0] == ids[1] && ids[1] != ids[2], "one for each command: {ids:?}");
    assert!(own.len() > 1, "{own:?}");
    for call in own {
        assert_eq!((call.caller, call.audit_id), (None, None), "{}", call.method);
    }
}
