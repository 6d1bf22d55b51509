//! Identifies the pool in a directory: by the UUID stored there or, unless the path had another pool before, by
//! a new one.

use std::fs::File;
use std::io::{self, Read as _};
use std::path::Path;

use super::super::identity;
use super::super::marker::Marker;
use super::super::register::Expected;
use super::{Folder, LONGEST_RECORD, MARKER};

impl Folder {
    /// Returns the UUID of the directory, and assigns one if it has none and no pool was at its path before.
    pub(super) fn identify(&self, expected: Option<&Expected>) -> io::Result<String> {
        let wrong = |problem: String| io::Error::other(format!("{MARKER} in it cannot be used: {problem}"));
        if let Some(bytes) =
            self.directory.read(MARKER, LONGEST_RECORD).map_err(|error| wrong(error.to_string()))?
        {
            let found = Marker::decode(&bytes).map_err(wrong)?.uuid;
            return match expected {
                Some(Expected { uuid, advice }) if *uuid != found => Err(io::Error::other(format!(
                    "the pool {found} is at its path, but the pool {uuid} was there before; {advice}"
                ))),
                _ => Ok(found),
            };
        }
        if let Some(uuid) = self.uuid_of_volumes()? {
            let line = Marker::new(uuid).encode()?;
            return Err(io::Error::other(format!(
                "{MARKER} in it is missing, but it has volumes of a pool that had one; if this is that pool \
                 and no copy of it, write {line} to {}",
                self.path.join(MARKER).display()
            )));
        }
        if let Some(expected) = expected {
            return Err(not_it(&self.path, expected));
        }
        let mut bytes = [0; 16];
        File::open("/dev/urandom")?.read_exact(&mut bytes)?;
        let marker = Marker::new(format!("{:032x}", u128::from_be_bytes(bytes)));
        self.steps.step(|| {})?;
        self.replace(MARKER, format!("{}\n", marker.encode()?).as_bytes())?;
        self.directory.sync()?;
        self.steps.step(|| {})?;
        Ok(marker.uuid)
    }

    /// Returns a pool UUID found in the identifiers of the directory's volumes.
    fn uuid_of_volumes(&self) -> io::Result<Option<String>> {
        for name in self.directory.names()? {
            let Some((serial, "json")) = name.to_str().and_then(|name| name.split_once('.')) else {
                continue;
            };
            let id = match self.look(serial) {
                Some(Ok(record)) => Some(record.id),
                Some(Err(damaged)) => damaged.id,
                None => None,
            };
            if let Some(uuid) = id.as_deref().and_then(identity::parse).and_then(|parts| parts.uuid) {
                return Ok(Some(uuid.to_owned()));
            }
        }
        Ok(None)
    }
}

/// Returns the error for a directory that is not marked as the pool that was at this path before.
pub(super) fn not_it(path: &Path, expected: &Expected) -> io::Error {
    let Expected { uuid, advice } = expected;
    let marker = path.join(MARKER);
    let line = Marker::new(uuid.clone()).encode().unwrap_or_default();
    io::Error::other(format!(
        "it has no {MARKER}, and the pool {uuid} was at its path before; {advice}; or, if it is that pool and no copy of it, and \
         {MARKER} was lost, write {line} to {}",
        marker.display()
    ))
}
