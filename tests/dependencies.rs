//! What the libraries that are compiled in say of themselves: their licences, where they come from, the Rust that they need, and
//! which are there in two versions.

use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;

use serde_json::Value;

/// Licences that may be in a program under Apache-2.0. Of a choice one has to be here; of several that hold together, all.
const LICENCES: &[&str] = &[
    "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception",
    "BSD-3-Clause",
    "CC0-1.0",
    "ISC",
    "MIT",
    "Unicode-3.0",
    "Unlicense",
    "Zlib",
];

/// Libraries that are there twice because others need different versions. Each costs time and size: take out what is gone, and
/// add none without a look at whether it can be avoided.
const TWICE: &[&str] = &["base64", "getrandom", "hashbrown", "syn", "unicode-width"];

fn packages() -> Vec<Value> {
    let arguments = ["metadata", "--locked", "--offline", "--format-version", "1"];
    let output = Command::new(env!("CARGO"))
        .args(arguments)
        .args(["--filter-platform", "x86_64-unknown-linux-gnu"])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata: Value = serde_json::from_slice(&output.stdout).unwrap();
    let packages = metadata["packages"].as_array().unwrap().clone();
    assert!(packages.len() > 100, "the packages were not found");
    packages
}

fn is_allowed(expression: &str) -> bool {
    // Such as `(MIT OR Apache-2.0) AND Unicode-3.0`; in old ones a stroke is a choice.
    let plain = expression.replace(['(', ')'], "").replace('/', " OR ");
    let known = |name: &str| LICENCES.contains(&name.trim());
    plain.split(" AND ").all(|together| together.split(" OR ").any(known))
}

#[test]
fn licences() {
    for package in packages() {
        let licence = package["license"].as_str().unwrap_or_default();
        assert!(
            is_allowed(licence),
            "{}: the licence {licence:?} is not among those allowed",
            package["name"]
        );
    }
    assert!(!is_allowed("GPL-3.0-only") && !is_allowed("MIT AND GPL-2.0-only") && !is_allowed(""));
    assert!(is_allowed("MIT/Apache-2.0") && is_allowed("GPL-2.0-only OR MIT"));
}

#[test]
fn all_come_from_the_registry() {
    for package in packages().iter().filter(|package| package["name"] != env!("CARGO_PKG_NAME")) {
        let source = package["source"].as_str().unwrap_or("a directory");
        assert!(source.starts_with("registry+"), "{} comes from {source}", package["name"]);
    }
}

fn version(text: &str) -> (u32, u32) {
    let mut numbers = text.split('.').map(|part| part.parse().unwrap());
    (numbers.next().unwrap(), numbers.next().unwrap_or(0))
}

/// The functions of Rust's own library are held against `rust-version` by Clippy (`incompatible_msrv`).
#[test]
fn none_needs_a_newer_rust_than_is_promised() {
    let promised = version(env!("CARGO_PKG_RUST_VERSION"));
    for package in packages() {
        if let Some(needed) = package["rust_version"].as_str() {
            assert!(version(needed) <= promised, "{} needs Rust {needed}", package["name"]);
        }
    }
}

#[test]
fn what_is_there_twice_is_known() {
    let mut versions: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for package in packages() {
        let text = |key: &str| package[key].as_str().unwrap().to_owned();
        versions.entry(text("name")).or_default().insert(text("version"));
    }
    let twice: Vec<_> =
        versions.iter().filter(|(_, all)| all.len() > 1).map(|(name, _)| name.as_str()).collect();
    assert_eq!(twice, TWICE);
}
