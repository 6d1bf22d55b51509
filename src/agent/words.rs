//! The words after a verb of `guestlet` that people give to an agent, or to what one has left.

use std::ffi::OsString;
use std::path::PathBuf;

use lexopt::Arg;

/// What was said, but for the options that all have.
#[derive(Debug, Default)]
pub struct Words {
    /// What is no option.
    pub plain: Vec<OsString>,
    /// The output is for programs.
    pub json: bool,
    /// The settings file that was named.
    pub settings: Option<PathBuf>,
}

/// Reads them; at most so many may be no options.
///
/// # Errors
/// In words for people.
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
