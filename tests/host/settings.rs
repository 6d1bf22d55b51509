//! Settings that are edited while the daemon runs.

use crate::guest::{Door, Guest, Manner, info};
use crate::lab::{Lab, text, uuid};

fn guest(lab: &Lab, name: &str, number: u8) -> Guest {
    let path = lab.path(&format!("{name}.sock"));
    Guest::start(&path, Door::Unix, Manner::Good, info(&uuid(number), "boot-1"))
}

fn warnings(lab: &Lab) -> String {
    String::from_utf8(lab.ctl(&["ls"]).stderr).unwrap()
}

#[test]
fn edits_take_effect_and_what_is_unchanged_goes_on() {
    let mut lab = Lab::new().guest("a", 1).guest("b", 2).start();
    let (a, b) = (guest(&lab, "a", 1), guest(&lab, "b", 2));
    let before = lab.until_session("a", "connected");
    lab.until_session("b", "connected");

    lab.edit("name = 'b'", "name = 'b'\ncluster = 'dev'");
    let vm = lab.until_vm("b", |vm| vm["cluster"] == "dev" && vm["session"] == "connected");
    assert_eq!((&vm["sessions"], b.open() <= 1), (&2.into(), true));

    let drop_ins = lab.path("host.d");
    std::fs::create_dir(&drop_ins).unwrap();
    let c = format!("[[vm]]\nname = 'c'\nuuid = '{}'\nunix-socket = '/nowhere'\n", uuid(3));
    std::fs::write(drop_ins.join("c.toml"), c).unwrap();
    lab.until("the new VM is listed", || lab.words(&["ls"]).contains("c     "));
    std::fs::remove_file(drop_ins.join("c.toml")).unwrap();
    lab.until("it is gone", || !lab.words(&["ls"]).contains("c     "));

    let after = lab.info("a");
    assert_eq!((&after["since"], &after["sessions"]), (&before["since"], &before["sessions"]));
    assert_eq!((a.open(), warnings(&lab).as_str()), (1, ""));
}

#[test]
fn wrong_edits_are_refused_and_the_old_settings_stay_in_force() {
    let mut lab = Lab::new().guest("a", 1).start();
    let _a = guest(&lab, "a", 1);
    lab.until_session("a", "connected");
    lab.edit("name = 'a'", "nam = 'a'");
    let words = format!(" ago stay in force: {}:5: unknown field `nam`", text(&lab.settings()));
    lab.until("people are warned", || warnings(&lab).contains(&words));
    assert!(warnings(&lab).starts_with("guestctl: warning: the settings are invalid, and those of "));
    assert!(
        lab.log().contains("the settings are invalid, and the previous ones stay in force: "),
        "{}",
        lab.log()
    );
    assert_eq!((&lab.info("a")["session"], &lab.info("a")["sessions"]), (&"connected".into(), &1.into()));

    lab.edit("nam = 'a'", "name = 'a'");
    lab.until("nobody is warned any more", || warnings(&lab).is_empty());
    assert_eq!(lab.info("a")["sessions"], 1);

    lab.edit("socket = '", "metrics = '127.0.0.1:1'\nsocket = '");
    lab.until("people are told", || {
        warnings(&lab).contains("metrics changed: restart guestlet-host to apply it")
    });
}
