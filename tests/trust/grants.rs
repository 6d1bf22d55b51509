//! What a host half may do that has proved its key.

use serde_json::Value;

use crate::agent::{Agent, key_line, listed, until_speaks};
use crate::host::Lab;

/// Waits until the host half was told that its callback is denied, and returns why.
fn until_denied(lab: &Lab) -> String {
    let denied = |vm: &Value| vm["callback_reason"].as_str().unwrap_or_default().contains("no grant gives");
    let vm = lab.until_vm("web", denied);
    assert_eq!((&vm["session"], &vm["callback"]), (&"connected".into(), &"none".into()));
    vm["callback_reason"].as_str().unwrap().to_owned()
}

fn topology(lab: &Lab) -> String {
    lab.words(&["topology"])
}

#[test]
fn a_key_alone_gives_status_and_its_line_or_a_grant_gives_more() {
    let lab = listed(Lab::new().set("topology = { zone = 'a' }"), &["web"]).start();
    let mut web = Agent::new(&lab, "web");
    web.give("host.pub", &key_line(&lab));
    web.start();
    until_speaks(&lab, "web", "keyed");
    let why = until_denied(&lab);
    assert!(why.starts_with("no grant gives the role disks to the host half SHA256:"), "{why}");
    lab.until("people see what is denied", || topology(&lab).contains("no grant gives the role topology"));
    assert!(lab.words(&["ping", "-c", "1", "web"]).contains("1 pings, min"));
    web.until_it_says("audit: the host half SHA256:");

    // What the message says to add is enough for that, and for no more.
    let host = why.split("host = \"").nth(1).and_then(|rest| rest.split('"').next()).unwrap();
    std::fs::create_dir(web.file("agent.d")).unwrap();
    let grant = |roles: &str| {
        let text = format!("[[grant]]\nhost = \"{host}\"\nroles = [{roles}]\n");
        std::fs::write(web.file("agent.d/grants.toml"), text).unwrap();
    };
    grant("\"disks\"");
    web.restart();
    lab.until_vm("web", |vm| vm["callback"] == "open");
    lab.until("where it runs is still denied", || {
        topology(&lab).contains("no grant gives the role topology")
    });

    // The line of the key gives it as well.
    std::fs::remove_file(web.file("agent.d/grants.toml")).unwrap();
    web.give("host.pub", &key_line(&lab).replace(" #", " role=volumes #"));
    web.restart();
    lab.until_vm("web", |vm| vm["callback"] == "open");
    lab.until("it is told where it runs", || !topology(&lab).contains("no grant gives"));
}

#[test]
fn a_grant_for_another_key_or_caller_gives_nothing() {
    let lab = listed(Lab::new(), &["web"]).start();
    let mut web = Agent::new(&lab, "web");
    web.give("host.pub", &key_line(&lab));
    std::fs::create_dir(web.file("agent.d")).unwrap();
    let other = "SHA256:LHDhK3oGRvkiefQnx7OOczTY5Tic/xZ6HcMOc/gmtoM";
    let grants = format!(
        "[[grant]]\nhost = \"{other}\"\nprofile = \"volumes\"\n\
         [[grant]]\nhost = \"*\"\ncaller = \"uid:4000000 *\"\nprofile = \"volumes\"\n\
         [[grant]]\nhost = \"plain\"\nprofile = \"qemu-ga\"\n"
    );
    std::fs::write(web.file("agent.d/grants.toml"), grants).unwrap();
    web.start();
    until_speaks(&lab, "web", "keyed");
    until_denied(&lab);
}

/// Neither may open a callback, and so neither can show that it is there: the guest stays with the first one, instead of going to
/// and fro between them.
#[test]
fn of_two_host_halves_that_may_only_look_the_first_one_stays_as_long_as_it_is_connected() {
    let first = listed(Lab::new(), &["web"]).start();
    let second = listed(Lab::new(), &["web"]).start();
    let mut web = Agent::new(&first, "web");
    web.give("first.pub", &key_line(&first));
    web.give("second.pub", &key_line(&second));
    web.start();
    until_speaks(&first, "web", "keyed");
    std::fs::create_dir_all(second.path("web")).unwrap();
    std::os::unix::fs::symlink(web.socket(), second.path("web/control.sock")).unwrap();
    let held = |lab: &Lab| {
        let told =
            |vm: &Value| vm["reason"].as_str().unwrap_or_default().contains("held by the host half on");
        lab.until_vm("web", told)
    };
    held(&second);
    // Longer than a holder may be without a callback as one that may open one sees it.
    std::thread::sleep(std::time::Duration::from_secs(12));
    held(&second);
    assert_eq!(first.info("web")["sessions"], 1);
    let mut first = first;
    first.stop();
    until_speaks(&second, "web", "keyed");

    // One that may do more does not have to wait for it.
    let third = listed(Lab::new(), &["web"]);
    std::fs::create_dir_all(third.path("web")).unwrap();
    std::os::unix::fs::symlink(web.socket(), third.path("web/control.sock")).unwrap();
    let third = third.start();
    web.give("third.pub", &key_line(&third).replace(" #", " role=disks #"));
    third.until_vm("web", |vm| vm["callback"] == "open");
    held(&second);
}
