//! docs/api.md: what people wrote, up to a mark, and then all services of the admin API with their messages, written from the
//! comments of proto/guestlet/v1 and from the tables of verbs.
//!
//! `UPDATE_DOCS=1 cargo test --test host api::` writes the second part anew.

mod comments;
mod events;
mod page;

use std::collections::BTreeSet;
use std::path::Path;

use prost::Message as _;
use prost_types::FileDescriptorSet;

/// As build.rs has compiled them.
const DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/descriptors.binpb"));

/// After it nothing is written by hand.
const MARK: &str =
    "<!-- Written from proto/guestlet/v1 from here on: UPDATE_DOCS=1 cargo test --test host api:: -->\n";

#[test]
fn the_page_in_docs_is_the_one_that_the_protos_give() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/api.md");
    let found = std::fs::read_to_string(&file).unwrap();
    let (by_hand, _) = found.split_once(MARK).expect("docs/api.md has the mark");
    let descriptors = FileDescriptorSet::decode(DESCRIPTORS).unwrap();
    let wanted = format!("{by_hand}{MARK}{}", page::of(&descriptors));
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(&file, &wanted).unwrap();
    }
    let found = std::fs::read_to_string(&file).unwrap();
    let headings = found.lines().filter(|line| line.starts_with('#'));
    let anchors: Vec<_> = headings.map(|line| line.trim_start_matches(['#', ' ']).to_lowercase()).collect();
    let unique: BTreeSet<_> = anchors.iter().collect();
    assert_eq!(unique.len(), anchors.len(), "two headings have one anchor, and links lead to the first");
    assert!(found == wanted, "docs/api.md is stale: run UPDATE_DOCS=1 cargo test --test host api::");
}
