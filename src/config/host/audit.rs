//! The `[audit]` table: destinations of the audit records other than the journal.

use std::path::PathBuf;

use serde::Deserialize;
use toml::Spanned;

use super::super::Error;
use super::Source;

/// Settings of the audit log, checked.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AuditSettings {
    /// File for the records, one line of JSON each; none: the journal only.
    pub file: Option<PathBuf>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub(super) struct AuditFragment {
    file: Option<Spanned<PathBuf>>,
}

/// Merges the settings of this fragment into `audit`.
pub(super) fn check(source: &Source, found: &AuditFragment, audit: &mut AuditSettings) -> Result<(), Error> {
    if let Some(file) = &found.file {
        audit.file = Some(source.absolute("audit.file", file)?);
    }
    Ok(())
}
