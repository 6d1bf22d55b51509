//! Receipts that are not filed yet: a directory beside the marker of a freeze. A process that thaws in place of
//! the agent puts its receipt there as well.

use std::io;
use std::path::{Path, PathBuf};

use crate::receipt::{Receipt, is_id};
use crate::sys::files;

const NAME: &str = "guestlet.receipts";
/// Limit on the waiting receipts; there are never more freezes between two attempts to file them.
const MOST: usize = 64;
/// Size limit of a receipt in bytes, before it is cut to its final size.
const MOST_BYTES: u64 = 1 << 20;

fn directory(folder: &Path) -> PathBuf {
    folder.join(NAME)
}

fn path(folder: &Path, id: &str) -> PathBuf {
    directory(folder).join(id)
}

/// Writes a receipt to the tray. When this returns, it outlasts this process.
///
/// # Errors
/// The errors of mkdir(2), open(2), write(2), fsync(2) and rename(2); also if there are too many.
pub fn put(folder: &Path, receipt: &Receipt) -> io::Result<()> {
    let directory = directory(folder);
    super::cabinet::make(&directory)?;
    if !path(folder, &receipt.id).exists() && ids(folder).len() >= MOST {
        return Err(io::Error::other(format!("{MOST} receipts are already waiting to be written to disk")));
    }
    let text = serde_json::to_vec(receipt).map_err(io::Error::other)?;
    files::replace_synced(&path(folder, &receipt.id), &text)
}

/// Returns the IDs of the waiting receipts.
pub fn ids(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(directory(folder)).into_iter().flatten().flatten();
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    names.filter(|name| is_id(name)).take(MOST).collect()
}

/// Reads the receipt with this ID. Returns none if it does not exist or is unreadable; an unreadable one is
/// removed.
pub fn get(folder: &Path, id: &str) -> Option<Receipt> {
    let path = path(folder, id);
    let bytes = match files::read_at_most(&path, MOST_BYTES) {
        Ok(bytes) => bytes?,
        Err(error) => {
            tracing::warn!("cannot read the receipt {}: {error}", path.display());
            Vec::new()
        }
    };
    let receipt = serde_json::from_slice::<Receipt>(&bytes).ok().filter(|receipt| receipt.id == id);
    if receipt.is_none() {
        tracing::warn!("{} is not a receipt, and is removed", path.display());
        remove(folder, id);
    }
    receipt
}

/// Removes the receipt with this ID, as it has been filed.
pub fn remove(folder: &Path, id: &str) {
    files::remove(&path(folder, id));
}

#[cfg(test)]
#[allow(clippy::disallowed_methods)]
mod tests {
    use super::*;

    #[test]
    fn what_is_put_there_is_found_and_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let receipt = |number: u32| Receipt { id: format!("{number:032x}"), ..Receipt::default() };
        assert!(ids(folder.path()).is_empty());
        for number in 0..64 {
            put(folder.path(), &receipt(number)).unwrap();
        }
        assert_eq!(ids(folder.path()).len(), MOST);
        let full = put(folder.path(), &receipt(64)).unwrap_err().to_string();
        assert!(full.contains("64 receipts are already waiting"), "{full}");
        assert_eq!(get(folder.path(), &receipt(7).id), Some(receipt(7)));
        remove(folder.path(), &receipt(7).id);
        assert_eq!(ids(folder.path()).len(), MOST - 1);
        std::fs::write(path(folder.path(), &receipt(8).id), "{").unwrap();
        std::fs::write(directory(folder.path()).join("other"), "{").unwrap();
        assert_eq!(get(folder.path(), &receipt(8).id), None);
        assert_eq!(ids(folder.path()).len(), MOST - 2);
    }
}
