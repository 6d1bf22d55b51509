//! `guestlet policy suggest`: reads the audit records of a file and writes the `[[grant]]` tables that would allow
//! the recorded calls, and no more than that, as far as settings can express it.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use serde::Deserialize;

use crate::policy::role::{Role, Roles};
use crate::text::target::Target;

/// Fields of a record that are used. Lines that only report records that were left out or lost have no decision.
#[derive(Debug, Deserialize)]
struct Line {
    #[serde(default)]
    host: String,
    #[serde(default)]
    caller: String,
    #[serde(default)]
    role: String,
    #[serde(default)]
    subject: String,
    #[serde(default)]
    decision: String,
    #[serde(default)]
    more_denied_before: u64,
    #[serde(default)]
    lost_before: u64,
}

/// Reason why a file cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("line {line} is not an audit record: {problem}")]
pub struct NoRecord {
    /// Number of the line, from 1.
    line: usize,
    problem: String,
}

/// Calls of one client.
#[derive(Debug, Default)]
struct Seen {
    roles: Roles,
    programs: BTreeSet<String>,
    read: BTreeSet<String>,
    written: BTreeSet<String>,
    targets: BTreeSet<String>,
}

/// Returns the tables for the audit records of a file.
///
/// # Errors
/// The first line that is not an audit record.
pub fn tables(records: &str) -> Result<String, NoRecord> {
    let mut seen: BTreeMap<(String, Option<String>), Seen> = BTreeMap::new();
    let (mut denied, mut lost) = (0, 0);
    for (number, line) in records.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        let wrong = |problem: String| NoRecord { line: number + 1, problem };
        let line: Line = serde_json::from_str(line).map_err(|error| wrong(error.to_string()))?;
        denied += line.more_denied_before;
        lost += line.lost_before;
        if line.decision == "denied" {
            denied += 1;
            continue;
        }
        if line.decision.is_empty() && line.more_denied_before + line.lost_before > 0 {
            continue;
        }
        let role = Role::named(&line.role).ok_or_else(|| wrong(format!("no role {:?}", line.role)))?;
        // Grants to QGA clients and to host halves without a key do not depend on callers, because any of these clients
        // could claim to be one.
        let named = !matches!(line.host.as_str(), "qga" | "plain");
        let caller = named.then_some(line.caller);
        let seen = seen.entry((line.host, caller)).or_default();
        seen.add(role, line.subject);
    }
    let mut text =
        String::from("# Grants for what the audit records show, and no more. Review them before use.\n");
    if denied > 0 {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "# {denied} denied calls are left out.");
    }
    if lost > 0 {
        let _ = writeln!(text, "# {lost} records could not be written, so they are missing here.");
    }
    for ((host, caller), seen) in &seen {
        seen.write(&mut text, host, caller.as_deref());
    }
    Ok(text)
}

impl Seen {
    fn add(&mut self, role: Role, subject: String) {
        // Some calls, such as a query for a program's status, have no path. Others of the same role provide the paths.
        let has_path = subject.starts_with('/');
        match role {
            Role::Exec if has_path => drop(self.programs.insert(subject)),
            Role::FilesRead if has_path => drop(self.read.insert(subject)),
            Role::FilesWrite if has_path => drop(self.written.insert(subject)),
            Role::Exec | Role::FilesRead | Role::FilesWrite => {}
            Role::Forward => {
                self.roles = self.roles.with(role);
                if subject.parse::<Target>().is_ok() {
                    self.targets.insert(subject);
                }
            }
            role => self.roles = self.roles.with(role),
        }
    }

    /// Writes one table for the roles without paths, and one for each role with paths, because a table has a single
    /// list of files for all its roles.
    fn write(&self, text: &mut String, host: &str, caller: Option<&str>) {
        let roles: Vec<_> = self.roles.iter().map(Role::word).collect();
        let paths = [
            (Role::Exec, "exec", &self.programs),
            (Role::FilesRead, "files", &self.read),
            (Role::FilesWrite, "files", &self.written),
        ];
        if !roles.is_empty() {
            let targets: Vec<_> = self.targets.iter().map(|target| quoted(target)).collect();
            let limit = if targets.is_empty() {
                String::new()
            } else {
                format!("forward = [{}]\n", targets.join(", "))
            };
            table(text, host, caller, &roles, &limit);
        }
        for (role, key, paths) in paths.into_iter().filter(|(.., paths)| !paths.is_empty()) {
            let paths: Vec<_> = paths.iter().map(|path| quoted(path)).collect();
            let limit = format!("{key} = {{ paths = [{}] }}\n", paths.join(", "));
            table(text, host, caller, &[role.word()], &limit);
        }
    }
}

fn table(text: &mut String, host: &str, caller: Option<&str>, roles: &[&str], limit: &str) {
    let _ = write!(text, "\n[[grant]]\nhost = {}\n", quoted(host));
    if let Some(caller) = caller {
        let _ = writeln!(text, "caller = {}", quoted(caller));
    }
    let roles: Vec<_> = roles.iter().map(|role| quoted(role)).collect();
    let _ = write!(text, "roles = [{}]\n{limit}", roles.join(", "));
}

/// Quotes a text as a TOML string.
fn quoted(text: &str) -> String {
    let mut quoted = String::from('"');
    for character in text.chars() {
        match character {
            '"' | '\\' => quoted.extend(['\\', character]),
            control if control.is_control() => {
                let _ = write!(quoted, "\\u{:04X}", u32::from(control));
            }
            plain => quoted.push(plain),
        }
    }
    quoted + "\""
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_line_of_a_file_can_be_taken_for_something_else() {
        assert_eq!(tables("{}").unwrap_err().line, 1);
        let wrong =
            r#"{"host":"qga","caller":"","role":"root","verb":"x","subject":"","decision":"allowed"}"#;
        let error = tables(&format!("\n{wrong}")).unwrap_err().to_string();
        assert_eq!(error, "line 2 is not an audit record: no role \"root\"");
        assert_eq!(quoted("a\"b\\c\n"), "\"a\\\"b\\\\c\\u000A\"");
    }
}
