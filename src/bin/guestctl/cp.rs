//! `guestctl cp`.

use clap::Args;
use clap::builder::{OsStringValueParser, TypedValueParser as _};
use guestlet::ctl::Verb;
use guestlet::ctl::cp::{Job, Options, Place};

/// What is copied, and how.
#[derive(Debug, Args)]
#[allow(clippy::struct_excessive_bools, reason = "flags of a command line")]
pub struct Cp {
    /// Sources, followed by the destination: VM:PATH in a guest, PATH here, - for standard input or output
    #[arg(required = true, num_args = 2.., value_name = "FILE", value_parser = OsStringValueParser::new().try_map(Place::parse))]
    files: Vec<Place>,
    /// Copy directories recursively
    #[arg(short, long)]
    recursive: bool,
    /// Preserve owner, group, mode and modification time
    #[arg(short, long)]
    preserve: bool,
    /// Copy user extended attributes and access control lists
    #[arg(long)]
    xattrs: bool,
    /// Do not replace existing files
    #[arg(long)]
    no_clobber: bool,
    /// Do not show progress
    #[arg(long)]
    no_progress: bool,
    /// Show nothing but errors
    #[arg(short, long)]
    quiet: bool,
}

impl From<Cp> for Verb {
    fn from(cp: Cp) -> Self {
        let Cp { mut files, recursive, preserve, xattrs, no_clobber, no_progress, quiet } = cp;
        // clap sees to it that there are two.
        let destination = files.pop().unwrap_or(Place::Standard);
        let options =
            Options { recursive, preserve, attributes: xattrs, keep: no_clobber, no_progress, quiet };
        Self::Copy(Job { sources: files, destination, options })
    }
}
