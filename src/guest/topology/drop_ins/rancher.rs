//! Drop-in file of RKE2 and k3s. Pure.
//!
//! `node-label+` adds to the list from earlier files; `node-label` would replace it.

use crate::guest::topology::Labels;

const HEAD: &str = "\
# Written by guestlet, and again whenever this guest runs on another host; edits are lost.
# topology.drop-ins in /etc/guestlet/agent.toml says whether this file is wanted.
node-label+:
";

/// Returns the text of a file with these labels, or `None` if there are none.
pub(super) fn text(labels: &Labels) -> Option<String> {
    if labels.is_empty() {
        return None;
    }
    // Labels contain no character that needs escaping.
    let lines = labels.iter().map(|(key, value)| format!("  - \"{key}={value}\"\n"));
    Some(HEAD.to_owned() + &lines.collect::<String>())
}

/// Parses the labels of such a file.
pub(super) fn labels(text: &str) -> Labels {
    let label = |line: &str| {
        let quoted = line.strip_prefix("  - \"")?.strip_suffix('"')?;
        quoted.split_once('=').map(|(key, value)| (key.to_owned(), value.to_owned()))
    };
    text.lines().filter_map(label).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_yaml_and_is_read_again() {
        let all: Labels =
            [("a.b/c".to_owned(), "x_1".to_owned()), ("d".to_owned(), "true".to_owned())].into();
        let written = text(&all).unwrap();
        let parsed: std::collections::BTreeMap<String, Vec<String>> =
            serde_saphyr::from_str(&written).unwrap();
        assert_eq!(parsed["node-label+"], ["a.b/c=x_1", "d=true"]);
        assert_eq!(labels(&written), all);
        assert_eq!(text(&Labels::new()), None);
    }
}
