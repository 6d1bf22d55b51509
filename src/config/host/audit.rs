//! The `[audit]` table: where else than in the journal it is written down who did what.

use std::path::PathBuf;

use serde::Deserialize;
use toml::Spanned;

use super::super::Error;
use super::Source;

/// What is written down, checked.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AuditSettings {
    /// The file of the records, one line of JSON each; none: the journal alone.
    pub file: Option<PathBuf>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub(super) struct AuditFragment {
    file: Option<Spanned<PathBuf>>,
}

/// Takes what this fragment sets.
pub(super) fn check(source: &Source, found: &AuditFragment, audit: &mut AuditSettings) -> Result<(), Error> {
    if let Some(file) = &found.file {
        audit.file = Some(source.absolute("audit.file", file)?);
    }
    Ok(())
}
