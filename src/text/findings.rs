//! What a doctor found: what works, what is worth knowing, what is wrong, and what to do about it.

use std::fmt::Write as _;

use serde_json::{Value, json};

use super::colours::{Colours, Style};

/// How something is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// It works.
    Good,
    /// It works; or it does not, and may be meant so.
    Note,
    /// Something that was asked for does not work.
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

/// One thing that was looked at.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// What was looked at, in a word or two.
    pub subject: String,
    /// How it is.
    pub level: Level,
    /// What was found.
    pub says: String,
    /// What to do; empty if nothing need be done.
    pub remedy: String,
}

impl Finding {
    /// It works.
    pub fn good(subject: &str, says: impl Into<String>) -> Self {
        Self { subject: subject.to_owned(), level: Level::Good, says: says.into(), remedy: String::new() }
    }

    /// It is worth knowing, with what may be done.
    pub fn note(subject: &str, says: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { level: Level::Note, remedy: remedy.into(), ..Self::good(subject, says) }
    }

    /// It is wrong, with what to do.
    pub fn wrong(subject: &str, says: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { level: Level::Wrong, ..Self::note(subject, says, remedy) }
    }
}

/// Whether anything is wrong.
pub fn any_wrong(findings: &[Finding]) -> bool {
    findings.iter().any(|finding| finding.level == Level::Wrong)
}

/// For people: a line for each, below it what to do, and last the sum.
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

/// For programs.
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
