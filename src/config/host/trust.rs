//! The `[trust]` table: locations of the keys of guests and of this host half.

use std::path::PathBuf;

use serde::Deserialize;
use toml::Spanned;

use super::super::Error;
use super::Source;

/// Default directory of the keys.
const FOLDER: &str = "/var/lib/guestlet-host/trust";

/// Locations of the keys, checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TrustSettings {
    /// Directory of the records of guests' keys, and of the host half's own key.
    pub folder: PathBuf,
    /// Private key of the host half, if it is not in `folder`.
    pub key: Option<PathBuf>,
    /// Certificate for the key from a CA, followed by the CA's own.
    pub certificate: Option<PathBuf>,
}

impl Default for TrustSettings {
    fn default() -> Self {
        Self { folder: FOLDER.into(), key: None, certificate: None }
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct TrustFragment {
    state_dir: Option<Spanned<PathBuf>>,
    key: Option<Spanned<PathBuf>>,
    certificate: Option<Spanned<PathBuf>>,
}

pub fn check(source: &Source, found: &TrustFragment, settings: &mut TrustSettings) -> Result<(), Error> {
    if let Some(path) = &found.state_dir {
        settings.folder = source.absolute("trust.state-dir", path)?;
    }
    if let Some(path) = &found.key {
        settings.key = Some(source.absolute("trust.key", path)?);
    }
    if let Some(path) = &found.certificate {
        settings.certificate = Some(source.absolute("trust.certificate", path)?);
    }
    Ok(())
}
