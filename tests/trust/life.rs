//! What becomes of keys: copies, restored disks, new installations, rotation.

use std::path::Path;

use crate::agent::{Agent, key, lab, until, until_refused, until_speaks};

/// Copies the folder of a guest's own key, as a copy of its disk has it.
fn copy_key(from: &Agent, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from.file("trust")).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
}

/// Has the folder say that its key was made on another machine.
fn on_another_machine(folder: &Path) {
    std::fs::write(folder.join("guest.machine"), "dmi other\nmachine-id other\nvmgenid \n").unwrap();
}

#[test]
fn a_copy_of_a_guest_makes_itself_a_new_key_before_it_lets_anybody_in() {
    let lab = lab(&["web", "copy"]).start();
    let web = Agent::keyed(&lab, "web");
    let mut copy = Agent::new(&lab, "copy");
    copy.know(&lab);
    copy_key(&web, &copy.file("trust"));
    on_another_machine(&copy.file("trust"));
    copy.start();
    until_speaks(&lab, "copy", "keyed");
    assert_ne!(copy.own(), web.own());
    assert_eq!(key(&lab, "copy")["key"], copy.own());
    copy.until_it_says("not the one that its key was created on");
}

#[test]
fn a_key_of_one_vm_never_opens_another() {
    let lab = lab(&["web", "copy"]).start();
    let web = Agent::keyed(&lab, "web");
    // One that hides that it is a copy.
    let mut copy = Agent::new(&lab, "copy");
    copy.know(&lab);
    copy_key(&web, &copy.file("trust"));
    copy.start();
    let reason = until_refused(&lab, "copy");
    assert!(reason.contains("which is that of VM web"), "{reason}");
    // Nor does anybody's word change that.
    let accepted = lab.ctl(&["trust", "accept", "copy"]);
    assert!(
        !accepted.status.success() && String::from_utf8_lossy(&accepted.stderr).contains("key is that of VM"),
        "{accepted:?}"
    );
    assert_eq!(key(&lab, "copy")["key"], "");
    until_speaks(&lab, "web", "keyed");
}

#[test]
fn a_guest_that_was_installed_anew_is_held_back_until_its_key_is_accepted() {
    let lab = lab(&["web"]).start();
    let mut web = Agent::keyed(&lab, "web");
    let before = web.own();
    web.stop();
    std::fs::remove_dir_all(web.file("trust")).unwrap();
    web.start();
    let reason = until_refused(&lab, "web");
    let now = web.own();
    assert!(
        reason.contains(&before) && reason.contains(&now) && reason.contains("guestctl trust accept web"),
        "{reason}"
    );
    assert_eq!(key(&lab, "web")["offered"], now.as_str());
    // Only the key that is meant.
    let wrong = lab.ctl(&["trust", "accept", "web", &before]);
    assert!(
        !wrong.status.success() && String::from_utf8_lossy(&wrong.stderr).contains("last presented the key"),
        "{wrong:?}"
    );
    lab.words(&["trust", "accept", "web", &now]);
    until_speaks(&lab, "web", "keyed");
    let pinned = key(&lab, "web");
    assert_eq!((pinned["key"].as_str(), pinned["how"].as_str()), (Some(&*now), Some("operator")));
}

#[test]
fn a_rotated_key_is_used_from_the_next_session_on_and_a_disk_from_before_is_still_known() {
    let lab = lab(&["web"]).start();
    let mut web = Agent::keyed(&lab, "web");
    let before = web.own();
    let old_disk = lab.path("old-disk");
    copy_key(&web, &old_disk);
    let told = lab.words(&["trust", "rotate", "web"]);
    assert!(told.contains("in use from the next session on"), "{told}");
    let next = key(&lab, "web")["next"].as_str().unwrap().to_owned();
    assert_eq!(web.own(), next);
    assert_ne!(next, before);
    // The session goes on; the next one shows the new key.
    assert_eq!(key(&lab, "web")["session"], "keyed");
    web.restart();
    until("the new key is pinned", || key(&lab, "web")["key"] == next.as_str());
    until_speaks(&lab, "web", "keyed");
    assert_eq!(key(&lab, "web")["previous"], before.as_str());
    // The disk is restored to before the rotation.
    web.stop();
    std::fs::remove_dir_all(web.file("trust")).unwrap();
    std::fs::rename(old_disk, web.file("trust")).unwrap();
    web.start();
    lab.until("the old key opens a session", || lab.info("web")["guest_key"] == before.as_str());
    until_speaks(&lab, "web", "keyed");
    assert_eq!(key(&lab, "web")["key"], next.as_str(), "the one before is not pinned again");
}

#[test]
fn a_host_half_gets_a_new_key_which_its_guests_know_before_it_is_used() {
    let mut lab = lab(&["web", "db"]).start();
    let mut web = Agent::new(&lab, "web");
    web.give("host.pub", &crate::agent::key_line(&lab).replace(" #", " role=disks,keys #"));
    web.start();
    until_speaks(&lab, "web", "keyed");
    let mut db = Agent::keyed(&lab, "db");
    db.stop();
    let before = crate::agent::keys(&lab)["host_key"].as_str().unwrap().to_owned();
    let old = lab.path("old.key");
    std::fs::copy(lab.path("trust/host.key"), &old).unwrap();
    let unfinished = lab.ctl(&["trust", "rotate", "--host", "--finish"]);
    assert!(String::from_utf8_lossy(&unfinished.stderr).contains("there is no next key"), "{unfinished:?}");
    let rotation = || -> serde_json::Value {
        serde_json::from_str(&lab.words(&["trust", "rotate", "--host", "-o", "json"])).unwrap()
    };
    lab.until("web knows the next key", || rotation()["known_to"] == serde_json::json!(["web"]));
    let next = rotation()["key"].as_str().unwrap().to_owned();
    let refused = lab.ctl(&["trust", "rotate", "--host", "--finish"]);
    assert!(
        String::from_utf8_lossy(&refused.stderr).contains("do not know the next key yet: db"),
        "{refused:?}"
    );
    let given = |agent: &Agent| {
        let keys = agent.keys();
        let list = keys["hosts"].as_array().unwrap().iter();
        list.map(|one| (one["key"].as_str().unwrap().to_owned(), one["roles"].clone())).collect::<Vec<_>>()
    };
    assert!(given(&web).contains(&(next.clone(), serde_json::json!(["disks", "keys"]))), "{:?}", given(&web));
    db.start();
    lab.until("db knows it, too", || rotation()["unknown_to"] == serde_json::json!([]));
    lab.words(&["trust", "rotate", "--host", "--finish"]);
    assert_eq!(crate::agent::keys(&lab)["host_key"], next.as_str());
    // Sessions go on; those that begin now do so with the new key, and then the old one is dropped.
    web.restart();
    lab.until("the old key is dropped", || given(&web).iter().all(|(key, _)| *key != before));
    until_speaks(&lab, "web", "keyed");
    // Whoever has stolen the old key is let in no more, and neither does a restart bring it back.
    lab.kill();
    std::fs::rename(lab.path("trust/host.key"), lab.path("new.key")).unwrap();
    std::fs::rename(&old, lab.path("trust/host.key")).unwrap();
    web.restart();
    lab.again();
    assert!(until_refused(&lab, "web").contains("does not know this host half's key"));
}

#[test]
fn a_rotation_that_is_cut_off_at_any_step_loses_nothing() {
    let mut lab = lab(&["web"]).start();
    let mut web = Agent::keyed(&lab, "web");
    for turn in 0..4 {
        let mut rotation = lab.ctl_command(&["trust", "rotate", "web"]).spawn().unwrap();
        std::thread::sleep(std::time::Duration::from_millis(turn * 7));
        if turn % 2 == 0 {
            lab.kill();
            drop(rotation.wait());
            lab.again();
        } else {
            web.stop();
            drop(rotation.wait());
            web.start();
        }
        lab.until("it is connected again", || {
            let vm = lab.info("web");
            assert_ne!(vm["session"], "refused", "{vm:#}");
            vm["session"] == "connected" && vm["guest_key"] == web.own()
        });
    }
}

#[test]
fn a_keys_file_that_goes_takes_its_sessions_with_it() {
    let lab = lab(&["web"]).start();
    let web = Agent::keyed(&lab, "web");
    std::fs::remove_file(web.file("hosts.d/host.pub")).unwrap();
    web.until_it_says("is disconnected: its key");
    let reason = until_refused(&lab, "web");
    assert!(reason.contains("does not know this host half's key"), "{reason}");
}

#[test]
fn a_pin_that_cannot_be_read_opens_nothing_until_it_is_forgotten() {
    let mut lab = lab(&["web"]).start();
    let web = Agent::keyed(&lab, "web");
    lab.kill();
    let pin = lab.path("trust/guests").join(format!("{}.json", crate::host::uuid(1)));
    let text = std::fs::read_to_string(&pin).unwrap();
    std::fs::write(&pin, &text[..text.len() / 2]).unwrap();
    lab.again();
    let reason = until_refused(&lab, "web");
    assert!(reason.contains(pin.to_str().unwrap()), "{reason}");
    // Nor is it spoken to without keys, if that is what it does now.
    lab.kill();
    std::fs::remove_file(web.file("hosts.d/host.pub")).unwrap();
    assert!(web.trust(&["reset"]).status.success());
    lab.again();
    let reason = until_refused(&lab, "web");
    assert!(reason.contains(pin.to_str().unwrap()), "{reason}");
    web.know(&lab);
    lab.words(&["trust", "forget", "web"]);
    until_speaks(&lab, "web", "keyed");
}
