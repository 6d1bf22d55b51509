//! Identity of a pool's directory: the file `.pool` in it. Pure.

use serde::{Deserialize, Serialize};

use super::identity;

/// Version of the format that this program writes, and the newest one that it can read.
const VERSION: u32 = 1;

/// Contents of the file.
#[derive(Debug, Serialize, Deserialize)]
pub struct Marker {
    version: u32,
    /// Oldest format version whose programs may use the pool.
    readers: u32,
    /// UUID in 32 hexadecimal digits; part of the identifiers of the pool's volumes.
    pub uuid: String,
}

impl Marker {
    /// Creates the marker of a pool with this UUID.
    pub fn new(uuid: String) -> Self {
        Self { version: VERSION, readers: VERSION, uuid }
    }

    /// Serializes the marker to one line.
    ///
    /// # Errors
    /// Cannot occur in practice: all fields can be written as JSON.
    pub fn encode(&self) -> serde_json::Result<String> {
        serde_json::to_string(self)
    }

    /// Parses a stored marker.
    ///
    /// # Errors
    /// If it cannot be parsed, or only newer programs may use it; the text says why.
    pub fn decode(bytes: &[u8]) -> Result<Self, String> {
        let marker: Self = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
        if marker.readers > VERSION {
            return Err(format!(
                "it needs a program that supports version {}, but this one supports {VERSION}; run a newer guestlet-host",
                marker.readers
            ));
        }
        if !identity::is_uuid(&marker.uuid) {
            return Err(format!("{:?} is not a UUID of 32 hexadecimal digits", marker.uuid));
        }
        Ok(marker)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_stays_readable() {
        let kept = r#"{"version":1,"readers":1,"uuid":"0f1e2d3c4b5a69788796a5b4c3d2e1f0"}"#;
        let marker = Marker::decode(kept.as_bytes()).unwrap();
        assert_eq!(marker.encode().unwrap(), kept);
        for (wrong, words) in [
            (kept.replace("\"readers\":1", "\"readers\":2"), "that supports version 2"),
            (kept.replace("0f1e", ""), "is not a UUID of 32 hexadecimal digits"),
            ("{".to_owned(), "EOF"),
        ] {
            let problem = Marker::decode(wrong.as_bytes()).unwrap_err();
            assert!(problem.contains(words), "{problem}");
        }
        // A newer format that permits this program to use it.
        Marker::decode(kept.replace("\"version\":1", "\"version\":2,\"more\":0").as_bytes()).unwrap();
    }
}
