//! An error with everything that it came from, in one line.

use std::error::Error;

/// The message of `error`, then those of its sources, separated by colons.
pub fn words(error: &dyn Error) -> String {
    let mut words = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        words.push_str(": ");
        words.push_str(&error.to_string());
        source = error.source();
    }
    words
}
