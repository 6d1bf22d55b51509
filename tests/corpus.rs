//! Everything that fuzzing has found interesting, checked with every test.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::disallowed_methods)]

#[path = "fuzz/checks.rs"]
mod checks;

fn run(target: &str, check: fn(&[u8])) {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fuzz/corpus").join(target);
    let mut count = 0;
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let bytes = std::fs::read(&path).unwrap();
        let outcome = std::panic::catch_unwind(|| check(&bytes));
        assert!(outcome.is_ok(), "{}", path.display());
        count += 1;
    }
    assert!(count > 0, "the corpus of {target} is empty");
}

#[test]
fn qga() {
    run("qga", checks::qga);
}

#[test]
fn hybrid() {
    run("hybrid", checks::hybrid);
}

#[test]
fn qmp() {
    run("qmp", checks::qmp);
}

#[test]
fn parsers() {
    run("parsers", checks::parsers);
}
