//! What the agent and the process of an application tell each other: one JSON document a line, each bounded.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::problem::bounded;
use super::{Held, MOST_DIRECTORIES, MOST_POSITIONS, MOST_TEXT, Positions, Problem};

/// The longest line, in bytes.
pub const MOST_LINE: usize = 64 * 1024;

/// What the agent asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Request {
    /// Prepare and hold, within so many milliseconds.
    Hold(u64),
    /// Release, within so many milliseconds.
    Release(u64),
}

/// A directory with data of a database.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Directory {
    /// With all links followed.
    pub path: PathBuf,
    /// The mount that it is on, as /proc/self/mountinfo numbers it.
    pub mount: u64,
}

/// What the process answers, or says by itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Answer {
    /// The application is held.
    Held {
        /// The server's version.
        version: String,
        /// Where it is.
        positions: BTreeMap<String, String>,
        /// Where its data are.
        directories: Vec<Directory>,
    },
    /// It was released.
    Released(BTreeMap<String, String>),
    /// What was asked for could not be done; or, by itself, the session is gone.
    Failed(String),
}

impl Answer {
    /// Of what an application says, cut to what a line has room for.
    pub fn held(held: Held, directories: Vec<Directory>) -> Self {
        let version = bounded(&held.version, MOST_TEXT);
        Self::Held { version, positions: texts(held.positions), directories }
    }

    /// Of what it says at the end.
    pub fn released(positions: Positions) -> Self {
        Self::Released(texts(positions))
    }

    /// A line that came from a process that runs as somebody else, bounded once more.
    ///
    /// # Errors
    /// If it is no such document.
    pub fn parse(line: &[u8]) -> Result<Self, Problem> {
        let wrong = |why| Problem::new(format_args!("its process sent an unexpected answer: {why}"));
        match serde_json::from_slice::<Self>(line).map_err(|error| wrong(error.to_string()))? {
            Self::Held { directories, .. } if directories.len() > MOST_DIRECTORIES => {
                Err(wrong(format!("more than {MOST_DIRECTORIES} directories")))
            }
            Self::Held { version, positions, directories } => Ok(Self::Held {
                version: bounded(&version, MOST_TEXT),
                positions: texts(positions),
                directories,
            }),
            Self::Released(positions) => Ok(Self::Released(texts(positions))),
            Self::Failed(words) => Ok(Self::Failed(Problem::new(words).to_string())),
        }
    }
}

fn texts(positions: BTreeMap<impl AsRef<str>, String>) -> BTreeMap<String, String> {
    let entries = positions.into_iter().take(MOST_POSITIONS);
    entries.map(|(name, text)| (bounded(name.as_ref(), MOST_TEXT), bounded(&text, MOST_TEXT))).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn lines_are_as_they_are_documented() {
        assert_eq!(serde_json::to_string(&Request::Hold(5)).unwrap(), r#"{"hold":5}"#);
        let held = Held {
            version: "15.4".to_owned(),
            positions: Positions::from([("lsn", "0/1".to_owned())]),
            directories: Vec::new(),
        };
        let directory = Directory { path: "/data".into(), mount: 7 };
        let answer = Answer::held(held, vec![directory]);
        let line = serde_json::to_string(&answer).unwrap();
        assert_eq!(
            line,
            r#"{"held":{"version":"15.4","positions":{"lsn":"0/1"},"directories":[{"path":"/data","mount":7}]}}"#
        );
        assert_eq!(Answer::parse(line.as_bytes()).unwrap(), answer);
        for wrong in ["", "{}", r#"{"held":{}}"#, r#"{"failed":1}"#, r#"{"failed":"a"}{"failed":"b"}"#] {
            assert!(Answer::parse(wrong.as_bytes()).is_err(), "{wrong}");
        }
    }

    proptest! {
        #[test]
        fn whatever_comes_is_bounded(bytes: Vec<u8>, text in "\\PC{0,2000}") {
            let _ = Answer::parse(&bytes);
            let line = serde_json::to_string(&Answer::Failed(text)).unwrap();
            let Ok(Answer::Failed(words)) = Answer::parse(line.as_bytes()) else { panic!("{line}") };
            prop_assert!(words.len() <= 512);
        }
    }
}
