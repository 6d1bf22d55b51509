//! What the programs of a guest may take of its memory, and whose outputs go for those of others.

use std::process::{Output, Stdio};

use crate::lab::{ALL, Lab, code, text, until};

const OTHER: u32 = 4_000_001;
/// Four programs may keep as much as all may: 32 MiB each.
const RING: usize = 16 << 20;

fn ask(lab: &Lab, uid: u32, words: &[&str]) -> Output {
    lab.host.ctl_as(uid, words).stdin(Stdio::null()).output().unwrap()
}

/// Starts a program that needs no client, and tells its identifier.
fn start(lab: &Lab, uid: u32, script: &str) -> Output {
    ask(lab, uid, &["exec", "--detach", "web", "--", "sh", "-c", script])
}

fn list(lab: &Lab, uid: u32) -> Vec<serde_json::Value> {
    serde_json::from_str(&text(&ask(lab, uid, &["ps", "web", "-o", "json"]))).unwrap()
}

#[test]
fn memory_for_outputs_is_bounded_and_nobody_loses_any_to_another_caller() {
    let mut lab = Lab::with(&format!("[exec]\nring-bytes = {RING}\n{ALL}"));
    lab.host.kill();
    let rule = format!("[[access]]\nusers = ['{OTHER}']\nroles = ['read', 'exec']\n[[vm]]\n");
    lab.host.edit("[[vm]]\n", &rule);
    lab.host.again();
    lab.host.until_session("web", "connected");

    let fill = format!("head -c {RING} /dev/zero; head -c {RING} /dev/zero >&2");
    let filled: Vec<_> = (0..3).map(|_| text(&start(&lab, OTHER, &fill)).trim().to_owned()).collect();
    until("they have ended", || list(&lab, OTHER).iter().all(|one| one["exit_code"] == 0));
    let sleeper = text(&start(&lab, 0, "exec sleep 1000"));

    let refused = start(&lab, 0, "exec sleep 1000");
    let words = String::from_utf8_lossy(&refused.stderr);
    assert_eq!(code(&refused), 125, "{words}");
    assert!(words.contains("have 134217728 of at most") && words.contains("exec.ring-bytes"), "{words}");
    assert_eq!(list(&lab, OTHER).len(), 3, "what another caller has not seen yet is kept");

    // For one of its own the oldest goes.
    let own = text(&start(&lab, OTHER, "exec sleep 1000"));
    let known =
        || -> Vec<_> { list(&lab, OTHER).iter().map(|one| one["id"].as_str().unwrap().to_owned()).collect() };
    let expected = [&filled[1], &filled[2], own.trim()].map(str::to_owned);
    until("the oldest has gone", || known() == expected);
    let rest = ask(&lab, OTHER, &["attach", "web", &filled[1]]);
    assert_eq!((code(&rest), rest.stdout.len(), rest.stderr.len()), (0, RING, RING));

    // There is room again.
    let again = text(&start(&lab, 0, "exec sleep 1000"));
    for (uid, id) in [(0, &sleeper), (0, &again), (OTHER, &own)] {
        text(&ask(&lab, uid, &["kill", "web", id.trim(), "--signal", "KILL"]));
    }
}
