//! Messages between the agent and the process of an application: one JSON document per line, each of bounded
//! length.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::problem::bounded;
use super::{Held, MOST_DIRECTORIES, MOST_POSITIONS, MOST_TEXT, Positions, Problem};

/// Maximum length of a line in bytes.
pub const MOST_LINE: usize = 64 * 1024;

/// Request of the agent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Request {
    /// Prepare and hold, within this number of milliseconds.
    Hold(u64),
    /// Release, within this number of milliseconds.
    Release(u64),
}

/// Directory with data of a database.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Directory {
    /// Path with all links followed.
    pub path: PathBuf,
    /// ID of its mount, as in /proc/self/mountinfo.
    pub mount: u64,
}

/// Answer of the process to a request, or a report that it sends by itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Answer {
    /// The application is held.
    Held {
        /// Version of the server.
        version: String,
        /// Position of the database in its log, by name.
        positions: BTreeMap<String, String>,
        /// Directories that hold its data.
        directories: Vec<Directory>,
    },
    /// The application was released; with its positions at that time.
    Released(BTreeMap<String, String>),
    /// The request failed; or, without a request, the session that was held has ended.
    Failed(String),
}

impl Answer {
    /// Builds the answer to a hold; long texts are cut to fit into a line.
    pub fn held(held: Held, directories: Vec<Directory>) -> Self {
        let version = bounded(&held.version, MOST_TEXT);
        Self::Held { version, positions: texts(held.positions), directories }
    }

    /// Builds the answer to a release.
    pub fn released(positions: Positions) -> Self {
        Self::Released(texts(positions))
    }

    /// Parses a line from the process of the application, which runs as another user; long texts are cut again.
    ///
    /// # Errors
    /// If the line is not such a document.
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
