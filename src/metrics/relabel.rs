//! Relabelling of an exporter's answer from a guest: each sample in the text format 0.0.4 gets a label with the
//! name of its VM. The guest decides on the contents, but cannot claim another VM: a label `vm` of the exporter's
//! own becomes `exported_vm`, as in Prometheus itself. Pure.

use std::fmt::Write as _;

use super::exposition::Escaped;

/// Label that the host half adds.
const OURS: &str = "vm";
/// Maximum number of labels of one sample.
const MOST_LABELS: usize = 64;

/// Reason why an answer is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Wrong {
    /// A line, counted from 1, is not in the text format.
    #[error("line {0} is not in Prometheus' text format: {1}")]
    Line(usize, &'static str),
    /// The answer has more samples than this limit.
    #[error("it has more than {0} series; scrape.max-series in the settings of guestlet-host allows more")]
    TooMany(usize),
}

/// Relabels the answer `text` with the name of its VM; it may have at most `most` samples. Lines other than
/// samples, types and help texts are left out. So are timestamps, which come from the guest's clock.
///
/// # Errors
/// If the text is not in the format, or has more samples.
pub fn relabel(text: &str, vm: &str, most: usize) -> Result<String, Wrong> {
    let mut written = String::with_capacity(text.len() + text.len() / 4);
    let mut left = most;
    for (place, line) in text.lines().enumerate() {
        let line = line.trim_matches([' ', '\t']);
        if line.is_empty() {
            continue;
        }
        if let Some(comment) = line.strip_prefix('#') {
            head(&mut written, comment);
            continue;
        }
        left = left.checked_sub(1).ok_or(Wrong::TooMany(most))?;
        sample(&mut written, line, vm).map_err(|why| Wrong::Line(place + 1, why))?;
    }
    Ok(written)
}

/// Writes a line with a metric's type or help text; other comments are left out.
fn head(written: &mut String, comment: &str) {
    let mut words = comment.trim_start().splitn(3, [' ', '\t']);
    let (Some(kind @ ("HELP" | "TYPE")), Some(name)) = (words.next(), words.next()) else { return };
    let rest = words.next().unwrap_or_default().trim();
    let is_kind = matches!(rest, "counter" | "gauge" | "histogram" | "summary" | "untyped");
    if word(name, true).1.is_empty() && !name.is_empty() && (kind == "HELP" || is_kind) {
        let rest: String = rest.chars().filter(|one| !one.is_control()).collect();
        // Writing to a String cannot fail.
        let _ = writeln!(written, "# {kind} {name} {rest}");
    }
}

fn sample(written: &mut String, line: &str, vm: &str) -> Result<(), &'static str> {
    let (name, rest) = word(line, true);
    if name.is_empty() {
        return Err("it does not begin with the name of a metric");
    }
    let mut rest = space(rest);
    let mut labels = Vec::new();
    if let Some(within) = rest.strip_prefix('{') {
        (labels, rest) = labels_of(within)?;
    }
    let mut words = rest.split_ascii_whitespace();
    let value = words.next().ok_or("it has no value")?;
    let time = words.next();
    if value.parse::<f64>().is_err() {
        return Err("its value is not a number");
    }
    if time.is_some_and(|time| time.parse::<i64>().is_err()) || words.next().is_some() {
        return Err("its value is followed by something that is not a timestamp");
    }
    let _ = write!(written, "{name}{{{OURS}=\"{}\"", Escaped(vm));
    for (label, text) in &labels {
        let mut label = (*label).to_owned();
        if label == OURS {
            while label == OURS || labels.iter().any(|(other, _)| *other == label) {
                label.insert_str(0, "exported_");
            }
        }
        let _ = write!(written, ",{label}=\"{text}\"");
    }
    let _ = writeln!(written, "}} {value}");
    Ok(())
}

/// Names of labels with their values, still escaped.
type Labels<'t> = Vec<(&'t str, &'t str)>;

/// Parses the labels up to the closing brace, and returns the rest of the text as well.
fn labels_of(mut rest: &str) -> Result<(Labels<'_>, &str), &'static str> {
    let mut labels: Labels<'_> = Vec::new();
    loop {
        rest = space(rest);
        if let Some(after) = rest.strip_prefix('}') {
            return Ok((labels, after));
        }
        let (label, after) = word(rest, false);
        if label.is_empty() || label.starts_with("__") {
            return Err("a label has no name, or one that is reserved");
        }
        if labels.len() == MOST_LABELS {
            return Err("it has too many labels");
        }
        if labels.iter().any(|(other, _)| *other == label) {
            return Err("it has a label twice");
        }
        let after = space(after).strip_prefix('=').ok_or("a label has no value")?;
        let text =
            space(after).strip_prefix('"').ok_or("the value of a label is not between quotation marks")?;
        let end = end_of_text(text)?;
        labels.push((label, text.get(..end).unwrap_or_default()));
        rest = space(text.get(end + 1..).unwrap_or_default());
        match rest.strip_prefix(',') {
            Some(after) => rest = after,
            None if rest.starts_with('}') => {}
            None => return Err("a label is not followed by , or }"),
        }
    }
}

/// Finds the closing quotation mark of a label's value.
fn end_of_text(text: &str) -> Result<usize, &'static str> {
    let mut escaped = false;
    for (place, byte) in text.bytes().enumerate() {
        match byte {
            _ if escaped => match byte {
                b'\\' | b'"' | b'n' => escaped = false,
                _ => return Err("a value of a label has a \\ before something else than \\, \" or n"),
            },
            b'\\' => escaped = true,
            b'"' => return Ok(place),
            _ => {}
        }
    }
    Err("the value of a label has no closing quotation mark")
}

/// Splits off the name at the beginning of a text. Names of metrics may have colons.
fn word(text: &str, may_have_colons: bool) -> (&str, &str) {
    let is_first = |one: u8| one.is_ascii_alphabetic() || one == b'_' || (may_have_colons && one == b':');
    let is_one = |place: usize, one: u8| is_first(one) || (place > 0 && one.is_ascii_digit());
    let end = text.bytes().enumerate().position(|(place, one)| !is_one(place, one)).unwrap_or(text.len());
    text.split_at(end)
}

/// Removes leading white space.
fn space(text: &str) -> &str {
    text.trim_start_matches([' ', '\t'])
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn each_sample_has_the_name_of_its_vm() {
        let text = "# HELP up Whether\tit works.\n# TYPE up gauge\nup 1\n\n# a comment\n\
            a_total { vm = \"other\" , path=\"C:\\\\ \\\"x\\\" \\n}\", } +Inf 1700000000000\n\
            b{exported_vm=\"1\",vm=\"2\"} NaN\n  c:d{}\t-1.5e3  \n# EOF\n# TYPE x strange\n";
        let expected = "# HELP up Whetherit works.\n# TYPE up gauge\nup{vm=\"ns/web\"} 1\n\
            a_total{vm=\"ns/web\",exported_vm=\"other\",path=\"C:\\\\ \\\"x\\\" \\n}\"} +Inf\n\
            b{vm=\"ns/web\",exported_vm=\"1\",exported_exported_vm=\"2\"} NaN\nc:d{vm=\"ns/web\"} -1.5e3\n";
        assert_eq!(relabel(text, "ns/web", 4).unwrap(), expected);
        assert_eq!(relabel(text, "ns/web", 3), Err(Wrong::TooMany(3)));
    }

    #[test]
    fn what_is_no_sample_is_not_handed_on() {
        for wrong in [
            "up",
            "up one",
            "up 1 2 3",
            "up 1 soon",
            "1up 1",
            "<html>",
            "up{vm} 1",
            "up{vm=1} 1",
            "up{vm=\"a} 1",
            "up{vm=\"\\x\"} 1",
            "up{a=\"1\" b=\"2\"} 1",
            "up{a=\"1\",a=\"2\"} 1",
            "up{__name__=\"other\"} 1",
            "up{\"a.b\"=\"2\"} 1",
            "up{a=\"1\"",
            "up 1 # {trace=\"x\"} 1",
        ] {
            let text = format!("ok 1\n{wrong}\n");
            assert!(matches!(relabel(&text, "web", 9), Err(Wrong::Line(2, _))), "{wrong}");
        }
    }

    proptest! {
        /// For any input: each sample line in the output begins with a name and our label, which occurs once.
        #[test]
        fn no_exporter_speaks_for_another_vm(
            lines in proptest::collection::vec("[a-c_{}=\"\\\\,vm 01#\t\u{e4}n+.]{0,40}", 0..8),
        ) {
            if let Ok(written) = relabel(&lines.join("\n"), "web", 8) {
                for line in written.lines().filter(|line| !line.starts_with('#')) {
                    let (_, labels) = line.split_once('{').unwrap();
                    // The output can be parsed again, and has one label of this name, which is ours.
                    let (labels, _) = labels_of(labels).unwrap();
                    prop_assert_eq!(labels[0], ("vm", "web"));
                    prop_assert!(labels.iter().filter(|(label, _)| *label == "vm").count() == 1);
                    prop_assert!(relabel(line, "web", 1).is_ok());
                }
            }
        }

        #[test]
        fn any_text_is_taken_or_refused(text in "\\PC{0,200}", most in 0_usize..4) {
            if let Ok(written) = relabel(&text, "web", most) {
                prop_assert!(written.lines().filter(|line| !line.starts_with('#')).count() <= most);
            }
        }
    }
}
