//! The command line of `guestlet policy`.

use std::ffi::OsString;
use std::path::PathBuf;

use lexopt::prelude::{Long, Short, Value, ValueExt as _};

/// Subcommand of `guestlet policy`.
#[derive(Debug, PartialEq, Eq)]
pub enum Verb {
    /// Show the rules in force.
    Show,
    /// Suggest grants for the calls in audit records.
    Suggest,
}

/// Parsed command line.
#[derive(Debug, PartialEq, Eq)]
pub struct Command {
    /// Subcommand to run.
    pub verb: Verb,
    /// Settings file, if one was named.
    pub settings: Option<PathBuf>,
    /// Print JSON.
    pub json: bool,
    /// File of audit records, if not that of the settings.
    pub file: Option<PathBuf>,
}

/// Parses the words after `policy`.
///
/// # Errors
/// An unknown word or option.
pub fn parse(words: &[OsString]) -> Result<Command, lexopt::Error> {
    let mut parser = lexopt::Parser::from_args(words);
    let (mut verb, mut settings, mut json, mut file) = (None, None, false, None);
    while let Some(argument) = parser.next()? {
        match argument {
            Value(word) if verb.is_none() && word == "show" => verb = Some(Verb::Show),
            Value(word) if verb.is_none() && word == "suggest" => verb = Some(Verb::Suggest),
            Long("settings") => settings = Some(parser.value()?.into()),
            Short('o') | Long("output") if verb == Some(Verb::Show) => {
                match parser.value()?.string()?.as_str() {
                    "json" => json = true,
                    "table" => json = false,
                    other => return Err(format!("unknown output format {other:?}; use table or json").into()),
                }
            }
            Long("file") if verb == Some(Verb::Suggest) => file = Some(parser.value()?.into()),
            Value(_) => return Err("policy needs show or suggest".into()),
            other => return Err(other.unexpected()),
        }
    }
    let verb = verb.ok_or("policy needs show or suggest")?;
    Ok(Command { verb, settings, json, file })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(line: &str) -> Result<Command, String> {
        let words: Vec<_> = line.split_whitespace().map(OsString::from).collect();
        parse(&words).map_err(|error| error.to_string())
    }

    #[test]
    fn each_verb_takes_its_own_options() {
        let settings = Some(PathBuf::from("/s"));
        let show = Command { verb: Verb::Show, settings, json: true, file: None };
        assert_eq!(parsed("show -o json --settings /s"), Ok(show));
        let file = Some(PathBuf::from("/a"));
        assert_eq!(
            parsed("suggest --file /a"),
            Ok(Command { verb: Verb::Suggest, settings: None, json: false, file })
        );
        for (line, expected) in [
            ("", "show or suggest"),
            ("shw", "show or suggest"),
            ("show suggest", "show or suggest"),
            ("show --file /a", "--file"),
            ("suggest -o json", "-o"),
            ("show -o yaml", "use table or json"),
        ] {
            let error = parsed(line).unwrap_err();
            assert!(error.contains(expected), "{line}: {error}");
        }
    }
}
