//! Command lines of the subcommands of `guestlet` that people use on an agent, or on files that an agent has left.

use std::ffi::OsString;
use std::path::PathBuf;

use lexopt::Arg;

/// Command line, with the common options already parsed.
#[derive(Debug, Default)]
pub struct Words {
    /// Arguments that are not options.
    pub plain: Vec<OsString>,
    /// True to print JSON, for programs.
    pub json: bool,
    /// Settings file given on the command line.
    pub settings: Option<PathBuf>,
}

/// Parses a command line with at most `most` arguments that are not options.
///
/// # Errors
/// A message for people.
pub fn read(words: &[OsString], most: usize) -> Result<Words, String> {
    let mut parser = lexopt::Parser::from_args(words);
    let told = |error: lexopt::Error| error.to_string();
    let mut found = Words::default();
    while let Some(argument) = parser.next().map_err(told)? {
        match argument {
            Arg::Long("settings") => found.settings = Some(PathBuf::from(parser.value().map_err(told)?)),
            Arg::Short('o') | Arg::Long("output") => match parser.value().map_err(told)?.to_str() {
                Some("json") => found.json = true,
                Some("table") => found.json = false,
                _ => return Err("the output must be table or json".to_owned()),
            },
            Arg::Value(word) if found.plain.len() < most => found.plain.push(word),
            argument => return Err(argument.unexpected().to_string()),
        }
    }
    Ok(found)
}
