//! Variable `KUBELET_EXTRA_ARGS` in the environment file of kubelet's unit. Pure.
//!
//! kubelet combines several `--node-labels`, so the flag of guestlet is appended to the present value. A comment
//! records what was added, so that nothing else is ever removed.

use crate::guest::topology::Labels;

const VARIABLE: &str = "KUBELET_EXTRA_ARGS=";
const FLAG: &str = "--node-labels=";
/// Beginning of the comment about a flag that was added to the variable.
const ADDED: &str = "# guestlet added this to KUBELET_EXTRA_ARGS: ";
/// Beginning of the comment about a flag that was added together with the variable.
const ADDED_WHOLE: &str = "# guestlet added this and the line of KUBELET_EXTRA_ARGS: ";

/// Returns the text with these labels, or `None` if it would be empty.
///
/// # Errors
/// If the variable is written in a form that cannot be extended; the reason is for people.
pub(super) fn merged(text: &str, labels: &Labels) -> Result<Option<String>, String> {
    if labels.is_empty() && !text.lines().any(|line| added(line).is_some()) {
        // Unchanged to the byte: guestlet has added nothing to it.
        return Ok((!text.is_empty()).then(|| text.to_owned()));
    }
    let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
    take_out(&mut lines)?;
    if !labels.is_empty() {
        let pairs: Vec<_> = labels.iter().map(|(key, value)| format!("{key}={value}")).collect();
        let ours = format!("{FLAG}{}", pairs.join(","));
        match variable(&lines)? {
            Some(at) => {
                lines[at] = format!("{VARIABLE}{}", with(value_of(&lines[at]), &ours)?);
                lines.insert(at, format!("{ADDED}{ours}"));
            }
            None => lines.extend([format!("{ADDED_WHOLE}{ours}"), format!("{VARIABLE}{ours}")]),
        }
    }
    Ok((!lines.is_empty()).then(|| lines.join("\n") + "\n"))
}

/// Returns the labels that were added to the text.
pub(super) fn labels(text: &str) -> Labels {
    let added = text.lines().find_map(|line| added(line).map(|(ours, _)| ours));
    let pairs = added.and_then(|ours| ours.strip_prefix(FLAG)).unwrap_or_default().split(',');
    let pairs = pairs.filter_map(|pair| pair.split_once('='));
    pairs.map(|(key, value)| (key.to_owned(), value.to_owned())).collect()
}

/// Parses the comment: returns the flag that was added, and whether the whole line was added with it.
fn added(line: &str) -> Option<(&str, bool)> {
    let part = line.strip_prefix(ADDED).map(|ours| (ours, false));
    part.or_else(|| line.strip_prefix(ADDED_WHOLE).map(|ours| (ours, true)))
}

/// Removes what the comments say was added.
fn take_out(lines: &mut Vec<String>) -> Result<(), String> {
    while let Some(at) = lines.iter().position(|line| added(line).is_some()) {
        let comment = lines.remove(at);
        let Some((ours, whole)) = added(&comment) else { continue };
        let Some(at) = variable(lines)? else { continue };
        let value = value_of(&lines[at]);
        if whole && value == ours {
            lines.remove(at);
        } else if let Some(place) = value.rfind(ours) {
            let before = value[..place].strip_suffix(' ').unwrap_or(&value[..place]);
            lines[at] = format!("{VARIABLE}{before}{}", &value[place + ours.len()..]);
        }
    }
    Ok(())
}

/// Returns the line that sets the variable; the last one counts.
fn variable(lines: &[String]) -> Result<Option<usize>, String> {
    let Some(at) = lines.iter().rposition(|line| line.trim_start().starts_with(VARIABLE)) else {
        return Ok(None);
    };
    if lines[at].ends_with('\\') {
        return Err(
            "KUBELET_EXTRA_ARGS continues on another line; write it on one line, so that options can be added"
                .to_owned(),
        );
    }
    Ok(Some(at))
}

fn value_of(line: &str) -> &str {
    line.trim().strip_prefix(VARIABLE).unwrap_or_default()
}

/// Appends the flag to the value, keeping its quotes.
fn with(value: &str, ours: &str) -> Result<String, String> {
    let apart = |before: &str| if before.is_empty() { "" } else { " " };
    for quote in ['"', '\''] {
        if let Some(rest) = value.strip_prefix(quote) {
            let Some(inside) = rest.strip_suffix(quote) else {
                return Err(
                    "KUBELET_EXTRA_ARGS has no closing quotation mark; add it, so that options can be added"
                        .to_owned(),
                );
            };
            return Ok(format!("{quote}{inside}{}{ours}{quote}", apart(inside)));
        }
    }
    if value.is_empty() {
        return Ok(ours.to_owned());
    }
    // Without quotes systemd accepts the blank in the value, but a shell that reads the file would not.
    let plain = !value.contains(['"', '\'', '\\']);
    Ok(if plain { format!("\"{value} {ours}\"") } else { format!("{value} {ours}") })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn zone(zone: &str) -> Labels {
        [("topology.kubernetes.io/zone".to_owned(), zone.to_owned()), ("rack".to_owned(), "1".to_owned())]
            .into()
    }

    #[test]
    fn what_is_there_stays() {
        let ours = "--node-labels=rack=1,topology.kubernetes.io/zone=a";
        for (before, expected, after) in [
            ("", format!("KUBELET_EXTRA_ARGS={ours}"), ""),
            (
                "# mine\nKUBELET_EXTRA_ARGS=\n",
                format!("KUBELET_EXTRA_ARGS={ours}"),
                "# mine\nKUBELET_EXTRA_ARGS=\n",
            ),
            (
                "KUBELET_EXTRA_ARGS=--v=2\n",
                format!("KUBELET_EXTRA_ARGS=\"--v=2 {ours}\""),
                "KUBELET_EXTRA_ARGS=\"--v=2\"\n",
            ),
            (
                "KUBELET_EXTRA_ARGS=\"--v=2 --node-labels=user=x\"\nOTHER=1\n",
                format!("KUBELET_EXTRA_ARGS=\"--v=2 --node-labels=user=x {ours}\""),
                "KUBELET_EXTRA_ARGS=\"--v=2 --node-labels=user=x\"\nOTHER=1\n",
            ),
            (
                "KUBELET_EXTRA_ARGS='--v=2'\n",
                format!("KUBELET_EXTRA_ARGS='--v=2 {ours}'"),
                "KUBELET_EXTRA_ARGS='--v=2'\n",
            ),
            ("OTHER=1\n", format!("KUBELET_EXTRA_ARGS={ours}"), "OTHER=1\n"),
        ] {
            let once = merged(before, &zone("a")).unwrap().unwrap();
            assert!(once.lines().any(|line| line == expected), "{before:?}: {once}");
            assert_eq!(labels(&once), zone("a"));
            assert_eq!(merged(&once, &zone("a")).unwrap().unwrap(), once, "again");
            let moved = merged(&once, &zone("b")).unwrap().unwrap();
            assert!(!moved.contains("zone=a") && moved.contains("zone=b"), "{moved}");
            let gone = merged(&moved, &Labels::new()).unwrap().unwrap_or_default();
            assert_eq!(gone, after, "{before:?}");
        }
    }

    #[test]
    fn what_cannot_be_added_to_is_left_alone() {
        for before in ["KUBELET_EXTRA_ARGS=\"--v=2 \\\n --x\"\n", "KUBELET_EXTRA_ARGS=\"--v=2\n"] {
            assert!(merged(before, &zone("a")).is_err(), "{before:?}");
        }
    }

    #[test]
    fn what_a_person_changed_after_us_is_theirs() {
        let once = merged("", &zone("a")).unwrap().unwrap();
        let edited = once.replace("KUBELET_EXTRA_ARGS=--", "KUBELET_EXTRA_ARGS=--v=4 --");
        assert_eq!(merged(&edited, &Labels::new()).unwrap().unwrap(), "KUBELET_EXTRA_ARGS=--v=4\n");
        let other = once
            .replace("KUBELET_EXTRA_ARGS=--node-labels=rack=1", "KUBELET_EXTRA_ARGS=--node-labels=rack=2");
        assert!(merged(&other, &Labels::new()).unwrap().unwrap().contains("rack=2"));
    }
}
