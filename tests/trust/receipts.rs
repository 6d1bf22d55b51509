//! Receipts of freezes, whose signatures people on the host have checked with the key that the host half knows.

use serde_json::{Value, json};

use crate::agent::{Agent, key_line, lab, until_speaks};
use crate::host::{Lab, assert_fails};

/// An agent with keys that finds a receipt which an earlier run could not keep, as one that was killed at once after a thaw.
fn with_receipt(lab: &Lab, name: &str, id: &str) -> Agent {
    let mut agent = Agent::new(lab, name);
    agent.give("host.pub", &key_line(lab));
    let tray = agent.file("guestlet.receipts");
    std::fs::create_dir(&tray).unwrap();
    let receipt = json!({"schema": 1, "id": id, "level": "filesystem", "end": {"how": "asked"}});
    std::fs::write(tray.join(id), receipt.to_string()).unwrap();
    agent.start();
    until_speaks(lab, name, "keyed");
    agent
}

/// The file of the receipt in the guest.
fn kept(agent: &Agent) -> std::path::PathBuf {
    std::fs::read_dir(agent.file("receipts")).unwrap().next().unwrap().unwrap().path()
}

fn verdict(lab: &Lab, name: &str, id: &str) -> (bool, String) {
    let output = lab.ctl(&["receipts", "verify", name, id, "-o", "json"]);
    let value: Value =
        serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {output:?}"));
    assert_eq!(value["good"], output.status.success(), "{output:?}");
    (output.status.success(), value["verdict"].as_str().unwrap().to_owned())
}

#[test]
fn a_receipt_is_good_only_as_the_guest_has_signed_it_with_the_key_that_is_pinned() {
    let lab = lab(&["web", "db"]).start();
    let (one, two) = ("1".repeat(32), "2".repeat(32));
    let (web, db) = (with_receipt(&lab, "web", &one), with_receipt(&lab, "db", &two));
    let is = |verdict: &str| (verdict == "signed", verdict.to_owned());
    let is_kept =
        |agent: &Agent| std::fs::read_dir(agent.file("receipts")).is_ok_and(|files| files.count() == 1);
    lab.until("they are kept", || is_kept(&web) && is_kept(&db));
    assert_eq!(verdict(&lab, "web", &one), is("signed"));
    let own = web.own();
    let words = lab.words(&["receipts", "verify", "web", &one]);
    assert_eq!(words, format!("{one}: filesystem\nsigned by {own}, the key of this guest\n"));

    // Somebody in the guest makes it a better one, has another guest's sign it, or takes the signature away.
    let written = std::fs::read_to_string(kept(&web)).unwrap();
    let change = |text: &str| std::fs::write(kept(&web), text).unwrap();
    change(&written.replace("filesystem", "application"));
    assert_eq!(verdict(&lab, "web", &one), is("altered"));
    let of_another = std::fs::read_to_string(kept(&db)).unwrap();
    let renamed = kept(&web).with_file_name(format!("{}-{two}.json", "1".repeat(10)));
    std::fs::write(&renamed, &of_another).unwrap();
    assert_eq!(verdict(&lab, "web", &two), is("other-key"));
    std::fs::remove_file(renamed).unwrap();
    let bare: Value = serde_json::from_str(&written).unwrap();
    change(&json!({"guestlet-receipt": 1, "document": bare["document"]}).to_string());
    assert_eq!(verdict(&lab, "web", &one), is("unsigned"));
    for garbage in ["", "{", "null", &"[".repeat(10_000)] {
        change(garbage);
        assert_eq!(verdict(&lab, "web", &one), is("unreadable"), "{garbage:.9}");
        assert_fails(&lab.ctl(&["receipts", "show", "web", &one]), 1, "unreadable");
    }
    change(&"x".repeat(100_000));
    assert_fails(&lab.ctl(&["receipts", "verify", "web", &one]), 1, "the receipt is too long");
    change(&written);
    assert_eq!(verdict(&lab, "web", &one), is("signed"));
}
