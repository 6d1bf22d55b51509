//! What the rules do not allow, with the reason, and what is written down.

use std::fs;
use std::os::unix::fs::symlink;

use crate::lab::{ALL, Lab};

#[test]
fn a_guest_without_grants_gives_and_takes_nothing() {
    let lab = Lab::with("");
    fs::write(lab.file("a"), "a").unwrap();
    for (arguments, role) in [(["web:@/a", "@/b"], "files-read"), (["@/a", "web:@/b"], "files-write")] {
        let words = lab.fails(&arguments, 1);
        assert!(words.contains(&format!("no grant gives the role {role}")), "{words}");
        assert!(words.contains("[[grant]]"), "{words}");
    }
    assert!(!lab.file("b").exists());
}

#[test]
fn who_may_read_may_not_write() {
    let lab = Lab::with(&ALL.replace("files-write", "files-read"));
    fs::write(lab.file("a"), "a").unwrap();
    lab.copies(&["web:@/a", "@/b"]);
    let words = lab.fails(&["@/a", "web:@/c"], 1);
    assert!(words.contains("no grant gives the role files-write"), "{words}");
}

#[test]
fn paths_of_a_grant_hold_for_where_links_lead() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path().canonicalize().unwrap();
    let at = folder.display();
    let grant =
        ALL.replace("\"files-write\"]", &format!("\"files-write\"]\nfiles = {{ paths = [\"{at}/open\"] }}"));
    let lab = Lab::with(&grant);
    fs::create_dir_all(folder.join("open/sub")).unwrap();
    fs::create_dir_all(folder.join("shut")).unwrap();
    fs::write(folder.join("open/file"), "open").unwrap();
    fs::write(folder.join("shut/file"), "shut").unwrap();
    fs::write(lab.file("new"), "new").unwrap();
    symlink("../shut", folder.join("open/link")).unwrap();
    symlink("open", folder.join("way")).unwrap();
    lab.copies(&[&format!("web:{at}/open/file"), "@/a"]);
    lab.copies(&[&format!("web:{at}/way/file"), "@/a"]);
    lab.copies(&["@/new", &format!("web:{at}/open/sub/new")]);
    lab.copies(&["-r", &format!("web:{at}/open"), "@/tree"]);
    assert!(fs::symlink_metadata(lab.file("tree/link")).unwrap().is_symlink());
    for from in ["shut/file", "open/link/file", "open/../shut/file", "shut"] {
        let words = lab.fails(&["-r", &format!("web:{at}/{from}"), "@/b"], 1);
        assert!(words.contains("see files.paths of the grants"), "{from}: {words}");
    }
    for to in ["shut/new", "shut", "open/link/new", "open/link", "open-new"] {
        let words = lab.fails(&["@/new", &format!("web:{at}/{to}")], 1);
        assert!(words.contains("see files.paths of the grants"), "{to}: {words}");
    }
    let words = lab.fails(&["-r", "@/tree", &format!("web:{at}/shut")], 1);
    assert!(words.contains("see files.paths of the grants"), "{words}");
    assert!(!lab.file("b").exists() && !folder.join("open-new").exists());
    assert_eq!(fs::read_dir(folder.join("shut")).unwrap().count(), 1);
}

#[test]
fn what_the_settings_forbid_of_commands_is_forbidden_of_copies() {
    for (more, words) in [
        ("[qga.files]\nread-only = true\n", "qga.files.read-only"),
        ("[qga.files]\npaths = [\"/nowhere\"]\n", "qga.files.paths"),
    ] {
        let lab = Lab::with(&format!("{ALL}{more}"));
        fs::write(lab.file("a"), "a").unwrap();
        let said = lab.fails(&["@/a", "web:@/b"], 1);
        assert!(said.contains(words), "{said}");
    }
}

#[test]
fn both_ends_write_down_what_was_copied() {
    let lab = Lab::new();
    fs::write(lab.file("a"), "12345").unwrap();
    lab.copies(&["@/a", "web:@/b"]);
    lab.copies(&["web:@/b", "@/c"]);
    let records = |log: &str, verb: &str| {
        let has = |line: &&str| line.contains("audit:") && line.contains(verb);
        log.lines().filter(has).map(str::to_owned).collect::<Vec<_>>()
    };
    crate::lab::until("the agent has written it down", || {
        ["WriteFiles", "ReadFiles"].iter().all(|verb| {
            let records = records(&lab.agent_log(), verb);
            records
                .iter()
                .any(|line| line.contains("ended after 1 files with 5 bytes") && line.contains("/b"))
        })
    });
    let host = lab.host.log();
    assert!(records(&host, "cp to").iter().any(|line| line.contains("/b")), "{host}");
    assert!(records(&host, "cp from").iter().any(|line| line.contains("/b")), "{host}");
}
