//! `[trust]`: the keys of guests and of this host half.

use std::path::PathBuf;

use serde::Deserialize;
use toml::Spanned;

use super::super::Error;
use super::Source;

/// Where keys are unless told otherwise.
const FOLDER: &str = "/var/lib/guestlet-host/trust";

/// Where keys are, checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TrustSettings {
    /// The directory of what is remembered of guests' keys, and of the host half's own.
    pub folder: PathBuf,
    /// Its own private key, if it is elsewhere.
    pub key: Option<PathBuf>,
    /// A CA's certificate for that, followed by the CA's own.
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
