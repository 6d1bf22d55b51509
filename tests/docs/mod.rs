//! What the pages of the documentation say that can be held against the sources: links, paths, messages, settings.

pub mod blocks;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use guestlet::config::agent::{self, Places, options::Program};
use guestlet::config::disk_rules;
use guestlet::config::host::{HostSettings, Role};

use blocks::{Page, is_there, pages, top};

/// The anchors of a page, as GitHub makes them of its headings.
fn anchors(page: &Page) -> BTreeSet<String> {
    let mut seen: BTreeMap<String, usize> = BTreeMap::new();
    let prose = page.prose();
    let headings = prose.lines().filter(|line| line.starts_with('#'));
    headings
        .map(|line| {
            let text = line.trim_start_matches('#').trim().to_lowercase();
            let kept = text.chars().filter(|one| one.is_alphanumeric() || matches!(one, ' ' | '-' | '_'));
            let anchor = kept.map(|one| if one == ' ' { '-' } else { one }).collect::<String>();
            let count = seen.entry(anchor.clone()).or_default();
            *count += 1;
            if *count == 1 { anchor } else { format!("{anchor}-{}", *count - 1) }
        })
        .collect()
}

/// Where the links of a page lead.
fn links(page: &Page) -> Vec<String> {
    let prose = page.prose();
    let outside: String = prose.split('`').step_by(2).collect::<Vec<_>>().join("code");
    let parts = outside.split("](").skip(1);
    parts.filter_map(|part| Some(part.split_once(')')?.0.to_owned())).collect()
}

/// A path without `..`.
fn plain(path: &Path) -> PathBuf {
    let mut found = PathBuf::new();
    for part in path.components() {
        if part == std::path::Component::ParentDir {
            found.pop();
        } else {
            found.push(part);
        }
    }
    found
}

#[test]
fn all_links_lead_somewhere() {
    let pages = pages();
    let of: BTreeMap<_, _> = pages.iter().map(|page| (PathBuf::from(&page.name), anchors(page))).collect();
    let (mut count, mut wrong) = (0, String::new());
    for page in &pages {
        for link in links(page) {
            if link.starts_with("https://") || link.starts_with("http://") {
                continue;
            }
            count += 1;
            let (path, anchor) = link.split_once('#').unwrap_or((&link, ""));
            let target = if path.is_empty() {
                PathBuf::from(&page.name)
            } else {
                plain(&Path::new(&page.name).with_file_name(path))
            };
            if !top().join(&target).exists() {
                let _ = writeln!(wrong, "{}: there is no {}", page.name, target.display());
            } else if !anchor.is_empty() && !of.get(&target).is_some_and(|all| all.contains(anchor)) {
                let _ = writeln!(wrong, "{}: {} has no heading #{anchor}", page.name, target.display());
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong}");
    assert!(count > 300, "only {count} links were found");
}

#[test]
fn paths_of_the_sources_exist() {
    let (mut count, mut wrong) = (0, String::new());
    for page in pages().iter().filter(|page| page.name != "CHANGELOG.md") {
        for span in page.spans() {
            let is_path = ["src/", "tests/", "proto/", "packaging/", "benches/", "systemd/"]
                .iter()
                .any(|first| span.starts_with(first));
            // A name in capitals stands for one of several.
            let is_one = !span.contains(|one: char| one.is_ascii_uppercase() || " *…<".contains(one));
            if is_path && is_one {
                count += 1;
                if !is_there(&span) {
                    let _ = writeln!(wrong, "{}: there is no {span}", page.name);
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong}");
    assert!(count > 60, "only {count} paths were found");
}

fn sources(directory: &Path, found: &mut Vec<String>) {
    for entry in std::fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|ending| ending == "rs") {
            let text = std::fs::read_to_string(&path).unwrap();
            // A string that goes on in the next line is one.
            let mut parts = text.split("\\\n");
            let mut joined = parts.next().unwrap_or_default().to_owned();
            parts.for_each(|part| joined += part.trim_start());
            found.push(joined.replace("\\\"", "\""));
        }
    }
}

/// The messages that docs/troubleshooting.md quotes: the first column of its tables.
#[test]
fn quoted_messages_are_those_of_the_programs() {
    let page = pages().into_iter().find(|page| page.name == "docs/troubleshooting.md").unwrap();
    let mut all = Vec::new();
    sources(&top().join("src"), &mut all);
    let (mut count, mut wrong) = (0, String::new());
    for line in page.text.lines().filter_map(|line| line.strip_prefix("| `")) {
        let message = line.split('`').next().unwrap();
        count += 1;
        let parts: Vec<_> = message.split('…').map(str::trim).filter(|part| part.len() > 2).collect();
        assert!(parts.iter().any(|part| part.len() > 9), "too little of it is quoted: {message}");
        if !all.iter().any(|text| parts.iter().all(|part| text.contains(part))) {
            let _ = writeln!(wrong, "no program says: {message}");
        }
    }
    assert!(wrong.is_empty(), "{wrong}");
    assert!(count > 25, "only {count} messages were found");
}

/// Settings as somebody would copy them, with something in the place of what they leave out.
fn completed(text: &str) -> String {
    text.replace("SHA256:…", "SHA256:LHDhK3oGRvkiefQnx7OOczTY5Tic/xZ6HcMOc/gmtoM").replace(", \"…\"", "")
}

/// Why none of the programs takes these settings.
fn refused(text: &str) -> Option<String> {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("host.toml");
    std::fs::write(&file, text).unwrap();
    let mut why = Vec::new();
    for role in [Role::Machine, Role::Node, Role::Controller] {
        why.push(HostSettings::load(&file, true, role).err()?.to_string());
    }
    let root = tempfile::tempdir().unwrap();
    std::fs::create_dir_all(root.path().join("etc/guestlet")).unwrap();
    std::fs::write(root.path().join("etc/guestlet/agent.toml"), text).unwrap();
    let loaded =
        agent::load(&Places::from(root.path()), Program::Guestlet, agent::fragment::AgentFragment::default());
    why.push(loaded.err()?.to_string());
    why.push(disk_rules::load(directory.path(), |_| Ok(())).err()?.to_string());
    Some(why.join("\n  "))
}

#[test]
fn settings_are_taken_by_the_programs() {
    let (mut count, mut wrong) = (0, String::new());
    for block in pages().iter().flat_map(Page::blocks).filter(|block| block.language == "toml") {
        // Those of a program in Rust.
        if block.text.starts_with("[dependencies]") {
            continue;
        }
        count += 1;
        if let Some(why) = refused(&completed(&block.text)) {
            let _ = writeln!(wrong, "{}:\n  {why}", block.place);
        }
    }
    assert!(wrong.is_empty(), "{wrong}");
    assert!(count > 15, "only {count} blocks were found");
}
