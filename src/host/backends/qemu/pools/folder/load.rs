//! Reads a pool's directory, and finishes interrupted operations in it.

use std::io;

use super::super::identity;
use super::super::record::{Damaged, Record, Stage};
use super::{Entry, FORMATS, Folder, LONGEST_RECORD, Loaded, image_name};

impl Folder {
    /// Reads all records, and finishes what earlier processes left unfinished.
    ///
    /// # Errors
    /// If the directory cannot be read. A problem with a single record is stored in its place.
    pub fn load(&self) -> io::Result<Loaded> {
        let mut loaded = Loaded { removed: self.removed()?, ..Loaded::default() };
        let (mut unfinished, mut images) = (Vec::new(), Vec::new());
        for name in self.directory.names()? {
            let Some((serial, ending)) = name.to_str().and_then(|name| name.split_once('.')) else {
                continue;
            };
            if !identity::is_serial(serial) {
                continue;
            }
            match ending {
                "json" => match self.look(serial) {
                    Some(Ok(record)) => drop(loaded.records.insert(serial.to_owned(), record)),
                    Some(Err(damaged)) => drop(loaded.damaged.insert(serial.to_owned(), damaged)),
                    None => {}
                },
                "json.new" | "raw.new" | "qcow2.new" => {
                    unfinished.push((serial.to_owned(), ending.to_owned()));
                }
                _ if FORMATS.iter().any(|format| format.name() == ending) => images.push(serial.to_owned()),
                _ => {}
            }
        }
        for serial in images {
            if !loaded.records.contains_key(&serial)
                && let Some(Err(damaged)) = self.look(&serial)
            {
                loaded.damaged.insert(serial, damaged);
            }
        }
        for (serial, ending) in unfinished {
            self.finish(&loaded, &serial, &ending)?;
        }
        let unfinished: Vec<_> = loaded
            .records
            .iter()
            .filter(|(_, record)| record.stage != Stage::Ready)
            .map(|(serial, record)| (serial.clone(), record.clone()))
            .collect();
        for (serial, record) in unfinished {
            match self
                .bury(&mut loaded.removed, &record)
                .and_then(|()| self.claim(&serial))
                .and_then(|claims| self.clear(&serial, claims))
            {
                Ok(()) => drop(loaded.records.remove(&serial)),
                Err(error) => {
                    tracing::warn!(pool = %self.path.display(), serial, %error, "cannot remove the remains of a volume");
                }
            }
        }
        Ok(loaded)
    }

    /// Completes or removes an unfinished file. If the volume has a record, its image is complete and only needs to
    /// be renamed; a volume without a record was never reported to a client.
    fn finish(&self, loaded: &Loaded, serial: &str, ending: &str) -> io::Result<()> {
        let name = format!("{serial}.{ending}");
        let format = FORMATS.into_iter().find(|format| format!("{}.new", format.name()) == ending);
        if let Some(format) = format {
            if loaded.damaged.contains_key(serial) {
                return Ok(());
            }
            let image = image_name(serial, format);
            if let Some(record) = loaded.records.get(serial)
                && (record.stage, record.format()) == (Stage::Ready, format)
                && self.directory.entry(&image)? == Entry::Nothing
            {
                self.directory.rename(&name, &image)?;
                return self.directory.sync();
            }
        }
        self.directory.remove(&name).map(drop)
    }

    /// Reads the record of a volume; `None` if there is neither a record nor an image. An image is never created or
    /// removed without its record, so an image without one belongs to a volume whose record was lost.
    pub fn look(&self, serial: &str) -> Option<Result<Record, Damaged>> {
        let name = format!("{serial}.json");
        match self.directory.read(&name, LONGEST_RECORD) {
            Ok(None) => {
                let problem = self.image_without_record(serial)?;
                Some(Err(Damaged::read(&[], problem)))
            }
            Ok(Some(bytes)) => {
                Some(self.decode(serial, &bytes).map_err(|problem| Damaged::read(&bytes, problem)))
            }
            Err(error) => Some(Err(Damaged::read(&[], error.to_string()))),
        }
    }

    /// Describes the problem of a volume that has an image but no record; `None` if there is no image.
    fn image_without_record(&self, serial: &str) -> Option<String> {
        let found =
            FORMATS.into_iter().map(|format| image_name(serial, format)).find_map(|image| {
                match self.directory.entry(&image) {
                    Ok(Entry::Nothing) => None,
                    Ok(_) => Some(format!("it is missing, but its image {image} exists")),
                    Err(error) => {
                        Some(format!("it is missing, and its image {image} cannot be examined: {error}"))
                    }
                }
            })?;
        Some(format!(
            "{found}; restore the record from a copy, or, if nobody needs the contents of the image, move \
             that out of the directory"
        ))
    }

    fn decode(&self, serial: &str, bytes: &[u8]) -> Result<Record, String> {
        let record = Record::decode(bytes)?;
        match identity::parse(&record.id) {
            Some(parts) if parts.serial != serial => Err(format!("it is of another volume, {:?}", record.id)),
            Some(parts) if parts.uuid.is_none_or(|uuid| uuid == self.uuid) => Ok(record),
            Some(_) => Err(format!("it is of another pool's volume, {:?}", record.id)),
            None => Err(format!("it is of another volume, {:?}", record.id)),
        }
    }
}
