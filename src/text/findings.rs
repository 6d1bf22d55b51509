//! Findings of a `doctor` command: what works, what deserves attention, what is wrong, and how to remedy it.

use std::fmt::Write as _;

use serde_json::{Value, json};

use super::colours::{Colours, Style};

/// Severity of a finding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// The subject works.
    Good,
    /// The subject works, or does not but may be meant so.
    Note,
    /// The subject is configured or requested, and does not work.
    Wrong,
}

impl Level {
    fn word(self) -> &'static str {
        match self {
            Self::Good => "ok",
            Self::Note => "note",
            Self::Wrong => "WRONG",
        }
    }

    fn style(self) -> Style {
        match self {
            Self::Good => Style::Good,
            Self::Note => Style::Note,
            Self::Wrong => Style::Wrong,
        }
    }
}

/// Result of one check.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// Subject of the check, in a word or two.
    pub subject: String,
    /// Severity.
    pub level: Level,
    /// Result of the check, as text for users.
    pub says: String,
    /// Remedy; empty if none is needed.
    pub remedy: String,
}

impl Finding {
    /// Creates a finding that the subject works.
    pub fn good(subject: &str, says: impl Into<String>) -> Self {
        Self { subject: subject.to_owned(), level: Level::Good, says: says.into(), remedy: String::new() }
    }

    /// Creates a finding that deserves attention, with a possible remedy.
    pub fn note(subject: &str, says: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { level: Level::Note, remedy: remedy.into(), ..Self::good(subject, says) }
    }

    /// Creates a finding that the subject is wrong, with the remedy.
    pub fn wrong(subject: &str, says: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { level: Level::Wrong, ..Self::note(subject, says, remedy) }
    }
}

/// Returns whether any finding is wrong; the exit status depends on it.
pub fn any_wrong(findings: &[Finding]) -> bool {
    findings.iter().any(|finding| finding.level == Level::Wrong)
}

/// Formats the findings for users: a line for each, with its remedy below, and a summary at the end.
pub fn table(findings: &[Finding], colours: Colours) -> String {
    let width = findings.iter().map(|finding| finding.subject.chars().count()).max().unwrap_or(0);
    let mut text = String::new();
    for Finding { subject, level, says, remedy } in findings {
        // Writing to a string cannot fail.
        let word = colours.paint(level.style(), level.word());
        let room = 5 - level.word().len();
        let _ = writeln!(text, "{word}{:room$}  {subject:width$}  {says}", "");
        if !remedy.is_empty() {
            let _ = writeln!(text, "{:<5}  {:width$}  → {remedy}", "", "");
        }
    }
    let wrong = findings.iter().filter(|finding| finding.level == Level::Wrong).count();
    let sum = match wrong {
        0 => "Nothing is wrong.\n".to_owned(),
        1 => "One thing is wrong.\n".to_owned(),
        several => format!("{several} things are wrong.\n"),
    };
    text + &sum
}

/// Formats the findings as JSON.
pub fn json(findings: &[Finding]) -> Value {
    let one = |finding: &Finding| {
        json!({
            "subject": finding.subject,
            "level": finding.level.word().to_ascii_lowercase(),
            "says": finding.says,
            "remedy": (!finding.remedy.is_empty()).then_some(&finding.remedy),
        })
    };
    json!({ "wrong": any_wrong(findings), "findings": findings.iter().map(one).collect::<Vec<_>>() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn people_read_lines_and_the_sum() {
        let findings = [
            Finding::good("agent", "it runs"),
            Finding::note("the host", "it is silent", "ask it"),
            Finding::wrong("disk", "it hangs", "pull it"),
        ];
        assert_eq!(
            table(&findings, Colours::Left),
            "ok     agent     it runs\n\
             note   the host  it is silent\n                 → ask it\n\
             WRONG  disk      it hangs\n                 → pull it\n\
             One thing is wrong.\n"
        );
        let painted = table(&findings, Colours::Shown);
        assert!(painted.starts_with("\x1b[32mok\x1b[0m     agent     it runs\n"), "{painted:?}");
        assert!(any_wrong(&findings) && !any_wrong(&findings[..2]));
        assert_eq!(json(&findings)["findings"][2]["level"], "wrong");
        assert_eq!(json(&findings)["findings"][0]["remedy"], Value::Null);
    }
}
